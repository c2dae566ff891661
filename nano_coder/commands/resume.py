"""`nano-coder resume`: go on with a run that was killed or interrupted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from nano_coder.commands.display import Display, exit_code, summary
from nano_coder.commands.options import (
    Limit,
    RunArgument,
    ToolOption,
    Verbose,
    agent_options,
    configured,
    earlier_history,
    open_runtime,
)
from nano_coder.config import AgentConfig, said_limits
from nano_coder.run.execution import grade_run, refuse_ended, resume_run
from nano_shared.command_line import JsonOption
from nano_shared.settings_options import Settings
from nano_shared.store import LogStore


@agent_options("model", "base_url", "log", shown=False)
def command(
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
    runtime = open_runtime(
        config, Path(logged.directory or ""), store, model=config.model or logged.policy,
        limits=said_limits(config, sources),
    )  # fmt: skip
    runtime = replace(runtime, history=earlier_history(logged, config))
    display = Display(quiet=as_json, verbose=verbose)
    display.start(logged)
    with display.naming_the_run():
        trajectory = grade_run(resume_run(logged.id, runtime, on_turn=display.turn), runtime)
    if as_json:
        print(json.dumps(summary(trajectory, applied=False)))
    else:
        display.end(trajectory, applied=False)
    return exit_code(trajectory)
