"""`nano-coder run`: one task in a sandboxed copy of a directory, each step shown, the diff at the end."""

from __future__ import annotations

import json
import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from nano_coder.commands.apply import apply_to
from nano_coder.commands.display import Display, exit_code, summary
from nano_coder.commands.options import execution_options, history_of, open_runtime
from nano_coder.commands.review import on_terminal, review
from nano_coder.config import AgentConfig, load_config, task_limits
from nano_coder.run.execution import attempt_task
from nano_shared import snapshot
from nano_shared.errors import NanoError, UsageError
from nano_shared.hashing import content_hash
from nano_shared.store import LogStore
from nano_shared.types import Task, Trajectory


@click.command("run")
@click.argument("task")
@click.option("-C", "directory", type=click.Path(path_type=Path), default=Path(), help="Where the work is.")
@click.option("--check", help="Shell line that says whether the task is done.")
@click.option("--max-turns", type=int, help="Turns before the run ends.")
@click.option("--max-seconds", type=float, help="Wall clock before the run ends.")
@click.option("--seed", type=int, help="Seed of the sampling.")
@click.option(
    "--exclude", multiple=True, metavar="PATTERN", help="Name that the run does not get to see; repeatable."
)
@click.option("--apply", "apply_changes", is_flag=True, help="Apply the changes when the run is done.")
@click.option(
    "--reflect", type=click.IntRange(0), is_flag=False, flag_value=1, default=0, metavar="[N]",
    help="After a failed check, N more attempts (1) that read the diff and the check's output; behind TASK.",
)  # fmt: skip
@click.option("-v", "--verbose", is_flag=True, help="Print long outputs whole on a terminal.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
@execution_options
def command(
    task: str,
    directory: Path,
    check: str | None,
    apply_changes: bool,
    as_json: bool,
    seed: int | None,
    reflect: int,
    verbose: bool,
    **flags: Any,
) -> int:
    """Run TASK (text, or - for standard input) in a sandboxed copy of a directory.

    DIR itself is not touched unless the changes are applied: with --apply, when you accept them at the end
    (as they are, or edited in $VISUAL or $EDITOR), or later with `nano-coder apply RUN`. What you answer on
    a terminal is kept as feedback on the run.
    """
    prompt = _text(sys.stdin.buffer.read() if task == "-" else os.fsencode(task))
    if not prompt.strip():
        raise UsageError(
            "the task is empty; say what to do, for example: nano-coder run 'fix the failing test'"
        )
    if not directory.is_dir():
        raise UsageError(f"no such directory: {directory}; -C names the directory to work in")
    config, _ = load_config(flags, directory)
    check = check or config.check
    if reflect and not check:
        raise UsageError("--reflect needs a --check: without one no attempt fails")
    store = LogStore.open(config.log)
    work = make_task(prompt, directory, check, store, config)
    runtime = replace(
        open_runtime(config, directory, store),
        directory=str(directory.resolve()),
        history=history_of(directory, config),
    )
    display = Display(quiet=as_json, verbose=verbose)
    with display.naming_the_run():
        attempts = attempt_task(
            work, runtime, reflect=reflect, seed=seed,
            on_start=display.start, on_turn=display.turn, on_end=display.grading,
        )  # fmt: skip
    trajectory = attempts[-1]
    accepted = trajectory.last_snapshot if apply_changes else None
    if trajectory.diff and not apply_changes and not as_json and on_terminal():
        display.diff(trajectory)
        try:
            accepted = review(trajectory, directory, runtime.store)
        except click.Abort:
            display.end(trajectory, applied=False)  # which says how the changes are had later
            raise
    applied, problem = False, None
    if trajectory.diff and accepted is not None:
        try:
            apply_to(trajectory, directory, store, accepted)
            applied = True
        except (NanoError, OSError, KeyboardInterrupt) as caught:
            problem = caught  # told after the result, which must not be lost
    if as_json:
        more = {"attempts": [{"run": a.id, "reward": a.reward} for a in attempts]} if reflect else {}
        print(json.dumps(summary(trajectory, applied=applied) | more))
    else:
        display.end(trajectory, applied=applied)
    if problem is not None:
        raise _not_applied(problem, trajectory)
    return exit_code(trajectory)


def _not_applied(problem: BaseException, trajectory: Trajectory) -> BaseException:
    if isinstance(problem, KeyboardInterrupt):
        return problem
    told = str(problem) if isinstance(problem, NanoError) else f"not applied: {problem}"
    again = f"nano-coder apply {trajectory.id} -C {shlex.quote(str(trajectory.directory))} tries again"
    return UsageError(f"{told.rstrip('.')}; {again}")


def _text(given: bytes) -> str:
    try:
        return given.decode()
    except UnicodeDecodeError as problem:
        raise UsageError(f"the task is not UTF-8 text ({problem})") from None


def make_task(prompt: str, directory: Path, check: str | None, store: LogStore, config: AgentConfig) -> Task:
    """An ad-hoc task: the directory is snapshotted, the key is the hash of prompt, snapshot and check."""
    left_out = (*snapshot.DEFAULT_EXCLUDES, *config.exclude)
    start = snapshot.snapshot_directory(directory, store.blobs, left_out)
    return Task(
        key=content_hash([prompt, start, check]),
        prompt=prompt,
        snapshot=start,
        check=check,
        limits=task_limits(config),
    )
