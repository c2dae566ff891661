"""`nano-coder serve` over HTTP, by the SDKs that clients use: its answers, and what the log holds."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import uvicorn
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from nano_apis.app import serve_app
from nano_apis.conversations import Conversations, end_interrupted
from nano_apis.generation import ServerLimits
from nano_apis.request import TextDelta
from nano_apis.served_models import ServedModel
from nano_coder.agent.profiles import HERMES_1, find_profile
from nano_coder.models.opening import local_policy, open_weights
from nano_coder.models.scripted import ScriptedPolicy
from nano_coder.serve.access import Access, BoundedConnection
from nano_coder.serve.given_reward import give_reward
from nano_coder.verify.tokens import TokenCheck
from nano_coder.verify.trainable import verify
from nano_shared.errors import PolicyError, UsageError
from nano_shared.store import LogStore
from nano_shared.types import Finish, StopReason, Trajectory

if TYPE_CHECKING:
    import anthropic
    import openai

ASK = {"role": "user", "content": "Say hello."}
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
            },
        },
    }
]
COLD: Any = {"extra_body": {"temperature": 0}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


def asking(path: str, most: int = 2) -> dict[str, Any]:
    """A request of the API at this path."""
    if path.endswith("responses"):
        return {"input": "hi", "max_output_tokens": most}
    return {"max_tokens": most} | (
        {"messages": [ASK]} if "chat" in path or "messages" in path else {"prompt": "hi"}
    )


class Served:
    """A server in this process, and the log that it writes."""

    def __init__(self, model: ServedModel, **options: Any) -> None:
        self.store = model.store
        self._clients: list[Any] = []
        self.conversations = Conversations(model)
        self.policy = model.policy
        listening = socket.create_server(("127.0.0.1", 0))
        self.root = f"http://127.0.0.1:{listening.getsockname()[1]}"
        app = serve_app(self.conversations, **options)
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="error", http=BoundedConnection))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listening]})
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)

    def close(self) -> None:
        for client in self._clients:
            client.close()
        self._server.should_exit = True
        self._thread.join()

    def openai(self, path: str = "/v1") -> openai.OpenAI:
        import openai  # two seconds, for the modules that need a server alone

        client = openai.OpenAI(base_url=f"{self.root}{path}", api_key="none", max_retries=0)
        self._clients.append(client)
        return client

    def anthropic(self, path: str = "") -> anthropic.Anthropic:
        import anthropic

        client = anthropic.Anthropic(base_url=f"{self.root}{path}", api_key="none", max_retries=0)
        self._clients.append(client)
        return client

    def runs(self) -> list[Trajectory]:
        return [self.store.get(summary.id) for summary in self.store.runs()]

    def check_tokens(self) -> None:
        """Every logged turn is what the template renders and the weights sampled."""
        policy: Any = self.policy
        check = TokenCheck(template=policy.template, eos_ids=policy.engine.eos_ids, blobs=self.store.blobs)
        for run in self.runs():
            assert check.findings(run) == []
            row: tuple[int, ...] = ()
            for turn in run.turns:
                tokens = turn.completion.tokens
                assert tokens is not None
                row = (*row, *tokens.context_ids)
                (scores,) = policy.engine.score([(*row, *tokens.sampled_ids)], first=len(row))
                row = (*row, *tokens.sampled_ids)
                assert scores == pytest.approx(tokens.logprobs, abs=1e-4)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    opened: list[Served] = []

    def start(policy: Any, profile: Any, **options: Any) -> Served:
        store = LogStore.open(tmp_path / "log.db")
        model = ServedModel(policy=policy, profile=profile, store=store, name="tiny")
        opened.append(Served(model, **options))
        return opened[-1]

    yield start
    for server in opened:
        server.close()


@pytest.fixture
def tiny(serve: Callable[..., Served], tiny_folder: Path, one_thread: None) -> Served:
    opened = open_weights(str(tiny_folder))
    return serve(local_policy(opened.loaded, opened.profile, scheduler="free"), opened.profile)


@pytest.fixture
def scripted(serve: Callable[..., Served]) -> Callable[..., Served]:
    return lambda texts, **options: serve(ScriptedPolicy(texts), HERMES_1, **options)


# ------------------------------------------------------------------------------------------- answers


def test_a_conversation_is_held_while_its_request_looks_for_it(
    tiny: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others begin meanwhile, and only one conversation can be held."""
    monkeypatch.setattr("nano_apis.conversations.MOST_HELD", 1)
    client = tiny.openai()

    def ask(*messages: Any) -> str:
        answer = client.chat.completions.create(model="tiny", messages=[*messages], max_tokens=4, seed=1)
        return answer.choices[0].message.content or ""

    said = ask(ASK)
    place, others = tiny.conversations._place, iter(["One.", "Two."])

    def late(*args: Any) -> Any:
        for other in others:
            ask({"role": "user", "content": other})
        return place(*args)

    monkeypatch.setattr(tiny.conversations, "_place", late)
    ask(ASK, {"role": "assistant", "content": said}, {"role": "user", "content": "Go on."})
    assert sorted(len(run.turns) for run in tiny.runs()) == [1, 1, 2]


