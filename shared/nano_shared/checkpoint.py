"""Checkpoints: a folder in the ecosystem's own format, and a manifest with its provenance.

Imports no torch: this module moves, names and verifies files. A checkpoint appears complete, by rename, and
is never changed afterwards; `latest` is a pointer file beside the checkpoints, which promotion moves.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, Protocol

from filelock import FileLock, Timeout
from pydantic import Field, JsonValue, ValidationError, field_validator

from nano_shared.errors import CheckpointError
from nano_shared.files import (
    checkpoints_dir,
    content_hash,
    durable_folder,
    file_hash,
    sweep,
    user_path,
    write_text,
)
from nano_shared.types import Split, Value

MANIFEST = "manifest.json"
LATEST = "latest"
VERSION = 1
_LISTED = 1000


class Listed(Protocol):
    """The part of a task that TrainedOn needs: a Task, or what a preference pair keeps of one."""

    @property
    def id(self) -> str: ...

    @property
    def split(self) -> Split | None: ...


class TrainedOn(Value):
    """The logged runs and tasks that the weights were trained on."""

    runs: int = Field(0, ge=0)
    runs_hash: str | None = None
    """content hash of all run ids, sorted"""
    run_ids: tuple[str, ...] = ()
    """the first thousand of them, sorted"""
    tasks: int = Field(0, ge=0)
    tasks_hash: str | None = None
    """content hash of all task ids, sorted"""
    task_ids: tuple[str, ...] = ()
    """the first thousand of them, sorted: ids are hashes, so this is a random sample"""
    splits: dict[str, str] = Field(default_factory=dict)
    """split -> content hash of its task ids, sorted; tasks without a split are under `none`"""

    @classmethod
    def of(cls, run_ids: Iterable[str], tasks: Iterable[Listed]) -> TrainedOn:
        runs = sorted(set(run_ids))
        by_split: dict[str, set[str]] = {}
        for task in tasks:
            by_split.setdefault(task.split or "none", set()).add(task.id)
        task_ids = sorted(set().union(*by_split.values()))
        return cls(
            runs=len(runs),
            runs_hash=content_hash(runs),
            run_ids=tuple(runs[:_LISTED]),
            tasks=len(task_ids),
            tasks_hash=content_hash(task_ids),
            task_ids=tuple(task_ids[:_LISTED]),
            splits={split: content_hash(sorted(ids)) for split, ids in sorted(by_split.items())},
        )


class Manifest(Value):
    version: Literal[1] = 1
    name: str
    kind: Literal["adapter", "full", "reward_model"]
    base_model: str
    """name or content hash of the base of an adapter, or of the weights that training began from"""
    parent: str | None = None
    """checkpoint that this one was trained from"""
    profile: str
    """name of the interface profile"""
    profile_hash: str
    template_hash: str
    tools_hash: str
    policy_version: int = Field(0, ge=0)
    """optimizer steps behind the weights"""
    trained_on: TrainedOn = TrainedOn()
    config: dict[str, JsonValue] = Field(default_factory=dict)
    metrics: dict[str, JsonValue] = Field(default_factory=dict)
    code_version: str
    created: float
    """unix seconds"""
    files: dict[str, str] = Field(default_factory=dict)
    """relative name -> `sha256:` of its bytes; filled by write_manifest"""

    @field_validator("files")
    @classmethod
    def _inside(cls, files: dict[str, str]) -> dict[str, str]:
        for name in files:
            if not name or name.startswith("/") or ".." in name.split("/"):
                raise ValueError(f"file name {name!r} must be relative and stay inside the checkpoint")
        return files


def write_manifest(directory: Path, manifest: Manifest) -> Manifest:
    """Hash every file of the folder into the manifest, write it, and return it as written."""
    files = {
        path.relative_to(directory).as_posix(): file_hash(path)
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path != directory / MANIFEST
    }
    complete = manifest.model_copy(update={"files": files})
    write_text(directory / MANIFEST, complete.model_dump_json(indent=2) + "\n", CheckpointError)
    return complete


def read_checkpoint(directory: Path, *, verify: bool = True) -> Manifest:
    """The manifest of a checkpoint folder; checks that its files exist and, with `verify`, their hashes.

    Raises CheckpointError for a missing folder or manifest, a manifest of a newer nano, and a missing or
    corrupt file.
    """
    if not directory.is_dir():
        raise CheckpointError(
            f"no such checkpoint: {directory} is not a folder; see nano-rl checkpoints list"
        )
    manifest = _parse(directory / MANIFEST)
    for name, expected in manifest.files.items():
        path = directory / name
        if not path.is_file():
            raise CheckpointError(f"checkpoint {directory}: {name} is missing; copy the folder again, whole")
        if verify and file_hash(path) != expected:
            raise CheckpointError(f"checkpoint {directory}: {name} is corrupt; copy the folder again")
    return manifest


@contextmanager
def atomic_checkpoint(target: Path) -> Iterator[Path]:
    """Yields an empty folder beside `target` that is renamed to `target` if the block ends without an error.

    A killed process leaves no checkpoint; the next call removes the remains. Raises CheckpointError if the
    target exists, or while another process writes it.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(target.parent / f".{target.name}.lock", timeout=0):
            yield from _write_beside(target)
    except Timeout:
        raise CheckpointError(f"checkpoint {target} is being written by another process") from None


