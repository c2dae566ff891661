"""`nano-rl improve`: make the policy better at one project, by its own runs, history and tests."""

from __future__ import annotations

import os
import re
import sys
import time
from datetime import datetime
from datetime import time as Time
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from nano_coder.commands.options import DirectoryOption, Setup, agent_options
from nano_shared.command_line import JsonOption, emit
from nano_shared.errors import UsageError


@agent_options("model", "check", "sandbox", "python", "device", "log", more=())
def command(
    setup: Setup,
    directory: DirectoryOption = Path(),
    minutes: Annotated[float, Option(help="Time of a cycle; what is not done then goes on next time.")] = 60.0,
    every: Annotated[
        str | None, Option(metavar="TIME", help="Stay, and begin a cycle every 24h, 90m, ...")
    ] = None,
    between: Annotated[
        str | None, Option(metavar="HH:MM-HH:MM", help="With --every: begin in this time of the day alone.")
    ] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Say what a cycle would begin with.")] = False,
    status: Annotated[bool, Option("--status", help="The tasks, the split, and every cycle so far.")] = False,
    why: Annotated[bool, Option("--why", help="What the last cycle decided, and on what grounds.")] = False,
    undo: Annotated[bool, Option("--undo", help="Take back the last promotion for the project.")] = False,
    everywhere: Annotated[
        bool, Option("--global", help="Promote the project's present checkpoint for all projects.")
    ] = False,
    as_json: JsonOption = False,
) -> int:
    """Make the policy better at the project in DIR, and promote it there if held-out tasks show that it is.

    A cycle makes tasks of the project's checked runs, the commits that fixed a bug, and mutants of what its
    check covers; a quarter of the places is held out for ever. It trains an adapter on the others, and
    promotes it for this project alone if it is better beyond doubt. A cycle that was cut short goes on.
    """
    from nano_rl.improve.project import open_project

    project = open_project(directory)
    asked = [name for name, given in (("--status", status), ("--why", why), ("--undo", undo),
             ("--global", everywhere), ("--dry-run", dry_run)) if given]  # fmt: skip
    if len(asked) > 1 or (asked and every):
        raise UsageError(f"give one of {', '.join([*asked, *(['--every'] if every else [])])}")
    if status or why:
        return _report(project, as_json, last=why)
    if undo or everywhere:
        return _move(project, as_json, undo=undo)
    if minutes <= 0:
        raise UsageError(f"--minutes {minutes:g} leaves no time: a cycle takes some ten minutes at least")
    if between and not every:
        raise UsageError("--between says when the cycles of --every begin: give --every too")
    pause, window = _seconds(every) if every else None, _window(between) if between else None
    work = partial(_cycle, setup, directory, minutes * 60, as_json)
    if dry_run:
        return _dry_run(setup, directory, minutes, as_json)
    if pause is None:
        return work()
    os.nice(10)
    while True:
        _wait_until_quiet(window)
        began = time.time()
        work()
        time.sleep(max(0.0, began + pause - time.time()))
