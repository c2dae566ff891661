"""Formats with one folder per task: imported folders are kept and exported unchanged.

A folder written for a task of nano also contains the task in `nano_task.json`; an import refuses a folder in
which only one of the two was edited.
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nano_rl.formats import ReadOptions, refusal, refuse_uncarried, whole, with_original
from nano_shared.errors import Refusal, Refused, UsageError
from nano_shared.files import content_hash
from nano_shared.strict_json import parse_json, refusing_invalid, validated
from nano_shared.types import Task

WHOLE_FILE = "nano_task.json"
_SKIPPED = frozenset({".git", "__pycache__", ".DS_Store"})


@dataclass(frozen=True, slots=True)
class Tree:
    """The files of a folder by relative path, and which are executable."""

    files: dict[str, bytes]
    executable: frozenset[str] = frozenset()

    def text(self, path: str) -> str:
        """Raises Refused for a file that is missing or no text."""
        if path not in self.files:
            raise Refused(path, "is missing")
        try:
            return self.files[path].decode("utf-8")
        except UnicodeDecodeError:
            raise Refused(path, "is no text, which the files of a task must be") from None

    def below(self, folder: str) -> dict[str, str]:
        """The files of one folder as text, by their path in it. Raises Refused for one that is no text."""
        return {p[len(folder) + 1 :]: self.text(p) for p in self.files if p.startswith(f"{folder}/")}


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderFormat:
    name: str
    summary: str
    marker: str
    """file that makes a folder a task"""
    read_tree: Callable[[Tree, str], Task]
    """a foreign folder, by its files and its name; raises Refused"""
    write_tree: Callable[[Task], Tree]
    """raises Refused for a task that the format's own tools could not use"""

    def recognises_path(self, path: Path) -> bool:
        return path.is_dir() and bool(self.folders(path))

    def folders(self, path: Path) -> list[Path]:
        """The task folders at or below a path; a task's own folder is not searched further."""
        if (path / self.marker).is_file():
            return [path]
        inner = sorted(p for p in path.iterdir() if p.is_dir() and not p.is_symlink() and p.name != ".git")
        return [found for p in inner for found in self.folders(p)]

    def read(self, path: Path, options: ReadOptions) -> Iterator[Task | Refusal]:
        if not path.is_dir():
            raise UsageError(f"{path}: {self.name} tasks are folders with a {self.marker}")
        seen: dict[str, Path] = {}
        for folder in self.folders(path):
            try:
                task = self.from_tree(read_tree(folder), folder.resolve().name)
                if task.key in seen:
                    raise Refused("key", f"{task.key!r} is already the task in {seen[task.key]}")
            except Refused as problem:
                yield Refusal.of(str(folder), problem)
                continue
            seen[task.key] = folder
            yield task

    def refusals(self, tasks: Sequence[Task]) -> list[Refusal]:
        """The tasks that cannot be written, each with its reason."""
        return [problem for task in tasks if (problem := refusal(task, self.to_tree))]

    def write(self, tasks: Sequence[Task], path: Path) -> None:
        """Give each task a folder. Raises Refused for the first that cannot be written, before any is."""
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise UsageError(f"{path} exists already; give --out a folder that is new or empty")
        trees = [(task.key, self.to_tree(task)) for task in tasks]
        for key, tree in trees:
            write_tree(path / folder_name(key), tree)

    def from_tree(self, tree: Tree, name: str) -> Task:
        """Raises Refused where the folder is malformed, or its files and its whole task disagree."""
        if WHOLE_FILE not in tree.files:
            with refusing_invalid():
                return with_original(self.read_tree(tree, name), self.name, folder=name, **_packed(tree))
        task = validated(Task, parse_json(tree.text(WHOLE_FILE)), WHOLE_FILE)
        written = self.to_tree(task)
        for path, data in written.files.items():
            if tree.files.get(path) != data:
                raise Refused(path, f"is not what {WHOLE_FILE} says; change both, or remove {WHOLE_FILE}")
        if tree.files.keys() - written.files.keys():
            task = with_original(task, self.name, folder=name, **_packed(tree))
        return task

    def to_tree(self, task: Task) -> Tree:
        """Raises Refused with the field that this format cannot carry."""
        original = task.provenance.original or {}
        if original.get("format") == self.name:
            tree = _unpacked(original)
            if self._means(tree, str(original.get("folder")), task):
                return tree
        refuse_uncarried(task)
        tree = self.write_tree(task)
        files = tree.files | {WHOLE_FILE: f"{whole(task)}\n".encode()}
        return Tree(files, tree.executable)

    def _means(self, tree: Tree, name: str, task: Task) -> bool:
        try:
            return whole(self.from_tree(tree, name)) == whole(task)
        except Refused:
            return False


def read_tree(folder: Path) -> Tree:
    """Every file of a folder. Raises Refused for a link or a special file, which no task can carry."""
    files: dict[str, bytes] = {}
    executable = set()
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if _SKIPPED & set(name.split("/")):
            continue
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise Refused(name, "is a link or a special file, which a task cannot carry")
        if path.is_file():
            files[name] = path.read_bytes()
            if os.access(path, os.X_OK) and path.stat().st_mode & 0o111:
                executable.add(name)
    return Tree(files, frozenset(executable))


def write_tree(folder: Path, tree: Tree) -> None:
    for name, data in tree.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        path.chmod(0o755 if name in tree.executable else 0o644)


def folder_name(key: str) -> str:
    """A name for the task's folder; two keys never share one."""
    plain = re.sub(r"[^A-Za-z0-9_-]+", "-", key).strip("-")[:80].lower()
    return plain if plain == key else f"{plain or 'task'}-{content_hash(key)[7:15]}"


def _packed(tree: Tree) -> dict[str, Any]:
    files: dict[str, Any] = {}
    for path, data in tree.files.items():
        try:
            files[path] = data.decode("utf-8")
        except UnicodeDecodeError:
            files[path] = {"base64": base64.b64encode(data).decode()}
    return {"files": files, "executable": sorted(tree.executable)}


def _unpacked(original: Mapping[str, Any]) -> Tree:
    files = {
        path: text.encode() if isinstance(text, str) else base64.b64decode(text["base64"])
        for path, text in dict(original.get("files") or {}).items()
    }
    return Tree(files, frozenset(original.get("executable") or ()))
