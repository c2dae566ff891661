"""Which files of a workspace decide over a check, and so are taken from the original."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import PurePosixPath

TESTS = ("test_*.py", "*_test.py", "tests.py")
TEST_FOLDERS = ("tests", "test")
CONFIGURATION = (
    "conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini",
    "setup.cfg", "pyproject.toml", "sitecustomize.py", "usercustomize.py", "*.pth", "*.pyc",
    "pyvenv.cfg", ".coveragerc", "noxfile.py",
)  # fmt: skip
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
    return any(fnmatch(parts[-1], p) for p in CONFIGURATION) or any(
        fnmatch(part, p) for part in parts[:-1] for p in CONFIGURATION_FOLDERS
    )


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


def is_makefile(path: str, command: str) -> bool:
    return PurePosixPath(path).name in ("Makefile", "makefile", "GNUmakefile") and "make" in command.split()


def protected(path: str, command: str, originals: Iterable[str]) -> str | None:
    """Why a change to `path` is not applied: "tests", "configuration", "shadowing", "check"; None: it is."""
    if is_configuration(path):
        return "configuration"
    if is_test(path) or is_named_test(path, command):
        return "tests"
    if is_script(path, command) or is_makefile(path, command):
        return "check"
    if path not in originals and shadows(path):
        return "shadowing"
    return None
