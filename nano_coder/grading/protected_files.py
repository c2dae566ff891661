"""Protected files: those that decide over a check, and are therefore taken from the original workspace.

Some are protected by name. Others by who was seen to read them: a shell or make that runs them, a test runner
that looks for its configuration, an interpreter that runs them as a test. Modules that such a
program imports count as the work, unless the task names what may be edited (`artifacts`): then everything
else that the check reads is protected.
"""

from __future__ import annotations

import posixpath
import re
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import PurePosixPath
from typing import Any

from nano_shared.blobs import BlobStore
from nano_shared.snapshot import EntryKind, Snapshot

TESTS = (
    "test_*.py", "*_test.py", "tests.py", "*_test.go", "*.test.[cmjt]*", "*.spec.[cmjt]*", "*_spec.rb",
    "*_test.rb", "*Test.java", "*Tests.cs", "*_test.exs", "*.bats",
)  # fmt: skip
TEST_FOLDERS = ("tests", "test", "__tests__", "__snapshots__", "testdata")
CONFIGURATION = (
    "conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini",
    "setup.cfg", "pyproject.toml", "sitecustomize.py", "usercustomize.py", "*.pth", "*.pyc",
    "pyvenv.cfg", ".coveragerc", "noxfile.py",
)  # fmt: skip
LINTERS = (".flake8", "mypy.ini", ".mypy.ini", "ruff.toml", ".ruff.toml", ".pylintrc", "pylintrc")
"""configuration that only checks by command may read"""
BUILD = (
    "package.json", "tsconfig*.json", "*.config.[cmjt]*", ".*rc", ".*rc.*", "Cargo.toml", "go.mod", "go.work",
    "build.gradle*", "pom.xml", "CMakeLists.txt", "*.cmake", "*.mk", "Makefile", "makefile", "GNUmakefile",
    "Rakefile", "meson.build",
)  # fmt: skip
"""configuration that is protected if the check reads it"""
CONFIGURATION_FOLDERS = ("__pycache__", ".git", "*.dist-info", "*.egg-info", ".venv", ".pytest_cache")
RUNNERS = (
    "pytest", "_pytest", "pluggy", "iniconfig", "py", "nose", "hypothesis", "packaging", "pygments", "tomli",
    "exceptiongroup", "colorama", "attr", "attrs", "coverage", "pytest_cov", "xdist", "execnet",
    "pytest_timeout", "setuptools", "pkg_resources", "_distutils_hack",
)  # fmt: skip
"""modules that a file of the workspace must not shadow, besides the standard library"""


def is_test(path: str) -> bool:
    parts = PurePosixPath(path).parts
    return any(fnmatch(parts[-1], p) for p in TESTS) or any(part in TEST_FOLDERS for part in parts[:-1])


def is_configuration(path: str) -> bool:
    parts = PurePosixPath(path).parts
    return any(fnmatch(parts[-1], p) for p in (*CONFIGURATION, *LINTERS)) or any(
        fnmatch(part, p) for part in parts[:-1] for p in CONFIGURATION_FOLDERS
    )


def is_build(path: str) -> bool:
    return any(fnmatch(PurePosixPath(path).name, pattern) for pattern in BUILD)


def shadows(path: str) -> bool:
    """Whether a new file would be imported in place of a test runner or the standard library."""
    first = PurePosixPath(path).parts[0]
    name = first.removesuffix(".py").split(".")[0] if first.endswith((".py", ".so")) or "/" in path else ""
    return name in RUNNERS or (name in sys.stdlib_module_names and name != "")


def is_script(path: str, command: str) -> bool:
    """Whether the command runs the file as a script of the check: by name, or as a shell script.

    A file that is merely named (`python main.py`, `grep -q two a.py`) may be the task's work.
    """
    for part in re.split(r"[;&|]+", command):
        for place, word in enumerate(part.split()):
            name = word.strip("'\"").removeprefix("./")
            if name == path and (place == 0 or name.endswith((".sh", ".bash"))):
                return True
    return False


