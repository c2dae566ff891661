"""The whole circle on a CPU, narrated: tasks, a warm start, logged runs, training, held-out success, serving.

A tiny Llama (about 1 M parameters) is warm-started on oracle trajectories and stopped early. It is run
through nano-coder, and every execution is logged; it is trained on that log and on fresh rollouts; and it is
evaluated on programs that training never saw. The last lines print held-out success before and after. The
exit code is 1 if there was no gain.

    python integration/flywheel.py                   under six minutes on two cores
    python integration/flywheel.py --small           under three; one of the tests
    python integration/flywheel.py --shuffle-rewards the negative control: nothing to learn from
    python integration/flywheel.py --logs-only       no fresh rollouts: the log alone teaches
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from negative_controls import shuffled_rewards

from integration.paired import paired
from integration.tiny_model import build_tiny
from nano_coder.agent.profiles import COMPACT_1, first_messages
from nano_coder.models.opening import OpenedWeights, local_policy, open_policy, open_weights
from nano_coder.models.scripted import ScriptedPolicy
from nano_coder.run.execution import Runtime, run_task
from nano_coder.sandbox.backend import open_sandbox
from nano_rl.checkpoints.checkpoint import Learned, save_checkpoint
from nano_rl.checkpoints.evaluate import SuccessRow, table
from nano_rl.config import SftConfig, TrainConfig
from nano_rl.gather.rollouts import ORACLE, collect, execute, oracle_policy
from nano_rl.gather.sources import Sources
from nano_rl.imitation import imitation_samples, train_sft
from nano_rl.learn.config import Config, GuardConfig, OptimizerConfig
from nano_rl.learn.learner import prepare
from nano_rl.logs.reader import lineage, read_logs
from nano_rl.record import Watch
from nano_rl.train import train
from nano_shared.store import LogStore
from nano_shared.types import Sampling, Split, Task, Trajectory
from nano_suites.drawing import draw_tasks, make_tasks


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much of everything; the defaults fill about five minutes of two cores."""

    levels: tuple[int, ...] = (1,)
    views: tuple[str, ...] = ("choose",)
    tasks: int = 600
    oracles: int = 300
    sft_epochs: float = 2.4
    logged_tasks: int = 320
    group_size: int = 8
    fresh_steps: int = 60
    prompts: int = 16
    held_out: int = 100
    learning_rate: float = 2e-4
    max_tokens: int = 64
    """of one completion"""
    positions: int = 512
    """of the tiny model"""
    keep_every: int = 0
    """steps between checkpoints kept for a curve; 0 keeps the last alone"""


SMALL = Scale(tasks=300, logged_tasks=96, fresh_steps=12, held_out=60)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    scale = SMALL if options.small else Scale()
    home = options.out or Path(tempfile.mkdtemp(prefix="nano-flywheel-"))
    home.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    circle = Flywheel(home, scale, seed=options.seed, shuffle=options.shuffle_rewards)

    say(started, "1. Tasks: programs of families that the test split does not have, and held-out ones")
    tasks = circle.make_tasks()
    say(started, f"2. Warm start: a tiny model imitates {scale.oracles} oracle runs, and is stopped early")
    warm = circle.warm_start(tasks)
    before = circle.evaluate(warm, tasks.held_out)
    before_families = circle.evaluate(warm, tasks.families)
    show("held-out programs, warm start", before)
    say(
        started,
        f"3. nano-coder runs it {scale.logged_tasks * scale.group_size} times; every execution is logged",
    )
    circle.log_runs(warm, tasks.train[: scale.logged_tasks])
    say(started, "4. Training on the log")
    trained = circle.train_on_log(warm, tasks.train)
    after_log = circle.evaluate(trained, tasks.held_out)
    show("held-out programs, trained on the log alone", after_log)
    if not options.logs_only:
        say(started, "5. Training on fresh rollouts through the same runtime")
        trained = circle.train_afresh(trained, tasks.train)
    say(started, "6. The same held-out programs again")
    after = circle.evaluate(trained, tasks.held_out)
    after_families = circle.evaluate(trained, tasks.families)
    show("held-out programs, trained", after)
    say(started, "7. nano-coder runs the new checkpoint on a task that the old one failed")
    circle.show_a_task(trained, before, after)
    gained = circle.compare(
        before, after, before_families, after_families, after_log, time.monotonic() - started
    )
    if options.out is None:
        shutil.rmtree(home, ignore_errors=True)
    return 0 if gained else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSets:
    train: list[Task]
    held_out: list[Task]
    """same families as training, no program in common"""
    families: list[Task]
    """families that training never saw"""


