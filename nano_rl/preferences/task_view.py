"""A log as if it held the runs of one task alone: what works on a log then works task by task."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from nano_shared.fact_rows import RunFilter
from nano_shared.facts import RunFacts
from nano_shared.store import LogStore
from nano_shared.types import Trajectory


class TaskView:
    """Reads as the log does, but for `trajectories` and `facts`."""

    def __init__(self, store: LogStore, run_ids: Iterable[str]) -> None:
        self._store = store
        self._run_ids = tuple(run_ids)

    def trajectories(self) -> Iterator[Trajectory]:
        for run_id in self._run_ids:
            yield self._store.get(run_id)

    def facts(self) -> Iterator[RunFacts]:
        # run by run: the log's own would read the columns of every task once a task
        for run_id in self._run_ids:
            yield from self._store.facts(RunFilter(run=run_id))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)
