"""SWE-bench style rows on a local repository: the base commit's tree without its history, graded by tests.

Nothing but the files of that one commit enters the workspace: no .git, no later object, no reference. The
test patch is applied here and its files are hidden until the grader lays them over the agent's workspace.
Whatever of this fails refuses the row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nano_rl.exchange.git_tree import Blob, as_text, patched, read_commit
from nano_rl.exchange.jsonl import Row, parse_json, text_field
from nano_rl.exchange.options import ReadOptions
from nano_rl.exchange.refusal import Refusal, Refused
from nano_rl.exchange.row_format import RowFormat, original_rows
from nano_shared.snapshot import Entry, Kind
from nano_shared.snapshot.tree import make_snapshot, save
from nano_shared.types import HiddenChecks, OracleAction, Provenance, Task

NAME = "swe-bench"
SELECTED = ".nano-selected-tests"
"""file with the node ids, one a line, since thousands fit no command line"""
_FIELDS = ("repo", "instance_id", "base_commit", "problem_statement", "test_patch")


def read_swe(row: Row, options: ReadOptions) -> Task:
    repo, name, commit, statement, test_patch = (text_field(row, field) for field in _FIELDS)
    tree = read_commit(_repository(options.repo, repo), commit)
    tests = _tests(row, "FAIL_TO_PASS", required=True) + _tests(row, "PASS_TO_PASS")
    hidden = {path: as_text(path, blob) for path, blob in patched(tree, test_patch, "test_patch").items()}
    hidden[SELECTED] = "".join(f"{test}\n" for test in tests)
    return Task(
        key=name,
        prompt=statement,
        **_start(tree, options),
        hidden=HiddenChecks(kind="command", command=f"python -m pytest -q @{SELECTED}", files=hidden),
        oracle=_oracle(tree, row.get("patch")),
        provenance=Provenance(source=repo),
    )


def _repository(folder: Path | None, name: str) -> Path:
    if folder is None:
        raise Refused("repo", f"{name} must be a local repository; name it, or a folder of them, with --repo")
    for path in (folder / name.replace("/", "__"), folder / name, folder):
        if (path / ".git").exists() or (path / "HEAD").is_file():
            return path
    raise Refused("repo", f"no git repository at {folder} nor in it as {name.replace('/', '__')}")


def _tests(row: Row, field: str, *, required: bool = False) -> list[str]:
    """Node ids of pytest, as a list or as JSON text of one."""
    value = row.get(field)
    if isinstance(value, str) and value.strip():
        value = parse_json(value)
    if not isinstance(value or [], list) or (required and not value):
        raise Refused(field, "must be a list of tests")
    for number, test in enumerate(value or []):
        if not isinstance(test, str) or ".py" not in test.partition("::")[0] or "\n" in test:
            raise Refused(f"{field}.{number}", f"{test!r:.60} is no test by pytest's names (file.py::test)")
    return list(value or [])


def _start(tree: dict[str, Blob], options: ReadOptions) -> dict[str, Any]:
    """The starting workspace as texts, or as a snapshot where a file is no plain text."""
    try:
        if any(blob.mode != 0o100644 for blob in tree.values()):
            raise Refused("base_commit", "holds links or executables")
        return {"files": {path: as_text(path, blob) for path, blob in tree.items()}}
    except Refused as problem:
        if options.blobs is None:
            raise Refused("base_commit", f"needs the log's blob store: {problem}") from None
    link = 0o120000
    entries = [
        Entry(path, Kind.SYMLINK, 0, blob.data.decode("utf-8", "surrogateescape"))
        if blob.mode == link
        else Entry(path, Kind.FILE, blob.mode & 0o777, options.blobs.put(blob.data))
        for path, blob in tree.items()
    ]
    return {"snapshot": save(make_snapshot(entries), options.blobs)}


def _oracle(tree: dict[str, Blob], patch: Any) -> tuple[OracleAction, ...] | None:
    """The reference patch as files to write; None where it is missing, or deletes or holds no text."""
    if not isinstance(patch, str) or not patch.strip():
        return None
    changed = patched(tree, patch, "patch")
    writes = [
        OracleAction(name="write_file", arguments={"path": path, "content": as_text(path, blob)})
        for path, blob in changed.items()
    ]
    return (*writes, OracleAction(name="submit"))


@dataclass(frozen=True, slots=True, kw_only=True)
class SweBench(RowFormat):
    def read(self, path: Path, options: ReadOptions) -> Iterator[Task | Refusal]:
        bound = replace(self, read_row=lambda row: read_swe(row, options))
        yield from RowFormat.read(bound, path, options)

    def to_rows(self, task: Task) -> list[Row]:
        """The rows as they were read: there is no repository to write another for."""
        if rows := original_rows(task, self.name):
            return rows
        raise Refused("provenance.original", "only tasks that came from swe-bench rows go back to them")


SWE_BENCH = SweBench(
    name=NAME,
    summary="SWE-bench rows on a local repository (--repo)",
    recognises=lambda row: {"instance_id", "base_commit", "test_patch"} <= row.keys(),
    read_row=lambda row: read_swe(row, ReadOptions()),
)
