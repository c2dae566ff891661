"""A task whose check the local model fails goes to a hosted one, whose success the local policy imitates."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import pytest
from executions import SUBMIT, a_runtime, a_task, act
from hypothesis import given, settings
from hypothesis import strategies as st
from strict_api import KEY, Fail, Handler, Say, call, strict_api
from test_cli import argv, environment, refused

from nano_coder.agent.dialects.dialect import DIALECTS
from nano_coder.agent.loop import in_dialect, written
from nano_coder.agent.profiles import COMPACT_1, HERMES_1, PROFILES, hosted_profile
from nano_coder.models.endpoint.policy import EndpointPolicy
from nano_coder.run.execution import grade_run, run_task
from nano_coder.verify.trainable import RefusalCode, imitation_refusal
from nano_rl.logs.admission import TargetPolicy, Use, by_task
from nano_shared.policy import InterfaceProfile
from nano_shared.run_facts import facts_of
from nano_shared.store import LogStore
from nano_shared.types import ToolCall, Trajectory

CHECK = "grep -q three a.py"
READ, EDIT = call("read_file", path="a.py"), call("edit_file", path="a.py", line=1, new="three")
SOLVES = (Say("I look.", (READ,)), Say(None, (EDIT, call("submit", answer="done"))))
WRONG = act("write_file", path="a.py", content="two\n")
POLICY = f"""
from nano_coder.models.scripted import ScriptedPolicy
from nano_shared.types import Role


class Wrong(ScriptedPolicy):
    def complete(self, conversation, sampling):
        acted = any(message.role is Role.ASSISTANT for message in conversation.messages)
        text = {SUBMIT!r} if acted else {WRONG!r}
        return ScriptedPolicy([text], tokens=True, id="wrong").complete(conversation, sampling)


def wrong(name, options):
    return Wrong([])
