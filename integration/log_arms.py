"""What the experiments with a tiny policy share: its tasks, its warm start, its logs, and arms that train it.

Everything of a seed lies in one folder. What is there is not made again, so that a run that was stopped goes
on, and an arm is done when its JSON file is there.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from random import Random
from statistics import mean, stdev
from typing import Any

from scipy.stats import t as student_t

from integration.paired import paired_bootstrap
from integration.tiny_model import build_tiny
from nano_coder.agent.profiles import COMPACT_1, first_messages
from nano_coder.models.opening import OpenedWeights, local_policy, open_weights
from nano_coder.models.scripted import ScriptedPolicy
from nano_coder.run.execution import Runtime
from nano_coder.sandbox.protocol import open_sandbox
from nano_rl.checkpoints.checkpoint import Learned, save_checkpoint
from nano_rl.checkpoints.evaluate import cluster_of, table
from nano_rl.config import SftConfig, TrainConfig
from nano_rl.gather.rollouts import ORACLE, collect, execute, oracle_policy
from nano_rl.gather.step_groups import Sources
from nano_rl.imitation import imitation_samples, logged_successes, reader_of, train_sft
from nano_rl.learn.config import GuardConfig, LogsConfig, OptimizerConfig
from nano_rl.learn.groups import TrainSample
from nano_rl.learn.learner import prepare
from nano_rl.learn.metrics import METRICS, read_metrics
from nano_rl.learn.objectives import ObjectiveConfig
from nano_rl.logs.logged_groups import lineage, read_logs
from nano_rl.rewards.reward import Reward
from nano_rl.train import train
from nano_rl.training_record import Watch, learned_from
from nano_shared.policy import Policy
from nano_shared.store import LogStore
from nano_shared.types import Sampling, Split, Task, Trajectory
from nano_suites.drawing import draw_tasks, make_tasks

GROUP = 8
_SHOWN = 10
"""steps between lines of progress"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much of everything."""

    levels: tuple[int, ...] = (1,)
    views: tuple[str, ...] = ("choose",)
    tasks: int = 600
    oracles: int = 300
    sft_epochs: float = 2.4
    sft_loss: float = 0.0
    """mean loss of ten steps at which the warm start ends early"""
    batch: int = 32
    """rows of a step of the warm start"""
    held_out: int = 100
    learning_rate: float = 2e-4
    max_tokens: int = 64
    """of one completion"""
    positions: int = 512
    """of the tiny model"""


