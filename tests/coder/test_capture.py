"""Tokens across servers: an endpoint that gives ids and log-probs, and a server in front of another."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import httpx
import pytest
from strict_api import KEY, Call, Fail, Handler, Say, call, strict_api
from test_serve import Served, serve, tiny  # noqa: F401 (fixtures)

from nano_apis.conversations import ClientSession, Conversations, UnknownSession
from nano_apis.request import ClientMessage, ModelRequest
from nano_apis.served_models import ServedModel
from nano_cluster.token_server import TokenServer
from nano_coder.agent.profiles import API_1, HERMES_1
from nano_coder.cli import cli
from nano_coder.config import AgentConfig
from nano_coder.models.endpoint.model_card import ModelCard, card_of, read_cards
from nano_coder.models.endpoint.policy import EndpointPolicy, Patience
from nano_coder.models.opening import local_policy, open_policy, open_weights
from nano_coder.models.scripted import ScriptedPolicy
from nano_coder.run.execution import Runtime, grade_run, run_task
from nano_coder.sandbox.protocol import open_sandbox
from nano_coder.verify.tokens import TokenCheck
from nano_coder.verify.trainable import verify
from nano_rl.logs.admission import RunVerifier, TargetPolicy, refusal_of
from nano_shared.command_line import run_command
from nano_shared.errors import UsageError
from nano_shared.policy import Conversation
from nano_shared.run_facts import RunFilter, facts_of
from nano_shared.store import LogStore, new_run_id
from nano_shared.types import CLIENT_TOOLS, Message, Role, Sampling, StopReason, Task, Trajectory


def run_against(
    server: Served, log: Path | str, *, seed: int = 0, **options: Any
) -> tuple[Trajectory, LogStore]:
    """A run of nano's own loop, whose policy is behind the server."""
    opened = open_policy("openai:tiny", AgentConfig(base_url=f"{server.root}/v1", **options))
    store = LogStore.open(log)
    task = Task(key="t", prompt="Write 'hi' into hello.txt", check="grep -qx hi hello.txt")
    task = task.model_copy(update={"limits": task.limits.model_copy(update={"max_turns": 3})})
    runtime = Runtime(
        policy=opened.policy, profile=opened.profile, policy_name=opened.name, sandbox=open_sandbox(),
        store=store, sampling=Sampling(max_tokens=40),
    )  # fmt: skip
    return grade_run(run_task(task, runtime, seed=seed), runtime), store


def test_a_run_against_our_server_is_as_exact_as_one_of_our_own(
    tiny: Served,  # noqa: F811
    tiny_folder: Path,
    tmp_path: Path,
) -> None:
    run, store = run_against(tiny, tmp_path / "client.db")
    assert len(run.turns) == 3
    assert run.has_tokens
    local = open_weights(str(tiny_folder))
    completion = run.turns[-1].completion
    assert (run.profile, completion.policy_id) == (local.profile.name, local.loaded.id)
    assert not [finding for finding in verify(run) if finding.blocks]
    policy: Any = tiny.policy
    check = TokenCheck(template=policy.template, eos_ids=policy.engine.eos_ids, blobs=store.blobs)
    assert check.findings(run) == []
    target = TargetPolicy(profile=local.profile, template_hash=policy.template_hash)
    assert refusal_of(facts_of(run), target) is None
    scored = RunVerifier(local, store).verify(run, score=True)
    assert scored.refusal is None
    assert len(scored.tokens) == run.num_sampled_tokens
    assert max(abs(token.recorded - token.recomputed) for token in scored.tokens) < 1e-4
    tiny.check_tokens()
    (served,) = tiny.runs()
    assert [turn.completion.tokens for turn in served.turns] == [turn.completion.tokens for turn in run.turns]


def test_a_run_in_the_log_of_its_server_is_logged_once(
    tiny: Served,  # noqa: F811
    tmp_path: Path,
) -> None:
    run, _ = run_against(tiny, tmp_path / "log.db")
    (only,) = tiny.runs()
    assert (only.id, len(only.turns), only.has_tokens) == (run.id, 3, True)
    assert {turn.completion.tokens.row for turn in only.turns if turn.completion.tokens} == {0}, "continued"
    assert tiny.store.sql("SELECT count(*) FROM requests").rows == [(0,)]
    tiny.check_tokens()


