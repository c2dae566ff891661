"""DPO: its losses by value and by finite differences, its masks, and that it moves a policy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from builders import tiny_llama

from nano_preferences.config import DpoConfig
from nano_preferences.dpo import (
    CHOSEN,
    REJECTED,
    PairObjective,
    pair_batches,
    preference_loss,
    reference_scores,
    side_scores,
    train_dpo,
)
from nano_preferences.pairs import PairRows
from nano_rl.learn.config import OptimizerConfig
from nano_rl.learn.groups import TrainSample
from nano_rl.learn.logprob import token_logprobs
from nano_rl.learn.metrics import read_metrics
from nano_rl.train_fixed_rows import OtherRows
from nano_shared.errors import ConfigError, UsageError
from nano_shared.settings import parse_config


def row(ids: list[int], mask: list[int], name: str = "run") -> TrainSample:
    return TrainSample(
        run_id=name, ids=tuple(ids), mask=tuple(mask), logprobs=(0.0,) * len(ids), versions=(0,) * len(ids),
        advantage=1.0, temperature=1.0,
    )  # fmt: skip


def pair(chosen: TrainSample, rejected: TrainSample) -> PairRows:
    return PairRows(chosen=(chosen,), rejected=(rejected,), prompt_key="p", encoded=False)


# an observation between two turns, a longer answer against a shorter one, and answers that start alike
PAIRS = [
    pair(row([1, 2, 3, 4, 5, 6], [0, 0, 1, 0, 0, 1]), row([1, 2, 7, 4, 5, 8], [0, 0, 1, 0, 0, 1])),
    pair(row([2, 3, 4], [0, 1, 1]), row([2, 3, 5, 6, 7], [0, 1, 1, 1, 1])),
    pair(row([5, 6, 1, 1], [0, 0, 1, 1]), row([5, 6, 1, 9], [0, 0, 1, 1])),
]


def margins(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_sigmoid_loss_by_value() -> None:
    loss = preference_loss(margins(0.0, 2.0, -2.0), DpoConfig(beta=0.5))
    # log 2; log(1 + e^-1); log(1 + e)
    assert loss.tolist() == pytest.approx([math.log(2), math.log1p(math.exp(-1)), math.log1p(math.e)])


def test_label_smoothing_by_value() -> None:
    loss = preference_loss(margins(2.0), DpoConfig(beta=0.5, label_smoothing=0.1))
    assert loss.item() == pytest.approx(0.9 * math.log1p(math.exp(-1)) + 0.1 * math.log1p(math.e))


def test_ipo_loss_by_value_is_least_at_its_margin() -> None:
    config = DpoConfig(loss="ipo", beta=0.5)
    assert preference_loss(margins(1.0, 0.0, 3.0), config).tolist() == [0.0, 1.0, 4.0]


@pytest.mark.parametrize(
    "config",
    [DpoConfig(beta=0.7), DpoConfig(beta=0.7, label_smoothing=0.2), DpoConfig(loss="ipo", beta=0.7)],
    ids=["sigmoid", "smoothed", "ipo"],
)
def test_gradients_are_those_of_finite_differences(config: DpoConfig) -> None:
    margin = margins(0.3, -1.2, 2.0).requires_grad_()
    assert torch.autograd.gradcheck(lambda m: preference_loss(m, config).sum(), (margin,))


@pytest.mark.parametrize("mean", [False, True])
def test_sides_are_scored_on_sampled_tokens_alone(mean: bool) -> None:
    """Against a loop over the tokens with the model's own logits."""
    model = tiny_llama()
    (batch,) = pair_batches(PAIRS, range(3), 1000)
    scores = side_scores(token_logprobs(model, batch), batch, mean=mean)
    for place, one in enumerate(PAIRS):
        for (sample,), sign in ((one.chosen, CHOSEN), (one.rejected, REJECTED)):
            logits = model(input_ids=torch.tensor([sample.ids])).logits[0].log_softmax(-1)
            own = [logits[t - 1, sample.ids[t]].item() for t, m in enumerate(sample.mask) if m]
            expected = sum(own) / (len(own) if mean else 1)
            assert scores[f"{place}{sign}"].item() == pytest.approx(expected)


def gradients(config: DpoConfig, max_tokens: int) -> tuple[float, torch.Tensor]:
    model = tiny_llama()
    reference = {f"{i}{sign}": 0.1 * i for i in range(3) for sign in (CHOSEN, REJECTED)}
    objective = PairObjective(PAIRS, range(3), reference, config)
    total = 0.0
    for batch in pair_batches(PAIRS, range(3), max_tokens):
        loss, _ = objective(model, batch)
        loss.backward()
        total += loss.item()
    return total, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize(
    "config",
    [DpoConfig(), DpoConfig(loss="ipo", length_normalised=True), DpoConfig(lambda_sft=0.5)],
    ids=["sigmoid", "ipo per token", "with imitation"],
)
def test_ac_10_pairs_weigh_the_same_however_they_are_cut(config: DpoConfig) -> None:
    assert len(pair_batches(PAIRS, range(3), 1)) == 3
    loss, gradient = gradients(config, 1)
    whole, expected = gradients(config, 1000)
    assert loss == pytest.approx(whole, rel=1e-10)
    torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-12)


