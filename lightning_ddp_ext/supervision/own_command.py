"""Find the command that started this process, to run it again for another rank."""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from typing import NamedTuple

# An option of the interpreter: flags, perhaps with a value, which may be the next word.
_OPTION = re.compile(r"-[abd-ln-zA-VYZ?]*(?P<last>[cmWX]?)(?P<value>.*)")


class Command(NamedTuple):
    """A command, and the directory in which it was started, if known."""

    words: list[str]
    directory: str | None


def _current_directory() -> str | None:
    with suppress(OSError):  # it has been removed
        return os.getcwd()
    return None


# A script usually imports this package before it changes the directory.
_directory = _current_directory()


def own_command() -> Command | None:
    """Return this process's command, with the interpreter's options and all arguments.

    The script may have changed ``sys.argv`` and the directory. Return ``None`` if the
    command does not name the running program, because a debugger or another tool runs
    it, or if Python would stay interactive after it.
    """
    module, program = _program_of(sys.orig_argv)
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None) or ""
    words = [sys.executable, *sys.orig_argv[1:]]
    if sys.flags.inspect or not (module or program):
        return None
    if module:
        name = main.__spec__.name if main.__spec__ is not None else ""
        return Command(words, _directory) if name.removesuffix(".__main__") == module else None
    # Python also runs the ``__main__.py`` of a directory.
    for path in (file, os.path.dirname(file)):
        if path == program:
            return Command(words, _directory)
        if path.endswith(os.sep + program):
            return Command(words, path.removesuffix(program))
    return None


def _program_of(words: list[str]) -> tuple[str, str]:
    """Return the module that ``-m`` names, and the script; one or both are empty.

    >>> _program_of(["python", "-X", "dev", "-Wignore", "train.py", "-m", "x"])
    ('', 'train.py')
    >>> _program_of(["python", "-Om", "pkg"])
    ('pkg', '')
    >>> _program_of(["python", "-c", "print()"])
    ('', '')
    """
    rest = iter(words[1:])
    for word in rest:
        option = _OPTION.fullmatch(word)
        if option is None or word == "-":
            return "", word
        value = (option["value"] or next(rest, "")) if option["last"] else ""
        if option["last"] in ("c", "m"):
            return (value, "") if option["last"] == "m" else ("", "")
    return "", ""
