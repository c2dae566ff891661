"""Reward models: their loss, calibration, and held-out accuracy under an annotator that is known."""

from __future__ import annotations

import math
from pathlib import Path
from random import Random

import pytest
import torch
from builders import tiny_llama, trajectory, turn

from nano_preferences.config import RewardModelConfig
from nano_preferences.critic import ScalarModel, scalar_model
from nano_preferences.pairs import PairRows
from nano_preferences.reward_model import (
    bradley_terry,
    held_out,
    measure,
    pair_margins,
    row_scores,
    train_reward_model,
)
from nano_rl.learn.config import OptimizerConfig
from nano_rl.learn.groups import TrainSample, to_samples
from nano_rl.learn.metrics import read_metrics
from nano_shared.errors import UsageError

LIKED = 7


def sample(ids: list[int]) -> TrainSample:
    (row,) = to_samples(trajectory(turn(ids[:2], ids[2:])), 1.0)
    return row


def annotated(count: int, seed: int = 0) -> list[PairRows]:
    """Pairs of an annotator who prefers the answer with more of one token, whatever else is in it."""
    random = Random(seed)
    pairs = []
    while len(pairs) < count:
        prompt = [random.randrange(1, 7) for _ in range(2)]
        one, two = ([random.randrange(2, 11) for _ in range(6)] for _ in range(2))
        if one.count(LIKED) == two.count(LIKED):
            continue
        chosen, rejected = (one, two) if one.count(LIKED) > two.count(LIKED) else (two, one)
        pairs.append(
            PairRows(
                chosen=(sample([*prompt, *chosen]),),
                rejected=(sample([*prompt, *rejected]),),
                prompt_key=str(len(pairs) // 2),
                encoded=False,
            )
        )
    return pairs


def model() -> ScalarModel:
    return scalar_model(tiny_llama(torch.float32), lora_rank=0, seed=0, bias=False)


CONFIG = RewardModelConfig(
    epochs=6, batch=16, optimizer=OptimizerConfig(learning_rate=5e-3, schedule="linear")
)


def test_bradley_terry_by_value_and_by_finite_differences() -> None:
    margin = torch.tensor([0.0, 2.0, -2.0], dtype=torch.float64, requires_grad=True)
    expected = [math.log(2), math.log1p(math.exp(-2)), math.log1p(math.exp(2))]
    assert bradley_terry(margin).tolist() == pytest.approx(expected)
    assert torch.autograd.gradcheck(lambda m: bradley_terry(m).sum(), (margin,))


def test_a_row_is_scored_at_its_last_token_whatever_is_padded_beside_it() -> None:
    one = model()
    torch.nn.init.ones_(one.head.weight)
    short, long = [1, 2, 3], [1, 2, 3, 4, 5, 6]
    alone = [row_scores(one, [row]).item() for row in (short, long)]
    assert row_scores(one, [short, long]).tolist() == pytest.approx(alone, abs=1e-5)
    full = one(torch.tensor([short]), torch.ones(1, 3))
    assert full[0, -1].item() == pytest.approx(alone[0], abs=1e-6)


@pytest.mark.slow
def test_it_learns_a_known_annotator_and_predicts_held_out_pairs(tmp_path: Path) -> None:
    train, kept = held_out(annotated(400), 0.2, seed=0)
    assert not {p.prompt_key for p in train} & {p.prompt_key for p in kept}
    one = model()
    before = measure(one, kept, max_tokens=4096)
    assert (before.accuracy, before.log_loss) == (0.5, pytest.approx(math.log(2)))
    train_reward_model(one, train, CONFIG, tmp_path, lambda *_: None)
    report = measure(one, kept, max_tokens=4096)
    assert report.pairs == len(kept) >= 60
    assert report.accuracy > 0.8
    assert report.log_loss < 0.5
    assert read_metrics(tmp_path / "metrics.jsonl")[-1]["accuracy"] > 0.8
    # and what it says of single answers orders them by how often the token occurs
    scores = row_scores(one, [[1, 2, *[LIKED] * n, *[3] * (6 - n)] for n in (0, 3, 6)]).tolist()
    assert scores == sorted(scores)


def test_calibration_is_measured_on_the_side_that_was_preferred() -> None:
    """Margins of log 3 say 75 %: half of them right is a calibration error of a quarter."""
    one = model()
    pairs = annotated(4)
    want = iter([math.log(3), -math.log(3), math.log(3), -math.log(3)])

    class Fixed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def forward(self, ids_BT: torch.Tensor, attention_BT: torch.Tensor) -> torch.Tensor:
            worth_BT = torch.zeros(ids_BT.shape)
            half = len(ids_BT) // 2
            for i in range(half):
                worth_BT[i] = next(want)
            return worth_BT

    report = measure(Fixed(), pairs, max_tokens=4096)
    assert report.accuracy == 0.5
    (only,) = report.bins
    assert (only.pairs, only.accuracy) == (4, 0.5)
    assert only.confidence == pytest.approx(0.75)
    assert report.calibration_error == pytest.approx(0.25)
    assert pair_margins(one, pairs).tolist() == [0.0] * 4


def test_the_step_does_not_depend_on_the_micro_batches() -> None:
    pairs = annotated(6)
    one = model()
    torch.nn.init.ones_(one.head.weight)
    whole = pair_margins(one, pairs).tolist()
    apart = [pair_margins(one, [pair]).item() for pair in pairs]
    assert whole == pytest.approx(apart, abs=1e-5)


def test_pairs_on_one_prompt_cannot_be_held_out() -> None:
    pairs = annotated(2)
    with pytest.raises(UsageError, match="all 2 pairs are on one prompt"):
        held_out(pairs, 0.2, seed=0)
    train, kept = held_out(annotated(4), 0.9, seed=0)
    assert len(train) == len(kept) == 2