def is_named_test(path: str, command: str) -> bool:
    """Whether the command tells a test runner to run the file. Doctests belong to the file itself."""
    if not re.search(r"\b(pytest|py\.test|unittest)\b", command) or "doctest" in command:
        return False
    words = (word.strip("'\"").removeprefix("./").split("::")[0] for word in command.split())
    return path.endswith(".py") and path in words


def is_named(path: str, command: str) -> bool:
    """Whether a word of the command is the file's path."""
    return path in {word.removeprefix("./").split("::")[0] for word in re.split(r"[\s'\"<>|;&()]+", command)}


def is_makefile(path: str, command: str) -> bool:
    return PurePosixPath(path).name in ("Makefile", "makefile", "GNUmakefile") and "make" in command.split()


def protected(path: str, command: str, originals: Collection[str]) -> str | None:
    """Why a change to `path` is not applied: "tests", "configuration", "shadowing", "check"; None: it is
    applied.

    A new file that the command names counts as asked for.
    """
    if is_configuration(path):
        return "configuration"
    if path not in originals and is_named(path, command):
        return None
    if is_test(path) or is_named_test(path, command):
        return "tests"
    makes = is_makefile(path, command) and (
        path in originals or any(is_makefile(p, command) for p in originals)
    )
    if makes or is_script(path, command):
        return "check"
    if path not in originals and shadows(path):
        return "shadowing"
    return None


_WORK = "/work/"
_SHELLS = ("sh", "bash", "dash", "ash", "zsh", "ksh", "busybox", "bats")
_MAKES = ("make", "gmake", "ninja", "cmake", "just", "task", "rake", "bmake")
_SCRIPTED = {*_SHELLS, *_MAKES}
"""programs that read nothing of a workspace but their scripts"""
_SOURCE = re.compile(
    r"\.(py|pyi|ipynb|js|mjs|cjs|ts|tsx|jsx|rb|pl|pm|php|lua|c|h|cc|cpp|hpp|go|rs|java|kt|cs|swift|r|jl|ex|hs)$"
)
_TESTING = re.compile(
    r"(?<![a-z])(self)?(tests?|checks?|verify|verification|validate|specs?|asserts?|expect|grade|judge|oracle"
    r"|acceptance|smoke)(?![a-z])",
    re.IGNORECASE,
)
"""words in the name of a script that mark it as the check"""
_EXPECTED = re.compile(
    r"(?<![a-z])(expect\w*|golden|snapshots?|fixtures?|baselines?|approved|answers?|reference|cases?|oracle"
    r"|tests?|checks?)(?![a-z])",
    re.IGNORECASE,
)  # fmt: skip
"""words in the name of a data file that mark it as expected results"""
_ASSERTS = re.compile(
    r"^\s*(assert\b|console\.assert)|\bassert\w*(\.\w+)?\(|\bAssertionError\b|require\(.(node:)?assert",
    re.MULTILINE,
)
_TESTS = re.compile(
    r"^class \w+\(.*TestCase\)|^(async )?def test\w*\(.*\n(    .*\n)*    assert\b", re.MULTILINE
)
_TEST_RUNNERS = {"unittest", "pytest", "py.test", "nose2"}


@dataclass(frozen=True, slots=True)
class ObservedProcess:
    argv: tuple[str, ...]
    folder: str
    python_path: str

    @property
    def program(self) -> str:
        return posixpath.basename(self.argv[0]).lstrip("-") if self.argv else ""

    def words(self) -> Iterable[str]:
        """Paths of the workspace that the command line may name."""
        for number, word in enumerate(self.argv[1:], 1):
            path = posixpath.normpath(posixpath.join(self.folder, word.split("::")[0]))
            yield path.removeprefix(_WORK)
            if "-m" in self.argv[:number]:
                module = posixpath.join(self.folder, word.replace(".", "/")).removeprefix(_WORK)
                yield from (f"{module}.py", f"{module}/__main__.py", f"{module}/__init__.py")

    def roots(self) -> Iterable[str]:
        """Folders of the workspace that the process's interpreter imports from."""
        script = next((w for w in self.argv[1:] if not w.startswith("-")), ".")
        for path in (".", posixpath.dirname(script) or ".", *self.python_path.split(":")):
            whole = posixpath.normpath(posixpath.join(self.folder, path or "."))
            yield (whole + "/").removeprefix(_WORK).rstrip("/")


