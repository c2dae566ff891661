"""The simulation of scale_simulate.py: exact where a step can be reckoned by hand, and within its rules."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import simpy

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from scale_simulate import PROBE, Cluster, Engine, Training

ENGINE = {"request": 0.5, "prefill": 0.01, "token": 0.1, "row": 0.02}
WORK = {
    "runs": [[[10, 4, 2.0], [5, 2, 1.0]]], "start": 0.3, "gap": 0.2, "grade": 0.7, "update": 3.0,
    "update_token": 0.05, "rest": 0.25, "cpu_a_turn": 0.1, "adapter_bytes": 0,
}  # fmt: skip


def cluster(**more: Any) -> Cluster:
    sizes = {"engines": 1, "bound": 0, "prompts": 1, "group": 1, "steps": 6, "sync": 1.0, "store": 1e9}
    return Cluster(**{**sizes, **more})


def simulated(**more: Any) -> dict[str, Any]:
    return Training({"engine": ENGINE, "work": WORK}, cluster(**more)).run()


def answer(prefill: int, tokens: int) -> float:
    """Of a row alone: a pass that prefills and gives the first token, and one for each further token."""
    return ENGINE["token"] + ENGINE["prefill"] * prefill + (tokens - 1) * (ENGINE["token"] + ENGINE["row"])


def test_a_synchronous_step_of_one_run_takes_what_its_parts_take() -> None:
    turns = 0.5 + answer(10, 4) + 2.0 + 0.1 + 0.1 + 0.5 + answer(5, 2) + 1.0 + 0.1
    rollout = 0.3 + turns + 0.7
    step = 1.0 + answer(*PROBE) + rollout + 3.0 + 0.05 * 6 + 0.25
    found = simulated()
    assert found["steps_an_hour"] == pytest.approx(3600 / step)
    assert found["trainer_idle"] == pytest.approx(rollout / step)
    assert found["staleness"] == 0


def test_two_rows_that_come_together_share_their_passes() -> None:
    env = simpy.Environment()
    engine = Engine(env, ENGINE)
    rows = [engine.sample(0, 10, tokens) for tokens in (3, 5)]
    ends = []
    for row in rows:
        row.callbacks.append(lambda _: ends.append(env.now))
    env.run(env.all_of(rows))
    first = 0.1 + 0.01 * 20 + 2 * (0.1 + 2 * 0.02)
    assert ends == pytest.approx([first, first + 2 * (0.1 + 0.02)])
    assert engine.busy == pytest.approx(ends[-1])


def test_rows_of_two_versions_take_two_passes() -> None:
    env = simpy.Environment()
    engine = Engine(env, ENGINE)
    rows = [engine.sample(version, 10, 3) for version in (0, 1)]
    env.run(env.all_of(rows))
    assert env.now == pytest.approx(0.1 + 0.01 * 20 + 2 * (2 * 0.1 + 2 * 0.02))


@pytest.mark.parametrize("bound", [1, 2, 4])
def test_no_token_is_older_than_the_bound_and_steps_ahead_pay(bound: int) -> None:
    sizes = {"steps": 12, "prompts": 4, "group": 4}
    training = Training({"engine": ENGINE, "work": WORK}, cluster(bound=bound, **sizes))
    found = training.run()
    assert 0 < max(training.ages) <= bound
    assert found["steps_an_hour"] > simulated(**sizes)["steps_an_hour"]


def test_two_engines_share_the_runs() -> None:
    one, two = (simulated(engines=count, prompts=4, group=4)["steps_an_hour"] for count in (1, 2))
    assert two > 1.05 * one
