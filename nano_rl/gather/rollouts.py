"""Rollouts: tasks executed by nano-coder's runtime, many at a time, graded and logged; and attempts at a
task, by its oracle, behind earlier tasks of its project, or without pytest plugins.

All tasks of a project are run and share a store of notes. An earlier run earns its own reward times that of
the last one, so that what it remembered counts by its use.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from nano_coder.agent.dialects.dialect import DIALECTS
from nano_coder.agent.loop import derived_seed
from nano_coder.agent.profiles import offered_tools, serving_profile
from nano_coder.config import note_scrub
from nano_coder.models.scripted import ScriptedPolicy
from nano_coder.run.execution import (
    Project,
    Runtime,
    Stop,
    can_reflect,
    grade_run,
    is_reflection,
    reflect_run,
    run_task,
)
from nano_coder.run.tries import AT_ONCE, OnRun, member_seed, run_side_by_side
from nano_coder.sandbox.protocol import Sandbox, SupportsListening, SupportsMounts, connected, in_image
from nano_rl.checkpoints.evaluate import row_of
from nano_rl.learn.groups import Group
from nano_rl.learn.metrics import GRADED, HELD_OUT, PART, SUCCESS, RowWriter
from nano_rl.rewards import Reward
from nano_rl.rewards.reward import IMPOSSIBLE
from nano_shared.agent_notes import attempt_notes
from nano_shared.errors import NanoError, PolicyError, SandboxError, UsageError
from nano_shared.extension_points import Extensions
from nano_shared.policy import Conversation, InterfaceProfile, Policy
from nano_shared.types import (
    Completion,
    Finish,
    Limits,
    OracleAction,
    Sampling,
    StopReason,
    Task,
    Trajectory,
    is_composed,
    outcome,
)

if TYPE_CHECKING:
    from nano_coder.config import AgentConfig


class RollOut(Protocol):
    """`collect`, or what has workers elsewhere do the same."""

    def __call__(
        self, tasks: Sequence[Task], runtime: Runtime, *, group_size: int | Sequence[int] = 1, seed: int = 0,
        on_run: OnRun | None = None, reward: Reward | None = None, reflect: int = 0,
    ) -> list[Trajectory]: ...  # fmt: skip


_AGENTS_PER_CPU = 8
"""of agents of others, each a process of its own of up to hundreds of megabytes"""
_NOTHING_JUDGED = "nothing_judged"
"""failure kind of a composed reward if none of its parts gave a score"""


def collect(
    tasks: Sequence[Task], runtime: Runtime, *, group_size: int | Sequence[int] = 1, seed: int = 0,
    on_run: OnRun | None = None, reward: Reward | None = None, reflect: int = 0,
) -> list[Trajectory]:  # fmt: skip
    """Run each task `group_size` times (one number, or one per task), and grade and log each run.

    Returns [runs] in task order, each behind those of its earlier tasks; with a `reward`, with its composed
    verdicts, which are logged too. With `reflect`, a failed run is followed by so many second attempts, which
    are shown its diff and the output of its check: forks of its last step, so that they form a group.

    Under a policy's lockstep scheduler the batches depend on the seed alone, and the same seed gives the same
    trajectories.
    """
    jobs = members(tasks, group_size)
    if not jobs:
        return []
    together: int = getattr(runtime.policy, "agents_together", AT_ONCE)
    at_once = runtime.settings.at_once or together
    if runtime.environments.opened:
        at_once = min(at_once, runtime.environments.sessions or at_once)
    if runtime.settings.agent is not None:
        if reflect:
            raise UsageError(
                "second attempts go on where nano's own agent ended, and an agent of others begins anew:"
                " leave out --reflect (of nano-rl train `reflect`), or --agent"
            )
        at_once = min(at_once, _AGENTS_PER_CPU * len(os.sched_getaffinity(0)))
    stop = runtime.hooks.stop or Stop()
    runtime = replace(runtime, hooks=replace(runtime.hooks, stop=stop))
    episodes = [
        partial(_episode, task, member_seed(seed, task, member), runtime_for(task, runtime), reflect)
        for task, member in jobs
    ]
    done = run_side_by_side(episodes, runtime.policy, at_once=at_once, on_run=on_run, stop=stop)
    return reward.apply(done, runtime) if reward else done


def members(tasks: Sequence[Task], group_size: int | Sequence[int]) -> list[tuple[Task, int]]:
    """[runs] each task with the index of each rollout in its group."""
    sizes = [group_size] * len(tasks) if isinstance(group_size, int) else group_size
    return [(task, member) for task, size in zip(tasks, sizes, strict=True) for member in range(size)]


def failed(run: Trajectory) -> bool:
    """True if the policy's backend, the sandbox, the environment or a judge failed, so that the run has no
    reward."""
    if run.stop in (StopReason.POLICY_ERROR, StopReason.SANDBOX_ERROR, StopReason.ENVIRONMENT_ERROR):
        return True
    verdict = run.verdict
    return (
        verdict is not None and verdict.reward is None and verdict.failure_kind not in (None, _NOTHING_JUDGED)
    )


def none_graded(runs: Sequence[Trajectory]) -> NanoError:
    first = runs[0]
    kind = (first.verdict.failure_kind if first.verdict else None) or ""
    of_sandbox = first.stop is StopReason.SANDBOX_ERROR or kind.startswith("sandbox")
    return (SandboxError if of_sandbox else PolicyError)(
        f"none of {len(runs)} runs could be graded; the first, {why_ungraded(first)}"
    )


def why_ungraded(run: Trajectory) -> str:
    why = run.stop_detail or (run.verdict.failure_kind if run.verdict else None) or "it has no check"
    return f"run {run.id}: {run.stop if run.stop and run.stop.ours else 'not graded'}: {why}"


def execute(
    tasks: Sequence[Task], policies: Sequence[Policy], runtime: Runtime, *, on_run: OnRun | None = None,
    reward: Reward | None = None,
) -> list[Trajectory]:  # fmt: skip
    """Run each task once under its own policy (oracles, for a warm start), two at a time. Its earlier tasks
    are run by their oracles, and their runs returned before its own."""
    episodes = [
        partial(_run_and_grade, task, replace(runtime_for(task, runtime), policy=policy))
        for task, policy in zip(tasks, policies, strict=True)
    ]
    done = run_side_by_side(episodes, None, at_once=2, on_run=on_run)
    return reward.apply(done, runtime) if reward else done


def _episode(
    task: Task, seed: int, runtime: Runtime, reflect: int, graders: Executor
) -> list[Future[Trajectory]]:
    """Run a task, and second attempts if it failed; returns the futures of their grading."""
    if task.earlier:
        return [_done(run) for run in run_in_project(task, runtime, seed=seed)]
    graded = [graders.submit(grade_run, run_task(task, runtime, seed=seed), runtime)]
    if reflect and can_reflect(first := graded[0].result()):
        # where the check cannot be run again, the attempts made so far are kept, as `attempt_task` does
        with suppress(SandboxError):
            for member in range(reflect):
                attempt = reflect_run(first, runtime, seed=derived_seed(seed, "second", member))
                graded.append(graders.submit(grade_run, attempt, runtime))
    return graded


def _done(run: Trajectory) -> Future[Trajectory]:
    future: Future[Trajectory] = Future()
    future.set_result(run)
    return future


def _run_and_grade(task: Task, runtime: Runtime, graders: Executor) -> list[Future[Trajectory]]:
    if not task.earlier:
        return [_done(grade_run(run_task(task, runtime), runtime))]

    def policy_of(one: Task) -> Policy:
        return runtime.policy if one is task else oracle_policy(one, runtime.profile)

    return [_done(run) for run in run_in_project(task, runtime, policy_of=policy_of)]


class Workers(Protocol):
    collect: RollOut

    def close(self) -> None:
        """Give up what is under way. Idempotent."""


OpenWorkers = Callable[
    ["Runtime", "AgentConfig", str, int | None, Callable[[str], None]],
    Workers,
]
"""(runtime, config, address, number of workers, what is told of changes) -> workers of a hosted model"""
WORKERS: Extensions[OpenWorkers] = Extensions("nano.workers")


HELD_OUT_FILE = "held_out.jsonl"
_MEASUREMENTS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """Tasks that a training is measured on and never trained on; measurements are appended to a file."""

    tasks: tuple[Task, ...]
    folder: Path
    seed: int
    roll_out: RollOut = collect

    def due(self, step: int, steps: int) -> bool:
        """True if the weights after `step` of `steps` updates are to be measured: about ten times in all."""
        return step == steps or step % max(1, steps // _MEASUREMENTS) == 0

    def measure(self, live: Runtime, step: int, steps: int) -> dict[str, float]:
        """Roll out each task once, with the same seeds at every measurement, and append a row to the file;
        returns the metric `held_out`, nothing where none is due."""
        if not (self.tasks and self.due(step, steps)):
            return {}
        runs = self.roll_out(self.tasks, live, seed=self.seed)
        found = row_of("all", runs)
        if not found.graded:
            return {}
        interval = {"low": found.low, "high": found.high}
        row = {"step": step, "success": found.rate, "graded": found.graded, **interval}
        with RowWriter(self.folder / HELD_OUT_FILE, resume_at=step) as rows:
            rows.write_row(row)
        return {HELD_OUT: found.rate}


def success_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """`success/...` and `graded/...` by level and of second attempts (`second`, in no other rate), `part/...`
    of each part of a composed reward, `reward_min` and `reward_max`, and `reward_error`, the standard error
    of the mean reward over groups, since rollouts of one task are not independent.

    A success is a test outcome of 1, whatever a composed reward adds.
    """
    outcomes: dict[str, list[float]] = defaultdict(list)
    for group in groups:
        for run in group.trajectories:
            value = outcome(run.verdict)
            if value is not None and is_reflection(run):
                outcomes["second"].append(value)
            elif value is not None:
                outcomes["all"].append(value)
                if run.task.level is not None:
                    outcomes[f"level_{run.task.level}"].append(value)
    metrics: dict[str, float] = {}
    for name, values in sorted(outcomes.items()):
        metrics[f"{SUCCESS}{name}"] = sum(value >= 1 for value in values) / len(values)
        metrics[f"{GRADED}{name}"] = float(len(values))
    metrics |= _parts(groups)
    rewards = [r for group in groups for r in group.rewards_G if not math.isnan(r)]
    if rewards:
        metrics |= {"reward_min": min(rewards), "reward_max": max(rewards)}
    error = _error([_mean(group) for group in groups])
    return metrics if error is None else {**metrics, "reward_error": error}


def _parts(groups: Sequence[Group]) -> dict[str, float]:
    """Mean score of each reward part, whether it counted or not; without its details (`part.detail`)."""
    scores: dict[str, list[float]] = defaultdict(list)
    for verdict in (run.verdict for group in groups for run in group.trajectories):
        if verdict is not None and is_composed(verdict):
            for name, value in verdict.components.items():
                if value is not None and "." not in name:
                    scores[name].append(value)
    return {f"{PART}{name}": math.fsum(values) / len(values) for name, values in sorted(scores.items())}


def _mean(group: Group) -> float:
    scored = [r for r in group.rewards_G if not math.isnan(r)]
    return math.fsum(scored) / len(scored) if scored else math.nan


def _error(means: Sequence[float]) -> float | None:
    known = [mean for mean in means if not math.isnan(mean)]
    if len(known) < 2:
        return None
    centre = math.fsum(known) / len(known)
    return math.sqrt(math.fsum((m - centre) ** 2 for m in known) / (len(known) - 1) / len(known))


TAMPERING = "tampering/"
"""prefix of the metrics that count rollouts by kind of tampering"""


def hack_metrics(runs: Sequence[Trajectory], controls: Sequence[Trajectory]) -> dict[str, float]:
    """`tampered`, `tampering/KIND`: rollouts with tampering, by kind; `controls`, `controls_graded`,
    `control_passes`: control rollouts, graded ones, passed ones."""
    kinds = Counter(
        kind for run in (*runs, *controls) if run.verdict for kind in {t.kind for t in run.verdict.tampering}
    )
    tampered = sum(bool(run.verdict and run.verdict.tampering) for run in runs)
    metrics = {"tampered": float(tampered), "controls": float(len(controls))}
    metrics |= {
        "controls_graded": float(sum(run.reward is not None for run in controls)),
        "control_passes": float(kinds.pop(IMPOSSIBLE, 0)),
    }
    return metrics | {f"{TAMPERING}{kind}": float(count) for kind, count in sorted(kinds.items())}


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
    """The graded and logged runs of the earlier tasks and of the task, in this order. Their notes are those
    of this attempt alone. `policy_of` gives the policy of each task in place of the runtime's. Raises as
    `run_task` does."""
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