def open_run(server: Served, tools_hash: str = "") -> Trajectory:
    run = Trajectory(
        id=new_run_id(), task=Task(key="t", prompt="p"), policy="tiny", runtime_version="1",
        started=time.time(), profile="p", profile_hash="h", template_hash="h", tools_hash=tools_hash or "h",
    )  # fmt: skip
    server.store.begin(run)
    return run


def test_raw_prompts_of_an_open_run_are_logged_by_that_run_alone(tiny: Served) -> None:  # noqa: F811
    policy: Any = tiny.policy
    eos, size = policy.engine.eos_ids, policy.engine.model.config.vocab_size
    client = TokenServer(f"{tiny.root}/v1", answer_seconds=60, sync_seconds=60)
    run, sampling = open_run(tiny), Sampling(max_tokens=2)
    client.sample("tiny", [5, 6, 7], sampling, eos_ids=eos, vocab_size=size, run=run.id)
    assert [one.id for one in tiny.runs()] == [run.id]
    client.sample("tiny", [5, 6, 7], sampling, eos_ids=eos, vocab_size=size)
    assert len(tiny.runs()) == 2


@pytest.mark.parametrize("named", ["unknown", "ended", "a client's", "\udcff" * 3])
def test_naming_any_other_run_keeps_nothing_out_of_the_log(tiny: Served, named: str) -> None:  # noqa: F811
    run = open_run(tiny, f"{CLIENT_TOOLS}x" if named == "a client's" else "")
    if named == "ended":
        tiny.store.finish(run.id, stop=StopReason.FINISHED, ended=time.time())
    name = run.id if named in ("ended", "a client's") else named
    said = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    headers = {b"X-Nano-Run": name.encode("utf-8", "surrogateescape")}
    assert httpx.post(f"{tiny.root}/v1/chat/completions", json=said, headers=headers).is_success
    assert len(tiny.runs()) == 2


def test_native_calls_are_trained_by_the_template_that_the_server_renders(
    tiny: Served,  # noqa: F811
    tiny_folder: Path,
    tmp_path: Path,
) -> None:
    run, store = run_against(tiny, tmp_path / "client.db", profile="api-1")
    assert run.has_tokens
    local, policy = open_weights(str(tiny_folder)), tiny.policy
    target = TargetPolicy(profile=local.profile, template_hash=policy.template_hash)
    assert refusal_of(facts_of(run), target) is None
    assert RunVerifier(local, store).refusal(run) is None
    other = TargetPolicy(profile=local.profile, template_hash="sha256:other")
    assert refusal_of(facts_of(run), other) == "another chat template"
    turn = run.turns[0]
    forged = turn.model_copy(update={"completion": turn.completion.model_copy(update={"text": "not this"})})
    assert RunVerifier(local, store).refusal(run.model_copy(update={"turns": (forged,)})) is not None


# --------------------------------------------------------------------------------- after a restart


class Restarted:
    """Conversations over one log, by one server after another."""

    def __init__(self, folder: Path, tiny_folder: Path) -> None:
        opened = open_weights(str(tiny_folder))
        self.store = LogStore.open(folder / "log.db")
        policy = local_policy(opened.loaded, opened.profile, scheduler="free")
        self.model = ServedModel(policy=policy, profile=opened.profile, store=self.store, name="tiny")
        self.messages: tuple[ClientMessage, ...] = ()
        self.start()

    def start(self) -> None:
        self.server = Conversations(self.model)

    def say(self, text: str, session: str = "s") -> Trajectory:
        """Go on with the conversation; the run that holds the answer."""
        self.messages += (ClientMessage(role=Role.USER, text=text),)
        request = ModelRequest(messages=self.messages, sampling=Sampling(max_tokens=6))
        answer = self.server.answer(request, ClientSession(session), client="agent/1")
        self.messages += (answer.message,)
        return self.store.get(answer.run)


@pytest.fixture
def restarted(tmp_path: Path, tiny_folder: Path, one_thread: None) -> Restarted:
    return Restarted(tmp_path, tiny_folder)


def row(run: Trajectory) -> list[int]:
    tokens = [turn.completion.tokens for turn in run.turns]
    return [i for each in tokens if each for i in (*each.context_ids, *each.sampled_ids)]