def test_a_conversation_that_another_process_has_ended_is_forked(tiny: Served) -> None:
    """`nano-coder feedback` gives a reward beside the server, and its clients go on."""
    client = tiny.openai("/sessions/both/v1")
    talk: list[Any] = [ASK]

    def ask() -> None:
        answer = client.chat.completions.create(model="tiny", messages=talk, max_tokens=4, seed=1)
        talk.append({"role": "assistant", "content": answer.choices[0].message.content})
        talk.append({"role": "user", "content": "Go on."})

    ask()
    (first,) = tiny.runs()
    give_reward(tiny.store, [first.id], 1.0)
    ask()
    ask()
    rewarded, fork = sorted(tiny.runs(), key=lambda run: len(run.turns))
    assert (rewarded.id, rewarded.reward, len(rewarded.turns)) == (first.id, 1.0, 1)
    assert (fork.parent, fork.parent_step, len(fork.turns)) == (first.id, 1, 3)
    give_reward(tiny.store, [fork.id], 0.0)
    tiny.close()
    assert {run.stop for run in tiny.runs()} == {StopReason.FINISHED}
    tiny.check_tokens()


def test_an_answer_is_logged_with_its_tokens(tiny: Served) -> None:
    answer = tiny.openai().chat.completions.create(
        model="tiny", messages=[ASK], max_tokens=8, seed=1, logprobs=True,
        extra_body={"return_token_ids": True},
    )  # fmt: skip
    (run,) = tiny.runs()
    tokens = run.turns[0].completion.tokens
    choice: Any = answer.choices[0]
    assert tokens is not None
    assert (tuple(choice.token_ids), tuple(answer.prompt_token_ids)) == (
        tokens.sampled_ids,
        tokens.context_ids,
    )  # type: ignore[attr-defined]
    assert [each.logprob for each in choice.logprobs.content] == list(tokens.logprobs)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (
        len(tokens.context_ids),
        len(tokens.sampled_ids),
    )  # type: ignore[union-attr]
    assert (run.turns[0].messages[0].content, run.task.prompt) == ("Say hello.", "Say hello.")
    tiny.check_tokens()


