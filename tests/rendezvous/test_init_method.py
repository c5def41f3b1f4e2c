"""An init method is parsed once, and a wrong one is refused with field, rule, value and remedy."""

from __future__ import annotations

import os
import tempfile
from ipaddress import IPv6Address
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_ddp_ext.errors import InitMethodError
from lightning_ddp_ext.rendezvous import init_method as module
from lightning_ddp_ext.rendezvous.init_method import Env, File, InitMethod, Tcp, check_file, choose, parse

FORMS = "env://, tcp://host:29500 or file:///shared/run42"
ARGUMENTS = ", and rank= and world_size= as arguments of DDPExtStrategy"
TCP_FORM = "must be tcp://HOST:PORT, with brackets around an IPv6 address"
TCP_FORMS = "tcp://10.0.0.1:29500 or tcp://[::1]:29500"
PATH_FORM = "needs an absolute path as text, without '?' and NUL"
PATH_REMEDY = "write file:///shared/run42"

names = st.from_regex(r"[a-z0-9]([a-z0-9.-]{0,20}[a-z0-9])?", fullmatch=True)
hosts = names | st.ip_addresses(v=4).map(str) | st.ip_addresses(v=6).map(str)
tcps = st.builds(Tcp, hosts, st.integers(1, 65535))
path_text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="?\0"), min_size=1)
files = path_text.filter(lambda text: text.strip("/")).map(lambda text: File("/" + text))
init_methods = st.just(Env()) | tcps | files


def message(value: Any, **options: Any) -> str:
    """What a user reads when a value is refused."""
    with pytest.raises(InitMethodError) as refused:
        parse(value, **options)
    return str(refused.value)


