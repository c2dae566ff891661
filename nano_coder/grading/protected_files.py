"""Which files of a workspace decide over a check, and so are taken from the original."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection
from fnmatch import fnmatch
from pathlib import PurePosixPath

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
"""configuration that a check by command may read, and no grader of ours does"""
BUILD = (
    "package.json", "tsconfig*.json", "*.config.[cmjt]*", ".*rc", ".*rc.*", "Cargo.toml", "go.mod", "go.work",
    "build.gradle*", "pom.xml", "CMakeLists.txt", "*.cmake", "*.mk", "Makefile", "makefile", "GNUmakefile",
    "Rakefile", "meson.build",
)  # fmt: skip
"""configuration where the check reads it"""
CONFIGURATION_FOLDERS = ("__pycache__", ".git", "*.dist-info", "*.egg-info", ".venv", ".pytest_cache")
RUNNERS = (
    "pytest", "_pytest", "pluggy", "iniconfig", "py", "nose", "hypothesis", "packaging", "pygments", "tomli",
    "exceptiongroup", "colorama", "attr", "attrs", "coverage", "pytest_cov", "xdist", "execnet",
    "pytest_timeout", "setuptools", "pkg_resources", "_distutils_hack",
)  # fmt: skip
"""modules that a file of the workspace must not stand in for; with all of the standard library"""


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
    """Whether a new file would be imported instead of a test runner or the standard library."""
    first = PurePosixPath(path).parts[0]
    name = first.removesuffix(".py").split(".")[0] if first.endswith((".py", ".so")) or "/" in path else ""
    return name in RUNNERS or (name in sys.stdlib_module_names and name != "")


def is_script(path: str, command: str) -> bool:
    """Whether the command runs the file as a script of the check's own: by name, or a shell script.

    A program that is merely named (`python main.py`, `grep -q two a.py`) may be what the task is about.
    """
    for part in re.split(r"[;&|]+", command):
        for place, word in enumerate(part.split()):
            name = word.strip("'\"").removeprefix("./")
            if name == path and (place == 0 or name.endswith((".sh", ".bash"))):
                return True
    return False


def is_named_test(path: str, command: str) -> bool:
    """Whether a test runner is told to run the file, whatever it is called. Doctests are the file's own."""
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
    """Why a change to `path` is not applied: "tests", "configuration", "shadowing", "check"; None: it is.

    A new file that the command names is asked for.
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
