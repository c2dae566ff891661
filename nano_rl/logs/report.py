"""What a log can teach, in numbers: gathered run by run in constant memory, printed as lines or as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from nano_coder.verify.refusal import Refusal
from nano_rl.logs.admission import Judged, Use

_SIZES = ((1, "1"), (2, "2"), (4, "3 to 4"), (8, "5 to 8"), (16, "9 to 16"))
_SPREADS = ((0.0, "0"), (0.25, "up to 0.25"), (0.5, "up to 0.5"), (0.75, "up to 0.75"), (1.0, "up to 1"))


@dataclass(slots=True, kw_only=True)
class Fresh:
    """What fresh rollouts would add, if each group were topped up to `size`."""

    size: int
    rollouts: int = 0
    groups: int = 0
    """that are smaller than `size`"""
    lone_runs: int = 0
    """refused as lone in their group, which would be compared"""
    same_groups: int = 0
    """whose runs all earned the same, which fresh ones may tell apart"""

    def add(self, runs: Sequence[Judged]) -> None:
        """The runs of one task that only their group keeps from training, or that do train."""
        if not 0 < len(runs) < self.size:
            return
        self.groups += 1
        self.rollouts += self.size - len(runs)
        if runs[0].refusal is Refusal.LONE:
            self.lone_runs += len(runs)
        elif runs[0].refusal is Refusal.SAME_REWARD:
            self.same_groups += 1


@dataclass(slots=True, kw_only=True)
class Weights:
    """What the importance weights of a sample of runs leave, under the policy at hand."""

    runs: int
    tokens: int
    token_share: float
    """effective sample size of the tokens, as a share of them, in (0, 1] (Kish 1965)"""
    run_share: float
    """the same of whole runs, whose weight is the product over their tokens"""


@dataclass(slots=True, kw_only=True)
class SecondLooks:
    """What the policy's tokenizer and weights found in the runs that were loaded."""

    runs: int = 0
    every: bool = False
    """all that the columns admit were loaded, and what was found in them is in the refusals"""
    damage: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True, kw_only=True)
