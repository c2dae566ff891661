"""`nano-rl improve`: make the policy better at one project, by its own runs, history and tests."""

from __future__ import annotations

import math
import os
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from nano_coder.commands.options import DirectoryOption, Setup, agent_options, open_log, python_of
from nano_shared.command_line import JsonOption, emit
from nano_shared.errors import Interrupted, NanoError, UsageError

if TYPE_CHECKING:
    from nano_rl.improve.project import Cycle, ImprovedProject, ProjectTask
    from nano_shared.store import LogStore


@agent_options("model", "check", "log", more=())
def command(
    setup: Setup,
    directory: DirectoryOption = Path(),
    minutes: Annotated[
        float, Option(help="Time of a cycle; what is not done then goes on next time.")
    ] = 60.0,
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
    asked = [
        f"--{name}" for name, given in {
            "status": status, "why": why, "undo": undo, "global": everywhere, "dry-run": dry_run,
            "every": bool(every),
        }.items() if given
    ]  # fmt: skip
    if len(asked) > 1:
        raise UsageError(f"{' and '.join(asked)} do different things: give one of them")
    if not 0 < minutes < math.inf:
        raise UsageError(f"--minutes {minutes:g} leaves no time: a cycle takes some ten minutes at least")
    if between and not every:
        raise UsageError("--between says when the cycles of --every begin: give --every too")
    from nano_coder.commands.run import with_advice
    from nano_rl.improve.project import open_project

    project = open_project(directory)
    if status or why:
        return _report(project, as_json, last=why)
    if undo or everywhere:
        return _move(project, as_json, undo=undo)
    setup = with_advice(_for_project(setup, project))
    if dry_run:
        return _dry_run(project, setup, minutes, as_json)
    if every is None:
        return _cycle(project, setup, minutes, as_json)
    from nano_rl.improve.cycle import parse_pause, parse_window, wait_until_quiet

    pause, window = parse_pause(every), parse_window(between) if between else None
    os.nice(10)
    while True:
        wait_until_quiet(window, _say)
        began = time.time()
        try:
            _cycle(project, setup, minutes, as_json)
        except Interrupted:
            raise
        except NanoError as problem:  # a check that fails tonight may pass tomorrow
            _say(f"error: {problem}")
        time.sleep(max(0.0, began + pause - time.time()))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _for_project(setup: Setup, project: ImprovedProject) -> Setup:
    """The setup with the interpreter of the project, and its check: of the options and files, else of its
    last checked run. Raises UsageError where there is none, or where one of the project's own file is not
    trusted."""
    from nano_coder.config import UNTRUSTED_CHECK
    from nano_rl.improve.tasks import checked_runs

    if setup.sources.get("check") == UNTRUSTED_CHECK:
        raise UsageError(
            f"the check of {project.directory}/nano.toml comes from the project, and nothing trains on what"
            f" you have not trusted: nano-coder trust {project.directory}, or give --check"
        )
    python = python_of(setup.config, project.directory)
    setup = setup._replace(config=setup.config.model_copy(update={"python": python}))
    if setup.config.check:
        return setup
    with open_log(setup.config.log, create=True) as store:
        runs = checked_runs(setup, store)
    if not runs:
        raise UsageError(
            f"there is no check, and no run of {project.directory} had one: give the command that tests it,"
            ' as --check "python -m pytest -q"'
        )
    return setup._replace(config=setup.config.model_copy(update={"check": runs[-1].task.check}))


def _cycle(project: ImprovedProject, setup: Setup, minutes: float, as_json: bool) -> int:
    from nano_rl.improve.cycle import Clock, CycleWork

    began = time.monotonic()
    with project.locked(), open_log(setup.config.log, create=True) as store:
        if fallen := take_back_what_fell(project, setup, store):
            _say(fallen)
        cycle = project.begin(_model(project, setup))
        clock = Clock(began=began, seconds=minutes * 60)
        try:
            cycle = CycleWork(project=project, setup=setup, store=store, clock=clock, say=_say).run(cycle)
        except KeyboardInterrupt:
            raise Interrupted(f"cycle {cycle.number} is cut short; the same command goes on") from None
    emit(cycle, as_json, lambda: print(cycle.said))
    return 0


def _model(project: ImprovedProject, setup: Setup) -> str:
    """The local model that the project uses. Raises UsageError for a hosted one."""
    from nano_coder.models.opening import default_model, find_opener
    from nano_rl.command_setup import look_first

    name = setup.config.model or default_model(project.id)
    if find_opener(name):
        raise UsageError(
            f"{name} is trained where its weights are: name a local model with --model, which learns from the"
            f" checked runs of {name} in this project as demonstrations"
        )
    look_first(models=(name,))
    return name


def take_back_what_fell(project: ImprovedProject, setup: Setup, store: LogStore) -> str | None:
    """Roll back the project's promotion where ordinary checked runs pass more rarely since; what is said
    then."""
    from nano_rl.checkpoints.promotion import read_history, roll_back
    from nano_rl.improve.gate import fallen
    from nano_rl.improve.tasks import checked_runs

    history = read_history(project.id)
    if not history or history[-1].kind == "rolled_back":
        return None
    runs = [run for run in checked_runs(setup, store) if run.reward is not None]
    before = [run.reward == 1 for run in runs if run.started < history[-1].created]
    after = [run.reward == 1 for run in runs if run.started >= history[-1].created]
    if (count := fallen(before, after)) is None:
        return None
    back = roll_back(project=project.id)
    return (
        f"{history[-1].name} is taken back: since its promotion {sum(after[:count])} of {count} checked runs"
        f" passed, of as many before {sum(before[-count:])}; {back.name or 'the usual policy'} runs now"
    )


def _dry_run(project: ImprovedProject, setup: Setup, minutes: float, as_json: bool) -> int:
    from nano_rl.improve.cycle import taught_profile
    from nano_rl.improve.project import ProjectTask, counts
    from nano_rl.improve.tasks import TASKS, checked_runs

    model = _model(project, setup)
    with open_log(setup.config.log, create=True) as store:
        runs = [run.reward == 1 for run in checked_runs(setup, store)]
    known = project.read(TASKS, ProjectTask)
    profile, tasks = taught_profile(setup.config, model, known), counts(known)
    cycles = project.cycles()
    number = len(cycles) + (not cycles or cycles[-1].ended is not None)
    plan = {
        "project": project.id, "directory": str(project.directory), "check": setup.config.check,
        "model": model, "profile": profile, "cycle": number, "minutes": minutes, "runs": len(runs),
        "solved": sum(runs), "tasks": tasks,
    }  # fmt: skip

    def show() -> None:
        print(f"cycle {number} of {project.name}, {minutes:g} minutes")
        print(f"model        {model}, which learns in the profile {profile}")
        print(f"check        {setup.config.check}")
        print(f"runs         {len(runs)} with a check, {sum(runs)} of them solved")
        print(f"tasks so far {_listed(tasks)}")

    emit(plan, as_json, show)
    return 0


def _report(project: ImprovedProject, as_json: bool, *, last: bool) -> int:
    """What is kept of the project, or the grounds of the last decision."""
    from nano_rl.improve.project import ProjectTask, counts
    from nano_rl.improve.tasks import TASKS
    from nano_shared.checkpoint import latest_checkpoint

    cycles = project.cycles()
    if last:
        decided = [cycle for cycle in cycles if cycle.decision] or cycles
        if not decided:
            raise UsageError(f"no cycle of {project.name} has ended; nano-rl improve -C {project.directory}")
        emit(decided[-1], as_json, lambda: _explain(decided[-1]))
        return 0
    promoted = latest_checkpoint(project.id)
    tasks = project.read(TASKS, ProjectTask)
    found = {
        "project": project.id, "directory": str(project.directory), "promoted": promoted and promoted.name,
        "tasks": counts(tasks), "places": _places(tasks),
        "cycles": [cycle.model_dump(mode="json") for cycle in cycles],
    }  # fmt: skip

    def show() -> None:
        print(f"{project.name}  {project.directory}")
        print(f"runs with    {promoted.name if promoted else 'the usual policy'}")
        print(f"tasks        {_listed(counts(tasks))}")
        print(f"places       {_listed(_places(tasks))}")
        for cycle in cycles:
            state = cycle.said or "cut short; the next call goes on"
            print(f"cycle {cycle.number}  {datetime.fromtimestamp(cycle.started):%Y-%m-%d %H:%M}  {state}")

    emit(found, as_json, show)
    return 0


def _explain(cycle: Cycle) -> None:
    from nano_rl.improve.gate import error_of

    print(f"cycle {cycle.number}: {cycle.said}")
    if (decision := cycle.decision) is None:
        return
    print(f"held out     {decision.held_out}; p {decision.held_out.p_better:.4f}, at most"
          f" {error_of(cycle.number):.4f} in cycle {cycle.number}")  # fmt: skip
    print(f"general      {decision.general or 'not measured'}")
    for text in decision.objections:
        print(f"against it   {text}")
    for sign, places in (("+", cycle.gained), ("-", cycle.lost)):
        for place, run in sorted(places.items()):
            print(f"{sign} {place}  nano-coder diff {run}")


def _places(tasks: Sequence[ProjectTask]) -> dict[str, int]:
    places = {(one.part, place) for one in tasks for place in one.places}
    return dict(Counter(str(part) for part, _ in places))


def _listed(counted: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {name.replace('_', ' ')}" for name, number in counted.items()) or "none"


def _move(project: ImprovedProject, as_json: bool, *, undo: bool) -> int:
    """Take back the project's last promotion, or promote its checkpoint for all projects."""
    from nano_rl.checkpoints.promotion import promote, roll_back
    from nano_shared.checkpoint import latest_checkpoint

    if undo:
        moved = roll_back(project=project.id)
    else:
        if (present := latest_checkpoint(project.id)) is None:
            raise UsageError(f"nothing is promoted for {project.name}; nano-rl improve --status shows why")
        moved = promote(present, objections=("promoted for one project by its own tasks",), forced=True)
    where = project.name if undo else "all projects"
    emit(moved, as_json, lambda: print(f"{moved.name or 'the usual policy'} runs for {where} now"))
    return 0
