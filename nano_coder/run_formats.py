"""Formats of runs by name (`nano.run_formats`): what `log export` writes and `log import` reads.

`jsonl` is our own: every run with its verdicts, its feedback and its blobs, and nothing lost. Its first line
is `{"nano_log": 1}`, and a blob comes before the first run that names it. `messages` are OpenAI's, a
conversation a line, as SFT trainers take them: the calls stand in the assistant's text, as the policy wrote
them (`text`), or beside it in `tool_calls` (`native`).
"""

from __future__ import annotations

import base64
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nano_coder.agent.dialects.native import HERMES
from nano_shared import snapshot
from nano_shared.errors import LogError, Refused, UsageError
from nano_shared.extension_points import Extensions
from nano_shared.files import content_hash
from nano_shared.logged_run import LoggedRun
from nano_shared.snapshot import BlobStore
from nano_shared.strict_json import Row, at_place, decoded, json_lines, json_object, validated
from nano_shared.types import Message, Observation, Trajectory, Turn

Read = Callable[[Path, BlobStore | None], Iterable[LoggedRun]]
"""the runs of a file, whose blobs are stored where a store is given; raises Refused with place and field"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFormat:
    """One format of runs. It reads, or writes in one of two ways, or both."""

    name: str
    read: Read | None = None
    write_run: Callable[[LoggedRun, Sequence[Message] | None, list[dict[str, Any]] | None], Row] | None = None
    """a run, its first messages and its tools (None: not known) -> one line of JSON; raises Refused"""
    write_file: Callable[[Iterable[LoggedRun], BlobStore | None, set[str]], Iterator[Row]] | None = None
    """runs, the log's blobs (None: leave them out) and the ids of lost blobs, to add to -> all lines"""
    alone: bool = False
    """a .json file holds one run; a .jsonl file, or a folder, many"""

    @property
    def writes(self) -> bool:
        return any((self.write_run, self.write_file))


RUN_FORMATS: Extensions[RunFormat] = Extensions("nano.run_formats", RunFormat)


def row_reader(reader: Callable[[Row], Iterable[LoggedRun]], *, lines: bool = False) -> Read:
    """Reads a JSON object a file, or one a line: in a .jsonl file, and where `lines` is set in any."""

    def read(path: Path, _: BlobStore | None) -> Iterator[LoggedRun]:
        rows = json_lines(path) if lines or path.suffix == ".jsonl" else [(str(path), _object(path))]
        for where, row in rows:
            with at_place(where):
                found = list(reader(row))
            yield from found

    return read


def session_reader(reader: Callable[[str, Iterable[tuple[str, Row]]], LoggedRun]) -> Read:
    """Reads a file whose lines are one run; `reader` is given its name and its lines with their places."""
    return lambda path, _: [reader(str(path), json_lines(path))]


def _object(file: Path) -> Row:
    with at_place(str(file)):
        try:
            return json_object(decoded(file.read_bytes()))
        except OSError as problem:
            raise Refused("file", f"cannot be read: {problem.strerror}") from None


FORMAT = 1
"""a program reads the formats up to its own"""
_HEADER = "nano_log"
_REMEMBERED = 50_000
"""blobs known to be in the file; of more, some may be written twice, which is harmless"""


def write_log(runs: Iterable[LoggedRun], blobs: BlobStore | None, missing: set[str]) -> Iterator[Row]:
    """The lines of a file, with no blobs where `blobs` is None; ids of those that are lost are added to
    `missing`."""
    yield {_HEADER: FORMAT}
    written: OrderedDict[str, None] = OrderedDict()
    for run in runs:
        for blob in _blobs(run, blobs) if blobs is not None else ():
            assert blobs is not None
            if blob in written:
                written.move_to_end(blob)
                continue
            try:
                data = blobs.get(blob)
            except LogError:
                missing.add(blob)
                continue
            yield {"blob": blob, "base64": base64.b64encode(data).decode()}
            written[blob] = None
            if len(written) > _REMEMBERED:
                written.popitem(last=False)
        yield run.as_json()


def _blobs(run: LoggedRun, blobs: BlobStore) -> Iterator[str]:
    """Every blob that a run names: outputs, snapshots, and the files in those."""
    trajectory = run.trajectory
    trees = [trajectory.task.snapshot, trajectory.snapshot, *(turn.snapshot for turn in trajectory.turns)]
    for tree in dict.fromkeys(tree for tree in trees if tree is not None):
        yield tree
        try:
            entries = snapshot.load(tree, blobs).entries
        except UsageError:  # it is missing, which is said when its own id is read
            continue
        yield from (e.content for e in entries if e.kind is snapshot.EntryKind.FILE and e.content is not None)
    for turn in trajectory.turns:
        yield from (seen.blob for seen in turn.observations if seen.blob is not None)
    yield from (image.blob for image in trajectory.images)


