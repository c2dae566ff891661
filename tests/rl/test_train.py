"""The training loop on a real tiny model, a real jail and a real log."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from integration.tiny_model import build_tiny
from nano_coder.agent.chat_template import ChatTemplate
from nano_coder.agent.profiles import COMPACT_1, first_messages
from nano_coder.models.opening import OpenedWeights, local_policy, open_weights
from nano_coder.models.scripted import ScriptedPolicy
from nano_coder.run.execution import Runtime
from nano_coder.sandbox.protocol import open_sandbox
from nano_coder.verify.trainable import verify
from nano_rl.checkpoints.checkpoint import Learned, save_checkpoint
from nano_rl.config import SftConfig, TrainConfig
from nano_rl.gather.rollouts import ORACLE, collect, execute, oracle_policy
from nano_rl.gather.step_groups import Sources
from nano_rl.imitation import imitation_samples, train_sft
from nano_rl.learn.config import GuardConfig, LogsConfig, OptimizerConfig
from nano_rl.learn.learner import prepare
from nano_rl.learn.metrics import read_metrics
from nano_rl.learn.objectives import ObjectiveConfig
from nano_rl.logs.logged_groups import LogContents, lineage, read_logs
from nano_rl.train import train
from nano_shared.errors import CheckpointError
from nano_shared.policy import Conversation
from nano_shared.store import LogStore
from nano_shared.types import Sampling, Split
from nano_suites.drawing import make_tasks

TASKS = make_tasks(levels=[0], n=6, seed=1, split=Split.TRAIN, views=["copy"])
CONFIG = TrainConfig(
    steps=2,
    prompts_per_step=2,
    group_size=3,
    save_every=1,
    optimizer=OptimizerConfig(learning_rate=1e-3),
    guards=GuardConfig(patience=100),
    logs=LogsConfig(uses=None),
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that has learned to submit, if not what."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("tiny")
    texts = [m.content for t in TASKS for m in first_messages(COMPACT_1, t, ())] + [
        "@submit\n" + str(i) for i in range(99)
    ]
    return build_tiny(folder, texts, hidden=64, layers=2, max_positions=256, vocab_size=400)


@pytest.fixture
def runtime(tmp_path: Path) -> Runtime:
    store = LogStore.open(tmp_path / "log.db")
    sampling = Sampling(temperature=1.0, max_tokens=12)
    return Runtime(policy=ScriptedPolicy([]), sandbox=open_sandbox(), store=store, sampling=sampling)


def live(opened: OpenedWeights, runtime: Runtime) -> Runtime:
    return replace(runtime, policy=local_policy(opened.loaded, opened.profile))


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def logged_groups(runtime: Runtime, opened: OpenedWeights) -> None:
    """Runs with mixed verdicts for each task, whatever the untrained policy wrote."""
    runs = collect(TASKS, live(opened, runtime), group_size=4, seed=5)
    for index, run in enumerate(runs):
        assert run.verdict is not None
        verdict = run.verdict.model_copy(update={"reward": float(index % 2), "grader": "test-1"})
        runtime.store.add_verdict(run.id, verdict)


def test_the_same_seed_gives_the_same_rollouts(tiny: Path, runtime: Runtime) -> None:
    opened = open_weights(str(tiny))
    first, second = (collect(TASKS, live(opened, runtime), group_size=2, seed=3) for _ in range(2))
    tokens = [[turn.completion.tokens for turn in run.turns] for run in first]
    assert tokens == [[turn.completion.tokens for turn in run.turns] for run in second]
    assert tokens != [
        [t.completion.tokens for t in r.turns]
        for r in collect(TASKS, live(opened, runtime), group_size=2, seed=4)
    ]


def test_ac_36_logged_logprobs_are_those_of_the_weights(tiny: Path, runtime: Runtime) -> None:
    opened = open_weights(str(tiny))
    policy = local_policy(opened.loaded, opened.profile)
    for run in collect(TASKS, replace(runtime, policy=policy), group_size=2, seed=3):
        row: list[int] = []
        logged: list[float] = []
        sampled: list[int] = []
        for turn in run.turns:
            tokens = turn.completion.tokens
            assert tokens is not None
            row += tokens.context_ids
            sampled += range(len(row), len(row) + len(tokens.sampled_ids))
            row += tokens.sampled_ids
            logged += tokens.logprobs
        (scores,) = policy.engine.score([tuple(row)])
        assert [scores[i - 1] for i in sampled] == pytest.approx(logged, abs=1e-4)


def test_ac_35_a_logged_run_can_be_rendered_again(tiny: Path, runtime: Runtime) -> None:
    opened = open_weights(str(tiny))
    (run,) = collect(TASKS[:1], live(opened, runtime))
    logged = runtime.store.get(run.id)
    template = ChatTemplate(opened.loaded.chat_template, opened.loaded.tokenizer)
    assert logged.template_hash == template.template_hash
    assert (logged.profile_hash, logged.tools_hash) == (opened.profile.hash, opened.profile.tools_hash)
    asked = Conversation(first_messages(opened.profile, logged.task, ()))
    assert logged.turns[0].completion.tokens is not None
    assert logged.turns[0].completion.tokens.context_ids == template.delta(asked)
    # what would have been rendered otherwise bears another hash
    other = ChatTemplate(opened.loaded.chat_template + " ", opened.loaded.tokenizer)
    assert other.template_hash != logged.template_hash


def admitted(runtime: Runtime, opened: OpenedWeights) -> LogContents:
    template = local_policy(opened.loaded, opened.profile).template_hash
    config = CONFIG.model_copy(update={"group_size": 0})
    return read_logs([runtime.store], opened, template, lineage(opened), config)


def test_ac_15_the_first_update_has_ratio_exactly_one(tiny: Path, runtime: Runtime, tmp_path: Path) -> None:
    opened = open_weights(str(tiny))
    logged_groups(runtime, opened)
    groups = admitted(runtime, opened).groups
    model = prepare(opened.loaded.model, lora_rank=0, seed=0)
    config = CONFIG.model_copy(update={"group_size": 0, "steps": 1})
    train(model, opened, runtime, Sources(logged=groups), config, tmp_path)
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    assert row["ratio_deviation_max"] == 0
    assert row["clip_low"] == row["clip_high"] == 0
    assert row["mismatch_max"] < 1e-4


def test_a_stopped_training_continues_bit_for_bit(tiny: Path, runtime: Runtime, tmp_path: Path) -> None:
    def run(folder: Path, *stops: int) -> dict[str, torch.Tensor]:
        for number, steps in enumerate(stops):
            opened = open_weights(str(tiny))
            model = prepare(opened.loaded.model, lora_rank=0, seed=0)
            folder.mkdir(exist_ok=True)
            config = CONFIG.model_copy(update={"steps": steps, "group_size": 0, "resume": number > 0})
            train(model, opened, runtime, Sources(logged=groups), config, folder)
        return weights(model)

    opened = open_weights(str(tiny))
    logged_groups(runtime, opened)
    groups = admitted(runtime, opened).groups
    at_once, in_two = run(tmp_path / "a", 4), run(tmp_path / "b", 2, 4)
    assert all(torch.equal(at_once[name], in_two[name]) for name in at_once)
    assert [row["step"] for row in read_metrics(tmp_path / "b" / "metrics.jsonl")] == [0, 1, 2, 3]


@pytest.mark.slow
def test_fresh_rollouts_join_the_logged_groups(tiny: Path, runtime: Runtime, tmp_path: Path) -> None:
    opened = open_weights(str(tiny))
    logged_groups(runtime, opened)
    groups = admitted(runtime, opened).groups
    model = prepare(opened.loaded.model, lora_rank=0, seed=0)
    config = CONFIG.model_copy(update={"steps": 1, "group_size": 6, "logs": LogsConfig()})
    used = train(model, opened, runtime, Sources(logged=groups), config, tmp_path)
    assert len(used) == config.prompts_per_step * 6
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    assert (row["logged_runs"], row["fresh_runs"], row["log_share"]) == (6, 6, 0.5)


@pytest.mark.slow
def test_the_reference_is_the_start_so_its_kl_is_zero_at_first(
    tiny: Path, runtime: Runtime, tmp_path: Path
) -> None:
    opened = open_weights(str(tiny))
    logged_groups(runtime, opened)
    groups = admitted(runtime, opened).groups
    model = prepare(opened.loaded.model, lora_rank=0, seed=0)
    config = CONFIG.model_copy(update={"group_size": 0, "objective": ObjectiveConfig(beta=0.1)})
    train(model, opened, runtime, Sources(logged=groups), config, tmp_path)
    first, second = read_metrics(tmp_path / "metrics.jsonl")
    assert first["kl_reference"] == 0
    assert second["kl_reference"] > 0


def test_imitation_lowers_the_loss_and_the_checkpoint_serves(
    tiny: Path, runtime: Runtime, tmp_path: Path
) -> None:
    oracles = execute(
        TASKS, [oracle_policy(t, COMPACT_1) for t in TASKS], replace(runtime, policy_name=ORACLE)
    )
    assert [run.reward for run in oracles] == [1.0] * len(TASKS)
    opened = open_weights(str(tiny))
    template = local_policy(opened.loaded, opened.profile).template
    samples = [
        row
        for run in oracles
        for row in imitation_samples(run, opened.profile, template, opened.loaded.tokenizer.eos_token_id)
    ]
    config = SftConfig(
        epochs=30, batch=6, lora_rank=8, optimizer=OptimizerConfig(learning_rate=2e-2, schedule="linear")
    )
    model = prepare(opened.loaded.model, lora_rank=8, seed=0)
    steps = train_sft(model, samples, config, tmp_path, lambda *_: None)
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.5

    target = tmp_path / "checkpoint"
    manifest = save_checkpoint(
        target, model, opened, parent=str(tiny), config=config,
        learned=Learned(steps=steps, run_ids=[r.id for r in oracles], tasks=TASKS),
    )  # fmt: skip
    assert (manifest.kind, manifest.profile, manifest.policy_version) == ("adapter", "compact-1", steps)
    served = open_weights(str(target))
    assert served.version == steps
    run = collect(TASKS[:1], live(served, runtime), seed=0)[0]
    assert run.template_hash == manifest.template_hash

    weights_file = target / "adapter_model.safetensors"
    weights_file.write_bytes(weights_file.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors is corrupt"):
        open_weights(str(target))


@pytest.mark.slow
def test_admission_names_each_reason(tiny: Path, runtime: Runtime) -> None:
    opened = open_weights(str(tiny))
    execute(TASKS, [oracle_policy(t, COMPACT_1) for t in TASKS], runtime)
    logged_groups(runtime, opened)
    admission = admitted(runtime, opened)
    assert admission.runs == len(TASKS) * 4
    assert admission.refused == {"text-only": len(TASKS)}
    group = admission.groups[0].load()
    assert group is not None
    assert not any(f.blocks for run in group.trajectories for f in verify(run))
