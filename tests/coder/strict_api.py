"""A strict server of OpenAI's chat completions: what the API does not promise to take is refused.

It checks parameters, tool schemas, role order and call ids; then it answers from a script, streamed in pieces
of odd sizes, and fails in the ways that are asked for.
"""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = "sk-right"
_PARAMETERS = {
    "model", "messages", "tools", "tool_choice", "parallel_tool_calls", "stream", "stream_options",
    "max_completion_tokens", "temperature", "top_p", "n", "stop", "reasoning_effort", "response_format",
    "logprobs", "top_logprobs", "metadata", "store", "verbosity", "service_tier", "modalities",
    "presence_penalty", "frequency_penalty", "logit_bias", "prediction", "prompt_cache_key",
    "safety_identifier", "web_search_options", "audio",
}  # fmt: skip
"""of the current API; deprecated ones (max_tokens, seed, functions, function_call, user) are refused"""
_TYPES = {"object", "string", "integer", "number", "boolean", "array", "null"}


class Wrong(Exception):
    """A request that the API refuses."""

    def __init__(self, message: str, param: str | None = None, code: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.param, self.code = param, code


@dataclass(frozen=True)
class Call:
    name: str
    arguments: str
    id: str = ""


def call(name: str, **arguments: Any) -> Call:
    return Call(name, json.dumps(arguments))


@dataclass(frozen=True)
class Say:
    """One answer: a text, and calls."""

    text: str | None = None
    calls: tuple[Call, ...] = ()
    finish: str | None = None
    reasoning: str = ""


@dataclass(frozen=True)
class Fail:
    """One failure in place of an answer."""

    status: int = 500
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b'{"error": {"message": "oops"}}'


Act = Callable[["Handler"], None]
Step = Say | Fail | Act


@dataclass
class Script:
    """What a server answers, in order; the last for ever."""

    steps: Sequence[Step]
    refuses: tuple[str, ...] = ()
    """further parameters that it refuses"""
    takes: tuple[str, ...] = ()
    """further parameters that it takes"""
    streams: bool = True
    usage: bool = True
    seen: list[dict[str, Any]] = field(default_factory=list)
    """accepted requests"""
    tried: int = 0
    """requests, refused ones too"""
    times: list[float] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self) -> Step:
        number = len(self.seen) - 1
        return self.steps[min(number, len(self.steps) - 1)]


def check_request(body: dict[str, Any], script: Script) -> None:
    """Raises Wrong."""
    for name in body:
        if name in script.refuses or name not in {*_PARAMETERS, *script.takes}:
            raise Wrong(
                f"Unsupported parameter: '{name}' is not supported with this model.",
                name,
                "unsupported_parameter",
            )
    if not isinstance(body.get("model"), str) or not body.get("messages"):
        raise Wrong("Missing required parameter: 'model' or 'messages'.")
    if "stream_options" in body and not body.get("stream"):
        raise Wrong(
            "The 'stream_options' parameter is only allowed when 'stream' is enabled.", "stream_options"
        )
    for at, tool in enumerate(body.get("tools", ())):
        _check_tool(tool, f"tools[{at}]")
    _check_messages(body["messages"], {tool["function"]["name"] for tool in body.get("tools", ())})


def _check_tool(tool: Any, where: str) -> None:
    if set(tool) != {"type", "function"} or tool["type"] != "function":
        raise Wrong(f"Invalid {where}", where)
    function = tool["function"]
    if set(function) - {"name", "description", "parameters", "strict"}:
        raise Wrong(f"Unknown parameter in {where}", where)
    name = function["name"]
    if not 1 <= len(name) <= 64 or not all(c.isalnum() or c in "_-" for c in name):
        raise Wrong(f"Invalid '{where}.function.name'", where)
    _check_schema(function["parameters"], where)


