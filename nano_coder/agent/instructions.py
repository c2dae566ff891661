"""AGENTS.md: the user's own, then one a directory from the project's root down to the working directory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path

from nano_coder.trust import is_trusted
from nano_shared.durable import NotReadable, read_regular
from nano_shared.types import InstructionFile

MOST_BYTES = 32 << 10
"""of a project's files together; what is beyond is cut off"""
_MOST_READ = 1 << 20


def find_instructions(
    directory: Path, names: Sequence[str], user: Path, exclude: Sequence[str] = ()
) -> tuple[InstructionFile, ...]:
    """The chain that holds in a directory, outermost first.

    In each directory the first of `names` that is there counts; `user` is the folder of the user's own. Links
    and what cannot be read count as absent: a project's link could lead to any file of the user.
    """
    wanted = [name for name in names if not any(fnmatch(name, pattern) for pattern in exclude)]
    found = []
    if own := _first(user, wanted):
        text = own[1][:MOST_BYTES].decode("utf-8", "replace").strip()
        found.append(InstructionFile(path=f"~/{own[0].name}", text=text, trusted=True))
    root, left = project_root(directory), MOST_BYTES
    for path, content in project_files(directory, wanted):
        if left > 0:
            text = content[:left].decode("utf-8", "replace").strip()
            left -= len(content)
            name = os.path.relpath(path, root)
            found.append(InstructionFile(path=name, text=text, trusted=is_trusted(path, content)))
    return tuple(one for one in found if one.text)


def project_files(directory: Path, names: Sequence[str]) -> Iterator[tuple[Path, bytes]]:
    """The project's files of the chain with their whole contents, outermost first."""
    for folder in _down(project_root(directory), directory):
        if here := _first(folder, names):
            yield here


def project_root(directory: Path) -> Path:
    """The nearest directory above with a repository; the directory itself if there is none."""
    here = directory.resolve()
    return next((folder for folder in (here, *here.parents) if (folder / ".git").exists()), here)


def _down(root: Path, directory: Path) -> list[Path]:
    here = directory.resolve()
    between = [folder for folder in here.parents if folder.is_relative_to(root)]
    return [*reversed(between), here]


def _first(folder: Path, names: Sequence[str]) -> tuple[Path, bytes] | None:
    for name in names:
        path = folder / name
        try:
            if not path.is_symlink():
                return path, read_regular(path, _MOST_READ)
        except (OSError, NotReadable):
            continue
    return None
