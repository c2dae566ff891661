"""The history of promotions: which checkpoint was promoted when and on what evidence; promotion and rollback.

The pointer `latest` alone determines the checkpoint that nano-coder runs; `promotions.json` beside it is the
history. A promotion writes the history first and then moves the pointer, each atomically. If it is killed in
between, the old checkpoint stays promoted, and the next promotion drops the incomplete record.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout
from pydantic import ValidationError

from nano_coder import __version__ as runtime_version
from nano_rl.checkpoints.promotion import Evidence
from nano_shared.checkpoint import (
    LATEST,
    MANIFEST,
    checkpoints_dir,
    latest_name,
    point_latest,
    read_checkpoint,
)
from nano_shared.errors import CheckpointError, UsageError
from nano_shared.files import file_hash, write_text
from nano_shared.types import Value

HISTORY = "promotions.json"


class Promotion(Value):
    """One move of the pointer."""

    kind: Literal["promoted", "forced", "rolled_back"]
    name: str | None
    """the new target of `latest`; None: no target, so that the shipped policy runs"""
    previous: str | None
    """the previous target"""
    manifest_hash: str | None
    created: float
    """unix seconds"""
    code_version: str = runtime_version
    evidence: Evidence | None = None
    objections: tuple[str, ...] = ()
    """objections that --force overruled"""


class PromotionHistory(Value):
    """The content of `promotions.json`."""

    version: Literal[1] = 1
    promotions: tuple[Promotion, ...] = ()


def promote(
    folder: Path, *, evidence: Evidence | None = None, objections: tuple[str, ...] = (), forced: bool = False
) -> Promotion:
    """Promote the checkpoint in `folder` and record the evidence.

    Raises CheckpointError for a damaged checkpoint and for a reward model.
    """
    manifest = read_checkpoint(folder)
    if manifest.kind == "reward_model":
        raise CheckpointError(f"{manifest.name} is a reward model, which runs no task; promote a policy")
    with _locked():
        return _move(
            latest_name(folder),
            kind="forced" if forced else "promoted",
            manifest_hash=file_hash(folder / MANIFEST),
            evidence=evidence,
            objections=objections,
        )


def roll_back(to: str | None = None) -> Promotion:
    """Promote the checkpoint that was promoted before the present one, or `to`, one of those before it.

    Repeated calls go further back, finally to no promoted checkpoint. Raises UsageError if there is no
    earlier promotion, CheckpointError if that checkpoint is missing or damaged.
    """
    with _locked():
        stack = _stack(read_history())
        if not stack or stack[-1] != _pointer():
            raise UsageError("there is no promotion to take back; nano-rl checkpoints promote NAME makes one")
        before = stack[:-1]
        if to is not None:
            name: str | None = latest_name(Path(to)) if "/" in to else to
            if name not in before:
                known = ", ".join(dict.fromkeys(before)) or "none"
                raise UsageError(f"{to} was not promoted before {stack[-1]}; before it were: {known}")
        else:
            name = before[-1] if before else None
        target = None if name is None else checkpoints_dir() / name
        if target is not None:
            read_checkpoint(target)
        hashed = None if target is None else file_hash(target / MANIFEST)
        return _move(name, kind="rolled_back", manifest_hash=hashed)


def read_history() -> tuple[Promotion, ...]:
    """All completed promotions, oldest first. Raises CheckpointError for a damaged file."""
    path = checkpoints_dir() / HISTORY
    try:
        records = PromotionHistory.model_validate_json(path.read_bytes()).promotions
    except FileNotFoundError:
        return ()
    except ValidationError as error:
        first = error.errors()[0]
        raise CheckpointError(
            f"{path} is damaged or of a newer nano ({first['msg']}); move it away to begin a new history"
        ) from None
    killed = records and records[-1].name != _pointer() and records[-1].previous == _pointer()
    return records[:-1] if killed else records


def promotions_of(folder: Path) -> list[Promotion]:
    """The promotions of this checkpoint, under any name."""
    hashed = file_hash(folder / MANIFEST)
    return [record for record in read_history() if record.manifest_hash == hashed]


def _move(name: str | None, **fields: Any) -> Promotion:
    """Record a promotion with these `fields`, then move the pointer."""
    record = Promotion(name=name, previous=_pointer(), created=time.time(), **fields)
    history = PromotionHistory(promotions=(*read_history(), record))
    write_text(checkpoints_dir() / HISTORY, history.model_dump_json(indent=1) + "\n", CheckpointError)
    point_latest(name)
    return record


def _stack(records: tuple[Promotion, ...]) -> list[str]:
    """The promoted checkpoints, the present one last, without those that were rolled back."""
    stack: list[str] = []
    for record in records:
        if record.kind != "rolled_back":
            if record.name is not None and stack[-1:] != [record.name]:
                if not stack and record.previous is not None:
                    stack.append(record.previous)  # promoted before there was a history
                stack.append(record.name)
        else:
            while stack and stack[-1] != record.name:
                stack.pop()
    return stack


def _pointer() -> str | None:
    try:
        return (checkpoints_dir() / LATEST).read_text().strip()
    except FileNotFoundError:
        return None


@contextmanager
def _locked() -> Iterator[None]:
    checkpoints_dir().mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(checkpoints_dir() / ".promotions.lock", timeout=10):
            yield
    except Timeout:
        raise CheckpointError(
            "another process is promoting a checkpoint; try again when it is done"
        ) from None
