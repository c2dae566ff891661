"""PPO and the mixed loss in the real training loop, on logged groups: steps, and going on after a stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from builders import verdict

from integration.tiny_model import build_tiny
from nano_coder.agent.dialects.dialect import DIALECTS
from nano_coder.agent.profiles import COMPACT_1, first_messages
from nano_coder.models.opening import open_weights
from nano_coder.models.scripted import ScriptedPolicy
from nano_coder.run.execution import Runtime
from nano_coder.sandbox.protocol import open_sandbox
from nano_rl.config import TrainConfig
from nano_rl.gather.step_groups import Sources
from nano_rl.imitation import RunEncoder, reader_of
from nano_rl.learn.config import GuardConfig, LogsConfig, OptimizerConfig
from nano_rl.learn.groups import form_groups
from nano_rl.learn.learner import prepare
from nano_rl.learn.metrics import read_metrics
from nano_rl.learn.objectives import ObjectiveConfig
from nano_rl.train import train
from nano_rl.training_record import Watch
from nano_shared.policy import Conversation
from nano_shared.store import LogStore
from nano_shared.types import Completion, Finish, Sampling, StopReason, Task, Trajectory, Turn, TurnTokens

FAST = OptimizerConfig(learning_rate=1e-3)
CONFIG = TrainConfig(
    steps=2,
    prompts_per_step=2,
    group_size=0,
    updates_per_step=2,
    minibatches=2,
    lambda_sft=0.1,
    imitate="log",
    logs=LogsConfig(uses=None),
    objective=ObjectiveConfig(objective="ppo"),
    optimizer=FAST,
    guards=GuardConfig(mismatch_max=1e9, patience=100),
)


class Stopped(Exception):
    pass


@pytest.fixture(autouse=True)
def keep_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nano_rl.learn.train_step.MIN_ESS", 0.0)
    monkeypatch.setattr("nano_rl.learn.train_step.MAX_DRIFT", None)
    monkeypatch.setattr("nano_rl.learn.guards.SHIFT_MAX", 1e9)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    texts = [m.content for m in first_messages(COMPACT_1, task(0), ())] * 3
    return build_tiny(tmp_path_factory.mktemp("tiny"), texts, hidden=32, layers=1, vocab_size=400)


def task(number: int) -> Task:
    return Task(key=f"task-{number}", prompt=f"Say {number}.")


def run(reader: RunEncoder, number: int, member: int) -> Trajectory:
    context = reader.template.delta(Conversation(first_messages(COMPACT_1, task(number), ())))
    text = f"@submit\n{number + member}"
    sampled = (*reader.template.encoder.text(text), reader.eos_id)
    tokens = TurnTokens(context_ids=context, sampled_ids=sampled, logprobs=(-1.0,) * len(sampled))
    completion = Completion(
        text=text, finish=Finish.STOP, tokens=tokens, sampling=Sampling(), policy_id="tiny"
    )
    calls = DIALECTS[COMPACT_1.dialect].parse(text, COMPACT_1.tools).calls
    turn = Turn(index=0, completion=completion, calls=calls, parser="compact", started=0, ended=0)
    return Trajectory(
        id=f"run-{number}-{member}", task=task(number), turns=(turn,), stop=StopReason.FINISHED,
        runtime_version="0", profile=COMPACT_1.name, profile_hash=COMPACT_1.hash,
        template_hash=reader.template.template_hash, tools_hash=COMPACT_1.tools_hash, policy="tiny",
        started=0.0, verdict=verdict(float(member == 0)),
    )  # fmt: skip


def trained(tiny: Path, folder: Path, log: Path, on_step: Any = lambda *_: None) -> dict[str, torch.Tensor]:
    opened = open_weights(str(tiny))
    reader = reader_of(opened)
    runs = [run(reader, number, member) for number in range(2) for member in range(2)]
    store = LogStore.open(log)
    known = {one.id for one in store.trajectories()}
    for one in runs:
        if one.id not in known:
            store.append(one)
    runtime = Runtime(policy=ScriptedPolicy([]), sandbox=open_sandbox(), store=store, policy_name="tiny")
    model = prepare(opened.loaded.model, lora_rank=0, seed=0)
    sources = Sources(logged=tuple(form_groups(runs)))
    used = train(model, opened, runtime, sources, CONFIG, folder, Watch(on_step))
    # the demonstrations are in the weights too
    assert {"run-0-0", "run-1-0"} <= set(used)
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.slow
def test_a_ppo_training_with_a_mixed_loss_goes_on_bit_for_bit(tiny: Path, tmp_path: Path) -> None:
    whole = trained(tiny, tmp_path / "whole", tmp_path / "log.db")
    first, second = read_metrics(tmp_path / "whole" / "metrics.jsonl")
    assert first["updates"] == 4
    assert first["value_loss"] > 0
    assert first["sft_tokens"] > 0
    assert first["share_sft"] + first["share_policy"] + first["share_kl"] == pytest.approx(1)
    assert first["value_mean"] == 0
    # the critic has learned something between the steps
    assert second["value_mean"] != 0

    def stop(done: int, *_: object) -> None:
        raise Stopped

    with pytest.raises(Stopped):
        trained(tiny, tmp_path / "halved", tmp_path / "log.db", stop)
    resumed = trained(tiny, tmp_path / "halved", tmp_path / "log.db")
    rows = read_metrics(tmp_path / "halved" / "metrics.jsonl")
    assert rows[1]["value_loss"] == second["value_loss"]
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
