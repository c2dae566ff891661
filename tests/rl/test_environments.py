"""Environments of others: runs in them, their failures, and trainings on several at once."""

from __future__ import annotations

import json
import math
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[1] / "coder"))

from executions import SUBMIT, a_runtime, act, prompt_proof

from integration.tiny_model import build_tiny
from nano_coder.environment import Environments, OpenSession, open_environment
from nano_coder.models.scripted import ScriptedPolicy
from nano_coder.run.execution import Runtime, resume_run
from nano_coder.verify.trainable import RefusalCode, verify
from nano_rl.cli import cli
from nano_rl.commands.train import ENVIRONMENT_TASKS
from nano_rl.gather.rollouts import collect
from nano_rl.learn.groups import form_groups
from nano_rl.learn.metrics import METRICS, read_metrics
from nano_rl.training_record import ROLLOUTS, read_record, read_rollouts
from nano_shared.errors import ConfigError, EnvironmentFailed, UsageError
from nano_shared.store import LogStore
from nano_shared.types import Split, StopReason, Trajectory

GUESS = f"{Path(__file__).parents[2]}/examples/plugins/src/nano_example_plugins/guess.py:Guess"
BROKEN = """
from nano_coder.environment import EnvironmentSession
from nano_coder.tools.tool import ToolFailure, tool

class Broken(EnvironmentSession):
    observation = "a door"

    def __init__(self, how):
        if how == "start":
            raise OSError("no disk")
        self.how = how

    @tool()
    def search(self, text: str) -> str:
        "Look behind the door."
        if self.how == "refuse":
            raise ToolFailure("it is locked")
        if self.how == "step":
            raise KeyError("door")
        return "nothing\\x1b[2J"

    def grade(self, run):
        return {"grade": float("nan"), "none": None}.get(self.how, 0.5)

class Env:
    def tasks(self, split, seed):
        for how in ("start", "step", "grade", "none", "refuse"):
            yield {"prompt": "Open it.", "key": how}

    def start(self, row, limits):
        return Broken(row["key"])
"""


def roll(folder: Path, env: str, texts: list[str], key: str, **how: Any) -> tuple[Trajectory, Runtime]:
    """One run of an environment's task, by a script."""
    environments = Environments.open([env])
    (task,) = [task for task in environments.tasks(Split.TRAIN, 0) if task.key.endswith(f":{key}")]
    runtime = replace(a_runtime(folder, texts), environments=environments)
    (run,) = collect([task], runtime, **how)
    return run, runtime


def number(value: int) -> str:
    return f"@guess number={value}"


def test_a_run_in_an_environment_is_logged_exactly_and_graded_by_it(tmp_path: Path) -> None:
    run, runtime = roll(tmp_path, f"{GUESS} max_turns=5", [number(1), number(4), number(3)], "3")
    assert (run.stop, run.reward, run.profile) == (StopReason.FINISHED, 1.0, "compact-1+guess")
    assert [turn.observations[0].text for turn in run.turns] == ["too low", "too high", "found"]
    assert (run.task.limits.max_turns, run.task.tools) == (5, ("guess", "submit"))
    assert runtime.store.get(run.id) == run
    found = {finding.kind for finding in verify(run)}
    assert not found & {RefusalCode.OTHER_PROFILE, RefusalCode.NO_VERDICT}
    assert prompt_proof(run, runtime).differing is None
    with pytest.raises(UsageError, match=r"was in the environment guess\.py:Guess, whose state is not in"):
        resume_run(run.model_copy(update={"stop": None}).id, runtime)


def test_a_run_that_gives_up_has_the_reward_of_what_it_did(tmp_path: Path) -> None:
    run, _ = roll(tmp_path, GUESS, [number(1), SUBMIT], "2")
    assert (run.stop, run.reward) == (StopReason.FINISHED, 0.0)


