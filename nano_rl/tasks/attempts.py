"""Attempts at a task: by its oracle, behind earlier tasks of its project, without pytest plugins.

All tasks of a project are run and share a store of notes. An earlier run earns its own reward times that of
the last one, so that what it remembered counts by its use.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from nano_coder.agent.dialects.dialect import DIALECTS
from nano_coder.agent.profiles import offered_tools, serving_profile
from nano_coder.config import note_scrub
from nano_coder.models.scripted import ScriptedPolicy
from nano_coder.run.execution import Project, Runtime, grade_run, run_task
from nano_coder.sandbox.protocol import Sandbox, SupportsListening, SupportsMounts, connected, in_image
from nano_shared.errors import UsageError
from nano_shared.notes import attempt_notes
from nano_shared.policy import Conversation, InterfaceProfile, Policy
from nano_shared.types import Completion, Finish, Limits, OracleAction, Sampling, Task, Trajectory

ORACLE = "oracle"


def oracle_policy(task: Task, profile: InterfaceProfile) -> ScriptedPolicy:
    """A policy that takes the actions of the task's oracle, one per turn; under a profile that shows places,
    that edits the place which the oracle edits. Raises UsageError without one."""
    if not task.oracle:
        raise UsageError(f"task {task.key!r} has no oracle, so it cannot serve a warm start")
    profile = serving_profile(profile, task)
    if profile.places:
        return PlaceOracle(task.oracle)
    dialect, tools = DIALECTS[profile.dialect], offered_tools(profile, task)
    return ScriptedPolicy(
        [dialect.render(action.thought, (action,), tools) for action in task.oracle], id=ORACLE
    )


_SHOWN = re.compile(r"^(\S[^\n]*):\n((?:\d+\|[^\n]*(?:\n|\Z))+)", re.MULTILINE)
"""a file, and lines of it behind their numbers, in a message that shows a place"""


class PlaceOracle(ScriptedPolicy):
    """Edits the shown place as the actions of an oracle do, and answers with no edit where they do not."""

    def __init__(self, actions: Sequence[OracleAction]) -> None:
        super().__init__([], id=ORACLE)
        self._edits = [one.arguments for one in actions if one.name == "edit_file"]

    def complete(self, conversation: Conversation, sampling: Sampling) -> Completion:
        found = _SHOWN.search(conversation.messages[-1].content)
        lines = dict(_numbered(found[2])) if found else {}
        path = found[1] if found else None
        edits = [line for edit in self._edits if edit["path"] == path for line in _edit(edit, lines)]
        text = "\n".join(f"{number}|{text}" for number, text in edits) or "none of these lines is wrong"
        return self._completion(text, Finish.STOP, None, sampling)


def _numbered(text: str) -> Iterator[tuple[int, str]]:
    for line in text.splitlines():
        number, _, source = line.partition("|")
        yield int(number), source


def _edit(edit: Mapping[str, Any], lines: Mapping[int, str]) -> list[tuple[int, str]]:
    """The lines of an `edit_file` as (number, text), if it replaces some of these lines; else none."""
    new = str(edit.get("new", "")).removesuffix("\n").split("\n")
    if "line" in edit:
        return [(int(edit["line"]), text) for text in new] if edit["line"] in lines else []
    old = str(edit.get("old", "")).removesuffix("\n").split("\n")
    numbers = list(lines)
    at = [n for n in range(len(numbers)) if [lines[m] for m in numbers[n : n + len(old)]] == old]
    if len(at) != 1:
        return []
    changed = list[tuple[int, str]]()
    for kind, first, last, start, end in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if kind == "replace":
            # the last of the old lines takes what is left of the new ones
            texts = [[text] for text in new[start:end]]
            kept, rest = texts[: last - first], texts[last - first :]
            if len(kept) < last - first:
                return []  # a line cannot be taken away
            kept[-1] += [text for (text,) in rest]
            changed += [(numbers[at[0] + first + n], text) for n, some in enumerate(kept) for text in some]
        elif kind == "insert":
            beside = max(first - 1, 0)
            shown = [old[beside], *new[start:end]] if first else [*new[start:end], old[0]]
            changed += [(numbers[at[0] + beside], text) for text in shown]
        elif kind == "delete":
            return []
    return changed


def run_in_project(
    task: Task, runtime: Runtime, *, seed: int | None = None,
    policy_of: Callable[[Task], Policy] | None = None,
) -> list[Trajectory]:  # fmt: skip
    """The graded and logged runs of the earlier tasks and of the task, in this order.

    Their notes are those of this attempt alone. `policy_of` gives the policy of each task in place of the
    runtime's. Raises as `run_task` does.
    """
    with attempt_notes(note_scrub()) as notes:
        runs = []
        for one in (*task.earlier, task):
            policy = policy_of(one) if policy_of else runtime.policy
            within = replace(runtime_for(one, runtime), project=Project(notes=notes), policy=policy)
            runs.append(grade_run(run_task(one, within, seed=seed), within))
    last = runs[-1].reward
    for number, run in enumerate(runs[:-1]):
        if (verdict := run.verdict) is not None:
            both = None if verdict.reward is None or last is None else verdict.reward * last
            update = {"reward": both, "components": {**verdict.components, "later": last}}
            verdict = verdict.model_copy(update=update)
            runtime.store.add_verdict(run.id, verdict)
            runs[number] = run.model_copy(update={"verdict": verdict})
    return runs


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
