"""mini-swe-agent's trajectory files, as text-only runs."""

from __future__ import annotations

from typing import Any

from nano_coder.formats import RunFormat, row_reader
from nano_formats.responses_items import arguments_of, take_item, text_of
from nano_formats.transcript import Transcript
from nano_shared.errors import Refused
from nano_shared.logged_run import LoggedRun
from nano_shared.strict_json import Row, at_field
from nano_shared.types import Role, StopReason

_READABLE = ("mini-swe-agent-1", "mini-swe-agent-1.1")
_STOPS = {
    "Submitted": StopReason.FINISHED,
    "LimitsExceeded": StopReason.MAX_TURNS,
    "TimeExceeded": StopReason.MAX_SECONDS,
    "RepeatedFormatError": StopReason.FORMAT_ERRORS,
    "UserInterruption": StopReason.INTERRUPTED,
    "": StopReason.INTERRUPTED,
}
"""every other status is an exception of the harness or of the model's server"""
_COMMAND = "command_"
"""ids of calls that stand in the model's text"""


def read(row: Row) -> LoggedRun:
    """The run of a trajectory file. Raises Refused with the field."""
    version = row.get("trajectory_format")
    if version not in _READABLE:
        raise Refused(
            "trajectory_format", f"{version!r:.40} is none that this program reads ({', '.join(_READABLE)})"
        )
    info, messages = row.get("info"), row.get("messages")
    if not isinstance(info, dict):
        raise Refused("info", "must be an object")
    if not isinstance(messages, list):
        raise Refused("messages", "must be a list")
    transcript = Transcript(
        format="mini-swe-agent",
        agent=f"mini-swe-agent {info.get('mini_version', '')}".strip(),
        model=_model(info),
    )
    for number, message in enumerate(messages):
        with at_field(f"messages.{number}"):
            _take(transcript, message)
    status, submission = str(info.get("exit_status") or ""), info.get("submission")
    submitted = submission if isinstance(submission, str) else ""
    return transcript.run(
        row,
        stop=_STOPS.get(status, StopReason.POLICY_ERROR),
        stop_detail=status or None,
        answer=submitted or None,
        diff=submitted if submitted.startswith("diff --git ") else "",
    )


def _take(transcript: Transcript, message: Any) -> None:
    if not isinstance(message, dict):
        raise Refused("message", "must be an object")
    extra = message.get("extra") if isinstance(message.get("extra"), dict) else {}
    assert isinstance(extra, dict)
    if isinstance(extra.get("timestamp"), int | float):
        transcript.now = float(extra["timestamp"])
    role = message.get("role")
    if message.get("object") == "response":  # a model behind the Responses API
        for item in message.get("output") or ():
            take_item(transcript, item if isinstance(item, dict) else {"type": None})
    elif message.get("type") == "function_call_output":
        take_item(transcript, message)
    elif role == "assistant":
        _assistant(transcript, message, extra)
    elif role == "tool":
        _answer(transcript, str(message.get("tool_call_id")), message, extra)
    elif role == "user" and (call_id := _open_command(transcript)):
        _answer(transcript, call_id, message, extra)
    elif role in ("system", "user"):
        transcript.tell(Role(role), text_of(message.get("content"), "content"))
    elif role != "exit":
        raise Refused("role", f"must be system, user, assistant, tool or exit, not {role!r:.40}")


def _assistant(transcript: Transcript, message: Row, extra: Row) -> None:
    step = transcript.step(fresh=True)
    text = text_of(message.get("content"), "content")
    step.said += [text] if text else []
    reasoning = message.get("reasoning_content")
    step.reasoned += [reasoning] if isinstance(reasoning, str) and reasoning else []
    calls = message.get("tool_calls")
    for number, call in enumerate(calls if isinstance(calls, list) else ()):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Refused(f"tool_calls.{number}.function", "must be an object with a name")
        arguments = arguments_of(function.get("arguments"), f"tool_calls.{number}.function.arguments")
        transcript.call(step, str(call.get("id")), function["name"], arguments)
    actions = extra.get("actions")
    if not step.calls and isinstance(actions, list):  # a model that writes its command as text
        for number, action in enumerate(actions):
            command = action.get("command") if isinstance(action, dict) else None
            if not isinstance(command, str):
                raise Refused(f"extra.actions.{number}.command", "must be text")
            transcript.call(step, f"{_COMMAND}{number}", "bash", {"command": command})


def _answer(transcript: Transcript, call_id: str, message: Row, extra: Row) -> None:
    code, text = extra.get("returncode"), text_of(message.get("content"), "content")
    transcript.answer(call_id, text, ok=code in (0, None), exit_code=code if isinstance(code, int) else None)


def _open_command(transcript: Transcript) -> str | None:
    """The command, written as text, that the next message of the user answers."""
    step = transcript.steps[-1] if transcript.steps else None
    first = next(iter(step.calls), "") if step else ""
    return first if step and not step.closed and first.startswith(_COMMAND) else None


def _model(info: Row) -> str:
    config: Any = info.get("config")
    model = config.get("model") if isinstance(config, dict) else None
    return str(model.get("model_name", "unknown")) if isinstance(model, dict) else "unknown"


MINI_SWE_AGENT = RunFormat(name="mini-swe-agent", read=row_reader(lambda row: [read(row)]))
