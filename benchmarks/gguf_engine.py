"""A GGUF file on llama.cpp beside the same file dequantised: tokens a second, and the gap of log-probs.

python benchmarks/gguf_engine.py FILE.gguf [--tokens 200] [--rows 4]
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from typing import Any

from nano_coder.models.opening import open_policy
from nano_shared.policy import Conversation
from nano_shared.types import Completion, Message, Role, Sampling

QUESTIONS = ("Write a Python function that reverses a list.", "Explain recursion.", "What is a heap?",
             "Write a haiku about rain.", "Name ten cities.", "What is 12 times 7?")  # fmt: skip


def asked(number: int) -> Conversation:
    return Conversation((Message(role=Role.USER, content=QUESTIONS[number % len(QUESTIONS)]),))


def ids_of(done: Completion) -> tuple[int, ...]:
    assert done.tokens is not None
    return done.tokens.sampled_ids


def speed(policy: Any, rows: int, tokens: int) -> float:
    """Tokens a second of `rows` threads of `tokens` each; a prompt of a few words is read within that."""
    done: list[Completion] = []

    def ask(number: int) -> None:
        done.append(policy.complete(asked(number), Sampling(max_tokens=tokens, seed=number)))

    policy.complete(asked(0), Sampling(max_tokens=2))
    threads = [threading.Thread(target=ask, args=(number,)) for number in range(rows)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(len(ids_of(each)) for each in done) / (time.monotonic() - began)


def gaps(policy: Any, weights: Any, count: int) -> list[float]:
    """[count] differences of log-probs of tokens that llama.cpp sampled at temperature 1, nats."""
    found: list[float] = []
    number = 0
    while len(found) < count:
        done = policy.complete(asked(number), Sampling(max_tokens=64, seed=number)).tokens
        row, first = (*done.context_ids, *done.sampled_ids), len(done.context_ids)
        scores = weights.engine.score_alone(row, first=first)
        found += [abs(a - b) for a, b in zip(scores, done.logprobs, strict=True)]
        number += 1
    return found[:count]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rows", type=int, default=4)
    given = parser.parse_args()
    policy: Any = open_policy(given.file).policy
    weights: Any = open_policy(given.file, dtype="float32", scheduler="free").policy
    print(f"load {os.getloadavg()[0]:.1f}, {len(os.sched_getaffinity(0))} cores")
    for rows in (1, given.rows):
        for name, each in (("llama.cpp", policy), ("dequantised, float32", weights)):
            print(f"{name}, {rows} rows: {speed(each, rows, 32):.1f} tokens/s", flush=True)
    found = sorted(gaps(policy, weights, given.tokens))
    print(
        f"log-probs of {len(found)} tokens: mean |d| {sum(found) / len(found):.4f} nats,"
        f" median {found[len(found) // 2]:.4f}, largest {found[-1]:.3f}"
    )


if __name__ == "__main__":
    main()
