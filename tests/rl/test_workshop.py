"""The workshop in numbers: "5 + 3" under a model of 22 tokens, its rewards, and its three losses in one sum.

    L = L_RL + 0.1 L_SFT + 0.01 L_KL = 0.326 + 0.1 x 6.813 + 0.01 x 0.500 = 1.013

The workshop's weights are not recorded: the probabilities of this model are chosen so that each loss has the
workshop's value. What is tested is how our code takes rewards, masks, weights and means.
"""

from __future__ import annotations

import math

import pytest
import torch
from builders import trajectory, turn, verdict
from torch import Tensor, nn

from nano_rl.learn.advantages import discounted_returns, group_samples
from nano_rl.learn.batch import Batch, make_batches
from nano_rl.learn.config import OptimizerConfig
from nano_rl.learn.groups import Group, to_samples
from nano_rl.learn.learner import Learner
from nano_rl.learn.loss import policy_loss, sft_loss
from nano_rl.learn.objectives import Objective, find_objective
from nano_rl.learn.train_step import TermLoss
from nano_shared.types import Trajectory

WORDS = [*"0123456789+=?.", "calculate", "answer", "<end>", "the", "sum", "of", "and", "is"]
IDS = {word: number for number, word in enumerate(WORDS)}
TURN_REWARDS = (0.3, 0.1, 1.0)
"""of the tool, of the form, of the answer"""
L_RL, L_SFT, L_KL = 0.3263, 6.8134, 0.5
SFT_WEIGHT, KL_WEIGHT = 0.1, 0.01
ACTIONS = [("5 + 3 =", "calculate 5 + 3 <end>"), ("8 .", "is 8 <end>"), ("?", "answer 8 <end>")]
"""(read, sampled) of each turn"""
DEMONSTRATION = [("5 + 3 =", "the sum of 5 and 3 . <end>")]
ON_POLICY = math.exp(-L_RL / sum(TURN_REWARDS))
"""probability of each sampled token: the mean of -A log p is 0.326 where A is 1.4"""
DEMONSTRATED = math.exp(-L_SFT)


def encoded(text: str) -> list[int]:
    return [IDS[word] for word in text.split()]


def sampled_pairs(turns: list[tuple[str, str]]) -> list[tuple[int, int]]:
    """Each sampled token behind the one before it."""
    pairs = []
    for read, sampled in turns:
        row = [*encoded(read), *encoded(sampled)]
        pairs += [(row[i - 1], row[i]) for i in range(len(encoded(read)), len(row))]
    return pairs


class Bigrams(nn.Module):
    """A model of 22 tokens: the next one depends on the last."""

    def __init__(self) -> None:
        super().__init__()
        table = torch.full((len(WORDS), len(WORDS)), -1.0, dtype=torch.float64)
        for turns, probability in ((ACTIONS, ON_POLICY), (DEMONSTRATION, DEMONSTRATED)):
            for last, token in sampled_pairs(turns):
                assert table[last, token] in (-1.0, probability), "a pair has one probability"
                table[last, token] = probability
        for row in table:
            free = row < 0
            row[free] = (1 - row[~free].sum()) / free.sum()
        self.logits = nn.Parameter(table.log())

    def logprobs(self, batch: Batch) -> Tensor:
        """[B, T]"""
        logprobs_BT = self.logits.log_softmax(-1)[batch.ids_BT[:, :-1], batch.ids_BT[:, 1:]]
        return nn.functional.pad(logprobs_BT, (1, 0))


def logged(turns: list[tuple[str, str]], logprob: float = 0.0) -> Trajectory:
    made = [
        turn(encoded(read), encoded(sampled), index=index, logprobs=[logprob] * len(encoded(sampled)))
        for index, (read, sampled) in enumerate(turns)
    ]
    reward = sum(TURN_REWARDS)
    run = trajectory(*made, key="5 + 3", reward=reward)
    judged = verdict(reward).model_copy(update={"turn_rewards": TURN_REWARDS})
    return run.model_copy(update={"verdict": judged})


def rl_batch() -> Batch:
    """The policy's run with its reward as advantage; under the reference each token has half a nat less."""
    run = logged(ACTIONS, math.log(ON_POLICY))
    samples = group_samples(Group(task_key="5 + 3", trajectories=(run,)), [run.reward])
    (batch,) = make_batches(samples, max_tokens=64, dtype=torch.float64)
    return batch.with_reference(Bigrams().logprobs(batch) - L_KL)


def sft_batch() -> Batch:
    (batch,) = make_batches(
        to_samples(logged(DEMONSTRATION), 0.0, imitation=True), max_tokens=64, dtype=torch.float64
    )
    return batch


def objective(beta: float) -> Objective:
    """REINFORCE, a mean over tokens, the KL in the loss."""
    chosen = find_objective("reinforce")
    return chosen.with_terms(aggregation="token", kl="k1", kl_in="loss", beta=beta)


def rl_loss(model: nn.Module, batch: Batch, beta: float = KL_WEIGHT) -> tuple[Tensor, dict[str, float]]:
    assert isinstance(model, Bigrams)
    return policy_loss(model.logprobs(batch), batch, objective(beta))


def imitation_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, float]]:
    assert isinstance(model, Bigrams)
    return sft_loss(model.logprobs(batch), batch)


def test_the_rewards_of_its_turns_are_the_reward_of_the_run() -> None:
    assert len(WORDS) == len(IDS) == 22
    assert discounted_returns(TURN_REWARDS, 1.0) == pytest.approx([1.4, 1.1, 1.0])
    batch = rl_batch()
    assert batch.advantages_BT[batch.mask_BT].tolist() == pytest.approx([1.4] * 11)
    assert not batch.advantages_BT[~batch.mask_BT].any()


def test_each_of_its_losses() -> None:
    model, batch = Bigrams(), rl_batch()
    loss, metrics = rl_loss(model, batch, beta=0.0)
    assert round(loss.item(), 3) == 0.326
    assert metrics["tokens"] == 11
    assert round(imitation_loss(model, sft_batch())[0].item(), 3) == 6.813
    with_kl, metrics = rl_loss(model, batch, beta=1.0)
    assert round(with_kl.item() - loss.item(), 3) == 0.500
    assert metrics["kl_reference"] / metrics["tokens"] == pytest.approx(0.5)


def test_an_update_sums_them_with_their_weights() -> None:
    model = Bigrams()
    learner = Learner(model, OptimizerConfig(learning_rate=1e-2), steps=1)
    sft = TermLoss(name="sft", weight=SFT_WEIGHT, loss=imitation_loss)
    batch, demonstration = rl_batch(), sft_batch()
    gradient = torch.autograd.grad(
        rl_loss(model, batch)[0] + SFT_WEIGHT * imitation_loss(model, demonstration)[0], model.logits
    )[0]
    seen: list[Tensor] = []

    def guard(metrics: dict[str, float]) -> None:
        assert model.logits.grad is not None
        seen.append(model.logits.grad.clone())

    metrics = learner.update_parts([(batch, rl_loss), (demonstration, sft)], guard)
    assert round(metrics["loss"], 3) == 1.013
    assert round(metrics["loss_sft"], 3) == 0.681
    # the learner has scaled the gradient down to its bound
    torch.testing.assert_close(seen[0], gradient * min(1.0, 1.0 / gradient.norm().item()))
