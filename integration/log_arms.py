"""What the experiments on logs share: a tiny policy, its logs, and arms that train from them.

Everything of a seed lies in one folder. What is there is not made again, so that a run that was stopped goes
on, and an arm is done when its JSON file is there.
"""

from __future__ import annotations

import json
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from flywheel import Flywheel, Scale, TaskSets
from scipy.stats import t as student_t

from integration.paired import paired_bootstrap
from nano_coder.models.opening import OpenedWeights, local_policy, open_weights
from nano_coder.models.scripted import ScriptedPolicy
from nano_coder.run.execution import Runtime
from nano_rl.checkpoints.checkpoint import Learned, save_checkpoint
from nano_rl.checkpoints.evaluate import cluster_of, table
from nano_rl.config import SftConfig, TrainConfig
from nano_rl.gather.rollouts import collect
from nano_rl.gather.sources import Sources
from nano_rl.imitation import logged_successes, reader_of, train_sft
from nano_rl.learn.config import GuardConfig, LogsConfig, ObjectiveConfig, OptimizerConfig
from nano_rl.learn.learner import prepare
from nano_rl.learn.metrics import METRICS, read_metrics
from nano_rl.logs.reader import lineage, read_logs
from nano_rl.record import Watch, learned_from
from nano_rl.train import train
from nano_shared.store import LogStore
from nano_shared.types import Sampling, Task

GROUP = 8
_SHOWN = 10
"""steps between lines of progress"""


def by_program(result: dict[str, Any]) -> dict[str, float]:
    """Success of an arm on each held-out program. Two in five tasks ask for the commonest, and all of them
    rise and fall together, so that a mean over tasks tells mostly what became of that one."""
    rewards: dict[str, list[float]] = defaultdict(list)
    for program, reward in zip(result["programs"], result["rewards"], strict=True):
        rewards[program].append(reward)
    return {program: mean(of) for program, of in rewards.items()}


def rate(result: dict[str, Any]) -> float:
    """Success of an arm on held-out programs, each counted once."""
    return mean(by_program(result).values())


def difference(
    one: str, other: str, by_arm: dict[str, dict[int, dict[str, Any]]]
) -> tuple[float, float, float] | None:
    """Mean difference over held-out programs and seeds, paired, and its 95 % interval."""
    seeds = sorted(by_arm[one].keys() & by_arm[other].keys())
    if not seeds:
        return None
    left, right = [], []
    for seed in seeds:
        before = by_program(by_arm[other][seed])
        for program, success in by_program(by_arm[one][seed]).items():
            left.append(success)
            right.append(before[program])
    gained, low, high = paired_bootstrap(left, right, seed=0)
    print(f"{one} - {other}: {gained:+.1%} (95 % interval {low:+.1%} to {high:+.1%}, {len(seeds)} seeds)")
    if len(seeds) > 1:
        gains = [rate(by_arm[one][seed]) - rate(by_arm[other][seed]) for seed in seeds]
        print("  over seeds of training: {:+.1%} ({:+.1%} to {:+.1%})".format(*over_seeds(gains)))
    return gained, low, high


def over_seeds(gains: Sequence[float]) -> tuple[float, float, float]:
    """Mean of the gains of several trainings and its 95 % interval by Student's t: what is to be expected of
    one more training, where the interval over tasks speaks of these trainings alone. Two gains at least."""
    middle = mean(gains)
    half = float(student_t.ppf(0.975, len(gains) - 1)) * stdev(gains) / len(gains) ** 0.5
    return middle, middle - half, middle + half


