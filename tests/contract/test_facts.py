"""The facts of a run are the same from the columns of a log as from the run in memory."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from log_values import a_run, a_turn, trajectories

from nano_shared.logged_run import Feedback, FeedbackKind
from nano_shared.run_facts import RunFilter, facts_of
from nano_shared.store import LogStore
from nano_shared.types import Sampling, Trajectory

pytestmark = pytest.mark.usefixtures("backend")


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(trajectories())
def test_streamed_facts_are_those_of_the_run(run: Trajectory) -> None:
    with tempfile.TemporaryDirectory() as folder, LogStore.open(Path(folder) / "log.db") as store:
        store.append(run)
        (facts,) = store.facts()
    assert facts == facts_of(run)
    assert facts.draw == facts_of(run).draw


def test_a_time_of_minus_zero_is_the_zero_that_the_log_keeps(tmp_path: Path) -> None:
    turn = a_turn().model_copy(update={"started": -0.0, "ended": -0.0})
    bare = turn.completion.model_copy(update={"tokens": None, "sampling": Sampling()})
    run = a_run(turns=(turn.model_copy(update={"completion": bare}),))
    with LogStore.open(tmp_path / "log.db") as store:
        store.append(run)
        (facts,) = store.facts()
    assert facts.draw == facts_of(run).draw


def test_runs_come_by_task_and_oldest_first(tmp_path: Path) -> None:
    task = a_run().task
    with LogStore.open(tmp_path / "log.db") as store:
        for name, key, started in (("r1", "b", 2.0), ("r2", "a", 3.0), ("r3", "b", 1.0), ("r4", "A", 4.0)):
            store.begin(a_run(name, task=task.model_copy(update={"key": key}), started=started))
        assert [run.id for run in store.facts()] == ["r4", "r2", "r3", "r1"]
        assert [run.id for run in store.facts(RunFilter(task="[ab]"))] == ["r2", "r3", "r1"]
        assert [run.id for run in store.facts(RunFilter(since=2.5))] == ["r4", "r2"]
        assert [run.id for run in store.facts(RunFilter(runs=("r3",)))] == ["r3"]


def test_a_policy_is_found_by_its_name_and_by_its_weights(tmp_path: Path) -> None:
    with LogStore.open(tmp_path / "log.db") as store:
        store.begin(a_run("named", policy="mine"))
        store.begin(a_run("sampled", policy="other"))
        store.append_turn("sampled", a_turn())
        weights = a_turn().completion.policy_id
        assert [run.id for run in store.facts(RunFilter(policy="mine"))] == ["named"]
        assert [run.id for run in store.facts(RunFilter(policy=weights))] == ["sampled"]


def test_opinions_are_told_and_notes_are_not(tmp_path: Path) -> None:
    with LogStore.open(tmp_path / "log.db") as store:
        for name in ("liked", "noted"):
            store.begin(a_run(name))
        store.add_feedback("liked", Feedback(kind=FeedbackKind.ACCEPT, created=1.0))
        store.add_feedback("noted", Feedback(kind=FeedbackKind.NOTE, text="hm", created=1.0))
        assert {run.id: run.opinions for run in store.facts()} == {"liked": True, "noted": False}


def test_copies_share_their_draw_and_other_runs_do_not(tmp_path: Path) -> None:
    one = facts_of(a_run(turns=(a_turn(0),)))
    later = a_turn(0).model_copy(update={"ended": 99.0})
    assert facts_of(a_run("copy", turns=(a_turn(0),))).draw == one.draw
    assert facts_of(a_run("later", turns=(later,))).draw != one.draw
    assert replace(one, columns={**one.columns, "id": "x"}).draw == one.draw


def test_runs_of_a_directory_come_with_those_of_its_project_elsewhere(tmp_path: Path) -> None:
    here, clone, other = (str(tmp_path / name) for name in ("here", "clone", "other"))
    with LogStore.open(tmp_path / "log.db") as store:
        store.begin(a_run("old", directory=here, project=None, started=1.0))
        # without a history the directory is its own project
        store.begin(a_run("same", directory=clone, project=here, started=2.0))
        store.begin(a_run("apart", directory=other, project=other, started=3.0))
        store.begin(a_run("nowhere", directory=None, project=None, started=4.0))
        assert sorted(run.id for run in store.facts(RunFilter(directory=here))) == ["old", "same"]
        assert [run.id for run in store.facts(RunFilter(directory=other))] == ["apart"]
        assert [run.id for run in store.facts(RunFilter(directory=here, since=1.5))] == ["same"]
        assert [run.id for run in store.facts(RunFilter(directory=clone))] == ["same"]