def _write_beside(target: Path) -> Iterator[Path]:
    if target.exists():
        raise CheckpointError(f"checkpoint {target} exists, and a checkpoint never changes; name another")
    sweep(target.parent, target.name)
    with durable_folder(target, CheckpointError) as temporary:
        yield temporary


def resolve_checkpoint(name_or_path: str | Path) -> Path:
    """The folder of a checkpoint given by path, by name in NANO_HOME, or as "latest".

    Raises CheckpointError with the existing names.
    """
    text = str(name_or_path)
    if text == LATEST:
        latest = latest_checkpoint()
        if latest is None:
            raise CheckpointError("no checkpoint has been promoted yet; see nano-rl checkpoints promote")
        return latest
    named = checkpoints_dir() / text
    for candidate in (named, user_path(text)):
        if (candidate / MANIFEST).is_file():
            return candidate
    known = ", ".join(checkpoint_names()) or "none"
    raise CheckpointError(f"no checkpoint {text!r}: no such folder holds a {MANIFEST}; known: {known}")


def folder_content(folder: Path) -> str:
    """Hash of a folder's files; its manifest, which holds its name and date, does not count."""
    files = sorted(file for file in folder.iterdir() if file.is_file() and file.name != MANIFEST)
    return content_hash([[file.name, file_hash(file)] for file in files])


def checkpoint_names() -> list[str]:
    """Names of the checkpoints in NANO_HOME, sorted."""
    return sorted(path.parent.name for path in checkpoints_dir().glob(f"[!.]*/{MANIFEST}"))


def pointer_of(project: str | None) -> Path:
    """The file that names the checkpoint promoted for a project (`project_id`); None: for all."""
    return checkpoints_dir() / (LATEST if project is None else f".projects/{project}")


def promoted_for_projects() -> dict[str, str]:
    """Project (`project_id`) -> name of the checkpoint that is promoted for it."""
    pointers = pointer_of("*")
    return {path.name: path.read_text().strip() for path in sorted(pointers.parent.glob(pointers.name))}


def latest_checkpoint(project: str | None = None) -> Path | None:
    """The checkpoint promoted for a project, or for all; None if there is none.

    Raises CheckpointError if the pointer leads nowhere.
    """
    pointer = pointer_of(project)
    try:
        name = pointer.read_text().strip()
    except FileNotFoundError:
        return None
    except IsADirectoryError:
        raise CheckpointError(
            f"{pointer} is a folder, and nano keeps the name of the promoted checkpoint there: rename that"
            " folder, and what it holds is a checkpoint by its new name"
        ) from None
    except (OSError, UnicodeDecodeError) as problem:
        raise CheckpointError(
            f"{pointer} cannot be read ({problem}); promote a checkpoint to replace it"
        ) from None
    target = checkpoints_dir() / name
    if not name or not (target / MANIFEST).is_file():
        raise CheckpointError(f"{pointer} names {name!r}, which is no checkpoint; promote another")
    return target


def latest_name(target: Path) -> str:
    """The text that the `latest` pointer holds for a checkpoint: its name in NANO_HOME, else its absolute
    path."""
    target = target.absolute()
    return target.name if target.parent == checkpoints_dir().absolute() else str(target)


def point_latest(name: str | None, project: str | None = None) -> None:
    """Atomically set the pointer of a project, or of all, to a `latest_name`; None removes it."""
    pointer = pointer_of(project)
    pointer.parent.mkdir(parents=True, exist_ok=True)
    if name is None:
        pointer.unlink(missing_ok=True)
    else:
        write_text(pointer, f"{name}\n", CheckpointError)


def _parse(path: Path) -> Manifest:
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} is not a checkpoint: it holds no {MANIFEST}") from None
    except ValueError as error:
        raise CheckpointError(f"checkpoint {path.parent}: {MANIFEST} is corrupt ({error})") from error
    version = value.get("version") if isinstance(value, dict) else None
    if isinstance(version, int) and version > VERSION:
        raise CheckpointError(
            f"checkpoint {path.parent} was written by a newer nano (manifest {version}, this one reads "
            f"{VERSION}); upgrade nano"
        )
    try:
        return Manifest.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "it"
        raise CheckpointError(f"checkpoint {path.parent}: {MANIFEST}: {where}: {first['msg']}") from error
