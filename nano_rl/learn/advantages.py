"""Credit: the rewards of a group become advantages, of whole rollouts or of each of their turns.

An advantage is the reward minus a baseline. The default subtracts the group mean alone, as in Dr. GRPO (Liu
et al. 2025, arXiv 2503.20783); `rloo` is the leave-one-out baseline (Kool et al. 2019; Ahmadian et al. 2024,
arXiv 2402.14740); `std` divides as in GRPO (Shao et al. 2024, arXiv 2402.03300). Those of a
critic (`nano_preferences/critic.py`) are `gae` (Schulman et al. 2016, arXiv 1506.02438).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from nano_rl.learn.groups import Group, TrainSample, is_dead, to_samples
from nano_rl.learn.objectives import Baseline, Objective, Std
from nano_shared.errors import UsageError
from nano_shared.extension_points import call_extension, described, is_ours, read_number
from nano_shared.printable import one_line, printable
from nano_shared.types import (
    Completion,
    Finish,
    Sampling,
    StopReason,
    Task,
    Trajectory,
    Trust,
    Turn,
    Verdict,
)

if TYPE_CHECKING:
    from torch import Tensor


def group_advantages(
    rewards: Sequence[float | None], *, baseline: Baseline = "mean", std: Std = "none", eps: float = 1e-4
) -> list[float]:
    """[G] one advantage for each rollout of a group; never NaN.

    A reward of None or NaN is left out of the baseline and gets 0.0; with a baseline, so do groups with equal
    rewards and with a single scored rollout. `std` divides by the deviation of the whole group plus `eps`: a
    leave-one-out deviation is 0 where one rollout differs from equal peers.

    Raises ValueError for an infinite reward, and for `std` without a baseline.
    """
    if baseline == "none" and std != "none":
        raise ValueError(f"std={std!r} needs a baseline; choose baseline='mean' or std='none'")
    if any(r is not None and math.isinf(r) for r in rewards):
        raise ValueError(f"rewards must be finite or None, not {list(rewards)}")
    scored = [float(r) for r in rewards if r is not None and not math.isnan(r)]
    if baseline != "none" and is_dead(rewards):
        return [0.0] * len(rewards)
    scale = _deviation(scored, std) + eps if std != "none" else 1.0
    return [
        0.0 if r is None or math.isnan(r) else (r - _baseline(r, scored, baseline)) / scale for r in rewards
    ]


def centred(rewards_G: Sequence[float], runs_G: Sequence[Trajectory]) -> list[float]:
    return group_advantages(rewards_G)


def standardised(rewards_G: Sequence[float], runs_G: Sequence[Trajectory]) -> list[float]:
    return group_advantages(rewards_G, std="sample")


def left_one_out(rewards_G: Sequence[float], runs_G: Sequence[Trajectory]) -> list[float]:
    return group_advantages(rewards_G, baseline="rloo")


def summed_advantages(
    objectives: Sequence[tuple[float, Sequence[float | None]]], *, baseline: Baseline, std: Std,
    eps: float = 1e-4,
) -> list[float]:  # fmt: skip
    """[G] the weighted sum of the advantages of each objective, (weight, [G] rewards).

    Normalised separately, rollouts that are good in different parts differ even where their summed rewards
    agree: GDPO (Liu et al. 2026, arXiv 2601.05242), without its normalisation over the batch. Raises
    ValueError where the numbers of rollouts differ, and as `group_advantages`.
    """
    if len({len(rewards) for _, rewards in objectives}) > 1:
        raise ValueError(f"objectives of {[len(r) for _, r in objectives]} rollouts cannot be summed")
    apart = [
        [weight * a for a in group_advantages(rewards, baseline=baseline, std=std, eps=eps)]
        for weight, rewards in objectives
    ]
    return [math.fsum(of_rollout) for of_rollout in zip(*apart, strict=True)]


def discounted_returns(rewards: Sequence[float], discount: float) -> list[float]:
    """[T] the discounted return of each turn: R_t = r_t + discount * R_(t+1)."""
    returns: list[float] = []
    following = 0.0
    for reward in reversed(rewards):
        following = reward + discount * following
        returns.append(following)
    return returns[::-1]


def turn_advantages(
    rewards: Sequence[Sequence[float] | None], *, discount: float, baseline: Baseline = "mean"
) -> list[list[float]]:
    """[G][T] the discounted return of each turn minus the baseline; `rewards` are [G][T].

    The baseline is the mean over rollouts (`rloo`: over the others) of the mean return of their turns, so
    that each rollout counts once. A rollout whose rewards are None is left out; a group with fewer than two
    scored rollouts gets 0.0 throughout. Raises ValueError for a reward that is not finite.
    """
    if any(not math.isfinite(r) for of_rollout in rewards for r in of_rollout or ()):
        raise ValueError(f"turn rewards must be finite, not {rewards}")
    returns = [None if r is None else discounted_returns(r, discount) for r in rewards]
    means = [math.fsum(r) / len(r) if r else None for r in returns]
    scored = [m for m in means if m is not None]
    if baseline != "none" and len(scored) < 2:
        return [[0.0] * len(r or ()) for r in returns]
    return [
        [value - _baseline(mean, scored, baseline) for value in of_rollout or ()] if mean is not None else []
        for of_rollout, mean in zip(returns, means, strict=True)
    ]


def _baseline(reward: float, scored: list[float], baseline: Baseline) -> float:
    if baseline == "none":
        return 0.0
    if baseline == "mean":
        return math.fsum(scored) / len(scored)
    return math.fsum((*scored, -reward)) / (len(scored) - 1)


def _deviation(scored: list[float], std: Std) -> float:
    mean = math.fsum(scored) / len(scored)
    freedom = len(scored) - 1 if std == "sample" else len(scored)
    return math.sqrt(math.fsum((r - mean) ** 2 for r in scored) / freedom)


class RewardParts(Protocol):
    def objectives(self, runs: Sequence[Trajectory]) -> Sequence[tuple[float, Sequence[float | None]]]:
        """(weight, [G] scores) of each part, for parts that are normalised separately."""


def cut_off(trajectory: Trajectory) -> bool:
    """True if a token budget ended the rollout: by its stop reason, or by the finish of its last call."""
    if trajectory.stop in (StopReason.MAX_TOKENS, StopReason.CONTEXT_FULL):
        return True
    return bool(trajectory.turns) and trajectory.turns[-1].completion.finish.is_cut


def length_penalty(trajectory: Trajectory, *, limit: int, buffer: int) -> float:
    """0 up to `limit - buffer` sampled tokens, falling linearly to -1 at `limit`; added to the reward. The
    soft overlong punishment of DAPO (arXiv 2503.14476)."""
    sampled = sum(len(t.completion.tokens.sampled_ids) for t in trajectory.turns if t.completion.tokens)
    return -min(max(sampled - (limit - buffer), 0) / buffer, 1.0)


Credit = Sequence[float | Sequence[float] | None]
"""[G] of each rollout one advantage, or one for each of its turns; None leaves the rollout out of the loss"""


def group_credit(group: Group, objective: Objective, reward: RewardParts | None) -> Credit:
    """[G] the advantages of a group; None for a rollout without a reward, and under `overlong` = mask for one
    that was cut off. `reward` gives the parts for `normalise` = each."""
    rewards_G = group_rewards(group, objective)
    credit = _advantages(group, rewards_G, objective, reward)
    return [None if math.isnan(r) else a for r, a in zip(rewards_G, credit, strict=True)]


def estimated(
    advantage: Callable[..., Any], rewards_G: Sequence[float], runs_G: Sequence[Trajectory]
) -> list[float | list[float] | None]:
    """[G] what an extension of `nano.advantages` makes of scored rollouts. Raises UsageError for one that
    raises, or that returns anything but a finite number for each rollout, or for each of its turns."""
    named = f"the advantage {getattr(advantage, '__name__', advantage)}"
    # copies, which it may change
    given = call_extension(advantage, list(rewards_G), list(runs_G), name=named, error=UsageError)
    if not isinstance(given := _listed(given), Sequence) or len(given) != len(runs_G):
        what = f"{len(given)} values" if isinstance(given, Sized) else f"what is {described(given)}"
        raise UsageError(
            f"{named} returned {what} for {len(runs_G)} rollouts; it must return a list [G], of each rollout"
            " a number, or one for each of its turns"
        )
    return [_credit(value, run, named) for value, run in zip(given, runs_G, strict=True)]


def _credit(value: object, run: Trajectory, named: str) -> float | list[float] | None:
    value, whole, turns = _listed(value), read_number(value), len(run.turns)
    each = [whole] if whole is not None else [*map(read_number, value if isinstance(value, Sequence) else [])]
    finite = [number for number in each if number is not None and math.isfinite(number)]
    if value is not None and (len(finite) != len(each) or len(each) != (turns if whole is None else 1)):
        raise UsageError(
            f"{named} returned {one_line(repr(value), 80)} for a rollout of {turns} turns; it must be a"
            " finite number, one for each turn, or None for a rollout that is left out"
        )
    return None if value is None else finite if whole is None else finite[0]


def _listed(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value  # an array, or a number of one


def probe_advantage(objective: Objective) -> None:
    """Call an advantage of users on made-up groups, before a model is loaded. Raises UsageError as
    `estimated` does. What it looks for in made-up rollouts and does not find is only said."""
    if objective.advantage is None or is_ours(str(getattr(objective.advantage, "__module__", ""))):
        return
    task, sampling = Task(key="made-up", prompt="made up"), Sampling()
    said = Completion(text="", finish=Finish.STOP, sampling=sampling, policy_id="made-up")
    turns = tuple(Turn(index=i, completion=said, parser="none", started=0, ended=1) for i in range(2))
    for rewards_G in ([0.0, 1.0, 0.5, 1.0], [1.0, 1.0], [0.0]):
        runs_G = [
            Trajectory(
                id=f"made-up-{n}", task=task, turns=turns, stop=StopReason.FINISHED, runtime_version="0",
                profile="none", profile_hash="-", template_hash="-", tools_hash="-", policy="made-up",
                started=0, ended=1,
                verdict=Verdict(reward=reward, trust=Trust.HIDDEN, grader="none", graded_hash="-"),
            )
            for n, reward in enumerate(rewards_G)
        ]  # fmt: skip
        try:
            estimated(objective.advantage, rewards_G, runs_G)
        except UsageError as problem:
            if not isinstance(problem.__cause__, LookupError | AttributeError):
                raise
            print(f"nano: {printable(str(problem))}, of made-up rollouts", file=sys.stderr)
            return


def _advantages(
    group: Group, rewards_G: Sequence[float], objective: Objective, reward: RewardParts | None
) -> Credit:
    runs, out_G = group.trajectories, [math.isnan(r) for r in rewards_G]
    if objective.advantage is not None:
        runs_G = [run for run, out in zip(runs, out_G, strict=True) if not out]
        scored_G = [reward for reward in rewards_G if not math.isnan(reward)]
        given = iter(estimated(objective.advantage, scored_G, runs_G) if runs_G else ())
        return [None if out else next(given) for out in out_G]
    if objective.discount is not None:
        turns_G = turn_rewards(group, objective)
        return turn_advantages(turns_G, discount=objective.discount, baseline=objective.baseline)
    if objective.normalise == "each" and reward is not None:
        parts: list[tuple[float, Sequence[float | None]]] = [*reward.objectives(runs)]
        parts.append((1.0, _penalties(group, objective)))
        compared = [
            (weight, [None if out else v for v, out in zip(scores, out_G, strict=True)])
            for weight, scores in parts
        ]
        return summed_advantages(compared, baseline=objective.baseline, std=objective.std)
    return group_advantages(rewards_G, baseline=objective.baseline, std=objective.std)


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditedGroup:
    """A group with its credit, which is computed once a step, when the group has been gathered."""

    group: Group
    credit: Credit | None
    """None where the advantages come from a critic"""
    has_signal: bool
    """True if the group has a non-zero advantage; with `dead_groups` = keep or a critic, if any of its
    rollouts is scored"""


def credit_group(group: Group, objective: Objective, reward: RewardParts | None) -> CreditedGroup:
    credit = None if objective.critic else group_credit(group, objective, reward)
    if credit is None or objective.dead_groups == "keep":
        signal = not all(math.isnan(r) for r in group_rewards(group, objective))
    else:
        signal = any(
            a != 0 for of in credit if of is not None for a in ([of] if isinstance(of, float) else of)
        )
    return CreditedGroup(group=group, credit=credit, has_signal=signal)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutBatch:
    """The groups of one step with their credit, also those without a signal, and metrics about them."""

    credited: list[CreditedGroup]
    metrics: Mapping[str, float] = field(default_factory=dict)
    logged: Mapping[str, int] = field(default_factory=dict)
    """logged run of this step -> version of the policy that sampled it"""
    exhausted: bool = False
    """the logs have no runs left for this step, or none of their tasks has a signal any more"""
    off_policy_steps: int = 0
    """policy versions between sampling and training of rollouts made ahead"""
    behaviour_weights: Mapping[str, Tensor] | None = None
    """the weights that sampled rollouts made ahead, if the policy has been updated since"""

    @property
    def groups(self) -> list[Group]:
        return [c.group for c in self.credited]


def group_samples(group: Group, advantages_G: Credit | None = None) -> list[TrainSample]:
    """The samples of a group; None takes its `group_advantages`. A rollout without a reward, or with None in
    `advantages_G`, is left out of the loss."""
    advantages_G = group_advantages(group.rewards_G) if advantages_G is None else advantages_G
    members = zip(group.trajectories, group.rewards_G, advantages_G, strict=True)
    # a run whose prompt fills the context has no turn: it counts in the baseline and has nothing to train
    trained = ((t, a) for t, reward, a in members if not math.isnan(reward) and t.own_turns)
    return [s for t, a in trained if a is not None for s in to_samples(t, a)]


def turn_rewards(group: Group, objective: Objective) -> list[Sequence[float] | None]:
    """[G][T] the reward of each turn, the length penalty added to the last; None for a rollout without a
    reward."""
    rewards_G, penalties = group_rewards(group, objective), _penalties(group, objective)
    return [
        _turn_rewards(run, reward, penalty)
        for run, reward, penalty in zip(group.trajectories, rewards_G, penalties, strict=True)
    ]


def group_rewards(group: Group, objective: Objective) -> list[float]:
    """[G] rewards with the length penalty added; NaN for a rollout that is left out of the comparison."""
    return [
        math.nan if objective.overlong == "mask" and cut_off(run) else reward + penalty
        for run, reward, penalty in zip(
            group.trajectories, group.rewards_G, _penalties(group, objective), strict=True
        )
    ]


def _penalties(group: Group, objective: Objective) -> list[float]:
    limit, buffer = objective.overlong_limit, objective.overlong_buffer
    if objective.overlong != "shape":
        return [0.0] * len(group.trajectories)
    return [length_penalty(run, limit=limit, buffer=buffer) for run in group.trajectories]


def _turn_rewards(run: Trajectory, reward: float, penalty: float) -> Sequence[float] | None:
    """[T] turn rewards of the verdict, or else the whole reward in the last turn; None if not scored."""
    if math.isnan(reward):
        return None
    given = run.verdict.turn_rewards if run.verdict else None
    if given is None:
        return [0.0] * (len(run.turns) - 1) + [reward]
    return [*given[:-1], given[-1] + penalty]


def gae(
    rewards: Sequence[float], values: Sequence[float], *, discount: float, lam: float
) -> tuple[list[float], list[float]]:
    """[N] advantages and [N] returns (advantage + value) of a chain of N sampled tokens. d_k = r_k + discount
    * V_(k+1) - V_k with V_N = 0, and A_k = d_k + discount * lam * A_(k+1)."""
    advantages = [0.0] * len(rewards)
    following = next_value = 0.0
    for k in range(len(rewards) - 1, -1, -1):
        following = rewards[k] + discount * next_value - values[k] + discount * lam * following
        next_value = values[k]
        advantages[k] = following
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


def whitened(
    advantages: Sequence[Sequence[float]], masks: Sequence[Sequence[int]]
) -> list[tuple[float, ...]]:
    """[rows][L] advantages with mean 0 and standard deviation 1 over the sampled tokens of all rows; 0
    elsewhere."""
    flat = [
        a for row, mask in zip(advantages, masks, strict=True) for a, m in zip(row, mask, strict=True) if m
    ]
    mean = math.fsum(flat) / max(len(flat), 1)
    deviation = math.sqrt(math.fsum((a - mean) ** 2 for a in flat) / max(len(flat), 1))
    scale = 0.0 if not flat or min(flat) == max(flat) else 1 / (deviation + 1e-8)
    return [
        tuple((a - mean) * scale * m for a, m in zip(row, mask, strict=True))
        for row, mask in zip(advantages, masks, strict=True)
    ]