@dataclass(frozen=True, slots=True)
class Reads:
    """Files of the workspace, by relative path, with the processes that read them or found them missing.

    Each process with whether the access was early: before it had read any source of the workspace.
    """

    read: Mapping[str, Collection[tuple[ObservedProcess, bool]]] = field(default_factory=dict)
    missing: Mapping[str, Collection[tuple[ObservedProcess, bool]]] = field(default_factory=dict)
    written: Mapping[str, Collection[tuple[ObservedProcess, bool]]] = field(default_factory=dict)
    looked: frozenset[str] = frozenset()
    """files whose existence was tested"""
    modules: frozenset[str] = frozenset()
    """Python modules loaded from outside the workspace"""
    programs: frozenset[str] = frozenset()
    """programs executed from outside the workspace"""

    @staticmethod
    def of(found: Mapping[str, Any]) -> Reads:
        """The accesses that the tracer reported."""
        processes = [ObservedProcess(tuple(argv), folder, path) for argv, folder, path in found["processes"]]
        read, missing, written = (
            {path: [(processes[n], early) for n, early in seen] for path, seen in found[name].items()}
            for name in ("read", "missing", "written")
        )
        looked, modules, programs = (frozenset(found[name]) for name in ("looked", "modules", "programs"))
        return Reads(read, missing, written, looked, modules, programs)

    def __or__(self, other: Reads) -> Reads:
        read, missing, written = (
            {path: [*one.get(path, ()), *two.get(path, ())] for path in {*one, *two}}
            for one, two in (
                (self.read, other.read), (self.missing, other.missing), (self.written, other.written)
            )
        )  # fmt: skip
        looked, modules = self.looked | other.looked, self.modules | other.modules
        return Reads(read, missing, written, looked, modules, self.programs | other.programs)

    @property
    def roots(self) -> frozenset[str]:
        seen = {process for by in (self.read, self.missing) for s in by.values() for process, _ in s}
        return frozenset(root for process in seen for root in process.roots())


