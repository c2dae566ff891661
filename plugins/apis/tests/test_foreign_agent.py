"""Agents of others as rollouts: in the jail, through the policy's server, graded and trained like any run."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from nano_apis.agent import ForeignAgent
from nano_coder.agent.profiles import COMPACT_1, HERMES_1
from nano_coder.models.opening import local_policy, open_weights
from nano_coder.models.scripted import ScriptedPolicy
from nano_coder.run.execution import RunSettings, Runtime, grade_run, open_agent, run_task
from nano_coder.sandbox.protocol import open_sandbox
from nano_coder.verify.tokens import TokenCheck
from nano_coder.verify.trainable import verify
from nano_rl.gather.rollouts import collect, failed, none_graded
from nano_rl.imitation import row_conversations
from nano_rl.learn.groups import form_groups, to_samples
from nano_shared.errors import UsageError
from nano_shared.hidden_checks import CommandChecks
from nano_shared.policy import Conversation
from nano_shared.store import LogStore
from nano_shared.types import Completion, Limits, Provenance, Sampling, StopReason, Task

AGENT = """
import json, os, subprocess, sys, urllib.request

def ask(messages):
    body = {"model": "m", "messages": messages, "max_tokens": 600, "tools": TOOLS}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]

TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {
    "type": "object", "properties": {"command": {"type": "string"}}}}}]
messages = [{"role": "user", "content": sys.argv[1]}]
for _ in range(int(os.environ.get("TURNS", "5"))):
    answer = ask(messages)
    messages.append(answer)
    for call in answer.get("tool_calls") or ():
        command = json.loads(call["function"]["arguments"])["command"]
        done = subprocess.run(command, shell=True, capture_output=True, text=True)
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": done.stdout + done.stderr})
    if not answer.get("tool_calls"):
        break
"""
"""an agent that knows nothing of nano: chat completions and a shell"""


def calls(command: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'bash', 'arguments': {'command': command}})}\n</tool_call>"


@pytest.fixture
def agent(tmp_path: Path) -> ForeignAgent:
    folder = tmp_path / "agent"
    folder.mkdir()
    (folder / "agent.py").write_text(AGENT)
    return ForeignAgent(command=f"python {folder}/agent.py {{prompt}}", mounts=(folder,))


@pytest.fixture
def runtime(tmp_path: Path, agent: ForeignAgent) -> Callable[..., Runtime]:
    def make(policy: Any, profile: Any = HERMES_1, **more: Any) -> Runtime:
        store = LogStore.open(tmp_path / "log.db")
        settings = RunSettings(agent=more.pop("agent", agent), limits=more.pop("limits", {}))
        options = {"settings": settings, "policy_name": "p", **more}
        return Runtime(policy=policy, profile=profile, sandbox=open_sandbox(), store=store, **options)

    return make


def task(**more: Any) -> Task:
    check = CommandChecks(command="grep -qx hi hello.txt")
    return Task(key="hello", prompt="Write 'hi' into hello.txt", hidden=check, **more)


def test_what_the_agent_did_is_a_run_that_is_graded(runtime: Callable[..., Runtime]) -> None:
    made = runtime(ScriptedPolicy([calls("echo hi > hello.txt"), "Done."], tokens=True))
    run = grade_run(run_task(task(), made, seed=0), made)
    assert (run.stop, run.reward, run.task.key, len(run.turns)) == (StopReason.FINISHED, 1.0, "hello", 2)
    assert "+hi" in run.diff
    assert made.store.get(run.id) == run
    assert [m.role.value for m in run.turns[1].messages] == ["tool"]
    blocked = [finding.kind for finding in verify(run) if finding.blocks]
    assert blocked == []


def test_a_failure_is_a_zero(runtime: Callable[..., Runtime]) -> None:
    made = runtime(ScriptedPolicy([calls("echo no > hello.txt"), "Done."]))
    assert grade_run(run_task(task(), made, seed=0), made).reward == 0.0


@pytest.mark.slow
def test_limits_end_the_run_and_are_named(runtime: Callable[..., Runtime]) -> None:
    made = runtime(ScriptedPolicy([calls("true")] * 9), limits={"max_turns": 2})
    run = run_task(task(), made, seed=0)
    assert (run.stop, len(run.turns)) == (StopReason.MAX_TURNS, 2)
    slow = runtime(ScriptedPolicy([calls("sleep 60")] * 9), limits={"max_seconds": 2.0})
    assert run_task(task(), slow, seed=0).stop is StopReason.MAX_SECONDS


SDKS = """
import sys, anthropic, openai

