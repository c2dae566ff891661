"""Survey a log: every run judged from its columns, and a sample of them, or all, looked at a second time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nano_rl.logs.admission import Bench, Judged, Use, by_task
from nano_rl.logs.report import AdmissionReport, Fresh, Reservoir, SecondLooks, Weights
from nano_shared.fact_rows import RunFilter
from nano_shared.facts import RunFacts
from nano_shared.store import LogStore

if TYPE_CHECKING:
    from nano_coder.verify.refusal import Refusal
    from nano_rl.logs.token_verification import SecondLook
import math
from collections.abc import Iterable, Sequence
from dataclasses import field

from nano_coder.verify.logprobs import Scored
from nano_rl.learn.objectives.ratio import MAX_LOG_RATIO


def share(log_weights: Sequence[float]) -> float:
    """In (0, 1]; the logarithms are shifted by their largest, so that none overflows. 0 of nothing."""
    if not log_weights:
        return 0.0
    top = max(log_weights)
    weights = [math.exp(value - top) for value in log_weights]
    return math.fsum(weights) ** 2 / (len(weights) * math.fsum(w * w for w in weights))


@dataclass(slots=True)
class EffectiveSample:
    """Adds up run by run, in constant memory for the tokens."""

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
"""runs that are loaded where not all are; a log that holds no more is looked at whole"""
SCORED = 16_384
"""tokens of the sample that are forwarded under the policy, at the least one run"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What to look at, and how closely."""

    store: LogStore
    chosen: RunFilter
    bench: Bench
    look: SecondLook | None = None
    """of the policy at hand; None judges from the columns alone"""
    fresh: int | None = None
    exact: bool = False
    """load and score every run that its columns admit"""
    seed: int = 0
    on_task: Callable[[AdmissionReport], None] | None = None

    def report(self) -> AdmissionReport:
        report = AdmissionReport(fresh=Fresh(size=self.fresh) if self.fresh else None)
        if self.look is None:
            for _ in self._judged(report, None):
                pass
            return report

        report.looks, sample = SecondLooks(), EffectiveSample()
        if self.exact or len(self.store.runs(limit=SAMPLE + 1)) <= SAMPLE:
            report.looks.every = True
            seen = _Seen(self, self.look, report.looks, sample, budget=None if self.exact else SCORED)
            for _ in self._judged(report, seen):
                pass
        else:
            reservoir = Reservoir(SAMPLE, self.seed)
            for judged in self._judged(report, None):
                if judged.use is Use.POLICY_GRADIENT:
                    reservoir.offer(judged.run.id)
            seen = _Seen(self, self.look, report.looks, sample, budget=SCORED)
            for run in sorted(reservoir.kept):
                seen.see(run)
        if sample.tokens:
            report.weights = Weights(
                runs=len(sample.runs), tokens=sample.tokens, token_share=sample.token_share,
                run_share=sample.run_share,
            )  # fmt: skip
        return report

    def _judged(
        self, report: AdmissionReport, look: Callable[[RunFacts], Refusal | None] | None
    ) -> Iterator[Judged]:
        for runs in by_task(self.store.facts(self.chosen), self.bench, look):
            report.add(runs)
            if self.on_task:
                self.on_task(report)
            yield from runs


class _Seen:
    """Takes second looks until its budget of forwarded tokens is spent, and then looks without scoring."""

    def __init__(
        self,
        survey: Survey,
        look: SecondLook,
        looks: SecondLooks,
        sample: EffectiveSample,
        *,
        budget: int | None,
    ) -> None:
        self._store, self._look, self._looks, self._sample = survey.store, look, looks, sample
        self._left = budget

    def __call__(self, run: RunFacts) -> Refusal | None:
        return self.see(run.id)

    def see(self, run_id: str) -> Refusal | None:
        run = self._store.get(run_id)
        seen = self._look.see(run, score=self._left is None or self._left > 0)
        self._looks.runs += 1
        if seen.refusal is not None:
            self._looks.damage[seen.refusal.value] += 1
        elif seen.tokens:
            self._sample.add(seen.tokens)
        if self._left is not None and seen.tokens:
            read = (t.completion.tokens for t in run.turns)
            self._left -= sum(len(t.context_ids) + len(t.sampled_ids) for t in read if t)
        return seen.refusal