SMOKE = Scale(tasks=40, oracles=32, sft_epochs=16.0, held_out=2, max_tokens=8, positions=256)
_SMOKE_WARM = "NANO_SMOKE_WARM"
"""names the warm start of SMOKE, which the smokes of all scripts share"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSets:
    train: list[Task]
    held_out: list[Task]
    """same families as training, no program in common"""
    families: list[Task]
    """families that training never saw"""


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


class _Enough(Exception):
    """The loss is as low as it was to be."""


class Bench:
    """One seed: its tasks, its policies, its logs."""

    def __init__(self, home: Path, scale: Scale, *, seed: int) -> None:
        home.mkdir(parents=True, exist_ok=True)
        self.home, self.scale, self.seed = home, scale, seed
        self.sandbox = open_sandbox()
        self.tasks = task_sets(scale, seed)

    def warm(self) -> Path:
        """The policy that all begins from: a tiny model that has imitated a few oracles, stopped early."""
        target = self.home / "checkpoints" / "warm"
        if (made := os.environ.get(_SMOKE_WARM)) and self.scale == SMOKE:
            shutil.copytree(made, target, dirs_exist_ok=True)
        if target.exists():
            return target
        shown = self.tasks.train[: self.scale.oracles]
        runs = self.oracle_runs(shown)
        texts = [m.content for t in shown for m in first_messages(COMPACT_1, t, sorted(t.files))]
        texts += [part for run in runs for turn in run.turns
                  for part in (turn.completion.text, *(seen.text for seen in turn.observations))]  # fmt: skip
        tiny = build_tiny(self.home / "tiny", texts, seed=self.seed, max_positions=self.scale.positions)
        opened = open_weights(str(tiny))
        config = SftConfig(
            epochs=self.scale.sft_epochs, batch=self.scale.batch, max_tokens=8192, lora_rank=0,
            seed=self.seed, save_every=1000,
            optimizer=OptimizerConfig(learning_rate=2e-3, schedule="linear", warmup_steps=20),
        )  # fmt: skip
        rows, ids = self._rows(runs, opened), [run.id for run in runs]
        return self._imitate("warm", tiny, opened, rows, config, ids, enough=self.scale.sft_loss)

    def oracle_runs(self, tasks: Sequence[Task]) -> list[Trajectory]:
        with LogStore.open(self.home / "oracles.db") as store:
            runtime = self._runtime(ScriptedPolicy([]), store, ORACLE)
            return execute(tasks, [oracle_policy(task, COMPACT_1) for task in tasks], runtime)

    @staticmethod
    def _rows(runs: Sequence[Trajectory], opened: OpenedWeights) -> list[TrainSample]:
        template = local_policy(opened.loaded, opened.profile).template
        end = opened.loaded.tokenizer.eos_token_id
        return [row for run in runs for row in imitation_samples(run, opened.profile, template, end)]

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
            made = {
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
            path.write_text(json.dumps(made, indent=2))
        result: dict[str, Any] = json.loads(path.read_text())
        print(f"{name}: {rate(result):.1%} of the held-out programs", flush=True)
        return result

    def success(self, checkpoint: Path) -> dict[str, Any]:
        """Held-out programs, one run a task, sampled as in training: the row of all, and each by itself."""
        runs = self.evaluate(checkpoint, self.tasks.held_out)
        return {
            "row": asdict(table(runs)[0]),
            "rewards": [run.reward or 0.0 for run in runs],
            "programs": [cluster_of(run.task) for run in runs],
        }

    def evaluate(self, checkpoint: Path, tasks: Sequence[Task]) -> list[Trajectory]:
        """One run a task, sampled as in training: the success of the policy, not of its likeliest answer."""
        with LogStore.open(self.home / "evaluation.db") as store:
            return collect(tasks, self.runtime(checkpoint, store), seed=self.seed)

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
        learning_rate: float | None = None,
        reward: Reward | None = None,
        **settings: Any,
    ) -> Path:
        """Train a checkpoint from logs (`stores`), or on `tasks`; `keep` keeps the weights of those steps,
        `settings` are further ones of the training.

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
            optimizer=OptimizerConfig(learning_rate=learning_rate or self.scale.learning_rate),
            objective=objective or ObjectiveConfig(),
            logs=logs or LogsConfig(),
            guards=guards or GuardConfig(patience=steps + 1),
            **settings,
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
            sources = Sources(tasks=tuple(tasks), reward=reward)
            if stores:
                template = local_policy(opened.loaded, opened.profile).template_hash
                way = lineage(opened)
                contents = read_logs(stores, opened, template, way, config)
                print(f"   {name}: {contents.report()}", flush=True)
                if not (contents.groups or fresh):
                    return checkpoint
                sources = Sources(
                    logged=contents.groups,
                    policy_versions=contents.policy_versions,
                    learned_from=way.learned_from,
                )
            used = train(model, opened, runtime, sources, config, folder, Watch(on_step))
        done = len(read_metrics(folder / METRICS))
        return self.save(name, model, opened, config, checkpoint, done, used)

    def imitate(
        self, name: str, checkpoint: Path, stores: Sequence[LogStore], *, steps: int,
        learning_rate: float | None = None, at_random: bool = False,
    ) -> Path:  # fmt: skip
        """Maximum likelihood on the successes of logs, or on as many of their runs drawn `at_random`, once
        through, in about as many steps."""
        target = self.home / "checkpoints" / name
        if target.exists():
            return target
        opened = open_weights(str(checkpoint))
        reader = reader_of(opened)
        runs = [run for store in stores for run in logged_successes(store, reader)[0]]
        if at_random:
            sampled = [run for store in stores for run in store.trajectories() if run.has_tokens]
            runs = Random(self.seed).sample(sampled, len(runs))
        rows = [row for run in runs for row in reader.rows(run)]
        print(f"   {name}: {len(runs)} {'runs' if at_random else 'successes'}", flush=True)
        if not rows:
            return checkpoint
        config = SftConfig(
            batch=max(1, len(rows) // steps),
            lora_rank=0,
            max_tokens=8192,
            seed=self.seed,
            optimizer=OptimizerConfig(learning_rate=learning_rate or self.scale.learning_rate),
        )
        return self._imitate(name, checkpoint, opened, rows, config, [run.id for run in runs])

    def imitate_oracles(
        self, name: str, checkpoint: Path, tasks: Sequence[Task], *, tokens: float, learning_rate: float
    ) -> Path:
        """Maximum likelihood on oracle runs, passed through until so many tokens were learned from."""
        target = self.home / "checkpoints" / name
        if target.exists():
            return target
        opened = open_weights(str(checkpoint))
        runs = self.oracle_runs(tasks)
        rows = self._rows(runs, opened)
        config = SftConfig(
            epochs=tokens / sum(sum(row.mask) for row in rows), batch=32, max_tokens=8192, lora_rank=0,
            seed=self.seed, save_every=1000,
            optimizer=OptimizerConfig(learning_rate=learning_rate, schedule="linear"),
        )  # fmt: skip
        return self._imitate(name, checkpoint, opened, rows, config, [run.id for run in runs])

    def _imitate(
        self, name: str, parent: Path, opened: OpenedWeights, rows: list[TrainSample], config: SftConfig,
        runs: list[str], *, enough: float = 0.0,
    ) -> Path:  # fmt: skip
        """Imitates until the mean loss of ten steps is at most `enough`."""
        model = prepare(opened.loaded.model, lora_rank=0, seed=self.seed)
        folder = self.home / "state" / name
        folder.mkdir(parents=True, exist_ok=True)
        losses, steps = list[float](), 0

        def on_step(done: int, total: int, values: dict[str, float]) -> None:
            nonlocal steps
            steps = done
            losses.append(values["loss"])
            last = done == total or (len(losses) >= 10 and mean(losses[-10:]) <= enough)
            if done % 50 == 0 or last:
                print(f"   {name}: step {done}/{total}  loss {values['loss']:.3f}", flush=True)
            if last and done < total:
                raise _Enough

        with suppress(_Enough):
            steps = train_sft(model, rows, config, folder, on_step)
        return self.save(name, model, opened, config, parent, steps, runs)

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
        policy = local_policy(opened.loaded, opened.profile, version=opened.version)
        return self._runtime(policy, store, checkpoint.name)

    def _runtime(self, policy: Policy, store: LogStore, name: str) -> Runtime:
        sampling = Sampling(temperature=1.0, max_tokens=self.scale.max_tokens)
        return Runtime(
            policy=policy, sandbox=self.sandbox, store=store, sampling=sampling, policy_name=name
        )  # fmt: skip


@cache
def task_sets(scale: Scale, seed: int) -> TaskSets:
    train_tasks, held_out = list[Task](), list[Task]()
    drawn = draw_tasks(levels=scale.levels, seed=seed, split=Split.TRAIN, views=scale.views)
    while len(train_tasks) < scale.tasks or len(held_out) < scale.held_out:
        task = next(drawn)
        (held_out if _is_held_out(task) else train_tasks).append(task)
    families = make_tasks(
        levels=scale.levels, n=scale.held_out, seed=seed + 2000, split=Split.TEST, views=scale.views
    )
    return TaskSets(train=train_tasks[: scale.tasks], held_out=held_out[: scale.held_out], families=families)


def prepare_smokes(folder: Path) -> None:
    """Make the tasks and the warm start of SMOKE, in a fork, since sandboxes have threads."""
    task_sets(SMOKE, 0)
    if (child := os.fork()) == 0:
        Bench(folder, SMOKE, seed=0).warm()
        sys.stdout.flush()
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        raise SystemExit("the warm start of the smokes could not be made")
    os.environ[_SMOKE_WARM] = str(folder / "checkpoints" / "warm")


def _is_held_out(task: Task) -> bool:
    """One program in five, by its hash: held out are as common and as long ones as those of training."""
    return int(str(task.program_hash)[-8:], 16) % 5 == 0
