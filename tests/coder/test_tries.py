"""Tries: runs of one task side by side, of which the first that passes its check ends the others."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import test_cli
from executions import SUBMIT, a_runtime, a_task, act
from test_cli import EDIT, Cli, Endpoint, argv, environment, refused

from nano_coder.agent.loop import turn_seed
from nano_coder.agent.profiles import COMPACT_1, first_messages
from nano_coder.models import opening
from nano_coder.models.endpoint.policy import EndpointPolicy
from nano_coder.models.opening import open_policy
from nano_coder.models.scripted import ScriptedPolicy
from nano_coder.run.execution import Runtime, Stop
from nano_coder.run.tries import best_of, member_seed, run_tries
from nano_rl.cli import cli as rl
from nano_rl.learn.groups import form_groups
from nano_shared.command_line import run_command
from nano_shared.policy import Conversation
from nano_shared.store import LogStore
from nano_shared.types import Completion, Finish, Message, Role, Sampling, StopReason, Task, Trajectory

RIGHT = act("write_file", path="a.py", content="three\n")
LONGER = act("write_file", path="a.py", content="# longer\nthree\n")
WRONG = act("write_file", path="a.py", content="two\n")
SLOW = act("shell", command="sleep 200")
CHECK = "grep -q three a.py"
SEED = 5
Said = str | Callable[[], str]
cli, endpoint, home, project = test_cli.cli, test_cli.endpoint, test_cli.home, test_cli.project


class ByMember(ScriptedPolicy):
    """Says the texts of the try whose seed it is given; a function of a script is called for its text."""

    def __init__(self, task: Task, scripts: Sequence[Sequence[Said]]) -> None:
        super().__init__([], id="by-member")
        self._said = {
            turn_seed(member_seed(SEED, task, member), index): said
            for member, script in enumerate(scripts)
            for index, said in enumerate(script)
        }

    def complete(self, conversation: Conversation, sampling: Sampling) -> Completion:
        said = self._said[sampling.seed]
        text = said if isinstance(said, str) else said()
        return ScriptedPolicy([text], tokens=True, id=self.id).complete(conversation, sampling)


def tried(
    folder: Path,
    *scripts: Sequence[Said],
    check: str = CHECK,
    ended: Callable[[int], object] = lambda _: None,
) -> tuple[list[Trajectory], Runtime]:
    task = a_task(check=check)
    runtime = a_runtime(folder, policy=ByMember(task, scripts))
    runs = run_tries(task, runtime, len(scripts), Stop(), seed=SEED, on_end=lambda member, run: ended(member))
    assert [runtime.store.get(run.id) for run in runs] == runs
    return runs, runtime


def test_the_first_that_passes_ends_the_others_also_in_a_tool_call(tmp_path: Path) -> None:
    began, ended = time.monotonic(), list[int]()
    runs, _ = tried(tmp_path, [SLOW], [RIGHT, SUBMIT], [WRONG, SLOW], ended=ended.append)
    assert time.monotonic() - began < 100
    assert [run.reward for run in runs] == [None, 1.0, None]
    stops = [StopReason.INTERRUPTED, StopReason.FINISHED, StopReason.INTERRUPTED]
    assert [run.stop for run in runs] == stops
    assert [len(run.turns) for run in runs][:2] == [0, 2]
    assert ended[0] == 1
    assert sorted(ended) == [0, 1, 2]
    assert best_of(runs) is runs[1]
    assert len({run.seed for run in runs}) == 3
    assert {run.group_key for run in runs} == {runs[0].task.key}


def test_where_all_fail_the_best_is_one_that_did_something(tmp_path: Path) -> None:
    runs, _ = tried(tmp_path, [SUBMIT], [WRONG, SUBMIT], [SUBMIT])
    assert [run.reward for run in runs] == [0.0, 0.0, 0.0]
    assert best_of(runs) is runs[1]


def test_of_those_that_pass_together_the_shortest_diff_wins(tmp_path: Path) -> None:
    (longer,), _ = tried(tmp_path, [LONGER, SUBMIT])
    (right,), _ = tried(tmp_path, [RIGHT, SUBMIT])
    assert [longer.reward, right.reward] == [1.0, 1.0]
    assert best_of([longer, right]) is right


def test_the_first_that_passes_ends_the_checks_of_the_others(tmp_path: Path) -> None:
    """Which may have said what they say of an ended program: neither is a verdict."""
    graded = threading.Barrier(2)

    def submit() -> str:
        graded.wait(60)
        return SUBMIT

    began = time.monotonic()
    slow = f"grep -q longer a.py && sleep 200; {CHECK}"
    runs, runtime = tried(tmp_path, [LONGER, submit], [RIGHT, submit], check=slow)
    assert time.monotonic() - began < 100
    assert [(run.stop, run.reward) for run in runs] == [
        (StopReason.FINISHED, None),
        (StopReason.FINISHED, 1.0),
    ]
    assert runtime.store.logged(runs[0].id).verdicts == ()


def test_those_that_have_not_begun_when_one_passes_are_not_begun(tmp_path: Path) -> None:
    task = a_task(check=CHECK)
    policy = ByMember(task, [[RIGHT, SUBMIT]] * 8)
    policy.agents_together = 1
    runtime = a_runtime(tmp_path, policy=policy)
    runs = run_tries(task, runtime, 8, Stop(), seed=SEED)
    assert 1 <= len(runs) < 8
    assert len(runtime.store.runs()) == len(runs)


def test_a_stop_that_is_set_before_a_jail_opens_closes_it(tmp_path: Path) -> None:
    stop = Stop()

    def late() -> str:
        stop.set()
        return SLOW

    task = a_task(check=CHECK)
    runtime = a_runtime(tmp_path, policy=ByMember(task, [[late]]))
    (run,) = run_tries(task, runtime, 1, stop, seed=SEED)
    assert (run.stop, run.reward, run.turns) == (StopReason.INTERRUPTED, None, ())


def test_what_every_run_would_meet_ends_all_with_its_sentence(tmp_path: Path) -> None:
    class NoSandbox:
        name, layers, python = "no", {}, "python"

        def open(self, *_: object) -> object:
            raise AssertionError("no way to go on")

    task = a_task(check=CHECK)
    runtime = a_runtime(tmp_path, policy=ByMember(task, [[RIGHT, SUBMIT]] * 3))
    with pytest.raises(AssertionError, match="no way to go on"):
        run_tries(task, replace(runtime, sandbox=NoSandbox()), 3, Stop(), seed=SEED)


# ------------------------------------------------------------------- a completion under way is ended


def test_a_local_policy_ends_the_completion(tiny_folder: Path, one_thread: None) -> None:
    policy = open_policy(str(tiny_folder), dtype="float32").policy
    conversation = Conversation(first_messages(COMPACT_1, a_task(), ()))
    conversation.stop = threading.Event()
    conversation.stop.set()
    completion = policy.complete(conversation, Sampling(temperature=1.0, max_tokens=64, seed=1))
    assert completion.finish is Finish.CANCELLED
    assert completion.tokens is not None
    assert completion.tokens.sampled_ids == ()


def test_a_local_policy_ends_a_prefill_before_its_next_layer(tiny_folder: Path, one_thread: None) -> None:
    class AtSecondLayer(threading.Event):
        asked = 0

        def is_set(self) -> bool:
            self.asked += 1
            return self.asked > 1

    policy = open_policy(str(tiny_folder), dtype="float32").policy
    conversation = Conversation(first_messages(COMPACT_1, a_task(), ()))
    conversation.stop = stop = AtSecondLayer()
    sampling = Sampling(temperature=1.0, max_tokens=4, seed=1)
    assert policy.complete(conversation, sampling).finish is Finish.CANCELLED
    assert stop.asked == 2
    conversation.stop = None
    assert policy.complete(conversation, sampling).finish is Finish.LENGTH


@pytest.mark.parametrize("answer", [None, 503])
def test_a_hosted_policy_ends_the_completion(endpoint: Endpoint, answer: int | None) -> None:
    """While the server says nothing, and while a call is about to be repeated."""
    endpoint.script = [answer, None]
    policy = EndpointPolicy("m", endpoint.flags[-1])
    conversation = Conversation((Message(role=Role.USER, content="hello"),))
    conversation.stop = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(policy.complete, conversation, Sampling())
        while not endpoint.bodies:
            time.sleep(0.01)
        conversation.stop.set()
        assert waiting.result(30).finish is Finish.CANCELLED
    policy.close()


def test_tries_of_a_local_policy_are_decoded_together(
    tmp_path: Path, tiny_folder: Path, one_thread: None
) -> None:
    opened = open_policy(str(tiny_folder), dtype="float32")
    task = a_task(check="false", limits=a_task().limits.model_copy(update={"max_turns": 2, "memory_mb": 256}))
    runtime = a_runtime(
        tmp_path, policy=opened.policy, sampling=Sampling(temperature=1.0, max_tokens=8)
    )  # fmt: skip

    def sampled() -> list[list[tuple[int, ...]]]:
        runs = run_tries(task, runtime, 3, Stop(), seed=1)
        return [[t.completion.tokens.sampled_ids for t in run.turns if t.completion.tokens] for run in runs]

    first = sampled()
    assert len({str(tokens) for tokens in first}) == 3
    assert sampled() == first


# ------------------------------------------------------------------------------------ training


def test_tries_are_a_group_that_is_admitted_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = threading.Event()

    def after_the_failure() -> str:
        failed.wait(60)
        return SUBMIT

    runs, runtime = tried(
        tmp_path, [WRONG, SUBMIT], [RIGHT, after_the_failure], [WRONG, SLOW],
        ended=lambda member: failed.set(),
    )  # fmt: skip
    assert [run.reward for run in runs] == [0.0, 1.0, None]
    (group,) = form_groups([runtime.store.get(run.id) for run in runs])
    assert len(group.trajectories) == 3
    assert not group.dead
    monkeypatch.setattr(opening, "SHIPPED", tmp_path / "nothing is shipped")
    monkeypatch.setenv("NANO_HOME", str(tmp_path / "home"))
    with pytest.raises(SystemExit) as end:
        run_command(rl, ["admit", "--log", str(tmp_path / "log.db"), "--json"])
    report = json.loads(capsys.readouterr().out)
    assert not end.value.code
    assert report["uses"] == {"policy gradient": 2, "preference": 0, "imitation": 0, "nothing": 1}


# ------------------------------------------------------------------------------------ command line

POLICY = f"""
from nano_coder.models.scripted import ScriptedPolicy
from nano_shared.types import Role