def refusal(method: File, *, num_nodes: int = 1) -> str:
    """What a user reads when a file cannot be used."""
    with pytest.raises(InitMethodError) as refused:
        check_file(method, num_nodes=num_nodes)
    return str(refused.value)


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that counts as shared between nodes, although tests run in a temporary one."""
    local, shared = tmp_path / "local", tmp_path / "shared"
    local.mkdir()
    shared.mkdir()
    monkeypatch.setattr(module, "NODE_LOCAL", (str(local),))
    monkeypatch.setattr(tempfile, "tempdir", str(local))
    return shared


# Parsing


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("env://", Env()),
        ("tcp://10.0.0.1:29500", Tcp("10.0.0.1", 29500)),
        ("tcp://node-1.example.org:1", Tcp("node-1.example.org", 1)),
        ("TCP://host:65535", Tcp("host", 65535)),
        ("tcp://host:29500/", Tcp("host", 29500)),
        ("tcp://[::1]:29500", Tcp("::1", 29500)),
        ("tcp://[fe80::1%eth0]:29500", Tcp("fe80::1%eth0", 29500)),
        ("file:///shared/run42", File("/shared/run42")),
        ("file:///shared/runs/", File("/shared/runs/")),
        ("file:///shared/my%20run #1", File("/shared/my%20run #1")),
    ],
)
def test_urls_become_values(url: str, expected: InitMethod) -> None:
    """Each scheme has its value; file paths stay as they are written."""
    assert parse(url) == expected


@given(init_methods)
def test_a_value_is_written_as_the_url_that_makes_it(method: InitMethod) -> None:
    """What is logged can be pasted as an argument."""
    assert parse(str(method)) == method
    assert parse(method) is method


near_misses = st.builds(
    str.__add__,
    st.sampled_from(["tcp://", "tcp://[", "file:", "file://", "env://"]),
    st.text("h1:[]/?=.% \0\u0663", max_size=12),
)


@given(st.text() | near_misses)
def test_any_text_is_parsed_or_refused_in_our_own_words(text: str) -> None:
    """No text raises anything but an InitMethodError that begins with the field and the value."""
    try:
        outcome = f"DDPX_INIT_METHOD {text!r} is {parse(text, field='DDPX_INIT_METHOD')}"
    except InitMethodError as error:
        outcome = str(error)
    assert outcome.startswith(f"DDPX_INIT_METHOD {text!r} ")
    assert not outcome.endswith("None")


def test_none_stays_none() -> None:
    """Nothing chosen leaves the choice to Lightning's cluster environment."""
    assert parse(None) is None


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("", f"needs a scheme (got none); write {FORMS}"),
        ("host:29500", f"needs a scheme (got none); write {FORMS}"),
        ("/shared/run42", "needs a scheme (got none); write file:///shared/run42"),
        ("file:/shared/run42", f"needs a scheme (got none); write {FORMS}"),
        ("tpc://host:1", f"has an unknown scheme (got 'tpc://'); write {FORMS}"),
        ("tcp://", f"{TCP_FORM} (got '' after tcp://); write {TCP_FORMS}"),
        ("tcp://:29500", f"{TCP_FORM} (got ':29500' after tcp://); write {TCP_FORMS}"),
        ("tcp://my host:1", f"{TCP_FORM} (got 'my host:1' after tcp://); write {TCP_FORMS}"),
        ("tcp://me@host:1", f"{TCP_FORM} (got 'me@host:1' after tcp://); write {TCP_FORMS}"),
        ("tcp://host:1/a", f"{TCP_FORM} (got 'host:1/a' after tcp://); write {TCP_FORMS}"),
        ("tcp://::1:29500", f"{TCP_FORM} (got '::1:29500' after tcp://); write {TCP_FORMS}"),
        ("tcp://host:1:2", f"{TCP_FORM} (got 'host:1:2' after tcp://); write {TCP_FORMS}"),
        ("tcp://[::1", f"{TCP_FORM} (got '[::1' after tcp://); write {TCP_FORMS}"),
        ("tcp://[host]:1", f"{TCP_FORM} (got '[host]:1' after tcp://); write {TCP_FORMS}"),
        ("tcp://[::1]1", f"{TCP_FORM} (got '[::1]1' after tcp://); write {TCP_FORMS}"),
        ("tcp://host", "needs a port (got none); write tcp://host:29500"),
        ("tcp://host:", "needs a port (got none); write tcp://host:29500"),
        ("tcp://[::1]", "needs a port (got none); write tcp://[::1]:29500"),
        ("tcp://host:0", "needs a port in 1..65535 (got 0); write tcp://host:29500"),
        ("tcp://host:70000", "needs a port in 1..65535 (got 70000); write tcp://host:29500"),
        ("tcp://host:abc", "needs a port in 1..65535 (got 'abc'); write tcp://host:29500"),
        ("tcp://host:-1", "needs a port in 1..65535 (got '-1'); write tcp://host:29500"),
        ("tcp://host:1?rank=0", f"must carry no query (got '?rank=0'); write tcp://host:1{ARGUMENTS}"),
        ("file:///a?rank=0", f"must carry no query (got '?rank=0'); write file:///a{ARGUMENTS}"),
        ("env://?rank=0", f"must carry no query (got '?rank=0'); write env://{ARGUMENTS}"),
        ("env://host", "must end after env:// (got 'host' behind it); write env://"),
        ("file://", f"{PATH_FORM} (got ''); {PATH_REMEDY}"),
        ("file:///", f"{PATH_FORM} (got '/'); {PATH_REMEDY}"),
        ("file://shared/run", f"{PATH_FORM} (got 'shared/run'); {PATH_REMEDY}"),
        ("file://localhost/run", f"{PATH_FORM} (got 'localhost/run'); {PATH_REMEDY}"),
    ],
)
def test_malformed_urls_are_refused(url: str, expected: str) -> None:
    """Each mistake names the field, the whole URL, what is wrong in it, and the URL to write instead."""
    assert message(url) == f"init_method {url!r} {expected}"


@pytest.mark.parametrize(("value", "kind"), [(29500, "int"), (b"env://", "bytes"), (Path("/a"), "PosixPath")])
def test_what_is_no_url_is_refused(value: object, kind: str) -> None:
    """A wrong type names itself and what would do."""
    assert message(value, field="DDPX_INIT_METHOD") == (
        "DDPX_INIT_METHOD must be a URL, Env(), Tcp(host, port) or File(path)"
        f" (got {value!r}, of type {kind}); write {FORMS}"
    )


# Values made by hand