statuses = open("statuses.txt", "w", buffering=1)
hooks = {"response": [lambda answer: print(answer.status_code, file=statuses)]}
ask = {"model": "m", "messages": [{"role": "user", "content": sys.argv[1]}], "max_tokens": 20}
clients = [
    client(max_retries=9, http_client=sdk.DefaultHttpxClient(event_hooks=hooks))
    for sdk, client in ((openai, openai.OpenAI), (anthropic, anthropic.Anthropic))
]
chat, messages = clients[0].chat.completions, clients[1].messages
for _ in range(2):
    for api, refusal in ((chat, openai.NotFoundError), (messages, anthropic.NotFoundError)):
        for stream in (False, True):
            try:
                list(api.create(**ask, stream=stream))
            except refusal as problem:
                assert "this run has ended" in str(problem), problem
sys.exit(7)
"""


@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("texts", "limits", "statuses", "stop"),
    [
        (9, {"max_turns": 3}, [200] * 3 + [404] * 5, StopReason.MAX_TURNS),
        (2, {}, [200] * 2 + [503] + [404] * 6, StopReason.POLICY_ERROR),
    ],
)
def test_clients_do_not_retry_once_their_run_has_ended(
    runtime: Callable[..., Runtime], tmp_path: Path, texts: int, limits: dict[str, int],
    statuses: list[int], stop: StopReason,
) -> None:  # fmt: skip
    """By the SDKs themselves, which retry nine times: after a refusal they send nothing more."""
    (tmp_path / "agent" / "sdks.py").write_text(SDKS)
    agent = ForeignAgent(command=f"python {tmp_path}/agent/sdks.py {{prompt}}", mounts=(tmp_path / "agent",))
    made = runtime(ScriptedPolicy(["hello"] * texts, tokens=True), agent=agent, limits=limits)
    run = run_task(task(), made, seed=0)
    assert (run.stop, run.stop_detail) == (stop, None)
    assert [int(line[1:]) for line in run.diff.splitlines() if line[1:].isdigit()] == statuses


@pytest.mark.slow
def test_a_run_whose_agent_gave_up_at_a_full_context_says_so(runtime: Callable[..., Runtime]) -> None:
    made = runtime(ScriptedPolicy([calls("yes | head -c 9000000")], tokens=True, context_limit=4000))
    run = run_task(task(), made, seed=0)
    assert (run.stop, len(run.turns)) == (StopReason.CONTEXT_FULL, 1)


STUBBORN = """
import json, os, time, urllib.error, urllib.request

while True:
    body = {"model": "m", "messages": [{"role": "user", "content": str(time.time())}]}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    try:
        urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)).read()
        with open("hello.txt", "w") as file:
            file.write("hi\\n")
    except urllib.error.HTTPError:
        time.sleep(0.05)
