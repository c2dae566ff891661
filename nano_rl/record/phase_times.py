"""Timing of a step by phase: seconds, tokens and throughput."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from nano_shared.types import Trajectory

TimeSpan = tuple[float, float]
"""begin and end, unix seconds"""
SHORTEST = 0.01
"""Minimum duration for a throughput, seconds."""


class Phases:
    """Times the phases of a step: `with phases("rollout"): ...`. Phases do not nest.

    `metrics` covers the time since it was last called, so that saving a state after the metrics of a step is
    counted in the next step.
    """

    def __init__(self, *, ahead: int = 0) -> None:
        """`ahead`: number of steps before a step in which its rollouts may have started."""
        self._seconds: dict[str, float] = defaultdict(float)
        self._began = deque([time.time()], maxlen=1 + ahead)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self._seconds[phase] += time.monotonic() - started

    def metrics(self, runs: Sequence[Trajectory] = (), *, trained_tokens: float = 0.0) -> dict[str, float]:
        """`seconds_<phase>` of each phase, and for the runs started since the last call (with `ahead`, since
        that many calls before it):

        - `step_time`: seconds since the last call;
        - `seconds_generate`: wall clock in which an agent waited for tokens and no tool ran;
        - `seconds_sandbox`: wall clock in which a tool ran;
        - `seconds_grade`: the rest of the rollout phase: grading, rewards and the log;
        - `tokens_rollout`, `tokens_observed`: tokens sampled by the policy, and tokens of observations;
        - `tokens_per_second_rollout`, `_generate`, `_sandbox`, `_train`: sampled tokens per second of the
          rollout phase and of generation, observed tokens of the sandbox, trained tokens of the train phase.

        A throughput is absent if its time is below SHORTEST.
        """
        fresh = [run for run in runs if run.started >= self._began[0]]
        seconds = {f"seconds_{phase}": spent for phase, spent in self._seconds.items()}
        sampled = float(sum(run.num_sampled_tokens for run in fresh))
        observed = float(sum(_observed_tokens(run) for run in fresh))
        if fresh:
            tools = merge(interval for run in fresh for interval in _tools(run))
            either = merge([*tools, *(interval for run in fresh for interval in _completions(run))])
            seconds["seconds_sandbox"] = length(tools)
            seconds["seconds_generate"] = length(either) - length(tools)
            within = seconds["seconds_sandbox"] + seconds["seconds_generate"]
            seconds["seconds_grade"] = max(0.0, seconds.get("seconds_rollout", 0.0) - within)
        self._seconds.clear()
        now = time.time()
        seconds["step_time"] = now - self._began[-1]
        self._began.append(now)
        rates = {
            "rollout": (sampled, seconds.get("seconds_rollout", 0.0)),
            "generate": (sampled, seconds.get("seconds_generate", 0.0)),
            "sandbox": (observed, seconds.get("seconds_sandbox", 0.0)),
            "train": (trained_tokens, seconds.get("seconds_train", 0.0)),
        }
        values = {**seconds, "tokens_rollout": sampled, "tokens_observed": observed}
        return values | {
            f"tokens_per_second_{n}": tokens / s for n, (tokens, s) in rates.items() if s >= SHORTEST
        }


def merge(intervals: Iterable[TimeSpan]) -> list[TimeSpan]:
    """The union of intervals, as disjoint ones in order."""
    union: list[TimeSpan] = []
    for begin, end in sorted(intervals):
        if union and begin <= union[-1][1]:
            union[-1] = (union[-1][0], max(end, union[-1][1]))
        else:
            union.append((begin, end))
    return union


def length(disjoint: Iterable[TimeSpan]) -> float:
    return sum(end - begin for begin, end in disjoint)


def _tools(run: Trajectory) -> Iterator[TimeSpan]:
    for turn in run.turns:
        for observation in turn.observations:
            yield observation.started, max(observation.started, observation.ended)


def _completions(run: Trajectory) -> Iterator[TimeSpan]:
    """The time from the start of each turn to its first tool call: sampling and parsing."""
    for turn in run.turns:
        first = min((o.started for o in turn.observations), default=turn.ended)
        yield turn.started, max(turn.started, first)


def _observed_tokens(run: Trajectory) -> int:
    return sum(len(t.completion.tokens.context_ids) for t in run.turns[1:] if t.completion.tokens)
