"""`nano-coder chat`: a conversation on the terminal, each message a run that continues the one before."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from nano_coder.commands.changes import apply_to
from nano_coder.commands.display import Display
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
from nano_coder.commands.run import make_task
from nano_coder.config import STRANGERS_CHECK, AgentConfig
from nano_coder.run.execution import Runtime, grade_run, run_task
from nano_coder.run.fork import say_to_run
from nano_shared.errors import NanoError
from nano_shared.printable import printable
from nano_shared.settings_options import Settings
from nano_shared.store import LogStore
from nano_shared.types import Trajectory

_HELP = (
    "/diff shows the changes, /apply applies them, /quit ends; Ctrl-C interrupts a run, to say something else"
)


@agent_options("model", "base_url", "profile", "check", "net", "log")
def command(
    settings: Settings[AgentConfig],
    message: Annotated[str | None, Argument(metavar="[TEXT]", help="The first message.")] = None,
    directory: Annotated[Path, Option("-C", metavar="DIR", help="Where the work is.")] = Path(),
    verbose: Verbose = False,
    limit: Limit = None,
    tools: ToolOption = None,
) -> int:
    """Work on DIR in a conversation: each message goes on where the one before ended, in a copy of DIR.

    Every message is a run of the log, so `log show`, `fork`, `apply` and the training know it. Nothing is
    applied before you say /apply.
    """
    config, sources = configured(settings, directory, limit, tools)
    trusted = sources["check"] != STRANGERS_CHECK
    store = LogStore.open(config.log)
    runtime = open_runtime(config, directory, store)
    history = history_of(directory, config)
    project = replace(runtime.project, directory=str(directory.resolve()), history=history)
    runtime = replace(runtime, project=project)
    print(_HELP, file=sys.stderr)
    run: Trajectory | None = None
    while (text := message or _line()) is not None:
        message = None
        if text.startswith("/"):
            if text == "/quit":
                break
            _order(text, run, directory, store)
        elif text.strip():
            run = _answered(text, run, runtime, directory, config, verbose, trusted=trusted)
    return 0


def _line() -> str | None:
    """The next line of the user; None at the end of the input."""
    if sys.stdin.isatty():
        print("\n> ", end="", file=sys.stderr, flush=True)
    try:
        line = sys.stdin.readline()
    except KeyboardInterrupt:
        return None
    return line.removesuffix("\n") if line else None


def _order(text: str, run: Trajectory | None, directory: Path, store: LogStore) -> None:
    display = Display(quiet=False)
    if text not in ("/diff", "/apply"):
        print(_HELP, file=sys.stderr)
    elif run is None:
        print("nothing was done yet", file=sys.stderr)
    elif text == "/diff":
        display.diff(run)
    else:
        try:
            changed = apply_to(run, directory, store)
        except (NanoError, OSError) as problem:
            print(printable(f"not applied: {problem}"), file=sys.stderr)
        else:
            print(printable(f"applied: {', '.join(changed) or 'nothing'}"), file=sys.stderr)


def _answered(
    text: str,
    run: Trajectory | None,
    runtime: Runtime,
    directory: Path,
    config: AgentConfig,
    verbose: bool,
    *,
    trusted: bool,
) -> Trajectory:
    """The run that the message makes; the one before where it cannot. `trusted`: its check may be."""
    display = Display(quiet=False, verbose=verbose)
    runtime = replace(runtime, on_text=display.listener())
    try:
        if run is None or not run.turns:
            task = make_task(text, directory, config.check or None, runtime.store, config)
            shown = instructions_of(directory, config, runtime.profile)
            task = task.model_copy(update={"instructions": shown, "check_trusted": trusted})
            run = run_task(task, runtime, on_start=display.start, on_turn=display.turn)
        else:
            run = say_to_run(run, text, runtime, on_start=display.start, on_turn=display.turn)
        display.grading(run)
        run = grade_run(run, runtime)
    except NanoError as problem:
        if run is None:
            raise
        print(printable(str(problem)), file=sys.stderr)
        return run
    display.answered(run)
    return run
