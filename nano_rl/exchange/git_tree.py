"""The files of one commit, read object by object: no checkout, no filter, no hook, no history."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nano_rl.exchange.refusal import Refused
from nano_shared.scratch import scratch_folder

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
        if gone := [name for name in names if not (folder / name).is_file()]:
            raise Refused(field, f"deletes {gone[0]!r}, which the grader cannot do")
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
    """Run git so that a repository's own configuration starts no program and reaches no network.

    Raises Refused with what it said.
    """
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
