"""What a training tells while it goes on: time by phase, success by level, sparklines, panels, events."""

from __future__ import annotations

import io
import math
import time
from itertools import pairwise
from pathlib import Path

import pytest
from builders import trajectory, turn, verdict
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from nano_rl.gather.rollouts import success_metrics
from nano_rl.learn.groups import Group
from nano_rl.learn.metrics import MetricsRow
from nano_rl.training_record import (
    ROLLOUTS,
    EventKind,
    LinesView,
    PanelLine,
    Phases,
    TrainingView,
    Watcher,
    duration,
    length,
    merge,
    open_view,
    read_events,
    read_rollouts,
    seconds_left,
    written,
)
from nano_shared.errors import GuardTripped
from nano_shared.types import Observation, Trajectory

INTERVALS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9)).map(lambda i: (i[0], i[0] + i[1])))


@given(INTERVALS)
def test_a_union_of_intervals_covers_each_moment_once(intervals: list[tuple[int, int]]) -> None:
    union = merge(intervals)
    moments = {m for begin, end in intervals for m in range(begin, end)}
    assert length(union) == len(moments)
    assert all(before[1] < after[0] for before, after in pairwise(union))


def run_at(at: float, *parts: tuple[float, float]) -> Trajectory:
    """Turns of (seconds until the tool begins, seconds that it takes), one after the other from `at`."""
    turns, now = [], at
    for index, (wait, tool) in enumerate(parts):
        seen = Observation(tool="shell", ok=True, text="", started=now + wait, ended=now + wait + tool)
        made = turn(4, 3, index=index).model_copy(
            update={"started": now, "ended": now + wait + tool, "observations": (seen,)}
        )
        turns.append(made)
        now += wait + tool
    return trajectory(*turns, run_id=f"run-{at}-{parts}").model_copy(update={"started": at})


def test_generation_and_sandbox_are_parted_where_agents_overlap() -> None:
    phases = Phases()
    begin = time.time()
    # the second agent waits for tokens while the first one's tool runs: that second is the sandbox's
    values = phases.metrics([run_at(begin, (2.0, 3.0)), run_at(begin, (3.0, 1.0), (2.0, 0.5))])
    assert values["seconds_sandbox"] == pytest.approx(3.5)
    assert values["seconds_generate"] == pytest.approx(3.0)
    assert values["tokens_rollout"] == 9
    assert values["tokens_observed"] == 4
    assert values["tokens_per_second_generate"] == pytest.approx(3.0)
    assert values["tokens_per_second_sandbox"] == pytest.approx(4 / 3.5)


def _slow_failure() -> None:
    time.sleep(0.02)
    raise KeyError


def test_a_phase_is_timed_also_when_it_fails_and_told_once() -> None:
    phases = Phases()
    with pytest.raises(KeyError), phases("train"):
        _slow_failure()
    values = phases.metrics(trained_tokens=50.0)
    assert values["seconds_train"] >= 0.02
    assert values["tokens_per_second_train"] == pytest.approx(50 / values["seconds_train"])
    assert "seconds_train" not in phases.metrics()


def test_logged_runs_cost_this_step_no_time() -> None:
    phases = Phases()
    values = phases.metrics([run_at(time.time() - 3600, (2.0, 3.0))])
    assert values.pop("step_time") < 60
    assert values == {"tokens_rollout": 0, "tokens_observed": 0}


# ------------------------------------------------------------------------------------- success


def group_of(key: str, level: int | None, *rewards: float | None) -> Group:
    runs = []
    for n, reward in enumerate(rewards):
        run = trajectory(run_id=f"{key}-{n}", key=key).model_copy(update={"verdict": verdict(reward)})
        task = run.task.model_copy(update={"level": level, "family": f"family {key}"})
        runs.append(run.model_copy(update={"task": task}))
    return Group(task_key=key, trajectories=tuple(runs))


def test_success_is_counted_by_level_and_the_error_is_that_of_groups() -> None:
    groups = [group_of("a", 0, 1.0, 1.0), group_of("b", 1, 0.0, 0.5, None), group_of("c", None, 1.0, 0.0)]
    metrics = success_metrics(groups)
    assert metrics["success/all"] == 3 / 6
    assert (metrics["success/level_0"], metrics["graded/level_0"]) == (1.0, 2)
    assert (metrics["success/level_1"], metrics["graded/level_1"]) == (0.0, 2)
    means = [1.0, 0.25, 0.5]
    deviation = math.sqrt(sum((m - sum(means) / 3) ** 2 for m in means) / 2)
    assert metrics["reward_error"] == pytest.approx(deviation / math.sqrt(3))


def test_nothing_graded_tells_no_success() -> None:
    assert success_metrics([group_of("a", 0, None, None)]) == {}


# ---------------------------------------------------------------------------- lines


def test_the_time_left_is_that_of_the_middle_step() -> None:
    rows: list[MetricsRow] = [{"seconds_rollout": s, "seconds_train": 1.0} for s in (1.0, 1.0, 99.0)]
    assert seconds_left(rows, 3, 13) == 20
    assert seconds_left([], 0, 13) is None
    assert (duration(61), duration(3601)) == ("1:01", "1:00:01")


ROW = {
    "reward_mean": 0.625, "reward_error": 0.05, "success/all": 0.5, "graded/all": 8.0,
    "success/level_2": 0.25, "graded/level_2": 4.0, "entropy": 0.7, "grad_norm": 1.5,
    "tokens_per_second_train": 1234.0,
    "seconds_rollout": 3.0, "seconds_train": 2.0, "stale": 0.0,
}  # fmt: skip


def test_elsewhere_a_step_is_one_plain_line(capsys: pytest.CaptureFixture[str]) -> None:
    view = open_view("mine", 10, [], console=Console(file=io.StringIO()))
    assert isinstance(view, LinesView)
    with view:
        view.step_done(4, 10, ROW)
    told = capsys.readouterr()
    assert told.out == ""
    (line,) = told.err.splitlines()
    assert line.startswith("step 4/10  reward 0.625  success 50.0%")
    assert "\x1b" not in line


def test_a_metric_that_is_no_number_is_a_dash() -> None:
    assert written(PanelLine("loss", ""), {"loss": None}) == "-"


# -------------------------------------------------------------------------------------- watcher


def _trip(watch: Watcher, groups: list[Group]) -> None:
    watch.on_groups(1, groups, [])
    raise GuardTripped("step 1: too far")


def test_a_watcher_keeps_rollouts_and_events_and_a_resumed_one_cuts_back(tmp_path: Path) -> None:
    groups = [group_of("a", 3, 1.0, None)]
    with Watcher(tmp_path, TrainingView(), [], done=0) as watch:
        for step in range(3):
            watch.on_groups(step, groups, [trajectory(run_id="control", reward=0.0)])
            watch.on_step(step + 1, 4, {"step": step, "loss": math.nan})
    tripped = Watcher(tmp_path, TrainingView(), [], done=2)
    with pytest.raises(GuardTripped), tripped as watch:
        _trip(watch, groups)
    steps = read_rollouts(tmp_path / ROLLOUTS)
    assert list(steps) == [0, 1]
    first, second, control = steps[0]
    assert (first.id, first.level, first.family, first.success) == ("a-0", 3, "family a", True)
    assert (second.reward, second.success) == (None, None)
    assert control.control
    kinds = [(event.kind, event.step, event.text) for event in read_events(tmp_path)]
    assert kinds == [
        (EventKind.STARTED, 0, ""),
        (EventKind.FINISHED, 3, ""),
        (EventKind.RESUMED, 2, ""),
        (EventKind.GUARD, 2, "step 1: too far"),
    ]
