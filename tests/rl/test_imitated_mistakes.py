"""What a tool refused, or nobody could read, is shown to who imitates, and not trained."""

from __future__ import annotations

from dataclasses import replace

import pytest
from domains import runtime

from integration.tiny_model import build_tiny
from nano_coder.agent.dialects.dialect import DIALECTS
from nano_coder.models.opening import OpenedWeights, local_policy, open_weights
from nano_coder.models.scripted import ScriptedPolicy
from nano_coder.run.execution import Runtime, grade_run, reflect_run, run_task
from nano_rl.gather.rollouts import execute, oracle_policy
from nano_rl.imitation import RunEncoder, reader_of, succeeded
from nano_rl.learn.groups import TrainSample
from nano_shared.hidden_checks import CommandChecks
from nano_shared.types import Sampling, Split, Task, ToolCall, Trajectory
from nano_suites.functions.views import SUITE, VIEWS

AGAIN = next(view for view in VIEWS if view.name == "repair_again")


@pytest.fixture(scope="module")
def task() -> Task:
    """Whose oracle edits in vain twice."""
    return next(task for seed in range(99) if len((task := SUITE.make(AGAIN, Split.TRAIN, seed)).oracle) == 6)


@pytest.fixture(scope="module")
def opened(task: Task, tmp_path_factory: pytest.TempPathFactory) -> OpenedWeights:
    texts = [task.prompt, *task.files.values()] * 3
    return open_weights(
        str(build_tiny(tmp_path_factory.mktemp("tiny"), texts, hidden=32, layers=1, max_positions=2048))
    )


@pytest.fixture(scope="module")
def reader(opened: OpenedWeights) -> RunEncoder:
    return reader_of(opened)


@pytest.fixture(scope="module")
def within(tmp_path_factory: pytest.TempPathFactory) -> Runtime:
    return runtime(tmp_path_factory.mktemp("log"))


@pytest.fixture(scope="module")
def run(task: Task, within: Runtime) -> Trajectory:
    """The oracle's: a failing test run, the file, two edits in vain, the edit, the end."""
    return execute([task], [oracle_policy(task, within.profile)], within)[0]


def read(row: TrainSample, reader: RunEncoder, *, trained: bool = False) -> str:
    return reader.template.encoder.decode(
        [i for i, m in zip(row.ids, row.mask, strict=True) if m or not trained]
    )


def test_an_edit_in_vain_is_shown_and_what_follows_is_learned(run: Trajectory, reader: RunEncoder) -> None:
    assert run.reward == 1
    assert [turn.refused for turn in run.turns] == [False, False, True, True, False, False]
    (row,) = reader.rows(run)
    *in_vain, mended = (turn.completion.text for turn in run.turns[2:5])
    for vain in in_vain:
        assert vain in read(row, reader)
        assert vain not in read(row, reader, trained=True)
    assert mended in read(row, reader, trained=True)


def test_a_command_that_fails_is_no_mistake(run: Trajectory, reader: RunEncoder) -> None:
    """The failing test run names what is to be mended."""
    first = run.turns[0]
    assert (first.observations[0].ok, first.observations[0].exit_code) == (False, 1)
    assert first.completion.text in read(reader.rows(run)[0], reader, trained=True)


def test_words_that_no_call_can_be_read_from_are_not_learned(
    run: Trajectory, task: Task, within: Runtime, reader: RunEncoder
) -> None:
    texts = [turn.completion.text for turn in run.turns[1:]]
    wordy = run_task(task, replace(within, policy=ScriptedPolicy(["let me see", *texts])))
    assert wordy.turns[0].parse_error is not None
    (row,) = reader.rows(wordy)
    assert "let me see" in read(row, reader)
    assert "let me see" not in read(row, reader, trained=True)


def test_the_same_holds_for_tokens_that_were_logged(
    task: Task, within: Runtime, opened: OpenedWeights, reader: RunEncoder
) -> None:
    """Of an untrained policy, whose noise is no call."""
    policy = local_policy(opened.loaded, opened.profile)
    noise = run_task(task, replace(within, policy=policy, sampling=Sampling(max_tokens=8)), seed=0)
    assert reader.reads(noise)
    assert all(turn.refused for turn in noise.turns)
    assert reader.rows(noise) == []
    tokens = noise.turns[-1].completion.tokens
    assert tokens is not None
    assert reader.last_row(noise)[-len(tokens.sampled_ids) :] == tokens.sampled_ids


def test_a_run_of_mistakes_alone_is_no_success(run: Trajectory) -> None:
    assert succeeded(run)
    assert not succeeded(run.model_copy(update={"turns": run.turns[2:4]}))


def test_of_a_second_attempt_the_first_is_shown_and_not_learned(within: Runtime, reader: RunEncoder) -> None:
    task = Task(key="t", prompt="Write three.", hidden=CommandChecks(command="grep -q three a.py"))

    def acting(text: str) -> Runtime:
        calls = [
            ToolCall(name="write_file", arguments={"path": "a.py", "content": text}),
            ToolCall(name="submit", arguments={}),
        ]
        form = DIALECTS[within.profile.dialect]
        script = [form.render("", (call,), within.profile.tools) for call in calls]
        return replace(within, policy=ScriptedPolicy(script))

    failed = grade_run(run_task(task, acting("two\n")), within)
    second = grade_run(reflect_run(failed, acting("three\n")), within)
    assert (failed.reward, second.reward) == (0, 1)
    (row,) = reader.rows(second)
    assert "two" in read(row, reader)
    assert "two" not in read(row, reader, trained=True)
    assert "three" in read(row, reader, trained=True)
