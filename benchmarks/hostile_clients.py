"""What one hostile client costs the others of a server: the slowest /health, another client's first token,
and memory that does not come back.

    python benchmarks/hostile_clients.py [--model shipped] [--write]

A server in a process of its own meets one attack after another: large texts, bodies and lists of ids, 64
choices, idle connections. Meanwhile /health is asked every 50 ms, and another client streams short answers.
Memory is the server's resident set, before the attack and five seconds after it.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

RESULT = Path(__file__).parents[1] / "docs" / "results" / "hostile_clients.json"
COMMAND = "python benchmarks/hostile_clients.py --write"
TEXT = "ab cd " * 5_000_000


def attacks(port: int, idle: int) -> dict[str, Callable[[], str]]:
    def post(path: str, body: object) -> Callable[[], str]:
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        return lambda: str(
            httpx.post(
                f"http://127.0.0.1:{port}{path}", content=data, headers=headers, timeout=300
            ).status_code
        )

    def connect() -> str:
        held = [socket.create_connection(("127.0.0.1", port), timeout=30) for _ in range(idle)]
        time.sleep(5)
        for each in held:
            each.close()
        return f"{idle} held"

    said = {"max_tokens": 32, "messages": [{"role": "user", "content": "Tell me a story."}]}
    return {
        "chat, 30 MiB of text": post(
            "/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT}]}
        ),
        "chat, 3 MiB of text": post(
            "/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT[: 3 << 20]}]}
        ),
        "chat, 500 KB of text": post(
            "/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT[:500_000]}]}
        ),
        "tokenize, 3 MiB": post("/tokenize", {"prompt": TEXT[: 3 << 20], "return_token_strs": True}),
        "count_tokens, 3 MiB": post(
            "/v1/messages/count_tokens", {"messages": [{"role": "user", "content": TEXT[: 3 << 20]}]}
        ),
        "detokenize, 1e6 ids": post("/detokenize", {"tokens": [1] * 10**6}),
        "completions, 1e6 ids": post("/v1/completions", {"prompt": [1] * 10**6}),
        "completions, 1e5 ids": post("/v1/completions", {"prompt": [1] * 10**5}),
        "30 MiB of lists": post("/v1/chat/completions", '{"messages":[' + "[]," * (10 << 20) + "[]]}"),
        "50,000 stops": post("/v1/chat/completions", {**said, "stop": [f"zz{n}" for n in range(50_000)]}),
        "n = 64": post("/v1/chat/completions", {**said, "n": 64}),
        f"{idle} idle connections": connect,
    }


@contextmanager
def server(model: str, folder: str) -> Iterator[tuple[int, int]]:
    """Port and process of a server."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        str(Path(sys.executable).with_name("nano-coder")),
        "--log",
        f"{folder}/log.db",
        "serve",
        "--model",
        model,
    ]
    process = subprocess.Popen([*command, "--port", str(port)])
    try:
        while True:
            try:
                httpx.get(f"http://127.0.0.1:{port}/health", timeout=5)
                break
            except httpx.HTTPError:
                time.sleep(0.2)
        yield port, process.pid
    finally:
        process.terminate()
        process.wait()


class Watch:
    """Times of others while an attack runs."""

    def __init__(self, port: int) -> None:
        self.root, self.over = f"http://127.0.0.1:{port}", threading.Event()
        self.health: list[float] = [0.0]
        self.first: list[float] = [0.0]
        self.failed = 0

    def ask_health(self) -> None:
        while not self.over.is_set():
            began = time.monotonic()
            self.failed += httpx.get(f"{self.root}/health", timeout=300).status_code != 200
            self.health.append(time.monotonic() - began)
            time.sleep(0.05)

    def stream(self) -> None:
        body = {"messages": [{"role": "user", "content": "Hi."}], "max_tokens": 4, "stream": True}
        while not self.over.is_set():
            began = time.monotonic()
            with httpx.stream("POST", f"{self.root}/v1/chat/completions", json=body, timeout=300) as answer:
                self.failed += answer.status_code != 200
                for line in answer.iter_lines():
                    if line.startswith("data: ") and '"role"' not in line:
                        self.first.append(time.monotonic() - began)
                        break
            time.sleep(0.2)


def resident(pid: int) -> int:
    """MiB."""
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "VmRSS" in line]
    return int(line.split()[1]) >> 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="shipped")
    parser.add_argument("--idle", type=int, default=1500)
    parser.add_argument("--attack", default="", help="those whose name holds this")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder, server(options.model, folder) as (port, pid):
        for name, attack in {"nothing": lambda: "", **attacks(port, options.idle)}.items():
            if options.attack not in name:
                continue
            time.sleep(2)
            watch, before = Watch(port), resident(pid)
            threads = [threading.Thread(target=each) for each in (watch.ask_health, watch.stream)]
            for thread in threads:
                thread.start()
            began = time.monotonic()
            answer = attack() if name != "nothing" else str(time.sleep(5))
            took = time.monotonic() - began
            watch.over.set()
            for thread in threads:
                thread.join()
            time.sleep(5)
            rows.append({
                "attack": name, "answer": answer, "seconds": round(took, 1),
                "health": round(max(watch.health), 2),
               
                "first_token": round(max(watch.first), 2), "failed": watch.failed,
                "memory_mib": resident(pid) - before, "load": round(os.getloadavg()[0], 1),
            })  # fmt: skip
            print(json.dumps(rows[-1]), flush=True)
    if options.write:
        RESULT.write_text(json.dumps({"command": COMMAND, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