def test_a_streamed_answer_is_the_same(tiny: Served) -> None:
    client = tiny.openai()
    asked: Any = {"model": "tiny", "messages": [ASK], "max_tokens": 40, "seed": 3}
    whole: Any = client.chat.completions.create(**asked, extra_body={"return_token_ids": True})
    chunks: list[Any] = list(
        client.chat.completions.create(
            **asked,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"return_token_ids": True},
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    ids = [
        token
        for chunk in chunks
        if chunk.choices
        for token in getattr(chunk.choices[0], "token_ids", None) or ()
    ]
    assert (text, ids) == (whole.choices[0].message.content, whole.choices[0].token_ids)
    assert len(chunks) > 5
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    tiny.check_tokens()


def test_the_three_apis_answer_alike(tiny: Served) -> None:
    chat = tiny.openai().chat.completions.create(model="tiny", messages=[ASK], max_tokens=9, **COLD)  # type: ignore[list-item]
    response = tiny.openai().responses.create(
        model="tiny", input="Say hello.", max_output_tokens=9, temperature=0
    )
    message = tiny.anthropic().messages.create(model="tiny", messages=[ASK], max_tokens=9, **COLD)  # type: ignore[list-item]
    with tiny.openai().responses.stream(
        model="tiny", input="Say hello.", max_output_tokens=9, temperature=0
    ) as events:
        *_, last = events
    with tiny.anthropic().messages.stream(model="tiny", messages=[ASK], max_tokens=9, **COLD) as told:  # type: ignore[list-item]
        final = told.get_final_message()
    text = chat.choices[0].message.content
    assert {
        response.output_text,
        last.response.output_text,
        message.content[0].text,
        final.content[0].text,
    } == {text}  # type: ignore[union-attr]
    assert len(tiny.runs()) == 5
    assert len({run.task.key for run in tiny.runs()}) == 1, "one opening is one group"


def test_several_choices_are_runs_of_one_group(tiny: Served) -> None:
    answer = tiny.openai().chat.completions.create(model="tiny", messages=[ASK], max_tokens=6, n=3, seed=5)  # type: ignore[list-item]
    assert len(answer.choices) == 3
    assert len({choice.message.content for choice in answer.choices}) > 1
    assert [run.task.key for run in tiny.runs()] == [tiny.runs()[0].task.key] * 3


def test_a_stop_string_is_not_shown(tiny: Served) -> None:
    asked: Any = {"model": "tiny", "messages": [ASK], "max_tokens": 60, "seed": 2}
    text = tiny.openai().chat.completions.create(**asked).choices[0].message.content or ""
    stop = text[10:14]
    cut = tiny.openai().chat.completions.create(**asked, stop=[stop]).choices[0]
    chunks = tiny.openai().chat.completions.create(**asked, stop=[stop], stream=True)
    shown = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert cut.message.content == shown == text[: text.find(stop)]


# ------------------------------------------------------------------------------------- conversations


def test_a_conversation_is_continued_as_sampled(tiny: Served) -> None:
    client, messages = tiny.openai(), [ASK]
    for number in range(3):
        answer = client.chat.completions.create(model="tiny", messages=messages, max_tokens=7, seed=number)  # type: ignore[arg-type]
        messages += [
            {"role": "assistant", "content": answer.choices[0].message.content or ""},
            {"role": "user", "content": f"and {number}?"},
        ]
    (run,) = tiny.runs()
    assert [len(turn.messages) for turn in run.turns] == [1, 1, 1]
    assert {turn.completion.tokens.row for turn in run.turns if turn.completion.tokens} == {0}
    tiny.check_tokens()


def test_two_continuations_of_one_answer_are_forks(tiny: Served) -> None:
    client = tiny.openai()
    answer = client.chat.completions.create(model="tiny", messages=[ASK], max_tokens=7)  # type: ignore[list-item]
    before: Any = [ASK, {"role": "assistant", "content": answer.choices[0].message.content}]
    for text in ("one", "two"):
        client.chat.completions.create(
            model="tiny", messages=[*before, {"role": "user", "content": text}], max_tokens=5
        )
    first, second = tiny.runs()
    assert (second.parent, second.parent_step, len(second.turns)) == (first.id, 1, 2)
    assert second.turns[0] == first.turns[0]
    tiny.check_tokens()


def test_rewritten_history_begins_another_run(tiny: Served) -> None:
    client = tiny.openai()
    client.chat.completions.create(model="tiny", messages=[ASK], max_tokens=7)  # type: ignore[list-item]
    other: Any = [
        ASK,
        {"role": "assistant", "content": "Something else."},
        {"role": "user", "content": "so?"},
    ]
    client.chat.completions.create(model="tiny", messages=other, max_tokens=5)
    second = tiny.runs()[1]
    assert (second.parent, len(second.turns), len(second.turns[0].messages)) == (None, 1, 3)
    tiny.check_tokens()


def test_an_ambiguous_parent_is_not_trained(scripted: Callable[..., Served]) -> None:
    server = scripted(["yes", "yes ", "well"])
    client = server.openai()
    for _ in range(2):  # the same words, sampled as different tokens
        client.chat.completions.create(model="tiny", messages=[ASK])  # type: ignore[list-item]
    after: Any = [ASK, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "sure?"}]
    client.chat.completions.create(model="tiny", messages=after)
    kinds = [finding.kind for finding in verify(server.runs()[2]) if finding.blocks]
    assert "ambiguous parent" in kinds