"""


def test_an_agent_that_retries_after_its_limit_is_ended_and_its_work_is_graded(
    runtime: Callable[..., Runtime], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nano_apis.agent._GRACE_S", 0.5)
    (tmp_path / "agent" / "stubborn.py").write_text(STUBBORN)
    agent = ForeignAgent(command=f"python {tmp_path}/agent/stubborn.py", mounts=(tmp_path / "agent",))
    made = runtime(ScriptedPolicy(["one", "two"] * 9), agent=agent, limits={"max_turns": 2})
    began = time.monotonic()
    run = grade_run(run_task(task(), made, seed=0), made)
    assert (run.stop, run.reward) == (StopReason.MAX_TURNS, 1.0)
    assert time.monotonic() - began < 60  # of 900 that the run may take


class Slow(ScriptedPolicy):
    def complete(self, conversation: Conversation, sampling: Sampling) -> Completion:
        time.sleep(4)
        return super().complete(conversation, sampling)


@pytest.mark.slow
def test_what_was_being_sampled_when_the_time_was_up_is_logged(runtime: Callable[..., Runtime]) -> None:
    made = runtime(Slow([calls("true")]), limits={"max_seconds": 2.0})
    run = run_task(task(), made, seed=0)
    assert (run.stop, len(run.turns), made.store.get(run.id)) == (StopReason.MAX_SECONDS, 1, run)


class Queued(ScriptedPolicy):
    """One of a batch, whose others it waits for."""

    slot = 0

    def complete(self, conversation: Conversation, sampling: Sampling) -> Completion:
        time.sleep(4)
        conversation.waited += 3.9
        return super().complete(conversation, sampling)


@pytest.mark.slow
def test_what_the_batch_takes_is_not_on_the_agents_clock(runtime: Callable[..., Runtime]) -> None:
    made = runtime(Queued([calls("echo hi > hello.txt"), "Done."]), limits={"max_seconds": 3.0})
    run = grade_run(run_task(task(), made, seed=0), made)
    assert (run.stop, run.reward) == (StopReason.FINISHED, 1.0)


def test_a_policy_that_fails_is_no_zero(runtime: Callable[..., Runtime]) -> None:
    made = runtime(ScriptedPolicy([calls("echo hi > hello.txt")]))
    run = grade_run(run_task(task(), made, seed=0), made)
    assert (run.stop, run.reward) == (StopReason.POLICY_ERROR, None)


def test_the_server_is_the_only_way_out_and_gives_no_reward(runtime: Callable[..., Runtime]) -> None:
    reach = (
        "python - <<'X'\nimport socket, urllib.request, urllib.error\n"
        "try:\n  socket.create_connection(('1.1.1.1', 80), 2)\nexcept OSError: print('no net')\n"
        "for path in ('/sessions/x/reward', '/sessions/x'):\n"
        "  url = 'http://127.0.0.1:3128' + path\n"
        "  try: urllib.request.urlopen(urllib.request.Request(url, b'{\"reward\": 1}'))\n"
        "  except urllib.error.HTTPError as e: print(e.code)\nX"
    )
    made = runtime(ScriptedPolicy([calls(reach), "Done."]))
    run = run_task(task(), made, seed=0)
    assert run.turns[1].messages[0].content.split("\n")[:3] == ["no net", "404", "404"]


@pytest.mark.slow
def test_the_policy_samples_as_the_rollout_says(
    runtime: Callable[..., Runtime], tiny_folder: Path, one_thread: None
) -> None:
    opened = open_weights(str(tiny_folder))
    policy = local_policy(opened.loaded, opened.profile)
    made = runtime(policy, COMPACT_1, sampling=Sampling(temperature=1.0, max_tokens=12))
    runs = collect([task()], made, group_size=3, seed=4)
    check = TokenCheck(template=policy.template, eos_ids=policy.engine.eos_ids, blobs=made.store.blobs)
    for run in runs:
        assert run.turns[0].completion.sampling.temperature == 1.0
        assert check.findings(run) == []
    (group,) = form_groups(runs)
    assert len(group.members) == 3
    again = collect([task()], made, group_size=3, seed=4)
    texts = [[turn.completion.text for turn in run.turns] for run in runs]
    assert [[turn.completion.text for turn in run.turns] for run in again] == texts


FORGETFUL = """
import json, os, sys, urllib.request

def ask(messages):
    body = {"model": "m", "messages": messages}
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]

