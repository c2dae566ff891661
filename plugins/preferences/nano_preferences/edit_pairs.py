"""Preference pairs from edits: text that a user wrote in place of the policy's, against the policy's text.

An edit of a step contains the better text. An edit of the files of a run gives a pair if an action of the run
contains the edited text: the same action with the text as the user left it is the better one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from posixpath import normpath

from nano_coder.agent.dialects.dialect import DIALECTS
from nano_coder.agent.loop import observation_messages
from nano_coder.agent.profiles import logged_profile, offered_tools, serving_profile
from nano_preferences.pairs import PreferencePair
from nano_rl.imitation import run_messages
from nano_shared import snapshot
from nano_shared.errors import LogError
from nano_shared.logged_run import Feedback, FeedbackKind, edited_workspace
from nano_shared.snapshot import BlobStore, EntryKind, Snapshot
from nano_shared.store import LogStore
from nano_shared.types import JsonValue, Message, Role, ToolCall, Trajectory, Turn

SOURCE = "edit"


def edit_pairs(store: LogStore, run: Trajectory, refused: Counter[str]) -> Iterator[PreferencePair]:
    """A pair of texts for each edit of a run, from the first edited turn to the last, without tokens."""
    for row in store.feedback(run.id):
        if row.kind is not FeedbackKind.EDIT:
            continue
        try:
            texts = _edited_turn(run, row) if row.turn is not None else _edited_files(store, run, row)
        except LogError:
            refused["edit: its files are not in the log's blob store"] += 1
            continue
        if not texts:
            refused["edit: no single action of the run holds what was edited"] += 1
            continue
        if all(run.turns[i].completion.text == text for i, text in texts.items()):
            refused["both runs say the same"] += 1
            continue
        yield _pair(run, texts, store.blobs)


def _pair(run: Trajectory, texts: Mapping[int, str], blobs: BlobStore) -> PreferencePair:
    """The pair of an edit; `texts` maps turns to their better texts."""
    first, last = min(texts), max(texts)
    said_before = run.model_copy(update={"turns": run.turns[:first]})
    before = run_messages(said_before, logged_profile(run), blobs)
    sides: list[list[Message]] = [[], []]
    for turn in run.turns[first : last + 1]:
        said = turn.completion.text
        for side, text in zip(sides, (texts.get(turn.index, said), said), strict=True):
            side.append(Message(role=Role.ASSISTANT, content=text))
            if turn.index < last:
                side += observation_messages(turn)
    return PreferencePair(
        prompt=tuple(before), chosen=tuple(sides[0]), rejected=tuple(sides[1]), source=SOURCE,
        task=run.task.key, task_id=run.task.id, split=run.task.split, rejected_run=run.id,
    )  # fmt: skip


def _edited_turn(run: Trajectory, row: Feedback) -> dict[int, str]:
    assert row.turn is not None
    if row.turn >= len(run.turns):
        return {}
    text = run.turns[row.turn].completion.text
    start, end = row.span or (0, len(text))
    return {row.turn: text[:start] + (row.text or "") + text[end:]}


def _edited_files(store: LogStore, run: Trajectory, row: Feedback) -> dict[int, str]:
    """Turn -> its text with the edited files; empty if a changed file matches no action."""
    workspace = edited_workspace(row)
    if workspace is None or run.last_snapshot is None:
        return {}
    left, edited = snapshot.load(run.last_snapshot, store.blobs), snapshot.load(workspace, store.blobs)
    calls = {turn.index: list(turn.calls) for turn in run.turns}
    touched: set[int] = set()
    for path in snapshot.changed_paths(left, edited):
        old, new = _text(store, left, path), _text(store, edited, path)
        place = None if old is None or new is None else _place(calls, path, old, new)
        if place is None:
            return {}
        turn, number, call = place
        calls[turn][number] = call
        touched.add(turn)
    return {index: _written(run, run.turns[index], calls[index]) for index in touched}


def _place(
    calls: Mapping[int, list[ToolCall]], path: str, old: str, new: str
) -> tuple[int, int, ToolCall] | None:
    """(turn, index of the call, edited call) of the last action that wrote the changed text."""
    for turn in sorted(calls, reverse=True):
        for number, call in enumerate(calls[turn]):
            if normpath(str(call.arguments.get("path", ""))) != path:
                continue
            for name, value in call.arguments.items():
                better = _replaced(value, old, new) if name != "path" else None
                if better is not None:
                    arguments: dict[str, JsonValue] = {**call.arguments, name: better}
                    return turn, number, ToolCall(name=call.name, arguments=arguments)
    return None


def _replaced(value: JsonValue, old: str, new: str) -> str | None:
    """The value that turns `old` into `new` in place of `value`; None if there is none."""
    if not isinstance(value, str) or not value:
        return None
    start = old.find(value)
    while start >= 0:
        before, after = old[:start], old[start + len(value) :]
        if len(new) >= len(before) + len(after) and new.startswith(before) and new.endswith(after):
            return new[len(before) : len(new) - len(after)]
        start = old.find(value, start + 1)
    return None


def _written(run: Trajectory, turn: Turn, calls: list[ToolCall]) -> str:
    profile = serving_profile(logged_profile(run), run.task)
    return DIALECTS[profile.dialect].render(turn.thought, calls, offered_tools(profile, run.task))


def _text(store: LogStore, tree: Snapshot, path: str) -> str | None:
    """The text of a file; None if it is no UTF-8 text file."""
    entry = tree.by_path.get(path)
    if entry is None or entry.kind is not EntryKind.FILE or entry.content is None:
        return None
    try:
        return store.blobs.get(entry.content).decode()
    except UnicodeDecodeError:
        return None
