"""Forks go on from a step of a run with its files and tokens, and are a group of their own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from executions import SUBMIT, a_runtime, a_task, act, limits, prompt_proof

from nano_coder.cli import cli
from nano_coder.models.opening import open_policy
from nano_coder.models.scripted import ScriptedPolicy
from nano_coder.run.execution import Runtime, grade_run, resume_run, run_task
from nano_coder.run.fork import fork_run
from nano_coder.verify.trainable import verify
from nano_rl.learn.groups import form_groups, to_samples
from nano_shared.command_line import run_command
from nano_shared.errors import LogError, UsageError
from nano_shared.types import Sampling, StopReason, Task, Trajectory, Trust

FIX = act("write_file", path="a.py", content="three\n")
WORK = (act("write_file", path="b.py", content="two\n"), "no action", act("shell", command="ls"), SUBMIT)


def checked_task() -> Task:
    return a_task(check="grep -q three a.py", limits=limits(max_turns=8))


def a_parent(folder: Path) -> tuple[Trajectory, Runtime]:
    """A run of four steps that failed its check, as the log gives it back."""
    runtime = a_runtime(folder, WORK)
    run = grade_run(run_task(checked_task(), runtime, seed=1), runtime)
    assert run.reward == 0
    return runtime.store.get(run.id), runtime


def saying(runtime: Runtime, *texts: str) -> Runtime:
    return replace(runtime, policy=ScriptedPolicy(texts, tokens=True))


def test_a_fork_begins_with_the_files_and_the_tokens_of_its_parent(tmp_path: Path) -> None:
    parent, runtime = a_parent(tmp_path)
    look = act("shell", command="cat b.py && ls c.py")
    (fork,) = fork_run(parent, saying(runtime, look, FIX, SUBMIT), at=2, n=1, seed=0)
    logged = runtime.store.get(fork.id)
    assert (logged.parent, logged.parent_step) == (parent.id, 2)
    assert logged.turns[:2] == parent.turns[:2]  # tokens, log-probs, snapshots and all
    assert logged.own_turns[0].observations[0].text.startswith("two\n")
    assert "a.py" in logged.diff  # against the workspace before the first action of the parent
    assert "b.py" in logged.diff
    assert logged.reward == 1.0
    assert logged.verdict is not None
    assert logged.verdict.trust is Trust.USER_CHECK
    row = [turn.completion.tokens for turn in parent.turns[:2] if turn.completion.tokens]
    before = sum(len(t.context_ids) + len(t.sampled_ids) for t in row)
    (sample,) = to_samples(logged, 1.0)
    assert sample.ids[:before] == tuple(i for t in row for i in (*t.context_ids, *t.sampled_ids))
    assert sum(sample.mask[:before]) == 0  # another run sampled them
    assert sum(sample.mask) == logged.num_sampled_tokens


def test_forks_of_a_step_are_a_group_apart_from_the_task_and_from_other_steps(tmp_path: Path) -> None:
    parent, runtime = a_parent(tmp_path)
    early = fork_run(parent, saying(runtime, *[FIX, SUBMIT]), at=1, n=1)
    early += fork_run(parent, saying(runtime, SUBMIT), at=1, n=1)
    late = fork_run(parent, saying(runtime, SUBMIT), at=3, n=1)
    groups = form_groups([parent, *early, *late])
    assert [len(group.trajectories) for group in groups] == [1, 2, 1]
    assert [group.forked for group in groups] == [False, True, True]
    assert sorted(groups[1].rewards_G) == [0.0, 1.0]
    assert not groups[1].dead


def test_the_prompts_of_a_fork_are_proved(tmp_path: Path) -> None:
    parent, runtime = a_parent(tmp_path)
    (fork,) = fork_run(parent, saying(runtime, FIX, SUBMIT), at=3, n=1)
    fork = runtime.store.get(fork.id)
    assert prompt_proof(fork, runtime).equal == 5


def test_what_the_parent_sampled_greedily_does_not_keep_a_fork_from_training(tmp_path: Path) -> None:
    parent, runtime = a_parent(tmp_path)
    greedy = replace(saying(runtime, *WORK), sampling=Sampling(temperature=0.0))
    parent = runtime.store.get(grade_run(run_task(checked_task(), greedy), greedy).id)
    assert [f.kind for f in verify(parent) if f.blocks] == ["greedy"]
    (fork,) = fork_run(parent, saying(runtime, FIX, SUBMIT), at=2, n=1)
    assert [f.kind for f in verify(runtime.store.get(fork.id)) if f.blocks] == []


def test_an_interrupted_fork_is_resumed_with_its_inheritance(tmp_path: Path) -> None:
    parent, runtime = a_parent(tmp_path)
    (stopped,) = fork_run(parent, saying(runtime, FIX), at=2, n=1)  # the script has run out
    assert stopped.stop is StopReason.POLICY_ERROR
    runtime.store.reopen(stopped.id)
    done = resume_run(stopped.id, saying(runtime, SUBMIT))
    assert done.stop is StopReason.FINISHED
    assert runtime.store.get(done.id).turns[:2] == parent.turns[:2]
    assert len(done.own_turns) == 2


def test_another_check_grades_under_another_key_and_is_not_shown(tmp_path: Path) -> None:
    parent, runtime = a_parent(tmp_path)
    (fork,) = fork_run(parent, saying(runtime, SUBMIT), at=1, n=1, check="test -f b.py")
    assert fork.reward == 1.0
    assert fork.verdict is not None
    assert fork.verdict.trust is Trust.USER_CHECK
    assert fork.task.key != parent.task.key
    assert fork.task.check == parent.task.check  # the prompt is the one that is logged


def test_the_log_takes_no_more_of_a_parent_than_the_fork_says(tmp_path: Path) -> None:
    parent, runtime = a_parent(tmp_path)
    bare = {"id": "f", "parent": parent.id, "stop": None, "ended": None, "verdict": None}
    with pytest.raises(LogError, match="already been executed"):
        runtime.store.begin(parent.model_copy(update={**bare, "parent_step": 1}))
    with pytest.raises(LogError, match="begin with 9 turns"):
        runtime.store.begin(parent.model_copy(update={**bare, "parent_step": 9}))


@pytest.mark.parametrize(
    ("at", "says"), [(-1, "no step -1"), (5, "no step 5"), (4, "nothing follows it"), (99, "no step")]
)
def test_a_step_out_of_range_is_refused(tmp_path: Path, at: int, says: str) -> None:
    parent, runtime = a_parent(tmp_path)
    with pytest.raises(UsageError, match=says):
        fork_run(parent, runtime, at=at, n=1)


def test_a_policy_that_reads_the_tokens_otherwise_is_refused(
    tmp_path: Path, tiny_folder: Path, one_thread: None
) -> None:
    parent, runtime = a_parent(tmp_path)
    opened = open_policy(str(tiny_folder), dtype="float32")
    other = replace(runtime, policy=opened.policy, policy_name="tiny")
    with pytest.raises(UsageError, match="otherwise than it is logged"):
        fork_run(parent, other, at=1, n=1)
    bare = replace(a_runtime(tmp_path, WORK, tokens=False))
    text_only = run_task(checked_task(), bare)
    with pytest.raises(UsageError, match="is text-only"):
        fork_run(text_only, other, at=1, n=1)


def test_forks_of_a_local_policy_differ_by_their_seed_and_are_repeatable(
    tmp_path: Path, tiny_folder: Path, one_thread: None
) -> None:
    opened = open_policy(str(tiny_folder), dtype="float32")
    runtime = replace(
        a_runtime(tmp_path),
        policy=opened.policy,
        policy_name=str(tiny_folder),
        sampling=Sampling(temperature=1.0, max_tokens=8),
    )
    parent = run_task(a_task(limits=limits(max_turns=3)), runtime, seed=3)
    assert len(parent.turns) > 1

    def sampled(seed: int) -> list[list[tuple[int, ...]]]:
        forks = fork_run(parent, runtime, at=1, n=3, seed=seed)
        return [[t.completion.tokens.sampled_ids for t in f.own_turns if t.completion.tokens] for f in forks]

    first = sampled(0)
    assert len({str(tokens) for tokens in first}) == 3
    assert sampled(0) == first
    assert sampled(1) != first


# ------------------------------------------------------------------------------------ command line


def command(capsys: pytest.CaptureFixture[str], log: Path, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        run_command(cli, ["fork", *arguments, "--log", str(log)])
    streams = capsys.readouterr()
    return int(end.value.code or 0), streams.out, streams.err


@pytest.mark.slow
def test_the_command_prints_a_line_a_fork_and_the_success_rate(
    tmp_path: Path, tiny_folder: Path, capsys: pytest.CaptureFixture[str], one_thread: None
) -> None:
    opened = open_policy(str(tiny_folder), dtype="float32")
    sampling = Sampling(temperature=1.0, max_tokens=8)
    runtime = replace(
        a_runtime(tmp_path), policy=opened.policy, policy_name=str(tiny_folder), sampling=sampling
    )
    parent = run_task(a_task(check="grep -q one a.py", limits=limits(max_turns=2)), runtime, seed=3)
    log = tmp_path / "log.db"
    code, out, _ = command(capsys, log, parent.id, "--at", "1", "--n", "2", "--set", "dtype=float32")
    assert code == 0
    assert out.count("fork ") >= 2
    assert f"2 of 2 forks of {parent.id} at step 1 succeeded (100%)" in out
    code, out, _ = command(capsys, log, parent.id, "--at", "0", "--n", "2", "--seed", "1", "--json")
    report = json.loads(out)
    assert report["success_rate"] == 1.0
    assert [fork["reward"] for fork in report["forks"]] == [1.0, 1.0]
    assert runtime.store.get(report["forks"][0]["run"]).turns[0].completion.sampling.temperature == 1.0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("nosuch", "--at", "1"), "no run 'nosuch'"),
        (("RUN", "--at", "9"), "no step 9"),
        (("RUN", "--at", "1"), "not at hand"),
        (("RUN", "--at", "1", "--check", " "), "--check is empty"),
        (("RUN",), "--at"),
        (("RUN", "--at", "1", "--n", "0"), "--n"),
    ],
)
def test_bad_input_is_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], says: str
) -> None:
    parent, _ = a_parent(tmp_path)
    named = (parent.id if argument == "RUN" else argument for argument in arguments)
    code, out, err = command(capsys, tmp_path / "log.db", *named)
    assert code == 2
    assert says in err
    assert out == ""
