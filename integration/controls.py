"""What each control of an objective does to the tiny policy: a curve with it and without it.

The reward of a rollout is the share of its tokens with an even id, which a policy with random weights learns
in some twenty steps, losing its entropy. Four pairs of trainings from the same weights and tasks:

    temperature   from 2 to 0.5: entropy of the rollouts
    entropy       a bonus while the entropy is below a target: entropy
    kl            beta adapted to a target: KL to the reference
    reference     refreshed every 10 steps: KL to the reference

    python integration/controls.py --out FOLDER              about half a minute an arm on one thread
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch

from nano_coder.agent.profiles import COMPACT_1
from nano_coder.agent.prompt import first_messages
from nano_coder.models.opening import open_weights
from nano_coder.models.scripted import ScriptedPolicy
from nano_coder.run.execution import Runtime
from nano_coder.sandbox.backend import open_sandbox
from nano_rl.config.training import TrainConfig
from nano_rl.gather.sources import Sources
from nano_rl.learn.config import GuardConfig, ObjectiveConfig, OptimizerConfig
from nano_rl.learn.metrics import METRICS, MetricsRow, read_metrics
from nano_rl.learn.model.learner import prepare
from nano_rl.rewards import Reward
from nano_rl.tasks.make import make_tasks
from nano_rl.tiny_model import build_tiny
from nano_rl.train import train
from nano_shared.store import LogStore
from nano_shared.types import Sampling, Split, Task, Trajectory, Trust, Verdict

HEAD = (
    "from nano_rl.learn.config import Objective\nfrom nano_rl.learn.objectives.clip import clipped\n"
    "from nano_rl.learn.objectives.controls import *\nARM = Objective(surrogate=clipped, controls=("
)
ARMS = {
    "temperature": ("TemperatureSchedule(start=2.0, end=0.5, steps={steps})", 0.0, "entropy"),
    "entropy": ("EntropyTarget(target=4.5, rate=0.02)", 0.0, "entropy"),
    "kl": ("AdaptiveKL(target=0.05, gain=0.3)", 0.02, "kl_reference"),
    "reference": ("ReferenceRefresh(every=10)", 0.02, "kl_reference"),
}
"""name -> its control, beta, and the metric that is drawn"""


class Even(Reward):
    """The share of sampled tokens with an even id."""

    def __init__(self) -> None:
        pass

    def apply(self, runs: Sequence[Trajectory], runtime: Runtime) -> list[Trajectory]:
        return [run.model_copy(update={"verdict": _verdict(run)}) for run in runs]


def _verdict(run: Trajectory) -> Verdict:
    ids = [i for turn in run.turns if turn.completion.tokens for i in turn.completion.tokens.sampled_ids]
    share = sum(i % 2 == 0 for i in ids) / max(1, len(ids))
    return Verdict(reward=share, trust=Trust.HIDDEN, grader="even-1", graded_hash="")


def run_arm(folder: Path, tasks: tuple[Task, ...], control: str, beta: float, steps: int) -> list[MetricsRow]:
    """The metrics of one training; `control` may be empty."""
    folder.mkdir(parents=True, exist_ok=True)
    written = folder / "arm.py"
    written.write_text(f"{HEAD}{control.format(steps=steps)},))\n" if control else f"{HEAD}))\n")
    opened = open_weights(str(folder.parent / "tiny"))
    config = TrainConfig(
        steps=steps, prompts_per_step=4, group_size=8, save_every=steps,
        optimizer=OptimizerConfig(learning_rate=5e-3), guards=GuardConfig(patience=1000),
        objective=ObjectiveConfig(objective=f"{written}:ARM", beta=beta),
    )  # fmt: skip
    with LogStore.open(folder / "log.db") as store:
        runtime = Runtime(
            policy=ScriptedPolicy([]), sandbox=open_sandbox(), store=store, sampling=Sampling(max_tokens=12)
        )
        model = prepare(opened.loaded.model, lora_rank=0, seed=0)
        sources = Sources(tasks=tasks)
        train(model, opened, runtime, sources, config, folder, lambda *_: None, reward=Even())
    return read_metrics(folder / METRICS)


def draw(curves: dict[str, dict[str, list[float | None]]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6), layout="constrained")
    for plot, (name, lines) in zip(figure.subplots(2, 2).flat, curves.items(), strict=True):
        for label, values in lines.items():
            plot.plot(values, label=label)
        plot.set(title=name, xlabel="step", ylabel=ARMS[name][2])
        plot.legend()
    figure.savefig(path)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    tasks = tuple(
        task.model_copy(update={"limits": task.limits.model_copy(update={"max_turns": 1})})
        for task in make_tasks(levels=[0], n=8, seed=1, split=Split.TRAIN, views=["copy"])
    )
    texts = [m.content for t in tasks for m in first_messages(COMPACT_1, t, ())]
    if not (options.out / "tiny").exists():
        build_tiny(
            options.out / "tiny", texts, hidden=32, layers=1, max_positions=256, vocab_size=300, seed=0
        )
    curves: dict[str, dict[str, list[float | None]]] = {}
    for name in options.arms:
        control, beta, metric = ARMS[name]
        for label, used in (("without", ""), ("with", control)):
            rows = run_arm(options.out / f"{name}-{label}", tasks, used, beta, options.steps)
            curves.setdefault(name, {})[label] = [row.get(metric) for row in rows]
            last, reward = rows[-1].get(metric) or 0.0, rows[-1].get("reward") or 0.0
            print(f"{name:<12}{label:<8}{metric} {last:.3f}  reward {reward:.2f}", flush=True)
    (options.out / "controls.json").write_text(json.dumps(curves, indent=1) + "\n")
    if set(options.arms) == set(ARMS):
        draw(curves, options.out / "controls.svg")


if __name__ == "__main__":
    main()
