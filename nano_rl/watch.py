"""A training that is watched: the callbacks of `train`, and a line per step where no view is installed."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any, Protocol, Self

from nano_coder.views import VIEWS, TrainingView
from nano_rl.learn.metrics import SUCCESS, MetricsRow
from nano_rl.learn.rows import Group
from nano_rl.record import ROLLOUTS, EventKind, RolloutsWriter, note
from nano_shared.command_line import Console
from nano_shared.errors import GuardTripped, NanoError, UsageError
from nano_shared.extensions import Extensions, call_extension, described, takes
from nano_shared.printable import printable
from nano_shared.types import Trajectory

KEPT = 200
"""number of rows kept for sparklines and the estimate of the remaining time"""


def _nothing(*_: Any) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Watch:
    """What is called during a training."""

    on_step: Callable[[int, int, dict[str, float]], None] = _nothing
    """a step has ended: steps done, total steps, its metrics"""
    on_run: Callable[[Trajectory], None] = _nothing
    """a rollout of the current step has ended"""
    on_groups: Callable[[int, Sequence[Group], Sequence[Trajectory]], None] = _nothing
    """step, its groups and its control rollouts, before they are learned from"""
    enough: Callable[[], bool] = lambda: False
    """whether no further step shall be begun"""


@dataclass(frozen=True, slots=True)
class PanelLine:
    """One metric of a panel."""

    metric: str
    label: str
    form: str = ".4g"


LINES = {
    line.metric: line
    for line in (
        PanelLine("reward_mean", "reward", ".3f"),
        PanelLine(f"{SUCCESS}all", "success", ".1%"),
        PanelLine("frac_zero_std", "groups without signal", ".1%"),
        PanelLine("loss", "loss"),
        PanelLine("entropy", "entropy", ".3f"),
        PanelLine("grad_norm", "gradient norm"),
        PanelLine("ess", "effective samples", ".1%"),
        PanelLine("stale", "stale tokens", ".1%"),
    )
}
"""the metrics of a step's line, in this order"""


def open_view(
    name: str, total: int, rows: list[MetricsRow], *, console: Console | None = None
) -> TrainingView:
    """The first installed view that shows trainings here, else lines; on stderr unless a console is given.
    `rows`: metrics so far."""
    shown_on = console or Console(stderr=True)
    for kind, view in VIEWS.items():
        opened = call_extension(view.training, name, total, rows, shown_on, name=f"the view {kind}")
        if opened is not None:
            return opened
    return LinesView(name, total, rows)


def with_row(rows: list[MetricsRow], row: Mapping[str, float]) -> list[MetricsRow]:
    """The rows with the new one appended; rows of the same and later steps are replaced."""
    step = row.get("step", math.inf)
    return [*(r for r in rows if (r.get("step") or 0) < step), dict(row)][-KEPT:]


class LinesView(TrainingView):
    """One line per step on stderr, for logs and pipes."""

    def __init__(self, name: str, total: int, rows: list[MetricsRow]) -> None:
        self._name = name
        self._total = total
        self._rows = rows[-KEPT:]

    def step_done(self, done: int, total: int, row: Mapping[str, float]) -> None:
        self._rows = with_row(self._rows, row)
        shown = [
            f"{line.label.strip()} {written(line, row)}" for line in LINES.values() if line.metric in row
        ]
        left = seconds_left(self._rows, done, total)
        parts = [f"step {done}/{total}", *shown, f"left {duration(left or 0)}"]
        print("  ".join(parts), file=sys.stderr, flush=True)


class Sink(Protocol):
    """Takes the metrics of one step after another."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """The metrics of a step. The first call may go back to a step that an earlier process wrote: where
        the library can, what was written from that step on is replaced."""

    def close(self) -> None: ...


SINKS: Extensions[Callable[[str, Path, Mapping[str, Any]], Sink]] = Extensions(
    "nano.sinks", check=lambda make: takes(make, "name", "folder", "settings")
)
"""(name and folder of the training, its settings) -> a sink"""


def open_sinks(names: Sequence[str], *, name: str, folder: Path, settings: Mapping[str, Any]) -> list[Sink]:
    """A sink for each of `names`, opened before training begins. Raises UsageError for an unknown one, and
    for one that raises, and ConfigError where its library is missing."""
    made = {kind: SINKS.named("--log-to", kind) for kind in names}
    opened = []
    for kind, make in made.items():
        sink = call_extension(make, name, folder, settings, name=f"--log-to {kind}", error=UsageError)
        if not (callable(getattr(sink, "write", None)) and callable(getattr(sink, "close", None))):
            raise UsageError(
                f"--log-to {kind} made what is {described(sink)}; a sink has write(step, metrics) and close()"
            )
        opened.append(sink)
    return opened


class Watcher:
    """Shows a training, keeps its rollouts, and records how it ends as an event."""

    def __init__(self, folder: Path, view: TrainingView, sinks: Sequence[Sink], *, done: int) -> None:
        """`done` is the number of steps whose metrics are in the folder already."""
        self._folder = folder
        self._view = view
        self._sinks = sinks
        self._rollouts = RolloutsWriter(folder / ROLLOUTS)
        self._done = done
        self._failed: set[int] = set()
        self.last: dict[str, float] = {}
        """metrics of the last step in this process"""

    def on_run(self, run: Trajectory) -> None:
        self._view.run_done()

    def on_groups(self, step: int, groups: Sequence[Group], controls: Sequence[Trajectory]) -> None:
        self._rollouts.write(step, groups, controls)

    def on_step(self, done: int, total: int, values: dict[str, float]) -> None:
        self._done, self.last = done, dict(values)
        finite = {name: value for name, value in values.items() if math.isfinite(value) and name != "step"}
        for place, sink in enumerate(self._sinks):
            self._tell(place, sink.write, done - 1, finite)
        self._view.step_done(done, total, values)

    def _tell(self, place: int, method: Callable[..., None], *values: Any) -> None:
        """Call a sink; what it raises is said once, and the training goes on."""
        try:
            call_extension(method, *values, name=f"the sink {type(self._sinks[place]).__name__}")
        except NanoError as problem:
            if place not in self._failed:
                print(f"nano: {printable(str(problem))}; the training goes on", file=sys.stderr)
            self._failed.add(place)

    def __enter__(self) -> Self:
        note(self._folder, EventKind.RESUMED if self._done else EventKind.STARTED, self._done)
        self._view.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._view.__exit__(kind, error, trace)
        self._rollouts.close()
        for place, sink in enumerate(self._sinks):
            self._tell(place, sink.close)
        if isinstance(error, GuardTripped):
            note(self._folder, EventKind.GUARD, self._done, str(error))
        elif error is not None:
            note(self._folder, EventKind.STOPPED, self._done, str(error) or type(error).__name__)
        else:
            note(self._folder, EventKind.FINISHED, self._done)


def written(line: PanelLine, row: Mapping[str, float | None]) -> str:
    value = row.get(line.metric)
    return "-" if value is None else format(value, line.form)


def seconds_of(row: Mapping[str, float | None]) -> float:
    """Wall clock seconds of a step: the sum of its phases."""
    return sum(row.get(f"seconds_{phase}") or 0.0 for phase in ("rollout", "train", "save"))


def seconds_left(rows: list[MetricsRow], done: int, total: int) -> float | None:
    """Estimated from the median of the last ten steps; None before the first step."""
    recent = [seconds_of(row) for row in rows[-10:]]
    return median(recent) * (total - done) if recent else None


def duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