class Flywheel:
    """One circle: each method is one arrow of it."""

    def __init__(self, home: Path, scale: Scale, *, seed: int, shuffle: bool) -> None:
        self.home, self.scale, self.seed, self.shuffle = home, scale, seed, shuffle
        self.store = LogStore.open(home / "log.db")
        self.sandbox = open_sandbox()

    def make_tasks(self) -> TaskSets:
        scale = self.scale
        levels, views = scale.levels, scale.views
        drawn = draw_tasks(levels=levels, seed=self.seed, split=Split.TRAIN, views=views)
        train_tasks: list[Task] = []
        held_out: list[Task] = []
        while len(train_tasks) < scale.tasks or len(held_out) < scale.held_out:
            task = next(drawn)
            (held_out if _is_held_out(task) else train_tasks).append(task)
        train_tasks, held_out = train_tasks[: scale.tasks], held_out[: scale.held_out]
        families = make_tasks(
            levels=levels, n=scale.held_out, seed=self.seed + 2000, split=Split.TEST, views=views
        )
        return TaskSets(train=train_tasks, held_out=held_out, families=families)

    def warm_start(self, tasks: TaskSets) -> Path:
        shown = tasks.train[: self.scale.oracles]
        runs = execute(
            shown,
            [oracle_policy(t, COMPACT_1) for t in shown],
            self._runtime(ScriptedPolicy([]), ORACLE),
        )
        texts = [m.content for t in shown for m in first_messages(COMPACT_1, t, sorted(t.files))]
        texts += [turn.completion.text for run in runs for turn in run.turns]
        scale = self.scale
        tiny = build_tiny(
            self.home / "tiny",
            texts,
            seed=self.seed,
            max_positions=scale.positions,
        )
        opened = open_weights(str(tiny))
        template = local_policy(opened.loaded, opened.profile).template
        samples = [
            row
            for run in runs
            for row in imitation_samples(run, opened.profile, template, opened.loaded.tokenizer.eos_token_id)
        ]
        config = SftConfig(
            epochs=scale.sft_epochs,
            batch=32,
            max_tokens=8192,
            lora_rank=0,
            seed=self.seed,
            save_every=1000,
            optimizer=OptimizerConfig(learning_rate=2e-3, schedule="linear", warmup_steps=20),
        )
        model = prepare(opened.loaded.model, lora_rank=0, seed=self.seed)
        folder = self.home / "warm-state"
        folder.mkdir(exist_ok=True)
        steps = train_sft(model, samples, config, folder, _every(20, "loss"))
        return self._save("warm", model, opened, config, steps, [r.id for r in runs], shown)

    def log_runs(self, checkpoint: Path, tasks: Sequence[Task]) -> None:
        opened = open_weights(str(checkpoint))
        runtime = self._runtime(local_policy(opened.loaded, opened.profile, version=opened.version), "warm")
        collect(tasks, runtime, group_size=self.scale.group_size, seed=self.seed)

    def train_on_log(self, checkpoint: Path, tasks: Sequence[Task]) -> Path:
        opened = open_weights(str(checkpoint))
        template = local_policy(opened.loaded, opened.profile).template
        config = TrainConfig(group_size=0)
        admission = read_logs([self.store], opened, template.template_hash, lineage(opened), config)
        print(admission.report())
        steps = len(admission.groups) // self.scale.prompts  # every group once
        return self._train("from-logs", opened, Sources(logged=admission.groups), 0, steps, tasks)

    def train_afresh(self, checkpoint: Path, tasks: Sequence[Task]) -> Path:
        opened = open_weights(str(checkpoint))
        sources = Sources(tasks=tuple(tasks))
        return self._train("trained", opened, sources, self.scale.group_size, self.scale.fresh_steps, tasks)

    def evaluate(
        self, checkpoint: Path, tasks: Sequence[Task], *, temperature: float = 1.0
    ) -> list[Trajectory]:
        """One run a task, sampled as in training: the success of the policy, not of its likeliest answer."""
        opened = open_weights(str(checkpoint))
        policy = local_policy(opened.loaded, opened.profile, version=opened.version)
        return collect(tasks, self._runtime(policy, checkpoint.name, temperature=temperature), seed=self.seed)

    def show_a_task(self, checkpoint: Path, before: list[Trajectory], after: list[Trajectory]) -> None:
        better = [b for a, b in zip(before, after, strict=True) if a.reward == 0 and b.reward == 1]
        if not better:
            print("there is no such task")
            return
        opened = open_policy(str(checkpoint), dtype="float32")
        runtime = replace(
            self._runtime(opened.policy, checkpoint.name, temperature=0.0), profile=opened.profile
        )
        run = run_task(max(better, key=lambda run: len(run.turns)).task, runtime, seed=self.seed)
        print(run.task.prompt)
        for turn in run.turns:
            print(f"  model: {turn.completion.text!r}")
            print(f"  saw:   {turn.observations[0].text!r}")

    def compare(
        self, before: list[Trajectory], after: list[Trajectory], families_before: list[Trajectory],
        families_after: list[Trajectory], after_log: list[Trajectory], seconds: float,
    ) -> bool:  # fmt: skip
        difference = paired(after, before)
        families = paired(families_after, families_before)
        result = {
            "seed": self.seed,
            "shuffled": self.shuffle,
            "before": asdict(table(before)[0]),
            "after": asdict(table(after)[0]),
            "difference": difference,
            "after_log": asdict(table(after_log)[0]),
            "log_difference": paired(after_log, before),
            "families_before": asdict(table(families_before)[0]),
            "families_after": asdict(table(families_after)[0]),
            "families_difference": families,
            "seconds": seconds,
        }
        (self.home / "result.json").write_text(json.dumps(result, indent=2))
        line("held-out programs, before", table(before)[0])
        line("held-out programs, after ", table(after)[0])
        line("held-out families, before", table(families_before)[0])
        line("held-out families, after ", table(families_after)[0])
        print(f"difference on programs by the log alone: {_interval(paired(after_log, before))}")
        print(f"difference on families: {_interval(families)}")
        print(f"difference on programs: {_interval(difference)}; {seconds:.0f} s")
        return difference[1] > 0

    def _train(
        self,
        name: str,
        opened: OpenedWeights,
        sources: Sources,
        group_size: int,
        steps: int,
        tasks: Sequence[Task],
    ) -> Path:
        config = TrainConfig(
            steps=steps,
            prompts_per_step=self.scale.prompts,
            group_size=group_size,
            seed=self.seed,
            save_every=1000,
            optimizer=OptimizerConfig(learning_rate=self.scale.learning_rate),
            # a greedy shortage of signal in one step is no reason to stop so short a training
            guards=GuardConfig(patience=steps + 1),
        )
        model = prepare(opened.loaded.model, lora_rank=0, seed=self.seed)
        folder = self.home / f"{name}-state"
        folder.mkdir(exist_ok=True)
        runtime = self._runtime(ScriptedPolicy([]), name)
        report_step = _every(2, "reward_mean")

        def on_step(done: int, total: int, values: dict[str, float]) -> None:
            report_step(done, total, values)
            if self.scale.keep_every and done % self.scale.keep_every == 0 and done < total:
                self._save(f"{name}-{done}", model, opened, config, done, [], tasks)

        with shuffled_rewards() if self.shuffle else nullcontext():
            used = train(model, opened, runtime, sources, config, folder, Watch(on_step))
        return self._save(name, model, opened, config, steps, used, tasks)

    def _save(
        self, name: str, model: object, opened: OpenedWeights, config: Config, steps: int, runs: list[str],
        tasks: Sequence[Task],
    ) -> Path:  # fmt: skip
        target = self.home / "checkpoints" / name
        save_checkpoint(
            target, model, opened, parent=str(opened.loaded.path), config=config,
            learned=Learned(steps=steps, run_ids=runs, tasks=tasks),
        )  # fmt: skip
        return target

    def _runtime(self, policy: object, name: str, *, temperature: float = 1.0) -> Runtime:
        return Runtime(
            policy=policy,  # type: ignore[arg-type]
            sandbox=self.sandbox,
            store=self.store,
            sampling=Sampling(temperature=temperature, max_tokens=self.scale.max_tokens),
            policy_name=name,
        )


