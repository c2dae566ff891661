"""A training loop small enough for a test: a tiny model, short tasks, and rewards that vary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from integration.tiny_model import build_tiny
from nano_coder.agent.profiles import COMPACT_1, first_messages
from nano_coder.models.opening import open_weights
from nano_coder.models.scripted import ScriptedPolicy
from nano_coder.run.execution import Runtime
from nano_coder.sandbox.protocol import open_sandbox
from nano_rl.config import TrainConfig
from nano_rl.gather.step_groups import Sources
from nano_rl.learn.config import GuardConfig, LogsConfig, OptimizerConfig
from nano_rl.learn.groups import Group, form_groups
from nano_rl.learn.learner import prepare
from nano_rl.rewards import Reward
from nano_rl.train import train
from nano_rl.training_record import Watch
from nano_shared.store import LogStore
from nano_shared.types import Sampling, Split, Task, Trajectory, Trust, Verdict
from nano_suites.drawing import make_tasks

torch.set_num_threads(1)

TASKS = tuple(
    task.model_copy(update={"limits": task.limits.model_copy(update={"max_turns": 1})})
    for task in make_tasks(levels=[0], n=5, seed=1, split=Split.TRAIN, views=["copy"])
)
PATIENT = GuardConfig(patience=100)
CONFIG = TrainConfig(
    steps=3, prompts_per_step=2, group_size=2, optimizer=OptimizerConfig(learning_rate=1e-3), guards=PATIENT,
    logs=LogsConfig(uses=None),
)  # fmt: skip
Score = Callable[[Trajectory], float | None]


class Given(Reward):
    """Rewards by a function of the run, in place of the grader's."""

    def __init__(self, score: Score) -> None:
        object.__setattr__(self, "parts", {})
        object.__setattr__(self, "gate", score)

    def apply(self, runs: Sequence[Trajectory], runtime: Runtime) -> list[Trajectory]:
        score: Score = self.gate  # type: ignore[assignment]
        return [scored(run, score(run)) for run in runs]


def alternating() -> Score:
    """0 and 1 in turn for the runs of each task, so that every group has a signal."""
    given: dict[str, list[str]] = {}

    def score(run: Trajectory) -> float:
        runs = given.setdefault(run.task.key, [])
        if run.id not in runs:
            runs.append(run.id)
        return float(runs.index(run.id) % 2)

    return score


def scored(run: Trajectory, reward: float | None) -> Trajectory:
    verdict = Verdict(reward=reward, trust=Trust.HIDDEN, grader="given-1", graded_hash="")
    return run.model_copy(update={"verdict": verdict})


def parity(run: Trajectory) -> float:
    """0 or 1 by the sampled tokens alone, so that groups have a signal more often than not."""
    return float(sum(sum(t.completion.tokens.sampled_ids) for t in run.turns if t.completion.tokens) % 2)


def tiny_model(folder: Path, seed: int = 0, max_positions: int = 256, tasks: Sequence[Task] = TASKS) -> Path:
    texts = [m.content for t in tasks for m in first_messages(COMPACT_1, t, ())]
    return build_tiny(
        folder, texts, hidden=32, layers=1, max_positions=max_positions, vocab_size=300, seed=seed
    )


def runtime_at(log: Path, name: str = "tiny") -> Runtime:
    return Runtime(
        policy=ScriptedPolicy([]), sandbox=open_sandbox(), store=LogStore.open(log),
        sampling=Sampling(max_tokens=8), policy_name=name,
    )  # fmt: skip


class Loop:
    """One training of a tiny model: `go` begins it or goes on with it, each time in a fresh module."""

    def __init__(self, tiny: Path, folder: Path) -> None:
        self.tiny, self.folder = tiny, folder
        folder.mkdir(parents=True, exist_ok=True)
        self.model: torch.nn.Module
        self.used: list[str] = []

    def go(
        self,
        config: TrainConfig = CONFIG,
        *,
        sources: Sources | None = None,
        score: Score | None = parity,
        reward: Reward | None = None,
        on_step: Callable[..., None] = lambda *_: None,
        on_run: Callable[[torch.nn.Module, Trajectory], None] = lambda *_: None,
        before: Callable[[torch.nn.Module], None] = lambda _: None,
        name: str = "tiny",
        **changed: object,
    ) -> dict[str, torch.Tensor]:
        """The weights at the end. `before` may change the model that training begins from."""
        opened = open_weights(str(self.tiny))
        self.model = prepare(opened.loaded.model, lora_rank=config.lora_rank, seed=0)
        before(self.model)
        runtime = runtime_at(self.folder / "log.db", name)
        watch = Watch(on_step, lambda run: on_run(self.model, run))
        with runtime.store:
            self.used = train(
                self.model, opened, runtime,
                replace(sources or Sources(tasks=TASKS), reward=reward or (Given(score) if score else None)),
                config.model_copy(update=changed), self.folder, watch,
            )  # fmt: skip
        return weights(self.model)


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def logged_groups(
    tiny: Path, log: Path, rewards: Sequence[float] = (0.0, 1.0), tasks: Sequence[Task] = TASKS
) -> tuple[Group, ...]:
    """Real runs of the tiny model, each task `len(rewards)` times, with those rewards."""
    from nano_coder.models.opening import local_policy
    from nano_rl.gather.rollouts import collect

    opened = open_weights(str(tiny))
    with (runtime := runtime_at(log)).store:
        live = replace(runtime, policy=local_policy(opened.loaded, opened.profile))
        runs = collect(tasks[:2], live, group_size=len(rewards), seed=5)
    return tuple(form_groups(scored(run, rewards[i % len(rewards)]) for i, run in enumerate(runs)))
