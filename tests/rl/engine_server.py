"""A real `nano-coder serve` process for tests, and a server between that lies about versions."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx

KEY = "boss"


class EngineServer:
    """`nano-coder serve` of a folder's weights, in a process of its own, at a port that stays."""

    def __init__(self, model: Path, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/v1"
        self._model, self._folder = model, folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        code = "import sys; from nano_coder.cli import main; sys.exit(main())"
        arguments = ["serve", "--model", str(self._model), "--port", str(self.port), "--set", "dtype=float32"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments, "--log", str(self._folder / "served.db")],
            env={**os.environ, "NANO_SERVE_ADMIN_KEY": KEY, "NANO_HOME": str(self._folder)},
        )

    def wait(self) -> None:
        until = time.monotonic() + 300
        while time.monotonic() < until:
            assert self._process is not None
            assert self._process.poll() is None, "the server ended"
            try:
                if httpx.get(self.url.removesuffix("/v1") + "/health").is_success:
                    return
            except httpx.HTTPError:
                time.sleep(0.1)
        raise TimeoutError

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def models(self) -> list[str]:
        headers = {"Authorization": f"Bearer {KEY}"}
        return [card["id"] for card in httpx.get(self.url + "/models", headers=headers).json()["data"]]


class Liar:
    """A server before another that answers for an adapter with what `answers` makes of it."""

    def __init__(self, upstream: str) -> None:
        self.first: str | None = None
        """the first adapter that was loaded; `stale` answers for all others with it"""
        self.mode = "honest"
        self.hook: Callable[[dict[str, Any]], None] = lambda body: None
        """called with each request before it is passed on"""
        self.thawed = threading.Event()
        """while it is clear, nothing is answered, and no connection closed"""
        self.thawed.set()
        liar = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._pass("GET")

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self._pass("POST", liar.asked(self.path, body))

            def _pass(self, method: str, body: Any = None) -> None:
                headers = {"Authorization": self.headers.get("Authorization", "")}
                url = upstream + self.path.removeprefix("/v1")
                liar.thawed.wait()
                # without an answer the connection is closed
                with suppress(httpx.HTTPError):
                    answer = httpx.request(method, url, json=body, headers=headers, timeout=60)
                    self._reply(answer, self.path.endswith("/completions"))

            def _reply(self, answer: httpx.Response, completion: bool = False) -> None:
                data = answer.content
                if completion and answer.is_success:
                    data = json.dumps(liar.said(answer.json())).encode()
                self.send_response(answer.status_code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: object) -> None:
                """Quiet."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def asked(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        self.hook(body)
        if path.endswith("load_lora_adapter"):
            self.first = self.first or body["lora_name"]
        if self.mode == "stale" and "model" in body and self.first:
            return {**body, "model": self.first}
        return body

    def said(self, answer: dict[str, Any]) -> dict[str, Any]:
        for choice in answer["choices"]:
            if self.mode == "no tokens":
                choice.pop("token_ids", None)
            elif self.mode == "wrong ids" and choice.get("token_ids"):
                choice["token_ids"] = [3 if i != 3 else 4 for i in choice["token_ids"]]
            elif self.mode == "rendered anew" and choice.get("prompt_token_ids"):
                choice["prompt_token_ids"] = choice["prompt_token_ids"][1:]
            elif self.mode == "other log-probs" and choice.get("logprobs"):
                probs = choice["logprobs"]["token_logprobs"]
                choice["logprobs"]["token_logprobs"] = [p and p - 0.01 for p in probs]
        return answer

    def close(self) -> None:
        self.thawed.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