@dataclass(frozen=True, slots=True)
class Deciding:
    """Decides which changed files are protected, for one check on one original tree."""

    command: str
    before: Snapshot
    blobs: BlobStore
    editable: tuple[str, ...] = ()
    hidden: frozenset[str] = frozenset()

    def why(self, path: str, reads: Reads) -> str | None:
        """The kind of tampering that a change to `path` is; None: it is allowed.

        "script": the check runs it by name, and it is unknown whether it is the check or the work.
        """
        if self.may_edit(path):
            return None
        if path in self.before.by_path:
            return self._changed(path, reads)
        return self._planted(path, reads)

    def may_edit(self, path: str) -> bool:
        return named_editable(path, self.editable)

    def _named_by_check(self, path: str, reads: Reads) -> bool:
        """Whether the command, or a script that it runs, names the file, by name or pattern."""
        scripts = (
            self._original(name)
            for name, seen in reads.read.items()
            if any(process.program in _SCRIPTED for process, _ in seen)
        )
        return any(_is_named(path, text) for text in (self.command, *scripts))

    def _original(self, path: str) -> str:
        entry = self.before.by_path.get(path)
        if entry is None or entry.kind is not EntryKind.FILE:
            return ""
        return self.blobs.get(str(entry.content)).decode("utf-8", "replace")

    def _changed(self, path: str, reads: Reads) -> str | None:
        seen = self._readers(path, reads)
        if not seen:
            return None
        if self.editable:
            return "check"
        programs = {process.program for process, _ in seen}
        if programs & _SCRIPTED:
            return "check"
        if is_build(path):
            return "configuration"
        if not _SOURCE.search(path):
            return self._data(path, reads, early=any(early for _, early in seen))
        return self._source(path, seen, reads)

    def _source(self, path: str, seen: list[tuple[ObservedProcess, bool]], reads: Reads) -> str | None:
        if not any(path in process.words() for process, _ in seen):
            main = f"{posixpath.dirname(path)}/__main__.py"
            inside = main in reads.read and _TESTING.search(_plain(main))
            if inside and any(main in process.words() for process, _ in reads.read[main]):
                return "check"
            runner = any(_TEST_RUNNERS & {*process.argv[:4]} for process, _ in seen)
            return "tests" if runner and _TESTS.search(self._original(path)) else None
        if _TESTING.search(_plain(path)):
            return "check"
        if self._only_input(path, reads):
            return None
        return "check" if self._asserts(path) else "script"

    def _data(self, path: str, reads: Reads, *, early: bool) -> str | None:
        if _EXPECTED.search(_plain(path)):
            return "tests"
        return "configuration" if early and not self._named_by_check(path, reads) else None

    def _readers(self, path: str, reads: Reads) -> list[tuple[ObservedProcess, bool]]:
        """The processes that read the file, or anything below it where it was a link to a folder."""
        below = f"{path}/"
        return [
            each
            for name, seen in reads.read.items()
            if name == path or name.startswith(below)
            for each in seen
        ]

    def _only_input(self, path: str, reads: Reads) -> bool:
        return all(name == path or name in self.hidden for name in reads.read)

    def _asserts(self, path: str) -> bool:
        text = self._original(path)
        return not text or _ASSERTS.search(text) is not None or _TESTS.search(text) is not None

    def _planted(self, path: str, reads: Reads) -> str | None:
        if self._shadows(path, reads):
            return "shadowing"
        # by exact name only: a pattern in the command also matches files that nobody asked for
        if posixpath.basename(path) in _words(self.command):
            return None
        seen = self._readers(path, reads)
        if {process.program for process, _ in seen} & _SCRIPTED:
            return "check"
        wanted = [*seen, *reads.missing.get(path, ())]
        data = not _SOURCE.search(path) or is_build(path)
        early = any(early for process, early in wanted if process.program not in _SHELLS)
        return "configuration" if data and early and not self._named_by_check(path, reads) else None

    def _shadows(self, path: str, reads: Reads) -> bool:
        """Whether a new file would replace a module or a program from outside the workspace."""
        folder, name = posixpath.split(path)
        if name in reads.programs and path in reads.missing:
            return True
        for root in reads.roots:
            inside = (
                path if not root else path.removeprefix(f"{root}/") if path.startswith(f"{root}/") else ""
            )
            if self._stands_in(inside, reads):
                return True
        package = f"{folder}/__init__.py" in self.before.by_path
        return path in reads.read and not package and self._stands_in(name, reads)

    def _stands_in(self, inside: str, reads: Reads) -> bool:
        first = inside.split("/")[0]
        module = first.split(".")[0] if "/" in inside or first.endswith((".py", ".so", ".pyc")) else ""
        original = f"{module}.py" in self.before.by_path
        return bool(module) and not original and (
            module in reads.modules or module in RUNNERS or module in sys.stdlib_module_names
        )  # fmt: skip


def _words(text: str) -> list[str]:
    return re.split(r"[\s'\"=<>|;&()/:,]+", text)


def _is_named(path: str, text: str) -> bool:
    """Whether a shell line or a script names the file, by name or by a pattern as in `data*.csv`."""
    name = posixpath.basename(path)
    return any(fnmatch(name, word) for word in _words(text) if word.strip("*?"))


def named_editable(path: str, editable: Iterable[str]) -> bool:
    """Whether a name, a pattern or a folder in `editable` covers the file."""
    return any(fnmatch(path, p) or path.startswith(f"{p.rstrip('/')}/") for p in editable)


def _plain(path: str) -> str:
    """The path with its words separated: `runChecks.py` and `run_checks.py` contain the word `Checks`."""
    return re.sub(r"([a-z])([A-Z])", r"\1 \2", path).replace("_", " ")
