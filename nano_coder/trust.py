"""Which projects' files the user trusts: by directory, file and the hash of what was in it when he said so.

What a project brings along is a stranger's until then. Whatever else it may bring that configures us (MCP
servers, plugins, its AGENTS.md) is read and asked about the same way: `is_trusted(path, content)`.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

import platformdirs
from filelock import FileLock
from pydantic import TypeAdapter, ValidationError

from nano_shared.durable import NotReadable, read_regular, write_text
from nano_shared.errors import ConfigError

PROJECT_FILE = "nano.toml"
MOST_BYTES = 1 << 14
"""a key of many dots takes the parser time that grows with the square"""
_TRUSTED = TypeAdapter(dict[str, dict[str, str]])


@dataclass(frozen=True, slots=True)
class ProjectFile:
    """A project's configuration, read once: what is hashed, shown and used are the same bytes."""

    path: Path
    content: bytes
    trusted: bool


def read_project_file(directory: Path, name: str = PROJECT_FILE) -> ProjectFile | None:
    """The nano.toml, or another file, of the directory itself and of no other above it. Raises
    ConfigError."""
    path = directory.absolute() / name
    try:
        content = read_regular(path, MOST_BYTES)
    except FileNotFoundError:
        return None
    except (OSError, NotReadable) as problem:
        raise ConfigError(f"cannot read {path}: {problem}") from None
    return ProjectFile(path, content, is_trusted(path, content))


def is_trusted(path: Path, content: bytes) -> bool:
    return trusted_files().get(_directory(path), {}).get(path.name) == _hash(content)


def trust(path: Path, content: bytes) -> None:
    """Let these bytes count, at this place."""
    with _locked():
        files = trusted_files()
        files.setdefault(_directory(path), {})[path.name] = _hash(content)
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


def _directory(path: Path) -> str:
    return os.path.realpath(path.parent)


def _hash(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def _locked() -> FileLock:
    path = _list_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(path.with_suffix(".lock"))


def _write(files: dict[str, dict[str, str]]) -> None:
    write_text(_list_path(), json.dumps(files, indent=1) + "\n", ConfigError)
