"""The lesson `examples/from_scratch`: its gradient is that of nano_rl, its mask is exact, and it learns."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import pytest
import torch
from builders import exact, trajectory, turn

from nano_rl.config import TrainConfig
from nano_rl.learn.advantages import RolloutBatch, credit_group
from nano_rl.learn.batch import Batch, make_batches
from nano_rl.learn.config import GuardConfig, OptimizerConfig
from nano_rl.learn.groups import Group
from nano_rl.learn.learner import Learner
from nano_rl.learn.logprob import token_logprobs
from nano_rl.learn.train_step import PolicyLoss, StepRows, Updater
from nano_shared.errors import GuardTripped
from nano_shared.types import Turn

ROOT = Path(__file__).parents[2]
LESSON = ROOT / "examples" / "from_scratch"
sys.path.insert(0, str(LESSON))

import environment as world  # noqa: E402
import trainer as lesson  # noqa: E402
from policy import Completion, Policy  # noqa: E402
from rollout_worker import RolloutWorker, Trajectory  # noqa: E402

sys.path.remove(str(LESSON))

RATE = 1e-2
PASSES = 2
CONFIG = TrainConfig(
    steps=1, updates_per_step=PASSES, guards=GuardConfig(patience=100),
    optimizer=OptimizerConfig(learning_rate=RATE),
)  # fmt: skip
REWARDS = {
    "a pair": [[1.0, 0.0]],
    "a group of eight": [[1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0]],
    "three groups": [[1.0, 0.0, 0.0], [0.0, 1.0, 1.0], [1.0, 0.0, 1.0]],
    "unequal groups, one without a signal": [[1.0, 0.0], [1.0, 1.0, 1.0], [0.0, 0.3, 1.4, 0.1]],
}
"""[groups][G]"""
shapes = pytest.mark.parametrize("rewards", REWARDS.values(), ids=REWARDS)


class Recorder(Policy):
    """Keeps what it sampled, in order of the rows' prompts."""

    def __init__(self, words: Sequence[str], seed: int) -> None:
        super().__init__(words, seed)
        self.sampled: dict[tuple[int, ...], Completion] = {}

    def complete(self, rows: Sequence[Sequence[int]]) -> list[Completion]:
        completions = super().complete(rows)
        assert len(rows) == 1  # one run at a time, so that a row tells whose it is
        self.sampled[tuple(rows[0])] = completions[0]
        return completions


def small_trainer(policy: Policy | None = None, *, observation_mask: int = 0) -> lesson.Trainer:
    """The lesson's trainer, of an untrained policy in float64."""
    environment = world.Environment()
    policy = policy or Policy(environment.words, seed=0)
    exact(policy.model.double())
    worker = RolloutWorker(policy, environment, observation_mask=observation_mask)
    return lesson.Trainer(worker, learning_rate=RATE, passes=PASSES)


def roll_out(trainer: lesson.Trainer, rewards: Sequence[Sequence[float]]) -> list[list[Trajectory]]:
    """A group for each list of rewards, which are given by hand: an untrained policy earns none."""
    tasks = trainer.worker.environment.tasks("test", len(rewards))
    groups = [
        trainer.worker.rollout([task], len(of_group))[0]
        for task, of_group in zip(tasks, rewards, strict=True)
    ]
    return [
        [replace(run, reward=reward) for run, reward in zip(group, of_group, strict=True)]
        for group, of_group in zip(groups, rewards, strict=True)
    ]


def as_logged(groups: Sequence[Sequence[Trajectory]]) -> list[Group]:
    """The same runs as nano-coder logs them."""
    return [
        Group(
            task_key=f"task-{g}",
            trajectories=tuple(
                trajectory(*turns(run), run_id=f"run-{g}-{i}", key=f"task-{g}", reward=run.reward)
                for i, run in enumerate(group)
            ),
        )
        for g, group in enumerate(groups)
    ]