def test_sessions_are_kept_apart_and_rewarded(tiny: Served) -> None:
    for name, reward in (("a", 1.0), ("b", 0.0)):
        tiny.openai(f"/sessions/{name}/v1").chat.completions.create(
            model="tiny", messages=[ASK], max_tokens=6
        )  # type: ignore[list-item]
        answer = httpx.post(f"{tiny.root}/sessions/{name}/reward", json={"reward": reward})
        assert answer.json()["reward"] == reward
    runs = tiny.runs()
    assert [run.reward for run in runs] == [1.0, 0.0]
    assert [[finding.kind for finding in verify(run) if finding.blocks] for run in runs] == [[], []]
    assert httpx.post(f"{tiny.root}/sessions/c/reward", json={"reward": 1}).status_code == 404


def test_what_was_served_trains(tiny: Served) -> None:
    from nano_rl.learn.groups import form_groups, to_samples

    for number in range(4):
        tiny.openai(f"/sessions/{number}/v1").chat.completions.create(
            model="tiny", messages=[ASK], max_tokens=6
        )  # type: ignore[list-item]
        httpx.post(f"{tiny.root}/sessions/{number}/reward", json={"reward": number % 2})
    (group,) = form_groups(tiny.runs())
    assert len(group.members) == 4
    assert all(any(sample.mask) for run in tiny.runs() for sample in to_samples(run, 1.0))


# --------------------------------------------------------------------------------------------- tools


def test_tools_are_called_and_answered(scripted: Callable[..., Served]) -> None:
    server = scripted([f"Let me add.\n{CALL}", "It is 3."])
    client = server.openai()
    messages: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+2?"}]
    answer = client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS)
    message = answer.choices[0].message
    (call,) = message.tool_calls or ()
    assert answer.choices[0].finish_reason == "tool_calls"
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1, "b": 2})  # type: ignore[union-attr]
    messages += [
        message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "3"},
    ]
    last = client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS)
    assert (last.choices[0].message.content, last.choices[0].finish_reason) == ("It is 3.", "stop")
    (run,) = server.runs()
    assert [[m.role.value for m in turn.messages] for turn in run.turns] == [["system", "user"], ["tool"]]
    assert "add" in run.turns[0].messages[0].content


def test_tools_are_called_through_messages_and_responses(scripted: Callable[..., Served]) -> None:
    server = scripted([CALL, "3", CALL, "3"])
    client, messages = server.anthropic(), [{"role": "user", "content": "1+2?"}]
    tools: Any = [{"name": "add", "input_schema": TOOLS[0]["function"]["parameters"]}]
    with client.messages.stream(model="tiny", messages=messages, tools=tools, max_tokens=50) as events:  # type: ignore[arg-type]
        used = events.get_final_message()
    assert (used.stop_reason, used.content[0].input) == ("tool_use", {"a": 1, "b": 2})  # type: ignore[union-attr]
    result: Any = {"type": "tool_result", "tool_use_id": used.content[0].id, "content": "3"}  # type: ignore[union-attr]
    messages += [{"role": "assistant", "content": used.content}, {"role": "user", "content": [result]}]  # type: ignore[dict-item]
    client.messages.create(model="tiny", messages=messages, tools=tools, max_tokens=50)  # type: ignore[arg-type]
    functions: Any = [{"type": "function", **TOOLS[0]["function"]}, {"type": "web_search"}]
    with server.openai().responses.stream(model="tiny", input="1+2?", tools=functions) as told:
        called = told.get_final_response()
    item: Any = called.output[0]
    assert json.loads(item.arguments) == {"a": 1, "b": 2}
    items: Any = [
        {"role": "user", "content": "1+2?"}, item.model_dump(exclude_none=True),
        {"type": "function_call_output", "call_id": item.call_id, "output": "3"},
    ]  # fmt: skip
    assert server.openai().responses.create(model="tiny", input=items, tools=functions).output_text == "3"
    assert [len(run.turns) for run in server.runs()] == [2, 2]


# ------------------------------------------------------------------------------------------- clients


