"""Trains ahead of its rollouts (`--async --engine`) under random faults for an hour, and without any.

A tiny policy that has imitated some oracles learns on two servers of `nano-coder serve`. Faults come one
after the other: a server killed and started again, started again with other weights first, or frozen
(SIGSTOP); the trainer killed, and started by the same command, or frozen; the log locked by another process.
Afterwards each step must be trained once, each run at most once, no token may be older than the bound, no
two steps further apart than `--patience` seconds; and held-out success is compared with that of undisturbed
trainings. A run that was stopped goes on by the same command, after its last whole training.

    python integration/async_faults.py --out FOLDER --faults 200 --seconds 3600 --calm 28
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean

from engine_process import KEY, EngineProcess
from log_arms import SMOKE, Bench, Scale, over_seeds
from remote_engine import count_events, steps_done
from smoke import parse

from integration.tiny_model import build_tiny
from nano_rl.learn.metrics import METRICS, read_metrics
from nano_rl.tasks.task_file import write_tasks
from nano_rl.training_record import USED, read_used
from nano_shared.checkpoint import read_checkpoint
from nano_shared.store import LogStore

BOUND = 4
SEEDS = (0, 1, 2)
SCALE = Scale(tasks=300, oracles=300, held_out=200, max_tokens=32)


@dataclass(slots=True, kw_only=True)
class Result:
    before: float = 0.0
    """held-out success"""
    calm: list[float] = field(default_factory=list)
    """of undisturbed trainings"""
    calm_gaps: list[float] = field(default_factory=list)
    """longest time between two steps, seconds"""
    disturbed: list[float] = field(default_factory=list)
    disturbed_gaps: list[float] = field(default_factory=list)
    faults: dict[str, int] = field(default_factory=dict)
    other_weights_found: int = 0
    seconds: float = 0.0
    """of the disturbed trainings"""


class Training:
    """One training by the command line, whose process may be killed and started again."""

    def __init__(self, home: Path, name: str, seed: int, steps: int, *more: str, bound: int = BOUND) -> None:
        self.home, self.name, self.folder = home, name, home / "trainings" / name
        self.steps, self.bound = steps, bound
        self._command = [
            sys.executable, "-m", "nano_rl", "train", "--name", name, "--model",
            str(home / "checkpoints" / "warm"), "--tasks", str(home / "tasks.jsonl"), "--lora-rank", "16",
            "--learning-rate", "1e-3", "--steps", str(steps), "--prompts", "8", "--group-size", "8",
            "--seed", str(seed), "--limit", f"max_completion_tokens={SCALE.max_tokens}",
            "--set", "guards.patience=1000", "--set", "save_every=2", *more,
        ]  # fmt: skip
        self.start()

    def start(self) -> None:
        variables = {**os.environ, "NANO_HOME": str(self.home), "NANO_ENGINE_KEY": KEY}
        with (self.home / "training.log").open("ab") as log:
            self._process = subprocess.Popen(self._command, env=variables, stdout=log, stderr=log)

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            self._process.send_signal(number)

    @property
    def goes_on(self) -> bool:
        return self._process.poll() is None

    @property
    def has_checkpoint(self) -> bool:
        return (self.home / "checkpoints" / self.name).exists()

    def finish(self) -> None:
        if self._process.wait() != 0 and not self.has_checkpoint:
            log = (self.home / "training.log").read_text()
            raise SystemExit(f"{self.name} ended with {self._process.returncode}:\n{log[-3000:]}")

    def check(self) -> list[dict[str, float]]:
        """The metrics, after: each step once, each run once, no token older than the bound."""
        used = read_used(self.folder / USED)
        assert [line["step"] for line in used] == list(range(self.steps)), "each step once"
        runs = [[run for group in line["groups"] for run in group["runs"]] for line in used]
        trained = [run for of_step in runs for run in of_step]
        assert len(trained) == len(set(trained)), "each run once"
        first = read_checkpoint(self.home / "checkpoints" / "warm").policy_version
        with LogStore.open(self.home / "log.db") as store:
            for version, of_step in enumerate(runs, first):
                for run in map(store.get, of_step):
                    answers = [turn.completion for turn in run.turns]
                    ages = [version - answer.policy_version for answer in answers]
                    assert all(0 <= age <= self.bound for age in ages), run.id
                    assert all(answer.tokens for answer in answers), "without tokens"
        rows = read_metrics(self.folder / METRICS)
        assert len(rows) == self.steps
        assert not any(row["stale_dropped"] for row in rows if not row["skipped"])
        return rows


class Faults:
    """Draws faults, and does them."""

    def __init__(self, home: Path, engines: Sequence[EngineProcess], seed: int) -> None:
        self.home, self.engines, self.random = home, engines, random.Random(seed)
        self.done: Counter[str] = Counter()
        self.found = 0
        """servers with other weights that were found"""

    def strike(self, training: Training) -> None:
        kinds = {
            "server killed": self._kill, "server with other weights": self._other_weights,
            "server frozen": self._freeze, "trainer killed": self._kill_trainer,
            "trainer frozen": self._freeze_trainer, "log locked": self._lock_log,
        }  # fmt: skip
        kind = self.random.choice(list(kinds))
        kinds[kind](training)
        self.done[kind] += 1

    def _kill(self, training: Training) -> None:
        engine = self.random.choice(self.engines)
        engine.kill()
        self._pause(4)
        engine.start(self.home / "checkpoints" / "warm")

    def _other_weights(self, training: Training) -> None:
        engine, words = self.random.choice(self.engines), "this server holds"
        known = count_events(training.folder, words)
        engine.kill()
        engine.start(self.home / "other")
        until = time.monotonic() + 20
        while time.monotonic() < until and training.goes_on:
            if count_events(training.folder, words) > known:
                self.found += 1
                break
            time.sleep(0.1)
        engine.kill()
        engine.start(self.home / "checkpoints" / "warm")

    def _freeze(self, training: Training) -> None:
        engine = self.random.choice(self.engines)
        engine.freeze()
        self._pause(10, most=40)
        engine.thaw()

    def _kill_trainer(self, training: Training) -> None:
        if training.goes_on:
            training.signal(signal.SIGKILL)
            training._process.wait()
            if not training.has_checkpoint:
                training.start()

    def _freeze_trainer(self, training: Training) -> None:
        training.signal(signal.SIGSTOP)
        self._pause(4)
        training.signal(signal.SIGCONT)

    def _lock_log(self, training: Training) -> None:
        with closing(sqlite3.connect(self.home / "log.db", timeout=30, isolation_level=None)) as log:
            log.execute("BEGIN IMMEDIATE")
            self._pause(3)
            log.execute("ROLLBACK")

    def _pause(self, seconds: float, most: float = 15.0) -> None:
        time.sleep(min(most, self.random.expovariate(1 / seconds)))


@contextmanager
def longest_gap(training: Training, gaps: list[float]) -> Iterator[None]:
    """Add the longest time between two steps that ended, the first one's from the start."""
    ended, longest = threading.Event(), [0.0]

    def look() -> None:
        steps, since = 0, time.monotonic()
        while not ended.wait(0.2):
            longest[0] = max(longest[0], time.monotonic() - since)
            if (now := steps_done(training.folder)) != steps:
                steps, since = now, time.monotonic()

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        gaps.append(longest[0])


