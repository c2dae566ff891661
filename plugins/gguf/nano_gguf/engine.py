"""The engine of a GGUF file: rows that llama.cpp continues, some tokens at a time.

llama.cpp leaves out the log-prob of a token that ends within a character. So a row is continued by requests
of a few tokens, each of which is answered whole, with every id; where a log-prob is missing, it is computed
from the log-probs of the whole vocabulary at that place, and the row goes on behind it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from http.client import HTTPConnection
from multiprocessing.connection import wait
from typing import Any, NoReturn

import torch

from nano_coder.models.local.sampler import DecodingRow, GenerationRequest, StopConditions
from nano_gguf.server import LlamaServer
from nano_shared.errors import UsageError
from nano_shared.policy import DecodeIds
from nano_shared.types import Finish, Sampling

_TOKENS = 16
"""of one request: after so many a row may be stopped, and another one may join"""
_LOOK_SECONDS = 0.2
"""between two looks at whether an answer is still waited for"""
_FORCED = 1e5
"""added to the logit of the token that is drawn only to read the log-probs of its place"""


WAY_OUT = "--set dtype=bfloat16 runs it dequantised"


class LlamaEngine:
    """The part of an `Engine` that `LocalPolicy` and its scheduler use. Not thread-safe."""

    decoder = None
    """none of ours"""
    limited_by = "kv_gib, or its context"

    def __init__(
        self, server: LlamaServer, *, eos_ids: frozenset[int], rows: int, plain: int, decode: DecodeIds
    ) -> None:
        """`plain` is a token whose text is ASCII."""
        facts = server.describe()
        self.eos_ids, self.max_batch = eos_ids, rows
        self.context_limit, self.vocab_size = int(facts["n_ctx"]) - 1, int(facts["n_vocab"])
        self._server, self._plain = server, plain
        self._ends = StopConditions(eos_ids, self.context_limit, decode, self.limited_by)
        self._rows: list[DecodingRow] = []

    def add_requests(self, requests: Sequence[GenerationRequest]) -> list[DecodingRow]:
        """Queue requests. Raises ContextFull."""
        rows = [DecodingRow(request, self._ends) for request in requests]
        self._rows += rows
        return rows

    def step(self) -> list[DecodingRow]:
        """Continue the oldest rows, as many as fit together. Returns those that finished."""
        asked: dict[Any, tuple[DecodingRow, HTTPConnection]] = {}
        try:
            for row in self._fitting():
                connection = self._server.post(_body(row, self._count(row)))
                asked[connection.sock] = row, connection
            while asked:
                for ready in wait(list(asked), _LOOK_SECONDS):
                    row, connection = asked.pop(ready)
                    self._take(row, self._server.answer(connection))
                for sock, (row, connection) in list(asked.items()):
                    if row.request.stop is not None and row.request.stop.is_set():
                        del asked[sock]
                        connection.close()
                        row.finish = Finish.CANCELLED
        finally:
            for _, connection in asked.values():
                connection.close()
        finished = [row for row in self._rows if row.finish is not None]
        self.drop(finished)
        return finished

    def drop(self, rows: Sequence[DecodingRow]) -> None:
        self._rows = [row for row in self._rows if row not in rows]

    def release(self, owner: int) -> None:
        """The server keeps the rows that were used last."""

    def free(self) -> None:
        self._rows = []

    def score_tokens(self, *_: object, **__: object) -> NoReturn:
        raise UsageError(f"llama.cpp, which runs this model, scores no given tokens; {WAY_OUT}")

    def _fitting(self) -> list[DecodingRow]:
        """The oldest rows whose tokens the KV cache holds together; always the first."""
        fitting: list[DecodingRow] = []
        left = self.context_limit
        for row in self._rows[: self.max_batch]:
            left -= row.position + 1 + _TOKENS
            if fitting and left < 0:
                break
            fitting.append(row)
        return fitting

    def _count(self, row: DecodingRow) -> int:
        return min(_TOKENS, row.limit - len(row.ids))

    def _take(self, row: DecodingRow, answer: Any) -> None:
        """Give the row the tokens of an answer up to the first without a log-prob, and that one."""
        known = answer.get("completion_probabilities", [])
        for place, token in enumerate(answer["tokens"]):
            # one that is left out holds the beginning of a character: the next that is told differs from it
            told = known[place] if place < len(known) and known[place]["id"] == token else None
            if told is None:
                logprob, likeliest = self._logprob(row, token)
            else:
                logprob, likeliest = _logprob(told), tuple(_likeliest(told))[: row.request.top_logprobs]
            row.take(token, logprob, likeliest)
            if told is None or row.finish is not None:
                break
        if not answer["tokens"]:  # no room for one
            row.finish = row.finish or Finish.LENGTH

    def _logprob(self, row: DecodingRow, token: int) -> tuple[float, tuple[tuple[int, float], ...]]:
        """The log-prob of a token behind a row, from those of the whole vocabulary."""
        forced = {"temperature": 0.0, "post_sampling_probs": False, "n_probs": self.vocab_size,
                  "logit_bias": [[self._plain, _FORCED]]}  # fmt: skip
        answer = self._server.answer(self._server.post(_body(row, 1) | forced))
        likeliest = list(_likeliest(answer["completion_probabilities"][0]))
        order = torch.tensor([id for id, _ in likeliest])
        drawn = _processed(torch.tensor([value for _, value in likeliest]).double(), row.request.sampling)
        best = zip(order.tolist(), drawn.tolist(), strict=True)
        found = float(drawn[order == token])
        return found, tuple(best)[: row.request.top_logprobs]


def _body(row: DecodingRow, count: int) -> dict[str, Any]:
    """Temperature first, then top-k, then top-p, and nothing else, as in our own sampler."""
    sampling = row.request.sampling
    return {
        "prompt": [*row.request.ids, *row.ids], "n_predict": count, "return_tokens": True,
        "cache_prompt": True, "seed": int(row.uniforms[len(row.ids)] * 2**31),
        "samplers": ["temperature", "top_k", "top_p"] if sampling.temperature else ["temperature"],
        "temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p,
        "n_probs": max(1, row.request.top_logprobs),
        # a greedy row has the log-probs of temperature 1, before the sampler
        "post_sampling_probs": sampling.temperature > 0,
    }  # fmt: skip


def _logprob(told: Any) -> float:
    return math.log(told["prob"] or 1e-45) if "prob" in told else float(told["logprob"])


def _likeliest(told: Any) -> Any:
    return ((each["id"], _logprob(each)) for each in told.get("top_probs") or told.get("top_logprobs") or ())


def _processed(ordered_V: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """[V] log-probs of the distribution that is drawn from; `ordered_V` likeliest first, at temperature 1."""
    if not sampling.temperature:
        return ordered_V.log_softmax(-1)
    logprobs_V = (ordered_V / sampling.temperature).log_softmax(-1)
    if sampling.top_k:
        logprobs_V[sampling.top_k :] = -torch.inf
        logprobs_V = logprobs_V.log_softmax(-1)
    probs_V = logprobs_V.exp()
    logprobs_V[(probs_V.cumsum(-1) - probs_V >= sampling.top_p) & (sampling.top_p < 1)] = -torch.inf
    return logprobs_V.log_softmax(-1)
