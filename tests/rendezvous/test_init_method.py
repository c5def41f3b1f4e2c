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
TCP_RULE = "must be tcp://HOST:PORT, with brackets around an IPv6 address"
FILE_RULE = "needs the absolute path of a file, without '?' or NUL"
FILE_REMEDY = "write file:///shared/run42"

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
        pytest.param("", f"needs a scheme (got none); write {FORMS}", id="nothing"),
        pytest.param(
            "/shared/run42",
            "needs a scheme (got none); write file:///shared/run42",
            id="a path",
        ),
        pytest.param(
            "tpc://host:1", f"has an unknown scheme (got 'tpc://'); write {FORMS}", id="a typo"
        ),
        pytest.param(
            "tcp://::1:29500",
            f"{TCP_RULE} (got '::1:29500' after tcp://); write tcp://10.0.0.1:29500 or"
            " tcp://[::1]:29500",
            id="an IPv6 address without brackets",
        ),
        pytest.param("tcp://host", "needs a port (got none); write tcp://host:29500", id="no port"),
        pytest.param(
            "tcp://host:70000",
            "needs a port in 1..65535 (got 70000); write tcp://host:29500",
            id="a port that cannot be",
        ),
        pytest.param(
            "tcp://host:1?rank=0",
            "needs a port in 1..65535 (got '1?rank=0'); write tcp://host:29500",
            id="torch's arguments",
        ),
        pytest.param(
            "env://host",
            "takes nothing after env:// (got 'host'); write env://",
            id="a host after env",
        ),
        pytest.param(
            "file://localhost/run",
            f"{FILE_RULE} (got 'localhost/run'); {FILE_REMEDY}",
            id="a host before a path",
        ),
        pytest.param(
            "file:///shared/", f"{FILE_RULE} (got '/shared/'); {FILE_REMEDY}", id="a directory"
        ),
    ],
)
def test_malformed_urls_are_refused(url: str, expected: str) -> None:
    """Each mistake names the field, the whole URL, what is wrong in it, and the URL to
    write instead.
    """
    assert refusal(parse, url) == f"init_method {url!r} {expected}"


def test_other_types_are_refused_by_the_name_of_the_field() -> None:
    """The error lists the types that are allowed."""
    message = refusal(parse, 29500, field="DDPX_INIT_METHOD")
    assert message == (
        "DDPX_INIT_METHOD must be a URL, Env(), Tcp(host, port) or File(path) (got 29500, of type"
        f" int); write {FORMS}"
    )


@pytest.mark.parametrize(
    ("kind", "arguments", "expected"),
    [
        (
            Tcp,
            ("[::1]", 1),
            "needs a bare host name or address (got '[::1]'); write Tcp('10.0.0.1', 29500)",
        ),
        (Tcp, ("h", True), "needs a port in 1..65535 (got True); write Tcp('h', 29500)"),
        (File, ("/a?b",), f"{FILE_RULE} (got '/a?b'); {FILE_REMEDY}"),
    ],
)
def test_objects_have_the_rules_of_urls(kind: type, arguments: Any, expected: str) -> None:
    """The error begins with the object as it was written."""
    written = ", ".join(map(repr, arguments))
    assert refusal(kind, *arguments) == f"{kind.__name__}({written}) {expected}"


def test_argument_and_variable_must_agree() -> None:
    """The error has both values."""
    message = refusal(choose, "file:///a", {"DDPX_INIT_METHOD": "tcp://h:1"})
    assert message == (
        "init_method must agree with DDPX_INIT_METHOD (got 'file:///a' and 'tcp://h:1'); remove"
        " one of them"
    )


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
    (tmp_path / "directory").mkdir()
    # The kernel refuses root nothing but a read-only file system, so the answer is
    # ours.
    not_writable = (f"{tmp_path}/file", "/")
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) not in not_writable)
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
        message = refusal(check_file, File(f"{directory}/run42"), num_nodes=2)
        assert message.startswith(
            f"init_method 'file://{directory}/run42' needs a directory that all 2 nodes share"
            " (got '"
        )
        assert message.endswith(
            "is local to each node); use a path on a shared file system, or tcp://host:29500"
        )
    (shared_dir / "existing").touch()
    for name in ("run", "existing", "localised/run"):
        check_file(File(f"{shared_dir}/{name}"), num_nodes=1)
        check_file(File(f"{shared_dir}/{name}"), num_nodes=2)
