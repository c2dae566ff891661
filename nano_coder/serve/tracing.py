"""OpenTelemetry spans of requests, where `OTEL_EXPORTER_OTLP_ENDPOINT` names a collector."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from nano_coder.serve.request import ModelAnswer, ModelRequest
from nano_shared.errors import ConfigError
from nano_shared.types import Role

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimes:
    """Unix seconds."""

    received: float
    began: float
    """when it left the queue"""
    first: float
    """its first token"""
    ended: float


class Tracing(Protocol):
    def answered(
        self, request: ModelRequest, answer: ModelAnswer, times: RequestTimes,
        headers: Mapping[str, str], session: str,
    ) -> None: ...  # fmt: skip

    def failed(
        self, problem: Exception, times: RequestTimes, headers: Mapping[str, str], session: str
    ) -> None: ...

    def close(self) -> None: ...


def open_tracing() -> Tracing | None:
    """None where no collector is named. Raises ConfigError where the SDK is missing."""
    if not any(os.environ.get(name) for name in ENDPOINTS) or os.environ.get("OTEL_SDK_DISABLED") == "true":
        return None
    try:
        return SpanExport()
    except ModuleNotFoundError as problem:
        raise ConfigError(
            f"{ENDPOINTS[0]} is set, and {problem.name} is missing; pip install 'nano-rl-coder[otel]'"
        ) from None


class SpanExport:
    """Exports a span of each request with those of its prefill and decoding, and of the client's tools."""

    def __init__(self) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        name = os.environ.get("OTEL_SERVICE_NAME", "nano-coder")
        self._provider = TracerProvider(resource=Resource.create({"service.name": name}))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("nano_coder.serve")
        self._propagator = TraceContextTextMapPropagator()

    def answered(
        self, request: ModelRequest, answer: ModelAnswer, times: RequestTimes,
        headers: Mapping[str, str], session: str,
    ) -> None:  # fmt: skip
        completion = answer.completion
        span, inside = self._request(times, headers, session)
        span.set_attributes(
            {
                "gen_ai.operation.name": "text_completion" if request.prompt_ids else "chat",
                "gen_ai.response.model": f"{completion.policy_id}@{completion.policy_version}",
                "gen_ai.request.temperature": completion.sampling.temperature,
                "gen_ai.request.max_tokens": completion.sampling.max_tokens,
                "gen_ai.response.finish_reasons": [completion.finish.value],
                "gen_ai.usage.input_tokens": answer.prompt_tokens,
                "gen_ai.usage.output_tokens": answer.sampled_tokens,
                "nano.run": answer.run,
            }
        )
        if request.messages[-1].role is Role.TOOL and answer.previous_ended is not None:
            calls = [message for message in request.messages if message.calls][-1:]
            names = [call.name for message in calls for call in message.calls]
            tool = self._span("tool", answer.previous_ended, times.received, inside)
            tool.set_attribute("gen_ai.tool.name", ",".join(names))
            tool.end(_nanoseconds(times.received))
        for name, start, end in (
            ("prefill", times.began, times.first), ("decode", times.first, times.ended)
        ):  # fmt: skip
            self._span(name, start, end, inside).end(_nanoseconds(end))
        span.end(_nanoseconds(times.ended))

    def failed(
        self, problem: Exception, times: RequestTimes, headers: Mapping[str, str], session: str
    ) -> None:
        from opentelemetry.trace import Status, StatusCode

        span, _ = self._request(times, headers, session)
        span.set_status(Status(StatusCode.ERROR, str(problem)[:200]))
        span.set_attribute("error.type", type(problem).__name__)
        span.end(_nanoseconds(times.ended))

    def close(self) -> None:
        """Export what is left."""
        self._provider.shutdown()

    def _request(self, times: RequestTimes, headers: Mapping[str, str], session: str) -> tuple[Any, Any]:
        """The span of a request, below the client's where `traceparent` names it, and the context inside."""
        from opentelemetry.trace import SpanKind, set_span_in_context

        span = self._tracer.start_span(
            "request", self._propagator.extract(dict(headers)), SpanKind.SERVER,
            start_time=_nanoseconds(times.received),
        )  # fmt: skip
        if session:
            span.set_attribute("gen_ai.conversation.id", session)
        return span, set_span_in_context(span)

    def _span(self, name: str, start: float, end: float, inside: Any) -> Any:
        return self._tracer.start_span(name, inside, start_time=_nanoseconds(min(start, end)))


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
