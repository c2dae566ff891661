"""A Python package with its tests, read from a folder or a source distribution. Nothing of it is executed."""

from __future__ import annotations

import gzip
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from email.parser import HeaderParser
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path, PurePosixPath

from nano_coder.grading.protected_files import is_test
from nano_rl.tasks.mutate import Splice, splices_by_function
from nano_shared import snapshot
from nano_shared.errors import UsageError
from nano_shared.snapshot import (
    BlobStore,
    Entry,
    EntryKind,
    MemoryBlobs,
    Snapshot,
    SnapshotError,
    make_snapshot,
    save,
)

LARGEST = 400_000
"""bytes of a source file that is read"""
_MOST_ENTRY_BYTES = 2 << 20
"""larger files are left out of the workspace"""
_NO_CODE = {
    "docs", "doc", "examples", "example", "benchmarks", "benchmark", "tools", "scripts", "build", "dev",
}  # fmt: skip
_NO_MODULE = {"setup.py", "conftest.py", "noxfile.py", "versioneer.py", "tasks.py", "_version.py"}
_TEST_FILES = ("test_*.py", "*_test.py", "tests.py")
_OPEN_END = 64 << 20
"""bytes of an unpacked source distribution"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What a package says about itself."""

    name: str
    version: str
    licence: str | None

    def __str__(self) -> str:
        return f"{self.name} {self.version}".strip()


@dataclass(frozen=True, kw_only=True)
class MinedPackage:
    """The files of a package, without those that are too large."""

    origin: Origin
    tree: Snapshot
    blobs: BlobStore
    _splices: dict[str, list[Splice]] = field(default_factory=dict, repr=False)

    @cached_property
    def id(self) -> str:
        """Content hash of the tree."""
        return save(self.tree, self.blobs)

    @cached_property
    def modules(self) -> dict[str, str]:
        """Path -> text of the package's own Python files, without tests."""
        roots = self.roots
        return {path: text for path, text in self._python.items() if _is_code(path, roots)}

    @cached_property
    def tests(self) -> dict[str, str]:
        """Path -> text of the files that pytest collects."""
        named = {p: t for p, t in self._python.items() if any(fnmatch(_name(p), n) for n in _TEST_FILES)}
        return {path: text for path, text in named.items() if is_test(path)}

    @cached_property
    def roots(self) -> tuple[str, ...]:
        """Folders that its modules are imported from; "" is the workspace itself."""
        packages = {str(PurePosixPath(path).parent) for path in self._python if _name(path) == "__init__.py"}
        tops = {p for p in packages if str(PurePosixPath(p).parent) not in packages}
        kept = {p for p in tops if not _aside(f"{p}/__init__.py")}
        found = {str(PurePosixPath(p).parent) for p in kept}
        single = [p for p in self._python if p.count("/") == p.startswith("src/") and not _aside(p)]
        found |= {str(PurePosixPath(p).parent) for p in single if _name(p) not in _NO_MODULE}
        return tuple(sorted("" if root == "." else root for root in found))

    def splices(self, path: str) -> list[Splice]:
        """The small changes that one of its modules allows."""
        if path not in self._splices:
            self._splices[path] = [s for some in splices_by_function(self.modules[path]) for s in some]
        return self._splices[path]

    @property
    def editable(self) -> tuple[str, ...]:
        """What an agent may change: the folders and files right below the roots that hold its modules."""
        tops = set()
        for path in self.modules:
            root = max((r for r in self.roots if not r or path.startswith(f"{r}/")), key=len)
            below = path[len(root) + bool(root) :].split("/")[0]
            tops.add(f"{root}/{below}" if root else below)
        return tuple(sorted(tops))

    def support(self, test: str) -> dict[str, str]:
        """Path -> text of what pytest reads for a test file: `conftest.py` and `__init__.py` above it."""
        above, both = PurePosixPath(test).parents, ("conftest.py", "__init__.py")
        names = [str(folder / name) for folder in above for name in both]
        return {n: self._python[n] for n in names if n in self._python and n not in self.modules}

    @cached_property
    def _python(self) -> dict[str, str]:
        found = {}
        for entry in self.tree.entries:
            if entry.kind is EntryKind.FILE and entry.path.endswith(".py"):
                data = self.blobs.get(str(entry.content))
                if len(data) <= LARGEST and b"\r" not in data and (text := _decoded(data)) is not None:
                    found[entry.path] = text
        return found


