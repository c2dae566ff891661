"""A group: the rollouts of one task, whose rewards share a baseline; and the rows of tokens of a rollout."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev

from nano_shared.types import (
    Limits,
    Task,
    Trajectory,
    Turn,
    TurnTokens,
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