def _check_schema(schema: Any, where: str) -> None:
    if not isinstance(schema, dict) or schema.get("type") != "object":
        raise Wrong(f"Invalid schema for {where}: schema must be of type 'object'", where)
    if set(schema.get("required", ())) - set(schema.get("properties", {})):
        raise Wrong(f"Invalid schema for {where}: unknown property is required", where)
    for value in schema.get("properties", {}).values():
        for option in value.get("anyOf", [value]):
            if option.get("type") not in _TYPES or "$ref" in option:
                raise Wrong(f"Invalid schema for {where}: {option}", where)
            if option["type"] == "array" and "items" not in option:
                raise Wrong(f"Invalid schema for {where}: array schema missing items", where)


def _check_messages(messages: list[Any], tools: set[str]) -> None:
    due: list[str] = []
    for at, message in enumerate(messages):
        where = f"messages[{at}]"
        role = message.get("role")
        if due and role != "tool":
            raise Wrong(
                "An assistant message with 'tool_calls' must be followed by tool messages responding to each"
                f" 'tool_call_id'. The following tool_call_ids did not have response messages: {due}", where
            )  # fmt: skip
        if role == "tool":
            if set(message) != {"role", "content", "tool_call_id"} or message["tool_call_id"] not in due:
                raise Wrong("messages with role 'tool' must be a response to a preceding message with"
                            " 'tool_calls'.", where)  # fmt: skip
            due.remove(message["tool_call_id"])
            _check_text(message["content"], where)
        elif role == "assistant":
            due = _check_assistant(message, tools, where)
        elif role in ("system", "user", "developer"):
            if set(message) - {"role", "content", "name"}:
                raise Wrong(f"Unrecognized argument in {where}", where)
            if role == "user" and isinstance(message["content"], list):
                _check_parts(message["content"], where)
            else:
                _check_text(message["content"], where)
        else:
            raise Wrong(f"Invalid value: '{role}'", where)
    if due or messages[-1]["role"] == "assistant":
        raise Wrong("The conversation must end with a user or tool message.")


def _check_assistant(message: dict[str, Any], tools: set[str], where: str) -> list[str]:
    if set(message) - {"role", "content", "tool_calls", "refusal", "name", "audio"}:
        raise Wrong(f"Unrecognized argument in {where}", where)
    calls = message.get("tool_calls", [])
    if "tool_calls" in message and not calls:
        raise Wrong(f"[] is too short - '{where}.tool_calls'", where)
    if not calls or message.get("content") is not None:
        _check_text(message.get("content"), where)
    for one in calls:
        if set(one) != {"id", "type", "function"} or set(one["function"]) != {"name", "arguments"}:
            raise Wrong(f"Invalid '{where}.tool_calls'", where)
        if not isinstance(json.loads(one["function"]["arguments"]), dict):
            raise Wrong(f"Invalid '{where}.tool_calls': arguments", where)
    ids = [one["id"] for one in calls]
    if len(set(ids)) != len(ids):
        raise Wrong(f"Duplicate value for 'tool_call_id' in {where}", where)
    return ids


def _check_parts(parts: list[Any], where: str) -> None:
    for part in parts:
        if part["type"] == "text" and set(part) == {"type", "text"}:
            _check_text(part["text"], where)
        elif part["type"] == "image_url" and set(part) == {"type", "image_url"}:
            head, _, data = part["image_url"]["url"].partition(";base64,")
            kind = head.removeprefix("data:image/")
            if kind not in SIGNATURES or not base64.b64decode(data, validate=True).startswith(
                SIGNATURES[kind]
            ):
                raise Wrong("You uploaded an unsupported image.", where, "invalid_image_format")
        else:
            raise Wrong(f"Invalid value: '{part['type']}'", where)


SIGNATURES = {"png": b"\x89PNG", "jpeg": b"\xff\xd8\xff", "gif": b"GIF8", "webp": b"RIFF"}


def _check_text(content: Any, where: str) -> None:
    if not isinstance(content, str):
        raise Wrong(f"Invalid value for 'content' in {where}: expected a string, got null.", where)
    content.encode()


