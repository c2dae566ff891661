"""Admission: the best use of each logged run (policy gradient, preference, imitation), and the report.

Runs are checked twice. The first check reads the facts of a run from the columns of the log, so that a
hundred thousand runs take seconds. The second loads the run and compares its tokens with the policy's
tokenizer and chat template, and its log-probs with the weights if those sampled it (`RunVerifier`). `train
--from-logs` applies both to every run; `nano-rl admit` applies the second to a sample, or to all.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from itertools import groupby
from random import Random
from typing import Any

from nano_coder.agent.profiles import API_1, serving_profile
from nano_coder.models.opening import OpenedWeights, local_policy
from nano_coder.verify.deep import Scored, TokenCheck, gap_of, rescored
from nano_coder.verify.trainable import RefusalCode, blocking, may_teach
from nano_coder.verify.trainable import hashes as profile_hashes
from nano_rl.learn.loss import MAX_LOG_RATIO
from nano_rl.learn.rows import is_dead
from nano_rl.rewards import outcome
from nano_shared.policy import InterfaceProfile
from nano_shared.run_facts import RunFacts, RunFilter
from nano_shared.store import LogStore
from nano_shared.types import Split, Trajectory, Trust


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedRun:
    """The result of `RunVerifier.verify`."""

    refusal: RefusalCode | None
    tokens: tuple[Scored, ...] = ()
    """its sampled tokens, scored by the policy; empty if they were not scored"""


class RunVerifier:
    """Checks the tokens of runs of one log against one policy: texts, template, and log-probs."""

    def __init__(self, opened: OpenedWeights, store: LogStore) -> None:
        policy = local_policy(opened.loaded, opened.profile, version=opened.version)
        self.template_hash = policy.template_hash
        self._check = TokenCheck(template=policy.template, eos_ids=opened.loaded.eos_ids, blobs=store.blobs)
        self._engine: Any = policy.engine
        self._sampler = (opened.loaded.id, opened.version)

    def refusal(self, run: Trajectory) -> RefusalCode | None:
        """Why a run is refused, or None. Only runs that this policy sampled cost a forward pass."""
        return self.verify(run, score=self._sampled(run)).refusal

    def verify(self, run: Trajectory, *, score: bool) -> VerifiedRun:
        """Why a run is refused, or None; with `score` also its tokens scored by this policy."""
        refusal = self._check.refusal(run)
        if refusal is not None or not score:
            return VerifiedRun(refusal=refusal)
        tokens = tuple(rescored(run, self._engine))
        if self._sampled(run) and not gap_of(tokens).close:
            refusal = RefusalCode.OTHER_LOGPROBS
        return VerifiedRun(refusal=refusal, tokens=tokens)

    def _sampled(self, run: Trajectory) -> bool:
        """True if every turn of the run names these weights as its sampler."""
        turns = ((turn.completion.policy_id, turn.completion.policy_version) for turn in run.turns)
        return all(sampler == self._sampler for sampler in turns)


_UNTRUSTED = (Trust.JUDGE, Trust.NONE)
"""trust of verdicts that say nothing about which run is better"""
RunCheck = Callable[[RunFacts], RefusalCode | None]
"""why a run is refused, or None"""
CheckedRun = tuple[RunFacts, RefusalCode | None]
"""a run, and why it cannot train a policy gradient"""


class Use(StrEnum):
    """The best use of a run."""

    POLICY_GRADIENT = "policy gradient"
    PREFERENCE = "preference"
    """in a pair with a better or worse run of its task"""
    IMITATION = "imitation"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetPolicy:
    """The policy that the runs are to train. Fields that are None are not checked."""

    profile: InterfaceProfile | None = None
    template_hash: str | None = None
    version: int | None = None
    """number of updates that made its weights"""
    max_staleness: int | None = None
    """in updates; None admits runs of any age"""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedRun:
    """A run with its best use, and why it cannot train a policy gradient (None if it can)."""

    run: RunFacts
    use: Use
    refusal: RefusalCode | None


def refusal_of(run: RunFacts, target: TargetPolicy) -> RefusalCode | None:
    """The first reason why a run may not train a policy gradient, regardless of its group; None if it may.

    Damage is checked first.
    """
    found = list(blocking(run))
    damage = next((code for code in found if code.damage), None)
    if damage:
        return damage
    if run.task.is_control:
        return RefusalCode.CONTROL
    if run.task.split == Split.TEST:
        return RefusalCode.TEST_SPLIT
    if RefusalCode.OTHER_PROFILE in found:
        return RefusalCode.OTHER_PROFILE
    profile = target.profile and serving_profile(target.profile, run.task)
    other = profile is not None and profile_hashes(profile)[0] != run.profile_hash
    # what an API's server rendered is known by its template and tokens: no profile is the policy's own
    if other and not (run.profile == API_1.name and run.has_tokens):
        return RefusalCode.ANOTHER_PROFILE
    if RefusalCode.TEXT_ONLY in found:
        return RefusalCode.TEXT_ONLY
    if target.template_hash not in (None, run.template_hash):
        return RefusalCode.ANOTHER_TEMPLATE
    return next(iter(found), None) or _stale(run, target)


def _stale(run: RunFacts, target: TargetPolicy) -> RefusalCode | None:
    if target.version is None or target.max_staleness is None:
        return None
    oldest = min(turn.policy_version for turn in run.turns)
    return RefusalCode.STALE if target.version - oldest > target.max_staleness else None


def _refuse_copies(runs: Sequence[CheckedRun]) -> list[CheckedRun]:
    """Refuse copies of earlier runs, and runs of an earlier content of the task; `runs` of one key, oldest
    first."""
    current = {run.group_key: run.task_id for run, _ in runs}
    seen: set[bytes] = set()
    judged = []
    for run, refusal in runs:
        if refusal is None or not refusal.damage:
            if run.turns and run.draw in seen:
                refusal = RefusalCode.DUPLICATE
            elif refusal is None and run.task_id != current[run.group_key]:
                refusal = RefusalCode.OTHER_TASK
            seen.add(run.draw)
        judged.append((run, refusal))
    return judged


def uncomparable(rewards: Sequence[float]) -> RefusalCode | None:
    """Why a group with these rewards has no signal for a policy gradient, or None if it has."""
    if len(rewards) < 2:
        return RefusalCode.LONE
    return RefusalCode.SAME_REWARD if is_dead(tuple(rewards)) else None


def by_task(
    facts: Iterable[RunFacts], target: TargetPolicy, verify: RunCheck | None = None
) -> Iterator[list[JudgedRun]]:
    """The judged runs of each task. `facts` must be grouped by task, oldest first.

    `verify` is applied to the runs that their columns admit.
    """
    for checked in check_runs(facts, target, verify):
        yield _judged(checked)


def check_runs(
    facts: Iterable[RunFacts], target: TargetPolicy, verify: RunCheck | None = None
) -> Iterator[list[CheckedRun]]:
    """As `by_task`, before the runs of a task are compared with each other."""
    for _, members in groupby(facts, key=lambda run: run.task.key):
        checked = _refuse_copies([(run, refusal_of(run, target)) for run in members])
        if verify is not None:
            checked = [(run, verify(run) if code is None else code) for run, code in checked]
        yield checked


def _judged(runs: Sequence[CheckedRun]) -> list[JudgedRun]:
    """The best use of each run of one task."""
    rewards: dict[str, list[float]] = {}
    for run, code in runs:
        if code is None and run.reward is not None:
            rewards.setdefault(run.group_key, []).append(run.reward)
    alone = {key: uncomparable(of_group) for key, of_group in rewards.items()}
    left = [(run, code or alone.get(run.group_key)) for run, code in runs]
    pairable = _pairable(run for run, code in left if not _worthless(code))
    judged = []
    for run, code in left:
        use = Use.NOTHING
        if code is None:
            use = Use.POLICY_GRADIENT
        elif not _worthless(code):
            if run.id in pairable or run.opinions:
                use = Use.PREFERENCE
            elif outcome(run.verdict) == 1.0:
                use = Use.IMITATION
        judged.append(JudgedRun(run=run, use=use, refusal=code))
    return judged


_WORTHLESS = (
    RefusalCode.UNFINISHED, RefusalCode.OURS, RefusalCode.NO_TURNS, RefusalCode.CONTROL,
    RefusalCode.TEST_SPLIT, RefusalCode.OTHER_PROFILE, RefusalCode.DUPLICATE, RefusalCode.OTHER_TASK,
)  # fmt: skip
"""refusals, besides damage, that exclude a run from every use"""


def _worthless(code: RefusalCode | None) -> bool:
    return code is not None and (code.damage or code in _WORTHLESS)


def may_imitate(run: RunFacts, code: RefusalCode) -> bool:
    """True if a run that may not train a policy gradient can be imitated."""
    if _worthless(code) or code is RefusalCode.ANOTHER_PROFILE:
        return False
    return outcome(run.verdict) == 1.0 and may_teach(run.verdict)


def _pairable(runs: Iterable[RunFacts]) -> set[str]:
    """Ids of runs that form a pair with another run: one passed and one not, under one template and
    profile."""
    sides: dict[tuple[str, str, bool], tuple[list[str], list[str]]] = {}
    for run in runs:
        value = outcome(run.verdict)
        if value is not None and run.verdict is not None and run.verdict.trust not in _UNTRUSTED:
            kind = (run.template_hash, run.profile_hash, run.has_tokens)
            sides.setdefault(kind, ([], []))[value == 1.0].append(run.id)
    return {run for bad, good in sides.values() if bad and good for run in (*bad, *good)}


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