def success(bench: Bench, name: str) -> float:
    runs = bench.evaluate(bench.home / "checkpoints" / name, bench.tasks.held_out)
    return mean(run.reward or 0.0 for run in runs)


def prepared(home: Path, scale: Scale = SCALE) -> Bench:
    """Checkpoint `warm`, other weights `other` and the tasks; tasks.jsonl holds those of training."""
    bench = Bench(home, scale, seed=0)
    if not (home / "checkpoints" / "warm").exists():
        write_tasks(home / "tasks.jsonl", bench.tasks.train)
        bench.warm()
        build_tiny(home / "other", [task.prompt for task in bench.tasks.train], seed=1, max_positions=512)
    return bench


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="keep log, checkpoints and result.json here")
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--patience", type=float, default=60.0, help="longest time between two steps")
    parser.add_argument("--steps", type=int, default=40, help="of each training")
    parser.add_argument("--calm", type=int, default=6, help="undisturbed trainings")
    given = parse(parser, faults=0, seconds=0.0, steps=1, calm=1)
    home = given.out.resolve()
    bench = prepared(home, SMOKE if given.smoke else SCALE)
    path, result = home / "result.json", Result()
    if path.exists():
        result = Result(**json.loads(path.read_text()))
    result.before = result.before or success(bench, "warm")
    print(f"held-out success before: {result.before:.1%}", flush=True)
    with ExitStack() as stack:
        engines = [
            stack.enter_context(EngineProcess(home, number)) for number in range(1 if given.smoke else 2)
        ]
        for engine in engines:
            engine.start(home / "checkpoints" / "warm")
        urls = ",".join(engine.url for engine in engines)
        ahead = ["--engine", urls, "--async", "--max-off-policy-steps", str(BOUND)]

        def train(name: str, seed: int, gaps: list[float], disturb: Callable[[Training], None]) -> float:
            training = Training(home, name, seed, given.steps, *ahead)
            with longest_gap(training, gaps):
                disturb(training)
                training.finish()
            retries = max(row["engine_retries"] for row in training.check())
            done = success(bench, name)
            said = f"{retries:.0f} requests sent again, a step at most {gaps[-1]:.0f} s"
            print(f"{name}: {done:.1%}, {said}", flush=True)
            return done

        for number in range(len(result.calm), given.calm):
            seed = SEEDS[number % len(SEEDS)]
            result.calm.append(train(f"calm-{number}", seed, result.calm_gaps, lambda _: None))
            path.write_text(json.dumps(asdict(result), indent=1) + "\n")
        pause = max(0.0, 2 * given.seconds / max(1, given.faults) - 12)
        while sum(result.faults.values()) < given.faults or result.seconds < given.seconds:
            number, began = len(result.disturbed), time.monotonic()
            faults = Faults(home, engines, number)

            def disturb(training: Training, faults: Faults = faults) -> None:
                while training.goes_on:
                    faults.strike(training)
                    time.sleep(faults.random.uniform(0, pause))

            seed = SEEDS[number % len(SEEDS)]
            result.disturbed.append(train(f"disturbed-{number}", seed, result.disturbed_gaps, disturb))
            result.faults = dict(Counter(result.faults) + faults.done)
            result.other_weights_found += faults.found
            result.seconds += time.monotonic() - began
            path.write_text(json.dumps(asdict(result), indent=1) + "\n")
            print(f"{sum(result.faults.values())} faults in {result.seconds:.0f} s", flush=True)
    print(json.dumps(asdict(result)))
    calm, disturbed = result.calm, result.disturbed
    for name, of in (("undisturbed", calm), ("disturbed", disturbed)):
        if len(of) > 1:
            print("{}: {:.1%} ({:.1%} to {:.1%} over trainings)".format(name, *over_seeds(of)))
    if (worst := max(result.calm_gaps + result.disturbed_gaps)) > given.patience:
        raise SystemExit(f"a step took {worst:.0f} s, more than {given.patience:.0f}")
    print("all held")


if __name__ == "__main__":
    main()
