"""The endpoint policy against a strict server of the API, and against servers that fail in every way."""

from __future__ import annotations

import contextlib
import email.utils
import itertools
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strict_api import KEY, Call, Fail, Handler, Say, Script, StrictApi, call, stream_bytes, strict_api

from nano_coder.agent.profiles import API_1
from nano_coder.config import Price
from nano_coder.models.endpoint.chat_completion import read_answer
from nano_coder.models.endpoint.exchange import _server_events
from nano_coder.models.endpoint.model_card import ModelCard
from nano_coder.models.endpoint.policy import EndpointPolicy, Patience, find_price, open_endpoint
from nano_coder.models.opening import ModelOptions
from nano_shared.errors import BudgetExhausted, ConfigError, ContextFull, PolicyError
from nano_shared.policy import Conversation, Policy
from nano_shared.types import ApiCall, Finish, Message, Role, Sampling

HELLO = Say("hello")


def policy_for(server: StrictApi, **options: Any) -> EndpointPolicy:
    seconds = {name: options.pop(name) for name in ("stall", "retry") if name in options}
    patience = Patience(**{"first_wait": 0.001, "retry": 5.0, **seconds})
    usual: dict[str, Any] = {"patience": patience, "own_temperature": True}
    return EndpointPolicy("little", server.base_url, KEY, **(usual | options))


def conversation(*, native: bool = True) -> Conversation:
    """A system message, a task, two calls that were answered."""
    calls = (
        ApiCall(id="a", name="shell", arguments='{"command": "ls"}'),
        ApiCall(id="b", name="submit", arguments=""),
    )
    if not native:
        texts = [(Role.SYSTEM, "be good"), (Role.USER, "go"), (Role.ASSISTANT, "ls"), (Role.TOOL, "a.py")]
        return Conversation(tuple(Message(role=role, content=text) for role, text in texts))
    return Conversation(
        (
            Message(role=Role.SYSTEM, content="be good"),
            Message(role=Role.USER, content="go"),
            Message(role=Role.ASSISTANT, content="", calls=calls),
            Message(role=Role.TOOL, content="a.py", call_id="a"),
            Message(role=Role.TOOL, content="no", call_id="b"),
            Message(role=Role.USER, content="go on"),
            Message(role=Role.USER, content="now"),
        ),
        tools=API_1.tools,
    )


def test_a_request_is_what_the_api_demands_and_nothing_that_was_not_said() -> None:
    with strict_api(HELLO) as (server, script):
        policy = policy_for(server)
        assert isinstance(policy, Policy)
        done = policy.complete(conversation(), Sampling(temperature=0.0, max_tokens=9))
    (body,) = script.seen
    assert set(body) == {"model", "messages", "tools", "max_completion_tokens", "stream", "stream_options"}
    assert [message["role"] for message in body["messages"]] == [
        "system",
        "user",
        "assistant",
        "tool",
        "tool",
        "user",
    ]
    assert body["messages"][2]["content"] is None
    assert [one["function"]["arguments"] for one in body["messages"][2]["tool_calls"]] == [
        '{"command": "ls"}',
        "{}",
    ]
    assert body["messages"][-1]["content"] == "go on\n\nnow"
    assert len(body["tools"]) == len(API_1.tools)
    assert (done.text, done.finish, done.tokens, done.policy_id) == (
        "hello",
        Finish.STOP,
        None,
        "openai:little",
    )
    assert done.sampling.temperature == 1.0, "the server's own"
    assert done.api is not None
    assert done.api.left_out == ("temperature",)


@pytest.mark.parametrize("arguments", [{"command": "ls"}, '{"command": "ls"}'])
def test_arguments_that_are_an_object_are_read(arguments: Any) -> None:
    function = {"name": "shell", "arguments": arguments}
    message = {"tool_calls": [{"id": "a", "type": "function", "function": function}]}
    answer = {"choices": [{"message": message, "finish_reason": "tool_calls"}]}
    with strict_api(Fail(200, body=json.dumps(answer).encode())) as (server, _):
        done = policy_for(server).complete(conversation(), Sampling())
    assert done.api is not None
    assert [json.loads(one.arguments) for one in done.api.calls] == [{"command": "ls"}]


