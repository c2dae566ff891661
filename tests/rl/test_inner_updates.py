"""Several updates a step: old log-probs, minibatches, PPO's credit, and the mixed loss with its shares."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import tiny_llama, trajectory, turn

from nano_preferences.critic import Critic, CriticTerms
from nano_rl.config import TrainConfig
from nano_rl.imitation import ImitationTerm, own_successes
from nano_rl.learn.advantages import RolloutBatch, credit_group
from nano_rl.learn.batch import make_batches
from nano_rl.learn.config import GuardConfig, OptimizerConfig
from nano_rl.learn.groups import Group, to_samples
from nano_rl.learn.learner import Learner
from nano_rl.learn.logprob import token_logprobs
from nano_rl.learn.loss import sft_loss
from nano_rl.learn.objectives import ObjectiveConfig
from nano_rl.learn.train_step import Updater

LOOSE = GuardConfig(mismatch_max=1e9, patience=100)


def config(**settings: Any) -> TrainConfig:
    return TrainConfig(
        steps=4, guards=LOOSE, optimizer=OptimizerConfig(learning_rate=1e-2), max_tokens=32, **settings
    )


def groups(rewards: list[list[float | None]]) -> list[Group]:
    """A group for each list, every run of its own tokens and with an observation between two turns."""
    made = []
    for g, of_group in enumerate(rewards):
        runs = [
            trajectory(
                turn([1, 2 + g], [3 + i, 4]), turn([5], [6 + g, 7 + i], index=1),
                run_id=f"run-{g}-{i}", key=f"task-{g}", reward=reward,
            )
            for i, reward in enumerate(of_group)
        ]  # fmt: skip
        made.append(Group(task_key=f"task-{g}", trajectories=tuple(runs)))
    return made


def credited(of: list[Group], settings: TrainConfig) -> RolloutBatch:
    return RolloutBatch(credited=[credit_group(group, settings.objective.terms, None) for group in of])


def step(
    settings: TrainConfig,
    of: list[Group],
    *,
    critic: Critic | None = None,
    **shown: Any,
) -> tuple[dict[str, float], Learner]:
    model = tiny_llama(torch.float32)
    learner = Learner(model, settings.optimizer, steps=settings.steps)
    imitation = ImitationTerm(weight=settings.lambda_sft, max_tokens=settings.max_tokens, **shown)
    terms = [imitation] if settings.lambda_sft else []
    updater = Updater(learner=learner, config=settings, critic=critic, terms=terms)
    rows = updater.credit(credited(of, settings), 0)
    return updater.update(rows, {"step": 0.0}, None, 0), learner


MIXED = [[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]]


def test_ac_15_the_first_of_several_updates_has_ratio_exactly_one_and_the_next_do_not() -> None:
    once, _ = step(config(), groups(MIXED))
    assert once["ratio_deviation_max"] == 0
    assert once["updates"] == 1
    several, learner = step(config(updates_per_step=2), groups(MIXED))
    assert several["updates"] == 2
    assert several["ratio_deviation_max"] > 0
    # the mean over two updates, of which the first is exactly 0
    assert 0 < several["ratio_deviation"] < several["ratio_deviation_max"]
    assert several["tokens"] == once["tokens"]
    assert learner.step == 1


def test_the_log_probs_of_the_start_are_those_of_the_first_forward_pass() -> None:
    """So leaving them out of the first update, where they are the new ones, changes nothing."""
    model = tiny_llama(torch.float32)
    rows = [row for group in groups(MIXED) for run in group.trajectories for row in to_samples(run, 1.0)]
    for batch in make_batches(rows, max_tokens=32):
        with torch.no_grad():
            old = token_logprobs(model, batch)
        assert torch.equal(old, token_logprobs(model, batch).detach())


def test_minibatches_are_whole_groups_and_each_is_an_update() -> None:
    values, learner = step(config(minibatches=3, updates_per_step=2), groups(MIXED))
    assert values["updates"] == 6
    assert learner.step == 1
    # three of the four groups have a signal; two runs of four sampled tokens each
    assert values["tokens"] == 3 * 2 * 4
    # more parts than groups with a signal: one for each
    assert step(config(minibatches=9), groups(MIXED))[0]["updates"] == 3


def test_the_rate_is_set_once_a_step() -> None:
    settings = config(updates_per_step=3).model_copy(
        update={"optimizer": OptimizerConfig(learning_rate=1.0, schedule="linear")}
    )
    model = tiny_llama(torch.float32)
    learner = Learner(model, settings.optimizer, steps=4)
    updater = Updater(learner=learner, config=settings)
    rows = updater.credit(credited(groups(MIXED), settings), 0)
    rates = [updater.update(rows, {"step": float(i)}, None, 0)["learning_rate"] for i in range(2)]
    assert rates == [1.0, 0.75]


PPO = ObjectiveConfig(objective="ppo")


def a_critic(**changed: Any) -> Critic:
    terms = CriticTerms(learning_rate=1e-2, value_clip=None, **changed)
    return Critic(tiny_llama(torch.float32), steps=4, lora_rank=0, max_tokens=32, seed=0, terms=terms)


def test_a_critic_learns_from_groups_that_comparison_cannot_use() -> None:
    settings, critic = config(objective=PPO, updates_per_step=2), a_critic()
    values, _ = step(settings, groups([[1.0, 1.0], [0.0, None]]), critic=critic)
    assert values["skipped"] == 0
    # the run without a reward has left: three runs of four tokens
    assert values["tokens"] == 3 * 4
    assert values["return_mean"] == pytest.approx(2 / 3)
    assert values["value_loss"] > 0
    assert values["value_grad_norm"] > 0
    assert step(config(), groups([[1.0, 1.0], [0.0, None]]))[0] == {"skipped": 1.0}


def test_a_critic_credits_tokens_by_what_it_expected(tmp_path: Path) -> None:
    """With lambda 1 and a critic that knows nothing, the update is that of the raw rewards."""
    _, with_critic = step(config(objective=PPO), groups(MIXED[:3]), critic=a_critic(whiten=False))
    (tmp_path / "raw.py").write_text(
        "from nano_rl.learn.objectives import RECIPE\nRAW = RECIPE.with_terms(baseline='none')\n"
    )
    raw = config(objective=ObjectiveConfig(objective=f"{tmp_path}/raw.py:RAW"))
    _, without = step(raw, groups(MIXED[:3]))
    for a, b in zip(with_critic.model.parameters(), without.model.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_ac_10_each_part_of_a_mixed_loss_has_its_own_denominator() -> None:
    """L_SFT is a mean over demonstrations, however many rollouts stand beside them."""
    rows = own_successes(groups([[1.0], [1.0]]))
    (batch,) = make_batches(rows, max_tokens=1000)
    expected = sft_loss(token_logprobs(tiny_llama(torch.float32), batch), batch)[1]["loss"]
    settings = config(lambda_sft=0.5)
    alone, _ = step(config(), groups(MIXED))
    for count in (1, 3):
        of = groups(MIXED[:count])
        values, _ = step(settings, of, rows=tuple(rows), batch=2)
        assert values["loss_sft"] == pytest.approx(0.5 * expected, rel=1e-5)
        assert values["sft_tokens"] == 8
        assert values["tokens"] == count * 2 * 4
        assert values["loss_policy"] == pytest.approx(step(config(), of)[0]["loss"], abs=1e-6)
        assert values["loss"] == pytest.approx(values["loss_policy"] + values["loss_sft"], abs=1e-6)
        shares = [values[f"share_{name}"] for name in ("policy", "kl", "sft")]
        assert sum(shares) == pytest.approx(1)
        assert shares[2] > 0.5
    assert "loss_sft" not in alone


def test_a_mixed_loss_imitates_the_steps_own_successes_even_where_no_group_has_a_signal() -> None:
    of = groups([[1.0, 1.0], [0.0, 0.0]])
    assert {row.run_id for row in own_successes(of)} == {"run-0-0", "run-0-1"}
    model_before = tiny_llama(torch.float32)
    values, learner = step(config(lambda_sft=0.1), of)
    assert values["sft_tokens"] == 8
    assert values["share_sft"] == 1
    moved = [
        not torch.equal(a, b)
        for a, b in zip(model_before.parameters(), learner.model.parameters(), strict=True)
    ]
    assert any(moved)
    assert step(config(lambda_sft=0.1), groups([[0.0, 0.0]]))[0] == {"skipped": 1.0}


def test_demonstrations_come_round_once_before_any_comes_again() -> None:
    rows = tuple(own_successes(groups([[1.0]] * 5)))
    shown = ImitationTerm(weight=1.0, max_tokens=32, rows=rows, batch=2, seed=3)
    drawn = [row.run_id for i in range(5) for row in shown.draw(i, ())]
    assert sorted(drawn[:5]) == sorted(drawn[5:]) == sorted(row.run_id for row in rows)
    assert replace(shown, rows=()).draw(0, ()) == []


def test_a_step_of_imitation_alone_leaves_the_critic_as_it_is() -> None:
    settings, critic = config(objective=PPO, lambda_sft=0.1), a_critic()
    rows = tuple(own_successes(groups([[1.0]])))
    values, _ = step(settings, groups([[None, None]]), critic=critic, rows=rows)
    assert values["sft_tokens"] == 4
    assert "value_loss" not in values
