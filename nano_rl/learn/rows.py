"""A group: the rollouts of one task, whose rewards share a baseline; its rows of tokens; and advantages.

Advantages are the rewards of a group minus a baseline, for whole rollouts or for each of their turns. The
default subtracts the group mean alone, as in Dr. GRPO (Liu et al. 2025, arXiv 2503.20783); `rloo` is the
leave-one-out baseline (Kool et al. 2019; Ahmadian et al. 2024, arXiv 2402.14740); `std` divides as in GRPO
(Shao et al. 2024, arXiv 2402.03300). Advantages of a critic are in `critic.py`.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, Protocol

from nano_rl.learn.objectives import Baseline, Objective, Std
from nano_shared.errors import UsageError
from nano_shared.extensions import call_extension, described, is_ours, read_number
from nano_shared.printable import one_line, printable
from nano_shared.types import (
    Completion,
    Finish,
    Limits,
    Sampling,
    StopReason,
    Task,
    Trajectory,
    Trust,
    Turn,
    TurnTokens,
    Verdict,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMember:
    id: str
    started: float
    version: int
    reward: float
    """NaN if there is none, or if the failure was not the policy's"""
    log: int = 0
    """index of its log among those that are read"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Rollouts of one task from any source: fresh, logged, or forked. Raises ValueError if it is empty, a run
    appears twice, or tasks differ in key or content."""

    task_key: str
    """`Trajectory.group_key`: the key of the task, for forks of a step with run and step appended"""
    trajectories: tuple[Trajectory, ...]
    """[G]"""

    def __post_init__(self) -> None:
        if not self.trajectories:
            raise ValueError(f"group {self.task_key!r} has no trajectories")
        run, count = Counter(t.id for t in self.trajectories).most_common(1)[0]
        if count > 1:
            raise ValueError(f"group {self.task_key!r} holds run {run!r} {count} times; a run counts once")
        strangers = {t.group_key for t in self.trajectories} - {self.task_key}
        if strangers:
            raise ValueError(f"group {self.task_key!r} holds rollouts of other tasks: {sorted(strangers)}")
        # a command may override the limits (`--limit`)
        tasks = (t.task.listed.model_copy(update={"limits": Limits()}) for t in self.trajectories)
        contents = {task.id for task in tasks}
        if len(contents) > 1:
            raise ValueError(
                f"group {self.task_key!r} mixes {len(contents)} tasks under one key;"
                " rewards of different tasks share no baseline, give each task its own key"
            )

    @property
    def rewards_G(self) -> tuple[float, ...]:
        """[G] rewards; NaN if there is none, or if the failure was not the policy's."""
        return tuple(_reward(t) for t in self.trajectories)

    @property
    def members(self) -> tuple[GroupMember, ...]:
        return tuple(
            GroupMember(id=t.id, started=t.started, version=sampled_by(t), reward=_reward(t))
            for t in self.trajectories
        )

    @property
    def task(self) -> Task:
        return self.trajectories[0].task

    def only(self, runs: Sequence[str]) -> Group:
        by_id = {t.id: t for t in self.trajectories}
        return replace(self, trajectories=tuple(by_id[run] for run in runs))

    def load(self) -> Group:
        return self

    @property
    def forked(self) -> bool:
        """True if its rollouts are forks: they began at a step of another run."""
        return self.task_key != self.trajectories[0].task.key

    @property
    def singleton(self) -> bool:
        """True if fewer than two rollouts are scored."""
        return sum(not math.isnan(r) for r in self.rewards_G) < 2

    @property
    def dead(self) -> bool:
        """True if all rewards are equal, so that every advantage is 0."""
        return is_dead(self.rewards_G)


def sampled_by(run: Trajectory) -> int:
    """The policy version of the oldest turn of a run; 0 without turns."""
    return min((turn.completion.policy_version for turn in run.turns), default=0)


