"""Oracle runs with a progress bar: executed once, then read back from the log."""

from __future__ import annotations

from collections.abc import Sequence

from nano_coder.runtime import COMPACT_1, Runtime, ScriptedPolicy, guarded, open_sandbox
from nano_rl.commands.progress import bar
from nano_rl.imitation import oracle
from nano_rl.imitation.oracle import ORACLE
from nano_shared.store import LogStore
from nano_shared.types import Task, Trajectory


def oracle_runtime(log: str | None) -> Runtime:
    return Runtime(
        policy=ScriptedPolicy([]),
        sandbox=open_sandbox(),
        store=guarded(LogStore.open(log)),
        profile=COMPACT_1,
        policy_name=ORACLE,
    )


def oracle_runs(tasks: Sequence[Task], runtime: Runtime) -> list[Trajectory]:
    """`oracle.oracle_runs`, with a bar over those that have to be executed."""
    with bar("oracle runs", len(tasks)) as progress:
        runs = oracle.oracle_runs(tasks, runtime, on_run=lambda _: progress.advance())
        progress.reach(len(tasks), len(tasks))
    return runs
