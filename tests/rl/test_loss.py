"""Losses against closed-form numbers, and gradients against finite differences."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from builders import flat_batch, flat_logprobs, logs, terms, trajectory, turn
from torch import Tensor

from nano_rl.learn.batch import Batch, make_batches
from nano_rl.learn.groups import to_samples
from nano_rl.learn.loss import mean_metrics, policy_loss, reference_kl, sft_loss
from nano_rl.learn.objectives import KL, Objective

PLAIN = terms(tis_cap=None)
RATIOS = [0.5, 1.0, 1.5]
ADVANTAGES = [1.0, -1.0, 2.0]


def shifted(new: list[float], ratios: list[float]) -> list[float]:
    """Old log-probs that give these ratios."""
    return [n - r for n, r in zip(new, logs(ratios), strict=True)]


def value(logprobs: list[float], batch: Batch, config: Objective = PLAIN) -> float:
    return policy_loss(flat_logprobs(logprobs), batch, config)[0].item()


def gradient(loss: Callable[[Tensor], Tensor], logprobs: list[float]) -> list[float]:
    x = flat_logprobs(logprobs)
    loss(x).backward()
    return x.grad[0, 1:].tolist()


def one_row(lengths: list[tuple[int, float]], num_action_tokens: int | None = None) -> Batch:
    samples = [to_samples(trajectory(turn(1, n), run_id=f"r{n}"), a)[0] for n, a in lengths]
    weights = [1 / num_action_tokens] * len(samples) if num_action_tokens else None
    (batch,) = make_batches(samples, max_tokens=1000, weights=weights, dtype=torch.float64)
    return batch


def test_clip_oracle() -> None:
    new = [-0.5, -1.0, -1.5]
    old = shifted(new, RATIOS)
    assert value(new, flat_batch(ADVANTAGES, old=old, behaviour=old)) == pytest.approx((-0.5 + 1 - 2.4) / 3)
    for i, expected in enumerate([-0.5, 1.0, -2.4]):
        batch = flat_batch(ADVANTAGES[i : i + 1], old=old[i : i + 1])
        assert value(new[i : i + 1], batch) == pytest.approx(expected)


def test_clip_bounds_are_apart() -> None:
    new = [-1.0, -1.0]
    old = shifted(new, [2.0, 0.1])
    config = terms(tis_cap=None, clip_low=0.3, clip_high=0.5)
    assert value(new, flat_batch([1.0, -1.0], old=old), config) == pytest.approx((-1.5 + 0.7) / 2)
    metrics = policy_loss(flat_logprobs(new), flat_batch([1.0, -1.0], old=old), config)[1]
    assert (metrics["clip_low"], metrics["clip_high"]) == (1.0, 1.0)
    # a ratio outside its bound on the side where clipping does not bind is not clipped
    metrics = policy_loss(flat_logprobs(new), flat_batch([-1.0, 1.0], old=old), config)[1]
    assert (metrics["clip_low"], metrics["clip_high"]) == (0.0, 0.0)


def test_ac_11_fully_masked_batch_gives_exactly_zero() -> None:
    (batch,) = make_batches(to_samples(trajectory(turn(5, 0)), 1.0), max_tokens=100)
    assert not batch.mask_BT.any()
    for config in (PLAIN, terms(beta=0.1)):
        x = torch.zeros(1, 5, requires_grad=True)
        loss, metrics = policy_loss(x, batch.with_reference(torch.zeros(1, 5)), config)
        loss.backward()
        assert loss.item() == 0.0
        assert x.grad.abs().max() == 0
        assert all(math.isfinite(v) for v in mean_metrics([metrics]).values())
    assert sft_loss(torch.zeros(1, 5), batch)[0].item() == 0.0


def test_ac_11_masked_tokens_are_in_neither_numerator_nor_denominator() -> None:
    batch = flat_batch([1.0, -1.0, 2.0])
    masked = flat_batch([1.0, -1.0, 2.0, 5.0], num_action_tokens=3)
    masked.mask_BT[0, 4] = False
    for poison in (0.0, -50.0, math.nan, -math.inf):
        x = flat_logprobs([-1.0, -2.0, -3.0, poison])
        loss, metrics = policy_loss(x, masked, terms())
        assert loss.item() == value([-1.0, -2.0, -3.0], batch, terms())
        assert metrics["tokens"] == 3
        loss.backward()
        assert x.grad[0, 4] == 0


def test_ac_15_first_update_has_ratio_one_and_the_reinforce_gradient() -> None:
    new = [-0.5, -1.0, -1.5]
    batch = flat_batch(ADVANTAGES, behaviour=new)
    loss, metrics = policy_loss(flat_logprobs(new), batch, terms())
    assert loss.item() == pytest.approx(-2 / 3)
    mean = mean_metrics([metrics])
    for name in (
        "ratio_deviation",
        "ratio_deviation_max",
        "clip_low",
        "clip_high",
        "approx_kl",
        "mismatch_max",
    ):
        assert mean[name] == 0.0
    assert mean["ess"] == 1.0

    def reinforce(x: Tensor) -> Tensor:
        return -(batch.advantages_BT * x).sum() / len(new)

    assert reinforce(flat_logprobs(new)).item() == pytest.approx(2.5 / 3)  # 0.8333
    actual = gradient(lambda x: policy_loss(x, batch, terms())[0], new)
    assert actual == gradient(reinforce, new)


def test_ac_17_ratio_and_mismatch_are_two_things() -> None:
    """The sampler differed by 0.5 nats, the trainer has not moved: weights see it, ratio and clip do not."""
    new = [-1.0, -1.0]
    _, metrics = policy_loss(flat_logprobs(new), flat_batch([1.0, 1.0], behaviour=[-1.5, -0.5]), terms())
    mean = mean_metrics([metrics])
    assert mean["ratio_deviation_max"] == mean["clip_high"] == 0.0
    assert mean["mismatch"] == mean["mismatch_max"] == pytest.approx(0.5)


def test_ac_23_what_a_step_reports_of_its_health() -> None:
    """Two tokens in two micro-batches: both have moved, the sampler differs by 0.5 nats on one."""
    gaps, new, old = [0.5, 0.0], [-1.0, -2.0], [-1.4, -1.7]
    parts = [
        policy_loss(
            flat_logprobs([n]),
            flat_batch([a], old=[o], behaviour=[o - gap]),
            terms(),
            entropy_BT=torch.full((1, 2), e, dtype=torch.float64),
        )[1]
        for n, o, gap, a, e in zip(new, old, gaps, [1.0, -1.0], [0.3, 0.5], strict=True)
    ]
    told = mean_metrics(parts)
    weights = [math.exp(gap) for gap in gaps]
    expected = {
        "mismatch": 0.25,
        "mismatch_max": 0.5,
        "mismatch_ratio": (weights[0] + 1) / 2,
        "mismatch_kl": (weights[0] - 1 - 0.5) / 2,
        "ess": sum(weights) ** 2 / (2 * sum(w * w for w in weights)),
        "clip_low": 0.5,
        "clip_high": 0.5,
        "entropy": 0.4,
    }
    assert {name: told[name] for name in expected} == pytest.approx(expected, rel=1e-9)


def test_ac_18_importance_weights_oracle() -> None:
    """Weights come from the log-probs at the start of the step, not from the current ones."""
    old, behaviour = [-1.0] * 3, [-0.5, -1.5, -0.8]
    new = [o + r for o, r in zip(old, logs(RATIOS), strict=True)]
    batch = flat_batch(ADVANTAGES, old=old, behaviour=behaviour)
    assert value(new, batch, terms(tis_cap=100)) == pytest.approx(-0.2065, abs=5e-5)
    assert value(new, batch, terms(tis_cap=0.8)) == pytest.approx(-0.4744, abs=5e-5)
    metrics = policy_loss(flat_logprobs(new), batch, terms(tis_cap=0.8))[1]
    assert metrics["weight"] == pytest.approx(0.6065 + 1.6487 + 0.8187, abs=1e-4)
    assert metrics["weight_capped"] == 2.0


def test_ac_18_default_cap_is_two_and_none_ignores_the_sampler() -> None:
    batch = flat_batch([1.0], behaviour=[-5.0])
    assert value([-1.0], batch, terms()) == -2.0
    assert value([-1.0], batch, PLAIN) == -1.0


def test_ac_18_log_ratios_are_clamped_before_exp() -> None:
    batch = flat_batch([1.0, -1.0], old=[-1.0, -900.0], behaviour=[-900.0, -1.0])
    loss, metrics = policy_loss(flat_logprobs([-900.0, -1.0]), batch, terms(tis_cap=1e12))
    assert math.isfinite(loss.item())
    assert metrics["weight"] == pytest.approx(math.exp(20) + math.exp(-20))
    assert all(math.isfinite(v) for v in metrics.values())


def test_weights_carry_no_gradient() -> None:
    batch = flat_batch([1.0], behaviour=[-1.5])
    (slope,) = gradient(lambda x: policy_loss(x, batch, terms())[0], [-1.0])
    assert slope == pytest.approx(-math.exp(0.5))


def test_effective_sample_size() -> None:
    def ess(behaviour: list[float]) -> float:
        batch = flat_batch([1.0] * len(behaviour), behaviour=behaviour)
        metrics = policy_loss(flat_logprobs([-1.0] * len(behaviour)), batch, terms())[1]
        return mean_metrics([metrics])["ess"]

    assert ess([-1.0] * 4) == 1.0
    assert ess([-0.1] * 4) == pytest.approx(1.0)
    # weights 1 and 3: (1 + 3)^2 / (2 * (1 + 9))
    assert ess([-1.0, -1.0 - math.log(3)]) == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("k1", [-1, 14, 29]), ("k2", [0.5, 98, 420.5]), ("k3", [math.e - 2, 13.0, 28.0])],
)
def test_ac_24_kl_oracle(kind: KL, expected: list[float]) -> None:
    reference = torch.tensor([0.0, -15.0, -30.0], dtype=torch.float64)
    kl = reference_kl(torch.full((3,), -1.0, dtype=torch.float64), reference, kind)
    assert kl.tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(("kind", "expected"), [("k1", 42.0), ("k2", 519.0), ("k3", math.e - 2 + 41)])
def test_ac_13_every_kl_option_changes_the_loss(kind: KL, expected: float) -> None:
    batch = flat_batch([0.0] * 3, reference=[0.0, -15.0, -30.0])
    loss = value([-1.0] * 3, batch, terms(beta=0.5, kl=kind))
    assert loss == pytest.approx(0.5 * expected / 3, abs=1e-5)


def test_ac_25_kl_is_clamped_before_exp() -> None:
    kl = reference_kl(torch.tensor([-900.0]), torch.tensor([0.0]), "k3")
    assert kl.item() == pytest.approx(math.exp(20) - 1 - 900, rel=1e-5)


def test_ac_25_beta_needs_a_reference_and_zero_reads_none() -> None:
    with pytest.raises(ValueError, match="beta > 0 needs reference_logprobs_BT"):
        value([-1.0], flat_batch([1.0]), terms(beta=0.1))
    batch = flat_batch([1.0], reference=[-9.0])
    assert "kl_reference" not in policy_loss(flat_logprobs([-1.0]), batch, PLAIN)[1]


def test_ac_09_aggregation_over_the_global_tokens_and_over_a_constant() -> None:
    """Two sequences of 2 (A=+1) and 6 (A=-1) tokens; the mean over sequences would be 0."""
    lengths = [(2, 1.0), (6, -1.0)]
    x = torch.zeros(2, 7, dtype=torch.float64)
    assert policy_loss(x, one_row(lengths), PLAIN)[0].item() == 0.5
    # constant length of 8 for each of two sequences
    assert policy_loss(x, one_row(lengths, num_action_tokens=16), PLAIN)[0].item() == 0.25


def test_sft_loss_is_the_mean_negative_log_likelihood() -> None:
    loss, metrics = sft_loss(flat_logprobs([-1.0, -2.0, -6.0]), flat_batch([0.0] * 3))
    assert loss.item() == pytest.approx(3.0)
    assert metrics == {"loss": loss.item(), "tokens": 3.0}
    assert mean_metrics([metrics, metrics]) == {"loss": 6.0, "tokens": 6.0}


@pytest.mark.parametrize("config", [PLAIN, *(terms(beta=0.3, kl=k) for k in ("k1", "k2", "k3"))])
def test_gradient_equals_finite_differences(config: Objective) -> None:
    new = [-0.7, -1.2, -0.4, -2.1]
    # no ratio stands on a corner of the clip
    old = shifted(new, [0.9, 1.14, 1.56, 0.4])
    batch = flat_batch([1.0, -0.5, 2.0, -1.0], old=old, behaviour=[-1.0] * 4, reference=[-1.0] * 4)

    def loss(x: Tensor) -> Tensor:
        return policy_loss(x, batch, config)[0]

    step = 1e-6
    for i, slope in enumerate(gradient(loss, new)):
        up, down = ([*new[:i], new[i] + e, *new[i + 1 :]] for e in (step, -step))
        difference = (value(up, batch, config) - value(down, batch, config)) / (2 * step)
        assert slope == pytest.approx(difference, abs=1e-7)


def test_entropy_is_reported_where_given() -> None:
    entropy = torch.tensor([[9.0, 0.5, 1.5]], dtype=torch.float64)
    _, metrics = policy_loss(flat_logprobs([-1.0, -1.0]), flat_batch([1.0, 1.0]), PLAIN, entropy_BT=entropy)
    assert mean_metrics([metrics])["entropy"] == 1.0