def form_groups(trajectories: Iterable[Trajectory]) -> list[Group]:
    """Groups by `group_key`, in the order of first appearance; the forks of a step are one group."""
    by_key: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        by_key.setdefault(trajectory.group_key, []).append(trajectory)
    return [Group(task_key=key, trajectories=tuple(members)) for key, members in by_key.items()]


def group_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Metrics of the rewards of a step. `frac_zero_std`: groups with equal rewards; `frac_singleton`: those
    of them with fewer than two scored rollouts; `frac_truncated`: rollouts cut off by a limit; `reward_std`:
    mean of the deviations within groups; under TRL's names sampled tokens of a rollout (`completions/...`)
    and tool calls."""
    rewards = [r for group in groups for r in group.rewards_G]
    scored = [r for r in rewards if not math.isnan(r)]
    metrics = {
        "groups": float(len(groups)),
        "rollouts": float(len(rewards)),
        "frac_zero_std": sum(g.dead for g in groups) / max(len(groups), 1),
        "frac_singleton": sum(g.singleton for g in groups) / max(len(groups), 1),
        "frac_unscored": 1 - len(scored) / max(len(rewards), 1),
        "frac_truncated": sum(_cut_off(t) for g in groups for t in g.trajectories) / max(len(rewards), 1),
    }
    if scored:
        mean = math.fsum(scored) / len(scored)
        metrics |= {"reward_mean": mean, "reward_min": min(scored), "reward_max": max(scored)}
        within = [[r for r in g.rewards_G if not math.isnan(r)] for g in groups]
        deviations = [stdev(rewards) for rewards in within if len(rewards) > 1]
        metrics["reward_std"] = fmean(deviations) if deviations else 0.0
    return metrics | _completion_metrics([t for g in groups for t in g.trajectories])


def _completion_metrics(runs: Sequence[Trajectory]) -> dict[str, float]:
    if not runs:  # a step of imitation or preferences alone
        return {}
    lengths = sorted(run.num_sampled_tokens for run in runs)
    whole = [run.num_sampled_tokens for run in runs if not _cut_off(run)]
    seen = [o.ok for run in runs for turn in run.turns for o in turn.observations]
    metrics = {
        "completions/mean_length": fmean(lengths),
        "completions/min_length": float(lengths[0]),
        "completions/max_length": float(lengths[-1]),
        "completions/p95_length": float(lengths[math.ceil(0.95 * len(lengths)) - 1]),
        "tools/call_frequency": len(seen) / len(runs),
        "tools/failure_frequency": seen.count(False) / max(1, len(seen)),
    }
    return metrics | ({"completions/mean_terminated_length": fmean(whole)} if whole else {})


def row_tokens(run: Trajectory) -> int:
    rows: Counter[int] = Counter()
    for turn in run.turns:
        if tokens := turn.completion.tokens:
            rows[tokens.row] += len(tokens.context_ids) + len(tokens.sampled_ids)
    return max(rows.values(), default=0)


def _cut_off(trajectory: Trajectory) -> bool:
    if trajectory.stop is not None and (trajectory.stop.budget or trajectory.stop.ours):
        return trajectory.stop.budget
    return bool(trajectory.turns) and trajectory.turns[-1].completion.finish.is_cut


def _reward(trajectory: Trajectory) -> float:
    ours = trajectory.stop is not None and trajectory.stop.ours
    return math.nan if ours or trajectory.reward is None else trajectory.reward


def is_dead(rewards: Sequence[float | None]) -> bool:
    """True if fewer than two rollouts are scored, or all rewards are equal."""
    scored = [r for r in rewards if r is not None and not math.isnan(r)]
    return len(scored) < 2 or all(r == scored[0] for r in scored)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSample:
    """One row of tokens exactly as the model read and sampled them. Raises ValueError if lengths differ, if a
    token that was not sampled has a log-prob, and if the first token is trained."""

    run_id: str
    ids: tuple[int, ...]
    mask: tuple[int, ...]
    """[L] 1 on tokens that were sampled in this rollout and are trained, else 0"""
    logprobs: tuple[float, ...]
    """[L] behaviour log-probs, nats at `temperature`; 0 where the mask is 0"""
    versions: tuple[int, ...]
    """[L] policy version of the turn that the token belongs to"""
    advantage: float
    """of every token, unless `advantages_T` is given"""
    temperature: float
    advantages_T: tuple[float, ...] | None = None
    """[L] advantage of each token, if turns or tokens are credited separately"""
    turn_ids_T: tuple[int, ...] = ()
    """[L] index of the turn of each token; empty if the row was not made from turns"""

    def __post_init__(self) -> None:
        lengths = (len(self.ids), len(self.mask), len(self.logprobs), len(self.versions))
        if len(set(lengths)) > 1:
            raise ValueError(
                f"run {self.run_id!r}: ids, mask, logprobs, versions have lengths {lengths}, must be one"
            )
        if set(self.mask) - {0, 1}:
            raise ValueError(f"run {self.run_id!r}: mask holds {sorted(set(self.mask))}, only 0 and 1 may be")
        if any(p != 0 for p, m in zip(self.logprobs, self.mask, strict=True) if not m):
            raise ValueError(f"run {self.run_id!r}: a log-prob stands on a token that was not sampled")
        if self.mask[:1] == (1,):
            raise ValueError(
                f"run {self.run_id!r}: the first token of a row cannot be trained, give a prompt"
            )
        if self.advantages_T is not None and (
            len(self.advantages_T) != len(self.ids) or not all(map(math.isfinite, self.advantages_T))
        ):
            raise ValueError(f"run {self.run_id!r}: advantages must be one finite number for each token")
        if self.turn_ids_T and len(self.turn_ids_T) != len(self.ids):
            raise ValueError(f"run {self.run_id!r}: turn ids must be one for each token")
        if not (math.isfinite(self.advantage) and math.isfinite(self.temperature) and self.temperature > 0):
            raise ValueError(
                f"run {self.run_id!r}: advantage {self.advantage} must be finite"
                f" and temperature {self.temperature} positive"
            )

    @property
    def num_action_tokens(self) -> int:
        return sum(self.mask)

    @property
    def advantages(self) -> tuple[float, ...]:
        return self.advantages_T or (self.advantage,) * len(self.ids)


TokenValues = tuple[float, ...]
"""[L] one number for each token of a sample"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """A sample of a step, and with a critic the targets of the critic on the same row."""

    sample: TrainSample
    returns: TokenValues = ()
    """[L] the critic's targets; 0 on tokens that were not sampled"""
    values: TokenValues = ()
    """[L] the critic's values at the start of the step"""


