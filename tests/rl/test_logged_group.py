"""Runs stay in their log until a step takes them: columns before, tokens then, and none that is damaged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from recorded import ADD, FAIL, SECOND, SOLVE, build_model, recorded, relogged

from nano_coder.models.opening import OpenedWeights, local_policy, open_weights
from nano_coder.verify.trainable import RefusalCode
from nano_rl.config import TrainConfig
from nano_rl.gather.step_groups import ReplayBuffer, Sources
from nano_rl.logs import logged_groups as log_reader
from nano_rl.logs.logged_groups import LogContents, lineage, read_logs
from nano_shared.errors import LogError
from nano_shared.store import LogStore
from nano_shared.types import Trajectory

torch.set_num_threads(1)
BAD = "the-damaged-run"
CONFIG = TrainConfig(group_size=0)


@dataclass(frozen=True)
class Recorded:
    folder: Path
    opened: OpenedWeights
    runs: list[Trajectory]
    """of two tasks, a pass and a failure of each, and a pass of the first whose mask begins early"""


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    folder = tmp_path_factory.mktemp("recorded")
    opened = open_weights(str(build_model(folder / "model")))
    passed, failed, third = recorded(opened, folder, SOLVE, FAIL, SOLVE)
    second = recorded(opened, folder, SOLVE, FAIL, task=SECOND)
    return Recorded(folder, opened, [passed, failed, *second, mask_begins_early(third)])


def mask_begins_early(run: Trajectory) -> Trajectory:
    turn = run.turns[1]
    tokens = turn.completion.tokens
    assert tokens is not None
    shifted = tokens.model_copy(
        update={
            "context_ids": tokens.context_ids[:-1],
            "sampled_ids": (tokens.context_ids[-1], *tokens.sampled_ids),
            "logprobs": (-0.1, *tokens.logprobs),
        }
    )
    completion = turn.completion.model_copy(update={"tokens": shifted})
    turns = (run.turns[0], turn.model_copy(update={"completion": completion}), *run.turns[2:])
    return run.model_copy(update={"id": BAD, "turns": turns})


@pytest.fixture
def store(log: Recorded, tmp_path: Path) -> Iterator[LogStore]:
    with relogged(log.runs, log.folder, tmp_path) as store:
        yield store


def read(log: Recorded, store: LogStore) -> LogContents:
    template = local_policy(log.opened.loaded, log.opened.profile).template_hash
    return read_logs([store], log.opened, template, lineage(log.opened), CONFIG)


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log counts as one whose runs are not all looked at before the first step."""
    monkeypatch.setattr(log_reader, "VERIFY_AT_START", 0)


def buffer_of(contents: LogContents) -> ReplayBuffer:
    return ReplayBuffer(
        contents.groups, uses=1, max_staleness=None, seed=0, policy_versions=contents.policy_versions
    )


def test_a_small_log_is_looked_at_before_the_first_step(log: Recorded, store: LogStore) -> None:
    contents = read(log, store)
    assert contents.verified
    assert contents.runs == 4
    assert sum(contents.refused.values()) == 1
    assert all(RefusalCode(code).damage for code in contents.refused)


@pytest.mark.usefixtures("large")
def test_a_damaged_run_of_a_large_log_leaves_when_it_is_taken(log: Recorded, store: LogStore) -> None:
    contents = read(log, store)
    assert (contents.runs, contents.refused, contents.verified) == (5, {}, False)
    assert "the tokens of a run are looked at when a step takes it" in contents.report()
    buffer = buffer_of(contents)
    drawn = buffer.draw(2, 9, version=0)
    sound = {run.id: run for run in log.runs if run.id != BAD}
    assert {run.id: run for group in drawn for run in group.trajectories} == sound
    assert (buffer.damaged, buffer.left(0)) == ({BAD}, 0)
    later = buffer_of(contents)
    later.restore(buffer.state())
    assert later.draw(2, 9, version=0) == []


@pytest.mark.usefixtures("large")
def test_nothing_is_loaded_but_the_group_that_is_taken(
    log: Recorded, store: LogStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []
    whole = LogStore.get

    def get(self: LogStore, run: str) -> Trajectory:
        loaded.append(run)
        return whole(self, run)

    monkeypatch.setattr(LogStore, "get", get)
    contents = read(log, store)
    assert loaded == []
    (group,) = buffer_of(contents).draw(1, 2, version=0)
    assert len(loaded) == 2
    assert {run.task.key for run in log.runs if run.id in loaded} == {group.task_key}


@pytest.mark.usefixtures("large")
def test_a_training_goes_on_with_the_runs_that_it_began_with(log: Recorded, store: LogStore) -> None:
    began = Sources(logged=read(log, store).groups)
    told = began.logged_runs()
    again = log.runs[0].turns[0].model_copy(update={"started": 1.0})
    store.append(log.runs[0].model_copy(update={"id": "newer", "turns": (again, *log.runs[0].turns[1:])}))
    grown = Sources(logged=read(log, store).groups)
    assert len(grown.logged_runs()["born"]) == 0
    assert sum(map(len, grown.logged_runs()["groups"])) == 6
    assert grown.only(told, store.blobs).logged_runs()["groups"] == told["groups"]
    assert [task.key for task in began.every_task] == [ADD.key, SECOND.key]


def test_the_task_of_a_run_is_read_without_it(log: Recorded, store: LogStore) -> None:
    assert store.task(log.runs[0].id) == log.runs[0].task
    with pytest.raises(LogError, match="no run 'nobody' in the log"):
        store.task("nobody")
