"""Rollouts ahead of time: one version old, repeatable, and whole however their worker ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from looping import CONFIG, TASKS, Loop, logged_groups, parity, same, tiny_model

from nano_rl import remote_rollouts
from nano_rl.curriculum import Curriculum
from nano_rl.errors import GuardTripped, RolloutsFailed
from nano_rl.gather import Sources
from nano_rl.interrupt import TrainingStopped
from nano_rl.metrics import read_metrics
from nano_rl.states import States
from nano_rl.used import read_used
from nano_rl.watch.events import EventKind, read_events
from nano_shared.errors import UsageError
from nano_shared.scratch import PREFIX, in_memory
from nano_shared.store import LogStore

HERE = Path(__file__).parent
AHEAD = CONFIG.model_copy(update={"overlap": True, "heartbeat_seconds": 60.0})


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


class Killed(BaseException):
    """Stands for a process that is gone: nothing in the loop catches it."""


def workers(parent: int | None = None) -> dict[int, int]:
    """Rollout workers that run now, with their parents."""
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        try:
            words = (place / "cmdline").read_bytes().split(b"\0")
            above = int((place / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            continue
        if b"nano_rl.rollout_worker" in words and above == (parent or os.getpid()):
            found[int(place.name)] = above
    return found


def shared_folders() -> set[Path]:
    places = [tempfile.gettempdir(), in_memory() or tempfile.gettempdir()]
    return {path for place in places for path in Path(place).glob(f"{PREFIX}rollouts-*")}


@pytest.fixture(autouse=True)
def _nothing_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """However a test ends: no worker of this process, and no folder that it shared with one."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    monkeypatch.setattr(remote_rollouts, "in_memory", lambda: str(scratch))
    threads = torch.get_num_threads()
    yield
    assert workers() == {}
    assert list(scratch.glob(f"{PREFIX}rollouts-*")) == []
    assert torch.get_num_threads() == threads


def versions(loop: Loop) -> list[set[int]]:
    """Of each step, the versions that sampled what was learned from, as the log has them."""
    with LogStore.open(loop.folder / "log.db") as store:
        return [
            {t.completion.policy_version for g in line["groups"] for r in g["runs"] for t in store.get(r["id"] if isinstance(r, dict) else r).turns}
            for line in read_used(loop.folder / "used.jsonl")
        ]


def test_each_step_learns_from_what_the_version_before_sampled(tiny: Path, tmp_path: Path) -> None:
    loop = Loop(tiny, tmp_path)
    loop.go(AHEAD)
    assert versions(loop) == [{0}, {0}, {1}]
    rows = read_metrics(tmp_path / "metrics.jsonl")
    print(rows)
    assert [row["staleness"] for row in rows] == [0, 1, 1]
