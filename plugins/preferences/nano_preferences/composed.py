"""The composed reward: parts score the rollouts of a task, the gate combines them, the verdict is logged."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from nano_coder.grading.grade import grade_trajectory
from nano_coder.run.execution import Runtime
from nano_rl.rewards.reward import IMPOSSIBLE, SILENT, TESTS, Part, Score
from nano_shared.errors import UsageError
from nano_shared.extension_points import call_extension, read_number
from nano_shared.files import content_hash
from nano_shared.types import Tampering, Task, Trajectory, Trust, Verdict, composed_grader, outcome

MIDDLE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """Combines the scores of the parts: tests first, the other parts (shaping) only where tests pass."""

    weights: Mapping[str, float]
    threshold: float = 1.0
    """smallest outcome of the tests at which shaping counts"""
    tie_break: float = 0.0
    """below the threshold: share of the smallest difference of outcomes that all shaping together may add"""

    @classmethod
    def of(cls, weights: Mapping[str, float], *, threshold: float = 1.0, tie_break: float = 0.0) -> Gate:
        """Scale the weights to a sum of 1. Raises ValueError unless their sum is positive and finite."""
        total = math.fsum(weights.values())
        if not (math.isfinite(total) and total > 0) or any(w < 0 for w in weights.values()):
            raise ValueError(f"weights must be at least 0 with a positive, finite sum, not {dict(weights)}")
        scaled = {name: weight / total for name, weight in weights.items()}
        return cls(weights=scaled, threshold=threshold, tie_break=tie_break)

    def is_open(self, outcome: float | None) -> bool:
        """True if shaping counts fully; always for a reward without tests."""
        return TESTS not in self.weights or (outcome is not None and outcome >= self.threshold)

    def counted(
        self, outcome: float | None, scores: Mapping[str, float | None], step: float = 1.0
    ) -> dict[str, float | None]:
        """Part -> the value that counts, between 0 and 1; None for a part without a score. `step` is the
        smallest difference between two compared outcomes, which bounds tie-breaks."""
        is_open = self.is_open(outcome)
        scale = 1.0 if is_open else self._tie_scale(step)
        values: dict[str, float | None] = {}
        for name in self.weights:
            score = outcome if name == TESTS else scores.get(name)
            if name == TESTS or (score is None and is_open):
                values[name] = score
            else:
                values[name] = scale * _or_middle(score)
        return values

    def total(self, counted: Mapping[str, float | None]) -> float:
        return math.fsum(w * _or_middle(counted[name]) for name, w in self.weights.items())

    def _tie_scale(self, step: float) -> float:
        tests = self.weights.get(TESTS, 0.0)
        shaping = math.fsum(w for name, w in self.weights.items() if name != TESTS)
        return min(1.0, self.tie_break * step * tests / shaping) if shaping > 0 else 0.0


def smallest_step(outcomes: Iterable[float | None]) -> float:
    """The smallest difference between two distinct outcomes, including 0 (fail) and 1 (pass)."""
    values = sorted({0.0, 1.0, *(o for o in outcomes if o is not None)})
    return min(b - a for a, b in pairwise(values))


def _or_middle(value: float | None) -> float:
    return MIDDLE if value is None else value


@dataclass(frozen=True, slots=True, kw_only=True)
class ComposedReward:
    parts: Mapping[str, Part]
    gate: Gate
    recipe: str
    """the weights as text and a hash of all settings; part of the grader of every composed verdict"""

    def apply(self, runs: Sequence[Trajectory], runtime: Runtime) -> list[Trajectory]:
        """The runs with composed verdicts, which are logged in addition to those of the grader. A run whose
        newest verdict is from this reward keeps it; a run without a verdict gets none, unless this reward
        works without tests."""
        by_task: dict[str, list[int]] = {}
        for index, run in enumerate(runs):
            by_task.setdefault(run.task.listed.id, []).append(index)
        done = list(runs)
        for members in by_task.values():
            verdicts = self.verdicts([runs[i] for i in members], runtime)
            for index, verdict in zip(members, verdicts, strict=True):
                if verdict is not None and verdict is not runs[index].verdict:
                    runtime.store.add_verdict(runs[index].id, verdict)
                    done[index] = runs[index].model_copy(update={"verdict": verdict})
        return done

    def verdicts(self, runs: Sequence[Trajectory], runtime: Runtime) -> list[Verdict | None]:
        """[G] composed verdicts of one task's rollouts. Raises UsageError for a score outside 0 to 1."""
        if all(run.verdict is not None and self._is_complete(run.verdict) for run in runs):
            return [run.verdict for run in runs]
        outcomes = [self._outcome(run) for run in runs]
        scores = {name: self._score(name, runs, outcomes, runtime) for name in self.parts if name != TESTS}
        step = smallest_step(outcomes)
        return [
            self._verdict(run, outcomes[i], {name: of[i] for name, of in scores.items()}, step)
            for i, run in enumerate(runs)
        ]

    def objectives(self, runs: Sequence[Trajectory]) -> list[tuple[float, list[float | None]]]:
        """(weight, [G] values that count) of each part, for parts that are normalised separately; without
        tie-breaks, which would be as large as the outcome."""
        strict = Gate(weights=self.gate.weights, threshold=self.gate.threshold)
        counted = [
            strict.counted(run.verdict.components.get(TESTS), run.verdict.components)
            if run.verdict is not None and run.verdict.reward is not None
            else {}
            for run in runs
        ]
        return [(weight, [of.get(name) for of in counted]) for name, weight in self.gate.weights.items()]

    def _is_complete(self, verdict: Verdict) -> bool:
        """Whether the verdict is this reward's; one that lacks a judge's score is computed again."""
        judged = verdict.reward is not None or outcome(verdict) is None
        return judged and verdict.grader == composed_grader(verdict.grader, self.recipe)

    def _outcome(self, run: Trajectory) -> float | None:
        tests = self.parts.get(TESTS)
        read = tests.outcome if isinstance(tests, Tests) else outcome
        value = None if _ours(run) else read(run.verdict)
        if value is not None and not 0 <= value <= 1:
            wrong = f"run {run.id} has the outcome {value:g}, which is not between 0 and 1"
            raise UsageError(f"{wrong}; grade it again")
        return value

    def _score(
        self, name: str, runs: Sequence[Trajectory], outcomes: Sequence[float | None], runtime: Runtime
    ) -> list[Score]:
        """[G] the scores of a part; runs whose reward it cannot change are not scored."""
        part = self.parts[name]
        scored = [
            i
            for i, (run, o) in enumerate(zip(runs, outcomes, strict=True))
            if not _ours(run) and (o is not None or TESTS not in self.parts)
            if not part.costly or self.gate.is_open(o) or self.gate.tie_break > 0
        ]
        given: Any = []
        if some := [runs[i] for i in scored]:
            named: Any = {"name": f"reward part {name}", "of": part, "error": UsageError}
            given = call_extension(part.score, some, runtime, **named)
        if not isinstance(given, Sequence) or len(given) != len(some):
            raise UsageError(
                f"reward part {name} must give a list with one score for each of {len(some)} runs"
            )
        scores = dict(zip(scored, given, strict=True))
        return [checked(name, run, scores.get(i, SILENT)) for i, run in enumerate(runs)]

    def probe(self, tasks: Sequence[Task]) -> ComposedReward:
        """Itself, once its parts were checked against the tasks. Raises UsageError or ConfigError."""
        for part in self.parts.values():
            part.check_tasks(tasks)
        return self

    def _verdict(
        self, run: Trajectory, result: float | None, scores: Mapping[str, Score], step: float
    ) -> Verdict | None:
        base = run.verdict
        if base is None and (TESTS in self.parts or _ours(run)):
            return None
        counted = self.gate.counted(result, {n: s.value for n, s in scores.items()}, step)
        tampering = base.tampering if base else ()
        if run.task.is_control and result == 1.0 and not tampering:
            tampering = (Tampering(kind=IMPOSSIBLE, detail=f"control task {run.task.key!r} was passed"),)
        failure = base.failure_kind if base else None
        reward: float | None
        missing = self._missing(result, scores)
        if _ours(run) or (result is None and TESTS in self.parts):
            reward = None
        elif tampering:
            reward = 0.0
        elif missing:
            reward, failure = None, missing
        else:
            reward = self.gate.total(counted)
        graded = TESTS in self.parts or base is not None
        components: dict[str, float | None] = {TESTS: 0.0 if tampering else result} if graded else {}
        for name, score in scores.items():
            components |= {name: score.value, **{f"{name}.{key}": one for key, one in score.details.items()}}
        return Verdict(
            reward=reward, components=components, tampering=tampering, failure_kind=failure,
            turn_rewards=self._turn_rewards(run, reward, counted, scores),
            checks=base.checks if base else {},
            trust=base.trust if base is not None and TESTS in self.parts else Trust.JUDGE,
            grader=composed_grader(base.grader if base else "no grader", self.recipe),
            graded_hash=base.graded_hash if base else content_hash([run.diff, run.answer]),
            check_run=base.check_run if base else None,
        )  # fmt: skip

    def _missing(self, result: float | None, scores: Mapping[str, Score]) -> str | None:
        """The failure kind if a part that counts has failed, or no part gave a score; else None."""
        if not self.gate.is_open(result) and self.gate.tie_break == 0:
            return None
        weighed = {n: s for n, s in scores.items() if self.gate.weights[n] > 0}
        if failed := [s.failure for s in weighed.values() if s.value is None and s.failure]:
            return failed[0]
        if TESTS not in self.parts and all(s.value is None for s in weighed.values()):
            return "nothing_judged"
        return None

    def _turn_rewards(
        self, run: Trajectory, reward: float | None, counted: Mapping[str, float | None],
        scores: Mapping[str, Score],
    ) -> tuple[float, ...] | None:  # fmt: skip
        """[T] the reward of each turn, with their sum equal to the reward; the rest is in the last turn."""
        parts = {n: s for n, s in scores.items() if s.turns and s.value}
        if reward is None or not run.turns or not any(s.turns for s in scores.values()):
            return None
        earned = [0.0] * len(run.turns)
        if reward > 0:
            for name, score in parts.items():
                scale = self.gate.weights[name] * (counted[name] or 0.0) / (score.value or 1.0)
                for turn, share in enumerate(score.turns or ()):
                    earned[turn] += scale * share
        earned[-1] += reward - math.fsum(earned)
        return tuple(earned)