@pytest.mark.parametrize(
    ("host", "port", "expected"),
    [
        ("", 1, "Tcp('', 1) needs a bare host name or address (got ''); write Tcp('10.0.0.1', 29500)"),
        (None, 1, "Tcp(None, 1) needs a bare host name or address (got None); write Tcp('10.0.0.1', 29500)"),
        ("a:b", 1, "Tcp('a:b', 1) needs a bare host name or address (got 'a:b'); write Tcp('10.0.0.1', 29500)"),
        ("[::1]", 1, "Tcp('[::1]', 1) needs a bare host name or address (got '[::1]'); write Tcp('10.0.0.1', 29500)"),
        ("h", 0, "Tcp('h', 0) needs a port in 1..65535 (got 0); write Tcp('h', 29500)"),
        ("h", 65536, "Tcp('h', 65536) needs a port in 1..65535 (got 65536); write Tcp('h', 29500)"),
        ("h", "29500", "Tcp('h', '29500') needs a port in 1..65535 (got '29500'); write Tcp('h', 29500)"),
        ("h", True, "Tcp('h', True) needs a port in 1..65535 (got True); write Tcp('h', 29500)"),
    ],
)
def test_wrong_addresses_are_refused(host: Any, port: Any, expected: str) -> None:
    """A Tcp made by hand is held to the same rules as a URL."""
    with pytest.raises(InitMethodError) as refused:
        Tcp(host, port)
    assert str(refused.value) == expected


@given(st.ip_addresses(v=6), st.integers(1, 65535))
def test_a_url_has_brackets_around_an_ipv6_host(address: IPv6Address, port: int) -> None:
    """The value has none."""
    assert str(Tcp(str(address), port)) == f"tcp://[{address}]:{port}"


@pytest.mark.parametrize(
    "path",
    ["", "a/b", "/a\0", "/a?b", Path("/a")],
)
def test_wrong_paths_are_refused(path: Any) -> None:
    """A File made by hand is held to the same rules as a URL."""
    with pytest.raises(InitMethodError) as refused:
        File(path)
    assert str(refused.value) == f"File({path!r}) {PATH_FORM} (got {path!r}); {PATH_REMEDY}"


@pytest.mark.parametrize("run_id", ["", 7])
def test_wrong_run_ids_are_refused(run_id: Any) -> None:
    """A run id is text."""
    with pytest.raises(InitMethodError) as refused:
        File("/shared/runs/", run_id=run_id)
    assert str(refused.value) == f"run_id must be text, and not empty (got {run_id!r}); write run_id='run42'"


# Argument and environment


@pytest.mark.parametrize(
    ("argument", "variable", "expected"),
    [
        (None, None, None),
        (None, "", None),
        ("env://", None, Env()),
        (None, "tcp://h:1", Tcp("h", 1)),
        ("tcp://h:1", "TCP://h:1/", Tcp("h", 1)),
        (File("/a/", run_id="x"), "file:///a/", File("/a/", run_id="x")),
    ],
)
def test_argument_or_environment_chooses(
    argument: str | InitMethod | None, variable: str | None, expected: InitMethod | None
) -> None:
    """Either will do, and both if they agree."""
    assert choose(argument, {} if variable is None else {"DDPX_INIT_METHOD": variable}) == expected


def test_argument_and_environment_must_not_contradict() -> None:
    """Two different init methods are both named."""
    with pytest.raises(InitMethodError) as refused:
        choose("file:///a", {"DDPX_INIT_METHOD": "tcp://h:1"})
    assert str(refused.value) == (
        "init_method must agree with DDPX_INIT_METHOD (got 'file:///a' and 'tcp://h:1'); drop one of the two"
    )


def test_a_malformed_variable_is_named() -> None:
    """A mistake in the job script is not blamed on the code."""
    with pytest.raises(InitMethodError) as refused:
        choose(None, {"DDPX_INIT_METHOD": "tcp://h"})
    assert str(refused.value) == "DDPX_INIT_METHOD 'tcp://h' needs a port (got none); write tcp://h:29500"


# Which file


def test_a_plain_path_is_the_file(tmp_path: Path) -> None:
    """A run id changes nothing where the file is named."""
    assert File(f"{tmp_path}/run").file_for("7") == f"{tmp_path}/run"
    assert File(f"{tmp_path}/run").file_for(None) == f"{tmp_path}/run"