"""
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "a.py").write_text("one\n")
    return folder


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def cli(tmp_path: Path, home: Path) -> Run:
    (tmp_path / "wrong.py").write_text(POLICY)

    def run(
        server: Any, *arguments: str, program: str = "nano-coder", key: str | None = KEY
    ) -> subprocess.CompletedProcess[str]:
        plain = {k: v for k, v in os.environ.items() if not k.startswith(("NANO_", "OPENAI_"))}
        env = {**plain, "NANO_HOME": str(home), "XDG_CONFIG_HOME": str(home / "config")}
        env |= {"NANO_RETRY_SECONDS": "0.5"} | ({"OPENAI_API_KEY": key} if key else {})
        env |= {"OPENAI_BASE_URL": server.base_url} if server else {}
        return forked.run(program, *arguments, env=env, cwd=tmp_path)

    return run


@pytest.fixture
def asked(tmp_path: Path, project: Path) -> tuple[str, ...]:
    local = ("--model", f"{tmp_path}/wrong.py:wrong", "--profile", "compact-1")
    return ("run", "Say three.", "-C", str(project), "--check", CHECK, *local)


def to(model: str = "gpt-4o") -> tuple[str, ...]:
    return ("--escalate", f"openai:{model}")


def test_the_hosted_model_gets_the_task_after_the_tries_with_the_local_tools(
    cli: Run, asked: tuple[str, ...], project: Path, home: Path
) -> None:
    with strict_api(*SOLVES) as (server, script):
        done = cli(server, *asked, *to(), "--tries", "2", "--json", "--apply", "--max-cost", "1")
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads(done.stdout)
    escalation, tries = result["escalation"], result["tries"]
    assert (result["run"], result["winner"], result["applied"]) == (
        escalation["run"],
        escalation["run"],
        True,
    )
    assert [one["reward"] for one in tries] == [0.0, 0.0]
    assert escalation["cost"] == result["usage"]["cost"] == pytest.approx(0.0074, abs=0.01)
    assert (escalation["model"], escalation["reward"]) == ("openai:gpt-4o", 1.0)
    assert (project / "a.py").read_text() == "three\n"
    with LogStore.open(home / "log.db") as store:
        run, parent = store.get(result["run"]), store.get(escalation["parent"])
    assert parent.id in [one["run"] for one in tries]
    assert (run.snapshot, run.task.id, run.profile) == (parent.snapshot, parent.task.id, "api-for-compact-1")
    sent = script.seen[0]
    assert {tool["function"]["name"]: tool["function"]["parameters"] for tool in sent["tools"]} == {
        tool.name: tool.parameters for tool in COMPACT_1.tools
    }
    assert [message["role"] for message in sent["messages"]] == ["system", "user"]
    assert "temperature" not in sent, "that of the tries is not the hosted model's"
    shown = cli(None, "log", "show", parent.id).stdout
    assert f"openai:gpt-4o: passed, for ${escalation['cost']:.4f} (run {run.id})" in shown
    assert "one of 2 tries; passed: none" in shown


def test_from_the_best_it_reads_what_was_done_and_what_the_check_said(
    cli: Run, asked: tuple[str, ...], home: Path
) -> None:
    with strict_api(Say(None, (EDIT, call("submit")))) as (server, script):
        done = cli(server, *asked, *to(), "--escalate-from", "best", "--json")
    result = json.loads(done.stdout)
    assert (done.returncode, result["escalation"]["reward"]) == (0, 1.0)
    messages = script.seen[0]["messages"]
    assert [message["role"] for message in messages] == [
        "system", "user", "assistant", "tool", "assistant", "tool", "user",
    ]  # fmt: skip
    assert messages[2]["tool_calls"][0]["function"]["name"] == "write_file"
    assert "Not solved yet" in messages[-1]["content"]
    assert "+two" in messages[-1]["content"]
    with LogStore.open(home / "log.db") as store:
        run = store.get(result["run"])
    assert (run.inherited, len(run.own_turns)) == (2, 1)
    assert "-one" in run.diff


def test_where_it_fails_too_the_local_run_is_the_result(cli: Run, asked: tuple[str, ...], home: Path) -> None:
    with strict_api(Say(None, (call("submit"),))) as (server, _):
        done = cli(server, *asked, *to())
    assert done.returncode == 1
    assert "openai:gpt-4o: failed, for $0.0" in done.stderr
    assert "+two" in done.stdout
    with LogStore.open(home / "log.db") as store:
        assert len(store.runs()) == 2


def test_a_run_that_passes_is_not_escalated(cli: Run, asked: tuple[str, ...]) -> None:
    with strict_api(Fail(500)) as (server, script):
        done = cli(server, *(a.replace("three a", "two a") for a in asked), *to(), "--json")
    assert done.returncode == 0
    assert "escalation" not in json.loads(done.stdout)
    assert not script.tried


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "words", "code"),
    [
        (Fail(400, body=b'{"error": {"message": "m does not support tools"}}'), "cannot call tools", 1),
        (Fail(401, body=b'{"error": {"message": "bad key"}}'), "give the server's API key", 3),
        (Fail(500), "policy_error", 1),
    ],
)
def test_a_server_that_refuses_leaves_the_local_result(
    cli: Run, asked: tuple[str, ...], step: Fail, words: str, code: int
) -> None:
    with strict_api(step) as (server, _):
        done = cli(server, *asked, *to())
    assert done.returncode == code
    assert words in done.stderr
    assert "+two" in done.stdout


@pytest.mark.slow
def test_ctrl_c_ends_the_hosted_run_and_keeps_what_was_done(
    asked: tuple[str, ...], home: Path, tmp_path: Path, cli: Run
) -> None:
    waiting, over = threading.Event(), threading.Event()

    def silent(handler: Handler) -> None:
        waiting.set()
        over.wait(60)

    with strict_api(Say(None, (EDIT,)), silent) as (server, _):
        env = {**environment(home), "OPENAI_API_KEY": KEY, "OPENAI_BASE_URL": server.base_url}
        with subprocess.Popen(
            argv("nano-coder", *asked, *to(), "--json"), env=env, text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        ) as process:  # fmt: skip
            assert waiting.wait(120)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
        over.set()
    assert (process.returncode, err) == (130, "")
    result = json.loads(out)
    assert (result["exit_code"], result["escalation"]["stop"]) == (130, "interrupted")
    assert result["run"] == result["escalation"]["parent"]
    with LogStore.open(home / "log.db") as store:
        assert len(store.get(result["escalation"]["run"]).turns) == 1


def test_what_cannot_be_escalated_is_refused_before_any_work(
    cli: Run, asked: tuple[str, ...], home: Path
) -> None:
    at = asked.index("--check")
    unchecked, model = (*asked[:at], *asked[at + 2 :]), asked[asked.index("--model") + 1]
    hosted = (*asked[: asked.index("--model")], "--model", "openai:little")
    with strict_api(*SOLVES) as (server, script):
        refused(cli(server, *unchecked, *to()), 2, "--escalate needs a --check")
        refused(cli(server, *hosted, *to()), 2, "comes after a local model", "openai:little")
        refused(cli(server, *asked, "--escalate", model), 2, "the model that runs the task anyway")
        refused(cli(server, *asked, "--escalate", "shipped"), 2, "name a hosted model, as openai:NAME")
        refused(cli(server, *asked, "--escalate", "gguf:a.gguf"), 2, "name a hosted model, as openai:NAME")
        here = (*asked[: asked.index("--model")], "--model", "gguf:a.gguf")
        refused(cli(server, *here, *to()), 2, "a.gguf")
        refused(cli(None, *asked, *to(), key=None), 3, "openai:gpt-4o needs an API key")
        priceless = cli(server, *asked, *to("nobody"), "--max-cost", "1")
        refused(priceless, 3, "the price of openai:nobody is not known")
        refused(cli(server, *asked, *to(), "--escalate-from", "middle"), 2, "escalate", "middle")
        assert not script.tried
    assert not LogStore.open(home / "log.db").runs()


@pytest.mark.slow
def test_a_user_setting_holds_where_it_can(cli: Run, asked: tuple[str, ...], home: Path) -> None:
    (home / "config" / "nano").mkdir(parents=True)
    (home / "config" / "nano" / "config.toml").write_text('escalate = "openai:gpt-4o"\n')
    at = asked.index("--check")
    with strict_api(*SOLVES) as (server, _):
        unchecked = cli(server, *asked[:at], *asked[at + 2 :], "--json")
        assert (unchecked.returncode, "escalation" in json.loads(unchecked.stdout)) == (0, False)
        assert json.loads(cli(server, *asked, "--json").stdout)["escalation"]["reward"] == 1.0


@pytest.mark.parametrize("name", ["compact-1", "hermes-1", "native-1-glm", "workday-2-hermes-json"])
def test_an_api_is_offered_the_tools_of_the_profile(name: str) -> None:
    profile = PROFILES.find(name)
    hosted = hosted_profile(profile)
    assert (hosted.tools, hosted.task, hosted.observation) == (
        profile.tools,
        profile.task,
        profile.observation,
    )
    assert PROFILES.find(hosted.name) == hosted
    assert PROFILES.find(f"{hosted.name}+locate").tools == PROFILES.find(f"{name}+locate").tools
    assert hosted.name in PROFILES
    assert "api-for-nothing" not in PROFILES
    assert hosted_profile(hosted) == hosted


# ------------------------------------------------------------------- what the local policy learns of it

DIALECT_PROFILES = {"compact": COMPACT_1, "hermes": HERMES_1} | {
    name: PROFILES.find(f"native-1-{name}") for name in DIALECTS if name not in ("api", "compact", "hermes")
}
PLAIN = "abcdefghij XYZ019 ._/-+*=()\n'"
any_text = st.text(st.characters(exclude_categories=["Cs"])) | st.text("@<>{}[]|`/\\\"' \nab=:")


def calls_of(text: st.SearchStrategy[str]) -> st.SearchStrategy[list[ToolCall]]:
    edits = st.builds(lambda path, new: {"path": path, "line": 3, "new": new}, text, text)
    one = st.one_of(
        st.builds(lambda given: ToolCall(name="edit_file", arguments=given), edits),
        st.builds(lambda command: ToolCall(name="shell", arguments={"command": command}), text),
        st.just(ToolCall(name="submit")),
    )
    return st.lists(one, min_size=1, max_size=3)


def read_again(texts: list[tuple[str, tuple[ToolCall, ...]]], profile: InterfaceProfile) -> list[ToolCall]:
    dialect = DIALECTS[profile.dialect]
    return [call for text, _ in texts for call in dialect.parse(text, profile.tools).calls]


@pytest.mark.parametrize("name", DIALECT_PROFILES)
@settings(deadline=None)
@given(thought=any_text, calls=calls_of(any_text))
def test_what_a_dialect_writes_of_calls_it_reads_as_these_calls(
    name: str, thought: str, calls: list[ToolCall]
) -> None:
    """Whatever they hold; else it says that it cannot write them."""
    try:
        texts = written(thought, calls, DIALECT_PROFILES[name])
    except ValueError:
        return
    assert read_again(texts, DIALECT_PROFILES[name]) == calls


@pytest.mark.parametrize("name", [name for name in DIALECT_PROFILES if name != "line-edit"])  # of edits alone
@settings(deadline=None)
@given(thought=st.text("ab cd.\n"), calls=calls_of(st.text(PLAIN)))
def test_every_dialect_can_write_plain_calls(name: str, thought: str, calls: list[ToolCall]) -> None:
    texts = written(thought, calls, DIALECT_PROFILES[name])
    assert read_again(texts, DIALECT_PROFILES[name]) == calls
    assert len(texts) == (len(calls) if name == "compact" else 1)


def demonstrated(folder: Path, *steps: Say, **task: Any) -> Trajectory:
    with strict_api(*steps) as (server, _):
        policy = EndpointPolicy("strong", server.base_url, KEY, own_temperature=True)
        runtime = a_runtime(folder, policy=policy, profile=hosted_profile(COMPACT_1))
        return grade_run(run_task(a_task(check=CHECK, **task), runtime), runtime)


def test_several_calls_of_one_message_are_taught_one_by_one(tmp_path: Path) -> None:
    run = demonstrated(tmp_path, Say("Both.", (READ, EDIT)), Say(None, (call("submit"),)))
    ((judged,),) = by_task([facts_of(run)], TargetPolicy(profile=COMPACT_1))
    assert (judged.use, judged.refusal) == (Use.IMITATION, RefusalCode.TEXT_ONLY)
    turns = in_dialect(run, COMPACT_1).turns
    texts = [turn.completion.text for turn in turns]
    assert texts == ["Both.\n@read_file path=a.py", "@edit_file path=a.py line=1\nthree", "@submit"]
    assert [[o.text for o in turn.observations] for turn in turns[:2]] == [
        [seen.text] for seen in run.turns[0].observations
    ]


@pytest.mark.parametrize(
    ("said", "code", "words"),
    [
        (Say("So:\n@submit", (EDIT,)), RefusalCode.UNWRITABLE, "turn 0 cannot be written: a thought cannot"),
        (Say(None, (EDIT, call("bash", command="ls"))), RefusalCode.UNWRITABLE, "has no tool bash"),
    ],
)
def test_what_cannot_be_written_is_said(tmp_path: Path, said: Say, code: RefusalCode, words: str) -> None:
    run = demonstrated(tmp_path, said, Say(None, (call("submit"),)))
    refusal = imitation_refusal(facts_of(run), COMPACT_1)
    assert refusal is not None
    assert refusal.kind == code
    assert words in refusal.text


def test_an_answer_in_prose_is_one_where_the_dialect_knows_it(tmp_path: Path) -> None:
    run = demonstrated(tmp_path, Say(None, (EDIT,)), Say("It is done."), Say("Done."))
    refusal = imitation_refusal(facts_of(run), COMPACT_1)
    assert refusal is not None
    assert "answers without a call" in refusal.text
    assert imitation_refusal(facts_of(run), PROFILES.find("native-1-hermes-json")) is None


@pytest.mark.slow
def test_a_success_of_the_hosted_model_is_a_demonstration_for_the_local_one(
    cli: Run, asked: tuple[str, ...], tiny_folder: Path, home: Path
) -> None:
    with strict_api(*SOLVES) as (server, _):
        first = json.loads(cli(server, *asked, *to(), "--json").stdout)
    escalated = first["escalation"]["run"]
    report = cli(None, "admit", "--model", str(tiny_folder), "--json", program="nano-rl")
    assert json.loads(report.stdout)["uses"]["imitation"] == 1, report.stderr
    (verified,) = cli(None, "log", "verify", escalated, "--json").stdout.splitlines()
    assert json.loads(verified)["imitation"] == {"profile": "compact-1", "may": True, "refusal": None}
    failed = cli(None, "log", "verify", first["escalation"]["parent"])
    assert "a policy of profile compact-1 may not imitate it: it did not pass" in failed.stdout
    learned = cli(
        None, "sft", "--from-logs", "--model", str(tiny_folder), "--name", "taught", "--epochs", "1",
        program="nano-rl",
    )  # fmt: skip
    assert learned.returncode == 0, learned.stderr
    assert "imitated from the log: 1 runs (1 no success)" in learned.stderr
    assert "rows: 1, 1 of them texts" in learned.stderr