def test_a_client_that_goes_away_frees_its_place(tiny: Served) -> None:
    with httpx.stream(
        "POST", f"{tiny.root}/v1/chat/completions",
        json={"messages": [ASK], "max_tokens": 900, "stream": True, "min_tokens": 900, "seed": 11},
    ) as answer:  # fmt: skip
        for number, _ in enumerate(answer.iter_lines()):
            if number > 8:
                break
    waited = time.monotonic()
    while not any(run.turns for run in tiny.runs()) and time.monotonic() - waited < 60:
        time.sleep(0.05)
    (run,) = tiny.runs()
    tokens = run.turns[0].completion.tokens
    assert tokens is not None
    assert (run.turns[0].completion.finish, len(tokens.sampled_ids) < 400) == (Finish.CANCELLED, True)
    assert not tiny.policy.engine.busy  # type: ignore[attr-defined]
    tiny.check_tokens()


@pytest.mark.some(5)
@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/v1/chat/completions", {}, 400, "messages must be a list"),
        ("/v1/chat/completions", {"messages": [{"role": "king", "content": ""}]}, 400, "role must be one of"),
        ("/v1/chat/completions", {"messages": [ASK], "temperature": "hot"}, 400, "must be a number"),
        ("/v1/chat/completions", {"messages": [ASK], "n": 1000}, 400, "n = 1000 is outside"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x " * 5000}]}, 400, "shorten"),
        ("/v1/chat/completions", {"messages": [{**ASK, "content": [{"type": "image"}]}]}, 400, "image"),
        ("/v1/messages", {"messages": [ASK], "max_tokens": 0}, 400, "max_tokens = 0"),
        ("/v1/chat/completions", {"messages": [ASK], "temperature": 1e-40}, 400, "at least 1e-6"),
        ("/v1/messages", {"messages": [{**ASK, "content": []}], "max_tokens": 2}, 400, "no text"),
        ("/v1/responses", {"input": 3}, 400, "input must be"),
        ("/sessions/x/reward", {"reward": "good"}, 400, "reward must be a number"),
        ("/sessions/x/reward", {"reward": 1, "replace": "true"}, 400, "replace must be true or false"),
    ],
)  # fmt: skip
def test_a_bad_request_gets_a_sentence_and_is_not_logged(
    tiny: Served, path: str, body: Any, status: int, words: str
) -> None:
    answer = httpx.post(f"{tiny.root}{path}", json=body)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert words in error["message"]
    assert ("type" in answer.json()) == (path == "/v1/messages")
    assert tiny.runs() == []


def test_no_json_and_too_much_of_it(tiny: Served) -> None:
    for content in (b"", b"{", b"[]", b"\xff", b"[" * 100_000):
        answer = httpx.post(f"{tiny.root}/v1/chat/completions", content=content)
        assert (answer.status_code, "message" in answer.json()["error"]) == (400, True)
    large = httpx.post(f"{tiny.root}/v1/chat/completions", content=b" " * (33 << 20))
    assert large.status_code == 413


ROUTES = {"/v1/chat/completions": "openai", "/v1/responses": "openai", "/v1/messages": "anthropic",
          "/v1/messages/count_tokens": "anthropic", "/sessions/x/v1/messages": "anthropic"}  # fmt: skip


def error_of(answer: httpx.Response, api: str) -> dict[str, Any]:
    """The error of an answer, in the shape of the API and in no other."""
    body = answer.json()
    if api == "anthropic":
        assert (body["type"], sorted(body["error"])) == ("error", ["message", "type"])
    else:
        assert (sorted(body), sorted(body["error"])) == (["error"], ["code", "message", "param", "type"])
    assert body["error"]["message"]
    error: dict[str, Any] = body["error"]
    return error


def test_what_no_route_takes_is_refused_in_the_shape_of_the_api(tiny: Served) -> None:
    for path, api in ROUTES.items():
        for method in ("GET", "PUT", "DELETE"):
            answer = httpx.request(method, f"{tiny.root}{path}")
            assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
            error_of(answer, api)
        large = httpx.post(f"{tiny.root}{path}", content=b" " * (33 << 20))
        kind = "request_too_large" if api == "anthropic" else "invalid_request_error"
        assert (large.status_code, error_of(large, api)["type"]) == (413, kind)
    for path, api in {"/": "openai", "/v1/nothing": "openai", "/v1/messages/batches": "anthropic",
                      "/v2/messages": "anthropic", "/v1/images/edits": "openai"}.items():  # fmt: skip
        answer = httpx.post(f"{tiny.root}{path}", json={})
        assert (answer.status_code, error_of(answer, api)["type"]) == (404, "not_found_error")
    assert httpx.request("DELETE", f"{tiny.root}/metrics").status_code == 405


