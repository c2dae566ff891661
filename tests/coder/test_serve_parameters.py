"""What a request asks of the sampling, and answers that the client began: honoured, or refused by name."""

from __future__ import annotations

import gzip
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strict_api import KEY, Say, strict_api
from test_serve import ASK, Served

from nano_apis.served_models import ServedModel
from nano_coder.agent.profiles import API_1, HERMES_1
from nano_coder.models.endpoint.policy import EndpointPolicy
from nano_coder.models.local.sampler import (
    DecodingRow,
    GenerationRequest,
    StopConditions,
    draw,
    shaped_logits,
)
from nano_coder.models.opening import local_policy, open_weights
from nano_coder.models.scripted import ScriptedPolicy
from nano_coder.verify.trainable import verify
from nano_shared.store import LogStore
from nano_shared.types import Sampling, Shaping

ASKS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [ASK]}, "/v1/messages": {"messages": [ASK]},
    "/v1/responses": {"input": "Say hello."}, "/v1/completions": {"prompt": "Say hello."},
}  # fmt: skip


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Served]]:
    opened: list[Served] = []

    def start(policy: Any, profile: Any) -> Served:
        store = LogStore.open(tmp_path_factory.mktemp("served") / "log.db")
        opened.append(Served(ServedModel(policy=policy, profile=profile, store=store, name="tiny")))
        return opened[-1]

    yield start
    for server in opened:
        server.close()


@pytest.fixture(scope="module")
def tiny(serve: Callable[..., Served], tiny_folder: Path) -> Served:
    opened = open_weights(str(tiny_folder))
    return serve(local_policy(opened.loaded, opened.profile, scheduler="free"), opened.profile)


def post(server: Served, path: str, **body: Any) -> httpx.Response:
    most = "max_output_tokens" if path.endswith("responses") else "max_tokens"
    return httpx.post(
        f"{server.root}{path}", json={"temperature": 0, most: 12, **ASKS[path], **body}, timeout=60
    )


def sampled(server: Served, path: str, **body: Any) -> tuple[int, ...]:
    """The ids of an answer."""
    answer = post(server, path, return_token_ids=True, **body)
    assert answer.status_code == 200, answer.text
    told = answer.json()
    return tuple((told["choices"][0] if "choices" in told else told)["token_ids"])


# ---------------------------------------------------------------------------------------------- shaping


@pytest.mark.parametrize("path", ASKS)
def test_every_api_shapes_the_logits(tiny: Served, path: str) -> None:
    free = sampled(tiny, path)
    assert free[0] not in sampled(tiny, path, logit_bias={str(free[0]): -100})[:1]
    allowed = [400, 500]
    assert set(sampled(tiny, path, allowed_token_ids=allowed)) <= set(allowed)
    assert set(sampled(tiny, path, logit_bias={"300": 100})) == {300}
    often = sampled(tiny, path, logit_bias={"300": 100}, frequency_penalty=2, presence_penalty=2)
    assert set(often) == {300}, "100 is more than these penalties"
    mild = {"logit_bias": {str(token): 30 for token in allowed}}
    assert len(set(sampled(tiny, path, **mild, frequency_penalty=2))) == 2, "one after the other"
    (eos, *_) = sorted(tiny.policy.engine.eos_ids)  # type: ignore[attr-defined]
    ends = {"logit_bias": {str(eos): 100}}
    assert sampled(tiny, path, **ends) == (eos,)
    assert len(sampled(tiny, path, **ends, min_tokens=5)) == 6


