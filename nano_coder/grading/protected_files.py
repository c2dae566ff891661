"""Protected files: those that decide over a check by command, and are taken from the original workspace.

All are found by name: tests, configuration, what stands in for a module, what the shell line runs, and what
its scripts and makefiles run in turn. Modules that these import count as the work, unless the task names what
may be edited (`artifacts`): then every other original file is protected.
"""

from __future__ import annotations

import json
import posixpath
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatch
from itertools import pairwise
from pathlib import PurePosixPath

from nano_shared.snapshot import BlobStore, EntryKind, Snapshot

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
BUILD = {
    r"npm|npx|node|yarn|pnpm|bun|deno|tsc|jest|vitest|eslint": (
        "package.json", "tsconfig*.json", "*.config.[cmjt]*",
    ),
    "cargo|rustc": ("Cargo.toml",),
    "go": ("go.mod", "go.work"),
    "gradlew?|mvn|java": ("build.gradle*", "pom.xml"),
    "cmake|ctest|make": ("CMakeLists.txt", "*.cmake", "*.mk"),
    "meson|ninja": ("meson.build",),
    "rake": ("Rakefile",),
    r"\w+": (".*rc", ".*rc.*"),
}  # fmt: skip
"""program in the check -> its configuration"""
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


_SHELLS = ("sh", "bash", "dash", "ash", "zsh", "ksh", "busybox", "bats", ".", "source")
_MAKEFILES = ("Makefile", "makefile", "GNUmakefile")
_INTERPRETER = re.compile(
    r"(python|pypy)[\d.]*|node|deno|bun|ruby|perl|php|lua|Rscript|julia|ts-node|tsx|coverage|uv|poetry|pipenv|pdm"
)
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
_RUNS_TESTS = re.compile(r"\b(pytest|py\.test|unittest|nose2)\b")
_RUNS_OTHERS = re.compile(rf"{_INTERPRETER.pattern}|(ba|da|z|k)?sh|make|npm|npx|yarn|pnpm|pytest")
_COMMANDS = re.compile(r"[;&|\n(){}`]+|\b(?:if|then|else|elif|while|do)\b")
"""what ends a simple command of a shell line, a script or a makefile's recipe"""
_BEFORE_A_PROGRAM = re.compile(r"[\w.-]*:|\w+=.*|exec|time|env|command|sudo|timeout|\d+s?|")
UNLISTED = "unlisted"
"""kind of a changed file that the task does not name as editable and the check does not name either"""
MOST_TEXT = 1 << 18


def _plain(path: str) -> str:
    """The path with its words separated: `runChecks.py` and `run_checks.py` contain the word `Checks`."""
    return re.sub(r"([a-z])([A-Z])", r"\1 \2", path).replace("_", " ")


def named_editable(path: str, editable: Iterable[str]) -> bool:
    """Whether a name, a pattern or a folder in `editable` covers the file."""
    return any(fnmatch(path, p) or path.startswith(f"{p.rstrip('/')}/") for p in editable)


