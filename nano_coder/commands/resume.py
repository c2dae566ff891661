"""`nano-coder resume`, `say`, `chat` and `fork`: what goes on with a logged run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from nano_coder.commands.changes import apply_to
from nano_coder.commands.display import Display, exit_code, outcome, summary
from nano_coder.commands.options import (
    DirectoryOption,
    RunArgument,
    Setup,
    Verbose,
    agent_options,
    reopen_runtime,
)
from nano_coder.commands.run import make_task, open_work, take_snapshot
from nano_coder.config import open_store
from nano_coder.run.execution import Runtime, grade_run, refuse_ended, resume_run, run_task, with_limits
from nano_coder.run.fork import fork_run, refuse_step, refuse_unsaid, say_to_run
from nano_shared.command_line import Console, JsonOption, emit
from nano_shared.errors import CheckpointError, NanoError, UsageError
from nano_shared.printable import printable
from nano_shared.store import LogStore
from nano_shared.types import Trajectory, Value


@agent_options("model", "base_url", "net", "log")
def resume(
    run: RunArgument,
    setup: Setup,
    directory: DirectoryOption = Path(),
    verbose: Verbose = False,
    as_json: JsonOption = False,
) -> int:
    """Go on with RUN (an id, the beginning of one, or `last`) from its last finished turn."""

    def go_on(logged: Trajectory, runtime: Runtime) -> Trajectory:
        runtime.hooks.start(logged)
        return resume_run(logged.id, runtime)

    return _continued(run, setup, refuse_ended, go_on, verbose=verbose, as_json=as_json)


@agent_options("model", "base_url", "net", "log")
def say(
    run: RunArgument,
    message: Annotated[str, Argument(metavar="TEXT", help="What to do next, or - for standard input.")],
    setup: Setup,
    directory: DirectoryOption = Path(),
    seed: Annotated[int | None, Option(help="Seed of the sampling.")] = None,
    verbose: Verbose = False,
    as_json: JsonOption = False,
) -> int:
    """Go on with RUN (an id, the beginning of one, or `last`), which has ended, with a message.

    The agent works on in the run's workspace and reads all that it read before. It is a run of its own that
    names the other as its parent; `apply` and `diff` of it hold the changes of both.
    """
    text = sys.stdin.read() if message == "-" else message
    return _continued(
        run, setup, lambda logged: refuse_unsaid(logged, text),
        lambda logged, runtime: say_to_run(logged, text, runtime, seed=seed),
        verbose=verbose, as_json=as_json,
    )  # fmt: skip


def _continued(
    run: str, setup: Setup, refuse: Callable[[Trajectory], None],
    go_on: Callable[[Trajectory, Runtime], Trajectory], *, verbose: bool, as_json: bool,
) -> int:  # fmt: skip
    """Go on with a logged run, grade it and show its end. `refuse` comes before the model, which takes
    seconds to load."""
    store = open_store(setup.config, setup.directory, create=False)
    logged = store.get(run)
    refuse(logged)
    display = Display(quiet=as_json, verbose=verbose, base_url=setup.config.base_url)
    runtime = replace(reopen_runtime(logged, setup, store), hooks=display.hooks())
    with display.naming_the_run():
        trajectory = grade_run(go_on(logged, runtime), runtime)
    emit(summary(trajectory, applied=False), as_json, lambda: display.end(trajectory, applied=False))
    return exit_code(trajectory)


class Fork(Value):
    run: str
    seed: int | None
    stop: str | None
    reward: float | None
    turns: int
    sampled_tokens: int
    trust: str | None


class Forks(Value):
    """The continuations of one step."""

    parent: str
    step: int
    group: str
    forks: tuple[Fork, ...]
    succeeded: int
    success_rate: float

    def __str__(self) -> str:
        count = len(self.forks)
        unscored = sum(fork.reward is None for fork in self.forks)
        return (
            f"{self.succeeded} of {count} forks of {self.parent} at step {self.step} succeeded"
            f" ({self.success_rate:.0%}){f', {unscored} without a reward' if unscored else ''}"
        )


@agent_options("model", "base_url", "temperature", "net", "log")
def fork(
    run: RunArgument,
    setup: Setup,
    at: Annotated[int, Option(metavar="STEP", help="As `log show` counts them; 0 is the start.")],
    directory: DirectoryOption = Path(),
    n: Annotated[int, Option("--n", min=1, help="Continuations.")] = 8,
    seed: Annotated[
        int | None, Option(help="Seed of the sampling; without it each call samples anew.")
    ] = None,
    check: Annotated[
        str | None, Option(help="Shell line that grades the forks, which do not see it; else as the run was.")
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Sample N continuations of RUN (an id, the beginning of one, or `last`) from after STEP.

    Files and tokens are restored exactly: the first tokens of each fork are those of the log. Each is a run
    of its own that names its parent and the step; forks of one step form a group that can be trained on.
    Without --temperature they are sampled at 1. Exit code 0 where one succeeds, 1 where none does.
    """
    if check is not None and not check.strip():
        raise UsageError("--check is empty; give a shell line, or leave it out to grade as the run was")
    if setup.sources["temperature"] == "default":
        setup = setup._replace(config=setup.config.model_copy(update={"temperature": 1.0}))
    store = open_store(setup.config, setup.directory, create=False)
    parent = store.get(run)
    parent = parent.model_copy(update={"task": with_limits(parent.task, setup.limits)})
    refuse_step(parent, at)  # before the model is loaded, which takes seconds
    try:
        runtime = reopen_runtime(parent, setup, store)
    except UsageError as problem:
        if setup.config.model or isinstance(problem, CheckpointError):
            raise
        raise UsageError(
            f"run {parent.id} was made by {parent.policy!r}, which is not at hand; name a model with --model"
            f" ({problem})"
        ) from None
    console = Console(quiet=as_json, soft_wrap=True)
    forks = fork_run(
        parent, runtime, at=at, n=n, seed=seed, check=check, on_run=lambda fork: _line(console, fork)
    )
    succeeded = sum(exit_code(fork) == 0 for fork in forks)
    rows = [
        Fork(
            run=one.id, seed=one.seed, stop=one.stop, reward=one.reward, turns=len(one.own_turns),
            sampled_tokens=one.num_sampled_tokens, trust=one.verdict.trust if one.verdict else None,
        )
        for one in forks
    ]  # fmt: skip
    result = Forks(
        parent=parent.id, step=at, group=forks[0].group_key, forks=tuple(rows), succeeded=succeeded,
        success_rate=succeeded / n,
    )  # fmt: skip
    emit(result, as_json, lambda: console.print(str(result)))
    return int(succeeded == 0)


