"""Files that are written before the first request go in with it, and fail as they would inside."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nano_coder.sandbox.backend import open_sandbox
from nano_coder.sandbox.protocol import Jail, Sandbox
from nano_coder.sandbox.workspace_archive import PendingFiles
from nano_shared.types import Limits

NAMES = st.lists(st.sampled_from(["a", "b", "ä", "x" * 255, ".."]), min_size=1, max_size=4).map("/".join)


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return open_sandbox("ns")


@pytest.fixture
def jail(sandbox: Sandbox) -> Iterator[Jail]:
    with closing(sandbox.open(None, Limits(tool_seconds=60))) as jail:
        yield jail


@given(st.lists(st.tuples(NAMES, st.binary(max_size=600)), max_size=12))
def test_what_waits_is_the_tree_that_writes_one_by_one_would_have_made(
    writes: list[tuple[str, bytes]],
) -> None:
    ahead, tree = PendingFiles(), dict[str, bytes]()
    for name, data in writes:
        try:
            if ahead.keep(name, data):
                tree[name] = data
        except PermissionError:
            assert ".." in name.split("/")
    with tarfile.open(fileobj=io.BytesIO(ahead.packed())) as packed:
        members = packed.getmembers()
        assert {m.name: packed.extractfile(m).read() for m in members} == tree  # type: ignore[union-attr]
    for name in tree:
        parts = name.split("/")
        assert all("/".join(parts[:end]) not in tree for end in range(1, len(parts)))


def test_files_are_there_with_the_first_request(jail: Jail) -> None:
    jail.write("a/b.txt", b"one")
    jail.write("a/b.txt", b"two")
    jail.write("c", b"\x00\xff")
    result = jail.run_python("print(open('a/b.txt').read(), open('c', 'rb').read())")
    assert result.stdout == b"two b'\\x00\\xff'\n"
    assert jail.run(["ls"]).stdout == b"a\nc\n"


def test_files_are_in_a_snapshot_that_is_the_first_request(jail: Jail) -> None:
    jail.write("a", b"one")
    assert b"one" in jail.snapshot()
    assert jail.read("a") == b"one"


def test_a_restored_workspace_has_none_of_them(jail: Jail) -> None:
    empty = jail.snapshot()
    jail.write("a", b"one")
    jail.restore(empty)
    assert jail.run(["ls"]).stdout == b""


def test_a_tree_that_is_restored_first_replaces_what_waits(sandbox: Sandbox, jail: Jail) -> None:
    with closing(sandbox.open(None, Limits())) as other:
        empty = other.snapshot()
    jail.write("a", b"one")
    jail.restore(empty)
    assert jail.run(["ls"]).stdout == b""


@pytest.mark.parametrize(
    ("before", "path", "error"),
    [
        ((), "../x", PermissionError),
        ((), "/etc/x", PermissionError),
        ((), "a\0b", FileNotFoundError),
        ((), ".", IsADirectoryError),
        ((), "a/", IsADirectoryError),
        (("a/b",), "a", IsADirectoryError),
        (("a",), "a/b", NotADirectoryError),
        ((), "x" * 256, OSError),
    ],
)
def test_a_write_that_cannot_be_fails_at_once(
    jail: Jail, before: tuple[str, ...], path: str, error: type[OSError]
) -> None:
    for name in before:
        jail.write(name, b"")
    with pytest.raises(error):
        jail.write(path, b"")
    assert jail.run(["true"]).exit_code == 0


def test_more_than_travels_at_once_arrives_too(jail: Jail) -> None:
    for number in range(6):
        jail.write(f"big{number}", b"x" * 200_000)
    assert jail.run(["sh", "-c", "cat big* | wc -c"]).stdout.strip() == b"1200000"
