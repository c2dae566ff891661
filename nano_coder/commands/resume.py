"""`nano-coder resume`, `say` and `fork`: go on with a run that was killed, that ended, or from its steps."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Annotated, Any

from typer import Argument, Option

from nano_coder.commands.display import Display, exit_code, outcome
from nano_coder.commands.options import (
    Limit,
    RunArgument,
    ToolOption,
    Verbose,
    agent_options,
    configured,
    reopen_runtime,
)
from nano_coder.config import AgentConfig, said_limits
from nano_coder.run.execution import grade_run, refuse_ended, resume_run, with_limits
from nano_coder.run.fork import refuse_unsaid, say_to_run
from nano_shared.command_line import JsonOption
from nano_shared.console import Console
from nano_shared.errors import CheckpointError, UsageError
from nano_shared.printable import printable
from nano_shared.settings_options import Settings
from nano_shared.store import LogStore
from nano_shared.types import Trajectory


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


@agent_options("model", "base_url", "temperature", "net", "log")
def fork(
    run: RunArgument,
    settings: Settings[AgentConfig],
    at: Annotated[int, Option(metavar="STEP", help="As `log show` counts them; 0 is the start.")],
    n: Annotated[int, Option("--n", min=1, help="Continuations.")] = 8,
    seed: Annotated[
        int | None, Option(help="Seed of the sampling; without it each call samples anew.")
    ] = None,
    check: Annotated[
        str | None, Option(help="Shell line that grades the forks, which do not see it; else as the run was.")
    ] = None,
    as_json: JsonOption = False,
    limit: Limit = None,
    tools: ToolOption = None,
) -> int:
    """Sample N continuations of RUN (an id, the beginning of one, or `last`) from after STEP.

    Files and tokens are restored exactly: the first tokens of each fork are those of the log. Each is a run
    of its own that names its parent and the step; forks of one step form a group that can be trained on.
    Without --temperature they are sampled at 1. Exit code 0 where one succeeds, 1 where none does.
    """
    from nano_coder.run.fork import fork_run, refuse_step

    config, sources = configured(settings, limit=limit, tools=tools)
    if check is not None and not check.strip():
        raise UsageError("--check is empty; give a shell line, or leave it out to grade as the run was")
    if sources["temperature"] == "default":
        config = config.model_copy(update={"temperature": 1.0})
    store = LogStore.open(config.log, create=False)
    parent, limits = store.get(run), said_limits(config, sources)
    parent = parent.model_copy(update={"task": with_limits(parent.task, limits)})
    refuse_step(parent, at)  # before the model is loaded, which takes seconds
    try:
        runtime = reopen_runtime(parent, config, sources, store)
    except UsageError as problem:
        if config.model or isinstance(problem, CheckpointError):
            raise
        raise UsageError(
            f"run {parent.id} was made by {parent.policy!r}, which is not at hand; name a model with --model"
            f" ({problem})"
        ) from None
    console = Console(quiet=as_json, soft_wrap=True)
    forks = fork_run(
        parent, runtime, at=at, n=n, seed=seed, check=check, on_run=lambda fork: _line(console, fork)
    )
    scored = [fork.reward for fork in forks if fork.reward is not None]
    succeeded = sum(exit_code(fork) == 0 for fork in forks)
    if as_json:
        print(json.dumps(_report(parent, at, forks, succeeded)))
    else:
        unscored = f", {n - len(scored)} without a reward" if len(scored) < n else ""
        console.print(
            f"{succeeded} of {n} forks of {parent.id} at step {at} succeeded ({succeeded / n:.0%}){unscored}"
        )
    return int(succeeded == 0)


def _line(console: Console, fork: Trajectory) -> None:
    reward = "-" if fork.reward is None else f"{fork.reward:g}"
    end = printable(f"{fork.stop}{f' ({fork.stop_detail})' if fork.stop_detail else ''}")
    console.print(
        f"fork {fork.id}: reward {reward}, {len(fork.own_turns)} turns, {fork.num_sampled_tokens} tokens,"
        f" {end}; check: {printable(outcome(fork))}"
    )


def _report(parent: Trajectory, at: int, forks: list[Trajectory], succeeded: int) -> dict[str, Any]:
    return {
        "parent": parent.id,
        "step": at,
        "group": forks[0].group_key,
        "forks": [
            {
                "run": fork.id,
                "seed": fork.seed,
                "stop": fork.stop,
                "reward": fork.reward,
                "turns": len(fork.own_turns),
                "sampled_tokens": fork.num_sampled_tokens,
                "trust": fork.verdict.trust if fork.verdict else None,
            }
            for fork in forks
        ],
        "succeeded": succeeded,
        "success_rate": succeeded / len(forks),
    }
