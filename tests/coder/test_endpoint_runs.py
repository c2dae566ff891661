"""Whole runs of a model behind the strict server: what the log keeps, and how each ending looks."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import forked
import pytest
from executions import a_runtime, a_task
from strict_api import KEY, Call, Fail, Handler, Say, call, stream_bytes, strict_api

from nano_coder.agent.dialects.dialect import DIALECTS
from nano_coder.agent.profiles import API_1, COMPACT_1, HERMES_1
from nano_coder.config import Price
from nano_coder.models.endpoint.policy import EndpointPolicy, Patience
from nano_coder.run.execution import RunSettings, grade_run, resume_run, run_task
from nano_coder.run_formats import message_rows
from nano_coder.verify.trainable import verify
from nano_rl.imitation import RunEncoder, run_messages
from nano_shared.errors import ConfigError, UsageError
from nano_shared.types import Limits, Role, Sampling, StopReason

READ = call("read_file", path="a.py")
EDIT = call("edit_file", path="a.py", old="two", new="three")
PATCH = "*** Begin Patch\n*** Update File: a.py\n@@\n-two\n+three\n*** End Patch"
SUBMIT = call("submit")
CHECK = "grep -q three a.py"
REPAIR = (Say("I look.", (READ, call("shell", command="ls"))), Say(None, (EDIT, SUBMIT)))


def runtime_on(folder: Path, server: Any, **options: Any) -> Any:
    usual: dict[str, Any] = {"patience": Patience(first_wait=0.001, retry=0.3), "own_temperature": True}
    policy = EndpointPolicy("little", server.base_url, KEY, **(usual | options))
    return a_runtime(folder, policy=policy, profile=API_1, sampling=Sampling(max_tokens=999))


def test_a_repair_by_parallel_calls_is_logged_whole(tmp_path: Path) -> None:
    with strict_api(*REPAIR) as (server, script):
        runtime = runtime_on(tmp_path, server)
        run = grade_run(run_task(a_task(check=CHECK), runtime), runtime)
    assert (run.stop, run.reward) == (StopReason.FINISHED, 1.0)
    assert [[c.name for c in turn.calls] for turn in run.turns] == [
        ["read_file", "shell"],
        ["edit_file", "submit"],
    ]
    assert not run.has_tokens
    assert runtime.store.get(run.id) == run
    told = [finding for finding in verify(run) if finding.blocks]
    assert all("text-only" in str(finding) for finding in told)
    answered = [m["tool_call_id"] for m in script.seen[-1]["messages"] if m["role"] == "tool"]
    assert answered == ["call_1x0", "call_1x1"]
    (api,) = [t.completion.api for t in run.turns[:1]]
    assert api is not None
    assert api.usage.completion == 50


def test_calls_that_cannot_be_read_are_all_answered(tmp_path: Path) -> None:
    steps = (
        Say(None, (READ, Call("shell", '{"command": "ls'))),
        Say(None, (Call("shell", '"not an object"'), Call("no_such_tool", "{}"))),
        Say(
            None,
            (
                Call("shell", '"{\\"command\\": \\"echo a\\"}"'),
                Call("shell", '{"command": "echo a\necho b"}'),
            ),
        ),
        Say(None, (Call("shell", '{"wrong": 1}'), Call("submit", ""))),
    )
    with strict_api(*steps) as (server, script):
        run = run_task(a_task(), runtime_on(tmp_path, server))
    first, second, third, fourth = run.turns
    assert "call 2, shell: the tool call is not JSON" in first.observations[1].text
    assert len(first.observations) == len(second.observations) == 2
    assert third.repairs == ("arguments_as_string", "raw_control_characters")
    assert [o.text for o in third.observations] == ["a", "a\nb"]
    assert "command is missing" in fourth.observations[0].text
    assert run.stop is StopReason.FINISHED
    assert len(script.seen) == 4, "each history was accepted"


def test_prose_is_asked_once_and_then_is_the_answer(tmp_path: Path) -> None:
    steps = (Say("Let me see."), Say(None, (READ,)), Say("It is 42."), Say("It is 42, really."))
    with strict_api(*steps) as (server, script):
        run = run_task(a_task(), runtime_on(tmp_path, server))
    assert (run.stop, run.answer, len(run.turns)) == (StopReason.FINISHED, "It is 42, really.", 4)
    assert [m["role"] for m in script.seen[-1]["messages"]][-3:] == ["tool", "assistant", "user"]
    with strict_api(Say(""), Say("")) as (server, _):
        empty = run_task(a_task(), runtime_on(tmp_path, server))
    assert (empty.stop, empty.answer) == (StopReason.FORMAT_ERRORS, None)


def test_a_cut_answer_is_no_answer_and_says_which_setting(tmp_path: Path) -> None:
    with strict_api(Say("x"), Say("y", finish="length"), Say("done"), Say("done")) as (server, _):
        run = run_task(a_task(), runtime_on(tmp_path, server))
    assert "max_completion_tokens" in run.turns[1].observations[0].text
    assert (run.answer, len(run.turns)) == ("done", 3)


@pytest.mark.parametrize("calls", [(), (READ,)])
def test_an_answer_that_was_filtered_is_told_as_such(calls: tuple[Call, ...], tmp_path: Path) -> None:
    filtered = Say("So", calls, finish="content_filter")
    with strict_api(filtered, Say("done"), Say("done")) as (server, _):
        run = run_task(a_task(), runtime_on(tmp_path, server))
    assert run.answer == "done"
    assert not run.turns[0].calls
    assert "the provider's filter stopped this answer" in run.turns[0].observations[0].text


@pytest.mark.slow
def test_a_failing_server_loses_nothing_and_the_run_goes_on(tmp_path: Path) -> None:
    def cut(handler: Handler) -> None:
        handler.stream(stream_bytes(Say("no"), [], "stop", None)[:150], end=False)

    for failure in (Fail(500), Fail(503), cut):
        with strict_api(REPAIR[0], failure) as (server, script):
            runtime = runtime_on(tmp_path, server)
            run = run_task(a_task(check=CHECK), runtime)
            assert (run.stop, len(run.turns), run.reward) == (StopReason.POLICY_ERROR, 1, None)
            before = script.seen[-1]["messages"]
            script.steps = (*[REPAIR[0]] * len(script.seen), REPAIR[1])
            resumed = grade_run(resume_run(run.id, runtime), runtime)
        assert script.seen[-1]["messages"] == before, "the same conversation, ids too"
        assert (resumed.stop, resumed.reward, resumed.turns[0]) == (StopReason.FINISHED, 1.0, run.turns[0])


def test_a_refused_key_ends_the_run_which_goes_on_with_the_right_one(tmp_path: Path) -> None:
    with strict_api(*REPAIR) as (server, _):
        runtime = runtime_on(tmp_path, server)
        wrong = replace(runtime, policy=EndpointPolicy("little", server.base_url, "sk-wrong"))
        with pytest.raises(ConfigError, match=r"answered 401.*nano-coder resume \w+ goes on") as refused:
            run_task(a_task(check=CHECK), wrong)
        run = str(refused.value).rpartition("resume ")[2].split()[0]
        assert runtime.store.get(run).stop is StopReason.POLICY_ERROR
        assert grade_run(resume_run(run, runtime), runtime).reward == 1.0


def test_a_full_context_is_an_end_that_is_graded(tmp_path: Path) -> None:
    full = Fail(400, body=b'{"error": {"message": "full", "code": "context_length_exceeded"}}')
    with strict_api(Say(None, (EDIT,)), full) as (server, _):
        runtime = runtime_on(tmp_path, server)
        run = grade_run(run_task(a_task(check=CHECK), runtime), runtime)
    assert (run.stop, run.reward) == (StopReason.CONTEXT_FULL, 1.0)


def test_a_run_ends_at_its_cost(tmp_path: Path) -> None:
    task = a_task(limits=Limits(max_cost=0.002))
    with strict_api(Say(None, (READ,)), Say(None, (call("shell", command="ls"),))) as (server, script):
        runtime = runtime_on(tmp_path, server, price=Price(input=1.0, output=1.0))
        run = run_task(task, runtime)  # 1050 tokens a turn
        assert (run.stop, len(run.turns)) == (StopReason.MAX_COST, 2)
        with pytest.raises(
            ConfigError, match=r"price of openai:little is not known; write \[prices.'little'\]"
        ):
            run_task(task, runtime_on(tmp_path, server))
    assert len(script.seen) == 2, "no call without a price"


@pytest.mark.slow
def test_time_bounds_a_call_and_a_silent_server_is_no_fault_of_the_policy(tmp_path: Path) -> None:
    def writes_on(handler: Handler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.end_headers()
        with contextlib.suppress(ConnectionError):
            while True:
                handler.wfile.write(b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n')
                time.sleep(0.05)

    def silent(handler: Handler) -> None:
        over.wait(60)

    over = threading.Event()

    task = a_task(limits=Limits(max_seconds=1.5))
    for act, stop in ((writes_on, StopReason.MAX_SECONDS), (silent, StopReason.POLICY_ERROR)):
        with strict_api(act) as (server, _):
            began = time.monotonic()
            assert run_task(task, runtime_on(tmp_path, server)).stop is stop
            assert time.monotonic() - began < 40
    over.set()


@pytest.mark.slow
def test_a_limit_that_cuts_a_program_names_its_setting(tmp_path: Path) -> None:
    commands = {
        "sleep 5": "tool_seconds",
        "python -c 'x = bytearray(10**9)'": "tool_memory_mb",
        "yes | head -c 100000": "tool_output_bytes",
        "for i in $(seq 60); do sleep 1 & done; wait": "tool_processes",
        "head -c 9000000 /dev/zero > big": "workspace_mb",
    }
    limits = Limits(tool_seconds=2, memory_mb=256, output_bytes=4096, processes=20, workspace_mb=4)
    steps = [*(Say(None, (call("shell", command=command),)) for command in commands), Say(None, (SUBMIT,))]
    with strict_api(*steps) as (server, _):
        run = run_task(a_task(limits=limits), runtime_on(tmp_path, server))
    for turn, setting in zip(run.turns, commands.values(), strict=False):
        if setting == "tool_memory_mb" and "MemoryError" in turn.observations[0].text:
            continue  # the program met the limit by itself
        assert setting in turn.observations[0].text, turn.observations[0].text


def test_hosts_need_consent_and_are_in_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[frozenset[str]] = []
    runtime = a_runtime(tmp_path, ["@shell\ntrue", "@submit"], tokens=False)
    sandbox = runtime.sandbox
    monkeypatch.setattr(
        type(sandbox), "with_hosts", lambda self, hosts: (seen.append(hosts), sandbox)[1], raising=False
    )
    asks = a_task(network="allow=api.example.org")
    for hosts in (frozenset(), frozenset({"other.org"}), frozenset({"*.org.example"})):
        with pytest.raises(UsageError, match=r"nobody consented to api\.example\.org; --net allow=api"):
            run_task(asks, replace(runtime, settings=RunSettings(hosts=hosts)))
    for task, hosts, network in (
        (asks, {"*.example.org"}, "allow=api.example.org"),
        (a_task(), {"b.org", "a.org"}, "allow=a.org,b.org"),
    ):
        runtime = a_runtime(tmp_path, ["@shell\ntrue", "@submit"], tokens=False, hosts=frozenset(hosts))
        run = run_task(task, runtime)
        assert runtime.store.get(run.id).task.network == network
        assert seen.pop() == frozenset(network.removeprefix("allow=").split(","))


def test_what_an_api_did_is_imitated_in_the_words_of_another_dialect(tmp_path: Path) -> None:
    with strict_api(*REPAIR) as (server, _):
        run = run_task(a_task(check=CHECK), runtime_on(tmp_path, server))
    said = [m.content for m in run_messages(run, HERMES_1) if m.role is Role.ASSISTANT]
    assert said[0].startswith("I look.\n<tool_call>\n")
    dialect = DIALECTS[HERMES_1.dialect]
    assert [dialect.parse(text, HERMES_1.tools).calls for text in said] == [turn.calls for turn in run.turns]
    encoder = RunEncoder(profile=HERMES_1, template=None, eos_id=0)  # type: ignore[arg-type]
    assert encoder.speaks(run)
    exported = message_rows(run, (), calls="text")["messages"]
    assert [row["content"] for row in exported if row["role"] == "assistant"] == said
    assert replace(encoder, profile=COMPACT_1).speaks(run)
    one_each = [m.content for m in run_messages(run, COMPACT_1)[2:]]
    assert [text.split()[0] for text in one_each[::2]] == ["I", "@shell", "@edit_file", "@submit"]
    assert one_each[1::2] == [o.text for turn in run.turns for o in turn.observations]


# ------------------------------------------------------------------------------------ the command line

DAY = (
    Say("I look.", (call("read", path="a.py"), call("bash", command="ls"))),
    Say(None, (call("apply_patch", patch=PATCH), SUBMIT)),
)
Cli = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    (tmp_path / "project").mkdir()
    (tmp_path / "project/a.py").write_text("one\ntwo\n")

    def run(server: Any, *arguments: str, key: str = KEY) -> subprocess.CompletedProcess[str]:
        plain = {k: v for k, v in os.environ.items() if not k.startswith(("NANO_", "OPENAI_"))}
        env = {
            **plain, "NANO_HOME": str(tmp_path / "home"), "XDG_CONFIG_HOME": str(tmp_path / "config"),
            "OPENAI_API_KEY": key, "OPENAI_BASE_URL": server.base_url, "NANO_RETRY_SECONDS": "0.5",
        }  # fmt: skip
        return forked.run("nano-coder", *arguments, env=env, cwd=tmp_path / "project")

    return run


def run_options(tmp_path: Path, *more: str, model: str = "gpt-4o") -> tuple[str, ...]:
    here = ("-C", str(tmp_path / "project"), "--check", CHECK)
    return ("run", "Make it three.", *here, "--model", f"openai:{model}", *more)


def test_the_command_of_the_readme(cli: Cli, tmp_path: Path) -> None:
    with strict_api(*DAY) as (server, script):
        done = cli(server, *run_options(tmp_path, "--json", "--limit", "max_cost=1"))
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert done.stderr == ""
    assert told["usage"] == {
        "prompt": 2000, "cached": 800, "completion": 100, "reasoning": 40,
        "cost": pytest.approx((1200 * 2.5 + 800 * 1.25 + 100 * 10) / 1e6),
    }  # fmt: skip
    assert "temperature" not in script.seen[0]
    assert script.seen[0]["max_completion_tokens"] == 8192


@pytest.mark.parametrize(
    ("steps", "more", "code", "told"),
    [
        ((Fail(500),), (), 4, "--base-url {url} goes on with it"),
        ((Say(None, (READ,)),), ("--limit", "max_cost=0.001"), 5, "max_cost"),
        ((Say(None, (READ,)),), ("--limit", "max_turns=1"), 5, "max_turns"),
        ((Say(None, (SUBMIT,)),), (), 1, "failed"),
    ],
    ids=["500", "cost", "turns", "wrong"],
)
def test_exit_codes(
    cli: Cli, tmp_path: Path, steps: Any, more: tuple[str, ...], code: int, told: str
) -> None:
    with strict_api(*steps) as (server, _):
        done = cli(server, *run_options(tmp_path, *more))
    told = told.replace("{url}", server.base_url)
    assert (done.returncode, told in done.stdout) == (code, True), done.stdout + done.stderr


def test_a_wrong_key_and_an_unknown_price_are_configuration(cli: Cli, tmp_path: Path) -> None:
    with strict_api(*DAY) as (server, script):
        wrong = cli(server, *run_options(tmp_path, "--json"), key="sk-wrong")
        unknown = cli(server, *run_options(tmp_path, "--limit", "max_cost=1", model="nobody"))
        assert not script.seen
        resumed = cli(server, "resume", "last", "--json")
    assert (wrong.returncode, unknown.returncode) == (3, 3)
    assert "give the server's API key" in wrong.stderr
    assert "the price of openai:nobody is not known" in unknown.stderr
    assert len(unknown.stderr.splitlines()) == len(wrong.stderr.splitlines()) == 1
    assert json.loads(resumed.stdout)["verdict"]["reward"] == 1.0


def test_the_text_protocol_is_a_profile(cli: Cli, tmp_path: Path) -> None:
    def hermes(name: str, **arguments: Any) -> Say:
        return Say(f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>")

    steps = (hermes("edit_file", path="a.py", old="two", new="three"), Fail(500), Fail(500))
    with strict_api(*steps) as (server, script):
        done = cli(server, *run_options(tmp_path, "--profile", "hermes-1"))
        assert done.returncode == 4
        assert "tools" not in script.seen[0]
        script.steps = [hermes("submit")]
        assert cli(server, "resume", "last", "--json").returncode == 0, "under the profile that it began with"
    assert [m["role"] for m in script.seen[-1]["messages"]] == ["system", "user", "assistant", "user"]
