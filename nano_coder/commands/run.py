"""`nano-coder run`: one task in a sandboxed copy of a directory, each step shown, the diff at the end."""

from __future__ import annotations

import json
import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from nano_coder.commands.changes import apply_to
from nano_coder.commands.display import Display, exit_code, summary
from nano_coder.commands.options import (
    Limit,
    ToolOption,
    Verbose,
    agent_options,
    configured,
    history_of,
    instructions_of,
    open_runtime,
)
from nano_coder.commands.review import on_terminal, review
from nano_coder.config import STRANGERS_CHECK, AgentConfig, task_limits
from nano_coder.run.execution import attempt_task
from nano_coder.sandbox.workspace_archive import say_unread
from nano_shared import snapshot
from nano_shared.command_line import JsonOption
from nano_shared.errors import NanoError, UsageError
from nano_shared.hashing import content_hash
from nano_shared.settings_options import Settings
from nano_shared.store import LogStore
from nano_shared.types import Task, Trajectory


@agent_options(
    "model", "base_url", "profile", "device", "check", "max_turns", "max_seconds", "max_cost",
    "temperature", "sandbox", "image", "net", "python", "exclude", "log",
)  # fmt: skip
def command(
    task: Annotated[str, Argument(metavar="TASK", help="Text, or - for standard input.")],
    settings: Settings[AgentConfig],
    directory: Annotated[Path, Option("-C", metavar="DIR", help="Where the work is.")] = Path(),
    seed: Annotated[int | None, Option(help="Seed of the sampling.")] = None,
    apply_changes: Annotated[
        bool, Option("--apply", help="Apply the changes when the run is done.")
    ] = False,
    reflect: Annotated[
        int,
        Option(
            metavar="[N]", min=0, show_default=False,
            help="After a failed check, N more attempts (1) that read the diff and the check's output.",
        ),
    ] = 0,
    verbose: Verbose = False,
    as_json: JsonOption = False,
    limit: Limit = None,
    tools: ToolOption = None,
) -> int:  # fmt: skip
    """Run TASK (text, or - for standard input) in a sandboxed copy of a directory.

    DIR itself is not touched unless the changes are applied: with --apply, when you accept them at the end
    (as they are, or edited in $VISUAL or $EDITOR), or later with `nano-coder apply RUN`. What you answer on
    a terminal is kept as feedback on the run.
    """
    config, sources = configured(settings, directory, limit, tools)
    prompt = _text(sys.stdin.buffer.read() if task == "-" else os.fsencode(task))
    if not prompt.strip():
        raise UsageError(
            "the task is empty; say what to do, for example: nano-coder run 'fix the failing test'"
        )
    check = config.check or None
    if reflect and not check:
        raise UsageError("--reflect needs a --check: without one no attempt fails")
    store = LogStore.open(config.log)
    work = make_task(prompt, directory, check, store, config)
    runtime = open_runtime(config, directory, store)
    history = history_of(directory, config)
    project = replace(runtime.project, directory=str(directory.resolve()), history=history)
    runtime = replace(runtime, project=project)
    shown = instructions_of(directory, config, runtime.profile)
    trusted = sources["check"] != STRANGERS_CHECK
    work = work.model_copy(update={"instructions": shown, "check_trusted": trusted})
    display = Display(quiet=as_json, verbose=verbose)
    runtime = replace(runtime, on_text=display.listener())
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
        except typer.Abort:
            display.end(trajectory, applied=False)  # which says how the changes are had later
            raise
    applied, problem = False, None
    if trajectory.diff and accepted is not None:
        try:
            apply_to(trajectory, directory, store, accepted)
            applied = True
        except (NanoError, OSError, KeyboardInterrupt) as caught:
            problem = caught  # raised after the result is printed
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
    message = str(problem) if isinstance(problem, NanoError) else f"not applied: {problem}"
    again = f"nano-coder apply {trajectory.id} -C {shlex.quote(str(trajectory.directory))} tries again"
    return UsageError(f"{message.rstrip('.')}; {again}")


def _text(given: bytes) -> str:
    try:
        return given.decode()
    except UnicodeDecodeError as problem:
        raise UsageError(f"the task is not UTF-8 text ({problem})") from None


def make_task(prompt: str, directory: Path, check: str | None, store: LogStore, config: AgentConfig) -> Task:
    """An ad-hoc task: the directory is snapshotted, the key is the hash of prompt, snapshot and check."""
    left_out = (*snapshot.DEFAULT_EXCLUDES, *config.exclude)
    unread: list[str] = []
    start = snapshot.snapshot_directory(
        directory, store.blobs, left_out, max_bytes=config.workspace_mb << 20, unread=unread.append
    )
    say_unread(directory, sorted(unread))
    return Task(
        key=content_hash([prompt, start, check]),
        prompt=prompt,
        snapshot=start,
        check=check,
        limits=task_limits(config),
        image=config.image,
    )
