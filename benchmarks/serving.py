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
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import uvicorn
from servers import NEW, measured, prompt

from nano_apis.app import serve_app
from nano_apis.conversations import Conversations
from nano_apis.served_models import ServedModel
from nano_coder.models.local.sampler import GenerationRequest
from nano_coder.models.opening import local_policy, open_weights
from nano_shared.policy import Conversation
from nano_shared.store import LogStore
from nano_shared.types import Message, Role, Sampling

ROWS = 32
CLIENTS = (1, 16, 64)
RESULT = Path(__file__).parents[1] / "docs" / "results" / "serving.json"


def engine_rate(policy: Any, engine: Any, first: int) -> float:
    """Tokens a second of the engine, all rows in one batch; `first` numbers its prompts."""
    requests = []
    for number in range(first, first + ROWS):
        conversation = Conversation((Message(role=Role.USER, content=prompt(number, shared=False)),))
        ids = policy.template.delta(conversation)
        requests.append(GenerationRequest(ids, Sampling(max_tokens=NEW), number))
    began = time.perf_counter()
    sampled = engine.generate(requests)
    return sum(len(row.ids) for row in sampled) / (time.perf_counter() - began)


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

        def served(clients: int, number: int) -> dict[str, float]:
            return pool.submit(measured, url, options.model, clients, number).result()

        served(2, 0)
        engine, http = [], []
        for number in range(1, options.rounds + 1):
            engine.append(engine_rate(alone, alone.engine, 100 * number))
            alone.engine.free()
            http.append(served(ROWS, 100 * number)["tokens_s"])
        rows = []
        for clients in CLIENTS:
            found = served(clients, 1000 * clients)
            rows.append({"clients": clients} | {key: round(value, 3) for key, value in found.items()})
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