def read_log(path: Path, blobs: BlobStore | None) -> Iterator[tuple[str, LoggedRun]]:
    """The runs of a file with their places, one in memory at a time; blobs are stored where `blobs` is given.

    Raises Refused with file, line and field of the first bad line.
    """
    lines = json_lines(path, finite=False)
    where, header = next(lines, (str(path), {}))
    with at_place(where):
        _check_header(header)
    for where, row in lines:
        with at_place(where):
            if "blob" in row:
                _store(row, blobs)
                continue
            run = validated(LoggedRun, row)
            if run.whole != run.trajectory:
                raise Refused("verdicts", "the last one is not the trajectory's verdict")
        yield where, run


def _check_header(header: Row) -> None:
    version = header.get(_HEADER)
    if type(version) is not int or version < 1:
        raise Refused(_HEADER, "is missing in the first line: nano-coder log export --format jsonl writes it")
    if version > FORMAT:
        raise Refused(
            _HEADER, f"is {version}: a newer nano wrote the file, and this one reads up to {FORMAT}; upgrade"
        )


def _store(row: dict[str, Any], blobs: BlobStore | None) -> None:
    try:
        data = base64.b64decode(row.get("base64", ""), validate=True)
    except (ValueError, TypeError):
        raise Refused("base64", "is not base64") from None
    if content_hash(data) != row["blob"]:
        raise Refused("blob", f"{row['blob']!r:.80} is not the hash of its bytes: the file was changed")
    if blobs is not None:
        blobs.put(data)


NATIVE = RunFormat(
    name="jsonl", read=lambda path, blobs: (run for _, run in read_log(path, blobs)), write_file=write_log
)


Calls = Literal["text", "native"]
SAID_BY_USER = "user"
"""tool of an observation that is a message of the user in the middle of a run"""


def message_rows(
    run: Trajectory,
    opening: Sequence[Message] | None,
    *,
    calls: Calls = "text",
    tools: list[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Raises Refused for a run that has nothing to imitate, or whose first messages nobody knows any more."""
    if not run.turns:
        raise Refused("turns", "it holds no turn")
    if opening is None:
        raise Refused("profile", f"{run.profile} is another one in this version: what it showed is not known")
    rows: list[dict[str, Any]] = [{"role": m.role.value, "content": m.content} for m in opening]
    for turn in run.turns:
        if turn.is_aside:  # the conversation is whole here
            continue
        if run.restates(turn):
            rows = [{"role": m.role.value, "content": m.content} for m in turn.messages]
        rows += _text_rows(turn) if calls == "text" else _native_rows(turn)
    while rows[-1]["role"] != "assistant":  # nothing of the policy follows
        rows.pop()
    return {"messages": rows} | ({"tools": tools} if calls == "native" and tools else {})


def _text_rows(turn: Turn) -> list[dict[str, Any]]:
    seen = [{"role": _role(o), "content": o.text} for o in turn.observations]
    said = turn.completion.text
    if turn.completion.api is not None and turn.completion.api.calls:
        try:
            said = HERMES.render(turn.thought, turn.calls, ())
        except ValueError as problem:
            raise Refused("turns", str(problem)) from None
    return [{"role": "assistant", "content": said}, *seen]


def _native_rows(turn: Turn) -> list[dict[str, Any]]:
    if not turn.calls:
        return _text_rows(turn)
    calls = [
        {
            "id": call_id(turn.index, position),
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for position, call in enumerate(turn.calls)
    ]
    rows: list[dict[str, Any]] = [{"role": "assistant", "content": turn.thought, "tool_calls": calls}]
    for position, observation in enumerate(turn.observations):
        row: dict[str, Any] = {"role": _role(observation), "content": observation.text}
        if row["role"] == "tool" and position < len(turn.calls):
            row |= {"tool_call_id": calls[position]["id"], "name": turn.calls[position].name}
        rows.append(row)
    return rows


def _role(observation: Observation) -> str:
    return "user" if observation.tool == SAID_BY_USER else "tool"


def call_id(turn: int, position: int) -> str:
    return f"call_{turn}_{position}"


MESSAGES = RunFormat(
    name="messages", write_run=lambda run, opening, tools: message_rows(run.trajectory, opening, tools=tools)
)
