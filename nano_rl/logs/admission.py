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
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import groupby
from random import Random
from typing import TYPE_CHECKING, Any

from nano_coder.agent.profiles import API_1, serving_profile
from nano_coder.models.opening import OpenedWeights, local_policy
from nano_coder.verify.trainable import RefusalCode, blocking, imitation_refusal, interface_refusal
from nano_coder.verify.trainable import hashes as profile_hashes
from nano_rl.learn.groups import is_dead
from nano_shared.policy import InterfaceProfile
from nano_shared.run_facts import RunFacts, RunFilter
from nano_shared.store import LogStore
from nano_shared.types import Split, Trajectory, Trust, outcome

if TYPE_CHECKING:
    from nano_coder.verify.tokens import Scored


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedRun:
    refusal: RefusalCode | None
    tokens: tuple[Scored, ...] = ()
    """its sampled tokens, scored by the policy; empty if they were not scored"""


class RunVerifier:
    """Checks the tokens of runs of one log against one policy: texts, template, and log-probs."""

    def __init__(self, opened: OpenedWeights, store: LogStore) -> None:
        from nano_coder.verify.tokens import TokenCheck

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
        from nano_coder.verify.tokens import gap_of, rescored

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
    What bars every use is checked first."""
    found = list(blocking(run))
    bar = next((code for code in found if code.bars), None)
    if bar:
        return bar
    if run.task.is_control:
        return RefusalCode.CONTROL
    if run.task.split == Split.TEST:
        return RefusalCode.TEST_SPLIT
    if RefusalCode.OTHER_PROFILE in found:
        return RefusalCode.OTHER_PROFILE
    profile = target.profile and serving_profile(target.profile, run.task)
    other = profile is not None and profile_hashes(profile)[0] != run.profile_hash
    # what an API's server rendered is known by its template and tokens: no profile is the policy's own
    if profile is not None and other and not (run.profile == API_1.name and run.has_tokens):
        if (unlike := interface_refusal(run, profile)) is not None:
            return RefusalCode(unlike.kind)
        return RefusalCode.ANOTHER_PROFILE if run.has_tokens else RefusalCode.TEXT_ONLY
    if RefusalCode.TEXT_ONLY in found:
        return RefusalCode.TEXT_ONLY
    if target.template_hash not in (None, run.template_hash):
        return RefusalCode.ANOTHER_TEMPLATE
    if found or target.version is None or target.max_staleness is None:
        return next(iter(found), None)
    oldest = min(turn.policy_version for turn in run.turns)
    return RefusalCode.STALE if target.version - oldest > target.max_staleness else None


def _refuse_copies(runs: Sequence[CheckedRun]) -> list[CheckedRun]:
    """Refuse copies of earlier runs, and runs of an earlier content of the task; `runs` of one key, oldest
    first."""
    current = {run.group_key: run.task_id for run, _ in runs}
    seen: set[bytes] = set()
    judged = []
    for run, refusal in runs:
        if refusal is None or not refusal.bars:
            draw = run.draw
            if run.turns and draw in seen:
                refusal = RefusalCode.DUPLICATE
            elif refusal is None and run.task_id != current[run.group_key]:
                refusal = RefusalCode.OTHER_TASK
            seen.add(draw)
        judged.append((run, refusal))
    return judged


def by_task(
    facts: Iterable[RunFacts], target: TargetPolicy, verify: RunCheck | None = None
) -> Iterator[list[JudgedRun]]:
    """The judged runs of each task. `facts` must be grouped by task, oldest first. `verify` is applied to the
    runs that their columns admit."""
    return (_judged(checked, target.profile) for checked in check_runs(facts, target, verify))


def check_runs(
    facts: Iterable[RunFacts], target: TargetPolicy, verify: RunCheck | None = None
) -> Iterator[list[CheckedRun]]:
    """As `by_task`, before the runs of a task are compared with each other."""
    for _, members in groupby(facts, key=lambda run: run.task.key):
        checked = _refuse_copies([(run, refusal_of(run, target)) for run in members])
        if verify is not None:
            checked = [(run, verify(run) if code is None else code) for run, code in checked]
        yield checked


def _judged(runs: Sequence[CheckedRun], profile: InterfaceProfile | None) -> list[JudgedRun]:
    rewards: dict[str, list[float]] = {}
    for run, code in runs:
        if code is None and run.reward is not None:
            rewards.setdefault(run.group_key, []).append(run.reward)
    alone: dict[str, RefusalCode | None] = {
        key: RefusalCode.LONE if len(of_group) < 2 else RefusalCode.SAME_REWARD if is_dead(of_group) else None
        for key, of_group in rewards.items()
    }
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
            elif imitation_refusal(run, profile) is None:
                use = Use.IMITATION
        judged.append(JudgedRun(run=run, use=use, refusal=code))
    return judged


_WORTHLESS = (
    RefusalCode.UNFINISHED, RefusalCode.OURS, RefusalCode.NO_TURNS, RefusalCode.CONTROL,
    RefusalCode.TEST_SPLIT, RefusalCode.OTHER_PROFILE, RefusalCode.DUPLICATE, RefusalCode.OTHER_TASK,
)  # fmt: skip
"""refusals, besides those that bar every use, that exclude a run from all of them"""


def _worthless(code: RefusalCode | None) -> bool:
    return code is not None and (code.bars or code in _WORTHLESS)


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


@dataclass(slots=True, kw_only=True)
class ImportanceWeights:
    """Importance weights of runs under the policy, and the effective sample size by them (Kish 1965)."""

    runs: list[float] = field(default_factory=list)
    """log-weight of each run: the sum over its tokens"""
    tokens: int = 0
    _sum: float = 0.0
    _squares: float = 0.0

    def add(self, tokens: Iterable[Scored]) -> None:
        from nano_rl.learn.loss import MAX_LOG_RATIO  # with torch, which whoever rescored has loaded

        logs = [min(MAX_LOG_RATIO, max(-MAX_LOG_RATIO, t.recomputed - t.recorded)) for t in tokens]
        self.tokens += len(logs)
        self._sum += math.fsum(map(math.exp, logs))
        self._squares += math.fsum(math.exp(2 * value) for value in logs)
        self.runs.append(math.fsum(logs))

    @property
    def token_share(self) -> float:
        """Effective sample size of the tokens, as a share of them, in (0, 1]."""
        return self._sum**2 / (self.tokens * self._squares) if self.tokens else 0.0

    @property
    def run_share(self) -> float:
        """The same for whole runs. Shifted by the largest log-weight against overflow."""
        top = max(self.runs, default=0.0)
        weights = [math.exp(value - top) for value in self.runs]
        squares = math.fsum(weight * weight for weight in weights)
        return math.fsum(weights) ** 2 / (len(weights) * squares) if weights else 0.0


@dataclass(slots=True, kw_only=True)
class AdmissionReport:
    uses: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    trust: Counter[str] = field(default_factory=Counter)
    groups: Counter[str] = field(default_factory=Counter)
    """comparable, lone, same reward -> number of groups of runs that may train"""
    tasks: int = 0
    tokens: int = 0
    """sampled tokens of the runs that may train a policy gradient"""
    loaded: int | None = None
    """runs whose tokens were verified; None: none could be"""
    damage: Counter[str] = field(default_factory=Counter)
    """what was wrong with those"""
    weights: ImportanceWeights = field(default_factory=ImportanceWeights)
    notes: list[str] = field(default_factory=list)
    """what could not be checked, and why"""

    @property
    def runs(self) -> int:
        return sum(self.uses.values())

    def add(self, runs: Sequence[JudgedRun]) -> None:
        self.tasks += 1
        for judged in runs:
            self.uses[judged.use.value] += 1
            verdict = judged.run.verdict
            self.trust[verdict.trust if verdict else "no verdict"] += 1
            if judged.refusal is not None:
                self.refusals[judged.refusal.value] += 1
            if judged.use is Use.POLICY_GRADIENT:
                self.tokens += sum(turn.sampled for turn in judged.run.turns)
        names = {None: "comparable", RefusalCode.LONE: "lone", RefusalCode.SAME_REWARD: "same reward"}
        if group := next((judged for judged in runs if judged.refusal in names), None):
            self.groups[names[group.refusal]] += 1

    def as_dict(self) -> dict[str, Any]:
        refusals = [
            {"code": code, "runs": count, "meaning": known.meaning, "damage": known.damage}
            for code, count in self.refusals.most_common()
            for known in [RefusalCode(code)]
        ]
        weights = self.weights
        return {
            "runs": self.runs,
            "tasks": self.tasks,
            "uses": {use.value: self.uses[use.value] for use in Use},
            "refusals": refusals,
            "groups": {name: self.groups[name] for name in ("comparable", "lone", "same reward")},
            "trust": dict(self.trust.most_common()),
            "tokens": self.tokens,
            "effective_sample_size": {
                "of_tokens": weights.token_share,
                "of_runs": weights.run_share,
                "effective_tokens": weights.token_share * self.tokens,
                "sampled_runs": len(weights.runs),
                "sampled_tokens": weights.tokens,
            }
            if weights.tokens
            else None,
            "token_checks": None
            if self.loaded is None
            else {"runs": self.loaded, "damage": dict(self.damage.most_common())},
            "notes": self.notes,
        }

    def lines(self) -> Iterator[str]:
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
        yield f"trust of the verdicts: {_counts(self.trust) or 'none'}"
        yield f"tokens that may train: {self.tokens}"
        if self.weights.tokens:
            yield (
                f"effective sample size: {self.weights.token_share:.1%} of the tokens,"
                f" {self.weights.run_share:.1%} of the runs (from {self.weights.tokens} tokens of"
                f" {len(self.weights.runs)} runs)"
            )
        if self.loaded is not None:
            found = _counts(self.damage) or "nothing wrong"
            yield f"tokens held against texts and weights: {self.loaded} runs: {found}"
        yield from (f"note: {note}" for note in self.notes)


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{name}: {count}" for name, count in counts.most_common())


SAMPLE = 64
"""number of runs that are loaded and verified; all of them in a log with no more"""
SCORED = 16_384
"""number of tokens that are scored by the policy, at least one run"""


def survey(
    store: LogStore, chosen: RunFilter, target: TargetPolicy, verifier: RunVerifier | None = None, *,
    exact: bool = False, seed: int = 0,
) -> AdmissionReport:  # fmt: skip
    """What the chosen runs of a log can teach the target. `verifier` None checks the columns alone; `exact`
    loads and scores every run that the columns admit, else a sample drawn by `seed`."""
    report = AdmissionReport(loaded=None if verifier is None else 0)
    left = math.inf if exact else SCORED

    def verify(run_id: str) -> RefusalCode | None:
        nonlocal left
        assert verifier is not None
        run = store.get(run_id)
        seen = verifier.verify(run, score=left > 0)
        report.loaded = (report.loaded or 0) + 1
        if seen.refusal is not None:
            report.damage[seen.refusal.value] += 1
        elif seen.tokens:
            report.weights.add(seen.tokens)
            read = (turn.completion.tokens for turn in run.turns)
            left -= sum(len(tokens.context_ids) + len(tokens.sampled_ids) for tokens in read if tokens)
        return seen.refusal

    every = verifier is not None and (exact or len(store.runs(limit=SAMPLE + 1)) <= SAMPLE)
    trains: list[str] = []
    for runs in by_task(store.facts(chosen), target, (lambda run: verify(run.id)) if every else None):
        report.add(runs)
        trains += [judged.run.id for judged in runs if judged.use is Use.POLICY_GRADIENT]
    if verifier is not None and not every:
        for run_id in sorted(Random(f"admit {seed}").sample(trains, min(SAMPLE, len(trains)))):
            verify(run_id)
    return report