class BySeed(ScriptedPolicy):
    def complete(self, conversation, sampling):
        acted = any(message.role is Role.ASSISTANT for message in conversation.messages)
        right = sampling.seed is not None and sampling.seed % 4 == 0
        text = {SUBMIT!r} if acted else {RIGHT!r} if right else {WRONG!r}
        return ScriptedPolicy([text], tokens=True, id="by-seed").complete(conversation, sampling)


def by_seed(name, options):
    return BySeed([])
"""


@pytest.fixture
def model(tmp_path: Path) -> tuple[str, ...]:
    (tmp_path / "by_seed.py").write_text(POLICY)
    return ("--model", f"{tmp_path}/by_seed.py:by_seed", "--profile", "compact-1")


def seed_with(passing: bool, tries: int, key: str) -> str:
    """A seed with which one of so many tries is right, or none."""
    task = a_task(key=key)
    for seed in range(1000):
        seeds = [turn_seed(member_seed(seed, task, member), 0) or 0 for member in range(tries)]
        if sum(value % 4 == 0 for value in seeds) == int(passing):
            return str(seed)
    raise AssertionError


def test_the_winner_is_shown_logged_with_its_siblings_and_applied_as_the_last(
    cli: Cli,
    project: Path,
    home: Path,
    model: tuple[str, ...],
) -> None:
    run = ("run", "Say three.", "-C", str(project), "--check", CHECK, *model)
    once = cli(*run, "--json", "--tries", "1", "--seed", "1")
    assert "winner" not in json.loads(once.stdout)
    with LogStore.open(home / "log.db") as store:
        key = store.get("last").task.key
    seed = seed_with(True, 4, key)
    done = cli(*run, "--json", "--tries", "4", "--seed", seed)
    result = json.loads(done.stdout)
    assert (done.returncode, done.stderr, result["exit_code"]) == (0, "", 0)
    winner, tries = result["winner"], result["tries"]
    assert winner == result["run"]
    assert [one["reward"] for one in tries if one["run"] == winner] == [1.0]
    assert all(one["reward"] in (0.0, None) for one in tries if one["run"] != winner)
    with LogStore.open(home / "log.db") as store:
        logged = [store.get(one["run"]) for one in tries]
        assert {run.task.key for run in logged} == {key}
        assert {turn.completion.sampling.temperature for run in logged for turn in run.turns} == {0.7}
        loser = next(run.id for run in logged if run.id != winner)
    assert f"one of {len(tries)} tries; passed: {winner}" in cli("log", "show", loser).stdout
    assert "tries" not in cli("log", "show", json.loads(once.stdout)["run"]).stdout
    assert cli("apply", "last", cwd=project).stdout == "a.py\n"
    assert (project / "a.py").read_text() == "three\n"


@pytest.mark.slow
def test_lines_as_they_end_and_the_exit_code_where_none_passes(
    cli: Cli,
    project: Path,
    home: Path,
    model: tuple[str, ...],
) -> None:
    run = ("run", "Say three.", "-C", str(project), "--check", CHECK, "--apply", *model)
    (home / "config" / "nano").mkdir(parents=True)
    (home / "config" / "nano" / "config.toml").write_text("tries = 3\n")
    cli(*run, "--tries", "1")
    (project / "a.py").write_text("one\n")
    with LogStore.open(home / "log.db") as store:
        seed = seed_with(False, 3, store.get("last").task.key)
    done = cli(*run, "--seed", seed)  # the number is of the configuration
    assert done.returncode == 1
    assert sorted(done.stderr.splitlines()) == [f"try {n} of 3: failed (2 turns)" for n in (1, 2, 3)]
    assert "check: failed" in done.stdout
    assert "not applied" in done.stdout
    assert (project / "a.py").read_text() == "one\n"
    hosted = cli("run", "x", "-C", str(project), *model, "--json", "--temperature", "0")
    assert "winner" not in json.loads(hosted.stdout)  # no check: one run


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--tries", "2"), ("--tries 2 needs a --check",)),
        (("--tries", "0", "--check", CHECK), ("tries", "greater than or equal to 1")),
        (("--tries", "-3", "--check", CHECK), ("tries", "greater than or equal to 1")),
        (("--tries", "many", "--check", CHECK), ("tries", "many")),
        (("--tries", "2", "--check", CHECK, "--temperature", "0"), ("makes 2 equal runs", "0.7")),
        (("--tries", "2", "--check", CHECK, "--reflect"), ("--tries", "--reflect", "leave out one")),
    ],
)
def test_what_cannot_be_tried_is_refused(
    cli: Cli,
    project: Path,
    model: tuple[str, ...],
    arguments: tuple[str, ...],
    words: tuple[str, ...],
) -> None:
    refused(cli("run", "Say three.", "-C", str(project), *model, *arguments), 2, *words)


def test_a_projects_file_that_nobody_trusts_sets_no_tries(
    cli: Cli,
    project: Path,
    model: tuple[str, ...],
) -> None:
    (project / "nano.toml").write_text("tries = 9\n")
    done = cli("run", "Say three.", "-C", str(project), "--check", CHECK, "--json", *model)
    assert "winner" not in json.loads(done.stdout)
    assert "sets tries: ignored" in done.stderr


@pytest.mark.slow
def test_ctrl_c_ends_all_and_keeps_what_was_done(
    cli: Cli,
    endpoint: Endpoint,
    project: Path,
    home: Path,
) -> None:
    endpoint.script = [EDIT[0], EDIT[0], None, None]
    arguments = ("run", "Say three.", "-C", str(project), "--check", CHECK, "--json", "--tries", "2")
    with subprocess.Popen(
        argv("nano-coder", *arguments, *endpoint.flags), env=environment(home), text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:  # fmt: skip
        assert endpoint.waiting.wait(120)
        while endpoint.script:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "")
    result = json.loads(out)
    assert (result["winner"], result["exit_code"]) == (None, 130)
    assert [(one["reward"], one["stop"]) for one in result["tries"]] == [(None, "interrupted")] * 2
    with LogStore.open(home / "log.db") as store:
        assert sum(len(store.get(one["run"]).turns) for one in result["tries"]) == 2
    assert "one of 2 tries; passed: none" in cli("log", "show", "last", cwd=project).stdout