@pytest.mark.parametrize(
    ("how", "stop", "said"),
    [
        ("start", StopReason.ENVIRONMENT_ERROR, "OSError: no disk"),
        ("step", StopReason.ENVIRONMENT_ERROR, "KeyError: 'door'"),
        ("grade", StopReason.FINISHED, "gave no reward but nan"),
        ("none", StopReason.FINISHED, "gave no reward but None"),
    ],
)
def test_what_an_environment_fails_at_is_no_reward(
    how: str, stop: StopReason, said: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(BROKEN)
    look = act("search", text="key")
    run, _ = roll(tmp_path, f"{tmp_path}/mine.py:Env", [look, SUBMIT], how)
    assert run.stop is stop
    assert run.verdict is not None
    assert run.reward is None
    assert said in f"{run.stop_detail} {run.verdict.failure_kind}"


def test_a_refused_call_is_an_observation_and_what_is_shown_is_printable(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(BROKEN)
    env, look = f"{tmp_path}/mine.py:Env", act("search", text="key")
    refused, _ = roll(tmp_path, env, [look, SUBMIT], "refuse")
    assert refused.turns[0].observations[0].text == "error: it is locked"
    assert (refused.reward, refused.task.prompt) == (0.5, "Open it.\n\na door")
    assert refused.task.listed.prompt == "Open it."
    assert [tool.name for tool in refused.given_tools] == ["search"]  # theirs, and not ours of that name
    shown, _ = roll(tmp_path / "again", env, [look, SUBMIT], "grade")
    assert "\x1b" not in shown.turns[0].observations[0].text


# ------------------------------------------------------------------------------------- behind a URL


class Weather(BaseHTTPRequestHandler):
    """A resources server of NeMo Gym's protocol, as far as its agents use it."""

    def do_GET(self) -> None:
        self.answer(405, {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/seed_session":
            self.answer(200, {}, cookie=f"session={body['verifier_metadata']['city']}")
        elif self.path == "/get_weather" and isinstance(body.get("city"), str):
            self.answer(200, {"weather": "cold", "session": self.headers["Cookie"]})
        elif self.path == "/verify":
            calls = [item for item in body["response"]["output"] if item["type"] == "function_call"]
            cities = [json.loads(call["arguments"])["city"] for call in calls]
            self.answer(200, {"reward": float(body["verifier_metadata"]["city"] in cities)})
        else:
            self.answer(422, {"detail": "city: is missing"})

    def answer(self, status: int, body: Any, cookie: str | None = None) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        if cookie:
            self.send_header("Set-Cookie", cookie)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


TOOL = {
    "type": "function", "name": "get_weather", "description": "Tell the weather.", "strict": True,
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}  # fmt: skip


@contextmanager
def served(folder: Path) -> Iterator[tuple[str, Callable[[], None]]]:
    """What --env says of a server that runs, and what kills it."""
    folder.mkdir(parents=True, exist_ok=True)
    params = {"input": [{"role": "user", "content": "Is it cold in Oslo?"}], "tools": [TOOL]}
    row = {"responses_create_params": params, "verifier_metadata": {"city": "Oslo"}}
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Weather)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()

    def kill() -> None:
        server.shutdown()
        server.server_close()

    try:
        yield f"nemo-gym:http://127.0.0.1:{server.server_port} rows={folder}/rows.jsonl", kill
    finally:
        kill()


class KillingPolicy(ScriptedPolicy):
    """Kills the server before its second answer."""

    kill: Callable[[], None]

    def complete(self, conversation: Any, sampling: Any) -> Any:
        if self._used == 1:
            self.kill()
        return super().complete(conversation, sampling)


def test_a_resources_server_gives_tools_state_and_reward(tmp_path: Path) -> None:
    asks = [act("get_weather", city="Oslo"), SUBMIT]
    with served(tmp_path) as (env, _):
        (task,) = Environments.open([env]).tasks(Split.TRAIN, 0)
        run, _ = roll(tmp_path, env, asks, task.key.rpartition(":")[2])
        assert json.loads(run.turns[0].observations[0].text) == {"weather": "cold", "session": "session=Oslo"}
        assert (run.reward, run.stop) == (1.0, StopReason.FINISHED)
        wrong, _ = roll(tmp_path / "b", env, [act("get_weather", town="Oslo"), SUBMIT], task.key[-16:])
        assert "city: is missing" in wrong.turns[0].observations[0].text
        assert wrong.reward is None or wrong.reward == 0


@pytest.mark.slow
def test_a_server_that_is_killed_mid_step_leaves_no_reward(tmp_path: Path) -> None:
    with served(tmp_path) as (env, kill):
        environments = Environments.open([env])
        (task,) = environments.tasks(Split.TRAIN, 0)
        policy = KillingPolicy([act("get_weather", city="Oslo")] * 2, tokens=True)
        policy.kill = kill
        runtime = replace(a_runtime(tmp_path), policy=policy, environments=environments)
        (run,) = collect([task], runtime)
        assert (run.stop, run.reward, len(run.turns)) == (StopReason.ENVIRONMENT_ERROR, None, 1)
        assert "/get_weather cannot be reached" in str(run.stop_detail)
        assert "start that server" in str(run.stop_detail)
        (again,) = collect([task], runtime)  # nor does what starts afterwards
        assert (again.stop, again.turns) == (StopReason.ENVIRONMENT_ERROR, ())
        assert again.task.tools != run.task.tools
        (group,) = form_groups([run, again])  # of one task, whatever a session showed
        assert all(map(math.isnan, group.rewards_G))
        stored = list(runtime.store.facts())
        assert {facts.task_id for facts in stored} == {task.id} == {run.task.listed.id, again.task.listed.id}


# ------------------------------------------------------------------------------------- the commands


def refused(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli, ["train", "--name", "none", "--steps", "1", *arguments])
    problem = result.exception
    assert problem is not None
    return getattr(problem, "exit_code", 0), str(problem)


@pytest.mark.slow
def test_what_cannot_be_opened_is_refused_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NANO_HOME", str(tmp_path))
    for env, code, said in (
        ("nowhere:x", 2, "no 'nowhere'; there are nemo-gym, openenv, verifiers, or path.py:name"),
        (f"{GUESS} smallest=2", 2, "unexpected keyword argument 'smallest'; it takes largest"),
        (f"{GUESS} max_turns=0", 2, "greater than or equal to 1"),
        (f"{GUESS} largest", 2, "'largest' is no NAME=VALUE"),
        ("./none.py:Env", 3, "no such file"),
        ("verifiers:no-such-taskset", 2, "verifiers"),
        ("nemo-gym:http://127.0.0.1:9", 2, "missing a required argument: 'rows'"),
        ("nemo-gym:ftp://x rows=r", 2, "begins with http"),
        ("nemo-gym:http://127.0.0.1:9 rows=r", 4, "http://127.0.0.1:9/verify cannot be reached"),
    ):
        assert refused("--env", env)[0] == code, env
        assert said in refused("--env", env)[1]
    assert "given twice" in refused("--env", GUESS, "--env", GUESS)[1]
    assert refused()[1].startswith("give either --tasks FILE or --env ENV")


def test_a_server_of_another_protocol_is_refused(tmp_path: Path) -> None:
    class Page(Weather):
        def do_GET(self) -> None:
            self.answer(200, {"detail": "hello"})

    server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    with pytest.raises(UsageError, match="is no resources server of NeMo Gym: GET /verify answered 200"):
        open_environment(f"nemo-gym:http://127.0.0.1:{server.server_port} rows=r.jsonl")
    server.shutdown()
    server.server_close()


@pytest.mark.slow
def test_a_training_takes_from_all_environments_and_goes_on_with_their_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    monkeypatch.setenv("NANO_HOME", str(tmp_path))
    text = Path(GUESS.rpartition(":")[0]).read_text()
    (tmp_path / "other.py").write_text(text.replace("guess", "ask"))
    monkeypatch.chdir(tmp_path)
    build_tiny(
        tmp_path / "tiny",
        ["@guess number=1", "@ask number=2", "@submit"],
        hidden=32,
        layers=1,
        vocab_size=300,
    )
    common = ["train", "--name", "mine", "--prompts", "4", "--group-size", "2"]
    envs = ["--env", f"{GUESS} largest=2 max_turns=1", "--env", "./other.py:Guess largest=2 max_turns=2"]
    started = CliRunner().invoke(
        cli,
        [*common, *envs, "--model", f"{tmp_path}/tiny", "--steps", "1", "--limit", "max_completion_tokens=4"],
        catch_exceptions=False,
    )  # fmt: skip
    assert started.exit_code == 0
    folder = tmp_path / "trainings" / "mine"
    kept = (folder / ENVIRONMENT_TASKS).read_text()
    record = read_record(folder)
    assert record is not None
    assert record.envs[1].startswith(f"{tmp_path}/other.py:Guess")
    (tmp_path / "checkpoints" / "mine" / "manifest.json").unlink()
    for path in sorted((tmp_path / "checkpoints").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    gone_on = CliRunner().invoke(
        cli, ["train", "--name", "mine", "--resume", "--steps", "2"], catch_exceptions=False
    )
    assert gone_on.exit_code == 0
    assert (folder / ENVIRONMENT_TASKS).read_text() == kept
    assert [row["step"] for row in read_metrics(folder / METRICS)] == [0, 1]
    store = LogStore.open(str(tmp_path / "log.db"), create=False)
    runs = [store.get(rollout.id) for step in read_rollouts(folder / ROLLOUTS).values() for rollout in step]
    assert {run.task.key.rpartition(":")[0] for run in runs} == {"guess.py:Guess", "other.py:Guess"}
    assert {(run.profile, run.task.limits.max_turns) for run in runs} == {
        ("compact-1+guess", 1), ("compact-1+ask", 2),
    }  # fmt: skip
    assert all(run.reward is not None for run in runs)
    measured = CliRunner().invoke(
        cli, ["eval", "--env", f"{GUESS} largest=2 max_turns=1", "--model", str(tmp_path / "tiny"), "--json"],
        catch_exceptions=False,
    )  # fmt: skip
    row = json.loads(measured.stdout)["rows"][0]
    assert (row["graded"], row["ungraded"]) == (2, 0)
    (file,) = (tmp_path / "evaluations").glob("*.json")
    assert [len(task["outcomes"]) for task in json.loads(file.read_text())["tasks"]] == [1, 1]


@given(st.dictionaries(st.text(max_size=5), st.none() | st.integers() | st.text(max_size=5), max_size=4))
def test_any_row_is_a_task_or_a_usage_error(row: dict[str, Any]) -> None:
    class Rows:
        def tasks(self, split: Split, seed: int) -> Any:
            return [row]

        def start(self, row: Any, limits: Any) -> OpenSession:
            raise EnvironmentFailed("none")

    opened = replace(open_environment(GUESS), environment=Rows())
    try:
        (task,) = opened.tasks(Split.TRAIN, 0)
    except (UsageError, ConfigError):
        assert not str(row.get("prompt") or "").strip() or not isinstance(row.get("prompt"), str)
    else:
        assert task.prompt == row["prompt"]