def test_a_server_that_moved_is_sought_by_its_new_address() -> None:
    with (
        strict_api(Fail(308, (("Location", "/v2"),), b"")) as (server, _),
        pytest.raises(PolicyError, match="new address by --base-url"),
    ):
        policy_for(server).complete(conversation(), Sampling())


def test_a_text_protocol_has_no_tools_and_no_calls() -> None:
    with strict_api(HELLO) as (server, script):
        policy_for(server, own_temperature=False).complete(
            conversation(native=False), Sampling(temperature=0.5)
        )
    (body,) = script.seen
    assert "tools" not in body
    assert body["temperature"] == 0.5
    assert [message["role"] for message in body["messages"]] == ["system", "user", "assistant", "user"]


def test_calls_come_in_order_with_their_ids_and_text_is_told_as_it_comes() -> None:
    told: list[str] = []
    says = Say(
        "Ünïcode first.", (call("shell", command="ls\n"), call("read_file", path="é.py")), reasoning="hm"
    )
    with strict_api(says) as (server, _):
        talk = conversation()
        talk.on_text = told.append
        done = policy_for(server).complete(talk, Sampling())
    assert done.api is not None
    assert done.text == "Ünïcode first."
    assert [(one.id, one.name, json.loads(one.arguments)) for one in done.api.calls] == [
        ("call_1x0", "shell", {"command": "ls\n"}), ("call_1x1", "read_file", {"path": "é.py"}),
    ]  # fmt: skip
    assert done.api.reasoning == "hm"
    assert "".join(told).startswith("hmÜnïcode first.\nshell {")
    assert len(told) > 10, "in pieces"


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("usage", [True, False])
def test_usage_and_cost_are_known_or_estimated(streams: bool, usage: bool) -> None:
    price = Price(input=2.0, cached=1.0, output=10.0)
    with strict_api(HELLO, streams=streams, usage=usage) as (server, _):
        done = policy_for(server, price=price).complete(conversation(), Sampling())
    assert done.api is not None
    told = done.api.usage
    if usage:
        assert (told.prompt, told.cached, told.completion, told.reasoning) == (1000, 400, 50, 20)
        assert told.cost == pytest.approx((600 * 2 + 400 * 1 + 50 * 10) / 1e6)
    else:
        assert (told.estimated, told.completion) == (True, 2)
        assert told.cost


class Sent:
    """Events of a stream cut into given pieces."""

    def __init__(self, data: bytes, cuts: list[int]) -> None:
        places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
        self.pieces = [data[a:b] for a, b in itertools.pairwise(places)]


printable_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
some_arguments = st.dictionaries(st.text(max_size=3), printable_text)
some_calls = st.lists(
    st.builds(
        lambda name, value: Call(name, json.dumps({"v": value}), ""),
        st.sampled_from(["shell", "x"]),
        printable_text,
    ),
    max_size=3,
)


