"""Metrics of the server in Prometheus' format, with vLLM's names."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from nano_coder.models.local.policy import LocalPolicy
from nano_coder.serve.request import ModelAnswer
from nano_shared.types import Finish


class ServerMetrics:
    """Prometheus metrics, with vLLM's names."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self.running = self._new(Gauge, "num_requests_running", "Requests that are being answered.").labels(
            model
        )
        self.waiting = self._new(Gauge, "num_requests_waiting", "Requests that wait for a place.").labels(
            model
        )
        self.kv_usage = self._new(Gauge, "kv_cache_usage_perc", "Share of the KV budget in use; 1 is full.")
        self.prompt = self._new(Counter, "prompt_tokens", "Tokens of prompts.")
        self.sampled = self._new(Counter, "generation_tokens", "Sampled tokens.")
        self.queries = self._new(Counter, "prefix_cache_queries", "Prompt tokens looked up in the KV cache.")
        self.hits = self._new(Counter, "prefix_cache_hits", "Prompt tokens whose KV was cached.")
        self.success = self._new(
            Counter, "request_success", "Requests that were answered.", "finished_reason"
        )
        self.first = self._new(
            Histogram, "time_to_first_token_seconds", "From the request to its first token."
        )
        self.between = self._new(Histogram, "inter_token_latency_seconds", "Between two tokens of an answer.")
        self.whole = self._new(
            Histogram, "e2e_request_latency_seconds", "From the request to its whole answer."
        )
        self._counted: WeakKeyDictionary[LocalPolicy, tuple[int, int]] = WeakKeyDictionary()
        for metric in (
            self.prompt,
            self.sampled,
            self.queries,
            self.hits,
            self.first,
            self.between,
            self.whole,
        ):
            metric.labels(model)

    def _new(self, kind: Any, name: str, help: str, *labels: str) -> Any:
        return kind(f"vllm:{name}", help, ["model_name", *labels], registry=self.registry)

    def answered(self, model: str, answer: ModelAnswer, seconds: float) -> None:
        self.prompt.labels(model).inc(answer.prompt_tokens)
        self.sampled.labels(model).inc(answer.sampled_tokens)
        reason = {Finish.CANCELLED: "abort"}.get(answer.completion.finish, answer.completion.finish.value)
        self.success.labels(model, reason).inc()
        self.whole.labels(model).observe(seconds)

    def read_cache(self, model: str, policy: Any) -> None:
        """Add what the engine's KV cache did since the last call."""
        decoder: Any = policy.engine.decoder if isinstance(policy, LocalPolicy) else None
        counts = getattr(decoder, "counts", None)
        if decoder is None or counts is None:  # a decoder that shares no prefixes
            return
        now = counts.prompt, counts.prompt - counts.prefilled
        before = self._counted.get(policy, (0, 0))
        if now[0] < before[0]:  # the engine was freed
            before = (0, 0)
        self._counted[policy] = now
        self.queries.labels(model).inc(now[0] - before[0])
        self.hits.labels(model).inc(max(0, now[1] - before[1]))
        self.kv_usage.labels(model).set(decoder.kv_usage)

    def text(self) -> bytes:
        """What `/metrics` answers."""
        return generate_latest(self.registry)