def test_a_conversation_goes_on_after_a_server_was_killed(restarted: Restarted) -> None:
    first = restarted.say("one")
    restarted.start()
    again = restarted.say("two")
    assert (again.id, len(again.turns)) == (first.id, 2)
    assert row(again)[: len(row(first))] == row(first)
    assert restarted.store.sql("SELECT session, client FROM requests").rows == [("s", "agent/1")] * 2
    assert restarted.server.reward("s", 1.0) == [first.id]
    assert not [finding for finding in verify(restarted.store.get(first.id)) if finding.blocks]


def test_one_that_ended_is_forked_as_sampled_after_a_restart(restarted: Restarted) -> None:
    restarted.say("one")
    first = restarted.say("two")
    restarted.server.end_all()
    for text in ("three", "four"):
        restarted.start()
        fork = restarted.say(text)
    assert (fork.parent, fork.parent_step, len(fork.turns)) == (first.id, 2, 4)
    assert row(fork)[: len(row(first))] == row(first)
    assert restarted.store.conversations(fork.id)[:2] == restarted.store.conversations(first.id)


def test_another_session_and_another_template_find_nothing(restarted: Restarted) -> None:
    first = restarted.say("one")
    restarted.start()
    other = restarted.say("two", session="other")
    assert (other.parent, len(other.turns)) == (None, 1)
    restarted.messages = restarted.messages[:2]
    restarted.model = replace(restarted.model, profile=HERMES_1)
    restarted.start()
    assert restarted.say("two").id != first.id


def test_equal_answers_of_two_runs_are_ambiguous_after_a_restart_too(tmp_path: Path) -> None:
    store = LogStore.open(tmp_path / "log.db")
    model = ServedModel(
        policy=ScriptedPolicy(["yes", "yes ", "well"]), profile=HERMES_1, store=store, name="m"
    )
    ask = ClientMessage(role=Role.USER, text="sure?")
    server = Conversations(model)
    for _ in range(2):
        said = server.answer(ModelRequest(messages=(ask,), sampling=Sampling())).message
    after = ModelRequest(messages=(ask, said, ask), sampling=Sampling())
    run = store.get(Conversations(model).answer(after).run)
    assert "ambiguous parent" in [finding.kind for finding in verify(run)]


