"""`nano-coder chat`: a conversation on the terminal, each message a run that continues the one before."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from typer import Argument

from nano_coder.commands.changes import apply_to
from nano_coder.commands.display import Display
from nano_coder.commands.options import DirectoryOption, Setup, Verbose, agent_options
from nano_coder.commands.resume import answer
from nano_coder.commands.run import make_task, open_work, take_snapshot
from nano_coder.run.execution import Runtime, attempt_task
from nano_shared.errors import NanoError
from nano_shared.printable import printable
from nano_shared.store import LogStore
from nano_shared.types import Trajectory

_HELP = (
    "/diff shows the changes, /apply applies them, /quit ends; Ctrl-C interrupts a run, to say something else"
)


@agent_options("model", "base_url", "profile", "check", "net", "log")
def command(
    setup: Setup,
    message: Annotated[str | None, Argument(metavar="[TEXT]", help="The first message.")] = None,
    directory: DirectoryOption = Path(),
    verbose: Verbose = False,
) -> int:
    """Work on DIR in a conversation: each message goes on where the one before ended, in a copy of DIR.

    Every message is a run of the log, so `log show`, `fork`, `apply` and the training know it. Nothing is
    applied before you say /apply.
    """
    store = LogStore.open(setup.config.log)
    runtime = open_work(setup, store)
    print(_HELP, file=sys.stderr)
    run: Trajectory | None = None
    while (text := message or _line()) is not None:
        message = None
        if text.startswith("/"):
            if text == "/quit":
                break
            _order(text, run, directory, store)
        elif text.strip():
            run = _answered(text, run, runtime, setup, Display(quiet=False, verbose=verbose))
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
    if text not in ("/diff", "/apply"):
        print(_HELP, file=sys.stderr)
    elif run is None:
        print("nothing was done yet", file=sys.stderr)
    elif text == "/diff":
        Display(quiet=False).diff(run)
    else:
        try:
            changed = apply_to(run, directory, store)
        except (NanoError, OSError) as problem:
            print(printable(f"not applied: {problem}"), file=sys.stderr)
        else:
            print(printable(f"applied: {', '.join(changed) or 'nothing'}"), file=sys.stderr)


def _answered(
    text: str, run: Trajectory | None, runtime: Runtime, setup: Setup, display: Display
) -> Trajectory:
    """The run that the message makes; the one before where it cannot."""
    runtime = replace(runtime, on_text=display.listener())
    try:
        if run is None or not run.turns:
            task = make_task(text, take_snapshot(setup, runtime.store), setup, runtime)
            (run,) = attempt_task(
                task, runtime, on_start=display.start, on_turn=display.turn, on_end=display.grading
            )
        else:
            run = answer(run, text, runtime, display)
    except NanoError as problem:
        if run is None:
            raise
        print(printable(str(problem)), file=sys.stderr)
        return run
    display.answered(run)
    return run