def to_samples(
    trajectory: Trajectory, advantage: float | Sequence[float], *, imitation: bool = False,
    context_turns: Collection[int] = (),
) -> list[TrainSample]:  # fmt: skip
    """One sample for each token row. `advantage` is one number for the rollout, or one for each turn ([T]).

    `imitation` also accepts rows that were sampled greedily, or with top-p or top-k, and sets the temperature
    to 1: maximum likelihood needs no behaviour policy. `context_turns` are not trained. Raises ValueError
    with the reason for a rollout that cannot be trained on.
    """
    if not trajectory.own_turns:
        raise ValueError(f"run {trajectory.id!r} has no turns of its own, so nothing was sampled")
    if not trajectory.has_tokens:
        bare = [t.index for t in trajectory.turns if t.completion.tokens is None]
        raise ValueError(
            f"run {trajectory.id!r} is text-only: turns {bare} carry no token ids and log-probs; it can"
            " imitate as text, it cannot train a policy gradient. Log it through a backend that returns both"
        )
    if trajectory.is_redacted:
        raise ValueError(
            f"run {trajectory.id!r} was redacted: some of its ids are placeholders, so nothing after them can"
            " be computed as it was sampled; its text can still imitate"
        )
    own = {turn.index for turn in trajectory.own_turns} - set(context_turns)
    rows: dict[int, list[tuple[Turn, TurnTokens]]] = {}
    newest: dict[int | None, int] = {}
    for turn in trajectory.turns:
        tokens = turn.completion.tokens
        assert tokens is not None  # `has_tokens` was checked above
        if tokens.row < newest.get(turn.delegated_by, 0):
            raise ValueError(f"run {trajectory.id!r}: turn {turn.index} returns to row {tokens.row}")
        newest[turn.delegated_by] = tokens.row
        rows.setdefault(tokens.row, []).append((turn, tokens))
    samples = []
    for turns in rows.values():
        trained = [(turn, tokens) for turn, tokens in turns if turn.index in own]
        if trained:  # a row that a fork inherited has nothing to train
            temperature = 1.0 if imitation else _temperature(trajectory.id, trained)
            samples.append(_merge(trajectory.id, turns, advantage, temperature, own))
    return samples