def test_a_run_id_names_the_file_in_a_directory(tmp_path: Path) -> None:
    """A trailing slash, an existing directory and an explicit run id all make a directory."""
    expected = f"{tmp_path}/ddpx-a-b.store"
    assert File(f"{tmp_path}/").file_for("a/b") == expected
    assert File(f"{tmp_path}").file_for("a/b") == expected
    assert File(f"{tmp_path}", run_id="a b").file_for("other") == expected
    assert File("/absent", run_id="x").file_for(None) == "/absent/ddpx-x.store"


@pytest.mark.parametrize("run_id", [None, ""])
def test_a_directory_without_a_run_id_is_refused(run_id: str | None) -> None:
    """The remedy names both ways to give one."""
    with pytest.raises(InitMethodError) as refused:
        File("/shared/runs/").file_for(run_id)
    assert str(refused.value) == (
        "init_method 'file:///shared/runs/' is a directory and needs a run id to name a file in it (got none);"
        " give run_id= or set DDPX_RUN_ID, the same on every rank"
    )


# Whether it can be made


@pytest.mark.parametrize("name", ["run", "", "existing"])
def test_a_writable_directory_passes(shared: Path, name: str) -> None:
    """A new file, a directory, and a file that an earlier run left are fine, on one node and on several."""
    (shared / "existing").touch()
    check_file(File(f"{shared}/{name}"), num_nodes=1)
    check_file(File(f"{shared}/{name}"), num_nodes=2)


@pytest.mark.parametrize(("path", "missing"), [("a/b/run", "a/b"), ("a/", "a/"), ("file/run", "file")])
def test_a_missing_directory_is_refused(tmp_path: Path, path: str, missing: str) -> None:
    """The directory and the command that makes it are named, also where a file is in its place."""
    (tmp_path / "file").touch()
    directory = f"{tmp_path}/{missing}"
    assert refusal(File(f"{tmp_path}/{path}")) == (
        f"init_method 'file://{tmp_path}/{path}' needs an existing directory that this user can write (got "
        f"'{directory}'); make it (mkdir -p {directory}), allow it (chmod u+wx {directory}), or write another path"
    )


def test_a_directory_that_is_not_writable_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for in place of the kernel, which refuses root nothing but a read-only file system."""
    monkeypatch.setattr(os, "access", lambda path, mode: not (str(path) == str(tmp_path) and mode & os.W_OK))
    assert f"directory that this user can write (got '{tmp_path}')" in refusal(File(f"{tmp_path}/run"))


def test_what_is_no_plain_file_of_this_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe would block whoever opens it; a file in a writable directory need not be ours to write."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").touch()
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != f"{tmp_path}/file")
    for name in ("pipe", "file"):
        assert refusal(File(f"{tmp_path}/{name}")) == (
            f"init_method 'file://{tmp_path}/{name}' needs a plain file that this user can read and write, or none "
            f"(got '{tmp_path}/{name}'); remove it, or write another path"
        )


@pytest.mark.parametrize("directory", ["/tmp", "/var/tmp", "/dev/shm", "/run/user"])
def test_several_nodes_do_not_share_a_temporary_directory(directory: str) -> None:
    """On several nodes a directory of one of them is refused, with what to use instead."""
    found = refusal(File(f"{directory}/run42"), num_nodes=2)
    assert found.startswith(f"init_method 'file://{directory}/run42' needs a directory that all 2 nodes share (got '")
    assert found.endswith("is local to each node); write a path on a shared file system, or tcp://host:29500")


def test_several_nodes_do_not_share_tmpdir(shared: Path) -> None:
    """The directory that TMPDIR names counts too, and a link to it, but not one whose name only begins alike."""
    local = shared.parent / "local"
    (shared / "link").symlink_to(local)
    assert f"{local} is local to each node" in refusal(File(f"{shared}/link/run"), num_nodes=3)
    (shared.parent / "localised").mkdir()
    check_file(File(f"{shared.parent}/localised/run"), num_nodes=3)


def test_one_node_may_use_a_temporary_directory(tmp_path: Path) -> None:
    """On one machine a temporary directory is seen by all ranks."""
    check_file(File(f"{tmp_path}/run"), num_nodes=1)
