"""Texts of a run in a directory are taught under the prompt that was shown, its list of files included."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from builders import verdict
from domains import runtime

from integration.tiny_model import build_tiny
from nano_coder.agent.profiles import COMPACT_1
from nano_coder.models.opening import open_weights
from nano_coder.models.scripted import ScriptedPolicy
from nano_coder.run.execution import Runtime, run_task
from nano_preferences.log_pairs import log_pairs
from nano_preferences.reward_checkpoint import SavedRewardModel
from nano_preferences.reward_model import row_scores
from nano_preferences.rewards.preference import Preference
from nano_rl.imitation import reader_of, run_messages
from nano_rl.learn.critic import scalar_model
from nano_shared import snapshot
from nano_shared.errors import LogError
from nano_shared.logged_run import Feedback, FeedbackKind
from nano_shared.policy import Conversation
from nano_shared.types import Completion, Message, Role, Sampling, Task, Trajectory


class Shown(ScriptedPolicy):
    """Writes texts without tokens, as a model behind an API does, and keeps what it was shown first."""

    opening: tuple[Message, ...] = ()

    def complete(self, conversation: Conversation, sampling: Sampling) -> Completion:
        self.opening = self.opening or conversation.messages
        return super().complete(conversation, sampling)


@pytest.fixture
def within(tmp_path: Path) -> Runtime:
    return runtime(tmp_path / "log")


@pytest.fixture
def task(tmp_path: Path, within: Runtime) -> Task:
    home = tmp_path / "home"
    (home / "pkg").mkdir(parents=True)
    (home / "sums.py").write_text("def add(a, b):\n    return a - b\n")
    (home / "pkg" / "more.py").write_text("")
    start = snapshot.snapshot_directory(home, within.store.blobs, snapshot.DEFAULT_EXCLUDES)
    return Task(key="adhoc", prompt="Mend add.", snapshot=start)


def run(task: Task, within: Runtime, *texts: str) -> tuple[Trajectory, Shown]:
    policy = Shown(texts)
    return run_task(task, replace(within, policy=policy)), policy


def test_the_messages_of_a_run_are_those_that_its_policy_was_shown(task: Task, within: Runtime) -> None:
    made, policy = run(task, within, "@read_file path=sums.py", "@submit")
    assert "pkg/more.py" in policy.opening[1].content
    assert run_messages(made, COMPACT_1, within.store.blobs)[:2] == list(policy.opening)


def test_pairs_of_texts_begin_with_them(task: Task, within: Runtime) -> None:
    good, policy = run(task, within, "@read_file path=sums.py", "@submit")
    bad, _ = run(task, within, "@submit")
    for made, reward in ((good, 1.0), (bad, 0.0)):
        within.store.add_verdict(made.id, verdict(reward))
    within.store.add_feedback(
        bad.id, Feedback(created=1.0, kind=FeedbackKind.EDIT, turn=0, text="@search\nadd")
    )
    pairs = log_pairs(within.store).pairs
    assert [pair.source for pair in pairs] == ["graded", "edit"]
    assert [pair.prompt for pair in pairs] == [policy.opening] * 2


def test_a_reward_model_scores_a_run_under_them(task: Task, within: Runtime, tmp_path: Path) -> None:
    made, policy = run(task, within, "@submit")
    texts = [message.content for message in policy.opening]
    opened = open_weights(str(build_tiny(tmp_path / "tiny", texts, hidden=32, layers=1)))
    model = scalar_model(opened.loaded.model, lora_rank=0, seed=0, bias=False)
    torch.nn.init.ones_(model.head.weight)
    reader = reader_of(opened)
    (shown,) = reader.messages(
        "shown", [*policy.opening, Message(role=Role.ASSISTANT, content="@submit")], [False, False, True]
    )
    judge = SavedRewardModel("judge", model, reader, context_limit=4096)
    with torch.no_grad():
        expected = row_scores(model, [shown.ids]).tolist()
    assert judge([made], within.store.blobs) == expected
    part = Preference(checkpoint="judge")
    part._model = judge
    (score,) = part.score([made], within)
    assert score.value == pytest.approx(1 / (1 + math.exp(-expected[0])))


def test_a_directory_that_is_gone_is_no_other_prompt(task: Task, within: Runtime) -> None:
    made, _ = run(task, within, "@submit")
    within.store.add_feedback(
        made.id, Feedback(created=1.0, kind=FeedbackKind.EDIT, turn=0, text="@search\nadd")
    )
    within.store.blobs.path(str(task.snapshot)).unlink()
    with pytest.raises(LogError):
        run_messages(made, COMPACT_1, within.store.blobs)
    found = log_pairs(within.store)
    assert found.pairs == ()
    assert found.refused == {"its directory is not in the log's blob store": 1}
