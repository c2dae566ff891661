"""Delays that stand for larger models and slower tools, where two cores must carry three engines.

`scale_calibrate.py` starts servers and trainers whose code is nano's own, with these in it: an engine sleeps
in each forward pass, a tool after each call, the trainer after each update, for what is left of the time that
it is to take. What is asked, sampled, logged, graded, loaded and learned stays as it is.
"""

from __future__ import annotations

import os
import random
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

ENGINE_PASS, ENGINE_ROW, ENGINE_PREFILL = 0.2, 0.1, 0.0004
"""seconds of a forward pass, of each row that it decodes, and of each token that it prefills; the tiny policy
answers in some five tokens, which stand for hundreds"""
TOOL_LEAST, TOOL_MOST = 0.5, 5.0
"""seconds of a call, log-uniform: 1.95 s on average"""
UPDATE, UPDATE_TOKEN = 1.0, 0.006
"""seconds of a step's update, and of each sampled token that it learns from"""
BUSY = "NANO_BENCHMARK_BUSY"
"""names the file to which an engine writes its seconds of work, a double"""


@contextmanager
def lasting(seconds: float) -> Iterator[None]:
    """Sleep for what the block leaves of the time."""
    until = time.monotonic() + seconds
    try:
        yield
    finally:
        time.sleep(max(0.0, until - time.monotonic()))


def slow_engine() -> None:
    from nano_coder.models.local.continuous_batching import ContinuousDecoder, NGramSpeculator

    prefill, decode, busy = ContinuousDecoder._prefill, ContinuousDecoder._decode, [0.0]
    file = os.open(os.environ[BUSY], os.O_RDWR | os.O_CREAT)
    # each adapter of a server has a thread and a batch of its own; they share the device
    device = threading.Lock()

    def spend(seconds: float, began: float) -> None:
        time.sleep(max(0.0, seconds - (time.monotonic() - began)))
        busy[0] += time.monotonic() - began
        os.pwrite(file, struct.pack("d", busy[0]), 0)

    def slow_prefill(self: Any, segments: Any) -> Any:
        with device:
            began, logits = time.monotonic(), prefill(self, segments)
            tokens = sum(len(segment.ids) for segment in segments)
            spend(ENGINE_PASS + ENGINE_PREFILL * tokens if tokens else 0.0, began)
        return logits

    def slow_decode(self: Any, draft_tokens: Any) -> Any:
        with device:
            began, logits = time.monotonic(), decode(self, draft_tokens)
            spend(ENGINE_PASS + ENGINE_ROW * len(draft_tokens), began)
        return logits

    ContinuousDecoder._prefill = slow_prefill  # type: ignore[method-assign]
    ContinuousDecoder._decode = slow_decode  # type: ignore[method-assign]
    NGramSpeculator.propose = lambda *_: []  # type: ignore[method-assign]


def slow_tools_and_trainer() -> None:
    from nano_coder.tools.tool import Tool
    from nano_rl.learn.train_step import Updater

    call, learn, draw = Tool.__call__, Updater.update, random.Random(0)

    def slow_call(self: Tool, *arguments: Any) -> Any:
        with lasting(TOOL_LEAST * (TOOL_MOST / TOOL_LEAST) ** draw.random()):
            return call(self, *arguments)

    def slow_learn(self: Updater, rows: Any, *arguments: Any) -> Any:
        tokens = sum(sample.num_action_tokens for sample in rows.samples)
        with lasting(UPDATE + UPDATE_TOKEN * tokens):
            return learn(self, rows, *arguments)

    Tool.__call__ = slow_call  # type: ignore[method-assign]
    Updater.update = slow_learn  # type: ignore[method-assign]