def turns(run: Trajectory) -> list[Turn]:
    """A turn of each stretch of context and the sampled tokens behind it, without the last observation."""
    columns = zip(run.ids, run.mask, run.logprobs, strict=True)
    parts = [list(part) for _, part in groupby(columns, key=lambda column: column[1])]
    return [
        turn(
            [token for token, *_ in context], [token for token, *_ in sampled],
            logprobs=[logprob for *_, logprob in sampled], index=index,
        )
        for index, (context, sampled) in enumerate(zip(parts[::2], parts[1::2], strict=False))
    ]  # fmt: skip


def nano_rows(model: torch.nn.Module, groups: Sequence[Group]) -> tuple[Updater, StepRows]:
    updater = Updater(learner=Learner(model, CONFIG.optimizer, steps=1), config=CONFIG)
    terms = CONFIG.objective.terms
    credited = [credit_group(group, terms, None) for group in groups]
    return updater, updater.credit(RolloutBatch(credited=credited), 0)


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_equal(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], *, within: float = 1e-6
) -> None:
    """Each tensor, within so much of its norm."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert value.norm() > 0, name
        assert (found[name] - value).norm() <= within * value.norm(), name


@shapes
@pytest.mark.parametrize("moved", [False, True], ids=["as sampled", "after an update"])
def test_its_gradient_is_that_of_nano_rl(rewards: list[list[float]], moved: bool) -> None:
    """Of every parameter. After an update ratios differ from 1, and some are clipped."""
    trainer = small_trainer()
    groups, model = roll_out(trainer, rewards), trainer.policy.model
    _, rows = nano_rows(model, as_logged(groups))
    batches = [with_old(model, batch) for batch in make_batches(rows.samples, max_tokens=128)]
    batch = trainer.credit(groups)
    assert batch is not None
    if moved:
        trainer.learn(batch)
        model.zero_grad()
    loss, ratio_N = lesson.policy_loss(trainer.policy.logprobs(batch.ids_BT), batch)
    loss.backward()
    assert bool(((ratio_N - 1).abs() > lesson.CLIP).any()) is moved
    of_lesson = gradients(model)
    assert len(of_lesson) == len(list(model.parameters()))

    objective = PolicyLoss(objective=CONFIG.objective.terms)
    parts = [objective(model, of_part)[0] for of_part in batches]
    torch.stack(parts).sum().backward()
    assert_equal(gradients(model), of_lesson)


def with_old(model: torch.nn.Module, batch: Batch) -> Batch:
    with torch.no_grad():
        return batch.with_old(token_logprobs(model, batch))


@shapes
def test_a_step_of_it_leaves_the_weights_of_nano_rl(rewards: list[list[float]]) -> None:
    """Two passes with gradient clipping and AdamW, which divides a tiny gradient by its size, and so enlarges
    its rounding."""
    trainer = small_trainer()
    groups, model = roll_out(trainer, rewards), trainer.policy.model
    start = {name: value.clone() for name, value in model.state_dict().items()}
    updater, rows = nano_rows(model, as_logged(groups))
    updater.update(rows, {"step": 0.0}, None, 0)
    of_nano = {name: value - start[name] for name, value in model.state_dict().items()}

    model.load_state_dict(start)
    batch = trainer.credit(groups)
    assert batch is not None
    trainer.learn(batch)
    of_lesson = {name: value - start[name] for name, value in model.state_dict().items()}
    assert_equal(of_lesson, of_nano, within=1e-4)


def test_the_mask_is_1_exactly_on_sampled_tokens() -> None:
    environment = world.Environment()
    policy = Recorder(environment.words, seed=0)
    trainer = small_trainer(policy)
    some_observed = False
    for task in environment.tasks("test", 12):
        ((run,),) = trainer.worker.rollout([task], 1)
        session = environment.start(task)
        ids, mask, logprobs = policy.encode(task.prompt), [0] * len(task.prompt.split()), []
        logprobs = [0.0] * len(ids)
        while not session.done:
            completion = policy.sampled[tuple(ids)]
            observation = policy.encode(session.step(policy.decode(completion.ids)))
            some_observed |= bool(observation)
            ids += [*completion.ids, *observation]
            mask += [1] * len(completion.ids) + [0] * len(observation)
            logprobs += [*completion.logprobs, *[0.0] * len(observation)]
        assert (run.ids, run.mask, run.logprobs) == (ids, mask, logprobs)
        recomputed = policy.logprobs(torch.tensor([run.ids]))[0] * torch.tensor(run.mask)
        assert recomputed.tolist() == pytest.approx(run.logprobs, abs=1e-9)
    assert some_observed


@pytest.mark.parametrize("task", world.Environment().tasks("test", 30), ids=lambda task: task.prompt)
def test_oracles_earn_1_and_a_demonstration_trains_its_actions_alone(task: world.Task) -> None:
    trainer = small_trainer()
    run = trainer.worker.demonstrate(task, task.oracle)
    assert run.reward == 1.0
    trained = [token for token, mask in zip(run.ids, run.mask, strict=True) if mask]
    assert trainer.policy.decode(trained) == " ".join(task.oracle)


@pytest.mark.parametrize(
    ("action", "observation"),
    [("calculate 5 + 3", "8"), ("calculate 1 2 0 / 8", "1 5"), ("calculate 5 / 0", "error"),
     ("calculate + 3", "error"), ("search Acme", "error"), ("what is 5", "error"), ("", "error")],
)  # fmt: skip
def test_a_tool_answers_or_says_error(action: str, observation: str) -> None:
    session = world.Environment().start(world.Environment().tasks("test", 1)[0])
    assert session.step(action) == observation
    assert (session.done, session.grade()) == (False, 0.0)


def test_the_wrong_mask_is_seen_in_the_ratio() -> None:
    """Observations were not sampled: their log-prob of 0 makes a ratio below 1, where it must be 1."""
    ratios = {}
    for observation_mask in (0, 1):
        trainer = small_trainer(observation_mask=observation_mask)
        batch = trainer.credit(roll_out(trainer, [[1.0, 0.0] * 4]))
        assert batch is not None
        ratios[observation_mask] = trainer.learn(batch)[0].mean().item()
    assert ratios[0] == pytest.approx(1.0, abs=1e-9)
    assert ratios[1] < 0.95


def test_nano_rl_refuses_the_wrong_mask() -> None:
    trainer = small_trainer(observation_mask=1)
    groups = roll_out(trainer, [[1.0, 0.0] * 4])
    updater, rows = nano_rows(trainer.policy.model, as_logged(groups))
    with pytest.raises(GuardTripped, match="log-prob"):
        updater.update(rows, {"step": 0.0}, None, 0)


def test_a_group_of_equal_rewards_is_left_out() -> None:
    trainer = small_trainer()
    assert trainer.credit(roll_out(trainer, [[1.0, 1.0], [0.0, 0.0]])) is None


def test_a_few_steps_lift_the_reward() -> None:
    before, after = lesson.train(warm_start=150, steps=3)
    assert after > before + 0.1


def test_a_seed_repeats_it() -> None:
    found = []
    for _ in range(2):
        trainer = small_trainer()
        trainer.imitate("demonstrations", count=4)
        batch = trainer.credit(roll_out(trainer, [[1.0, 0.0]]))
        assert batch is not None
        trainer.learn(batch)
        found.append(trainer.policy.model.state_dict())
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


@pytest.mark.slow
@pytest.mark.parametrize("seed", ["0", "1"])
def test_thirty_steps_lift_the_reward_clearly(seed: str) -> None:
    done = subprocess.run(
        [sys.executable, LESSON / "trainer.py", "--seed", seed], capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    assert sum(line.startswith("step ") for line in lines) == 30
    before, after = (float(re.findall(r"reward (\S+)", line)[0]) for line in (lines[0], lines[-1]))
    assert after > before + 0.25


def test_it_is_read_in_one_sitting() -> None:
    sources = {path.name: path.read_text(encoding="utf-8") for path in LESSON.glob("*.py")}
    assert set(sources) == {"environment.py", "policy.py", "rollout_worker.py", "trainer.py"}
    assert sum(len(source.splitlines()) for source in sources.values()) < 500
    assert not any(
        "nano_" in line for source in sources.values() for line in source.splitlines() if "import" in line
    )
    assert len((LESSON / "README.md").read_text(encoding="utf-8").split()) <= 600