def _every(n: int, key: str):  # type: ignore[no-untyped-def]
    def on_step(done: int, total: int, values: dict[str, float]) -> None:
        if done % n == 0 or done == total:
            print(f"   step {done}/{total}  {key} {values.get(key, float('nan')):.3f}", flush=True)

    return on_step


def _is_held_out(task: Task) -> bool:
    """One program in five, by its hash: held out are as common and as long ones as those of training."""
    return int(str(task.program_hash)[-8:], 16) % 5 == 0


def say(started: float, text: str) -> None:
    print(f"\n[{time.monotonic() - started:4.0f} s] {text}", flush=True)


def show(title: str, runs: list[Trajectory]) -> None:
    print(title)
    for row in table(runs):
        line(f"  {row.name:20}", row)


def line(label: str, row: SuccessRow) -> None:
    interval = f"95 % interval {row.low:.1%} to {row.high:.1%}"
    print(f"{label}: {row.rate:6.1%}  ({row.successes}/{row.graded}; {interval})")


def _interval(difference: tuple[float, float, float]) -> str:
    mean, low, high = difference
    return f"{mean:+.1%} (95 % interval {low:+.1%} to {high:+.1%}, paired)"


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The whole circle on a CPU, narrated.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--small", action="store_true", help="under three minutes")
    parser.add_argument("--shuffle-rewards", action="store_true", help="negative control")
    parser.add_argument("--logs-only", action="store_true", help="no fresh rollouts")
    parser.add_argument("--out", type=Path, help="keep log, checkpoints and result.json here")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
