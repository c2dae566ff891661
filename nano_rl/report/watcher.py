"""Everything that follows a training: the view, the sinks, the rollouts of each step, and the events."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from nano_rl.learn.rows.group import Group
from nano_rl.record.events import EventKind, note
from nano_rl.record.rollouts import ROLLOUTS, RolloutsWriter
from nano_rl.report.live import View
from nano_rl.report.sinks import Sink
from nano_shared.errors import GuardTripped
from nano_shared.types import Trajectory


class Watcher:
    """The callbacks that `train` calls, and the context it runs in: how it ends is noted as an event."""

    def __init__(self, folder: Path, view: View, sinks: Sequence[Sink], *, done: int) -> None:
        """`done` are the steps whose metrics lie in the folder already."""
        self._folder = folder
        self._view = view
        self._sinks = sinks
        self._rollouts = RolloutsWriter(folder / ROLLOUTS)
        self._done = done
        self.last: dict[str, float] = {}
        """metrics of the last step of this process"""

    def on_run(self, run: Trajectory) -> None:
        self._view.run_done()

    def on_groups(self, step: int, groups: Sequence[Group], controls: Sequence[Trajectory]) -> None:
        self._rollouts.write(step, groups, controls)

    def on_step(self, done: int, total: int, values: dict[str, float]) -> None:
        self._done, self.last = done, dict(values)
        finite = {name: value for name, value in values.items() if math.isfinite(value) and name != "step"}
        for sink in self._sinks:
            sink.write(done - 1, finite)
        self._view.step_done(done, total, values)

    def __enter__(self) -> Self:
        note(self._folder, EventKind.RESUMED if self._done else EventKind.STARTED, self._done)
        self._view.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._view.__exit__(kind, error, trace)
        self._rollouts.close()
        for sink in self._sinks:
            sink.close()
        if isinstance(error, GuardTripped):
            note(self._folder, EventKind.GUARD, self._done, str(error))
        elif error is not None:
            note(self._folder, EventKind.STOPPED, self._done, str(error) or type(error).__name__)
        else:
            note(self._folder, EventKind.FINISHED, self._done)