def main(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as end:
        run_command(cli, arguments)
    return int(end.value.code or 0)


def test_a_reward_finds_the_session_after_a_restart_and_is_not_given_twice(
    restarted: Restarted, capsys: pytest.CaptureFixture[str]
) -> None:
    first = restarted.say("one")
    restarted.start()
    with pytest.raises(UnknownSession):
        restarted.server.reward("t", 1.0)
    feedback = ("feedback", "s", "--log", restarted.store.url, "--reward")
    assert main([*feedback, "0.5"]) == 0
    run = restarted.store.get(first.id)
    assert (run.reward, run.stop) == (0.5, StopReason.FINISHED)
    assert main([*feedback, "1"]) == 2
    assert "--replace" in capsys.readouterr().err
    with pytest.raises(UsageError, match="a verdict already"):
        restarted.server.reward("s", 1.0)
    assert main([*feedback, "1", "--replace"]) == 0
    assert restarted.store.get(first.id).reward == 1.0
    assert main([*feedback, "nan"]) == 2
    assert main([*feedback, "1", "--good"]) == 2
    assert main(["feedback", first.id[:12], "--log", restarted.store.url, "--reward", "1"]) == 2


def listing(*cards: dict[str, Any]) -> Callable[[BaseHTTPRequestHandler], None]:
    def answer(self: BaseHTTPRequestHandler) -> None:
        self.send(200, json.dumps({"object": "list", "data": list(cards)}).encode(), {})  # type: ignore[attr-defined]

    return answer


VLLM = {"id": "little", "object": "model", "owned_by": "vllm", "max_model_len": 512, "root": "/nowhere"}


def test_only_a_server_that_says_so_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with strict_api(Say("hello")) as (server, _):
        assert read_cards(server.base_url, "k") == [], "it has no list of models"
        for card, gives in ((VLLM, True), ({**VLLM, "owned_by": "llamacpp"}, False)):
            monkeypatch.setattr(Handler, "do_GET", listing(card), raising=False)
            found = card_of("little", read_cards(server.base_url, "k"))
            assert (found.gives_tokens, found.context_limit, found.profile) == (gives, 512, None)
        for nonsense in ({"id": 3}, {"id": "little", "owned_by": ["vllm"], "max_model_len": "x"}, {}):
            monkeypatch.setattr(Handler, "do_GET", listing(nonsense), raising=False)
            assert not card_of("little", read_cards(server.base_url, "k")).gives_tokens


TAKES = ("return_token_ids", "logprobs", "top_k", "min_p", "repetition_penalty")
CARD = ModelCard(id="little", gives_tokens=True)
OWN_DEFAULTS = {
    "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0,
    "presence_penalty": 0.0, "frequency_penalty": 0.0,
}  # fmt: skip
"""what vLLM takes from a model's generation_config.json where a request lacks it; its log-probs show none"""


def body(**tokens: Any) -> Any:
    """One answer that is not streamed, with these fields of tokens."""
    logprobs = tokens.pop("logprobs", [-0.5, -0.25])
    content = None if logprobs is None else {"content": [{"logprob": each} for each in logprobs]}
    choice = {
        "index": 0, "message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop",
        "token_ids": tokens.get("ids", [7, 8]), "logprobs": content,
    }  # fmt: skip
    usage = {"prompt_tokens": 3, "completion_tokens": tokens.get("counted", 2)}
    answer = {"choices": [choice], "prompt_token_ids": tokens.get("prompt", [1, 2, 3]), "usage": usage}
    return lambda handler: handler.send(200, json.dumps(answer).encode(), {})


def complete(step: Any, **more: Any) -> Any:
    with strict_api(step, takes=TAKES) as (server, script):
        policy = EndpointPolicy("little", server.base_url, KEY, card=CARD, patience=Patience(retry=1))
        conversation = Conversation((Message(role=Role.USER, content="go"),))
        return policy.complete(conversation, Sampling(**more)), script


def test_ids_and_logprobs_of_a_server_are_the_turns() -> None:
    completion, script = complete(body())
    assert (completion.tokens.context_ids, completion.tokens.sampled_ids) == ((1, 2, 3), (7, 8))
    assert completion.tokens.logprobs == (-0.5, -0.25)
    asked = script.seen[0]
    assert (asked["return_token_ids"], asked["logprobs"]) == (True, True)
    assert {name: asked[name] for name in OWN_DEFAULTS} == OWN_DEFAULTS


@pytest.mark.some(4)
@pytest.mark.parametrize(
    ("tokens", "why"),
    [
        ({"ids": [7, 8, 9]}, "3 sampled ids and 2 log-probs"),
        ({"logprobs": None}, "2 sampled ids and 0 log-probs"),
        ({"counted": 5}, "2 sampled ids and counted 5"),
        ({"ids": []}, "no token ids"),
        ({"prompt": None}, "no token ids"),
        ({"ids": [7, -1]}, "no token ids"),
        ({"ids": [7, True]}, "no token ids"),
        ({"prompt": [1, 2**40]}, "no token ids"),
        ({"logprobs": [-0.5, 0.5]}, "not finite numbers up to 0"),
        ({"logprobs": [-0.5, float("nan")]}, "not finite numbers up to 0"),
        ({"logprobs": [-0.5, None]}, "not finite numbers up to 0"),
    ],
)
def test_wrong_tokens_are_refused_by_name_and_the_text_stays(tokens: dict[str, Any], why: str) -> None:
    completion, _ = complete(body(**tokens))
    assert (completion.text, completion.tokens) == ("hello", None)
    assert why in completion.api.no_tokens


def test_logprobs_of_another_temperature_are_refused_by_name() -> None:
    completion, _ = complete(body(), temperature=0.5)
    assert completion.tokens is None
    assert "temperature" in completion.api.no_tokens


def test_a_server_that_refuses_the_parameter_is_asked_without_it_from_then_on() -> None:
    with strict_api(Say("hello"), takes=TAKES[1:]) as (server, script):
        policy = EndpointPolicy("little", server.base_url, KEY, card=CARD)
        for _ in range(2):
            conversation = Conversation((Message(role=Role.USER, content="go"),))
            assert policy.complete(conversation, Sampling()).tokens is None
        assert (script.tried, len(script.seen)) == (3, 2)


def test_history_that_a_server_rewrites_begins_a_row() -> None:
    answers = iter([[1, 2, 3], [1, 2, 3, 7, 8, 4], [9, 9]])
    with strict_api(lambda handler: body(prompt=next(answers))(handler), takes=TAKES) as (server, _):
        policy = EndpointPolicy("little", server.base_url, KEY, card=CARD)
        conversation = Conversation()
        found = []
        for _ in range(3):
            conversation.append(Message(role=Role.USER, content="go"))
            completion = policy.complete(conversation, Sampling())
            conversation.record(completion)
            found.append((completion.tokens.row, completion.tokens.context_ids))  # type: ignore[union-attr]
    assert found == [(0, (1, 2, 3)), (0, (4,)), (1, (9, 9))]


def test_why_a_turn_has_no_tokens_is_in_the_log(tmp_path: Path) -> None:
    with strict_api(body(counted=5), takes=TAKES) as (server, _):
        policy = EndpointPolicy("little", server.base_url, KEY, card=CARD)
        store = LogStore.open(tmp_path / "log.db")
        task = Task(key="t", prompt="go")
        task = task.model_copy(update={"limits": task.limits.model_copy(update={"max_turns": 1})})
        runtime = Runtime(policy=policy, profile=HERMES_1, sandbox=open_sandbox(), store=store)
        run = run_task(task, replace(runtime, policy_name="openai:little"), seed=0)
    (facts,) = store.facts(RunFilter(runs=(run.id,)))
    assert facts == facts_of(store.get(run.id))
    (told,) = [finding.text for finding in verify(run) if finding.kind == "text-only"]
    assert "counted 5" in told


# ------------------------------------------------------------------------- in front of another server


@pytest.fixture
def before(serve: Callable[..., Served]) -> Callable[..., Served]:  # noqa: F811
    """A server in front of that URL."""

    def start(url: str, model: str = "little", key: str = KEY) -> Served:
        card = card_of(model, read_cards(url, key))
        return serve(EndpointPolicy(model, url, key, card=card), API_1)

    return start


ADD: Any = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {
    "type": "object", "properties": {"a": {"type": "number"}}}}}  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
