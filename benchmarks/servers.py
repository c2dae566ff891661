"""Servers of OpenAI's API side by side: tokens and requests a second and the time to the first token.

    python benchmarks/servers.py --model FOLDER --out FILE \
        --server "nano=nano-coder serve --model {model} --set dtype=bfloat16 --port {port}" \
        --server "vllm=python -m vllm.entrypoints.openai.api_server --model {model} --port {port}"

Every command is started once and stopped (SIGSTOP) while another is measured. A round asks each server in
turn, with 1, 16 and 64 clients that stream chat completions of 64 tokens from prompts of some 140 tokens, and
with 64 clients in groups of 8 that share a prompt of some 300. Figures are medians of the rounds; every round
has prompts of its own. A command may hold `{model}`, `{port}` and variables before it (`A=1 nano-coder ...`).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

NEW = 64
CASES = {"1 client": (1, 1), "16 clients": (16, 1), "64 clients": (64, 1), "8 groups of 8": (64, 8)}
"""clients, and how many of them send the same prompt"""
TEXT = "Explain in plain words what the following function does, and what it returns for an empty list.\n"


class Server:
    """One command that listens at a port. Ends with `stop`."""

    def __init__(self, named: str, model: str, folder: Path) -> None:
        self.name, _, command = named.partition("=")
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder / f"{self.name}.log"
        filled = command.replace("{model}", model).replace("{port}", str(port))
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                ["bash", "-c", f"exec env {filled}"], stdout=log, stderr=log, start_new_session=True
            )
        self.model_name = self._wait(model)

    def _wait(self, model: str) -> str:
        """The name under which it serves its model."""
        until = time.monotonic() + 600
        while time.monotonic() < until and self._process.poll() is None:
            with suppress(httpx.HTTPError):
                models = httpx.get(f"{self.url}/v1/models", timeout=5)
                listed = models.json()["data"] if models.is_success else []
                # `transformers serve` lists its cache, in which a folder is not
                return str(listed[0]["id"]) if listed else model
            time.sleep(0.5)
        self.stop()
        raise SystemExit(f"{self.name} did not start; the end of {self.log}:\n{self.log.read_text()[-3000:]}")

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def stop(self) -> None:
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGKILL)
        self._process.wait()


def prompt(number: int, shared: bool) -> str:
    lines = 14 if shared else 4
    return f"{TEXT}def f_{number}(xs):\n" + "".join(
        f"    xs = [x + {number + i} for x in xs]\n" for i in range(lines)
    )


def ask(client: httpx.Client, url: str, model: str, text: str) -> tuple[float, int]:
    """Seconds to the first token, and the tokens of the answer."""
    body = {
        "model": model, "messages": [{"role": "user", "content": text}], "max_tokens": NEW,
        "temperature": 1.0, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    began, first, pieces, counted = time.perf_counter(), None, 0, 0
    with client.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
        if answer.is_error:
            raise SystemExit(f"{url}: {answer.status_code} {answer.read().decode()[:500]}")
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            if chunk.get("choices") and chunk["choices"][0]["delta"].get("content"):
                pieces += 1
                first = first or time.perf_counter() - began
            if chunk.get("usage"):
                counted = chunk["usage"]["completion_tokens"]
    return first or time.perf_counter() - began, counted or pieces


def measured(url: str, model: str, clients: int, offset: int, sharing: int = 1) -> dict[str, float]:
    """Rates of so many clients; `offset` numbers the first prompt, which `sharing` of them send."""
    texts = [prompt(offset + number // sharing, sharing > 1) for number in range(clients)]
    limits = httpx.Limits(max_connections=clients, max_keepalive_connections=clients)
    with (
        httpx.Client(timeout=600, limits=limits, trust_env=False) as client,
        ThreadPoolExecutor(clients) as threads,
    ):
        began = time.perf_counter()
        answers = list(threads.map(lambda text: ask(client, url, model, text), texts))
        taken = time.perf_counter() - began
    first = sorted(seconds for seconds, _ in answers)
    return {
        "tokens_s": sum(count for _, count in answers) / taken,
        "requests_s": clients / taken,
        "first_token_p50_s": statistics.median(first),
        "first_token_p95_s": first[round(0.95 * (clients - 1))],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--server", action="append", required=True, metavar="NAME=COMMAND")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    servers: list[Server] = []
    rows: dict[str, dict[str, list[dict[str, float]]]] = {}
    try:
        for named in options.server:
            servers.append(Server(named, options.model, options.out.parent))
            measured(servers[-1].url, servers[-1].model_name, 2, 0)
            servers[-1].signal(signal.SIGSTOP)
        for number in range(options.rounds):
            for place, (case, (clients, sharing)) in enumerate(CASES.items()):
                first = 1000 * (number + 1) + 100 * place
                for server in servers:
                    server.signal(signal.SIGCONT)
                    found = measured(server.url, server.model_name, clients, first, sharing)
                    server.signal(signal.SIGSTOP)
                    rows.setdefault(case, {}).setdefault(server.name, []).append(found)
                    print(case, server.name, json.dumps(found), file=sys.stderr, flush=True)
    finally:
        for server in servers:
            server.stop()
    medians: dict[str, Any] = {
        case: {
            name: {key: round(statistics.median(row[key] for row in found), 3) for key in found[0]}
            for name, found in by_server.items()
        }
        for case, by_server in rows.items()
    }
    result = {"new_tokens": NEW, "rounds": options.rounds, "cases": medians}
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