def test_a_fault_of_the_server_is_told_in_the_shape_of_the_api_without_its_traceback(
    tiny: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(tiny.conversations, "answer", breaks)
    for path, api in ROUTES.items():
        if not path.endswith("count_tokens"):
            for stream in (False, True):
                body = asking(path) | {"stream": stream}
                answer = httpx.post(f"{tiny.root}{path}", json=body)
                assert (answer.status_code, error_of(answer, api)["type"]) == (500, "api_error")
                assert "secret" not in answer.text


def test_an_answer_that_fails_in_the_middle_ends_with_an_error_of_its_api(
    tiny: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(request: Any, session: str, on_text: Callable[[TextDelta], bool], *_: Any) -> None:
        on_text(TextDelta("Hel"))
        reading.wait(60)
        raise PolicyError("the weights are gone")

    reading = threading.Event()
    monkeypatch.setattr(tiny.conversations, "answer", breaks)
    for path, api in ROUTES.items():
        if path.endswith("count_tokens"):
            continue
        body = asking(path) | {"stream": True}
        reading.clear()
        lines = []
        with httpx.stream("POST", f"{tiny.root}{path}", json=body) as answer:
            for line in answer.iter_lines():
                lines += [line] if line else []
                reading.set()
        *_, name, data = lines
        told = json.loads(data.removeprefix("data: "))
        assert (name, told["error"]["message"]) == ("event: error", "the weights are gone")
        if "responses" in path:  # created, in progress, item, part, delta
            assert (told["type"], told["sequence_number"], told["message"]) == (
                "error", 5, "the weights are gone"
            )  # fmt: skip
        else:
            assert (told.get("type") == "error") == (api == "anthropic")


HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"


@pytest.mark.parametrize(
    ("sent", "answered"),
    [
        (b"", b""),
        (HEAD + b"X-Slow: ", b""),
        (HEAD + b"Content-Length: 100\r\n\r\n{", b"HTTP/1.1 408"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n", b"HTTP/1.1 408"),
        (b"\x16\x03\x01 no HTTP\r\n\r\n", b"HTTP/1.1 400"),
    ],
)
def test_a_client_that_drips_holds_no_connection(
    scripted: Callable[..., Served], monkeypatch: pytest.MonkeyPatch, sent: bytes, answered: bytes
) -> None:
    monkeypatch.setattr("nano_coder.serve.access.HEAD_SECONDS", 0.2)
    monkeypatch.setattr("nano_apis.app.BODY_SECONDS", 0.2)
    server = scripted(["hi"])
    with socket.create_connection(("127.0.0.1", int(server.root.rpartition(":")[2])), timeout=60) as client:
        client.sendall(sent)
        received = b"".join(iter(lambda: client.recv(4096), b""))  # to the end of the connection
    assert received[:12] == answered
    assert server.runs() == []
    assert httpx.post(f"{server.root}/v1/chat/completions", json={"messages": [ASK]}).status_code == 200


def test_a_key_is_asked_for(scripted: Callable[..., Served]) -> None:
    server = scripted(["hi"] * 3, access=Access(keys=["right"]))
    url = f"{server.root}/v1/chat/completions"
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"x-api-key": ""}):
        assert httpx.post(url, json={"messages": [ASK]}, headers=headers).status_code == 401
    for headers in ({"Authorization": "Bearer right"}, {"x-api-key": "right"}):
        assert httpx.post(url, json={"messages": [ASK]}, headers=headers).status_code == 200


def test_a_page_of_the_web_is_not_answered(tiny: Served) -> None:
    answer = httpx.post(
        f"{tiny.root}/v1/chat/completions", json={"messages": [ASK]}, headers={"Host": "evil.example"}
    )
    assert answer.status_code == 403


def test_more_requests_than_may_wait_are_refused(
    serve: Callable[..., Served], tiny_folder: Path, one_thread: None
) -> None:
    opened = open_weights(str(tiny_folder))
    policy = local_policy(opened.loaded, opened.profile, scheduler="free")
    server = serve(policy, opened.profile, limits=ServerLimits(concurrent=1, waiting=1))
    found: list[int] = []

    def ask() -> None:
        body = {"messages": [ASK], "max_tokens": 200, "seed": 11}
        answer = httpx.post(f"{server.root}/v1/chat/completions", json=body, timeout=60)
        found.append(answer.status_code)
        if answer.status_code == 429:
            assert answer.headers["retry-after"] == "1"

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(found) == {200, 429}
    assert len(server.runs()) == found.count(200)


def test_many_clients_are_answered_together(tiny: Served) -> None:
    texts: dict[int, str | None] = {}

    def ask(number: int) -> None:
        answer = tiny.openai().chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": f"number {number}"}],
            max_tokens=20,
            seed=number,
        )
        texts[number] = answer.choices[0].message.content

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(tiny.runs()) == 16
    tiny.check_tokens()
    metrics = httpx.get(f"{tiny.root}/metrics").text
    finished = re.findall(r'request_success_total{finished_reason="\w+",model_name="tiny"} ([\d.]+)', metrics)
    assert sum(map(float, finished)) == 16
    assert 'vllm:num_requests_running{model_name="tiny"} 0.0' in metrics