messages = [{"role": "system", "content": "Answer in a fence."}, {"role": "user", "content": sys.argv[1]}]
ask(messages)  # which it refuses, and leaves out
messages.append({"role": "user", "content": "That was no fence."})
messages.append(ask(messages))
messages.append({"role": "user", "content": "Exit code 0."})
messages.append(ask(messages))
ask([*messages, {"role": "user", "content": "Again."}])
"""
"""an agent that leaves refused answers out of its history, as mini-swe-agent does"""


def test_a_history_that_the_agent_writes_anew_is_a_row_of_the_same_run(
    runtime: Callable[..., Runtime], tiny_folder: Path, tmp_path: Path, one_thread: None
) -> None:
    opened = open_weights(str(tiny_folder))
    policy = local_policy(opened.loaded, opened.profile)
    (tmp_path / "agent" / "forgetful.py").write_text(FORGETFUL)
    folder = tmp_path / "agent"
    agent = ForeignAgent(command=f"python {folder}/forgetful.py {{prompt}}", mounts=(folder,))
    made = runtime(policy, COMPACT_1, agent=agent, sampling=Sampling(temperature=1.0, max_tokens=12))
    (run,) = collect([task()], made, seed=4)
    assert [turn.completion.tokens and turn.completion.tokens.row for turn in run.turns] == [0, 1, 1, 1]
    assert [len(turn.messages) for turn in run.turns] == [2, 3, 1, 1]
    assert len(list(made.store.trajectories())) == 1
    check = TokenCheck(template=policy.template, eos_ids=policy.engine.eos_ids, blobs=made.store.blobs)
    assert check.findings(run) == []
    assert [finding.kind for finding in verify(run) if finding.blocks] == []
    samples = to_samples(run, 1.0)
    said = [turn.completion.tokens for turn in run.turns]
    assert [sum(sample.mask) for sample in samples] == [
        len(said[0].sampled_ids), sum(len(tokens.sampled_ids) for tokens in said[1:])
    ]  # fmt: skip
    shown = row_conversations(run, COMPACT_1)
    assert [len(conversation.messages) for conversation, _ in shown] == [3, 8]
    assert [turns for _, turns in shown] == [[run.turns[0]], list(run.turns[1:])]


def test_an_agent_that_does_not_start_is_a_failure_of_ours(runtime: Callable[..., Runtime]) -> None:
    made = runtime(ScriptedPolicy(["x"]), agent=ForeignAgent(command="no-such-agent {prompt}"))
    (run,) = collect([task()], made, seed=0)
    assert (run.stop, run.reward, run.turns) == (StopReason.SANDBOX_ERROR, None, ())
    assert "exit code 127" in str(run.stop_detail)
    assert "not found" in str(run.stop_detail)
    assert made.store.get(run.id) == run
    assert failed(run)
    assert "not found" in str(none_graded([run]))


def test_an_agent_works_on_generated_tasks(runtime: Callable[..., Runtime]) -> None:
    """Their sandbox is wrapped, so that pytest loads no plugin that is installed."""
    made = runtime(ScriptedPolicy([calls("echo hi > hello.txt"), "Done."], tokens=True))
    generated = task().model_copy(update={"provenance": Provenance(source="generated")})
    (run,) = collect([generated], made, seed=0)
    assert (run.reward, run.stop) == (1.0, StopReason.FINISHED)


def test_an_agent_that_fails_once_leaves_the_other_runs_alone(
    runtime: Callable[..., Runtime], agent: ForeignAgent
) -> None:
    once = replace(agent, command=f"if [ -e broken ]; then exit 3; fi; {agent.command}")
    made = runtime(ScriptedPolicy([calls("echo hi > hello.txt"), "Done."]), agent=once)
    broken = task(files={"broken": ""}).model_copy(update={"key": "broken"})
    made = replace(made, settings=replace(made.settings, at_once=1))
    first, second = collect([broken, task()], made, seed=0)
    assert (first.reward, failed(first), second.reward) == (None, True, 1.0)


@pytest.mark.slow
def test_no_more_agents_of_others_run_at_a_time_than_the_cores_bear(
    runtime: Callable[..., Runtime], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0})
    monkeypatch.setattr("nano_rl.gather.rollouts._AGENTS_PER_CPU", 1)
    made = runtime(ScriptedPolicy([calls("echo hi > hello.txt"), "Done."] * 3))
    runs = collect([task()], made, group_size=3, seed=0)
    assert [run.reward for run in runs] == [1.0] * 3
    runs.sort(key=lambda run: run.started)
    assert all((one.ended or 0) <= after.started for one, after in pairwise(runs))


def test_a_folder_that_is_not_there_is_one_sentence() -> None:
    with pytest.raises(UsageError, match="no such directory"):
        open_agent("x", ["/no/such/folder"])
    with pytest.raises(UsageError, match="--agent is empty"):
        open_agent(" ")


def test_limits_of_the_task_hold_for_the_agent(runtime: Callable[..., Runtime]) -> None:
    made = runtime(ScriptedPolicy([calls("true")] * 5, tokens=True))
    run = run_task(task(limits=Limits(max_tokens=100)), made, seed=0)
    assert (run.stop, run.num_sampled_tokens <= 100) == (StopReason.MAX_TOKENS, True)