def test_text_and_calls_are_passed_on_and_logged(before: Callable[..., Served], stream: bool) -> None:
    says = (Say("Adding.", calls=(Call("add", '{"a": 1}'), Call("add", '{"a":2}'))), Say("3"))
    with strict_api(*says) as (behind, script):
        server = before(behind.base_url)
        client = server.openai("/sessions/x/v1")
        messages: list[Any] = [{"role": "user", "content": "1 + 2?"}]
        asked: Any = {"model": "nano", "tools": [ADD], "tool_choice": "auto", "verbosity": "low"}
        if stream:
            with client.chat.completions.stream(messages=messages, **asked) as events:
                list(events)
                answer = events.get_final_completion().choices[0]
        else:
            answer = client.chat.completions.create(messages=messages, **asked).choices[0]
        assert (answer.message.content, answer.finish_reason) == ("Adding.", "tool_calls")
        calls = answer.message.tool_calls
        assert [call.function.arguments for call in calls] == ['{"a": 1}', '{"a":2}']
        given = [{"id": c.id, "type": "function", "function": c.function.model_dump(include={"name", "arguments"})} for c in calls]  # fmt: skip # noqa: E501
        messages.append({"role": "assistant", "content": "Adding.", "tool_calls": given})
        messages += [{"role": "tool", "tool_call_id": call.id, "content": call.id} for call in calls]
        assert client.chat.completions.create(messages=messages, **asked).choices[0].message.content == "3"
    first, second = script.seen
    unsaid = {"temperature", "max_completion_tokens", "max_tokens"} & set(first)
    assert (first["verbosity"], first["tool_choice"], unsaid) == ("low", "auto", set())
    assert [m["role"] for m in second["messages"]] == ["user", "assistant", "tool", "tool"]
    (run,) = server.runs()
    assert (len(run.turns), run.has_tokens, run.policy) == (2, False, "tiny")
    assert [call.arguments for call in run.turns[0].calls] == [{"a": 1}, {"a": 2}]
    assert "text-only" in [finding.kind for finding in verify(run)]
    assert server.store.session_runs("x") == [run.id]


FENCED = 'I add.\n```json\n{"name": "add", "arguments": {"a": 1}}\n```'