def test_long_sides_that_share_no_prefix_stay_in_one_batch() -> None:
    def long(token: int) -> TrainSample:
        return row([token] + [9] * 699, [0] + [1] * 699)

    (batch,) = pair_batches([pair(long(1), long(2))], [0], 1)
    assert sorted(batch.run_ids) == ["0+", "0-"]


def test_imitation_beside_it_is_the_mean_over_chosen_tokens() -> None:
    plain, _ = gradients(DpoConfig(), 1000)
    mixed, _ = gradients(DpoConfig(lambda_sft=0.5), 1000)
    model = tiny_llama()
    (batch,) = pair_batches(PAIRS, range(3), 1000)
    scores = side_scores(token_logprobs(model, batch), batch, mean=False)
    nll = -sum(scores[f"{i}{CHOSEN}"].item() for i in range(3)) / 6
    assert mixed - plain == pytest.approx(0.5 * nll)


def test_a_pair_that_a_step_sees_twice_counts_twice() -> None:
    model = tiny_llama()
    reference = {f"{i}{sign}": 0.0 for i in range(3) for sign in (CHOSEN, REJECTED)}
    losses = []
    for indices in ([0], [0, 0]):
        objective = PairObjective(PAIRS, indices, reference, DpoConfig())
        losses.append(sum(objective(model, b)[0].item() for b in pair_batches(PAIRS, indices, 1000)))
    assert losses[0] == pytest.approx(losses[1])


def test_the_first_step_compares_the_policy_with_itself(tmp_path: Path) -> None:
    config = DpoConfig(epochs=1, batch=3, optimizer=OptimizerConfig(learning_rate=1e-3))
    train_dpo(tiny_llama(torch.float32), PAIRS, config, tmp_path, lambda *_: None)
    (first,) = read_metrics(tmp_path / "metrics.jsonl")
    assert first["margin"] == pytest.approx(0, abs=1e-6)
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)


@pytest.mark.parametrize("loss", ["sigmoid", "ipo"])
def test_a_policy_moves_to_what_is_preferred(loss: str, tmp_path: Path) -> None:
    model = tiny_llama(torch.float32)
    before = reference_scores(model, PAIRS, DpoConfig())
    config = DpoConfig(
        loss=loss, epochs=12, batch=3, beta=0.3, save_every=5, optimizer=OptimizerConfig(learning_rate=5e-3)
    )
    assert train_dpo(model, PAIRS, config, tmp_path, lambda *_: None) == 12
    after = reference_scores(model, PAIRS, DpoConfig())
    for i in range(3):
        gained = after[f"{i}{CHOSEN}"] - before[f"{i}{CHOSEN}"]
        assert gained > after[f"{i}{REJECTED}"] - before[f"{i}{REJECTED}"] + 0.5
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert rows[-1]["accuracy"] == 1
    assert rows[-1]["loss"] < rows[0]["loss"]


def test_a_training_that_was_stopped_goes_on_bit_for_bit(tmp_path: Path) -> None:
    config = DpoConfig(epochs=4, batch=2, save_every=1, optimizer=OptimizerConfig(learning_rate=1e-3))

    class Stopped(Exception):
        pass

    def stop(done: int, *_: object) -> None:
        if done == 3:
            raise Stopped

    whole, halved = tiny_llama(torch.float32), tiny_llama(torch.float32)
    train_dpo(whole, PAIRS, config, tmp_path / "whole", lambda *_: None)
    with pytest.raises(Stopped):
        train_dpo(halved, PAIRS, config, tmp_path / "halved", stop)
    # a new process starts from the weights that training began from
    resumed = tiny_llama(torch.float32)
    train_dpo(resumed, PAIRS, config, tmp_path / "halved", lambda *_: None)
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_training_goes_on_with_what_it_began_with(tmp_path: Path) -> None:
    config = DpoConfig(epochs=1, batch=2, optimizer=OptimizerConfig(learning_rate=1e-3))

    def go(config: DpoConfig, pairs: Sequence[PairRows] = PAIRS, seed: int = 0) -> None:
        torch.manual_seed(seed)
        model = tiny_llama(torch.float32)
        if seed:
            next(model.parameters()).data.normal_()
        train_dpo(model, pairs, config, tmp_path, lambda *_: None)

    go(config)
    go(config.model_copy(update={"max_tokens": 100, "save_every": 3}))
    faster = OptimizerConfig(learning_rate=1e-2)
    for changed, sentence in (
        ({"epochs": 2.0}, r"epochs was 1.0 and is 2.0; give the same, or start anew under another --name"),
        ({"optimizer": faster}, r"optimizer.learning_rate was 0.001 and is 0.01"),
    ):
        with pytest.raises(UsageError, match=sentence):
            go(config.model_copy(update=changed))
    with pytest.raises(OtherRows, match="other rows"):
        go(config, PAIRS[::-1])
    with pytest.raises(UsageError, match="another model"):
        go(config, seed=1)


def test_smoothing_does_not_go_with_ipo() -> None:
    with pytest.raises(ConfigError, match="`label_smoothing` changes the sigmoid loss"):
        parse_config(DpoConfig, {"loss": "ipo", "label_smoothing": 0.1})
