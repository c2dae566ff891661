"""The trainer: advantages within groups, the clipped surrogate, the update. `python trainer.py` trains.

    A = reward - mean reward of the group
    r = exp(log-prob now - log-prob when sampled)
    loss = mean over all sampled tokens of the step of -min(r A, clip(r, 0.8, 1.2) A)

Nothing is divided by a standard deviation, and there is no KL to a reference, as in nano-rl's `recipe`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import torch
from environment import Environment
from policy import Policy, padded
from rollout_worker import Group, RolloutWorker, Trajectory
from torch import Tensor

CLIP = 0.2
MAX_GRAD_NORM = 1.0
LEARNING_RATE, IMITATION_RATE = 4e-4, 3e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows padded on the right; every column at position t belongs to token t."""

    ids_BT: Tensor
    mask_BT: Tensor
    """True on tokens that are trained"""
    old_logprobs_BT: Tensor
    """log-probs when sampled, nats"""
    advantages_BT: Tensor

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory], advantages: Sequence[float], dtype: torch.dtype) -> Batch:
        ids_BT = padded([run.ids for run in trajectories])
        return cls(
            ids_BT=ids_BT,
            mask_BT=padded([run.mask for run in trajectories], torch.bool),
            old_logprobs_BT=padded([run.logprobs for run in trajectories], dtype),
            advantages_BT=torch.tensor(advantages, dtype=dtype)[:, None].expand(ids_BT.shape),
        )


def group_advantages(rewards: Sequence[float]) -> list[float]:
    """[G] each reward minus the mean of the group."""
    mean = sum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def policy_loss(logprobs_BT: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """The loss, and [N] the ratio of each trained token."""
    new_N, old_N = logprobs_BT[batch.mask_BT], batch.old_logprobs_BT[batch.mask_BT]
    advantages_N = batch.advantages_BT[batch.mask_BT]
    ratio_N = (new_N - old_N).exp()
    clipped_N = ratio_N.clamp(1 - CLIP, 1 + CLIP)
    return -(ratio_N * advantages_N).minimum(clipped_N * advantages_N).mean(), ratio_N.detach()


def imitation_loss(logprobs_BT: Tensor, batch: Batch) -> Tensor:
    """Mean negative log-likelihood of the tokens under the mask."""
    return -logprobs_BT[batch.mask_BT].mean()


class Trainer:
    def __init__(
        self,
        worker: RolloutWorker,
        *,
        learning_rate: float = LEARNING_RATE,
        passes: int = 2,
        coin: Random | None = None,
    ) -> None:
        """`passes` are updates on the same rollouts; from the second on the ratio is not 1. With a `coin` it
        learns from rewards at random: the control, in which there is nothing to learn."""
        self.worker = worker
        self.policy = worker.policy
        self.passes = passes
        self.coin = coin
        self.optimizer = torch.optim.AdamW(self.policy.model.parameters(), lr=learning_rate, weight_decay=0.0)

    def step(self, seed: str, *, tasks: int, group_size: int) -> dict[str, float]:
        """Gather groups, credit them, update. Returns metrics."""
        groups = self.worker.rollout(self.worker.environment.tasks(seed, tasks), group_size)
        reward = mean_reward(groups)
        if self.coin:
            for run in (run for group in groups for run in group):
                run.reward = float(self.coin.random() < 0.5)
        batch = self.credit(groups)
        ratios = self.learn(batch) if batch else []
        return {
            "reward": reward,
            "ratio": ratios[0].mean().item() if ratios else 1.0,
            "clipped": ((ratios[-1] - 1).abs() > CLIP).double().mean().item() if ratios else 0.0,
        }

    def credit(self, groups: Sequence[Group]) -> Batch | None:
        """The runs of groups whose rewards differ: in the others every advantage is 0."""
        live = [group for group in groups if len({run.reward for run in group}) > 1]
        advantages = [a for group in live for a in group_advantages([run.reward for run in group])]
        runs = [run for group in live for run in group]
        return Batch.of(runs, advantages, self.policy.model.dtype) if runs else None

    def learn(self, batch: Batch) -> list[Tensor]:
        """All updates on a batch. Returns [passes] the ratios of the trained tokens."""
        ratios = []
        for _ in range(self.passes):
            loss, ratio_N = policy_loss(self.policy.logprobs(batch.ids_BT), batch)
            self.update(loss)
            ratios.append(ratio_N)
        return ratios

    def imitate(self, seed: str, count: int) -> None:
        """One update of the warm start, on demonstrations, without which no rollout would earn a reward."""
        shown = self.worker.environment.demonstrations(seed, count)
        runs = [self.worker.demonstrate(task, actions) for task, actions in shown]
        batch = Batch.of(runs, [0.0] * len(runs), self.policy.model.dtype)
        self.update(imitation_loss(self.policy.logprobs(batch.ids_BT), batch))

    def update(self, loss: Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.policy.model.parameters(), MAX_GRAD_NORM)
        self.optimizer.step()


def mean_reward(groups: Sequence[Group]) -> float:
    rewards = [run.reward for group in groups for run in group]
    return sum(rewards) / len(rewards)


def train(
    *,
    seed: int = 0,
    steps: int = 30,
    warm_start: int = 200,
    wrong_mask: bool = False,
    random_rewards: bool = False,
) -> list[float]:
    """Warm-start a policy and train it. Returns the rewards on tasks of another seed, before and after."""
    environment = Environment()
    policy = Policy(environment.words, seed)
    worker = RolloutWorker(policy, environment, observation_mask=int(wrong_mask))
    teacher = Trainer(worker, learning_rate=IMITATION_RATE)
    for number in range(warm_start):
        teacher.imitate(f"demonstrations {seed} {number}", count=32)

    def held_out() -> float:
        return mean_reward(worker.rollout(environment.tasks("held out", 96), 2))

    rewards = [held_out()]
    print(f"after the warm start: reward {rewards[0]:.3f} on 96 tasks of another seed", flush=True)
    trainer = Trainer(worker, coin=Random(seed) if random_rewards else None)
    for number in range(1, steps + 1):
        metrics = trainer.step(f"step {seed} {number}", tasks=24, group_size=8)
        shown = "  ".join(f"{name} {value:.3f}" for name, value in metrics.items())
        print(f"step {number:2}  {shown}", flush=True)
    rewards.append(held_out())
    print(f"after {steps} steps: reward {rewards[1]:.3f}")
    return rewards


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a tiny policy to answer with tools, on a CPU.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--wrong-mask", action="store_true", help="the exercise: train on observations too")
    parser.add_argument("--random-rewards", action="store_true", help="the control: nothing to learn")
    options = parser.parse_args()
    torch.set_num_threads(1)  # one thread is fastest for a model this small, and its sums have one order
    train(**vars(options))
