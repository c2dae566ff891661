"""The OpenAPI description of the server, and requests that schemathesis makes from it, also malformed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from test_serve import ASK, Served

from nano_coder.models.opening import local_policy, open_weights
from nano_coder.serve.served_model import ServedModel
from nano_shared.store import LogStore

CHECKS = [
    not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance,
]  # fmt: skip


@pytest.fixture(scope="module")
def server(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of weights that read 96 tokens, so that no answer is long."""
    opened = open_weights(str(tiny_folder))
    config: Any = opened.loaded.model.config
    config.max_position_embeddings = 96
    policy = local_policy(opened.loaded, opened.profile, scheduler="free")
    store = LogStore.open(tmp_path_factory.mktemp("openapi") / "log.db")
    served = Served(ServedModel(policy=policy, profile=opened.profile, store=store, name="tiny"))
    yield served
    served.close()


def test_every_route_is_described_with_its_methods(server: Served) -> None:
    described = httpx.get(f"{server.root}/openapi.json").json()["paths"]
    for path in ("/v1/chat/completions", "/v1/messages", "/sessions/{session}/v1/responses", "/tokenize"):
        assert list(described[path]) == ["post"]
        assert described[path]["post"]["requestBody"]["required"]
    for path, operations in described.items():
        for method in ("get", "post", "delete"):
            asked = httpx.request(method, f"{server.root}{path.replace('{', '').replace('}', '')}")
            assert (asked.status_code == 405) == (method not in operations), (method, path)


def asks(server: Served, mode: GenerationMode, examples: int) -> None:
    """No answer is a fault, shows a traceback, or has another form than the description says."""
    described = schemathesis.openapi.from_url(f"{server.root}/openapi.json")
    for found in described.get_all_operations():
        operation: Any = found.ok()
        if mode is GenerationMode.NEGATIVE and not operation.body:
            continue  # every text is a path

        @given(operation.as_strategy(generation_mode=mode))
        @settings(
            max_examples=examples, deadline=None, phases=[Phase.generate], derandomize=True, database=None,
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        def holds(case: Any) -> None:
            answer = case.call_and_validate(checks=CHECKS)
            assert "Traceback" not in answer.text

        holds()
    body = {"messages": [ASK], "max_tokens": 4}
    assert httpx.post(f"{server.root}/v1/chat/completions", json=body).status_code == 200


@pytest.mark.parametrize("mode", list(GenerationMode))
def test_no_request_breaks_the_server(server: Served, mode: GenerationMode) -> None:
    asks(server, mode, 1)


@pytest.mark.slow
@pytest.mark.parametrize("mode", list(GenerationMode))
def test_many_requests_break_nothing(server: Served, mode: GenerationMode) -> None:
    asks(server, mode, 150)
