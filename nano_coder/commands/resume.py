"""`nano-coder resume` and `say`: go on with a run that was killed, or by a message with one that ended."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Annotated

from typer import Argument, Option

from nano_coder.commands.display import Display, exit_code
from nano_coder.commands.options import (
    Limit,
    RunArgument,
    ToolOption,
    Verbose,
    agent_options,
    configured,
    reopen_runtime,
)
from nano_coder.config import AgentConfig
from nano_coder.run.execution import grade_run, refuse_ended, resume_run
from nano_coder.run.fork import refuse_unsaid, say_to_run
from nano_shared.command_line import JsonOption
from nano_shared.settings_options import Settings
from nano_shared.store import LogStore


@agent_options("model", "base_url", "net", "log")
def resume(
    run: RunArgument,
    settings: Settings[AgentConfig],
    verbose: Verbose = False,
    as_json: JsonOption = False,
    limit: Limit = None,
    tools: ToolOption = None,
) -> int:
    """Go on with RUN (an id, the beginning of one, or `last`) from its last finished turn."""
    config, sources = configured(settings, limit=limit, tools=tools)
    store = LogStore.open(config.log, create=False)
    logged = store.get(run)
    refuse_ended(logged)  # before the model is loaded, which takes seconds
    runtime = reopen_runtime(logged, config, sources, store)
    display = Display(quiet=as_json, verbose=verbose)
    runtime = replace(runtime, on_text=display.listener())
    display.start(logged)
    with display.naming_the_run():
        trajectory = grade_run(resume_run(logged.id, runtime, on_turn=display.turn), runtime)
    display.report(trajectory, as_json=as_json)
    return exit_code(trajectory)


@agent_options("model", "base_url", "net", "log")
def say(
    run: RunArgument,
    message: Annotated[str, Argument(metavar="TEXT", help="What to do next, or - for standard input.")],
    settings: Settings[AgentConfig],
    seed: Annotated[int | None, Option(help="Seed of the sampling.")] = None,
    verbose: Verbose = False,
    as_json: JsonOption = False,
    limit: Limit = None,
    tools: ToolOption = None,
) -> int:
    """Go on with RUN (an id, the beginning of one, or `last`), which has ended, with a message.

    The agent works on in the run's workspace and reads all that it read before. It is a run of its own that
    names the other as its parent; `apply` and `diff` of it hold the changes of both.
    """
    config, sources = configured(settings, limit=limit, tools=tools)
    store = LogStore.open(config.log, create=False)
    logged = store.get(run)
    text = sys.stdin.read() if message == "-" else message
    refuse_unsaid(logged, text)  # before the model is loaded, which takes seconds
    runtime = reopen_runtime(logged, config, sources, store)
    display = Display(quiet=as_json, verbose=verbose)
    runtime = replace(runtime, on_text=display.listener())
    with display.naming_the_run():
        trajectory = say_to_run(
            logged, text, runtime, seed=seed, on_start=display.start, on_turn=display.turn
        )
        display.grading(trajectory)
        trajectory = grade_run(trajectory, runtime)
    display.report(trajectory, as_json=as_json)
    return exit_code(trajectory)
