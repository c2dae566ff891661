"""Files that are written before the first request are there, and fail as they would inside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from nano_coder.sandbox.protocol import Jail, Sandbox, open_sandbox
from nano_shared.types import Limits


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return open_sandbox("ns")


@pytest.fixture
def jail(sandbox: Sandbox) -> Iterator[Jail]:
    with closing(sandbox.open(None, Limits(tool_seconds=60))) as jail:
        yield jail


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
