"""A tiny policy that repairs examples/buggy_stats by tool calls, learnt by heart from recorded requests.

`nano-coder run` works once against a server that answers from a script and records what it was asked. The
chat template that shows tools (Qwen 2.5's) makes prompts of that, and `nano-rl sft` a checkpoint that
answers them as the script did.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import jinja2
from own_project import nano

from integration.tiny_model import build_tiny

TEMPLATE = Path(__file__).parents[1] / "tests/coder/templates/qwen-2.5.jinja"
POSITIONS = 4096
_MESSAGE = re.compile(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>\n", re.DOTALL)
MEND = "sed -i 's/max(kept) + min(kept)/max(kept) - min(kept)/' stats.py"
Call = tuple[str, dict[str, Any]]


class Script:
    """A server of chat completions that answers each request with the next call, native or as text."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self.requests: list[dict[str, Any]] = []
        script = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                script.requests.append(body)
                self._send(script.answer(calls[len(script.requests) - 1], bool(body.get("tools"))))

            def do_GET(self) -> None:
                self._send({"data": []})

            def _send(self, answer: dict[str, Any]) -> None:
                data = json.dumps(answer).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: object) -> None:
                """Quiet."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    @staticmethod
    def answer(call: Call, native: bool) -> dict[str, Any]:
        name, arguments = call
        message: dict[str, Any] = {"role": "assistant", "content": written(call)}
        if native:
            function = {"name": name, "arguments": json.dumps(arguments)}
            calls = [{"id": f"call-{name}", "type": "function", "function": function}]
            message = {"role": "assistant", "content": None, "tool_calls": calls}
        return {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}


def written(call: Call) -> str:
    """A call as the policy writes it, and vLLM's parser `hermes` reads it."""
    return f"<tool_call>\n{json.dumps({'name': call[0], 'arguments': call[1]})}\n</tool_call>"


def conversation(request: dict[str, Any], answer: str) -> list[dict[str, str]]:
    """A request as the template shows it, tools in the system message, and its answer."""
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    template = environment.from_string(TEMPLATE.read_text())
    messages = [dict(message) for message in request["messages"]]
    for before, message in pairwise(messages):
        if (before["role"], message["role"]) == ("assistant", "user"):
            message["role"] = "tool"  # as which a server that has the policy's own template is given it
    for message in messages:  # the template writes arguments as JSON, and is given values, as by vLLM
        message["content"] = message.get("content") or ""
        for called in message.get("tool_calls", ()):
            called["function"]["arguments"] = json.loads(called["function"]["arguments"])
    shown = template.render(messages=messages, tools=request.get("tools"), add_generation_prompt=False)
    rows = [{"role": role, "content": content} for role, content in _MESSAGE.findall(shown)]
    return [*rows, {"role": "assistant", "content": answer}]


def build(home: Path, recorded: Sequence[tuple[dict[str, Any], str]], name: str, epochs: int) -> Path:
    """The checkpoint `name` of `home` that answers these requests so."""
    rows = [conversation(request, answer) for request, answer in recorded]
    texts = [message["content"] for row in rows for message in row] * 20
    tiny = build_tiny(home / "blank", texts, hidden=128, layers=2, max_positions=POSITIONS, vocab_size=1500)
    (tiny / "chat_template.jinja").write_text(TEMPLATE.read_text())
    (home / "rows.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    nano(
        home, "nano-rl", "sft", "--model", tiny, "--messages", home / "rows.jsonl", "--name", name,
        "--set", f"epochs={epochs}", "--set", "lora_rank=0", "--set", "max_tokens=4096",
        "--set", "optimizer.learning_rate=3e-3",
    )  # fmt: skip
    return home / "checkpoints" / name
