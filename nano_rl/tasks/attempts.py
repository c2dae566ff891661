"""Attempts at a task: by its oracle, behind earlier tasks of its project, without pytest plugins.

All tasks of a project are run and share a store of notes. An earlier run earns its own reward times that of
the last one, so that what it remembered counts by its use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nano_coder.agent.dialects.dialect import DIALECTS
from nano_coder.agent.profiles import offered_tools, serving_profile
from nano_coder.models.scripted import ScriptedPolicy
from nano_coder.run.execution import Project, Runtime, grade_run, run_task
from nano_coder.sandbox.protocol import Sandbox, SupportsListening, SupportsMounts, connected, in_image
from nano_shared.errors import UsageError
from nano_shared.notes import attempt_notes
from nano_shared.policy import InterfaceProfile, Policy
from nano_shared.redact.redactor import Redactor
from nano_shared.types import Limits, Task, Trajectory

ORACLE = "oracle"


def oracle_policy(task: Task, profile: InterfaceProfile) -> ScriptedPolicy:
    """A policy that takes the actions of the task's oracle, one per turn. Raises UsageError without one."""
    if not task.oracle:
        raise UsageError(f"task {task.key!r} has no oracle, so it cannot serve a warm start")
    profile = serving_profile(profile, task)
    dialect, tools = DIALECTS[profile.dialect], offered_tools(profile, task)
    return ScriptedPolicy(
        [dialect.render(action.thought, (action,), tools) for action in task.oracle], id=ORACLE
    )


def run_in_project(
    task: Task,
    runtime: Runtime,
    *,
    seed: int | None = None,
    policy_of: Callable[[Task], Policy] | None = None,
) -> list[Trajectory]:
    """The graded and logged runs of the earlier tasks and of the task, in this order.

    Their notes are those of this attempt alone. `policy_of` gives the policy of each task in place of the
    runtime's. Raises as `run_task` does.
    """
    with attempt_notes(Redactor().scrub) as notes:
        runs = []
        for one in (*task.earlier, task):
            policy = policy_of(one) if policy_of else runtime.policy
            within = replace(runtime_for(one, runtime), project=Project(notes=notes), policy=policy)
            runs.append(grade_run(run_task(one, within, seed=seed), within))
    return [*(_by_its_use(run, runs[-1], runtime) for run in runs[:-1]), runs[-1]]


def _by_its_use(run: Trajectory, last: Trajectory, runtime: Runtime) -> Trajectory:
    verdict = run.verdict
    if verdict is None:
        return run
    both = None if verdict.reward is None or last.reward is None else verdict.reward * last.reward
    components = {**verdict.components, "later": last.reward}
    verdict = verdict.model_copy(update={"reward": both, "components": components})
    runtime.store.add_verdict(run.id, verdict)
    return run.model_copy(update={"verdict": verdict})


def number_of_runs(tasks: Iterable[Task]) -> int:
    """Of one attempt at each of the tasks."""
    return sum(1 + len(task.earlier) for task in tasks)


_ENVIRONMENT = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


def runtime_for(task: Task, runtime: Runtime) -> Runtime:
    """The runtime for a task: without pytest plugins for a generated task; other tasks may need them."""
    if task.provenance.source != "generated":
        return runtime
    return replace(runtime, sandbox=PluginsOff(runtime.sandbox))


class PluginsOff:
    """A sandbox that disables the autoloading of pytest plugins by an environment variable."""

    def __init__(self, inner: Sandbox) -> None:
        self._inner = inner
        self.name: str = inner.name
        self.layers: Mapping[str, bool] = inner.layers
        self.python: str = inner.python

    def with_hosts(self, hosts: frozenset[str]) -> PluginsOff:
        return PluginsOff(connected(self._inner, hosts))

    def with_image(self, name: str | None) -> PluginsOff:
        return PluginsOff(in_image(self._inner, name))

    def open(self, workspace: Path | None, limits: Limits) -> Any:
        return _Jail(self._inner.open(workspace, limits))

    def with_mount(self, source: Path, target: str) -> PluginsOff:
        return PluginsOff(self._able(SupportsMounts, "show folders to an agent").with_mount(source, target))

    def open_listening(self, workspace: Path | None, limits: Limits) -> Any:
        inner = self._able(SupportsListening, "open a way from an agent to its model")
        jail, listener = inner.open_listening(workspace, limits)
        return _Jail(jail), listener

    def _able(self, kind: Any, what: str) -> Any:
        """The sandbox inside. Raises UsageError if it lacks what an agent of others needs."""
        if not isinstance(self._inner, kind):
            raise UsageError(f"the sandbox {self.name!r} cannot {what}; use ns")
        return self._inner


class _Jail:
    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def run(self, argv: Sequence[str], **options: Any) -> Any:
        return self._inner.run(argv, **{**options, "env": {**_ENVIRONMENT, **options.get("env", {})}})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
