"""Objectives: what a name fills, what contradicts it, and every setting by the number that it changes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import flat_batch, flat_logprobs, logs, terms
from torch import Tensor

from nano_rl.config import TrainConfig
from nano_rl.learn.batch import Batch
from nano_rl.learn.loss import (
    less_kl,
    policy_loss,
    reference_kl,
    row_means,
    sums_to_the_end,
)
from nano_rl.learn.objectives import Objective, ObjectiveConfig, find_objective
from nano_shared.errors import ConfigError
from nano_shared.extension_points import extension_names
from nano_shared.settings import parse_config

NEW = [-0.7, -1.2, -0.4, -2.1]
RATIOS = [1.0, 1.14, 1.56, 0.4]
ADVANTAGES = [1.0, -1.0, 2.0]


def config(**settings: Any) -> Objective:
    return terms(**{"tis_cap": None, **settings})


def batch_of(advantages: list[float], ratios: list[float], new: list[float], **more: Any) -> Batch:
    old = [n - r for n, r in zip(new, logs(ratios), strict=True)]
    return flat_batch(advantages, old=old, behaviour=more.pop("behaviour", old), **more)


def run(new: list[float], batch: Batch, chosen: Objective, **more: Any) -> tuple[float, list[float]]:
    """The loss, and its gradient at each token, both times the number of tokens."""
    x = flat_logprobs(new)
    loss, _ = policy_loss(x, batch, chosen, **more)
    loss.backward()
    assert isinstance(x.grad, Tensor)
    return loss.item() * len(new), (x.grad[0, 1:] * len(new)).tolist()


def each(new: list[float], batch_args: tuple[list[float], list[float]], chosen: Objective) -> list[float]:
    """The loss of every token by itself."""
    return [run([n], batch_of([a], [r], [n]), chosen)[0] for n, a, r in zip(new, *batch_args, strict=True)]


@pytest.mark.parametrize("name", extension_names("nano.objectives"))
def test_a_named_objective_round_trips(name: str) -> None:
    chosen = parse_config(TrainConfig, {"objective": {"objective": name}})
    assert parse_config(TrainConfig, chosen.model_dump()) == chosen
    assert TrainConfig.model_validate_json(chosen.model_dump_json()) == chosen


FILLED = {
    "recipe": ("mean", "none", 0.2, 0.2, "token", "token", 0.0),
    "grpo": ("mean", "sample", 0.2, 0.2, "token", "sequence", 0.04),
    "dr_grpo": ("mean", "none", 0.2, 0.2, "token", "constant", 0.0),
    "dapo": ("mean", "sample", 0.2, 0.28, "token", "token", 0.0),
    "gspo": ("mean", "sample", 3e-4, 4e-4, "sequence", "sequence", 0.0),
    "cispo": ("mean", "sample", 1.0, 4.0, "token", "token", 0.0),
    "rloo": ("rloo", "none", 0.2, 0.2, "token", "constant", 0.0),
    "reinforce": ("none", "none", 0.2, 0.2, "token", "constant", 0.0),
    "ppo": ("none", "none", 0.2, 0.2, "token", "token", 0.0),
}


@pytest.mark.parametrize("name", FILLED)
def test_a_name_fills_what_its_paper_names(name: str) -> None:
    c = find_objective(name)
    assert FILLED[name] == (c.baseline, c.std, c.clip_low, c.clip_high, c.ratio, c.aggregation, c.beta)
    assert (c.kl, c.kl_in) == (("k1", "reward") if name in ("rloo", "reinforce", "ppo") else ("k3", "loss"))


def test_what_is_given_wins_over_what_a_name_fills() -> None:
    chosen = ObjectiveConfig(objective="grpo", beta=0.0, clip_high=0.5).terms
    assert (chosen.beta, chosen.clip_high, chosen.clip_low, chosen.std) == (0.0, 0.5, 0.2, "sample")


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"objective": "reinforce", "clip_high": 0.3}, "objective = reinforce reads no `clip_high`"),
        ({"objective": "gpro"}, "nano.objectives has no 'gpro'; there are gspo, grpo, cispo"),
        ({"ratio": "sequence"}, "objective.ratio: no such setting"),
    ],
)
def test_contradictions_are_refused_in_a_sentence(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_config(TrainConfig, {"objective": values})
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_ac_16_dual_clip_oracle() -> None:
    values = each([-1.0] * 3, ([2.0, -2.0, 2.0], [2.0, 2.0, 0.5]), config(dual_clip=1.5))
    assert values == pytest.approx([-2.4, 3.0, -1.0])
    assert each([-1.0], ([-2.0], [2.0]), config()) == pytest.approx([4.0])


def test_ac_16_dual_clip_takes_the_gradient_away() -> None:
    for ratio, slope in ((1.4, 1.4), (1.6, 0.0)):
        _, gradient = run([-1.0], batch_of([-1.0], [ratio], [-1.0]), config(dual_clip=1.5))
        assert gradient == pytest.approx([slope])


def test_ac_16_cispo_oracle() -> None:
    """The clamped ratio weighs the log-prob, and no gradient passes through the ratio."""
    advantages = [1.0, -0.5, 2.0, -1.0]
    chosen = config(objective="cispo", clip_low=0.2, clip_high=0.28)
    assert each(NEW, (advantages, RATIOS), chosen) == pytest.approx([0.7, -0.684, 1.024, -1.68])
    _, gradient = run(NEW, batch_of(advantages, RATIOS, NEW), chosen)
    clamped = [1.0, 1.14, 1.28, 0.8]
    assert gradient == pytest.approx([-c * a for c, a in zip(clamped, advantages, strict=True)])


def test_ac_16_gspo_oracle() -> None:
    new = [-0.5, -1.0, -1.5]
    advantages, ratios = [1.0, -1.0, 2.0], [0.5, 1.0, 1.5]
    chosen = config(objective="gspo", clip_low=0.2, clip_high=0.2)
    ratio = math.exp(sum(logs(ratios)) / 3)
    assert ratio == pytest.approx(0.90856, abs=5e-6)
    total, gradient = run(new, batch_of(advantages, ratios, new), chosen)
    assert total == pytest.approx(-0.90856 + 0.90856 - 1.81712, abs=2e-5)
    # every token of the row moves the one ratio by a third
    assert gradient == pytest.approx([-ratio * 2.0 / 3] * 3)


def test_ac_16_gspo_with_the_sequence_weight_of_the_sampler() -> None:
    old, behaviour = [-1.0] * 3, [-0.5, -1.5, -0.8]
    new = [o + r for o, r in zip(old, logs([0.5, 1.0, 1.5]), strict=True)]
    batch = flat_batch([1.0, -1.0, 2.0], old=old, behaviour=behaviour)
    shared = {"objective": "gspo", "clip_low": 0.2, "clip_high": 0.2, "tis_level": "sequence"}
    capped = policy_loss(flat_logprobs(new), batch, terms(**shared, tis_cap=0.8))[0].item()
    assert capped == pytest.approx(-0.4846, abs=5e-5)
    free = policy_loss(flat_logprobs(new), batch, terms(**shared, tis_cap=9))[0].item()
    assert free == pytest.approx(-0.60571 * math.exp(-0.2), abs=5e-5)


def test_ac_16_clip_higher_moves_the_upper_bound_alone() -> None:
    for chosen, expected in ((config(), -1.2), (config(objective="dapo"), -1.28)):
        assert each([-1.0] * 2, ([1.0, -1.0], [1.4, 0.5]), chosen) == pytest.approx([expected, 0.8])


def test_reinforce_reads_no_ratio() -> None:
    for name in ("reinforce", "rloo"):
        total, gradient = run(NEW, batch_of([1.0, -0.5, 2.0, -1.0], RATIOS, NEW), config(objective=name))
        assert total == pytest.approx(0.7 - 0.6 + 0.8 - 2.1)
        assert gradient == [-1.0, 0.5, -2.0, 1.0]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"tis_cap": 100}, [0.6065, 1.6487, 0.8187]),
        ({"tis_cap": 0.8}, [0.6065, 0.8, 0.8]),
        ({"tis_cap": 0.8, "tis_mode": "mask"}, [0.6065, 0, 0]),
        ({"tis_cap": 2, "tis_mode": "mask", "tis_floor": 0.7}, [0, 1.6487, 0.8187]),
        ({"tis_cap": 2, "tis_level": "sequence"}, [0.8187] * 3),
        ({"tis_cap": 0.5, "tis_level": "sequence"}, [0.5] * 3),
        ({"tis_cap": 0.5, "tis_level": "sequence", "tis_mode": "mask"}, [0] * 3),
        ({"tis_cap": None}, [1] * 3),
    ],
)
def test_ac_18_weights_truncated_or_masked_of_tokens_or_sequences(
    settings: dict[str, Any], expected: list[float]
) -> None:
    """On the first update the gradient at each token is minus its weight times its advantage."""
    batch = flat_batch(ADVANTAGES, behaviour=[-0.5, -1.5, -0.8])
    _, gradient = run([-1.0] * 3, batch, terms(**settings))
    assert gradient == pytest.approx(
        [-w * a for w, a in zip(expected, [1.0, -1.0, 2.0], strict=True)], abs=1e-4
    )


def two_rows(advantages: list[list[float]], behaviour: list[list[float]]) -> Batch:
    rows = [
        flat_batch(a, behaviour=b, num_action_tokens=6) for a, b in zip(advantages, behaviour, strict=True)
    ]
    names = ("ids_BT", "attention_BT", "mask_BT", "behaviour_logprobs_BT", "advantages_BT", "weight_BT")
    joined = {name: torch.cat([getattr(r, name) for r in rows]) for name in names}
    return Batch(**joined, temperature_B=torch.ones(2), run_ids=("a", "b"))


def test_ac_19_a_sequence_is_rejected_whole() -> None:
    """The mean advantage is negative and the drift beyond the bound: the positive token goes too."""
    batch = two_rows([[-0.5, 0.25, -0.25], [0.5, -0.25, 0.25]], [[1.0] * 3, [1.0] * 3])
    x = torch.zeros(2, 4, dtype=torch.float64, requires_grad=True)
    loss, metrics = policy_loss(x, batch, terms(tis_cap=None, reject_drift=0.1))
    loss.backward()
    assert isinstance(x.grad, Tensor)
    assert x.grad[0].tolist() == [0.0] * 4
    assert x.grad[1, 1:].tolist() == pytest.approx([-0.5 / 6, 0.25 / 6, -0.25 / 6])
    assert metrics["rejected"] == 3
    kept = policy_loss(x, batch, terms(tis_cap=None, reject_drift=1.5))[1]
    assert kept["rejected"] == 0


def test_ac_19_a_masked_sequence_weight_masks_every_token_of_its_row_alone() -> None:
    batch = two_rows([[1.0, -1.0, 1.0]] * 2, [[-3.0, 1.0, -1.0], [0.0, 0.1, 0.0]])
    x = torch.zeros(2, 4, dtype=torch.float64, requires_grad=True)
    policy_loss(x, batch, terms(tis_level="sequence", tis_mode="mask"))[0].backward()
    assert isinstance(x.grad, Tensor)
    assert x.grad[0].tolist() == [0.0] * 4
    assert x.grad[1, 1:].tolist() == pytest.approx([-math.exp(-0.1) * a / 6 for a in (1, -1, 1)])


def test_ac_24_straight_through_has_the_value_of_k3_and_the_gradient_of_k2() -> None:
    reference = torch.tensor([0.0, -3.0, -1.5], dtype=torch.float64)

    def value_and_gradient(kind: Any) -> tuple[list[float], list[float]]:
        x = torch.tensor([-1.0, -2.0, -1.5], dtype=torch.float64, requires_grad=True)
        kl_N = reference_kl(x, reference, kind)
        kl_N.sum().backward()
        assert isinstance(x.grad, Tensor)
        return kl_N.tolist(), x.grad.tolist()

    assert value_and_gradient("k3+") == (value_and_gradient("k3")[0], value_and_gradient("k2")[1])


def test_ac_13_kl_in_the_reward_charges_each_token_with_what_follows_in_its_row() -> None:
    row_N = torch.tensor([0, 0, 0, 1, 1])
    kl_N = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0], dtype=torch.float64)
    assert sums_to_the_end(kl_N, row_N).tolist() == [7, 6, 4, 24, 16]
    assert less_kl(torch.ones(5, dtype=torch.float64), kl_N, row_N, 0.5).tolist() == [-2.5, -2, -1, -11, -7]
    batch = flat_batch([1.0] * 2, behaviour=[-1.0, -1.0], reference=[-2.0, -4.0])
    _, gradient = run([-1.0, -1.0], batch, config(beta=0.5, kl="k1", kl_in="reward"))
    assert gradient == pytest.approx([-(1 - 0.5 * 4), -(1 - 0.5 * 3)])
    _, in_loss = run([-1.0, -1.0], batch, config(beta=0.5, kl="k1"))
    assert in_loss == pytest.approx([-0.5, -0.5])


def test_ac_13_entropy_is_taken_from_the_loss_with_its_gradient() -> None:
    entropy = torch.tensor([[9.0, 0.5, 1.5]], dtype=torch.float64, requires_grad=True)
    batch = flat_batch([1.0, 1.0], behaviour=[-1.0, -1.0])
    total, _ = run([-1.0, -1.0], batch, config(entropy_bonus=0.1), entropy_BT=entropy)
    assert total == pytest.approx(-2 - 0.1 * 2.0)
    assert isinstance(entropy.grad, Tensor)
    assert entropy.grad.tolist() == [[0.0, -0.05, -0.05]]


def test_an_entropy_bonus_that_would_do_nothing_is_refused() -> None:
    batch = flat_batch([1.0])
    with pytest.raises(ValueError, match="needs the entropies of the tokens"):
        run([-1.0], batch, config(entropy_bonus=0.1))
    with pytest.raises(ValueError, match="needs entropies with gradient"):
        run([-1.0], batch, config(entropy_bonus=0.1), entropy_BT=torch.zeros(1, 2, dtype=torch.float64))


def test_row_means_are_of_rows() -> None:
    values = torch.tensor([1.0, 3.0, 10.0], dtype=torch.float64)
    assert row_means(values, torch.tensor([0, 0, 2])).tolist() == [2.0, 2.0, 10.0]
    assert row_means(values[:0], torch.zeros(0, dtype=torch.int64)).tolist() == []


CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "clip_low": ({}, {"clip_low": 0.5}),
    "clip_high": ({}, {"clip_high": 0.5}),
    "dual_clip": ({}, {"dual_clip": 1.2}),
    "ratio": ({}, {"ratio": "sequence"}),
    "tis_cap": ({}, {"tis_cap": 1.1}),
    "tis_mode": ({"tis_cap": 1.1}, {"tis_cap": 1.1, "tis_mode": "mask"}),
    "tis_floor": ({"tis_mode": "mask"}, {"tis_mode": "mask", "tis_floor": 0.9}),
    "tis_level": ({}, {"tis_level": "sequence"}),
    "reject_drift": ({}, {"reject_drift": 0.01}),
    "beta": ({}, {"beta": 0.1}),
    "kl": ({"beta": 0.1}, {"beta": 0.1, "kl": "k2"}),
    "kl_in": ({"beta": 0.1}, {"beta": 0.1, "kl_in": "reward"}),
    "entropy_bonus": ({}, {"entropy_bonus": 0.1}),
    "objective": ({}, {"objective": "cispo"}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_ac_13_every_setting_of_the_loss_changes_the_gradient(name: str) -> None:
    batch = batch_of(
        [1.0, -2.0, -2.0, -1.0],
        [1.6, 1.4, 0.9, 0.6],
        NEW,
        behaviour=[-1.5, -1.2, 0.5, -1.9],
        reference=[-1.0] * 4,
    )
    assert batch.old_logprobs_BT is not None
    entropy_BT = batch.old_logprobs_BT.exp().requires_grad_()
    before, after = (run(NEW, batch, terms(**s), entropy_BT=entropy_BT) for s in CHANGES[name])
    assert [before[0], *before[1]] != pytest.approx([after[0], *after[1]], abs=1e-4)


ELSEWHERE = {
    "aggregation": "test_aggregation.py", "constant_length": "test_aggregation.py",
    "baseline": "test_advantage.py", "std": "test_advantage.py", "critic": "test_critic.py",
    "advantage": "test_doors.py",
    "clips": "test_objectives.py",
    "overlong": "test_overlong.py", "overlong_limit": "test_overlong.py",
    "overlong_buffer": "test_overlong.py",
    "dead_groups": "test_overlong.py",
    "normalise": "test_credit.py", "discount": "test_credit.py",
}  # fmt: skip
"""settings that act before the loss, and where their values are tested"""


def test_ac_13_no_setting_is_without_a_test_of_its_value() -> None:
    assert {*Objective.model_fields} - {"surrogate"} == {*CHANGES, *ELSEWHERE} - {"objective"}
    for name, file in ELSEWHERE.items():
        assert name in (Path(__file__).parent / file).read_text("utf-8")