@pytest.mark.slow
def test_calls_that_a_server_left_in_the_text_are_tool_calls_in_every_api(
    before: Callable[..., Served],
) -> None:
    with strict_api(*[Say(FENCED)] * 4, Say("It is 1."), Say("Use ```add``` then.")) as (behind, script):
        server = before(behind.base_url)
        tools: Any = [ADD]
        messages: list[Any] = [{"role": "user", "content": "1 + 0?"}]
        chat = server.openai().chat.completions
        with chat.stream(model="nano", messages=messages, tools=tools) as events:
            shown = "".join(event.delta for event in events if event.type == "content.delta")
            streamed = events.get_final_completion().choices[0]
        whole = chat.create(model="nano", messages=messages, tools=tools).choices[0]
        assert shown == "I add."
        for choice in (streamed, whole):
            assert (choice.message.content, choice.finish_reason) == ("I add.", "tool_calls")
            assert [call.function.arguments for call in choice.message.tool_calls or ()] == ['{"a": 1}']
        named: Any = {"name": "add", "input_schema": ADD["function"]["parameters"]}
        said: Any = server.anthropic().messages.create(
            model="nano", messages=messages, tools=[named], max_tokens=50
        )
        assert [block.type for block in said.content] == ["text", "tool_use"]
        functions: Any = [{"type": "function", **ADD["function"]}]
        items: Any = server.openai().responses.create(model="nano", input="1?", tools=functions).output
        assert [item.type for item in items] == ["message", "function_call"]
        (call,) = whole.message.tool_calls or ()
        messages += [whole.message.model_dump(exclude_none=True)]
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "1"}]
        assert chat.create(model="nano", messages=messages, tools=tools).choices[0].finish_reason == "stop"
        prose = chat.create(model="nano", messages=messages[:1], tools=tools).choices[0].message
        assert (prose.content, prose.tool_calls) == ("Use ```add``` then.", None)
    roles = [message["role"] for message in script.seen[4]["messages"]]
    assert roles == ["user", "assistant", "user"], "a result of a call that the server did not make"


@pytest.mark.slow
def test_other_apis_reach_a_server_that_has_chat_alone(before: Callable[..., Served]) -> None:
    says = (Say("Adding.", calls=(call("add", a=1),)), Say("ok"), Say("hm"))
    with strict_api(*says) as (behind, script):
        server = before(behind.base_url)
        tool: Any = {"name": "add", "input_schema": ADD["function"]["parameters"]}
        messages: list[Any] = [{"role": "user", "content": "go"}]
        client = server.anthropic()
        said: Any = client.messages.create(model="nano", messages=messages, tools=[tool], max_tokens=50)
        assert [block.type for block in said.content] == ["text", "tool_use"]
        result = {"type": "tool_result", "tool_use_id": said.content[1].id, "content": "1"}
        messages += [
            {"role": "assistant", "content": [block.model_dump() for block in said.content]},
            {"role": "user", "content": [result]},
        ]
        again: Any = client.messages.create(model="nano", messages=messages, tools=[tool], max_tokens=50)
        assert again.content[0].text == "ok"
        with server.openai().responses.stream(model="nano", input="hi") as events:
            last: Any = list(events)[-1]
        assert last.response.output_text == "hm"
        assert len(script.seen) == 3
    assert [len(run.turns) for run in server.runs()] == [2, 1]


@pytest.mark.some(4)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fail", "status", "after"),
    [
        (Fail(429, (("Retry-After", "7"),)), 429, "7"),
        (Fail(503), 503, "1"),
        (Fail(500), 500, None),
        (Fail(404), 404, None),
        (Fail(400), 400, None),
    ],
)
def test_a_refusal_has_the_shape_of_the_api_and_its_status(
    before: Callable[..., Served], fail: Fail, status: int, after: str | None, stream: bool
) -> None:
    with strict_api(fail) as (behind, script):
        server = before(behind.base_url)
        body = {"messages": [{"role": "user", "content": "go"}], "stream": stream, "max_tokens": 5}
        tried = script.tried
        for path in ("/v1/chat/completions", "/v1/messages"):
            answer = httpx.post(server.root + path, json=body)
            assert (answer.status_code, answer.headers.get("retry-after")) == (status, after)
            assert answer.json()["error"]["message"]
        assert script.tried - tried == 2, "a client asks again, and not the server"
    assert server.runs() == []