def _line(console: Console, fork: Trajectory) -> None:
    reward = "-" if fork.reward is None else f"{fork.reward:g}"
    end = printable(f"{fork.stop}{f' ({fork.stop_detail})' if fork.stop_detail else ''}")
    console.print(
        f"fork {fork.id}: reward {reward}, {len(fork.own_turns)} turns, {fork.num_sampled_tokens} tokens,"
        f" {end}; check: {printable(outcome(fork))}"
    )


_HELP = (
    "/diff shows the changes, /apply applies them, /quit ends; Ctrl-C interrupts a run, to say something else"
)


@agent_options("model", "base_url", "profile", "check", "net", "log")
def chat(
    setup: Setup,
    message: Annotated[str | None, Argument(metavar="[TEXT]", help="The first message.")] = None,
    directory: DirectoryOption = Path(),
    verbose: Verbose = False,
) -> int:
    """Work on DIR in a conversation: each message goes on where the one before ended, in a copy of DIR.

    Every message is a run of the log, so `log show`, `fork`, `apply` and the training know it. Nothing is
    applied before you say /apply.
    """
    store = open_store(setup.config, directory)
    runtime = open_work(setup, store)
    print(_HELP, file=sys.stderr)
    run: Trajectory | None = None
    while (text := message or _typed_line()) is not None:
        message = None
        if text.startswith("/"):
            if text == "/quit":
                break
            _order(text, run, directory, store)
        elif text.strip():
            run = _answered(text, run, runtime, setup, Display(quiet=False, verbose=verbose))
    return 0


def _typed_line() -> str | None:
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
    runtime = replace(runtime, hooks=display.hooks())
    try:
        if run is None or not run.turns:
            task = make_task(text, take_snapshot(setup, runtime.store), setup, runtime)
            run = grade_run(run_task(task, runtime), runtime)
        else:
            run = grade_run(say_to_run(run, text, runtime), runtime)
    except NanoError as problem:
        if run is None:
            raise
        print(printable(str(problem)), file=sys.stderr)
        return run
    display.answered(run)
    return run