class AdmissionReport:
    uses: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    trust: Counter[str] = field(default_factory=Counter)
    groups: Counter[str] = field(default_factory=Counter)
    """comparable, lone, same: what keeps the groups of runs that may train from doing so"""
    sizes: Counter[str] = field(default_factory=Counter)
    spreads: Counter[str] = field(default_factory=Counter)
    """largest less smallest reward of a group"""
    tasks: int = 0
    tokens: int = 0
    """sampled tokens of the runs that may train a policy gradient"""
    fresh: Fresh | None = None
    looks: SecondLooks | None = None
    weights: Weights | None = None
    notes: list[str] = field(default_factory=list)
    """what could not be told, and why"""

    @property
    def runs(self) -> int:
        return sum(self.uses.values())

    def add(self, runs: Sequence[Judged]) -> None:
        """All runs of one task."""
        self.tasks += 1
        for judged in runs:
            self.uses[judged.use.value] += 1
            verdict = judged.run.verdict
            self.trust[verdict.trust if verdict else "no verdict"] += 1
            if judged.refusal is not None:
                self.refusals[judged.refusal.value] += 1
            if judged.use is Use.POLICY_GRADIENT:
                self.tokens += sum(turn.sampled for turn in judged.run.turns)
        group = [j for j in runs if j.refusal in (None, Refusal.LONE, Refusal.SAME_REWARD)]
        if group:
            self._add_group(group)
        if self.fresh:
            self.fresh.add(group)

    def _add_group(self, group: Sequence[Judged]) -> None:
        names = {None: "comparable", Refusal.LONE: "lone", Refusal.SAME_REWARD: "same reward"}
        self.groups[names[group[0].refusal]] += 1
        rewards = [judged.run.reward or 0.0 for judged in group]
        self.sizes[_bucket(len(group), _SIZES, "17 and more")] += 1
        self.spreads[_bucket(max(rewards) - min(rewards), _SPREADS, "above 1")] += 1

    def as_dict(self) -> dict[str, Any]:
        refusals = [
            {"code": code, "runs": count, "meaning": Refusal(code).meaning, "damage": Refusal(code).damage}
            for code, count in self.refusals.most_common()
        ]
        looks = self.looks
        return {
            "runs": self.runs,
            "tasks": self.tasks,
            "uses": {use.value: self.uses[use.value] for use in Use},
            "refusals": refusals,
            "groups": {
                **{name: self.groups[name] for name in ("comparable", "lone", "same reward")},
                "by_size": _ordered(self.sizes, _SIZES, "17 and more"),
                "by_reward_spread": _ordered(self.spreads, _SPREADS, "above 1"),
            },
            "trust": dict(self.trust.most_common()),
            "tokens": self.tokens,
            "effective_sample_size": None
            if self.weights is None
            else {
                "of_tokens": self.weights.token_share,
                "of_runs": self.weights.run_share,
                "effective_tokens": self.weights.token_share * self.tokens,
                "sampled_runs": self.weights.runs,
                "sampled_tokens": self.weights.tokens,
            },
            "token_checks": None
            if looks is None
            else {"runs": looks.runs, "all": looks.every, "damage": dict(looks.damage.most_common())},
            "fresh": None
            if self.fresh is None
            else {
                "group_size": self.fresh.size,
                "rollouts": self.fresh.rollouts,
                "groups_topped_up": self.fresh.groups,
                "lone_runs_made_usable": self.fresh.lone_runs,
                "same_reward_groups": self.fresh.same_groups,
            },
            "notes": self.notes,
        }

    def lines(self) -> Iterator[str]:
        """For a person."""
        yield f"{self.runs} runs of {self.tasks} tasks"
        for use in Use:
            yield f"  {use.value}: {self.uses[use.value]}"
        if self.refusals:
            yield "why not a policy gradient:"
        for code, count in self.refusals.most_common():
            mark = " (damage)" if Refusal(code).damage else ""
            yield f"  {count} {code}{mark}: {Refusal(code).meaning}"
        yield (
            f"groups: {self.groups['comparable']} comparable, {self.groups['lone']} lone,"
            f" {self.groups['same reward']} with one reward"
        )
        if self.sizes:
            yield f"  by size: {_told(_ordered(self.sizes, _SIZES, '17 and more'))}"
            yield f"  by reward spread: {_told(_ordered(self.spreads, _SPREADS, 'above 1'))}"
        yield f"trust of the verdicts: {_told(dict(self.trust.most_common())) or 'none'}"
        yield f"tokens that may train: {self.tokens}"
        yield from self._told_of_policy()
        if self.fresh:
            yield self._told_of_fresh(self.fresh)
        yield from (f"note: {note}" for note in self.notes)

    def _told_of_policy(self) -> Iterator[str]:
        if self.weights:
            yield (
                f"effective sample size: {self.weights.token_share:.1%} of the tokens,"
                f" {self.weights.run_share:.1%} of the runs (from {self.weights.tokens} tokens of"
                f" {self.weights.runs} runs)"
            )
        if self.looks:
            which = "all" if self.looks.every else "a sample"
            found = _told(dict(self.looks.damage.most_common())) or "nothing wrong"
            yield f"tokens held against texts and weights: {self.looks.runs} runs ({which}): {found}"

    def _told_of_fresh(self, fresh: Fresh) -> str:
        return (
            f"--fresh {fresh.size}: {fresh.rollouts} rollouts would top up {fresh.groups} groups, make"
            f" {fresh.lone_runs} lone runs usable, and may tell the runs of {fresh.same_groups} groups apart"
        )


class Reservoir:
    """A uniform sample of a stream whose length nobody knows (Vitter 1985, algorithm R)."""

    def __init__(self, size: int, seed: int) -> None:
        self.kept: list[str] = []
        self._size, self._random, self._seen = size, Random(f"admit {seed}"), 0

    def offer(self, run: str) -> None:
        self._seen += 1
        if len(self.kept) < self._size:
            self.kept.append(run)
        elif (place := self._random.randrange(self._seen)) < self._size:
            self.kept[place] = run


def _bucket(value: float, bounds: Sequence[tuple[float, str]], above: str) -> str:
    return next((name for bound, name in bounds if value <= bound), above)


def _ordered(counts: Counter[str], bounds: Sequence[tuple[float, str]], above: str) -> dict[str, int]:
    names = (*(name for _, name in bounds), above)
    return {name: counts[name] for name in names if counts[name]}


def _told(counts: dict[str, int]) -> str:
    return ", ".join(f"{name}: {count}" for name, count in counts.items())