def test_models_are_listed(tiny: Served) -> None:
    (card,) = tiny.openai().models.list().data
    assert (card.id, card.max_model_len) == ("tiny", tiny.policy.context_limit)  # type: ignore[attr-defined]
    assert httpx.get(f"{tiny.root}/v1/models/other").status_code == 404
    assert httpx.get(f"{tiny.root}/health").json() == {"status": "ok"}


def test_only_its_client_goes_on_with_a_conversation(tiny: Served) -> None:
    from nano_coder.run.execution import refuse_ended
    from nano_coder.run.fork import refuse_step

    tiny.openai().chat.completions.create(model="tiny", messages=[ASK], max_tokens=6)  # type: ignore[list-item]
    (run,) = tiny.runs()
    for refuse in (refuse_ended, lambda run: refuse_step(run, 1)):
        with pytest.raises(UsageError, match="a client of nano-coder serve"):
            refuse(run)


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses", "messages"])
def test_a_model_that_is_not_here_is_refused(tiny: Served, path: str) -> None:
    asked = asking(path, 3)

    def answer(name: object) -> httpx.Response:
        return httpx.post(f"{tiny.root}/v1/{path}", json=asked | {"model": name})

    for name in ("tiny", "nano", "claude-haiku-4-5", "gpt-5-codex", None):
        assert answer(name).status_code == 200, name
    refused = answer("tinny")
    assert (refused.status_code, answer(7).status_code) == (404, 400)
    error = refused.json()["error"]
    assert "no model 'tinny' here; this server answers as tiny or nano" in error["message"]
    for name in ("x" * 300, "/" + "x" * 5000, "coder-1.5b"):  # no file's name, or one that could be fetched
        assert answer(name).status_code == 404, name
    assert error.get("code", error["type"]) in ("model_not_found", "not_found_error")


