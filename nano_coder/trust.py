"""Which project files the user trusts, by directory, file and the hash of what was in it when he said so, and
the chain of a project's AGENTS.md. What a project brings along is untrusted until then."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from fnmatch import fnmatch
from pathlib import Path

import platformdirs
from pydantic import TypeAdapter, ValidationError

from nano_shared.errors import ConfigError
from nano_shared.files import NotReadable, read_regular, write_text
from nano_shared.types import InstructionFile

_TRUSTED = TypeAdapter(dict[str, dict[str, str]])


def is_trusted(path: Path, content: bytes) -> bool:
    return trusted_files().get(os.path.realpath(path.parent), {}).get(path.name) == _hash(content)


def trust(path: Path, content: bytes) -> None:
    """Let these bytes count, at this place."""
    with _locked():
        files = trusted_files()
        files.setdefault(os.path.realpath(path.parent), {})[path.name] = _hash(content)
        _write(files)


def revoke(directory: Path) -> bool:
    """Trust nothing of a directory any more; whether there was anything."""
    with _locked():
        files = trusted_files()
        known = files.pop(os.path.realpath(directory), None)
        if known:
            _write(files)
    return known is not None


def trusted_files() -> dict[str, dict[str, str]]:
    """Directory -> file -> hash. Raises ConfigError where the list is damaged."""
    path = _list_path()
    try:
        return _TRUSTED.validate_json(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValidationError) as problem:
        raise ConfigError(f"cannot read {path}: {problem}; take it away to trust nothing") from None


def _list_path() -> Path:
    # beside the user's configuration, not in NANO_HOME, which may be a folder that a project brings along
    return platformdirs.user_config_path("nano") / "trusted.json"


def _hash(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def _locked() -> AbstractContextManager[object]:
    from filelock import FileLock

    path = _list_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(path.with_suffix(".lock"))


def _write(files: dict[str, dict[str, str]]) -> None:
    write_text(_list_path(), json.dumps(files, indent=1) + "\n", ConfigError)


MOST_INSTRUCTIONS = 32 << 10
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
        text = own[1][:MOST_INSTRUCTIONS].decode("utf-8", "replace").strip()
        found.append(InstructionFile(path=f"~/{own[0].name}", text=text, trusted=True))
    root, left = project_root(directory), MOST_INSTRUCTIONS
    for path, content in project_files(directory, wanted):
        if left > 0:
            text = content[:left].decode("utf-8", "replace").strip()
            left -= len(content)
            name = os.path.relpath(path, root)
            found.append(InstructionFile(path=name, text=text, trusted=is_trusted(path, content)))
    return tuple(one for one in found if one.text)


def project_files(directory: Path, names: Sequence[str]) -> Iterator[tuple[Path, bytes]]:
    """The project's files of the chain with their whole contents, outermost first."""
    here, root = directory.resolve(), project_root(directory)
    between = [folder for folder in here.parents if folder.is_relative_to(root)]
    for folder in [*reversed(between), here]:
        if found := _first(folder, names):
            yield found


def project_root(directory: Path) -> Path:
    """The nearest directory above with a repository; the directory itself if there is none."""
    here = directory.resolve()
    return next((folder for folder in (here, *here.parents) if (folder / ".git").exists()), here)


def _first(folder: Path, names: Sequence[str]) -> tuple[Path, bytes] | None:
    for name in names:
        path = folder / name
        try:
            if not path.is_symlink():
                return path, read_regular(path, _MOST_READ)
        except (OSError, NotReadable):
            continue
    return None
