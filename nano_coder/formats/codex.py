"""Codex's rollout files, a session a file, as text-only runs."""

from __future__ import annotations

from collections.abc import Iterable

from nano_coder.formats.responses_items import take_item
from nano_coder.formats.run_format import RunFormat, session_reader
from nano_coder.formats.transcript import Transcript, unix
from nano_shared.hashing import content_hash
from nano_shared.logged_run import LoggedRun
from nano_shared.refusal import Refused
from nano_shared.strict_json import Row, at_place
from nano_shared.types import Role, StopReason

_RECORDS = frozenset(
    {"session_meta", "response_item", "turn_context", "event_msg", "compacted", "world_state"}
)
_LEFT_OUT = frozenset(
    {"ghost_snapshot", "other", "compaction", "compaction_summary", "image_generation_call"}
)
"""items that the model neither wrote as text nor read as such"""


def read(name: str, lines: Iterable[tuple[str, Row]]) -> LoggedRun:
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


CODEX = RunFormat(name="codex", read=session_reader(read))
