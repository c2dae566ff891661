"""Rollouts ahead by a bound: no token is too old whatever is slow, and 0 is the synchronous trainer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from looping import CONFIG, Loop, same, tiny_model

from nano_cluster.served_rollouts import Pacing
from nano_rl.learn.metrics import read_metrics
from nano_rl.training_record import read_used


def ages(bound: int, steps: int, speeds: Sequence[int], random: Random) -> list[int]:
    """Ages of all tokens when they are trained, in a training where turns of rollouts, waiting in the queue
    and updates come in any order that the pacing allows. Each step has as many turns as `speeds` says."""
    pacing, sampled, found = Pacing(bound=bound, steps=steps), {}, []
    for version in range(steps):
        for step in pacing.advance(version):
            sampled[step] = []
        assert len(sampled) <= bound + 1
        # the trainer waits for its own step; others go on as chance has it
        while len(sampled[version]) < speeds[version]:
            open_steps = [step for step in sampled if len(sampled[step]) < speeds[step]]
            sampled[random.choice(open_steps)].append(version)
        found += [version - at for at in sampled.pop(version)]
        # between two updates, some go on with the weights before
        for step in sampled:
            sampled[step] += [version] * random.randint(0, speeds[step] - len(sampled[step]))
    assert pacing.begun == steps
    return found


@given(
    bound=st.integers(0, 6),
    speeds=st.lists(st.integers(1, 6), min_size=1, max_size=12),
    random=st.randoms(use_true_random=False),
)
def test_no_token_is_older_than_the_bound(bound: int, speeds: list[int], random: Random) -> None:
    found = ages(bound, len(speeds), speeds, random)
    assert len(found) == sum(speeds), "and none is discarded"
    assert min(found) >= 0
    assert max(found) <= bound


@given(bound=st.integers(0, 6), steps=st.integers(1, 12), resumed=st.integers(0, 11))
def test_each_step_begins_once_and_as_early_as_it_may(bound: int, steps: int, resumed: int) -> None:
    pacing = Pacing(bound=bound, steps=steps)
    begun = {step: version for version in range(resumed, steps) for step in pacing.advance(version)}
    assert list(begun) == list(range(resumed, steps))
    assert all(version == max(resumed, step - bound) for step, version in begun.items())


def test_a_version_never_goes_back() -> None:
    pacing = Pacing(bound=1, steps=5)
    list(pacing.advance(2))
    with pytest.raises(ValueError, match="version 1 after version 2"):
        list(pacing.advance(1))


def test_a_bound_of_0_is_the_synchronous_trainer_bit_for_bit(tmp_path: Path) -> None:
    tiny = tiny_model(tmp_path / "tiny")
    config = CONFIG.model_copy(update={"refill": 1})
    plain, paced = Loop(tiny, tmp_path / "plain"), Loop(tiny, tmp_path / "paced")
    ends = plain.go(config)
    objective = CONFIG.objective.model_copy(update={"max_staleness": 0})
    assert same(ends, paced.go(config, asynchronous=True, objective=objective))
    tasks = [
        [[g["task"] for g in line["groups"]] for line in read_used(x.folder / "used.jsonl")]
        for x in (plain, paced)
    ]
    assert tasks[0] == tasks[1]
    shared = ("reward_mean", "loss", "grad_norm", "tokens", "mismatch_max", "entropy")
    for one, other in zip(*(read_metrics(x.folder / "metrics.jsonl") for x in (plain, paced)), strict=True):
        assert [one.get(name) for name in shared] == [other.get(name) for name in shared]
