"""SWE-bench rows with a local repository: the files of the base commit as workspace, graded by tests.

The workspace has the files of that commit alone: no .git, no later objects, no reference solution. The test
patch is applied at import, and its files are hidden until the grader copies them over the agent's workspace.
A row for which any of this fails is refused.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nano_formats.row_format import RowFormat, original_rows
from nano_rl.task_formats import ReadOptions
from nano_shared.errors import Refusal, Refused
from nano_shared.files import scratch_folder
from nano_shared.hidden_checks import CommandChecks
from nano_shared.snapshot import Entry, EntryKind, make_snapshot, save
from nano_shared.strict_json import Row, parse_json, text_field
from nano_shared.types import OracleAction, Provenance, Task

_FILE, _EXECUTABLE, _LINK = 0o100644, 0o100755, 0o120000
_SECONDS = 120


@dataclass(frozen=True, slots=True)
class Blob:
    mode: int
    """as git writes it: 100644, 100755 or 120000"""
    data: bytes


def read_commit(repo: Path, commit: str) -> dict[str, Blob]:
    """Every file of the commit. Raises Refused for an unknown commit, a submodule, and a failure of git."""
    if not re.fullmatch(r"[0-9a-f]{7,64}", commit):
        raise Refused("base_commit", f"{commit!r:.60} is no commit's hash")
    listed = _git(repo, "ls-tree", "-r", "-z", "--full-tree", commit)
    entries = []
    for line in filter(None, listed.split(b"\0")):
        head, _, name = line.partition(b"\t")
        mode, kind, digest = head.decode().split()
        path = os.fsdecode(name)
        if kind != "blob" or int(mode, 8) not in (_FILE, _EXECUTABLE, _LINK):
            raise Refused("base_commit", f"{path!r} is a {kind}, which lies outside the repository")
        if ".git" in path.lower().split("/"):
            raise Refused("base_commit", f"{path!r} would carry history into the workspace")
        entries.append((path, int(mode, 8), digest))
    if not entries:
        raise Refused("base_commit", "holds no file")
    contents = _contents(repo, [digest for _, _, digest in entries])
    return {path: Blob(mode, data) for (path, mode, _), data in zip(entries, contents, strict=True)}


def patched(tree: Mapping[str, Blob], patch: str, field: str) -> dict[str, Blob]:
    """The files that a patch changes or adds, as it leaves them. Raises Refused where it does not apply."""
    text = patch if patch.endswith("\n") else f"{patch}\n"
    with scratch_folder("patch") as folder:
        stat = _git(folder, "apply", "--numstat", "-z", "-", stdin=text.encode(), field=field)
        names = [os.fsdecode(part.split(b"\t", 2)[2]) for part in stat.split(b"\0") if part.count(b"\t") == 2]
        if not names or "" in names:
            raise Refused(field, "renames files or changes none; give it as plain additions and changes")
        for name in names:
            if name in tree:
                path = folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(tree[name].data)
        _git(folder, "apply", "--whitespace=nowarn", "-", stdin=text.encode(), field=field)
        if missing := [name for name in names if not (folder / name).is_file()]:
            raise Refused(field, f"deletes {missing[0]!r}, which the grader cannot do")
        return {name: Blob(_FILE, (folder / name).read_bytes()) for name in names}


def as_text(path: str, blob: Blob) -> str:
    """Raises Refused for a file that is no text."""
    try:
        return blob.data.decode("utf-8")
    except UnicodeDecodeError:
        raise Refused(path, "is no text, which the files of a task must be") from None


def _contents(repo: Path, digests: list[str]) -> list[bytes]:
    raw = _git(repo, "cat-file", "--batch", stdin="".join(f"{digest}\n" for digest in digests).encode())
    contents, at = [], 0
    for digest in digests:
        end = raw.find(b"\n", at)
        head = raw[at:end].split()
        if end < 0 or len(head) != 3 or head[0].decode() != digest:
            raise Refused("base_commit", f"git lacks the object {digest}")
        size = int(head[2])
        contents.append(raw[end + 1 : end + 1 + size])
        at = end + 2 + size
    return contents


def _git(folder: Path, *arguments: str, stdin: bytes = b"", field: str = "base_commit") -> bytes:
    """Run git without the repository's programs or a network. Raises Refused with git's message."""
    env = {
        "PATH": os.environ.get("PATH", ""), "HOME": "/nonexistent", "LC_ALL": "C",
        "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull, "GIT_NO_REPLACE_OBJECTS": "1",
        "GIT_CEILING_DIRECTORIES": str(folder.parent),
        # a partial clone would fetch what it lacks, by the program that its configuration names
        "GIT_NO_LAZY_FETCH": "1", "GIT_ALLOW_PROTOCOL": "", "GIT_TERMINAL_PROMPT": "0",
    }  # fmt: skip
    quiet = ("core.fsmonitor=false", f"core.hooksPath={os.devnull}", f"safe.directory={folder.resolve()}")
    command = ["git", *(part for setting in quiet for part in ("-c", setting)), "-C", str(folder), *arguments]
    try:
        done = subprocess.run(
            command, input=stdin, capture_output=True, env=env, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as problem:
        raise Refused(field, f"git cannot be run: {problem}") from None
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip().split("\n")[-1]
        raise Refused(field, f"git {arguments[0]} failed: {said or done.returncode}")
    return done.stdout


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
        key=name, prompt=statement, **_start(tree, options),
        hidden=CommandChecks(command=f"python -m pytest -q @{SELECTED}", files=hidden),
        oracle=_oracle(tree, row.get("patch")), provenance=Provenance(source=repo),
    )  # fmt: skip


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
        if any(blob.mode != _FILE for blob in tree.values()):
            raise Refused("base_commit", "holds links or executables")
        return {"files": {path: as_text(path, blob) for path, blob in tree.items()}}
    except Refused as problem:
        if options.blobs is None:
            raise Refused("base_commit", f"needs the log's blob store: {problem}") from None
    entries = [
        Entry(path, EntryKind.SYMLINK, 0, blob.data.decode("utf-8", "surrogateescape"))
        if blob.mode == _LINK
        else Entry(path, EntryKind.FILE, blob.mode & 0o777, options.blobs.put(blob.data))
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
        """The rows as they were imported; other tasks cannot be exported, since they have no repository."""
        if rows := original_rows(task, self.name):
            return rows
        raise Refused("provenance.original", "only tasks that came from swe-bench rows go back to them")


SWE_BENCH = SweBench(
    name=NAME,
    summary="SWE-bench rows on a local repository (--repo)",
    recognises=lambda row: {"instance_id", "base_commit", "test_patch"} <= row.keys(),
    read_row=lambda row: read_swe(row, ReadOptions()),
)