def test_log_probs_are_those_of_the_policy_and_the_run_is_not_trained(tiny: Served) -> None:
    before = {run.id for run in tiny.runs()}
    sampled(tiny, "/v1/chat/completions", temperature=0.7, seed=3, repetition_penalty=1.5, min_p=0.2)
    tokens_free = sampled(tiny, "/v1/chat/completions", temperature=0.7, seed=3, min_p=0.0, logit_bias={})
    shaped, free = [run for run in tiny.runs() if run.id not in before][::-1]
    if shaped.turns[0].completion.sampling.shaping is None:
        shaped, free = free, shaped
    assert free.turns[0].completion.sampling.shaping is None, "values that change nothing"
    assert free.turns[0].completion.tokens.sampled_ids == tokens_free  # type: ignore[union-attr]
    completion = shaped.turns[0].completion
    assert completion.sampling.shaping == Shaping(repetition_penalty=1.5, min_p=0.2)
    tokens: Any = completion.tokens
    row = (*tokens.context_ids, *tokens.sampled_ids)
    policy: Any = tiny.policy
    (scores,) = policy.engine.score([row], first=len(tokens.context_ids), temperature=0.7)
    assert scores == pytest.approx(tokens.logprobs, abs=1e-4)
    assert "constrained sampling" in [finding.kind for finding in verify(shaped) if finding.blocks]


BIASES = st.dictionaries(st.integers(0, 5), st.floats(-5, 5), max_size=2).map(lambda b: tuple(b.items()))
LOGITS = st.lists(st.floats(-8, 8, width=32), min_size=6, max_size=6)


@given(
    LOGITS, st.lists(st.integers(0, 5), max_size=4), st.lists(st.integers(0, 5), max_size=5),
    st.builds(
        Shaping, frequency_penalty=st.floats(-2, 2), presence_penalty=st.floats(-2, 2),
        repetition_penalty=st.floats(0.5, 2), min_p=st.sampled_from([0.0, 0.1, 0.5]),
        min_tokens=st.integers(0, 6), logit_bias=BIASES,
        allowed_token_ids=st.sets(st.integers(1, 5), max_size=3).map(lambda ids: tuple(sorted(ids))),
    ),
    st.sampled_from([0.5, 1.0, 2.0]), st.floats(0, 1, exclude_max=True),
)  # fmt: skip
@settings(deadline=None)
def test_logits_are_shaped_as_vllm_has_it(
    logits: list[float],
    prompt: list[int],
    ids: list[int],
    shaping: Shaping,
    temperature: float,
    uniform: float,
) -> None:
    """Against the formulas, written for one token at a time; token 0 ends the turn."""
    sampling = Sampling(temperature=temperature, shaping=shaping, max_tokens=9)
    row = DecodingRow(GenerationRequest((1, *prompt), sampling, 0), StopConditions({0}, 100))
    row.ids.extend(ids)
    expected = []
    for token, logit in enumerate(logits):
        if shaping.allowed_token_ids and token not in shaping.allowed_token_ids:
            expected.append(-math.inf)
            continue
        logit += dict(shaping.logit_bias).get(token, 0.0)
        if token == 0 and len(ids) < shaping.min_tokens:
            logit = -1e9
        if token in (1, *prompt, *ids):
            logit = logit / shaping.repetition_penalty if logit > 0 else logit * shaping.repetition_penalty
        logit -= shaping.frequency_penalty * ids.count(token) + shaping.presence_penalty * (token in ids)
        expected.append(logit)
    probs = torch.tensor(expected, dtype=torch.float64).div(temperature).softmax(0)
    kept = probs * (probs >= shaping.min_p * probs.max() * (1 - 1e-6))
    given = torch.tensor([logits])
    shaped = shaped_logits([row], given)
    found = (shaped[0].double() / temperature).softmax(0)
    torch.testing.assert_close(found, kept / kept.sum(), atol=1e-4, rtol=0)
    (token,), (logprob,) = draw(given, [sampling], [uniform], shaped)
    assert kept[token] > 0
    assert logprob == pytest.approx(float((given[0] / temperature).log_softmax(0)[token]), abs=1e-5)


