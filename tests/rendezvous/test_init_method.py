"""Each form of an init method is parsed, and any other value is refused."""

import os
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

RULE = "must be env://, tcp://HOST:PORT or file:///PATH"
REMEDY = (
    "write env://, tcp://10.0.0.1:29500, tcp://[::1]:29500 or file:///shared/run42, with a port in"
    " 1..65535 and a path without '?'"
)

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
def test_the_text_of_an_init_method_is_a_valid_url_of_it(method: InitMethod) -> None:
    """A user can copy the logged text into an argument."""
    assert parse(str(method)) == method
    assert parse(method) is method


@given(st.text() | near_misses)
def test_any_text_is_parsed_or_refused_with_field_and_value(text: str) -> None:
    """The only exception is a ConfigurationError."""
    try:
        parsed = parse(text)
    except ConfigurationError as error:
        message = str(error)
    else:
        assert isinstance(parsed, Env | Tcp | File)
        return
    assert message.startswith("init_method ")
    assert repr(text) in message


@pytest.mark.parametrize(
    "url",
    [
        "",
        "/shared/run42",
        "tpc://host:1",
        "tcp://::1:29500",
        "tcp://host:70000",
        "tcp://host:0",
        "tcp://host:1?rank=0",
        "env://host",
        "file://localhost/run",
        "file:///shared/",
        "file:///shared/run?rank=0",
        29500,
    ],
)
def test_a_malformed_url_is_refused(url: Any) -> None:
    """The message names the field, the rule and the whole URL, and shows each form."""
    assert refusal(parse, url) == f"init_method {RULE} (got {url!r}); {REMEDY}"


@pytest.mark.parametrize("host", ["host", "10.0.0.1", "[::1]"])
def test_a_missing_port_is_named(host: str) -> None:
    """The most frequent mistake has its own message, with the URL to write instead."""
    for url in (f"tcp://{host}", f"tcp://{host}:", f"tcp://{host}/"):
        expected = f"init_method {url!r} needs a port (got none); write tcp://{host}:29500"
        assert refusal(parse, url) == expected


@pytest.mark.parametrize(
    ("make", "shown"),
    [
        (lambda: Tcp("[::1]", 1), "Tcp(host='[::1]', port=1)"),
        (lambda: Tcp("h", True), "Tcp(host='h', port=True)"),
        (lambda: Tcp("h", 65536), "Tcp(host='h', port=65536)"),
        (lambda: File("a/b"), "File(path='a/b')"),
        (lambda: File("/a?b"), "File(path='/a?b')"),
    ],
)
def test_a_malformed_object_is_refused(make: Callable[[], object], shown: str) -> None:
    """The rules for URLs also apply to ``Tcp`` and ``File``."""
    assert refusal(make) == f"init_method {RULE} (got {shown}); {REMEDY}"


def test_an_argument_that_contradicts_the_variable_is_refused() -> None:
    """The message shows both."""
    assert refusal(choose, "file:///a", {"DDPX_INIT_METHOD": "tcp://h:1"}) == (
        "init_method must agree with DDPX_INIT_METHOD (got 'file:///a' and 'tcp://h:1'); remove one"
        " of them"
    )


@pytest.mark.parametrize(("path", "missing"), [("a/b/run", "a/b"), ("file/run", "file")])
def test_a_missing_directory_is_refused(tmp_path: Path, path: str, missing: str) -> None:
    """The error names the directory, and commands that make it usable.

    In the second case, a file has the name of the directory.
    """
    (tmp_path / "file").touch()
    directory = f"{tmp_path}/{missing}"
    assert refusal(check_file, File(f"{tmp_path}/{path}")) == (
        f"init_method 'file://{tmp_path}/{path}' needs an existing directory that this user can"
        f" write to (got '{directory}'); create it (mkdir -p {directory}), make it writable"
        f" (chmod u+wx {directory}), or use another path"
    )


def test_a_directory_or_a_pipe_is_refused(tmp_path: Path) -> None:
    """A file cannot replace a directory, and reading a pipe would wait for a writer."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "directory").mkdir()
    for name in ("pipe", "directory"):
        path = f"{tmp_path}/{name}"
        assert refusal(check_file, File(path)) == (
            f"init_method 'file://{path}' must be a file (got a directory or a special file, such"
            " as a pipe); use another path, such as that of a new file in a directory"
        )