class Bench:
    """One seed: its tasks, its policies, its logs."""

    def __init__(self, home: Path, scale: Scale, *, seed: int) -> None:
        home.mkdir(parents=True, exist_ok=True)
        self.home, self.scale, self.seed = home, scale, seed
        self.circle = Flywheel(home, scale, seed=seed, shuffle=False)
        self.tasks: TaskSets = self.circle.make_tasks()

    def warm(self) -> Path:
        """The policy that all begins from: a tiny model that has imitated a few oracles."""
        target = self.home / "checkpoints" / "warm"
        return target if target.exists() else self.circle.warm_start(self.tasks)

    def log(self, name: str, checkpoint: Path, tasks: Sequence[Task]) -> LogStore:
        """A log of its own in which the checkpoint tried each task `GROUP` times."""
        folder = self.home / f"log-{name}"
        done = folder / "done"
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            with LogStore.open(folder / "log.db") as store:
                collect(tasks, self.runtime(checkpoint, store), group_size=GROUP, seed=self.seed)
            done.touch()
        return LogStore.open(folder / "log.db")

    def arm(self, name: str, make: Callable[[], Path], **told: Any) -> dict[str, Any]:
        """The result of an arm: that in its file, or that of the checkpoint which `make` trains."""
        path = self.home / f"arm-{name}.json"
        if not path.exists():
            started = time.monotonic()
            checkpoint = make()
            metrics = self.home / "state" / name / METRICS
            rows = read_metrics(metrics) if metrics.exists() else []
            result = {
                "arm": name,
                "seed": self.seed,
                **told,
                **self.success(checkpoint),
                "learned_from": learned_from(rows),
                "curve": [
                    {key: row.get(key) for key in ("reward_mean", "ess", "ess_logged")} for row in rows
                ],
                "seconds": time.monotonic() - started,
            }
            path.write_text(json.dumps(result, indent=2))
        result = json.loads(path.read_text())
        print(f"{name}: {rate(result):.1%} of the held-out programs", flush=True)
        return result

    def success(self, checkpoint: Path) -> dict[str, Any]:
        """Held-out programs, one run a task, sampled as in training: the row of all, and each by itself."""
        with LogStore.open(self.home / "evaluation.db") as store:
            runs = collect(self.tasks.held_out, self.runtime(checkpoint, store), seed=self.seed)
        return {
            "row": asdict(table(runs)[0]),
            "rewards": [run.reward or 0.0 for run in runs],
            "programs": [cluster_of(run.task) for run in runs],
        }

    def train(
        self,
        name: str,
        checkpoint: Path,
        *,
        steps: int,
        prompts: int,
        fresh: int = 0,
        logs: LogsConfig | None = None,
        objective: ObjectiveConfig | None = None,
        stores: Sequence[LogStore] = (),
        tasks: Sequence[Task] = (),
        keep: Sequence[int] = (),
        guards: GuardConfig | None = None,
        reflect: int = 0,
    ) -> Path:
        """Train a checkpoint from logs (`stores`), or on `tasks`; `keep` keeps the weights of those steps.

        Fresh runs are written to a log of the arm's own.
        """
        target = self.home / "checkpoints" / name
        if target.exists():
            return target
        folder = self.home / "state" / name
        folder.mkdir(parents=True, exist_ok=True)
        config = TrainConfig(
            steps=steps,
            prompts_per_step=prompts,
            group_size=fresh,
            seed=self.seed,
            save_every=10,
            optimizer=OptimizerConfig(learning_rate=self.scale.learning_rate),
            objective=objective or ObjectiveConfig(),
            logs=logs or LogsConfig(),
            guards=guards or GuardConfig(patience=steps + 1),
            reflect=reflect,
        )
        opened = open_weights(str(checkpoint))
        model = prepare(opened.loaded.model, lora_rank=0, seed=self.seed)

        def on_step(done: int, total: int, values: dict[str, float]) -> None:
            if done % _SHOWN == 0 or done == total:
                told = "  ".join(f"{k} {values[k]:.3f}" for k in ("reward_mean", "ess_logged") if k in values)
                print(f"   {name}: step {done}/{total}  {told}", flush=True)
            if done in keep and done < total:
                self.save(f"{name}-{done}", model, opened, config, checkpoint, done, [])

        with LogStore.open(folder / "log.db") as own:
            runtime = replace(self.runtime(checkpoint, own), policy=ScriptedPolicy([]))
            sources = Sources(tasks=tuple(tasks))
            if stores:
                template = local_policy(opened.loaded, opened.profile).template_hash
                way = lineage(opened)
                contents = read_logs(stores, opened, template, way, config)
                print(f"   {name}: {contents.report()}", flush=True)
                sources = Sources(
                    logged=contents.groups,
                    policy_versions=contents.policy_versions,
                    learned_from=way.learned_from,
                )
            used = train(model, opened, runtime, sources, config, folder, Watch(on_step))
        done = len(read_metrics(folder / METRICS))
        return self.save(name, model, opened, config, checkpoint, done, used)

    def imitate(
        self, name: str, checkpoint: Path, store: LogStore, *, steps: int, learning_rate: float | None = None
    ) -> Path:
        """Maximum likelihood on the successes of a log, once through, in about as many steps."""
        target = self.home / "checkpoints" / name
        if target.exists():
            return target
        opened = open_weights(str(checkpoint))
        reader = reader_of(opened)
        runs, _ = logged_successes(store, reader)
        rows = [row for run in runs for row in reader.rows(run)]
        print(f"   {name}: {len(runs)} successes", flush=True)
        config = SftConfig(
            batch=max(1, len(rows) // steps),
            lora_rank=0,
            max_tokens=8192,
            seed=self.seed,
            optimizer=OptimizerConfig(learning_rate=learning_rate or self.scale.learning_rate),
        )
        model = prepare(opened.loaded.model, lora_rank=0, seed=self.seed)
        folder = self.home / "state" / name
        folder.mkdir(parents=True, exist_ok=True)
        done = train_sft(model, rows, config, folder, lambda *_: None)
        return self.save(name, model, opened, config, checkpoint, done, [run.id for run in runs])

    def save(
        self, name: str, model: Any, opened: OpenedWeights, config: Any, parent: Path, steps: int,
        runs: list[str],
    ) -> Path:  # fmt: skip
        target = self.home / "checkpoints" / name
        if not target.exists():
            save_checkpoint(
                target, model, opened, parent=str(parent.resolve()), config=config,
                learned=Learned(steps=steps, run_ids=runs, tasks=self.tasks.train),
            )  # fmt: skip
        return target

    def runtime(self, checkpoint: Path, store: LogStore) -> Runtime:
        opened = open_weights(str(checkpoint))
        return Runtime(
            policy=local_policy(opened.loaded, opened.profile, version=opened.version),
            sandbox=self.circle.sandbox,
            store=store,
            sampling=Sampling(temperature=1.0, max_tokens=self.scale.max_tokens),
            policy_name=checkpoint.name,
        )