def recent(sample: TrainSample, version: int, max_staleness: int | None) -> list[TrainSample]:
    """The sample without tokens of policies more than `max_staleness` versions before `version`, which stay
    in its row as context; none if no trained token is left."""
    if max_staleness is None:
        return [sample]
    oldest = version - max_staleness
    mask = tuple(m * (v >= oldest) for m, v in zip(sample.mask, sample.versions, strict=True))
    logprobs = tuple(p * m for p, m in zip(sample.logprobs, mask, strict=True))
    return [replace(sample, mask=mask, logprobs=logprobs)] if any(mask) else []


def _temperature(run_id: str, turns: Sequence[tuple[Turn, TurnTokens]]) -> float:
    samplings = [turn.completion.sampling for turn, _ in turns]
    for sampling in samplings:
        if sampling.temperature == 0:
            raise ValueError(
                f"run {run_id!r} was sampled greedily (temperature 0): its log-probs are no behaviour"
            )
        if sampling.top_p < 1 or sampling.top_k > 0:
            raise ValueError(
                f"run {run_id!r} was sampled with top_p={sampling.top_p}, top_k={sampling.top_k}: its"
                " log-probs cover another support than the trainer's; sample with top_p=1 and top_k=0, or"
                " imitate it"
            )
    temperatures = {s.temperature for s in samplings}
    if len(temperatures) > 1:
        raise ValueError(f"run {run_id!r}: one row was sampled at temperatures {sorted(temperatures)}")
    return temperatures.pop()


def _merge(
    run_id: str, turns: Sequence[tuple[Turn, TurnTokens]], advantage: float | Sequence[float],
    temperature: float, own: Collection[int],
) -> TrainSample:  # fmt: skip
    """The sample of the turns of one row; turns that are not in `own` are context."""
    of_turn = None if isinstance(advantage, float | int) else advantage
    credits, logprobs = list[float](), list[float]()
    ids, mask, versions, turn_ids = list[int](), list[int](), list[int](), list[int]()
    for turn, tokens in turns:
        context, sampled = len(tokens.context_ids), len(tokens.sampled_ids)
        ids += (*tokens.context_ids, *tokens.sampled_ids)
        trained = turn.index in own
        mask += [0] * context + [int(trained)] * sampled
        logprobs += [0.0] * context + (list(tokens.logprobs) if trained else [0.0] * sampled)
        versions += [turn.completion.policy_version] * (context + sampled)
        turn_ids += [turn.index] * (context + sampled)
        if of_turn is not None:
            credits += [of_turn[turn.index]] * (context + sampled)
    whole = advantage if isinstance(advantage, float | int) else math.fsum(advantage) / len(advantage)
    return TrainSample(
        run_id=run_id, ids=tuple(ids), mask=tuple(mask), logprobs=tuple(logprobs), versions=tuple(versions),
        advantage=whole, temperature=temperature,
        advantages_T=tuple(credits) if of_turn is not None else None, turn_ids_T=tuple(turn_ids),
    )  # fmt: skip


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
