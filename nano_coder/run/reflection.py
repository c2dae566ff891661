"""Reflection: shows a failed run its diff and the check's output, before one more attempt.

The attempt is a fork of the failed run at its last step, whose last turn gets one more observation. Of a
hidden check it says only that it failed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from nano_coder.agent.actions import shorten, spill_path
from nano_coder.agent.loop import turn_cost, turn_length
from nano_coder.agent.profiles import continuing_profile
from nano_coder.agent.sub_agent import last_main, observed_last
from nano_coder.grading.command_check import run_check
from nano_shared import snapshot
from nano_shared.hidden_checks import EnvironmentChecks
from nano_shared.types import Limits, Observation, StopReason, Trajectory, Turn

if TYPE_CHECKING:
    from nano_coder.run.execution import Runtime

REFLECTION = "reflection"
"""tool name of the observation that starts the second attempt; no policy can call it"""


def can_reflect(run: Trajectory) -> bool:
    """Whether another attempt makes sense: a reward below 1 on a run that can continue."""
    ended = run.stop is not None and not run.stop.ours and run.stop is not StopReason.CONTEXT_FULL
    goes_on = ended and bool(run.own_turns) and not isinstance(run.task.hidden, EnvironmentChecks)
    return goes_on and run.reward is not None and run.reward < 1


def is_reflection(run: Trajectory) -> bool:
    """Whether the run starts with a reflection on the one before it."""
    return bool(run.inherited) and any(
        observation.tool == REFLECTION for observation in run.turns[run.inherited - 1].observations
    )


def with_reflection(run: Trajectory, runtime: Runtime) -> tuple[tuple[Turn, ...], Limits]:
    """The turns of a failed run, the last with the reflection, and limits that allow as much again.

    Raises SandboxError if the check cannot be run.
    """
    turns = observed_last(run.turns, _observation(run, runtime))
    return turns, as_much_again(run, runtime.policy.count)


def as_much_again(run: Trajectory, count: Callable[[str], int]) -> Limits:
    """The run's limits, and beside them what it has used."""
    limits = run.task.limits
    more = {
        "max_cost": limits.max_cost and limits.max_cost + sum(map(turn_cost, run.own_turns)),
        "max_turns": limits.max_turns + len(run.own_turns),
        "max_tokens": limits.max_tokens + sum(turn_length(t, count) for t in run.own_turns),
        "max_seconds": limits.max_seconds + sum(t.ended - t.started for t in run.own_turns),
    }
    return limits.model_copy(update=more)


def _observation(run: Trajectory, runtime: Runtime) -> Observation:
    started = time.time()
    said, exit_code = _check(run, runtime)
    changes = run.diff.rstrip("\n") or "none"
    full = f"Not solved yet. Your changes:\n{changes}\n{said}\nCorrect it."
    last = last_main(run.turns)
    spill = spill_path(last.index, len(last.observations))
    form = continuing_profile(runtime.profile, run).observation
    text, cut = shorten(full, runtime.policy.count, form, full_output=spill)
    data = full.encode("utf-8", "backslashreplace")
    return Observation(
        tool=REFLECTION,
        ok=False,
        text=text.encode("utf-8", "backslashreplace").decode(),
        exit_code=exit_code,
        bytes_total=len(data),
        truncated=cut,
        blob=runtime.store.put_blob(data) if cut else None,
        started=started,
        ended=time.time(),
    )


def _check(run: Trajectory, runtime: Runtime) -> tuple[str, int | None]:
    """Output and exit code of the visible check on the run's result; of hidden checks only that they
    failed."""
    blobs, command = runtime.store.blobs, run.task.check
    if command is None:
        return "It was checked, and failed.", None
    result = run_check(
        command,
        before=snapshot.load(str(run.snapshot), blobs),
        after=snapshot.load(str(run.last_snapshot), blobs),
        blobs=blobs,
        sandbox=runtime.sandbox,
        limits=run.task.limits,
    )
    output = (result.stdout + result.stderr).decode("utf-8", "replace").strip()
    ending = "timed out" if result.timed_out else f"exit code {result.exit_code}"
    hidden = " Other checks failed." if result.ok else ""
    return f"Check: {command}\n{output}\n{ending}{hidden}".replace("\n\n", "\n"), result.exit_code
