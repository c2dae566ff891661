"""Session files of Claude Code and of Codex, as text-only runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from nano_coder.run_formats import RunFormat, session_reader
from nano_formats.responses_items import take_item, text_of
from nano_formats.transcript import Transcript, unix
from nano_shared.errors import Refused
from nano_shared.files import content_hash
from nano_shared.logged_run import LoggedRun
from nano_shared.strict_json import Row, at_field, at_place
from nano_shared.types import Finish, Role, StopReason

_SYNTHETIC = "<synthetic>"
"""model of messages that the program wrote in the model's name, such as errors of its server"""
_CALLS = frozenset({"tool_use", "server_tool_use", "mcp_tool_use"})


def read_claude(name: str, lines: Iterable[tuple[str, Row]]) -> LoggedRun:
    """The run of a session; `name` is the file's. Raises Refused with place and field."""
    records = [(where, row) for where, row in lines if row.get("type") in ("user", "assistant", "system")]
    transcript = Transcript(format="claude-code", agent="claude-code")
    way = list(_way(records))
    for where, row in way:
        with at_place(where):
            _take_claude(transcript, row)
    last = transcript.steps[-1] if transcript.steps else None
    waiting = last is None or (bool(last.calls) and len(last.answers) < len(last.calls)) or last.closed
    stop = StopReason.INTERRUPTED if waiting else StopReason.FINISHED
    with at_place(name):
        return transcript.run(content_hash([row for _, row in way]), stop=stop)


def _way(records: list[tuple[str, Row]]) -> Iterator[tuple[str, Row]]:
    """The records from the first message to the newest one, with every result of a call on the way."""
    by_id = {row["uuid"]: row for _, row in records if isinstance(row.get("uuid"), str)}
    spoken = [row for _, row in records if row["type"] != "system" and not row.get("isSidechain")]
    on_way: set[str] = set()
    here = spoken[-1].get("uuid") if spoken else None
    while isinstance(here, str) and here in by_id and here not in on_way:
        on_way.add(here)
        here = by_id[here].get("parentUuid") or by_id[here].get("logicalParentUuid")
    calls = {
        block.get("id") for row in spoken if row.get("uuid") in on_way for block in _blocks(row)
        if block.get("type") in _CALLS
    }  # fmt: skip
    for where, row in records:
        answers = any(b.get("type") == "tool_result" and b.get("tool_use_id") in calls for b in _blocks(row))
        # results of calls made at once hang on their calls, beside the way
        if row["type"] != "system" and not row.get("isSidechain") and (row.get("uuid") in on_way or answers):
            yield where, row


def _blocks(row: Row) -> list[Row]:
    message = row.get("message")
    content = message.get("content") if isinstance(message, dict) else None
    return [b for b in content if isinstance(b, dict)] if isinstance(content, list) else []


def _take_claude(transcript: Transcript, row: Row) -> None:
    transcript.now = unix(row.get("timestamp"), transcript.now, "timestamp")
    if isinstance(row.get("version"), str):
        transcript.agent = f"claude-code {row['version']}"
    message = row.get("message")
    if not isinstance(message, dict):
        raise Refused("message", "must be an object")
    content = message.get("content")
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise Refused("message.content", "must be text or a list of blocks")
    for number, block in enumerate(content):
        with at_field(f"message.content.{number}"):
            if row["type"] == "user":
                _read(transcript, block)
            elif message.get("model") != _SYNTHETIC and not row.get("isApiErrorMessage"):
                _wrote(transcript, message, block)


def _read(transcript: Transcript, block: Row) -> None:
    kind = block.get("type")
    if kind == "tool_result":
        text = text_of(block.get("content"), "content")
        transcript.answer(str(block.get("tool_use_id")), text, ok=block.get("is_error") is not True)
    elif kind == "text":
        if text := text_of([block], "text"):
            transcript.tell(Role.USER, text)
    elif kind in ("image", "document"):
        transcript.tell(Role.USER, f"[{kind} left out]")
    else:
        raise Refused("type", f"{kind!r:.40} is no block of a user that this program knows")


