"""Training under the curriculum: interrupted and resumed, it does bit for bit what it would have done."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from integration.tiny_model import build_tiny
from nano_coder.agent.profiles import COMPACT_1, first_messages
from nano_coder.models.opening import open_weights
from nano_coder.models.scripted import ScriptedPolicy
from nano_coder.run.execution import Runtime
from nano_coder.sandbox.protocol import open_sandbox
from nano_rl.config import TrainConfig
from nano_rl.gather.step_groups import Curriculum, Sources, open_curriculum
from nano_rl.learn.config import GuardConfig
from nano_rl.learn.learner import prepare
from nano_rl.learn.metrics import read_metrics
from nano_rl.train import train
from nano_shared.errors import CheckpointError
from nano_shared.store import LogStore
from nano_shared.types import Sampling, Split
from nano_suites.drawing import make_tasks

TASKS = make_tasks(levels=[0, 1], n=8, seed=1, split=Split.TRAIN, views=["copy", "choose"])
CONFIG = TrainConfig(
    steps=3, prompts_per_step=2, group_size=2, save_every=1, guards=GuardConfig(patience=100)
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    texts = [m.content for t in TASKS for m in first_messages(COMPACT_1, t, ())]
    return build_tiny(
        tmp_path_factory.mktemp("tiny"), texts, hidden=64, layers=2, max_positions=256, vocab_size=400
    )


def run(
    tiny: Path, log: Path, folder: Path, steps: int, name: str, *, resume: bool = False
) -> tuple[dict[str, torch.Tensor], Curriculum]:
    folder.mkdir(exist_ok=True)
    curriculum = open_curriculum(name, TASKS, CONFIG)
    opened = open_weights(str(tiny))
    model = prepare(opened.loaded.model, lora_rank=0, seed=0)
    with LogStore.open(log) as store:
        runtime = Runtime(
            policy=ScriptedPolicy([]), sandbox=open_sandbox(), store=store,
            sampling=Sampling(temperature=1.0, max_tokens=8),
        )  # fmt: skip
        config = CONFIG.model_copy(update={"steps": steps, "resume": resume})
        sources = Sources(tasks=tuple(TASKS), curriculum=curriculum)
        train(model, opened, runtime, sources, config, folder)
    return {name: p.detach().clone() for name, p in model.named_parameters()}, curriculum


WEAKEST = Path(__file__).parents[3] / "examples/plugins/src/nano_example_plugins/weakest.py"


@pytest.mark.parametrize("name", ["levels", f"{WEAKEST}:Weakest"])
def test_a_resumed_training_draws_the_same_tasks_and_ends_with_the_same_weights(
    tiny: Path, tmp_path: Path, name: str
) -> None:
    whole, one = run(tiny, tmp_path / "a.db", tmp_path / "a", 3, name)
    run(tiny, tmp_path / "b.db", tmp_path / "b", 1, name)
    other_name = "levels" if name != "levels" else f"{WEAKEST}:Weakest"
    with pytest.raises(CheckpointError, match="the training began with the curriculum"):
        run(tiny, tmp_path / "b.db", tmp_path / "b", 3, other_name, resume=True)
    resumed, other = run(tiny, tmp_path / "b.db", tmp_path / "b", 3, name, resume=True)
    assert one.state() == other.state()
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    first, second = (read_metrics(tmp_path / name / "metrics.jsonl") for name in "ab")
    assert [m.get("curriculum_level") for m in first] == [m.get("curriculum_level") for m in second]
    assert len(first) == 3