WRONG: list[tuple[str, Any]] = [
    ("logit_bias", {"x": 1}), ("logit_bias", {"1": 101}), ("logit_bias", {"99999": 1}), ("logit_bias", [1]),
    ("logit_bias", {str(token): 1 for token in range(1025)}), ("allowed_token_ids", [99999]),
    ("allowed_token_ids", ["a"]), ("allowed_token_ids", [True]), ("frequency_penalty", 3), ("min_p", 2),
    ("presence_penalty", "1"), ("repetition_penalty", 0), ("min_tokens", -1),
]  # fmt: skip
UNREAD: list[tuple[str, Any]] = [
    ("ignore_eos", True), ("stop_token_ids", [3]), ("bad_words", ["x"]), ("guided_json", {"type": "object"}),
    ("guided_regex", "[0-9]"), ("guided_choice", ["a"]), ("structured_outputs", {"regex": "x"}),
    ("chat_template_kwargs", {"enable_thinking": False}), ("best_of", 2), ("suffix", "x"),
    ("use_beam_search", True), ("truncate_prompt_tokens", 5), ("previous_response_id", "r"),
    ("functions", [{"name": "x"}]), ("mcp_servers", [{}]), ("temperatur", 1), ("prompt_logprobs", 1),
]  # fmt: skip


@pytest.mark.parametrize("path", ASKS)
def test_what_is_not_served_is_refused_by_its_name(tiny: Served, path: str) -> None:
    before = len(tiny.runs())
    for name, value in (*WRONG, *UNREAD):
        answer = post(tiny, path, **{name: value})
        assert answer.status_code == 400, (name, answer.text)
        assert name in answer.json()["error"]["message"]
    assert len(tiny.runs()) == before


@pytest.mark.parametrize("path", ASKS)
def test_what_changes_nothing_is_taken(tiny: Served, path: str) -> None:
    free = sampled(tiny, path)
    for name, value in {
        "user": "me", "metadata": {"a": "b"}, "logit_bias": {}, "frequency_penalty": 0, "n": 1, "top_k": -1,
        "guided_json": None, "stop_token_ids": [], "ignore_eos": False, "repetition_penalty": 1.0,
    }.items():  # fmt: skip
        assert sampled(tiny, path, **{name: value}) == free, name


def test_a_policy_without_logits_refuses_to_shape_them(serve: Callable[..., Served]) -> None:
    answer = post(serve(ScriptedPolicy(["x"]), HERMES_1), "/v1/chat/completions", min_p=0.5)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "min_p")


def test_the_server_behind_gets_them(serve: Callable[..., Served]) -> None:
    asked = {"frequency_penalty": 1.5, "logit_bias": {"5": -3}}
    with strict_api(Say("hello"), takes=("max_tokens",)) as (behind, script):
        front = serve(EndpointPolicy("little", behind.base_url, KEY), API_1)
        for path in list(ASKS)[:3]:
            assert post(front, path, **asked).status_code == 200
            assert {name: script.seen[-1][name] for name in asked} == asked
        begun = [ASK, {"role": "assistant", "content": "So"}]
        assert post(front, "/v1/messages", messages=begun).status_code == 400, "this one continues nothing"
    assert front.runs()[0].turns[0].completion.sampling.shaping == Shaping(
        frequency_penalty=1.5, logit_bias=((5, -3.0),)
    )


BEGUN = [ASK, {"role": "assistant", "content": "three, fo"}]


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/v1/chat/completions", {"continue_final_message": True}),
        ("/v1/chat/completions", {"add_generation_prompt": False}),
        ("/v1/messages", {}),
    ],
)
def test_an_answer_begins_anew(tiny: Served, path: str, more: dict[str, Any]) -> None:
    answer = post(tiny, path, messages=BEGUN, **more)
    assert (answer.status_code, "begins anew" in answer.text) == (400, True), answer.text


def test_an_assistants_last_message_is_history_in_openais_apis(tiny: Served) -> None:
    """As in vLLM without the flags: a new turn follows."""
    told = post(tiny, "/v1/chat/completions", messages=BEGUN, return_token_ids=True).json()
    policy: Any = tiny.policy
    text = policy.decode(told["prompt_token_ids"])
    assert text.endswith("assistant\n")
    assert "three, fo" in text