def _ours(run: Trajectory) -> bool:
    return run.stop is None or run.stop.ours


def checked(name: str, run: Trajectory, given: object) -> Score:
    """The score that a part gave; a number alone is one. Raises UsageError for what is none, values outside 0
    to 1, and inconsistent turn shares."""
    score = given if isinstance(given, Score) else Score(value=given)  # type: ignore[arg-type]
    value = _between(name, run, score.value)
    details = {key: _between(f"{name}.{key}", run, one) for key, one in score.details.items()}
    turns = None if score.turns is None else tuple(map(read_number, score.turns))
    score = replace(score, value=value, details=details, turns=turns)  # type: ignore[arg-type]
    if score.turns is not None:
        if len(score.turns) != len(run.turns) or not all(
            n is not None and math.isfinite(n) for n in score.turns
        ):
            raise UsageError(
                f"reward part {name} gave {len(score.turns)} turn rewards to run {run.id}, which has"
                f" {len(run.turns)} turns; it must give one finite number a turn"
            )
        if score.value is None or not math.isclose(math.fsum(score.turns), score.value, abs_tol=1e-9):
            raise UsageError(
                f"reward part {name}: the turn rewards of run {run.id} do not add up to its score"
            )
    return score


def _between(name: str, run: Trajectory, value: object) -> float | None:
    given = read_number(value)
    if value is not None and not (given is not None and 0 <= given <= 1):
        gave = f"gave {value if given is None else given!r:.80} to run {run.id}"
        raise UsageError(f"reward part {name} {gave}; a score lies between 0 and 1")
    return given