@dataclass(slots=True)
class ShellLine:
    """A check's shell line with the original files, and all that the line and its scripts name."""

    command: str
    before: Snapshot
    blobs: BlobStore
    editable: tuple[str, ...] = ()
    ran: set[str] = field(default_factory=set)
    """names and patterns of what a shell or make runs"""
    scripts: set[str] = field(default_factory=set)
    """original files that an interpreter runs"""
    tests: set[str] = field(default_factory=set)
    """names and patterns of what a test runner is told to run"""
    roots: set[str] = field(default_factory=lambda: {""})
    """folders from which modules are imported"""
    texts: list[str] = field(default_factory=list)
    """the line and the scripts that it runs"""

    def __post_init__(self) -> None:
        self._read(self.command, "")

    def original(self, path: str) -> str:
        """The text of an original file; empty for any other path."""
        entry = self.before.by_path.get(path)
        if entry is None or entry.kind is not EntryKind.FILE:
            return ""
        return self.blobs.get(str(entry.content)).decode("utf-8", "replace")

    def names(self, path: str) -> bool:
        """Whether the line or one of its scripts names the file, or a module as it."""
        stem = PurePosixPath(path).stem
        return any(stem in text and re.search(rf"\b{re.escape(stem)}\b", text) for text in self.texts)

    # ------------------------------------------------------------------------------ reading the line

    def _read(self, text: str, folder: str) -> None:
        """Note what a shell text runs, in `folder`."""
        text = text[:MOST_TEXT]
        if text in self.texts:
            return
        self.texts.append(text)
        for value in re.findall(r"\bPYTHONPATH=([^\s;&|]+)", text):
            self.roots |= {_joined("", part) for part in value.strip("'\"").split(":")}
        for part in _COMMANDS.split(text.replace("<", " < ")):
            words = [word.strip("'\"") for word in part.split()]
            while words and _BEFORE_A_PROGRAM.fullmatch(program := words[0].lstrip("!@-")):
                del words[0]
            if words[:1] == ["cd"] and len(words) > 1:
                folder = _joined(folder, words[1])
                self.roots.add(folder)
            elif words:
                self._runs(program, words[1:], folder)

    def _runs(self, program: str, args: list[str], folder: str) -> None:
        name = posixpath.basename(program)
        if _INTERPRETER.fullmatch(name):
            self._interprets(args, folder)
        elif name in _SHELLS:
            options = [arg for arg in args if arg.startswith("-")]
            words = [arg for arg in args if not arg.startswith(("-", "<"))]
            if any(re.fullmatch(r"-\w*c", option) for option in options):
                self._read(" ".join(words), folder)
            else:
                self._shell(words[0] if words else "", folder)
        elif name in ("make", "gmake", "bmake"):
            files = [file for option, file in pairwise(args) if option == "-f"]
            for file in files or _MAKEFILES:
                self._shell(file, folder)
        elif name in ("include", "sinclude"):
            for file in args:
                self._shell(file, folder)
        elif name in ("npm", "npx", "yarn", "pnpm"):
            with suppress(ValueError, TypeError, AttributeError):
                scripts = json.loads(self.original(_joined(folder, "package.json")))["scripts"]
                self._read("\n".join(map(str, scripts.values())), folder)
        elif _RUNS_TESTS.fullmatch(name):
            self._tests(args, folder)
        elif self._found(program, folder) or program.startswith("./"):
            path = self._path(program, folder)
            interpreted = _SOURCE.search(path) or _INTERPRETER.search(self.original(path).partition("\n")[0])
            if interpreted:
                self._script(path)
            else:
                self._shell(program, folder)
        else:  # it may run what stands behind it: `nice`, `xargs`, `env -i`
            inner = (
                place for place, arg in enumerate(args) if _RUNS_OTHERS.fullmatch(posixpath.basename(arg))
            )
            if (place := next(inner, None)) is not None:
                self._runs(args[place], args[place + 1 :], folder)

    def _shell(self, name: str, folder: str) -> None:
        path = self._path(name, folder)
        if path in self.ran or not name:
            return
        self.ran.add(path)
        for each in list(self.before.by_path) if "*" in path else [path]:
            if fnmatch(each, path):
                self._read(self.original(each), folder)

    def _interprets(self, args: list[str], folder: str) -> None:
        for place, arg in enumerate(args):
            if arg == "-c":
                return
            if arg == "-m":
                module, *more = args[place + 1 :] or [""]
                if _RUNS_TESTS.fullmatch(module):
                    return self._tests(more, folder)
                base = _joined(folder, module.replace(".", "/"))
                for path in (f"{base}.py", f"{base}/__main__.py"):
                    self._script(path)
                return None
            if not arg.startswith(("-", "<")) and self._found(arg, folder):
                return self._script(self._path(arg, folder))
        return None

    def _tests(self, args: list[str], folder: str) -> None:
        if "doctest" in self.command:
            return
        for arg in args:
            path = _joined(folder, arg.partition("::")[0])
            self.tests |= {path, f"*{path}"} if "*" in path else {path}
            parts = arg.split(".")
            modules = ("/".join(parts[: place + 1]) for place in range(len(parts)))
            self.tests |= {f"{_joined(folder, module)}.py" for module in modules}

    def _script(self, path: str) -> None:
        if path not in self.scripts and (text := self.original(path)):
            self.scripts.add(path)
            self.roots.add(posixpath.dirname(path))
            self.texts.append(text[:MOST_TEXT])

    def _path(self, name: str, folder: str) -> str:
        """The path that a word of a shell text names; a variable at its begin stands for any folder."""
        if "$" not in name:
            return _joined(folder, name)
        end = name.rpartition("$")[2].partition("/")[2]
        return next((each for each in self.before.by_path if end and f"/{each}".endswith(f"/{end}")), name)

    def _found(self, name: str, folder: str) -> bool:
        entry = self.before.by_path.get(self._path(name, folder))
        return entry is not None and entry.kind is EntryKind.FILE

    # ------------------------------------------------------------------------------- what is protected

    def protected(self, path: str) -> str | None:
        """The kind of tampering that a change to `path` is; None: it is allowed.

        "script": the line runs it, and it is unknown whether it is the check or the work. A new file that the
        line names counts as asked for.
        """
        if named_editable(path, self.editable):
            return None
        original = path in self.before.by_path
        if is_configuration(path):
            return "configuration"
        if not original:
            return self._planted(path)
        if is_test(path) or self._of_tests(path):
            return "tests"
        if self._runs_by_shell(path):
            return "check"
        if self._is_build(path):
            return "configuration"
        if path in self.scripts or self._in_package_of_checks(path):
            return self._script_kind(path)
        data = self._found(path, "") and not _SOURCE.search(path)
        if data and _EXPECTED.search(_plain(path)) and self.names(path):
            return "tests"
        if not self.editable:
            return None
        return "check" if self.names(path) else UNLISTED

    def _planted(self, path: str) -> str | None:
        words = re.split(r"[\s'\"<>|;&()]+", self.command)
        if path in {_joined("", word.partition("::")[0]) for word in words}:
            return None
        if self._shadows(path):
            return "shadowing"
        if is_test(path):
            return "tests"
        if posixpath.basename(path) in _words(self.command):
            return None
        if self._runs_by_shell(path):
            makefiles = any(each in _MAKEFILES for each in self.before.by_path)
            return "check" if path not in _MAKEFILES or makefiles else None
        return "configuration" if self._is_build(path) else None

    def _of_tests(self, path: str) -> bool:
        if any(fnmatch(path, each) for each in self.tests) and path.endswith(".py"):
            return True
        runner = any(_RUNS_TESTS.search(text) for text in self.texts)
        return runner and path.endswith(".py") and _TESTS.search(self.original(path)) is not None

    def _runs_by_shell(self, path: str) -> bool:
        return any(fnmatch(path, each) for each in self.ran)

    def _is_build(self, path: str) -> bool:
        name = posixpath.basename(path)
        return any(
            re.search(rf"\b({programs})\b", text)
            for programs, patterns in BUILD.items()
            if any(fnmatch(name, pattern) for pattern in patterns)
            for text in self.texts
        )

    def _in_package_of_checks(self, path: str) -> bool:
        main = f"{posixpath.dirname(path)}/__main__.py"
        return main in self.scripts and _TESTING.search(_plain(main)) is not None

    def _script_kind(self, path: str) -> str | None:
        if _TESTING.search(_plain(path)):
            return "check"
        text = self.original(path)
        words = set(re.findall(r"\w+", text))
        others = (PurePosixPath(each).stem for each in self.before.by_path if each != path)
        if not any(other in words for other in others):
            return None  # the work is this one file
        return "check" if _ASSERTS.search(text) or _TESTS.search(text) else "script"

    def _shadows(self, path: str) -> bool:
        """Whether a new file would replace a module or a program from outside the workspace."""
        if any(module in RUNNERS or module in sys.stdlib_module_names for module in self.provides(path)):
            return True
        folder, name = posixpath.split(path)
        return folder in self._program_folders() and any(name in _words(text) for text in self.texts)

    def provides(self, path: str) -> Iterator[str]:
        """Top modules that a new file provides and that the original workspace does not."""
        for root in self.roots:
            above = f"{root}/" if root else ""
            if not path.startswith(above):
                continue
            inside = path.removeprefix(above)
            first = inside.split("/")[0]
            module = first.split(".")[0] if "/" in inside or first.endswith((".py", ".so", ".pyc")) else ""
            known = {_joined(root, f"{module}.py"), _joined(root, f"{module}/__init__.py")}
            if module and not known & self.before.by_path.keys():
                yield module

    def _program_folders(self) -> set[str]:
        values = re.findall(r"\bPATH=([^\s;&]+)", "\n".join(self.texts))
        return {_joined("", part) for value in values for part in value.strip("'\"").split(":")}


def _joined(folder: str, name: str) -> str:
    """The path of a name in a folder of the workspace, relative to the workspace."""
    path = posixpath.normpath(posixpath.join("/work", folder, name))
    return path.removeprefix("/work").strip("/")


def _words(text: str) -> set[str]:
    return set(re.split(r"[\s'\"=<>|;&()/:,]+", text))