@pytest.mark.parametrize("path", ASKS)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stream", "false"), ("stream", 1), ("return_token_ids", "no"), ("parallel_tool_calls", "false"),
        ("stream_options", ["include_usage"]), ("stream_options", {"include_usage": "no"}),
    ],
)  # fmt: skip
def test_a_flag_is_true_or_false(tiny: Served, path: str, name: str, value: Any) -> None:
    """`"false"` is true in Python: the answer was streamed."""
    answer = post(tiny, path, **{name: value})
    assert (answer.status_code, " must be " in answer.text) == (400, True), answer.text


@pytest.mark.parametrize(
    "message",
    [
        {"content": "x", "function_call": {"name": "f", "arguments": "{}"}}, {"content": "x", "prefix": True},
        {"content": "x", "partial": True}, {"content": None, "audio": {"id": "a"}},
    ],
)  # fmt: skip
def test_a_message_loses_nothing_silently(tiny: Served, message: dict[str, Any]) -> None:
    answer = post(tiny, "/v1/chat/completions", messages=[ASK, {"role": "assistant", **message}])
    assert (answer.status_code, "messages[1]." in answer.text) == (400, True), answer.text


def test_a_choice_of_tools_without_a_type(tiny: Served) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    for choice in ({}, {"function": {"name": "g"}}):
        answer = post(tiny, "/v1/chat/completions", tools=tools, tool_choice=choice)
        assert (answer.status_code, "tool_choice names" in answer.text) == (400, True), answer.text
    none = sampled(tiny, "/v1/chat/completions", tools=tools, tool_choice={"type": "none"})
    assert none == sampled(tiny, "/v1/chat/completions", tools=tools, tool_choice="none")


def test_a_schema_that_no_token_can_begin(tiny: Served) -> None:
    form = {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}
    answer = post(tiny, "/v1/chat/completions", response_format=form)
    assert (answer.status_code, "<state>" in answer.text) == (400, False), answer.text


def _nested(levels: int) -> str:
    return '{"a":' * levels + "1" + "}" * levels


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ('"max_tokens": 1, "max_tokens": 2', "'max_tokens' is given twice"),
        ('"metadata": {"a": 1, "a": 2}', "'a' is given twice"),
        ('"tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": 1e999}}}]', "1e999"),
        (f'"tools": [{{"function": {{"name": "f", "parameters": {_nested(300)}}}}}]', "deep"),
        (f'"metadata": {_nested(100_000)}', "deep"),
        ('"temperature": NaN', "NaN"),
        ('"user": "\xff"', "UTF-8"),
    ],
)  # fmt: skip
def test_a_body_is_strict_json(tiny: Served, body: str, why: str) -> None:
    whole = f'{{"messages": [{{"role": "user", "content": "a"}}], {body}}}'
    for path in ("/v1/chat/completions", "/v1/messages"):
        answer = httpx.post(f"{tiny.root}{path}", content=whole.encode("latin-1"))
        assert (answer.status_code, why in answer.text) == (400, True), answer.text


@pytest.mark.parametrize(
    "arguments", [_nested(5000), _nested(300), '{"a": NaN}', '{"a": 1e999}', '{"a": 1, "a": 2}', "[]"]
)
def test_arguments_of_any_text_are_history(tiny: Served, arguments: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    said = [
        ASK,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "x"},
    ]
    assert post(tiny, "/v1/chat/completions", messages=said, max_tokens=1).status_code in (200, 400)


def test_a_packed_body_is_refused_with_the_way_out(tiny: Served) -> None:
    answer = httpx.post(
        f"{tiny.root}/v1/chat/completions", content=gzip.compress(b"{}"), headers={"Content-Encoding": "gzip"}
    )
    assert (answer.status_code, "send the body as it is" in answer.text) == (415, True), answer.text
