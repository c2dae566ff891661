"""Forms of answers, raw prompts, adapters and spans of `nano-coder serve`, over HTTP and by the log."""

from __future__ import annotations

import gc
import json
import re
import shutil
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_serve import ASK, CALL, JSON, TOOLS, Served

from nano_apis.completions import token_texts
from nano_apis.request import (
    AnswerForm,
    ModelAnswer,
    TextDelta,
    grammar_of,
)
from nano_apis.served_models import Adapters, ServedModel
from nano_coder.agent.dialects.dialect import DIALECTS, Dialect
from nano_coder.agent.profiles import HERMES_1, find_profile
from nano_coder.models.local.engine import Engine
from nano_coder.models.opening import SharedBase, adapter_base_of, local_policy, open_weights
from nano_coder.models.scripted import ScriptedPolicy
from nano_coder.serve.access import Access, BadRequest
from nano_coder.verify.tokens import logprob_gap
from nano_coder.verify.trainable import verify
from nano_shared.store import LogStore
from nano_shared.types import Completion, Finish, Sampling, StopReason, ToolCall, ToolSpec, TurnTokens

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
ADMIN = {"authorization": "Bearer boss"}


@pytest.fixture
def serve(tmp_path: Path, one_thread: None) -> Iterator[Callable[..., Served]]:
    opened: list[Served] = []

    def start(policy: Any, profile: Any, name: str = "tiny", **options: Any) -> Served:
        store = LogStore.open(tmp_path / "log.db")
        opened.append(Served(ServedModel(policy=policy, profile=profile, store=store, name=name), **options))
        return opened[-1]

    yield start
    for server in opened:
        server.close()


@pytest.fixture
def tiny(serve: Callable[..., Served], tiny_folder: Path) -> Served:
    opened = open_weights(str(tiny_folder))
    return serve(local_policy(opened.loaded, opened.profile, scheduler="free"), opened.profile)


def post(server: Served, path: str, body: Any, **options: Any) -> httpx.Response:
    return httpx.post(f"{server.root}{path}", json=body, timeout=120, **options)


def kinds(run: Any) -> list[str]:
    return [finding.kind for finding in verify(run) if finding.blocks]


# ------------------------------------------------------------------------------------ forms of answers


def fits_person(text: str) -> bool:
    value = json.loads(text)
    return (
        sorted(value) == ["age", "name", "tags"]
        and len(value["name"]) <= 8
        and 0 <= value["age"] <= 130
        and set(value["tags"]) <= {"a", "b"}
    )


def test_a_schema_holds_in_every_api_and_the_log_says_why_it_is_not_trained(tiny: Served) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON, "strict": True}}
    chats = tiny.openai().chat.completions.create(
        model="nano", messages=[ASK], response_format=form, seed=1, n=4  # type: ignore[list-item]
    )  # fmt: skip
    answer = tiny.openai().responses.create(
        model="nano", input="Who?", text={"format": {"type": "json_schema", "name": "p", "schema": PERSON}}
    )
    message = tiny.anthropic().messages.create(
        model="nano", messages=[ASK], max_tokens=300,  # type: ignore[list-item]
        output_config={"format": {"type": "json_schema", "schema": PERSON}},
    )  # fmt: skip
    texts = [choice.message.content or "" for choice in chats.choices]
    texts += [answer.output_text, message.content[0].text]  # type: ignore[union-attr]
    assert all(map(fits_person, texts)), texts
    assert len(set(texts)) > 1, "the policy, and not the grammar, chooses among what is allowed"
    tiny.check_tokens()  # log-probs are the policy's without the grammar, and ids end a turn
    policy: Any = tiny.policy
    for run in tiny.runs():
        assert "constrained sampling" in kinds(run)
        assert logprob_gap(run, policy.engine).exact


def test_a_row_without_a_form_is_sampled_as_if_alone(tiny: Served) -> None:
    """Constrained and free rows share a batch; the free row's tokens and log-probs are those it has alone."""
    asked: Any = {"model": "nano", "messages": [ASK], "max_tokens": 60, "seed": 7, "logprobs": True}

    def ask(**more: Any) -> Any:
        return tiny.openai().chat.completions.create(**asked, **more).choices[0]

    alone, together = ask(), []
    form = {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON}}
    threads = [threading.Thread(target=lambda: together.append(ask()))]
    threads += [threading.Thread(target=lambda: ask(response_format=form)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together[0].message.content == alone.message.content
    logprobs = [[each.logprob for each in choice.logprobs.content] for choice in (alone, together[0])]
    assert logprobs[1] == pytest.approx(logprobs[0], abs=1e-4)


@pytest.mark.slow
def test_a_streamed_answer_of_a_form_and_json_mode(tiny: Served) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON}}
    chunks = tiny.openai().chat.completions.create(
        model="nano", messages=[ASK], response_format=form, stream=True, seed=2  # type: ignore
    )  # fmt: skip
    assert fits_person("".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices))
    body = {
        "messages": [ASK],
        "response_format": {"type": "json_object"},
        "max_tokens": 400,
        "temperature": 0,
    }
    answer = post(tiny, "/v1/chat/completions", body).json()["choices"][0]
    assert answer["message"]["content"].startswith("{")
    assert answer["finish_reason"] == "length" or isinstance(json.loads(answer["message"]["content"]), dict)


REFUSED = [
    ({"type": "json_schema", "json_schema": {"schema": {"if": {"type": "string"}}}}, "if"),
    (
        {"type": "json_schema", "json_schema": {"schema": {"type": "array", "uniqueItems": True}}},
        "uniqueItems",
    ),
    ({"type": "json_schema", "json_schema": {"schema": {"$ref": "http://127.0.0.1:9/x"}}}, "127.0.0.1:9"),
    ({"type": "json_schema", "json_schema": {"schema": {"$ref": "#/$defs/none"}}}, "none"),
    (
        {"type": "json_schema", "json_schema": {"schema": {"type": "string", "pattern": "(?=x)"}}},
        "look-around",
    ),
    ({"type": "json_schema", "json_schema": {"schema": {"enum": []}}}, "Unsatisfiable"),
    ({"type": "json_schema", "json_schema": {"schema": {"type": "thing"}}}, "thing"),
    ({"type": "json_schema", "json_schema": {"schema": True}}, "an object"),
    ({"type": "json_schema"}, "schema"),
    ({"type": "json_schema", "json_schema": {"schema": {"enum": ["x" * 300_000]}}}, "longer than"),
    ({"type": "grammar"}, "json_schema"),
    ("json", "json_schema"),
]