class VisibleTests(Part):
    costly = True

    def score_run(self, run: Trajectory, runtime: Runtime) -> Score:
        """1 if the task's own check passes in a fresh jail, else 0; no score if the task has none."""
        if run.task.check is None:
            return SILENT
        visible = run.model_copy(update={"task": run.task.model_copy(update={"hidden": None})})
        verdict = grade_trajectory(visible, runtime.sandbox, runtime.store.blobs)
        if verdict is None or verdict.reward is None:
            return Score(value=None, failure="visible_tests_failed_to_run")
        return Score(value=0.0 if verdict.tampering else verdict.reward)


class Tests(Part):
    alone = True
    __test__ = False  # not a pytest test class

    fraction: bool = False
    """use the share of passed checks instead of 1 or 0"""

    def outcome(self, verdict: Verdict | None) -> float | None:
        """The outcome between 0 and 1; 1 only if the grader's reward is 1; None if nothing was graded."""
        value = outcome(verdict)
        if not self.fraction or verdict is None or verdict.tampering or value in (None, 1.0):
            return value
        share = sum(check == "pass" for check in verdict.checks.values()) / max(1, len(verdict.checks))
        return share if share < 1 else value

    def score_run(self, run: Trajectory, runtime: Runtime) -> Score:
        return Score(value=self.outcome(run.verdict))