def read_package(source: Path) -> MinedPackage:
    """The package in a folder or in a `.tar.gz`. Raises UsageError for anything else."""
    blobs = MemoryBlobs()
    if source.is_dir():
        tree = snapshot.load(snapshot.snapshot_directory(source, blobs), blobs)
    elif source.name.endswith((".tar.gz", ".tgz")):
        tree = _unpacked(source, blobs)
    else:
        raise UsageError(f"{source} is neither a folder nor a source distribution (.tar.gz); name one")
    origin = _origin(tree, blobs, source)
    package = MinedPackage(origin=origin, tree=_trimmed(tree, origin, blobs), blobs=blobs)
    if not package.tests or not package.modules:
        lacks = "tests" if package.modules else "modules"
        raise UsageError(f"{source}: no {lacks} found in it; mining needs Python modules and pytest files")
    return package


def _unpacked(source: Path, blobs: BlobStore) -> Snapshot:
    """The tree of an archive without its one top folder."""
    try:
        with gzip.open(source) as stream:
            data = stream.read(_OPEN_END + 1)
        if len(data) > _OPEN_END:
            raise UsageError(f"{source} unpacks to more than {_OPEN_END >> 20} MB; name a smaller package")
        tree = snapshot.load(snapshot.snapshot_tar(data, blobs), blobs)
    except (OSError, EOFError, SnapshotError) as problem:
        raise UsageError(f"{source} cannot be read as a source distribution: {problem}") from None
    tops = {entry.path.split("/")[0] for entry in tree.entries}
    if len(tops) != 1:
        return tree
    cut = len(next(iter(tops))) + 1
    inner = (entry for entry in tree.entries if len(entry.path) > cut)
    return make_snapshot(Entry(e.path[cut:], e.kind, e.mode, e.content) for e in inner)


def _trimmed(tree: Snapshot, origin: Origin, blobs: BlobStore) -> Snapshot:
    """The tree without large files and links, and with the metadata that an installed package would have."""
    files = (entry for entry in tree.entries if entry.kind is EntryKind.FILE)
    kept = [e for e in files if len(blobs.get(str(e.content))) <= _MOST_ENTRY_BYTES]
    info = f"{re.sub('[-.]+', '_', origin.name)}.egg-info/PKG-INFO"
    if not any(e.path.endswith(".egg-info/PKG-INFO") for e in kept):
        own = next((e.content for e in kept if e.path == "PKG-INFO"), None)
        said = f"Metadata-Version: 2.1\nName: {origin.name}\nVersion: {origin.version or '0'}\n"
        kept.append(Entry(info, EntryKind.FILE, 0o644, own or blobs.put(said.encode())))
    return make_snapshot(kept)


def _origin(tree: Snapshot, blobs: BlobStore, source: Path) -> Origin:
    """Name, version and licence from PKG-INFO, else from pyproject.toml, else from the folder's name."""
    texts = {name: _text(tree, name, blobs) for name in ("PKG-INFO", "pyproject.toml")}
    said = HeaderParser().parsestr(texts["PKG-INFO"])
    if said["Name"]:
        declared = said["License-Expression"] or said["License"]
        licence = _licence(declared, said.get_all("Classifier") or [])
        return Origin(name=said["Name"], version=said["Version"] or "", licence=licence)
    try:
        project = tomllib.loads(texts["pyproject.toml"]).get("project", {})
    except tomllib.TOMLDecodeError:
        project = {}
    declared = project.get("license")
    declared = declared.get("text") if isinstance(declared, dict) else declared
    return Origin(
        name=str(project.get("name") or source.resolve().name), version=str(project.get("version") or ""),
        licence=_licence(declared, project.get("classifiers") or []),
    )  # fmt: skip


def _licence(declared: str | None, classifiers: Iterable[str]) -> str | None:
    """The declared licence if it is one line, else what the classifiers name."""
    if declared and "\n" not in declared.strip() and declared.strip().upper() != "UNKNOWN":
        return declared.strip()
    named = [c.rpartition("::")[2].strip() for c in classifiers if c.startswith("License ::")]
    return "; ".join(named) or None


def _text(tree: Snapshot, path: str, blobs: BlobStore) -> str:
    entry = tree.by_path.get(path)
    return "" if entry is None or entry.content is None else _decoded(blobs.get(entry.content)) or ""


def _decoded(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeError:
        return None


def _name(path: str) -> str:
    return PurePosixPath(path).name


def _aside(path: str) -> bool:
    """Whether a file is a test, documentation or a tool, by its folders."""
    return is_test(path) or any(part in _NO_CODE for part in PurePosixPath(path).parts[:-1])


def _is_code(path: str, roots: tuple[str, ...]) -> bool:
    if _aside(path) or _name(path) in _NO_MODULE or path.endswith("__init__.py.in"):
        return False
    inside = any(not root or path.startswith(f"{root}/") for root in roots)
    return inside and (path.count("/") > 0 or "" in roots)
