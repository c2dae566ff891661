"""`nano-coder replay`: look at a run, execute its actions again, or prove the prompts that it was given."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from nano_shared.errors import UsageError
from nano_shared.printable import printable
from nano_shared.store import LogStore
from nano_shared.types import Trajectory

if TYPE_CHECKING:
    from nano_coder.models.replayed import PromptRenderer
    from nano_coder.run.replay import Executed, Refed
    from nano_coder.run.replay_differences import Drift
from rich.text import Text

from nano_coder.commands.display import outcome
from nano_coder.commands.options import Log, ToolOption, open_log
from nano_coder.tools.registry import TOOLS
from nano_shared.command_line import JsonOption
from nano_shared.console import Console
from nano_shared.types import Turn


def show(run: Trajectory, step: int | None) -> None:
    """Print a run, or one step of it, to standard output."""
    console = Console(soft_wrap=True)
    parent = f", forked from {run.parent} after step {run.inherited}" if run.parent else ""
    console.print(Text(f"run {run.id}", "bold"), f"by {printable(run.policy)}{parent}")
    if step is None or step == 1:
        console.print("prompt", style="bold")
        console.print(printable(run.task.prompt))
    for turn in run.turns if step is None else run.turns[step - 1 : step]:
        _step(console, run, turn)
    if step is None:
        end = run.stop or "not ended"
        console.print(f"\nstopped: {end}; check: {printable(outcome(run))}")


def _step(console: Console, run: Trajectory, turn: Turn) -> None:
    whose = " (of the parent)" if turn.index < run.inherited else ""
    console.print(Text(f"\nstep {turn.index + 1} of {len(run.turns)}{whose}:", "bold cyan"), _tokens(turn))
    if turn.thought:
        console.print(Text("thought:", "dim"), printable(turn.thought))
    if turn.parse_error:
        console.print(Text("written:", "dim"), printable(turn.completion.text))
    for call in turn.calls:
        console.print(Text("action:", "dim"), Text(printable(call.name), "bold"))
        for name, value in call.arguments.items():
            text = value if isinstance(value, str) else json.dumps(value)
            console.print(f"  {printable(name)}: {printable(text)}")
    for observation in turn.observations:
        colour = "green" if observation.ok else "yellow"
        size = f", cut from {observation.bytes_total} bytes" if observation.truncated else ""
        console.print(Text("observation", "dim"), f"({observation.ended - observation.started:.2f} s{size}):")
        for line in printable(observation.text).splitlines():
            console.print(Text("│", colour), line)
        if observation.files_changed:
            console.print(Text("files:", "dim"), printable(" ".join(observation.files_changed)))


def _tokens(turn: Turn) -> str:
    tokens = turn.completion.tokens
    if tokens is None:
        return "text-only, no tokens"
    sampled = len(tokens.sampled_ids)
    mean = sum(tokens.logprobs) / sampled if sampled else 0.0
    row = f", row {tokens.row}" if tokens.row else ""
    return f"{len(tokens.context_ids)} tokens read, {sampled} sampled, mean log-prob {mean:.3f}{row}"


def as_rows(run: Trajectory, step: int | None) -> dict[str, Any]:
    """The same as JSON."""
    turns = run.turns if step is None else run.turns[step - 1 : step]
    return {
        "run": run.id,
        "policy": run.policy,
        "parent": run.parent,
        "parent_step": run.parent_step,
        "prompt": run.task.prompt,
        "stop": run.stop,
        "reward": run.reward,
        "steps": [turn.model_dump(mode="json") for turn in turns],
    }


_SHOWN = 60
"""characters of either side of a drift that a line shows; --json has more"""


def command(
    runs: Annotated[list[str] | None, Argument(metavar="RUN")] = None,
    view: Annotated[bool, Option("--view", help="Look at it, step by step.")] = False,
    execute: Annotated[bool, Option("--execute", help="Execute its actions again and report drift.")] = False,
    refeed: Annotated[bool, Option("--refeed", help="Prove its prompts token-identical today.")] = False,
    every: Annotated[bool, Option("--all", help="Every run of the log.")] = False,
    step: Annotated[
        int | None, Option(min=1, help="With --view: this step alone, as `log show` counts.")
    ] = None,
    model: Annotated[
        str | None, Option(help="With --refeed: whose tokenizer, where the model lies elsewhere now.")
    ] = None,
    sandbox: Annotated[
        str | None, Option(help="With --execute: isolation; ns, bwrap, none, or one of an extension.")
    ] = None,
    tools: ToolOption = None,
    log: Log = None,
    as_json: JsonOption = False,
) -> int:
    """Replay RUN (an id, the beginning of one, or `last`) in one of three ways.

    --execute restores the workspace that the run started with, executes the recorded actions in the sandbox
    through the same tools, and names the cause of every drift: time, randomness, path/pid, other. Exit code 1
    where something drifted that is neither time nor randomness.

    --refeed feeds the recorded samples through today's runtime and compares every prompt with the log, token
    by token. Exit code 1 where one differs. Neither writes to the log.
    """
    runs = runs or []
    way = _way({"view": view, "execute": execute, "refeed": refeed})
    _refuse_contradictions(runs, way, every, {"step": step, "model": model, "sandbox": sandbox})
    store = open_log(log)
    chosen = store.trajectories() if every else (store.get(run) for run in runs)
    if way == "view":
        return _view(chosen, step, as_json)
    for tool in tools or []:
        TOOLS.give(tool)
    if way == "execute":
        return _execute(chosen, store, sandbox, as_json)
    return _refeed(chosen, store, model, as_json, every)


def _way(flags: dict[str, bool]) -> str:
    """The one kind of replay that is asked for. Raises UsageError for none and for several."""
    given = [way for way, on in flags.items() if on]
    if not given:
        raise UsageError("say how to replay: --view, --execute or --refeed")
    if len(given) > 1:
        named = " and ".join(f"--{way}" for way in given)
        raise UsageError(f"{named} are different kinds of replay; give one of them")
    return given[0]


def _refuse_contradictions(runs: Sequence[str], way: str, every: bool, options: dict[str, object]) -> None:
    if every == bool(runs):
        raise UsageError("name the runs to replay, or give --all for every run of the log, not both")
    for option, belongs in (("step", "view"), ("model", "refeed"), ("sandbox", "execute")):
        if options[option] is not None and way != belongs:
            raise UsageError(f"--{option} belongs to --{belongs}, not to --{way}")


def _view(runs: Iterable[Trajectory], step: int | None, as_json: bool) -> int:
    shown = []
    for run in runs:
        if step is not None and step > len(run.turns):
            raise UsageError(f"run {run.id} has no step {step}: it has {len(run.turns)}")
        if as_json:
            shown.append(as_rows(run, step))
        else:
            show(run, step)
    if as_json:
        print(json.dumps({"runs": shown}))
    return 0


# ---------------------------------------------------------------------------------------- execute


def _execute(runs: Iterable[Trajectory], store: LogStore, sandbox: str | None, as_json: bool) -> int:
    from nano_coder.config import load_config
    from nano_coder.run.replay import execute
    from nano_coder.sandbox.backend import open_sandbox

    config = load_config({"sandbox": sandbox}, Path())[0]
    jail = open_sandbox(config.sandbox, python=config.python, image=config.image)
    results = []
    for run in runs:
        results.append(execute(run, jail, store.blobs))
        if not as_json:
            _print_executed(results[-1])
    failed = sum(not result.holds for result in results)
    if as_json:
        print(json.dumps({"runs": [_executed_row(r) for r in results], "drifted": failed}))
    elif len(results) > 1:
        print(f"{len(results) - failed} of {len(results)} runs drifted by nothing but time and randomness")
    return int(failed > 0)


def _print_executed(result: Executed) -> None:
    count = f"{len(result.drifts)} drifts" if result.drifts else "nothing drifted"
    print(f"run {result.run}: {result.actions} actions executed again, {count}")
    for drift in result.drifts:
        print(f"  {_place(drift)}: {drift.cause}: {_short(drift.logged)} -> {_short(drift.now)}")


def _place(drift: Drift) -> str:
    call = "" if drift.call is None else f" call {drift.call + 1}"
    return f"step {drift.turn + 1}{call}, {printable(drift.what)}"


def _short(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "...")


def _executed_row(result: Executed) -> dict[str, Any]:
    drifts = [drift.as_dict() for drift in result.drifts]
    return {"run": result.run, "actions": result.actions, "holds": result.holds, "drifts": drifts}


# ----------------------------------------------------------------------------------------- refeed


def _refeed(
    runs: Iterable[Trajectory], store: LogStore, model: str | None, as_json: bool, every: bool
) -> int:
    from nano_coder.run.replay import refeed

    readers: dict[tuple[str, ...], PromptRenderer | None] = {}
    results: list[Refed] = []
    refused: dict[str, str] = {}
    for run in runs:
        try:
            result = refeed(run, _reader(run, model, readers), store.blobs)
        except UsageError as problem:
            if not every:
                raise
            refused[run.id] = str(problem)  # the other runs are still replayed
            continue
        results.append(result)
        if not as_json:
            print("\n".join(_refed_lines(result)))
    failed = sum(not result.holds for result in results)
    if as_json:
        rows = [_refed_row(result) for result in results]
        print(json.dumps({"runs": rows, "differing": failed, "refused": refused}))
    else:
        for run_id, why in refused.items():
            print(f"run {run_id}: not replayed: {printable(why)}")
        if every or len(results) > 1:
            whole = sum(r.holds and r.proved == len(r.prompts) for r in results)
            print(f"{whole} of {len(results) + len(refused)} runs token-identical, {failed} differ")
    return 1 if failed else 2 if refused else 0


def _reader(
    run: Trajectory, model: str | None, known: dict[tuple[str, ...], PromptRenderer | None]
) -> PromptRenderer | None:
    """The reader of a run; each tokenizer is loaded once."""
    from nano_coder.models.opening import open_renderer

    if not any(turn.completion.tokens for turn in run.turns):
        return None
    key = (run.policy, run.profile, run.template_hash)
    if key not in known:
        known[key] = open_renderer(run, model)
    return known[key]


def _refed_lines(result: Refed) -> Iterator[str]:
    tokens = sum(prompt.tokens for prompt in result.prompts if prompt.identical)
    prompts = f"{result.proved} of {len(result.prompts)} prompts token-identical"
    yield f"run {result.run}: {prompts} ({tokens} tokens)"
    first = result.first_difference
    if first is not None:
        yield (
            f"  step {first.turn + 1} differs at token {first.differs_at} of its prompt:"
            f" logged {first.logged}, rendered {first.rendered}"
        )
    yield from (f"  step {found.turn + 1}: {found.what}" for found in result.differences)
    reasons = dict.fromkeys(prompt.not_compared for prompt in result.prompts if prompt.not_compared)
    for reason in reasons:
        steps = ", ".join(str(p.turn + 1) for p in result.prompts if p.not_compared == reason)
        yield f"  not proved, steps {steps}: {reason}"
    yield from (f"  {note}" for note in result.notes)


def _refed_row(result: Refed) -> dict[str, Any]:
    return {"holds": result.holds, "proved": result.proved} | asdict(result)