def _wrote(transcript: Transcript, message: Row, block: Row) -> None:
    kind, key, model = block.get("type"), message.get("id"), message.get("model")
    step = transcript.step(key=_text(key), model=_text(model))
    if isinstance(model, str) and transcript.model == "unknown":
        transcript.model = model
    if message.get("stop_reason") == "max_tokens":
        step.finish = Finish.LENGTH
    if kind == "text":
        text = text_of([block], "text")
        step.said += [text] if text else []
    elif kind == "thinking":
        thinking = block.get("thinking")
        step.reasoned += [thinking] if isinstance(thinking, str) and thinking else []
    elif kind in _CALLS:
        name, given, call_id = block.get("name"), block.get("input"), block.get("id")
        if not (isinstance(name, str) and isinstance(call_id, str)):
            raise Refused("id" if isinstance(name, str) else "name", "must be text")
        transcript.call(step, call_id, name, given if isinstance(given, dict) else {"input": given})
    elif isinstance(kind, str) and kind.endswith("_tool_result"):  # of a tool that the server ran
        transcript.answer(str(block.get("tool_use_id")), text_of(block.get("content"), "content"))
    elif kind not in ("redacted_thinking", "fallback"):
        raise Refused("type", f"{kind!r:.40} is no block of the model that this program knows")


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


CLAUDE_CODE = RunFormat(name="claude-code", read=session_reader(read_claude))


_RECORDS = {"session_meta", "response_item", "turn_context", "event_msg", "compacted", "world_state"}
_LEFT_OUT = {"ghost_snapshot", "other", "compaction", "compaction_summary", "image_generation_call"}
"""items that the model neither wrote as text nor read as such"""


def read_codex(name: str, lines: Iterable[tuple[str, Row]]) -> LoggedRun:
    """The run of a session; `name` is the file's. Raises Refused with place and field."""
    transcript = Transcript(format="codex", agent="codex")
    model, stop, digest = None, StopReason.FINISHED, "sha256:"
    for where, row in lines:
        digest = content_hash([digest, row])
        with at_place(where):
            kind, payload = _record(row)
            transcript.now = unix(row.get("timestamp"), transcript.now, "timestamp")
            if kind == "session_meta":
                _meet(transcript, payload)
            elif kind == "turn_context":
                model = str(payload.get("model") or model or "unknown")
                transcript.model = model
            elif kind == "compacted" and payload.get("message"):
                transcript.tell(Role.USER, str(payload["message"]))
            elif kind == "event_msg":
                stop = _event(transcript, payload, stop)
            elif kind == "response_item" and payload.get("type") not in _LEFT_OUT:
                take_item(transcript, payload, model)
    with at_place(name):
        return transcript.run(digest, stop=stop)


def _record(row: Row) -> tuple[str, Row]:
    kind, payload = row.get("type"), row.get("payload")
    if payload is None and "record_type" in row:  # files of 2025 hold bare items
        return "state", {}
    if payload is None and isinstance(row.get("id"), str) and kind is None:
        return "session_meta", row
    if payload is None:
        return "response_item", row
    if not isinstance(payload, dict):
        raise Refused("payload", "must be an object")
    if kind not in _RECORDS:
        raise Refused("type", f"{kind!r:.40} is no record that this program knows: Codex may be newer")
    return str(kind), payload


def _meet(transcript: Transcript, payload: Row) -> None:
    version = payload.get("cli_version")
    transcript.agent = f"codex {version}" if version else "codex"
    given = payload.get("base_instructions") or payload.get("instructions")
    text = given.get("text") if isinstance(given, dict) else given
    if isinstance(text, str) and text and not transcript.opening:
        transcript.tell(Role.SYSTEM, text)


def _event(transcript: Transcript, payload: Row, stop: StopReason) -> StopReason:
    """Why the session would have ended here."""
    kind = payload.get("type")
    if kind in ("task_started", "turn_started", "user_message"):
        return StopReason.INTERRUPTED
    if kind in ("task_complete", "turn_complete"):
        return StopReason.FINISHED
    if kind == "turn_aborted":
        return StopReason.INTERRUPTED
    if kind == "thread_rolled_back":
        _roll_back(transcript, payload.get("num_turns"))
    return stop


def _roll_back(transcript: Transcript, turns: object) -> None:
    """Take back the user's last messages and all that followed them."""
    if type(turns) is not int or turns < 0:
        raise Refused("payload.num_turns", f"must be a number from 0, not {turns!r:.40}")
    for _ in range(turns):
        while transcript.steps and not transcript.steps[-1].after:
            transcript.steps.pop()
        if transcript.steps:
            transcript.steps[-1].after.pop()


CODEX = RunFormat(name="codex", read=session_reader(read_codex))