def test_a_form_that_cannot_be_constrained_is_refused_with_its_reason(tiny: Served) -> None:
    for form, why in REFUSED:
        refuses_form(tiny, form, why)
    assert tiny.runs() == []


def refuses_form(tiny: Served, form: Any, why: str) -> None:
    answer = post(tiny, "/v1/chat/completions", {"messages": [ASK], "response_format": form})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], why in error["message"]) == (400, "response_format", True), (
        error
    )


def test_a_loose_schema_ignores_what_cannot_be_forced(tiny: Served) -> None:
    schema = {"type": "integer", "minimum": 0, "maximum": 5, "not": {"const": 3}}
    form = {"type": "json_schema", "json_schema": {"schema": schema, "strict": False}}
    answer = post(tiny, "/v1/chat/completions", {"messages": [ASK], "response_format": form}).json()
    assert 0 <= int(answer["choices"][0]["message"]["content"]) <= 5


def test_a_schema_that_nests_deeply_breaks_nothing(tiny: Served) -> None:
    schema: Any = {"type": "string"}
    for _ in range(300):
        schema = {"type": "array", "items": schema}
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    answer = post(tiny, "/v1/chat/completions", {"messages": [ASK], "response_format": form, "max_tokens": 5})
    assert answer.status_code in (200, 400)
    assert post(tiny, "/v1/chat/completions", {"messages": [ASK], "max_tokens": 5}).status_code == 200


def test_only_local_weights_are_constrained(serve: Callable[..., Served]) -> None:
    server = serve(ScriptedPolicy(["x"]), HERMES_1)
    for body in (
        {"messages": [ASK], "response_format": {"type": "json_object"}},
        {"messages": [ASK], "tools": TOOLS, "tool_choice": "required"},
    ):
        answer = post(server, "/v1/chat/completions", body)
        assert (answer.status_code, "local weights" in answer.json()["error"]["message"]) == (400, True)


def test_without_llguidance_a_sentence_says_what_to_install(
    tiny: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    body = {"messages": [ASK], "response_format": {"type": "json_object"}}
    answer = post(tiny, "/v1/chat/completions", body)
    message = answer.json()["error"]["message"]
    assert answer.status_code == 501
    assert "pip install 'nano-rl-coder[constrained]'" in message
    assert post(tiny, "/v1/chat/completions", {"messages": [ASK], "max_tokens": 3}).status_code == 200


def test_a_tool_is_called_where_the_client_says_so(tiny: Served, serve: Callable[..., Served]) -> None:
    import openai

    client = tiny.openai()
    asked: Any = {"model": "nano", "messages": [ASK], "max_tokens": 200, "seed": 3}
    schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9, "minimum": 0}},
              "required": ["a"], "additionalProperties": False}  # fmt: skip
    tools = [
        {"type": "function", "function": {"name": name, "parameters": schema}} for name in ("one", "two")
    ]
    for choice, names in (
        ("required", {"one", "two"}), ({"type": "function", "function": {"name": "two"}}, {"two"})
    ):  # fmt: skip
        answer = client.chat.completions.create(**asked, tools=tools, tool_choice=choice).choices[0]
        (call,) = answer.message.tool_calls
        assert answer.finish_reason == "tool_calls"
        assert call.function.name in names
        assert 0 <= json.loads(call.function.arguments)["a"] <= 9
    message = tiny.anthropic().messages.create(
        model="nano", messages=[ASK], max_tokens=200, tool_choice={"type": "any"},  # type: ignore[list-item]
        tools=[{"name": "one", "input_schema": schema}],  # type: ignore[typeddict-item]
    )  # fmt: skip
    assert message.content[0].name == "one"  # type: ignore[union-attr]
    response = client.responses.create(
        model="nano", input="Hi", tool_choice={"type": "function", "name": "two"},
        tools=[{"type": "function", "name": "two", "parameters": schema, "strict": True}],
    )  # fmt: skip
    assert response.output[0].name == "two"  # type: ignore[union-attr]
    for choice in ("required", {"type": "function", "function": {"name": "three"}}, {"type": "thing"}):
        with pytest.raises(openai.BadRequestError, match="tool_choice"):
            client.chat.completions.create(
                **asked, tools=tools if choice != "required" else [], tool_choice=choice
            )


def matches(grammar: str, texts: list[str]) -> list[bool]:
    """Whether the grammar accepts each text, by a vocabulary of bytes."""
    from llguidance import LLMatcher, LLTokenizer

    vocabulary = LLTokenizer("byte")
    found = []
    for text in texts:
        matcher = LLMatcher(vocabulary, grammar)
        tokens = vocabulary.tokenize_str(text)
        found.append(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())
    return found


SCHEMA = {"type": "object", "required": ["city"],
          "properties": {"city": {"type": "string"}, "n": {"$ref": "#/$defs/N"}},
          "additionalProperties": False, "$defs": {"N": {"type": "integer"}}}  # fmt: skip
UNFORCED = {"gemma", "glm", "line-edit", "pythonic", "qwen-coder"}


