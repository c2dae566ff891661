"""What serving costs: tokens a second over HTTP against the engine's own batch, and the first token's time.

    python benchmarks/serving.py [--model shipped] [--rounds 3] [--write]

Each round interleaves the engine's batch of 32 rows and 32 clients of another process that stream the same
kind of prompts over HTTP; the ratio is that of the medians. Prompts have some 100 tokens, answers 64, and
none is sent twice, so that caches hold no more than a first line. `--write` fills docs/results/serving.json.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from nano_coder.models.local.sampler import GenerationRequest
from nano_coder.models.opening import local_policy, open_weights
from nano_coder.serve.app import serve_app
from nano_coder.serve.conversations import Conversations, ServedModel
from nano_shared.policy import Conversation
from nano_shared.store import LogStore
from nano_shared.types import Message, Role, Sampling

ROWS, NEW = 32, 64
CLIENTS = (1, 16, 64)
RESULT = Path(__file__).parents[1] / "docs" / "results" / "serving.json"
TEXT = "Explain in plain words what the following function does, and what it returns for an empty list.\n"


def prompt(number: int) -> str:
    return f"{TEXT}def f_{number}(xs):\n" + "".join(
        f"    xs = [x + {number + i} for x in xs]\n" for i in range(4)
    )


def engine_rate(policy: Any, engine: Any, first: int) -> float:
    """Tokens a second of the engine, all rows in one batch; `first` numbers its prompts."""
    requests = []
    for number in range(first, first + ROWS):
        conversation = Conversation((Message(role=Role.USER, content=prompt(number)),))
        ids = policy.template.delta(conversation)
        requests.append(GenerationRequest(ids, Sampling(max_tokens=NEW), number))
    began = time.perf_counter()
    sampled = engine.generate(requests)
    return sum(len(row.ids) for row in sampled) / (time.perf_counter() - began)


def ask(url: str, number: int, first: list[float], counts: list[int]) -> None:
    body = {
        "messages": [{"role": "user", "content": prompt(number)}], "max_tokens": NEW, "seed": number,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    began, told = time.perf_counter(), False
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=600) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            if not told and chunk["choices"] and chunk["choices"][0]["delta"].get("content"):
                told = True
                first.append(time.perf_counter() - began)
            if chunk.get("usage"):
                counts.append(chunk["usage"]["completion_tokens"])


def served_rate(url: str, clients: int, number: int) -> tuple[float, list[float], float]:
    """Tokens a second, seconds to the first token of each client, and requests a second; `number` is that of
    the first prompt."""
    first: list[float] = []
    counts: list[int] = []
    threads = [threading.Thread(target=ask, args=(url, number + n, first, counts)) for n in range(clients)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    taken = time.perf_counter() - began
    return sum(counts) / taken, sorted(first), clients / taken


def percentile(values: Sequence[float], share: float) -> float:
    return values[min(len(values) - 1, round(share * (len(values) - 1)))] if values else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="shipped")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    opened = open_weights(options.model)
    policy = local_policy(opened.loaded, opened.profile, scheduler="free")
    alone = local_policy(opened.loaded, opened.profile)
    with tempfile.TemporaryDirectory() as folder:
        store = LogStore.open(Path(folder) / "log.db")
        model = ServedModel(policy=policy, profile=opened.profile, store=store, name=options.model)
        listening = socket.create_server(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        server = uvicorn.Server(uvicorn.Config(serve_app(Conversations(model)), log_level="error"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"))

        def served(clients: int, number: int) -> tuple[float, list[float], float]:
            return pool.submit(served_rate, url, clients, number).result()

        served(2, 0)
        engine, http = [], []
        for number in range(1, options.rounds + 1):
            engine.append(engine_rate(alone, alone.engine, 100 * number))
            alone.engine.free()
            http.append(served(ROWS, 100 * number)[0])
        rows = []
        for clients in CLIENTS:
            rate, first, requests = served(clients, 1000 * clients)
            rows.append(
                {
                    "clients": clients, "tokens_s": round(rate, 1), "requests_s": round(requests, 2),
                    "first_token_p50_s": round(percentile(first, 0.5), 3),
                    "first_token_p95_s": round(percentile(first, 0.95), 3),
                }
            )  # fmt: skip
        pool.shutdown()
        server.should_exit = True
        thread.join()
    told = {
        "model": options.model, "rows": ROWS, "new_tokens": NEW, "rounds": options.rounds,
        "engine_tokens_s": round(statistics.median(engine), 1),
        "http_tokens_s": round(statistics.median(http), 1),
        "ratio": round(statistics.median(http) / statistics.median(engine), 3), "by_clients": rows,
    }  # fmt: skip
    print(json.dumps(told, indent=2))
    if options.write:
        RESULT.write_text(json.dumps(told, indent=2) + "\n")


if __name__ == "__main__":
    main()
