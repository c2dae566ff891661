"""A run with everything that the log holds of it, and which runs of a log are asked for."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from nano_shared.errors import UsageError
from nano_shared.feedback import Feedback
from nano_shared.run_facts import RunFilter
from nano_shared.types import Trajectory, Value, Verdict

if TYPE_CHECKING:
    from nano_shared.store import LogStore


class LoggedRun(Value):
    trajectory: Trajectory
    verdicts: tuple[Verdict, ...] = ()
    """every verdict, newest last; the last one is the trajectory's"""
    feedback: tuple[Feedback, ...] = ()

    @property
    def whole(self) -> Trajectory:
        """The trajectory with the newest of `verdicts`."""
        return self.trajectory.model_copy(update={"verdict": self.verdicts[-1] if self.verdicts else None})

    def as_json(self) -> dict[str, Any]:
        """As plain JSON values. (Pydantic's JSON mode loses half surrogates in keys of objects.)"""
        body: dict[str, Any] = json.loads(json.dumps(self.model_dump()))
        return body


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenRuns:
    """Selected runs of a log. Raises UsageError if runs are both named and filtered."""

    names: tuple[str, ...] = ()
    """ids, unique prefixes, or "last"; empty: every run that passes the filters"""
    task: str | None = None
    since: float | None = None
    policy: str | None = None
    successes: bool = False

    def __post_init__(self) -> None:
        if self.names and (self.task or self.since is not None or self.policy or self.successes):
            raise UsageError("name runs, or choose them by --task, --since, --policy, --successes: not both")

    def read(self, store: LogStore) -> Iterator[LoggedRun]:
        """The runs in the order given, or oldest first. Raises LogError for an unknown name."""
        named = dict.fromkeys(store.resolve(name) for name in self.names)
        for run_id in named or [run_id for run_id, _ in self.ids(store)]:
            run = store.logged(run_id)
            if not self.successes or succeeded(run.trajectory):
                yield run

    def ids(self, store: LogStore, *, by_task: bool = False) -> list[tuple[str, str]]:
        """Id and task key of the runs that pass the filters, without loading a run; ignores `successes`."""
        chosen = RunFilter(task=self.task, since=self.since, policy=self.policy)
        return store.ids(chosen, by_task=by_task)


def succeeded(run: Trajectory) -> bool:
    """Whether the run ended by itself, with the full reward and without tampering."""
    ended = run.stop is not None and not run.stop.ours
    verdict = run.verdict
    return ended and verdict is not None and (verdict.reward or 0.0) >= 1.0 and not verdict.tampering


_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


def moment(text: str | None, *, now: float | None = None) -> float | None:
    """Unix seconds of a date, a date and time, unix seconds, or so long ago as 90m. Raises UsageError."""
    if text is None:
        return None
    text = text.strip()
    if ago := re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text):
        return (time.time() if now is None else now) - float(ago[1]) * _SECONDS[ago[2]]
    if re.fullmatch(r"\d{9,}(\.\d+)?", text):
        return float(text)
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        raise UsageError(
            f"--since {text!r} is no time; write a date (2026-11-20), a time (2026-11-20T09:30), or so long"
            " ago (90m, 12h, 7d, 2w)"
        ) from None