@pytest.mark.some(6)
@pytest.mark.parametrize("name", sorted(DIALECTS))
def test_the_grammar_of_a_dialect_accepts_what_it_writes_and_nothing_else(name: str) -> None:
    dialect: Dialect = DIALECTS.find(name)
    tools = [ToolSpec(name=each, description="", parameters=SCHEMA) for each in ("look_up", "search")]
    form = AnswerForm(calls=("look_up",))
    if name in UNFORCED:
        with pytest.raises(BadRequest, match="tool_choice"):
            grammar_of(form, tools, dialect, {})
        return
    grammar = grammar_of(form, tools, dialect, {})
    good = [{"city": "Bonn am Rhein", "n": 3}, {"city": '\u00dcber "alles"'}]
    texts = [dialect.render("", [ToolCall(name="look_up", arguments=each)], tools) for each in good]
    for text, arguments in zip(texts, good, strict=True):
        (call,) = dialect.parse(text, tools).calls
        assert (call.name, call.arguments) == ("look_up", arguments)
    bad = [dialect.render("", [ToolCall(name="search", arguments=good[0])], tools), "Let me see.",
           dialect.render("", [ToolCall(name="look_up", arguments={"n": 3})], tools)]  # fmt: skip
    assert matches(grammar, [*texts, *bad]) == [True, True, False, False, False]


# -------------------------------------------------------------------------------------- raw prompts


