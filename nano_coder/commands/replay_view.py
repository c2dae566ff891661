"""A run step by step, for `nano-coder replay --view`: prompt, thought, action, observation, tokens."""

from __future__ import annotations

import json
from typing import Any

from rich.text import Text

from nano_coder.commands.display import outcome
from nano_shared.console import Console
from nano_shared.printable import printable
from nano_shared.types import Trajectory, Turn


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