def test_a_server_behind_that_is_gone_or_refuses_our_key_is_named(before: Callable[..., Served]) -> None:
    body = {"messages": [{"role": "user", "content": "go"}], "stream": True}
    with strict_api(Say("x")) as (behind, _):
        url = behind.base_url
        answer = httpx.post(f"{before(url, key='wrong').root}/v1/chat/completions", json=body)
        assert (answer.status_code, "API key" in answer.text) == (502, True)
    answer = httpx.post(f"{before(url).root}/v1/chat/completions", json=body)
    assert (answer.status_code, "is the server running" in answer.text) == (502, True)


@pytest.mark.parametrize("silent", [False, True])
def test_a_client_that_leaves_ends_the_answer_behind(before: Callable[..., Served], silent: bool) -> None:
    cut = threading.Event()

    def endless(handler: Handler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.end_headers()
        event = {"choices": [{"index": 0, "delta": {"content": "go "}, "finish_reason": None}]}
        line = b": wait\n\n" if silent else b"data: " + json.dumps(event).encode() + b"\n\n"
        try:
            while True:
                handler.wfile.write(line)
                handler.wfile.flush()
                time.sleep(0.02)
        except OSError:
            cut.set()
        handler.close_connection = True

    with strict_api(endless) as (behind, _):
        server = before(behind.base_url)
        body = {"messages": [{"role": "user", "content": "go"}], "stream": True}
        asked = httpx.stream("POST", f"{server.root}/v1/chat/completions", json=body, timeout=1)
        with contextlib.suppress(httpx.ReadTimeout), asked as answer:
            next(answer.iter_text())
        assert cut.wait(10)
    server.close()
    (run,) = server.runs()
    assert run.turns[0].completion.finish == "cancelled"
    assert bool(run.turns[0].completion.text) is not silent


def test_tokens_of_a_server_behind_are_logged_and_told(
    tiny: Served,  # noqa: F811
    tiny_folder: Path,
    tmp_path: Path,
) -> None:
    url = f"{tiny.root}/v1"
    policy = EndpointPolicy("tiny", url, card=card_of("tiny", read_cards(url, None)))
    store = LogStore.open(tmp_path / "front.db")
    front = Served(ServedModel(policy=policy, profile=API_1, store=store, name="openai:tiny"))
    try:
        client = front.openai("/sessions/s/v1")
        messages: list[Any] = [{"role": "user", "content": "Say hello."}]
        more: Any = {"extra_body": {"return_token_ids": True}, "stream": True, "tools": [ADD]}
        for seed in (1, 2):
            asked: Any = {"model": "nano", "messages": messages, "max_tokens": 9, "seed": seed}
            chunks: list[Any] = list(client.chat.completions.create(**asked, **more))
            text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Again."}]
        httpx.post(f"{front.root}/sessions/s/reward", json={"reward": 1})
        (run,) = front.runs()
    finally:
        front.close()
    ids = [i for c in chunks if c.choices for i in getattr(c.choices[0], "token_ids", None) or ()]
    assert tuple(ids) == run.turns[-1].completion.tokens.sampled_ids  # type: ignore[union-attr]
    assert len(run.turns) == 2
    (behind,) = tiny.runs()
    assert [turn.completion.tokens for turn in run.turns] == [turn.completion.tokens for turn in behind.turns]
    local = open_weights(str(tiny_folder))
    target = TargetPolicy(profile=local.profile, template_hash=behind.template_hash)
    assert refusal_of(facts_of(run), target) is None
    assert RunVerifier(local, front.store).refusal(run) is None


# ------------------------------------------------------------------------- first requests of agents

FIRST_REQUESTS = sorted((Path(__file__).parent / "first_requests").glob("*.json"))


@pytest.mark.parametrize("file", FIRST_REQUESTS, ids=lambda file: file.stem)
def test_the_first_request_of_an_agent_is_answered_with_its_tools(
    serve: Callable[..., Served],  # noqa: F811
    file: Path,
) -> None:
    """Requests as the agents sent them, long texts left out."""
    asked = json.loads(file.read_text())
    command = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
    server = serve(ScriptedPolicy([command], tokens=True), HERMES_1)
    headers = {"User-Agent": asked["user_agent"], "X-Session-Id": "s"}
    answer = httpx.post(server.root + asked["path"], json=asked["body"], headers=headers)
    assert answer.status_code == 200
    assert "ls" in answer.text
    (run,) = server.runs()
    assert [call.name for call in run.turns[0].calls] == (["bash"] if asked["body"].get("tools") else [])
    assert server.store.sql("SELECT session, client FROM requests").rows == [("s", asked["user_agent"])]
