"""An init method is parsed once, and a wrong one is refused with field, rule, value and
remedy.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_ddp_ext.errors import ConfigurationError
from lightning_ddp_ext.rendezvous.init_method import (
    Env,
    File,
    InitMethod,
    Tcp,
    check_file,
    choose,
    parse,
)

FORMS = "env://, tcp://host:29500 or file:///shared/run42"
TCP_FORM = "must be tcp://HOST:PORT, with brackets around an IPv6 address"
TCP_FORMS = "tcp://10.0.0.1:29500 or tcp://[::1]:29500"
PATH_FORM = "needs the absolute path of a file, without '?' or NUL"
PATH_REMEDY = "write file:///shared/run42"

names = st.from_regex(r"[a-z0-9]([a-z0-9.-]{0,20}[a-z0-9])?", fullmatch=True)
hosts = (
    names | st.ip_addresses(v=4).map(str) | st.ip_addresses(v=6).map(str) | st.just("fe80::1%eth0")
)
tcps = st.builds(Tcp, hosts, st.integers(1, 65535))
path_text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="?\0"), min_size=1)
files = path_text.filter(lambda text: not text.endswith("/")).map(lambda text: File("/" + text))
near_misses = st.builds(
    str.__add__,
    st.sampled_from(["tcp://", "tcp://[", "file:", "file://", "env://"]),
    st.text("h1:[]/?=.% \0\u0663", max_size=12),
)


def refusal(function: Callable[..., object], *args: Any, **options: Any) -> str:
    """Return the message for a value that is refused."""
    with pytest.raises(ConfigurationError) as refused:
        function(*args, **options)
    return str(refused.value)


@given(st.just(Env()) | tcps | files)
def test_a_value_is_written_as_the_url_that_makes_it(method: InitMethod) -> None:
    """The logged text is valid as an argument."""
    assert parse(str(method)) == method
    assert parse(method) is method


@given(st.text() | near_misses)
def test_any_text_is_parsed_or_refused_in_our_own_words(text: str) -> None:
    """No text raises anything but a ConfigurationError that begins with the field and
    the value.
    """
    try:
        outcome = f"DDPX_INIT_METHOD {text!r} is {parse(text, field='DDPX_INIT_METHOD')}"
    except ConfigurationError as error:
        outcome = str(error)
    assert outcome.startswith(f"DDPX_INIT_METHOD {text!r} ")
    assert not outcome.endswith("None")


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("", f"needs a scheme (got none); write {FORMS}"),
        ("/shared/run42", "needs a scheme (got none); write file:///shared/run42"),
        ("tpc://host:1", f"has an unknown scheme (got 'tpc://'); write {FORMS}"),
        ("tcp://::1:29500", f"{TCP_FORM} (got '::1:29500' after tcp://); write {TCP_FORMS}"),
        ("tcp://host", "needs a port (got none); write tcp://host:29500"),
        ("tcp://host:70000", "needs a port in 1..65535 (got 70000); write tcp://host:29500"),
        (
            "tcp://host:1?rank=0",
            "needs a port in 1..65535 (got '1?rank=0'); write tcp://host:29500",
        ),
        ("env://host", "takes nothing after env:// (got 'host'); write env://"),
        ("file://localhost/run", f"{PATH_FORM} (got 'localhost/run'); {PATH_REMEDY}"),
        ("file:///shared/", f"{PATH_FORM} (got '/shared/'); {PATH_REMEDY}"),
    ],
)
def test_malformed_urls_are_refused(url: str, expected: str) -> None:
    """Each mistake names the field, the whole URL, what is wrong in it, and the URL to
    write instead.
    """
    assert refusal(parse, url) == f"init_method {url!r} {expected}"


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (
            lambda: parse(29500, field="DDPX_INIT_METHOD"),  # type: ignore[arg-type]
            (
                "DDPX_INIT_METHOD must be a URL, Env(), Tcp(host, port) or File(path) (got 29500,"
                f" of type int); write {FORMS}"
            ),
        ),
        (
            lambda: Tcp("[::1]", 1),
            (
                "Tcp('[::1]', 1) needs a bare host name or address (got '[::1]'); write"
                " Tcp('10.0.0.1', 29500)"
            ),
        ),
        (
            lambda: Tcp("h", True),
            "Tcp('h', True) needs a port in 1..65535 (got True); write Tcp('h', 29500)",
        ),
        (lambda: File("/a?b"), f"File('/a?b') {PATH_FORM} (got '/a?b'); {PATH_REMEDY}"),
        (
            lambda: choose("file:///a", {"DDPX_INIT_METHOD": "tcp://h:1"}),
            (
                "init_method must agree with DDPX_INIT_METHOD (got 'file:///a' and 'tcp://h:1');"
                " remove one of them"
            ),
        ),
    ],
)
def test_wrong_values_are_refused(make: Callable[[], object], expected: str) -> None:
    """The same rules apply to objects, to URLs and to the variable."""
    assert refusal(make) == expected


@pytest.mark.parametrize(("path", "missing"), [("a/b/run", "a/b"), ("file/run", "file")])
def test_a_missing_directory_is_refused(tmp_path: Path, path: str, missing: str) -> None:
    """The directory and the command that makes it are named, also where a file is in
    its place.
    """
    (tmp_path / "file").touch()
    directory = f"{tmp_path}/{missing}"
    assert (
        refusal(check_file, File(f"{tmp_path}/{path}"), num_nodes=1)
        == f"init_method 'file://{tmp_path}/{path}' needs an existing directory that this user can"
        f" write to (got '{directory}'); create it (mkdir -p {directory}), make it writable"
        f" (chmod u+wx {directory}), or use another path"
    )


def test_what_this_user_cannot_write_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory, another user's file in a writable one, or a pipe, which would block."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").touch()
    # The kernel refuses root nothing but a read-only file system, so the answer is
    # ours.
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) not in (f"{tmp_path}/file", "/"))
    (tmp_path / "directory").mkdir()
    for name in ("pipe", "file", "directory"):
        assert (
            refusal(check_file, File(f"{tmp_path}/{name}"), num_nodes=1)
            == f"init_method 'file://{tmp_path}/{name}' needs a new file, or a regular file that"
            f" this user can read and write (got '{tmp_path}/{name}'); remove it, or use another"
            " path"
        )
    assert "directory that this user can write to (got '/')" in refusal(
        check_file, File("/run42"), num_nodes=1
    )


def test_several_nodes_do_not_share_a_temporary_directory(
    shared_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TMPDIR and links to it are refused as well; a new file, and one that an earlier
    run left, are accepted.
    """
    monkeypatch.setattr(tempfile, "tempdir", f"{shared_dir}/local")
    for name in ("local", "localised"):
        (shared_dir / name).mkdir()
    (shared_dir / "link").symlink_to(shared_dir / "local")
    for directory in ("/tmp", "/var/tmp", "/dev/shm", "/run/user", f"{shared_dir}/link"):
        found = refusal(check_file, File(f"{directory}/run42"), num_nodes=2)
        begins = (
            f"init_method 'file://{directory}/run42' needs a directory that all 2 nodes share"
            " (got '"
        )
        assert found.startswith(begins)
        assert found.endswith(
            "is local to each node); use a path on a shared file system, or tcp://host:29500"
        )
    (shared_dir / "existing").touch()
    for name in ("run", "existing", "localised/run"):
        check_file(File(f"{shared_dir}/{name}"), num_nodes=1)
        check_file(File(f"{shared_dir}/{name}"), num_nodes=2)