class Handler(BaseHTTPRequestHandler):
    server: StrictApi
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        script = self.server.script
        raw = self.rfile.read(int(self.headers["Content-Length"]))
        with script.lock:
            script.tried += 1
            script.times.append(time.monotonic())
        if self.headers.get("Authorization") != f"Bearer {KEY}":
            return self.refuse(401, "Incorrect API key provided.", None, "invalid_api_key")
        body = json.loads(raw)
        try:
            check_request(body, script)
        except Wrong as wrong:
            return self.refuse(400, str(wrong), wrong.param, wrong.code)
        with script.lock:
            script.seen.append(body)
            step = script.take()
        if isinstance(step, Say):
            self.say(step, body)
        elif isinstance(step, Fail):
            self.send(step.status, step.body, dict(step.headers))
        else:
            step(self)

    def refuse(self, status: int, message: str, param: str | None, code: str) -> None:
        error = {"message": message, "type": "invalid_request_error", "param": param, "code": code}
        self.send(status, json.dumps({"error": error}).encode(), {})

    def send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            **headers,
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def say(self, step: Say, body: dict[str, Any]) -> None:
        number = len(self.server.script.seen)
        calls = [
            {"id": one.id or f"call_{number}x{at}", "type": "function",
             "function": {"name": one.name, "arguments": one.arguments}}
            for at, one in enumerate(step.calls)
        ]  # fmt: skip
        finish = step.finish or ("tool_calls" if calls else "stop")
        usage = {"prompt_tokens": 1000, "completion_tokens": 50, "total_tokens": 1050,
                 "prompt_tokens_details": {"cached_tokens": 400},
                 "completion_tokens_details": {"reasoning_tokens": 20}}  # fmt: skip
        if not body.get("stream") or not self.server.script.streams:
            message = {"role": "assistant", "content": step.text, **({"tool_calls": calls} if calls else {})}
            choice = {"index": 0, "message": message, "finish_reason": finish}
            more = {"usage": usage} if self.server.script.usage else {}
            return self.send(200, json.dumps({"choices": [choice], **more}).encode(), {})
        wants = self.server.script.usage and body.get("stream_options", {}).get("include_usage")
        self.stream(stream_bytes(step, calls, finish, usage if wants else None))

    def stream(self, data: bytes, *, end: bool = True) -> None:
        """Send a stream in pieces of odd sizes; without `end` the connection is cut."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for piece in pieces(data):
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            self.wfile.flush()
        if end:
            self.wfile.write(b"0\r\n\r\n")
        else:
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        pass


def pieces(data: bytes) -> Iterator[bytes]:
    """Odd splits: single bytes too, in the middle of characters and of line ends."""
    at, size = 0, 1
    while at < len(data):
        yield data[at : at + size]
        at, size = at + size, size * 3 % 101 or 7


def stream_bytes(step: Say, calls: list[dict[str, Any]], finish: str, usage: dict[str, Any] | None) -> bytes:
    """The events of one answer: text and arguments in pieces of a few characters."""
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": "" if step.text is not None else None}]
    deltas += [{"reasoning_content": part} for part in _parts(step.reasoning)]
    deltas += [{"content": part} for part in _parts(step.text or "")]
    for index, one in enumerate(calls):
        head = {**one, "function": {"name": one["function"]["name"], "arguments": ""}}
        deltas.append({"tool_calls": [{"index": index, **head}]})
        for part in _parts(one["function"]["arguments"]):
            deltas.append({"tool_calls": [{"index": index, "function": {"arguments": part}}]})
    chunks: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "delta": d, "finish_reason": None}]} for d in deltas
    ]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
    if usage is not None:
        chunks.append({"choices": [], "usage": usage})
    lines = [b": keep-alive\n\n"]
    lines += [b"data: " + json.dumps(c, ensure_ascii=False).encode() + b"\r\n\r\n" for c in chunks]
    return b"".join([*lines, b"data: [DONE]\n\n"])


def _parts(text: str) -> list[str]:
    return [text[at : at + 3] for at in range(0, len(text), 3)]


class StrictApi(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, script: Script) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script = script

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a client that hung up


@contextmanager
def strict_api(*steps: Step, **options: Any) -> Iterator[tuple[StrictApi, Script]]:
    script = Script(steps, **options)
    server = StrictApi(script)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server, script
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
