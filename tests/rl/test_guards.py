"""Guards: each stops the run with its own sentence, and a healthy step passes them all."""

from __future__ import annotations

import math

import pytest
import torch
from builders import flat_batch, flat_logprobs, terms, trajectory

from nano_rl.learn.config import GuardConfig
from nano_rl.learn.groups import form_groups, group_metrics
from nano_rl.learn.guards import check_step
from nano_rl.learn.loss import mean_metrics, policy_loss
from nano_shared.errors import GuardTripped, NanoError

CONFIG = GuardConfig()
HEALTHY = {
    "step": 0, "update": 0, "tokens": 100, "loss": 0.1, "grad_norm": 1.0, "ratio_deviation_max": 0.0,
    "mismatch": 1e-6, "mismatch_max": 5e-5, "kl_reference": 0.0, "frac_zero_std": 0.5, "reward_min": 0.0,
    "reward_max": 1.0, "stale": 0,
}  # fmt: skip


def test_healthy_step_passes() -> None:
    check_step(HEALTHY, CONFIG, earlier=[HEALTHY] * 5)
    check_step({}, CONFIG)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"tokens": 0}, "the mask is empty"),
        ({"loss": math.nan}, "loss is nan"),
        ({"grad_norm": math.inf}, "grad_norm is inf"),
        ({"ratio_deviation_max": 1e-7}, "ratio is 1e-07 away from 1 on the first update"),
        ({"ratio_deviation_max": math.nan}, "ratio is nan away from 1"),
        ({"kl_reference": 0.01}, "KL to the reference is 0.01 before any update"),
        (
            {"mismatch_relative_max": 2e-4},
            "fresh tokens differ by 0.0002 (mismatch_relative_max), more than 0.0001",
        ),
        ({"mismatch_relative_max": math.nan}, "fresh tokens differ by nan"),
    ],
)
def test_guard_trips_with_its_sentence(change: dict[str, float], sentence: str) -> None:
    with pytest.raises(GuardTripped) as error:
        check_step(HEALTHY | change, CONFIG)
    assert str(error.value).startswith("step 0: ")
    assert sentence in str(error.value)
    assert isinstance(error.value, NanoError)


def test_later_updates_on_the_same_rollouts_may_move_the_ratio() -> None:
    check_step(HEALTHY | {"update": 1, "ratio_deviation_max": 0.3, "kl_reference": 0.1}, CONFIG)


def test_later_steps_may_leave_the_reference() -> None:
    check_step(HEALTHY | {"step": 4, "kl_reference": 0.1}, CONFIG)


def test_stale_rows_excuse_the_mismatch_and_nothing_else() -> None:
    stale = HEALTHY | {"stale": 3, "mismatch_relative_max": 1.0}
    check_step(stale, CONFIG)
    with pytest.raises(GuardTripped, match="away from 1"):
        check_step(stale | {"ratio_deviation_max": 0.1}, CONFIG)


def test_bfloat16_is_judged_by_the_mean() -> None:
    check_step(HEALTHY | {"mismatch_relative_max": 0.5, "mismatch_relative": 0.01}, CONFIG, bfloat16=True)
    with pytest.raises(GuardTripped, match=r"differ by 0.06 \(mismatch_relative\), more than 0.05"):
        check_step(HEALTHY | {"mismatch_relative": 0.06}, CONFIG, bfloat16=True)


def test_dead_groups_stop_the_run_only_after_several_steps() -> None:
    dead = HEALTHY | {"frac_zero_std": 1.0}
    check_step(dead, CONFIG, earlier=[dead])
    check_step(dead, CONFIG, earlier=[dead, HEALTHY, dead])
    with pytest.raises(GuardTripped, match="all groups of 3 steps are dead"):
        check_step(dead, CONFIG, earlier=[HEALTHY, dead, dead])


def test_constant_reward_stops_the_run_only_after_several_steps() -> None:
    constant = HEALTHY | {"reward_max": 0.0, "frac_zero_std": 1.0}
    check_step(constant, CONFIG, earlier=[constant])
    with pytest.raises(GuardTripped, match="every reward of 3 steps is 0"):
        check_step(constant, CONFIG, earlier=[constant, constant])


def test_steps_without_any_score_count_as_dead() -> None:
    unscored = {"frac_zero_std": 1.0}
    with pytest.raises(GuardTripped, match="dead"):
        check_step(unscored, CONFIG, earlier=[unscored, unscored])


def test_guards_read_the_metrics_that_the_trainer_computes() -> None:
    groups = form_groups([trajectory(run_id=str(i), reward=float(i)) for i in range(2)])

    def step(behaviour: list[float], old: list[float] | None = None) -> dict[str, float]:
        batch = flat_batch([1.0, -1.0], behaviour=behaviour, old=old, reference=[-1.0, -2.0])
        _, metrics = policy_loss(flat_logprobs([-1.0, -2.0]), batch, terms(beta=0.1))
        return {"step": 0, **mean_metrics([metrics]), **group_metrics(groups)}

    check_step(step([-1.0, -2.0]), CONFIG)
    with pytest.raises(GuardTripped, match="sampler and trainer"):
        check_step(step([-1.0, -2.1]), CONFIG)
    with pytest.raises(GuardTripped, match="ratio"):
        check_step(step([-1.0, -2.0], old=[-1.0, -2.1]), CONFIG)


def test_empty_batch_trips_the_mask_guard() -> None:
    batch = flat_batch([1.0])
    batch.mask_BT[:] = False
    _, metrics = policy_loss(torch.zeros(1, 2), batch, terms())
    with pytest.raises(GuardTripped, match="the mask is empty"):
        check_step(mean_metrics([metrics]), CONFIG)
