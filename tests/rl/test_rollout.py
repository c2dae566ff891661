"""Rollouts: every agent of a step runs, some at a time, and a seed reproduces them bit for bit."""

import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch

from integration.tiny_model import build_tiny
from nano_coder.agent.dialects.dialect import DIALECTS
from nano_coder.agent.profiles import COMPACT_1, first_messages
from nano_coder.models.opening import OpenedWeights, local_policy, open_weights
from nano_coder.models.scripted import ScriptedPolicy
from nano_coder.run.execution import RunHooks, RunSettings, Runtime
from nano_coder.sandbox.protocol import open_sandbox
from nano_rl.gather.rollouts import collect
from nano_shared.errors import UsageError
from nano_shared.store import LogStore
from nano_shared.types import Provenance, Sampling, Split, StopReason, ToolCall, TurnTokens
from nano_suites.drawing import make_tasks

TASKS = make_tasks(levels=[0], n=3, seed=1, split=Split.TRAIN, views=["copy"])


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> OpenedWeights:
    torch.set_num_threads(1)
    texts = [m.content for t in TASKS for m in first_messages(COMPACT_1, t, ())]
    folder = tmp_path_factory.mktemp("tiny")
    build_tiny(folder, texts, hidden=64, layers=2, max_positions=256, vocab_size=400)
    return open_weights(str(folder))


@pytest.fixture
def runtime(tmp_path: Path) -> Runtime:
    store = LogStore.open(tmp_path / "log.db")
    sampling = Sampling(temperature=1.0, max_tokens=12)
    return Runtime(policy=ScriptedPolicy([]), sandbox=open_sandbox(), store=store, sampling=sampling)


def rolled(
    opened: OpenedWeights,
    runtime: Runtime,
    *,
    concurrency: int,
    scheduler: Literal["lockstep", "free"] = "lockstep",
) -> list[list[TurnTokens | None]]:
    """The exact tokens of three groups of three."""
    policy = local_policy(opened.loaded, opened.profile, scheduler=scheduler)
    runtime = replace(runtime, policy=policy, settings=RunSettings(at_once=concurrency))
    runs = collect(TASKS, runtime, group_size=3, seed=7)
    assert [run.task.key for run in runs] == [task.key for task in TASKS for _ in range(3)]
    assert all(run.verdict is not None and run.verdict.reward is not None for run in runs)
    assert not [run for run in runs if run.stop is StopReason.POLICY_ERROR]
    return [[turn.completion.tokens for turn in run.turns] for run in runs]


@pytest.mark.some(1)
@pytest.mark.parametrize("concurrency", [2, 9])
def test_a_seed_reproduces_tokens_and_logprobs_bit_for_bit(
    opened: OpenedWeights, runtime: Runtime, concurrency: int
) -> None:
    first = rolled(opened, runtime, concurrency=concurrency)
    assert first == rolled(opened, runtime, concurrency=concurrency)


def test_the_free_scheduler_and_fewer_agents_at_once_draw_the_same_tokens(
    opened: OpenedWeights, runtime: Runtime
) -> None:
    together = rolled(opened, runtime, concurrency=9)
    for other in (
        rolled(opened, runtime, concurrency=2),
        rolled(opened, runtime, concurrency=4, scheduler="free"),
    ):
        assert [[t and t.sampled_ids for t in run] for run in together] == [
            [t and t.sampled_ids for t in run] for run in other
        ]


def test_a_task_that_cannot_be_served_ends_the_collection_with_its_sentence(
    opened: OpenedWeights, runtime: Runtime
) -> None:
    """And nobody is left waiting for its seat, or for those of the tasks behind it."""
    policy = local_policy(opened.loaded, opened.profile)
    broken = TASKS[0].model_copy(update={"tools": ("no_such_tool",)})
    runtime = replace(runtime, policy=policy, settings=RunSettings(at_once=2))
    with pytest.raises(UsageError, match="no_such_tool"):
        collect([TASKS[0], broken, *TASKS], runtime, seed=1)


def test_no_task_is_no_run(runtime: Runtime) -> None:
    assert collect([], runtime, group_size=4) == []


@pytest.mark.parametrize(("source", "said"), [("generated", "1"), ("published rows", "")])
def test_plugins_of_pytest_stay_out_of_the_tests_of_generated_tasks(
    runtime: Runtime, source: str, said: str
) -> None:
    task = TASKS[0].model_copy(update={"provenance": Provenance(source=source), "tools": None})
    line = "echo plugins=$PYTEST_DISABLE_PLUGIN_AUTOLOAD."
    texts = [
        DIALECTS[COMPACT_1.dialect].render("", (call,), COMPACT_1.tools)
        for call in (ToolCall(name="shell", arguments={"command": line}), ToolCall(name="submit"))
    ]
    (run,) = collect([task], replace(runtime, policy=ScriptedPolicy(texts)))
    assert f"plugins={said}." in run.turns[0].observations[0].text


def test_ctrl_c_ends_the_runs_that_are_at_work(runtime: Runtime) -> None:
    sleeps = DIALECTS["compact"].render(
        "", (ToolCall(name="shell", arguments={"command": "sleep 300"}),), COMPACT_1.tools
    )
    begun = threading.Barrier(3)
    hooks = RunHooks(start=lambda run: begun.wait(60))
    runtime = replace(runtime, policy=ScriptedPolicy([sleeps, sleeps]), hooks=hooks)

    def press() -> None:
        begun.wait(60)
        os.kill(os.getpid(), signal.SIGINT)

    began = time.monotonic()
    threading.Thread(target=press).start()
    with pytest.raises(KeyboardInterrupt):
        collect(TASKS[:2], runtime)
    assert time.monotonic() - began < 200
    assert [run.stop for run in runtime.store.trajectories()] == [StopReason.INTERRUPTED] * 2
