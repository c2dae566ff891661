"""The report of `nano-rl admit` on a log: runs by use and refusal, effective sample size, as text or JSON."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from random import Random
from typing import Any

from nano_coder.verify.logprobs import Scored
from nano_coder.verify.refusal_codes import RefusalCode
from nano_rl.learn.loss import MAX_LOG_RATIO
from nano_rl.logs.admission import JudgedRun, RunVerifier, TargetPolicy, Use, by_task
from nano_shared.run_facts import RunFacts, RunFilter
from nano_shared.store import LogStore

_SIZES = ((1, "1"), (2, "2"), (4, "3 to 4"), (8, "5 to 8"), (16, "9 to 16"))
_SPREADS = ((0.0, "0"), (0.25, "up to 0.25"), (0.5, "up to 0.5"), (0.75, "up to 0.75"), (1.0, "up to 1"))


@dataclass(slots=True, kw_only=True)
class FreshRollouts:
    """What topping up each group to `group_size` with fresh rollouts would add."""

    group_size: int
    rollouts: int = 0
    groups_topped_up: int = 0
    """groups that are smaller than `group_size`"""
    lone_runs_made_usable: int = 0
    """runs that are alone in their group, and would get a baseline"""
    same_reward_groups: int = 0
    """groups of equal rewards, which fresh runs may make differ"""

    def add(self, runs: Sequence[JudgedRun]) -> None:
        """Add the runs of one task that train, or would if their group were larger."""
        if not 0 < len(runs) < self.group_size:
            return
        self.groups_topped_up += 1
        self.rollouts += self.group_size - len(runs)
        if runs[0].refusal is RefusalCode.LONE:
            self.lone_runs_made_usable += len(runs)
        elif runs[0].refusal is RefusalCode.SAME_REWARD:
            self.same_reward_groups += 1


@dataclass(slots=True, kw_only=True)
class ImportanceWeights:
    """Effective sample size of a sample of runs under the policy."""

    runs: int
    tokens: int
    token_share: float
    """effective sample size of the tokens, as a share of them, in (0, 1] (Kish 1965)"""
    run_share: float
    """the same for whole runs, weighted by the product over their tokens"""


@dataclass(slots=True, kw_only=True)
class VerificationSummary:
    """Results of verifying the tokens of loaded runs."""

    runs: int = 0
    all: bool = False
    """True if all runs that the columns admit were loaded; their damage is then part of the refusals"""
    damage: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True, kw_only=True)
class AdmissionReport:
    uses: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    trust: Counter[str] = field(default_factory=Counter)
    groups: Counter[str] = field(default_factory=Counter)
    """comparable, lone, same reward -> number of groups of runs that may train"""
    sizes: Counter[str] = field(default_factory=Counter)
    spreads: Counter[str] = field(default_factory=Counter)
    """largest minus smallest reward of a group"""
    tasks: int = 0
    tokens: int = 0
    """sampled tokens of the runs that may train a policy gradient"""
    fresh: FreshRollouts | None = None
    verified: VerificationSummary | None = None
    weights: ImportanceWeights | None = None
    notes: list[str] = field(default_factory=list)
    """what could not be checked, and why"""

    @property
    def runs(self) -> int:
        return sum(self.uses.values())

    def add(self, runs: Sequence[JudgedRun]) -> None:
        """Add all runs of one task."""
        self.tasks += 1
        for judged in runs:
            self.uses[judged.use.value] += 1
            verdict = judged.run.verdict
            self.trust[verdict.trust if verdict else "no verdict"] += 1
            if judged.refusal is not None:
                self.refusals[judged.refusal.value] += 1
            if judged.use is Use.POLICY_GRADIENT:
                self.tokens += sum(turn.sampled for turn in judged.run.turns)
        group = [j for j in runs if j.refusal in (None, RefusalCode.LONE, RefusalCode.SAME_REWARD)]
        if group:
            self._add_group(group)
        if self.fresh:
            self.fresh.add(group)

    def _add_group(self, group: Sequence[JudgedRun]) -> None:
        names = {None: "comparable", RefusalCode.LONE: "lone", RefusalCode.SAME_REWARD: "same reward"}
        self.groups[names[group[0].refusal]] += 1
        rewards = [judged.run.reward or 0.0 for judged in group]
        self.sizes[_bucket(len(group), _SIZES, "17 and more")] += 1
        self.spreads[_bucket(max(rewards) - min(rewards), _SPREADS, "above 1")] += 1

    def as_dict(self) -> dict[str, Any]:
        refusals = [
            {"code": code, "runs": count, "meaning": known.meaning, "damage": known.damage}
            for code, count in self.refusals.most_common()
            for known in [RefusalCode(code)]
        ]
        verified = self.verified
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
            "token_checks": verified and {**asdict(verified), "damage": dict(verified.damage.most_common())},
            "fresh": self.fresh and asdict(self.fresh),
            "notes": self.notes,
        }

    def lines(self) -> Iterator[str]:
        """The report as lines of text."""
        yield f"{self.runs} runs of {self.tasks} tasks"
        for use in Use:
            yield f"  {use.value}: {self.uses[use.value]}"
        if self.refusals:
            yield "why not a policy gradient:"
        for code, count in self.refusals.most_common():
            mark = " (damage)" if RefusalCode(code).damage else ""
            yield f"  {count} {code}{mark}: {RefusalCode(code).meaning}"
        yield (
            f"groups: {self.groups['comparable']} comparable, {self.groups['lone']} lone,"
            f" {self.groups['same reward']} with one reward"
        )
        if self.sizes:
            yield f"  by size: {_counts(_ordered(self.sizes, _SIZES, '17 and more'))}"
            yield f"  by reward spread: {_counts(_ordered(self.spreads, _SPREADS, 'above 1'))}"
        yield f"trust of the verdicts: {_counts(dict(self.trust.most_common())) or 'none'}"
        yield f"tokens that may train: {self.tokens}"
        yield from self._policy_lines()
        if self.fresh:
            yield self._fresh_line(self.fresh)
        yield from (f"note: {note}" for note in self.notes)

    def _policy_lines(self) -> Iterator[str]:
        if self.weights:
            yield (
                f"effective sample size: {self.weights.token_share:.1%} of the tokens,"
                f" {self.weights.run_share:.1%} of the runs (from {self.weights.tokens} tokens of"
                f" {self.weights.runs} runs)"
            )
        if self.verified:
            which = "all" if self.verified.all else "a sample"
            found = _counts(dict(self.verified.damage.most_common())) or "nothing wrong"
            yield f"tokens held against texts and weights: {self.verified.runs} runs ({which}): {found}"

    def _fresh_line(self, fresh: FreshRollouts) -> str:
        return (
            f"--fresh {fresh.group_size}: {fresh.rollouts} rollouts would top up {fresh.groups_topped_up}"
            f" groups, make {fresh.lone_runs_made_usable} lone runs usable, and may tell the runs of"
            f" {fresh.same_reward_groups} groups apart"
        )


class Reservoir:
    """A uniform sample of a stream of unknown length (Vitter 1985, algorithm R)."""

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


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name}: {count}" for name, count in counts.items())


def share(log_weights: Sequence[float]) -> float:
    """Effective sample size as a share, in (0, 1]; 0 without weights. Shifted by the largest log-weight
    against overflow."""
    if not log_weights:
        return 0.0
    top = max(log_weights)
    weights = [math.exp(value - top) for value in log_weights]
    return math.fsum(weights) ** 2 / (len(weights) * math.fsum(w * w for w in weights))


@dataclass(slots=True)
class EffectiveSample:
    """Effective sample size of tokens and runs, accumulated run by run."""

    runs: list[float] = field(default_factory=list)
    """log-weight of each run"""
    tokens: int = 0
    _sum: float = 0.0
    _squares: float = 0.0

    def add(self, tokens: Iterable[Scored]) -> None:
        logs = [min(MAX_LOG_RATIO, max(-MAX_LOG_RATIO, t.recomputed - t.recorded)) for t in tokens]
        self.tokens += len(logs)
        self._sum += math.fsum(map(math.exp, logs))
        self._squares += math.fsum(math.exp(2 * value) for value in logs)
        self.runs.append(math.fsum(logs))

    @property
    def token_share(self) -> float:
        return self._sum**2 / (self.tokens * self._squares) if self.tokens else 0.0

    @property
    def run_share(self) -> float:
        return share(self.runs)


SAMPLE = 64
"""number of runs that are loaded and verified; all of them in a log with no more"""
SCORED = 16_384
"""number of tokens that are scored by the policy, at least one run"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogAdmission:
    """Which runs of a log are judged, for which policy, and how thoroughly."""

    store: LogStore
    chosen: RunFilter
    target: TargetPolicy
    verifier: RunVerifier | None = None
    """None checks the columns alone"""
    fresh: int | None = None
    exact: bool = False
    """load and score every run that the columns admit"""
    seed: int = 0
    on_task: Callable[[AdmissionReport], None] | None = None

    def report(self) -> AdmissionReport:
        report = AdmissionReport(fresh=FreshRollouts(group_size=self.fresh) if self.fresh else None)
        if self.verifier is None:
            for _ in self._judged(report, None):
                pass
            return report

        report.verified, sample = VerificationSummary(), EffectiveSample()
        if self.exact or len(self.store.runs(limit=SAMPLE + 1)) <= SAMPLE:
            report.verified.all = True
            budgeted = _BudgetedVerifier(
                self, self.verifier, report.verified, sample, budget=None if self.exact else SCORED
            )
            for _ in self._judged(report, budgeted):
                pass
        else:
            reservoir = Reservoir(SAMPLE, self.seed)
            for judged in self._judged(report, None):
                if judged.use is Use.POLICY_GRADIENT:
                    reservoir.offer(judged.run.id)
            budgeted = _BudgetedVerifier(self, self.verifier, report.verified, sample, budget=SCORED)
            for run in sorted(reservoir.kept):
                budgeted.verify(run)
        if sample.tokens:
            report.weights = ImportanceWeights(
                runs=len(sample.runs), tokens=sample.tokens, token_share=sample.token_share,
                run_share=sample.run_share,
            )  # fmt: skip
        return report

    def _judged(
        self, report: AdmissionReport, verify: Callable[[RunFacts], RefusalCode | None] | None
    ) -> Iterator[JudgedRun]:
        for runs in by_task(self.store.facts(self.chosen), self.target, verify):
            report.add(runs)
            if self.on_task:
                self.on_task(report)
            yield from runs


class _BudgetedVerifier:
    """Verifies runs, and scores them until its budget of tokens is used up."""

    def __init__(
        self,
        admission: LogAdmission,
        verifier: RunVerifier,
        summary: VerificationSummary,
        sample: EffectiveSample,
        *,
        budget: int | None,
    ) -> None:
        self._store, self._verifier, self._summary, self._sample = admission.store, verifier, summary, sample
        self._left = budget

    def __call__(self, run: RunFacts) -> RefusalCode | None:
        return self.verify(run.id)

    def verify(self, run_id: str) -> RefusalCode | None:
        run = self._store.get(run_id)
        seen = self._verifier.verify(run, score=self._left is None or self._left > 0)
        self._summary.runs += 1
        if seen.refusal is not None:
            self._summary.damage[seen.refusal.value] += 1
        elif seen.tokens:
            self._sample.add(seen.tokens)
        if self._left is not None and seen.tokens:
            read = (t.completion.tokens for t in run.turns)
            self._left -= sum(len(t.context_ids) + len(t.sampled_ids) for t in read if t)
        return seen.refusal