@given(printable_text, some_calls, st.lists(st.integers(0, 10_000), max_size=8))
def test_every_split_of_a_stream_is_the_same_answer(text: str, calls: list[Call], cuts: list[int]) -> None:
    wired = [
        {"id": f"c{at}", "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
        for at, c in enumerate(calls)
    ]
    data = stream_bytes(Say(text, tuple(calls)), wired, "stop", None)
    answer = read_answer(_server_events(iter(Sent(data, cuts).pieces)), "url", lambda _: None)
    assert answer.text == text
    assert [(c.id, c.name, c.arguments) for c in answer.api_calls(0)] == [
        (f"c{at}", c.name, c.arguments) for at, c in enumerate(calls)
    ]


@pytest.mark.parametrize(
    "deltas",
    [
        # no index, whole calls
        [{"id": "a", "function": {"name": "x", "arguments": "{}"}},
         {"id": "b", "function": {"name": "y", "arguments": "{}"}}],
        # no index, arguments follow without an id
        [{"id": "a", "function": {"name": "x", "arguments": "{"}}, {"function": {"arguments": "}"}},
         {"id": "b", "function": {"name": "y"}}, {"function": {"arguments": "{}"}}],
        # id and name in every piece, arguments as an object
        [{"index": 0, "id": "a", "function": {"name": "x", "arguments": "{"}},
         {"index": 0, "id": "a", "function": {"name": "x", "arguments": "}"}},
         {"index": 1, "id": "b", "function": {"name": "y", "arguments": {}}}],
        # one index for all (ollama), whole calls
        [{"index": 0, "id": "a", "function": {"name": "x", "arguments": "{}"}},
         {"index": 0, "id": "b", "function": {"name": "y", "arguments": "{}"}}],
        # one index for all, in pieces, the name in every piece
        [{"index": 0, "id": "a", "function": {"name": "x", "arguments": "{"}},
         {"index": 0, "function": {"name": "x", "arguments": "}"}},
         {"index": 0, "id": "b", "function": {"name": "y", "arguments": ""}},
         {"index": 0, "id": "", "function": {"arguments": "{}"}}],
        # one index for all, and late ids
        [{"index": 0, "function": {"name": "x", "arguments": "{"}},
         {"index": 0, "id": "a", "function": {"arguments": "}"}},
         {"index": 0, "function": {"name": "y", "arguments": "{}"}}, {"index": 0, "id": "b"}],
        # the index counts the deltas
        [{"index": 0, "id": "a", "function": {"name": "x", "arguments": ""}},
         {"index": 1, "function": {"arguments": "{"}}, {"index": 2, "function": {"arguments": "}"}},
         {"index": 3, "id": "b", "function": {"name": "y", "arguments": "{"}},
         {"index": 4, "id": "b", "function": {"name": "y", "arguments": "}"}}],
        # an empty object before the arguments, and the whole once more at the end
        [{"index": 0, "id": "a", "function": {"name": "x", "arguments": None}},
         {"index": 0, "id": "a", "function": {"arguments": "{}"}},
         {"index": 1, "id": "b", "function": {"name": "y", "arguments": {}}},
         {"index": 1, "function": {"arguments": "{"}}, {"index": 1, "function": {"arguments": "}"}},
         {"index": 1, "id": "b", "function": {"name": "y", "arguments": "{}"}}],
        # two at a time, told apart by their ids
        [{"index": 0, "id": "a", "function": {"name": "x", "arguments": ""}},
         {"index": 0, "id": "b", "function": {"name": "y", "arguments": ""}},
         {"index": 0, "id": "a", "function": {"arguments": "{"}},
         {"index": 0, "id": "b", "function": {"arguments": "{"}},
         {"index": 0, "id": "a", "function": {"arguments": "}"}},
         {"index": 0, "id": "b", "function": {"arguments": "}"}}],
    ],
)  # fmt: skip
def test_calls_of_servers_that_stream_in_their_own_way(deltas: list[dict[str, Any]]) -> None:
    events: list[dict[str, Any]] = [{"choices": [{"delta": {"tool_calls": [delta]}}]} for delta in deltas]
    answer = read_answer(
        [*events, {"choices": [{"delta": {}, "finish_reason": "tool_calls"}]}], "url", lambda _: None
    )
    assert [(c.id, c.name, c.arguments) for c in answer.api_calls(0)] == [("a", "x", "{}"), ("b", "y", "{}")]


@given(
    st.lists(st.tuples(st.sampled_from(["x", "y"]), some_arguments), min_size=1, max_size=4),
    st.sampled_from(["own", "zero", "none", "delta"]), st.sampled_from(["once", "always"]),
    st.sampled_from(["once", "always"]), st.data(),
)  # fmt: skip
def test_calls_are_told_apart_whatever_their_index(
    calls: list[tuple[str, dict[str, str]]], index: str, ids: str, names: str, data: st.DataObject
) -> None:
    """Every way to number deltas, with ids and names in the first or in each, and any pieces."""
    deltas: list[dict[str, Any]] = []
    for at, (name, values) in enumerate(calls):
        text = json.dumps(values)
        cuts = sorted(data.draw(st.sets(st.integers(1, len(text) - 1), max_size=4)))
        for piece, (start, end) in enumerate(itertools.pairwise([0, *cuts, len(text)])):
            number = {"own": at, "zero": 0, "none": None, "delta": len(deltas)}[index]
            said = {"name": name} if not piece or names == "always" else {}
            own = {"id": f"c{at}"} if not piece or ids == "always" else {}
            deltas.append(own | {"index": number, "function": {**said, "arguments": text[start:end]}})
    events: list[dict[str, Any]] = [{"choices": [{"delta": {"tool_calls": [delta]}}]} for delta in deltas]
    answer = read_answer([*events, {"choices": [{"finish_reason": "stop"}]}], "url", lambda _: None)
    assert [(c.id, c.name, json.loads(c.arguments)) for c in answer.api_calls(0)] == [
        (f"c{at}", *call) for at, call in enumerate(calls)
    ]


@pytest.mark.parametrize(
    "calls",
    [
        {"id": "a", "function": {"name": "x", "arguments": "{}"}},
        {"id": "a", "name": "x", "arguments": {}},
        {"0": {"id": "a", "function": {"name": "x", "arguments": "{}"}}},
        [{"id": "a", "name": "x", "arguments": "{}"}],
    ],
)
def test_calls_that_are_an_object_or_lack_a_level_keep_their_names(calls: object) -> None:
    answer = read_answer([{"choices": [{"message": {"tool_calls": calls}}]}], "url", lambda _: None)
    assert [(c.id, c.name, c.arguments) for c in answer.api_calls(0)] == [("a", "x", "{}")]


def test_of_several_answers_that_a_server_streams_the_first_counts() -> None:
    events: list[dict[str, Any]] = [
        {"choices": [{"index": 1, "delta": {"content": "no"}}]},
        {"choices": [{"index": 1, "delta": {"content": "no"}}, {"index": 0, "delta": {"content": "yes"}}]},
        {"choices": [{"index": 1, "delta": {}, "finish_reason": "length"}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
    ]
    answer = read_answer(events, "url", lambda _: None)
    assert (answer.text, answer.finish) == ("yes", "stop")


def test_calls_without_ids_or_with_the_same_get_their_own() -> None:
    message = {"content": None, "tool_calls": [
        {"index": at, "id": own, "function": {"name": "x", "arguments": "{}"}}
        for at, own in enumerate(["", "s", "s"])
    ]}  # fmt: skip
    answer = read_answer([{"choices": [{"message": message}]}], "url", lambda _: None)
    assert [c.id for c in answer.api_calls(7)] == ["call_7_0", "s", "call_7_2"]


# -------------------------------------------------------------------------------- what a server takes


def test_the_old_name_of_the_limit_is_learnt_once_a_process(capsys: pytest.CaptureFixture[str]) -> None:
    with strict_api(HELLO, refuses=("max_completion_tokens",), takes=("max_tokens",)) as (server, script):
        for _ in range(2):
            policy_for(server).complete(conversation(), Sampling(max_tokens=9))
    assert script.tried == 3
    assert [body["max_tokens"] for body in script.seen] == [9, 9]
    assert capsys.readouterr().err.count("without max_completion_tokens, with max_tokens") == 1


def test_what_is_refused_is_left_out_said_once_and_logged(capsys: pytest.CaptureFixture[str]) -> None:
    sampling = Sampling(temperature=0.3, top_p=0.9, top_k=5, seed=4, stop=("x",))
    with strict_api(HELLO, refuses=("temperature", "stream_options")) as (server, script):
        policy = policy_for(server, own_temperature=False)
        done = [policy.complete(conversation(), sampling) for _ in range(2)][-1]
    assert script.tried == 2 + 4, "temperature, top_k, seed, stream_options"
    assert {"top_p", "stop", "stream"} < set(script.seen[0])
    assert done.api is not None
    assert done.api.left_out == ("temperature", "top_k", "seed")
    said = capsys.readouterr().err
    assert [said.count(f"without {name},") for name in ("temperature", "seed", "top_k")] == [1, 1, 1]


def test_a_server_that_does_not_stream_is_asked_for_the_whole() -> None:
    with strict_api(Say("whole", (call("shell", command="ls"),)), refuses=("stream",)) as (server, _):
        done = policy_for(server).complete(conversation(), Sampling())
    assert done.api is not None
    assert (done.text, [c.name for c in done.api.calls]) == ("whole", ["shell"])


def refusal(message: str, **more: Any) -> Fail:
    return Fail(400, body=json.dumps({"error": {"message": message, **more}}).encode())


FULL = "This model's maximum context length is 4096 tokens. However, your request has {} input tokens."


def test_a_full_context_is_told_apart_from_one_that_leaves_less_room() -> None:
    with strict_api(refusal(FULL.format(4000)), HELLO) as (server, script):
        policy_for(server).complete(conversation(), Sampling(max_tokens=900))
        assert script.seen[-1]["max_completion_tokens"] == 96
    for fail in (
        refusal(FULL.format(5000)),
        refusal("too long", code="context_length_exceeded"),
        refusal("the request exceeds the available context size, try increasing it"),
    ):
        with strict_api(fail) as (server, _):
            with pytest.raises(ContextFull, match="do not fit the context"):
                policy_for(server).complete(conversation(), Sampling())


def test_a_limit_beyond_the_models_own_is_lowered() -> None:
    said = "max_tokens is too large: 8192. This model supports at most 512 completion tokens."
    with strict_api(refusal(said, param="max_tokens"), HELLO) as (server, script):
        policy_for(server).complete(conversation(), Sampling(max_tokens=8192))
    assert script.seen[-1]["max_completion_tokens"] == 512


def chunk(content: str, finish: str | None = None) -> str:
    return json.dumps({"choices": [{"delta": {"content": content}, "finish_reason": finish}]})


@pytest.mark.parametrize(
    "sent",
    [
        f"\ufeffdata:{chunk('he')}\r\n\r\n: comment\r\ndata:{chunk('llo', 'stop')}\r\n\r\n",
        f"event: x\ndata: {chunk('hello')}\n\ndata: [DONE]\n\n",
        f"data: {chunk('he')}\ndata: {chunk('llo', 'stop')}\n",
        re.sub("^", "data: ", json.dumps(json.loads(chunk("hello", "stop")), indent=1), flags=re.M) + "\n\n",
        f'data: {{"choices": [], "prompt_filter_results": []}}\n\ndata: {chunk("hello", "stop")}\n\n',
        f"data: {chunk('hello', 'stop')}",
        json.dumps({"choices": [{"message": {"content": "hello"}, "finish_reason": None}]}),
    ],
    ids=["mark and CRLF", "no reason", "no empty lines", "many lines", "filter first", "no end", "no stream"],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["text/event-stream", "application/json"])
def test_a_stream_is_read_however_it_is_written(sent: str, kind: str) -> None:
    """Also over HTTP/1.0, where the end of the connection is that of the answer, and under a wrong type."""

    def say(handler: Handler) -> None:
        handler.wfile.write(f"HTTP/1.0 200 OK\r\nContent-Type: {kind}\r\n\r\n{sent}".encode())
        handler.close_connection = True

    with strict_api(say) as (server, script):
        assert policy_for(server).complete(conversation(), Sampling()).text == "hello"
    assert script.tried == 1


# ---------------------------------------------------------------------------------- failures that pass


def cut(handler: Handler) -> None:
    whole = stream_bytes(Say("it was cut"), [], "stop", None)
    handler.stream(whole[: len(whole) // 2], end=False)


def ends_early(handler: Handler) -> None:
    whole = stream_bytes(Say("it was cut"), [], "stop", None)
    handler.stream(whole[: len(whole) // 2])


def not_utf8(handler: Handler) -> None:
    handler.stream(b'data: {"choices": [{"delta": {"content": "\xff\xfe"}}]}\n\n')


def no_json(handler: Handler) -> None:
    handler.stream(b'data: {"choices": [{"del\n\ndata: [DONE]\n\n')


def stalls(handler: Handler) -> None:
    time.sleep(3)


def stalls_within(handler: Handler) -> None:
    handler.stream(b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n' * 3, end=False)
    time.sleep(3)


def hangs_up(handler: Handler) -> None:
    handler.close_connection = True


def error_event(handler: Handler) -> None:
    handler.stream(b'data: {"error": {"message": "overloaded", "code": 503}}\n\n')


def inside(error: Any) -> Fail:
    """An error in a body whose status is 200."""
    return Fail(200, body=json.dumps({"error": error}).encode())


def failed_finish(handler: Handler) -> None:
    handler.stream(b'data: {"choices": [{"delta": {"content": "a"}, "finish_reason": "error"}]}\n\n')


PASSING = [
    inside({"message": "upstream", "code": 502}), inside({"code": "429"}), inside({"type": "overloaded"}),
    Fail(200, body=b'{"choices": []}'), Fail(200, body=b'{"choices": [{"message": {"content": "x"'),
    failed_finish, Fail(200, body=b'{"type": "overloaded_error", "message": "kaput"}'),
    Fail(200, body=b'{"detail": "the model is loading"}'),
    Fail(500), Fail(502, body=b"<html>"), Fail(503), Fail(408), Fail(429), cut, ends_early, not_utf8, no_json,
    stalls, stalls_within, hangs_up, error_event,
]  # fmt: skip


@pytest.mark.some(8)
@pytest.mark.parametrize("failure", PASSING, ids=lambda f: f.__name__ if callable(f) else str(f.status))
def test_a_failure_that_passes_costs_nothing_but_time(failure: Any) -> None:
    with strict_api(failure, failure, Say("at last", (call("shell", command="ls"),))) as (server, script):
        # a busy machine may be silent for as long as a stall
        patience = 0.3 if failure in (stalls, stalls_within) else 30.0
        done = policy_for(server, stall=patience).complete(conversation(), Sampling())
    assert done.api is not None
    assert (done.text, len(done.api.calls)) == ("at last", 1)
    assert script.tried == 3


@pytest.mark.parametrize("form", ["seconds", "date"])
def test_a_server_that_names_a_time_is_asked_again_then(form: str) -> None:
    later = "1" if form == "seconds" else email.utils.formatdate(time.time() + 2, usegmt=True)
    with strict_api(Fail(429, (("Retry-After", later),)), HELLO) as (server, script):
        policy_for(server).complete(conversation(), Sampling())
    assert 0.9 < script.times[1] - script.times[0] < 30


def test_a_server_that_names_a_time_beyond_the_patience_is_not_waited_for() -> None:
    with strict_api(Fail(429, (("Retry-After", "3600"),))) as (server, script):
        began = time.monotonic()
        with pytest.raises(PolicyError, match="answered 429"):
            policy_for(server).complete(conversation(), Sampling())
    assert (script.tried, time.monotonic() - began < 60) == (1, True)


@pytest.mark.parametrize("failure", [Fail(500), stalls, cut], ids=["500", "stalls", "cut"])
def test_a_failure_that_stays_ends_with_the_patience(failure: Any) -> None:
    with strict_api(failure) as (server, script):
        with pytest.raises(PolicyError, match="no answer from http"):
            policy_for(server, retry=0.5, stall=0.1).complete(conversation(), Sampling())
    assert script.tried >= 2


@pytest.mark.slow
def test_a_call_ends_with_the_time_of_its_run() -> None:
    def drips(handler: Handler) -> None:
        piece = b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n'
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.end_headers()
        with contextlib.suppress(OSError):
            for _ in range(200):
                handler.wfile.write(piece)
                time.sleep(0.02)

    for failure, kind in ((drips, BudgetExhausted), (stalls, PolicyError), (Fail(500), PolicyError)):
        with strict_api(failure) as (server, _):
            talk = conversation()
            talk.deadline = time.monotonic() + 0.6
            with pytest.raises(kind):
                policy_for(server, retry=100.0).complete(talk, Sampling(max_tokens=1000))
            assert time.monotonic() < talk.deadline + 1


# ------------------------------------------------------------------------------- failures that stay


def test_a_wrong_key_is_a_matter_of_the_configuration() -> None:
    with strict_api(HELLO) as (server, script):
        policy = EndpointPolicy("little", server.base_url, "sk-wrong")
        with pytest.raises(ConfigError, match=r"answered 401: .*give the server's API key: NANO_API_KEY or"):
            policy.complete(conversation(), Sampling())
    assert script.tried == 1


@pytest.mark.parametrize(
    ("fail", "told"),
    [
        (refusal("nonsense"), r"answered 400: .*nonsense.*see the server's log"),
        (inside({"message": "no such thing", "code": 400}), "answered 400: .*no such thing"),
        (inside({"message": "sold out", "type": "insufficient_quota"}), "quota is used up"),
        (Fail(404), "check --base-url, and that the server has the model 'little'"),
        (Fail(429, body=b'{"error": {"code": "insufficient_quota"}}'), "the account's quota is used up"),
    ],
)
def test_a_refusal_is_not_repeated(fail: Fail, told: str) -> None:
    with strict_api(fail) as (server, script):
        with pytest.raises(PolicyError, match=told):
            policy_for(server).complete(conversation(), Sampling())
    assert script.tried == 1


@pytest.mark.parametrize(
    "body",
    ["<html>", "[]", "{}", '{"choices": [{"message": 3}]}', "null", "[" * 100_000,
     '{"choices": ' + "9" * 10_000 + "}", "\ufeff{", '{"choices": {}}'],
)  # fmt: skip
def test_an_answer_that_is_no_completion_is_one_sentence(body: str) -> None:
    with strict_api(Fail(200, body=body.encode())) as (server, script):
        with pytest.raises(PolicyError, match="something else than a chat completion") as raised:
            policy_for(server).complete(conversation(), Sampling())
    assert len(str(raised.value)) < 1000
    assert script.tried == 1


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"\xff\xff", "the answer is no UTF-8 text"),
        (b'{"choices": []}', "the answer holds no choices"),
        (b'{"choices": null, "usage": {"prompt_tokens": 1}}', "the answer holds no choices"),
        (b'{"choices": [{"mess', "the answer was cut off"),
        (b'{"error": "out of cheese"}', "answered an error: .*out of cheese"),
    ],
)
def test_an_answer_of_nothing_is_tried_three_times(body: bytes, told: str) -> None:
    with strict_api(Fail(200, body=body)) as (server, script):
        with pytest.raises(PolicyError, match=told) as raised:
            policy_for(server).complete(conversation(), Sampling())
    assert script.tried == 3
    assert "--base-url" not in str(raised.value)


def test_half_a_surrogate_and_a_text_beyond_all_tokens_are_cut() -> None:
    with strict_api(Say("\ud800" + "a" * 100_000), streams=False) as (server, _):
        done = policy_for(server).complete(conversation(), Sampling(max_tokens=9))
    assert (done.text, done.finish) == ("\\ud800" + "a" * 894, Finish.LENGTH)


def answering(head: bytes, forever: bytes = b"", pause: float = 0.0) -> Iterator[str]:
    """A server that sends `head`, and then a piece again and again until its client hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            client, _ = listener.accept()
            with client, contextlib.suppress(OSError):
                client.recv(65536)
                client.sendall(head)
                while forever:
                    client.sendall(forever)
                    time.sleep(pause)

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"


OK = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.some(3)
@pytest.mark.parametrize(
    ("head", "forever", "pause", "told"),
    [
        (OK + b"\r\n", b"x" * (1 << 20), 0.0, "answered more than 16 MB"),
        (OK + b"Content-Length: 50000000\r\n\r\n", b"x" * (1 << 20), 0.0, "answered more than 16 MB"),
        (
            OK + b"Content-Type: text/event-stream\r\n\r\n",
            b"data: " + b"1" * (1 << 20),
            0.0,
            "answered more than 16 MB",
        ),
        (OK + b"\r\n", b" ", 0.05, "no whole answer in time"),
        (OK, b"X-More: x\r\n", 0.05, "no whole answer in time"),
        (OK, b"X-More: " + b"x" * 1000 + b"\r\n", 0.0, "no answer from"),
        (b"nonsense\r\n\r\n", b"", 0.0, "no answer from"),
    ],
    ids=["endless", "50 MB", "endless line", "slow drip", "slow headers", "endless headers", "no http"],
)
def test_an_answer_is_bounded_in_size_and_time(head: bytes, forever: bytes, pause: float, told: str) -> None:
    for url in answering(head, forever, pause):
        seconds = 2.0 if pause else 100.0
        policy = EndpointPolicy("little", url, patience=Patience(answer=seconds, retry=0.0))
        with pytest.raises(PolicyError, match=told):
            policy.complete(conversation(), Sampling())
        policy.close()


@pytest.mark.slow
def test_a_server_that_is_not_there_is_named_soon() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))  # bound and not listening: nobody else gets it, and it refuses
        url = f"http://127.0.0.1:{reserved.getsockname()[1]}/v1"
        began = time.monotonic()
        with pytest.raises(
            PolicyError, match=rf"no answer from {url}/chat/completions: .*is the server running"
        ):
            EndpointPolicy("little", url).complete(conversation(), Sampling())
        assert time.monotonic() - began < 60
        with pytest.raises(PolicyError, match="localhost:1/chat/completions"):
            EndpointPolicy("little", "localhost:1").complete(conversation(), Sampling())


def test_many_threads_share_it() -> None:
    with strict_api(HELLO) as (server, _):
        policy = policy_for(server)
        texts: list[str] = []
        ask: Callable[[], None] = lambda: texts.append(policy.complete(conversation(), Sampling()).text)  # noqa: E731
        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert texts == ["hello"] * 8


def test_the_users_prices_come_before_the_shipped_ones() -> None:
    own = {"gpt-4o": Price(input=1, output=1), "mine": Price(input=0, output=0)}
    assert find_price("gpt-4o", own) == own["gpt-4o"]
    assert find_price("mine", own) == own["mine"]
    dated = find_price("gpt-4o-mini-2024-07-18", own)
    assert dated is not None
    assert dated == find_price("gpt-4o-mini", {})
    assert find_price("nobody-knows", own) is None


def test_openai_itself_needs_a_key_and_no_url(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NANO_API_KEY", "OPENAI_API_KEY", "NANO_BASE_URL", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="openai:x needs an API key"):
        open_endpoint("x", ModelOptions())
    monkeypatch.setenv("OPENAI_API_KEY", "sk-é")
    with pytest.raises(ConfigError, match="the API key holds what no HTTP header takes"):
        open_endpoint("x", ModelOptions())
    monkeypatch.setenv("OPENAI_API_KEY", "sk")
    assert open_endpoint("x", ModelOptions()).url == "https://api.openai.com/v1/chat/completions"


def test_tokens_are_estimated() -> None:
    policy = EndpointPolicy("little", "http://127.0.0.1:1/v1")
    assert [policy.count(text) for text in ("", "a", "four", "fiver")] == [0, 1, 1, 2]


def test_the_strict_server_is_strict() -> None:
    """What it would refuse of us: else the tests above say little."""
    import httpx

    good = {"role": "user", "content": "x"}
    one = {"id": "a", "type": "function", "function": {"name": "x", "arguments": "{}"}}
    asks = {"role": "assistant", "content": None, "tool_calls": [one]}
    wrong: list[dict[str, Any]] = [
        {"max_tokens": 9}, {"seed": 1}, {"top_k": 1}, {"messages": []},
        {"messages": [{"role": "tool", "content": "x"}]}, {"messages": [good, asks, good]},
        {"messages": [good, asks]}, {"messages": [good, {**asks, "tool_calls": []}]},
        {"messages": [good, asks, {"role": "tool", "content": "x", "tool_call_id": "b"}]},
        {"messages": [{"role": "user", "content": None}]}, {"stream_options": {}},
        {"tools": [{"type": "function", "function": {"name": "a b", "parameters": {"type": "object"}}}]},
        {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "dict"}}}]},
    ]  # fmt: skip
    with strict_api(HELLO) as (server, script):
        assert isinstance(script, Script)
        for body in wrong:
            answer = httpx.post(
                f"{server.base_url}/chat/completions",
                json={"model": "m", "messages": [good], **body},
                headers={"Authorization": f"Bearer {KEY}"},
            )
            assert answer.status_code == 400, body


@pytest.mark.parametrize(
    ("model", "profile"),
    [
        ("qwen2.5-coder:1.5b", "prompted-1-tools-json"),
        ("Qwen/Qwen2.5-Coder-7B-Instruct", "prompted-1-tools-json"),
        ("qwen2.5-coder-1.5b-instruct-q4_k_m.gguf", "prompted-1-tools-json"),
        ("Qwen2.5-Coder-32B-Instruct", "api-1"),
        ("qwen2.5-coder", "api-1"),
        ("llama-3.2-1.5b", "api-1"),
    ],
)
def test_a_small_coder_that_copies_lists_of_tools_is_shown_examples_instead(model: str, profile: str) -> None:
    assert EndpointPolicy(model, "http://127.0.0.1:9/v1").profile == profile
    ours = ModelCard(id=model, profile="compact-1")
    assert EndpointPolicy(model, "http://127.0.0.1:9/v1", card=ours).profile == "compact-1"
