"""A local model whose context filled three times: its tokens are exact, and its rows train like any."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from itertools import pairwise
from typing import Any

import pytest
import torch
from looping import scored
from test_tree_forward import assert_close, gradients

from integration.tiny_model import build_tiny
from nano_coder.agent.profiles import find_profile, first_messages
from nano_coder.models.opening import local_policy
from nano_coder.models.weights import load_policy
from nano_coder.run.execution import Runtime, run_task
from nano_coder.sandbox.protocol import open_sandbox
from nano_coder.verify.tokens import TokenCheck, logprob_gap
from nano_coder.verify.trainable import verify
from nano_rl.imitation import row_conversations
from nano_rl.learn.advantages import group_samples
from nano_rl.learn.batch import make_batches
from nano_rl.learn.groups import form_groups
from nano_rl.learn.logprob import score_tokens
from nano_shared.extension_points import _registered
from nano_shared.store import LogStore
from nano_shared.types import Limits, Sampling, StopReason, Task, Trajectory, Turn

pytestmark = pytest.mark.slow
TURNS = 100
TASK = Task(
    key="t", prompt="Go through the long list.", files={"a.py": "x = 1\n"}, limits=Limits(max_turns=TURNS)
)


def row_of(turn: Turn) -> int:
    assert turn.completion.tokens is not None
    return turn.completion.tokens.row


@pytest.fixture(scope="module")
def any_text() -> Any:
    """The name under which the dialect of this folder is registered while the module runs."""
    entry = EntryPoint("any-text", "any_text:ANY_TEXT", "nano.dialects")
    _registered("nano.dialects")["any-text"] = (entry,)
    yield "any-text"
    del _registered("nano.dialects")["any-text"]


@pytest.fixture(scope="module")
def runs(any_text: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Trajectory], Runtime, Any]:
    """Two runs of a model of random weights, of a hundred turns each, and its weights."""
    profile = find_profile(f"workday-2-{any_text}")
    folder = tmp_path_factory.mktemp("tiny")
    texts = [*(m.content for m in first_messages(profile, TASK, ())), str(profile.compaction)]
    tiny = build_tiny(folder, texts, hidden=32, layers=1, max_positions=2048, vocab_size=600)
    loaded = load_policy(str(tiny))
    store = LogStore.open(folder / "log.db")
    runtime = Runtime(
        policy=local_policy(loaded, profile), sandbox=open_sandbox(), store=store, profile=profile,
        sampling=Sampling(max_tokens=10), policy_name=str(tiny),
    )  # fmt: skip
    return [run_task(TASK, runtime, seed=seed) for seed in (1, 2)], runtime, loaded


def test_the_tokens_of_a_run_over_its_context_are_exact(
    runs: tuple[list[Trajectory], Runtime, Any],
) -> None:
    trajectories, runtime, loaded = runs
    policy: Any = runtime.policy
    check = TokenCheck(template=policy.template, eos_ids=loaded.eos_ids, blobs=runtime.store.blobs)
    for run in trajectories:
        assert run.stop is StopReason.MAX_TURNS
        assert sum(turn.is_summary for turn in run.turns) >= 3
        assert len({turn.delegated_by for turn in run.turns}) > 3, (
            "and sub-agents worked in rows of their own"
        )
        assert [f.kind for f in verify(run) if f.blocks] == ["no verdict"]
        assert check.findings(run) == []
        assert logprob_gap(run, policy.engine).exact


def test_what_was_prefilled_grows_with_what_was_new(runs: tuple[list[Trajectory], Runtime, Any]) -> None:
    trajectories, runtime, _ = runs
    policy: Any = runtime.policy
    logged = sum(len(t.completion.tokens.context_ids) for r in trajectories for t in r.turns)  # type: ignore[union-attr]
    counts = policy.engine.decoder.counts
    turns = sum(len(run.turns) for run in trajectories)
    assert counts.prefilled <= logged + turns, "a token for each turn: the last that was sampled before"
    assert counts.prompt > 4 * counts.prefilled, "what every turn read"


def test_its_rows_train_as_if_each_stood_alone(runs: tuple[list[Trajectory], Runtime, Any]) -> None:
    trajectories, _, loaded = runs
    (group,) = form_groups(scored(run, float(i)) for i, run in enumerate(trajectories))
    samples = group_samples(group)
    assert len(samples) == sum(len(set(map(row_of, run.turns))) for run in trajectories)
    assert sum(s.num_action_tokens for s in samples) == sum(r.num_sampled_tokens for r in trajectories)
    model = loaded.model.float()
    together = torch.tensor(0.0)
    for batch in make_batches(samples, max_tokens=4096):
        together = together + (score_tokens(model, batch).logprobs_BT * batch.advantages_BT).sum()
    apart = torch.tensor(0.0)
    for row in samples:
        logs = model(input_ids=torch.tensor([row.ids])).logits[0].log_softmax(-1)[:-1]
        picked = logs.gather(1, torch.tensor(row.ids[1:])[:, None])[:, 0]
        apart = apart + (picked * torch.tensor(row.mask[1:]) * torch.tensor(row.advantages[1:])).sum()
    assert_close(gradients(model, together), gradients(model, apart), 1e-5)


def test_its_texts_teach_row_by_row(runs: tuple[list[Trajectory], Runtime, Any]) -> None:
    trajectories, runtime, _ = runs
    policy: Any = runtime.policy
    run = trajectories[0]
    rows = row_conversations(run, runtime.profile, runtime.store.blobs)
    main = [turn for turn in run.turns if turn.delegated_by is None]
    assert [turn for _, turns in rows for turn in turns if turn is not None] == main
    begins = [turn for before, turn in pairwise(main) if before.is_summary]
    for (shown, _), turn in zip(rows[1:], begins, strict=True):
        assert turn.completion.tokens is not None
        begun = policy.decode(turn.completion.tokens.context_ids)
        assert shown.messages[1].content in begun, "the task, and the summary of the row before"