def complete(server: Served, **body: Any) -> Any:
    answer = post(server, "/v1/completions", {"model": "nano", **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


TEXT = "def add(a, b):\n    return a + b\n# \u00fcber \U0001f600\n"


def test_a_prompt_is_a_text_or_ids_or_a_list_of_either(tiny: Served) -> None:
    policy: Any = tiny.policy
    ids = list(policy.template.encoder.prompt(TEXT))
    asked = {"max_tokens": 5, "seed": 1, "return_token_ids": True}
    alike = [complete(tiny, prompt=prompt, **asked) for prompt in (TEXT, [TEXT], ids, [ids])]
    assert len({json.dumps(answer["choices"]) for answer in alike}) == 1
    (choice,) = alike[0]["choices"]
    assert (choice["prompt_token_ids"], len(choice["token_ids"])) == (ids, 5)
    two = complete(tiny, prompt=[TEXT, ids[:3]], n=2, **asked)
    assert [each["index"] for each in two["choices"]] == [0, 1, 2, 3]
    assert [each["prompt_token_ids"] for each in two["choices"]] == [ids, ids, ids[:3], ids[:3]]
    assert two["usage"]["prompt_tokens"] == 2 * len(ids) + 6
    sdk = tiny.openai().completions.create(model="nano", prompt=TEXT, max_tokens=5, seed=1)
    assert sdk.choices[0].text == choice["text"]


def test_completions_are_logged_as_runs(tiny: Served) -> None:
    complete(tiny, prompt=TEXT, max_tokens=6, n=3, seed=4)
    runs = tiny.runs()
    assert len(runs) == 3
    assert len({run.task.key for run in runs}) == 1, "one prompt is one group"
    assert {turn.messages[0].content for run in runs for turn in run.turns} == {TEXT}
    tiny.check_tokens()
    assert kinds(runs[0]) == ["unfinished", "no verdict"]
    forged = (
        runs[0]
        .turns[0]
        .model_copy(
            update={"messages": (runs[0].turns[0].messages[0].model_copy(update={"content": "other"}),)}
        )
    )
    from nano_coder.verify.tokens import TokenCheck

    policy: Any = tiny.policy
    check = TokenCheck(template=policy.template, eos_ids=policy.engine.eos_ids, blobs=tiny.store.blobs)
    assert check.refusal(runs[0].model_copy(update={"turns": (forged,)})) is not None


# vLLM's cases of log-probs, echo and offsets, as data: what is asked -> what holds of the answer
def test_logprobs_echo_and_offsets(tiny: Served) -> None:
    for echo, logprobs, max_tokens in product([False, True], [None, 0, 1, 5], [0, 1, 8]):
        tells_logprobs(tiny, echo, logprobs, max_tokens)


def tells_logprobs(tiny: Served, echo: bool, logprobs: int | None, max_tokens: int) -> None:
    policy: Any = tiny.policy
    ids = list(policy.template.encoder.prompt(TEXT))
    body = {"prompt": TEXT, "echo": echo, "logprobs": logprobs, "max_tokens": max_tokens, "seed": 5}
    if max_tokens == 0 and not echo:
        assert post(tiny, "/v1/completions", body).status_code == 400
        return
    answer = complete(tiny, **body, return_token_ids=True)
    (choice,) = answer["choices"]
    sampled = choice["token_ids"]
    assert choice["text"].startswith(TEXT) is echo
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (
        len(ids),
        len(sampled),
    )
    assert len(sampled) <= max_tokens
    if logprobs is None:
        assert choice["logprobs"] is None
        return
    told = choice["logprobs"]
    shown = [*(ids if echo else ()), *sampled]
    assert {len(told[name]) for name in told} == {len(shown)}
    (scores,) = policy.engine.score([(*ids, *sampled)])
    expected = [None, *scores] if echo else scores[len(ids) - 1 :]
    assert told["token_logprobs"][0] == (None if echo else pytest.approx(expected[0], abs=1e-4))
    assert told["token_logprobs"][1:] == pytest.approx(expected[1:], abs=1e-4)
    for at, (token, offset) in enumerate(zip(told["tokens"], told["text_offset"], strict=True)):
        if shown[at] not in policy.engine.eos_ids:
            assert choice["text"][offset : offset + len(token)] == token
    for place, best in enumerate(told["top_logprobs"][int(echo) :], int(echo)):
        assert logprobs <= len(best) <= logprobs + 1, "the likeliest, and the token itself"
        assert max(best.values()) >= told["token_logprobs"][place] - 1e-6
        assert list(best.values()) == sorted(best.values(), reverse=True)


def test_a_scored_prompt_is_a_run_without_turns(tiny: Served) -> None:
    complete(tiny, prompt=[TEXT, "x = 1"], max_tokens=0, echo=True, logprobs=1)
    runs = tiny.runs()
    assert [(run.turns, run.stop.value if run.stop else None) for run in runs] == [((), "finished")] * 2
    assert runs[0].task.provenance.original["scored_ids"]  # type: ignore[index]
    assert "no turns" in kinds(runs[0])


def test_a_long_prompt_is_scored_in_chunks(tiny: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    from nano_coder.models.local import engine

    policy: Any = tiny.policy
    ids = [(31 * at) % 900 + 5 for at in range(101)]
    (expected,) = policy.engine.score([tuple(ids)], 0.7)
    for size in (7, 50, 100, 1024):
        monkeypatch.setattr(engine, "_CHUNK", size)
        for first in (1, 2, 50, 100):
            scores = policy.engine.score_tokens(ids, 0.7, first=first, top=2)
            assert [each.logprob for each in scores] == pytest.approx(expected[first - 1 :], abs=1e-4)


def test_completions_are_streamed_and_stopped(tiny: Served) -> None:
    asked: Any = {"model": "nano", "prompt": [TEXT, "import "], "max_tokens": 30, "seed": 6, "n": 2}
    whole = tiny.openai().completions.create(**asked)
    texts = [""] * 4
    reasons: list[str | None] = [None] * 4
    chunks = list(
        tiny.openai().completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert chunks[-1].usage == whole.usage
    one: Any = {**asked, "prompt": TEXT, "n": 1}
    text = tiny.openai().completions.create(**one).choices[0].text
    stop = text[6:9]
    cut = tiny.openai().completions.create(**one, stop=[stop]).choices[0]
    assert (cut.text, cut.finish_reason) == (text[: text.find(stop)], "stop")
    streamed = complete_stream(tiny, {**one, "stop": [stop], "echo": True, "logprobs": 1})
    assert "".join(each["text"] for each in streamed) == TEXT + cut.text
    offsets = [at for each in streamed if each["logprobs"] for at in each["logprobs"]["text_offset"]]
    assert offsets[0] == len(TEXT)
    assert offsets == sorted(offsets)


def complete_stream(server: Served, body: Any) -> list[Any]:
    return [choice for each in deltas_of(server, "/v1/completions", body) for choice in each["choices"]]


def test_chat_tells_the_likeliest_tokens_and_streams_choices(tiny: Served) -> None:
    asked: Any = {"model": "nano", "messages": [ASK], "max_tokens": 6, "seed": 8}
    answer = tiny.openai().chat.completions.create(**asked, logprobs=True, top_logprobs=3, n=2)
    for choice in answer.choices:
        for each in choice.logprobs.content:  # type: ignore[union-attr]
            assert len(each.top_logprobs) == 3
            assert each.top_logprobs[0].logprob >= each.logprob - 1e-4
    texts = ["", ""]
    for chunk in tiny.openai().chat.completions.create(**asked, n=2, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in answer.choices]


def deltas_of(server: Served, path: str, body: Any) -> list[Any]:
    """The data of the events of a streamed answer."""
    text = post(server, path, {**body, "stream": True}).text
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def test_a_streamed_answer_tells_the_likeliest_tokens_of_the_whole_one(tiny: Served) -> None:
    for stop in ([], ["e"]):
        asked: Any = {"messages": [ASK], "max_tokens": 30, "seed": 8, "logprobs": True, "top_logprobs": 3}
        (whole,) = post(tiny, "/v1/chat/completions", {**asked, "stop": stop}).json()["choices"]
        chunks = deltas_of(tiny, "/v1/chat/completions", {**asked, "stop": stop})
        given = [chunk["choices"][0]["logprobs"] for chunk in chunks]
        told = [each for logprobs in given if logprobs for each in logprobs["content"]]
        assert told == close(whole["logprobs"]["content"])
        assert all(len(each["top_logprobs"]) == 3 for each in told)
    asked = {"prompt": TEXT, "max_tokens": 30, "seed": 8, "logprobs": 3}
    (choice,) = post(tiny, "/v1/completions", asked).json()["choices"]
    parts = [each["logprobs"] for each in complete_stream(tiny, asked) if each["logprobs"]]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [each for part in parts for each in part[name]] == close(choice["logprobs"][name])
    assert all(len(each) >= 3 for each in choice["logprobs"]["top_logprobs"])


def test_responses_tell_logprobs_where_the_request_includes_them(tiny: Served) -> None:
    asked: Any = {"input": "Say hello.", "max_output_tokens": 30, "seed": 8, "top_logprobs": 2}
    bare = post(tiny, "/v1/responses", asked).json()
    assert bare["output"][0]["content"][0]["logprobs"] == []
    asked["include"] = ["reasoning.encrypted_content", "message.output_text.logprobs"]
    told = post(tiny, "/v1/responses", asked).json()["output"][0]["content"][0]["logprobs"]
    tokens = newest(tiny).tokens
    assert tokens is not None
    assert [each["logprob"] for each in told] == close(list(tokens.logprobs))
    assert all(len(each["top_logprobs"]) == 2 for each in told)
    events = deltas_of(tiny, "/v1/responses", asked)
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    (done,) = [event for event in events if event["type"] == "response.output_text.done"]
    (part,) = [event["part"] for event in events if event["type"] == "response.content_part.done"]
    in_deltas = [each for event in deltas for each in event["logprobs"]]
    assert in_deltas == done["logprobs"] == part["logprobs"] == close(told)
    for wrong in ({"include": "x"}, {"include": 3}, {"text": "x"}, {"top_logprobs": 99}):
        assert post(tiny, "/v1/responses", {**asked, **wrong}).status_code == 400


def close(value: Any) -> Any:
    """Equal to what another batch computes."""
    if isinstance(value, float):
        return pytest.approx(value, abs=1e-4)
    if isinstance(value, list):
        return [close(each) for each in value]
    return {name: close(each) for name, each in value.items()} if isinstance(value, dict) else value


def test_tokens_whose_text_is_held_back_are_streamed_with_the_next_text(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = TurnTokens(context_ids=(9,), sampled_ids=(1, 2, 3), logprobs=(-0.1, -0.2, -0.3))
    completion = Completion(
        text="ab", finish=Finish.STOP, tokens=tokens, sampling=Sampling(), policy_id="p", policy_version=0
    )

    def answer(request: Any, session: str, on_text: Callable[[TextDelta], bool], *_: Any) -> ModelAnswer:
        on_text(TextDelta("", (1,), (-0.1,)))  # it may begin a call
        on_text(TextDelta("ab", (2,), (-0.2,)))
        return ModelAnswer(
            run="r", text="ab", calls=(), completion=completion, prompt_ids=(9,), prompt_tokens=1,
            sampled_tokens=3,
        )  # fmt: skip

    server = serve(ScriptedPolicy([]), HERMES_1)
    monkeypatch.setattr(server.conversations, "answer", answer)
    body = {"messages": [ASK], "tools": TOOLS, "return_token_ids": True}
    choices = [chunk["choices"][0] for chunk in deltas_of(server, "/v1/chat/completions", body)]
    assert [each.get("token_ids") for each in choices] == [None, [1, 2], [3]]


def newest(server: Served) -> Completion:
    """The answer that was logged last."""
    return max((turn for run in server.runs() for turn in run.turns), key=lambda turn: turn.ended).completion


def test_messages_name_the_sequence_that_stopped_them_and_give_token_ids(tiny: Served) -> None:
    asked: Any = {"messages": [ASK], "max_tokens": 60, "temperature": 1.0, "return_token_ids": True}
    plain = post(tiny, "/v1/messages", asked | {"seed": 3}).json()
    assert (plain["stop_sequence"], plain["stop_reason"] in ("end_turn", "max_tokens")) == (None, True)
    first = plain["content"][0]["text"][8]
    asked |= {"seed": 3, "stop_sequences": ["never said", first]}
    whole = post(tiny, "/v1/messages", asked).json()
    tokens = newest(tiny).tokens
    assert tokens is not None
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", first)
    assert (whole["token_ids"], whole["prompt_token_ids"]) == (
        list(tokens.sampled_ids),
        list(tokens.context_ids),
    )
    events = deltas_of(tiny, "/v1/messages", asked)
    (ended,) = [each for each in events if each["type"] == "message_delta"]
    assert ended["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": first}
    assert (ended["token_ids"], ended["prompt_token_ids"]) == (whole["token_ids"], whole["prompt_token_ids"])
    asked.pop("return_token_ids")
    counted = post(tiny, "/v1/messages/count_tokens", {"messages": [ASK]}).json()
    assert counted == {"input_tokens": len(tokens.context_ids)}
    assert "token_ids" not in post(tiny, "/v1/messages", asked).json()
    assert all("token_ids" not in each for each in deltas_of(tiny, "/v1/messages", asked))
    legacy = {"prompt": TEXT, "max_tokens": 60, "seed": 3}
    said = post(tiny, "/v1/completions", legacy).json()["choices"][0]["text"]
    stopped = post(tiny, "/v1/completions", legacy | {"stop": [said[8]]}).json()["choices"][0]
    assert stopped["stop_reason"] == said[8]


BAD_PROMPTS = [
    ({}, "prompt"), ({"prompt": None}, "prompt"), ({"prompt": []}, "prompt"), ({"prompt": ""}, "prompt"),
    ({"prompt": [[]]}, "prompt"), ({"prompt": [1, "x"]}, "prompt"), ({"prompt": [10**9]}, "prompt"),
    ({"prompt": [-1]}, "prompt"), ({"prompt": [True]}, "prompt"), ({"prompt": {"x": 1}}, "prompt"),
    ({"prompt": "x", "n": 0}, "n"), ({"prompt": ["x"] * 200, "n": 2}, "prompt"),
    ({"prompt": "x", "logprobs": 21}, "logprobs"), ({"prompt": "x", "logprobs": -1}, "logprobs"),
    ({"prompt": "x", "suffix": "y"}, "suffix"), ({"prompt": "x", "best_of": 3}, "best_of"),
    ({"prompt": "x", "max_tokens": -1}, "max_tokens"), ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
    ({"prompt": "x " * 20_000, "max_tokens": 5}, None),
    ({"prompt": "x " * 20_000, "max_tokens": 0, "echo": True}, None),
]  # fmt: skip


def test_a_bad_prompt_is_refused(tiny: Served) -> None:
    for body, param in BAD_PROMPTS:
        answer = post(tiny, "/v1/completions", body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    assert tiny.runs() == []


def test_texts_of_tokens_are_cut_where_characters_end(tiny: Served) -> None:
    policy: Any = tiny.policy
    for text in (
        TEXT,
        "\U0001f468\u200d\U0001f469\u200d\U0001f467" * 5,
        "\u00e4" * 40,
        "a\ufffdb",
        "  \n\t x",
    ):
        ids = policy.template.encoder.prompt(text)
        texts = token_texts(ids, policy.decode)
        assert "".join(texts) == text
        assert len(texts) == len(ids)


def test_tokenize_and_detokenize(tiny: Served) -> None:
    told = post(tiny, "/tokenize", {"prompt": TEXT, "return_token_strs": True}).json()
    assert (told["count"], len(told["token_strs"])) == (len(told["tokens"]), len(told["tokens"]))
    assert post(tiny, "/detokenize", {"tokens": told["tokens"]}).json() == {"prompt": TEXT}
    messages = post(tiny, "/tokenize", {"messages": [ASK]}).json()["tokens"]
    asked = {"messages": [ASK], "max_tokens": 1, "return_token_ids": True}
    assert post(tiny, "/v1/chat/completions", asked).json()["prompt_token_ids"] == messages
    assert post(tiny, "/detokenize", {"tokens": "x"}).status_code == 400


def test_metrics_tell_what_the_cache_held(tiny: Served) -> None:
    for _ in range(2):
        complete(tiny, prompt=TEXT, max_tokens=4)
    metrics = httpx.get(f"{tiny.root}/metrics").text
    value = {
        name: float(found[1])
        for name in ("prefix_cache_queries_total", "prefix_cache_hits_total", "kv_cache_usage_perc",
                     "generation_tokens_total", "inter_token_latency_seconds_count")
        if (found := re.search(rf'vllm:{name}{{model_name="tiny"}} (\S+)', metrics))
    }  # fmt: skip
    policy: Any = tiny.policy
    length = len(policy.template.encoder.prompt(TEXT))
    assert value["prefix_cache_queries_total"] == 2 * length
    assert 0 < value["prefix_cache_hits_total"] <= length
    assert 0 < value["kv_cache_usage_perc"] < 1
    assert value["generation_tokens_total"] == sum(
        len(turn.completion.tokens.sampled_ids) for run in tiny.runs() for turn in run.turns
        if turn.completion.tokens
    )  # fmt: skip
    assert value["inter_token_latency_seconds_count"] > 0


# ----------------------------------------------------------------------------------------- adapters


def make_adapter(base: Path, folder: Path, seed: int) -> Path:
    """An adapter that changes what the base says."""
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    loaded = open_weights(str(base)).loaded
    config = LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"])
    model: Any = get_peft_model(loaded.model, config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    model.peft_config["default"].base_model_name_or_path = str(base)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapter_folders(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("adapters")
    return [make_adapter(tiny_folder, root / f"a{seed}", seed) for seed in range(2)]


@pytest.fixture
def many(
    serve: Callable[..., Served], tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Served:
    """A server of the base, to which adapters can be loaded."""
    monkeypatch.setattr("nano_apis.app._SWEEP_SECONDS", 0.05)
    opened = open_weights(str(tiny_folder))
    base = SharedBase(str(tiny_folder))
    store = LogStore.open(tmp_path / "log.db")

    def adapter(folder: Path) -> ServedModel:
        found = base.open(folder)
        return ServedModel(policy=found.policy, profile=found.profile, store=store, name=found.name)

    return serve(
        local_policy(opened.loaded, opened.profile, scheduler="free"), opened.profile,
        access=Access(admin_keys=["boss"]), adapters=Adapters(base.name, adapter_base_of, adapter),
    )  # fmt: skip


def load(server: Served, name: str, folder: Path, **more: Any) -> httpx.Response:
    body = {"lora_name": name, "lora_path": str(folder), **more}
    return post(server, "/v1/load_lora_adapter", body, headers=ADMIN)


@cache
def weights_of(folder: Path) -> Any:
    """The engine of a folder's weights, merged and alone."""
    opened = open_weights(str(folder))
    return local_policy(opened.loaded, opened.profile).engine


def scored(folder: Path, ids: list[int]) -> list[float]:
    (scores,) = weights_of(folder).score([tuple(ids)])
    return list(scores)


PROMPT = "The quick brown fox jumps over the lazy dog. " * 8


def prompt_logprobs(server: Served, model: str) -> tuple[list[int], list[float]]:
    """Ids and log-probs of a sampled answer: each token's depends on the KV of the whole prompt."""
    asked = {"model": model, "prompt": PROMPT, "max_tokens": 12, "seed": 1, "logprobs": 0}
    (choice,) = complete(server, **asked, return_token_ids=True)["choices"]
    ids = choice["prompt_token_ids"] + choice["token_ids"]
    return ids, choice["logprobs"]["token_logprobs"]


def is_of(told: tuple[list[int], list[float]], folder: Path) -> bool:
    """Whether the log-probs of an answer are those of a folder's weights."""
    ids, logprobs = told
    expected = scored(folder, ids)[-len(logprobs) :]
    return max(abs(a - b) for a, b in zip(logprobs, expected, strict=True)) < 1e-4


def right(server: Served, model: str, folder: Path) -> bool:
    return is_of(prompt_logprobs(server, model), folder)


def test_adapters_are_served_beside_the_base(
    many: Served, tiny_folder: Path, adapter_folders: list[Path]
) -> None:
    for number, folder in enumerate(adapter_folders):
        assert load(many, f"a{number}", folder).json() == {"loaded": f"a{number}"}
    folders = {"a0": adapter_folders[0], "a1": adapter_folders[1], "tiny": tiny_folder, "gpt-5": tiny_folder}
    told: dict[str, Any] = {}
    threads = [
        threading.Thread(target=lambda n=name: told.update({n: prompt_logprobs(many, n)}))  # type: ignore[misc]
        for name in folders
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {name: is_of(told[name], folder) for name, folder in folders.items()} == dict.fromkeys(
        folders, True
    )
    names = {run.policy for run in many.runs()}
    assert names == {"tiny", *map(str, adapter_folders)}, "the log names the weights, and not a passing name"
    cards = {card["id"]: card for card in httpx.get(f"{many.root}/v1/models").json()["data"]}
    assert sorted(cards) == ["a0", "a1", "tiny"]
    assert (cards["a0"]["parent"], cards["a0"]["root"]) == (str(tiny_folder), str(adapter_folders[0]))


def test_adapters_share_the_weights_of_their_base(tiny_folder: Path, adapter_folders: list[Path]) -> None:
    base = SharedBase(str(tiny_folder))
    models: list[Any] = [base.open(folder).policy for folder in (*adapter_folders, adapter_folders[0])]
    found = [
        {p.data_ptr() for name, p in each.engine.model.named_parameters() if "lora" not in name}
        for each in models
    ]
    assert found[0] == found[1] == found[2]
    assert models[0].id != models[1].id
    assert models[0].id == models[2].id


@pytest.mark.slow
def test_a_name_whose_files_changed_answers_by_the_new_weights(
    many: Served, adapter_folders: list[Path], tmp_path: Path
) -> None:
    """A cache keyed by the adapter's name would answer the second request from KV of the first weights."""
    folder = tmp_path / "mine"
    shutil.copytree(adapter_folders[0], folder)
    load(many, "mine", folder)
    assert right(many, "mine", adapter_folders[0])
    shutil.copytree(adapter_folders[1], folder, dirs_exist_ok=True)
    refused = load(many, "mine", folder)
    assert (refused.status_code, "load_inplace" in refused.json()["error"]["message"]) == (400, True)
    assert load(many, "mine", folder, load_inplace=True).status_code == 200
    told = prompt_logprobs(many, "mine")
    assert (is_of(told, adapter_folders[0]), is_of(told, adapter_folders[1])) == (False, True)
    post(many, "/v1/unload_lora_adapter", {"lora_name": "mine"}, headers=ADMIN)
    shutil.copytree(adapter_folders[0], folder, dirs_exist_ok=True)
    load(many, "mine", folder)
    assert right(many, "mine", adapter_folders[0])


def test_an_unloaded_adapter_leaves_the_memory_with_its_conversations(
    many: Served, adapter_folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    policies: list[weakref.ref[Any]] = []
    opened = SharedBase.open

    def watched(base: SharedBase, folder: Path) -> Any:
        found = opened(base, folder)
        policies.append(weakref.ref(found.policy))
        return found

    monkeypatch.setattr(SharedBase, "open", watched)
    load(many, "mine", adapter_folders[0])
    body = {"model": "mine", "max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]}
    assert post(many, "/v1/chat/completions", body).status_code == 200
    post(many, "/v1/unload_lora_adapter", {"lora_name": "mine"}, headers=ADMIN)

    until = time.monotonic() + 10
    while policies[0]() is not None and time.monotonic() < until:
        time.sleep(0.05)
        gc.collect()
    assert policies[0]() is None
    (run,) = many.store.runs()
    assert run.stop is StopReason.FINISHED


@pytest.mark.parametrize("kept", ["by content", "by name"])
def test_stale_kv_would_be_found(
    many: Served, adapter_folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: str
) -> None:
    """Two requests with one prompt, and between them other weights under the adapter's name and path. With a
    prefix cache that is kept by name, the second answer's log-probs are not those of the new weights."""
    if kept == "by name":
        caches: dict[object, Any] = {}
        names: dict[object, str] = {}
        opened, current = SharedBase.open, Engine._current

        def named(base: SharedBase, folder: Path) -> Any:
            found = opened(base, folder)
            names[found.policy.engine] = str(folder)  # type: ignore[attr-defined]
            return found

        def by_name(engine: Engine) -> Any:
            decoder: Any = current(engine)
            if engine in names:
                decoder.cache = caches.setdefault(names[engine], decoder.cache)
            return decoder

        monkeypatch.setattr(SharedBase, "open", named)
        monkeypatch.setattr(Engine, "_current", by_name)
    folder = tmp_path / "mine"
    shutil.copytree(adapter_folders[0], folder)
    load(many, "mine", folder)
    assert right(many, "mine", adapter_folders[0])
    shutil.copytree(adapter_folders[1], folder, dirs_exist_ok=True)
    assert load(many, "mine", folder, load_inplace=True).status_code == 200
    assert right(many, "mine", adapter_folders[1]) == (kept == "by content")


@pytest.mark.slow
def test_a_request_in_flight_ends_on_the_weights_it_began_with(
    many: Served, adapter_folders: list[Path]
) -> None:
    load(many, "mine", adapter_folders[0])
    chunks = many.openai().completions.create(
        model="mine", prompt=PROMPT, max_tokens=300, seed=1, stream=True, logprobs=0,
        extra_body={"return_token_ids": True},
    )  # fmt: skip
    ids: list[int] = []
    logprobs: list[float] = []
    for count, chunk in enumerate(chunks):
        if count == 3:
            assert load(many, "mine", adapter_folders[1], load_inplace=True).status_code == 200
            time.sleep(0.2)  # sweeps pass
            assert right(many, "mine", adapter_folders[1])
        choice: Any = chunk.choices[0]
        ids += (getattr(choice, "prompt_token_ids", None) or []) + (getattr(choice, "token_ids", None) or [])
        logprobs += choice.logprobs.token_logprobs if choice.logprobs else []
    assert len(logprobs) > 20
    expected = scored(adapter_folders[0], ids)[-len(logprobs) :]
    assert logprobs == pytest.approx(expected, abs=1e-4)


def test_a_conversation_goes_on_with_the_adapter_that_is_named(
    many: Served, adapter_folders: list[Path]
) -> None:
    load(many, "a0", adapter_folders[0])
    client = many.openai()
    first = client.chat.completions.create(model="tiny", messages=[ASK], max_tokens=6, seed=1)  # type: ignore[list-item]
    after: Any = [ASK, {"role": "assistant", "content": first.choices[0].message.content}, ASK]
    client.chat.completions.create(model="a0", messages=after, max_tokens=6, seed=1)
    client.chat.completions.create(model="tiny", messages=after, max_tokens=6, seed=1)
    base, fork = many.runs()
    assert (len(base.turns), fork.parent, fork.policy) == (2, base.id, str(adapter_folders[0]))
    assert len({turn.completion.policy_id for turn in fork.turns}) == 2


def test_adapters_are_the_admins(many: Served, adapter_folders: list[Path], tmp_path: Path) -> None:
    body = {"lora_name": "a", "lora_path": str(adapter_folders[0])}
    assert post(many, "/v1/load_lora_adapter", body).status_code == 401
    assert post(many, "/v1/load_lora_adapter", body, headers={"x-api-key": "b"}).status_code == 401
    (tmp_path / "empty").mkdir()
    good = adapter_folders[0]
    for name, path in (("", good), ("tiny", good), ("x", tmp_path / "none"), ("x", tmp_path / "empty"),
                       ("x", "/dev/null"), ("x" * 300, good)):  # fmt: skip
        answer = load(many, name, Path(path))
        assert (answer.status_code, bool(answer.json()["error"]["message"])) == (400, True)
    for body in ({}, {"lora_name": 1}, {"lora_name": "a", "lora_path": ["x"]}):
        assert post(many, "/v1/load_lora_adapter", body, headers=ADMIN).status_code == 400
    gone = post(many, "/v1/unload_lora_adapter", {"lora_name": "none"}, headers=ADMIN)
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "model_not_found")


def test_without_an_admin_key_nobody_loads_adapters(tiny: Served) -> None:
    answer = post(tiny, "/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/"})
    assert (answer.status_code, "--admin-key" in answer.json()["error"]["message"]) == (403, True)


def test_a_page_of_the_web_reaches_nothing(tiny: Served) -> None:
    body = {"messages": [ASK], "max_tokens": 2}
    for origin, status in (("https://evil.example", 403), ("null", 403), ("http://localhost:3000", 200)):
        answer = post(tiny, "/v1/chat/completions", body, headers={"origin": origin})
        assert answer.status_code == status


def test_checkpoints_of_the_same_base_are_listed_and_named(
    many: Served,
    tiny_folder: Path,
    adapter_folders: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from nano_shared.checkpoint import Manifest, point_latest, write_manifest
    from nano_shared.files import checkpoints_dir

    monkeypatch.setenv("NANO_HOME", str(tmp_path / "home"))
    profile = find_profile(open_weights(str(tiny_folder)).profile.name)
    for name, parent, source in (("v1", None, 0), ("v2", "v1", 1)):
        folder = checkpoints_dir() / name
        shutil.copytree(adapter_folders[source], folder)
        write_manifest(folder, Manifest(
            name=name, kind="adapter", base_model=str(tiny_folder), parent=parent, profile=profile.name,
            profile_hash=profile.hash, template_hash="x", tools_hash=profile.tools_hash,
            policy_version=source + 3, code_version="0", created=1.0,
        ))  # fmt: skip
    shutil.copytree(checkpoints_dir() / "v1", checkpoints_dir() / "other")
    settings = checkpoints_dir() / "other" / "adapter_config.json"
    settings.write_text(settings.read_text().replace(str(tiny_folder), "another-base"))
    point_latest("v2")
    cards = {card["id"]: card for card in httpx.get(f"{many.root}/v1/models").json()["data"]}
    assert sorted(cards) == ["tiny", "v1", "v2"]
    assert [(cards[n]["weight_version"], cards[n]["parent"]) for n in ("v1", "v2")] == [
        (3, str(tiny_folder)),
        (4, "v1"),
    ]
    assert httpx.get(f"{many.root}/v1/models/v2").json()["id"] == "v2"
    assert right(many, "v2", adapter_folders[1])
    assert many.runs()[0].turns[0].completion.policy_version == 4
    answer = post(many, "/v1/completions", {"model": "other", "prompt": "x"})
    assert (answer.status_code, "another-base" in answer.json()["error"]["message"]) == (400, True)


def test_the_call_of_the_text_dialect_is_still_parsed(serve: Callable[..., Served]) -> None:
    server = serve(ScriptedPolicy([CALL]), HERMES_1)
    answer = post(server, "/v1/chat/completions", {"messages": [ASK], "tools": TOOLS, "tool_choice": "auto"})
    assert answer.json()["choices"][0]["finish_reason"] == "tool_calls"


# ------------------------------------------------------------------------------------- hostile bodies

FORMS = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "json_object", "json_schema"]) | JSON},
    optional={
        "json_schema": st.fixed_dictionaries({}, optional={"schema": JSON, "strict": JSON}) | JSON,
        "schema": JSON,
    },
)  # fmt: skip
PROMPTS = (
    st.text(max_size=20) | st.lists(st.integers(-2, 1100), max_size=5) | st.lists(st.text(), max_size=3)
    | st.lists(st.lists(st.integers(0, 1100), max_size=4), max_size=3) | JSON
)  # fmt: skip
BODIES = st.fixed_dictionaries(
    {"max_tokens": st.integers(-1, 4)},
    optional={
        "prompt": PROMPTS, "messages": st.just([ASK]) | JSON, "tokens": PROMPTS, "input": st.just("x") | JSON,
        "n": st.integers(-1, 3) | JSON, "best_of": st.integers(0, 3), "echo": JSON, "stream": JSON,
        "logprobs": st.integers(-1, 22) | JSON, "top_logprobs": st.integers(-1, 22) | JSON,
        "response_format": FORMS | JSON, "text": st.fixed_dictionaries({"format": FORMS}) | JSON,
        "output_config": st.fixed_dictionaries({"format": FORMS}) | JSON, "tools": st.just(TOOLS) | JSON,
        "tool_choice": st.sampled_from(["auto", "required", "none", {"type": "function"}]) | JSON,
        "stop": st.text(max_size=2) | JSON, "suffix": JSON, "model": st.text(max_size=8) | JSON,
        "lora_name": JSON, "lora_path": JSON, "load_inplace": JSON, "seed": JSON, "temperature": JSON,
        "return_token_ids": JSON, "return_tokens_as_token_ids": JSON, "stream_options": JSON,
        "add_special_tokens": JSON, "return_token_strs": JSON,
    },
)  # fmt: skip
PATHS = ("v1/completions", "v1/chat/completions", "v1/responses", "v1/messages", "tokenize", "detokenize",
         "v1/load_lora_adapter", "v1/unload_lora_adapter")  # fmt: skip


@pytest.mark.slow
def test_no_body_breaks_the_routes(many: Served, tiny_folder: Path) -> None:
    """No 5xx, and no error inside a stream; the server answers a plain request afterwards."""
    with httpx.Client(base_url=many.root, headers=ADMIN, timeout=60) as client:

        @given(BODIES, st.sampled_from(PATHS))
        @settings(max_examples=80, deadline=None)
        def answers(body: dict[str, Any], path: str) -> None:
            answer = client.post(f"/{path}", content=json.dumps(body).encode("utf-8", "surrogatepass"))
            assert answer.status_code in (200, 400, 404), (answer.status_code, answer.text)
            if answer.status_code != 200:
                assert answer.json()["error"]["message"]
            assert "Traceback" not in answer.text

        answers()
    assert right(many, "tiny", tiny_folder)