def test_a_promoted_model_answers_without_a_restart(
    serve: Callable[..., Served], tiny_folder: Path, one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nano_apis.app._SWEEP_SECONDS", 0.05)
    opened = open_weights(str(tiny_folder))
    waiting: list[ServedModel] = []
    server = serve(
        local_policy(opened.loaded, opened.profile, scheduler="free"), opened.profile,
        promoted=lambda: waiting.pop() if waiting else None,
    )  # fmt: skip
    client = server.openai()
    first = client.chat.completions.create(model="nano", messages=[ASK], max_tokens=6, seed=1)  # type: ignore[list-item]
    newer = local_policy(open_weights(str(tiny_folder)).loaded, opened.profile, version=7, scheduler="free")
    waiting.append(ServedModel(policy=newer, profile=opened.profile, store=server.store, name="newer"))
    while client.models.list().data[0].id != "newer":
        time.sleep(0.02)
    after: Any = [ASK, {"role": "assistant", "content": first.choices[0].message.content}, ASK]
    client.chat.completions.create(model="nano", messages=after, max_tokens=6, seed=1)
    old, new = server.runs()
    versions = [turn.completion.policy_version for turn in new.turns]
    assert (new.parent, new.policy, versions) == (old.id, "newer", [0, 7])
    assert [finding.kind for finding in verify(new) if finding.blocks] == ["unfinished", "no verdict"]
    server.check_tokens()


# ------------------------------------------------------------------------------------- hostile bodies

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
FIELDS = (
    "messages", "input", "system", "instructions", "tools", "tool_choice", "stop", "stop_sequences", "seed",
    "temperature", "top_p", "top_k", "max_tokens", "max_completion_tokens", "max_output_tokens", "n",
    "stream", "stream_options", "logprobs", "response_format", "model", "metadata", "return_token_ids",
)  # fmt: skip
PARTS = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["system", "user", "assistant", "tool", "developer"]) | JSON,
        "content": JSON | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": JSON})),
        "type": st.sampled_from(["message", "function_call", "function_call_output", "reasoning"]) | JSON,
        "tool_calls": st.lists(st.fixed_dictionaries({"id": JSON, "function": JSON}), max_size=2) | JSON,
        "function": st.fixed_dictionaries({"name": JSON, "parameters": JSON}) | JSON,
        "name": JSON, "arguments": JSON, "input_schema": JSON, "output": JSON, "call_id": JSON,
    },
)  # fmt: skip
BODIES = st.dictionaries(st.sampled_from(FIELDS), st.lists(PARTS, max_size=3) | JSON, max_size=8)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    store = LogStore.open(tmp_path_factory.mktemp("hostile") / "log.db")
    policy = ScriptedPolicy(["x"] * 100_000, tokens=True)
    model = ServedModel(policy=policy, profile=HERMES_1, store=store, name="m")
    app = serve_app(Conversations(model))
    with TestClient(app, base_url="http://localhost", raise_server_exceptions=False) as client:
        yield client


@given(BODIES, st.sampled_from(["chat/completions", "messages", "responses", "messages/count_tokens"]))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_body_breaks_the_server(hostile: TestClient, body: dict[str, Any], path: str) -> None:
    text = json.dumps(body).encode("utf-8", "surrogatepass")
    answer = hostile.post(f"/v1/{path}", content=text)
    unknown = isinstance(body.get("model"), str)
    assert answer.status_code in (200, 400, *([404] if unknown else [])), (answer.status_code, answer.text)
    if answer.status_code != 200:
        assert answer.json()["error"]["message"]


def test_text_before_a_call_is_streamed_and_the_call_is_not_shown_as_text(
    scripted: Callable[..., Served],
) -> None:
    server = scripted([f"Let me add.\n{CALL}", "No tool is needed."])
    for text, calls in (("Let me add.", 1), ("No tool is needed.", 0)):
        chunks = list(
            server.openai().chat.completions.create(model="tiny", messages=[ASK], tools=TOOLS, stream=True)  # type: ignore[list-item]
        )
        deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
        assert "".join(delta.content or "" for delta in deltas).strip() == text
        assert sum(len(delta.tool_calls or ()) for delta in deltas) == calls


@pytest.mark.parametrize("form", ["```json\n{}\n```", "<tools>\n{}\n</tools>", "{}"])
def test_a_call_without_the_tags_of_the_dialect_is_one(serve: Callable[..., Served], form: str) -> None:
    text = "I add.\n" + form.replace("{}", '{"name": "add", "arguments": {"a": 1, "b": 2}}')
    server = serve(ScriptedPolicy([text]), find_profile("native-1-hermes-json"))
    asked: Any = {"model": "tiny", "messages": [ASK], "tools": TOOLS}
    with server.openai().chat.completions.stream(**asked) as events:
        shown = "".join(event.delta for event in events if event.type == "content.delta")
        choice = events.get_final_completion().choices[0]
    assert (shown, choice.finish_reason) == ("I add.", "tool_calls")
    (run,) = server.runs()
    assert len(run.turns[0].repairs) == 1


def test_a_server_that_starts_ends_what_a_killed_one_left_and_nothing_of_a_live_one(tiny: Served) -> None:
    tiny.openai().chat.completions.create(model="tiny", messages=[ASK], max_tokens=6)  # type: ignore[list-item]
    assert end_interrupted(tiny.store, 600.0) == 0
    assert tiny.runs()[0].stop is None
    assert end_interrupted(tiny.store, 0.0) == 1
    assert tiny.runs()[0].stop is StopReason.FINISHED
