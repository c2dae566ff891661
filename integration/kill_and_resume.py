"""Kills a training with SIGKILL at random moments, goes on each time, and compares it with one left alone.

A tiny policy trains under the lockstep scheduler on a CPU: real rollouts in a real sandbox, a real log,
dynamic sampling. Some of the kills are aimed at the moment a state is being written. Every training that was
killed must end with the same weights, bit for bit, the same metrics and the same sampled tokens as the one
that was not; no task may be skipped or seen twice. Runs of a killed step are in the log twice: those that
count are in `used.jsonl`, and the others must have sampled the same tokens as far as they came.

    python integration/kill_and_resume.py --kills 100
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from smoke import parse

from integration.tiny_model import build_tiny
from nano_coder.agent.profiles import COMPACT_1, first_messages
from nano_coder.models.opening import OpenedWeights, open_weights
from nano_coder.models.scripted import ScriptedPolicy
from nano_coder.run.execution import Runtime
from nano_coder.sandbox.protocol import open_sandbox
from nano_rl.config import TrainConfig
from nano_rl.gather.step_groups import Sources
from nano_rl.learn.config import GuardConfig, OptimizerConfig
from nano_rl.learn.learner import prepare
from nano_rl.learn.metrics import MEASURED, METRICS, read_metrics
from nano_rl.resume import STATES
from nano_rl.rewards import Reward
from nano_rl.train import train
from nano_rl.training_record import USED, read_used
from nano_shared.errors import NanoError
from nano_shared.store import LogStore
from nano_shared.types import Sampling, Split, Task, Trajectory, Trust, Verdict
from nano_suites.drawing import make_tasks

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads would not survive the fork
WEIGHTS = "weights.sha256"
AIMED_SHARE = 1 / 3
"""of the kills wait for a state to be written"""


class Parity(Reward):
    """Rewards that vary from run to run and depend on the sampled tokens alone."""

    def __init__(self) -> None:
        pass

    def apply(self, runs: Sequence[Trajectory], runtime: Runtime) -> list[Trajectory]:
        return [run.model_copy(update={"verdict": _verdict(run)}) for run in runs]


def _verdict(run: Trajectory) -> Verdict:
    reward = float(sum(sum(ids) for ids in _sampled(run)) % 2)
    return Verdict(reward=reward, trust=Trust.HIDDEN, grader="parity-1", graded_hash="")


@dataclass(frozen=True, slots=True)
class Bench:
    """One training set-up, and the children that run it."""

    home: Path
    tasks: tuple[Task, ...]
    opened: OpenedWeights
    config: TrainConfig

    def begin(self, name: str) -> int:
        """Start, or go on with, the training of that name in a process of its own; its id."""
        child = os.fork()
        if child:
            return child
        status = 1
        try:
            self._train(self.home / name)
            status = 0
        except NanoError as problem:
            print(f"{name}: {problem}", file=sys.stderr)
        finally:
            os._exit(status)

    def _train(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        model = prepare(self.opened.loaded.model, lora_rank=0, seed=0)
        with LogStore.open(folder / "log.db") as store:
            runtime = Runtime(
                policy=ScriptedPolicy([]), sandbox=open_sandbox(), store=store,
                sampling=Sampling(max_tokens=8),
            )  # fmt: skip
            sources = Sources(tasks=self.tasks, reward=Parity())
            train(model, self.opened, runtime, sources, self.config, folder)
        digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
        (folder / WEIGHTS).write_text(digest.hexdigest())

    def outcome(self, name: str) -> dict[str, Any]:
        """What two trainings must have in common."""
        folder = self.home / name
        with LogStore.open(folder / "log.db") as store:
            logged = {run.id: run for run in store.trajectories()}
        used = read_used(folder / USED)
        runs = [[logged.pop(i) for g in line["groups"] for i in g["runs"]] for line in used]
        tokens = {_place(run): _sampled(run) for step in runs for run in step}
        for orphan in logged.values():  # of a step that was killed, and done again
            again = tokens.get(_place(orphan))
            if again is None or again[: len(orphan.turns)] != _sampled(orphan):
                raise SystemExit(f"{name}: run {orphan.id} of a killed step was not issued again as it was")
        rows = read_metrics(folder / METRICS)
        return {
            "weights": (folder / WEIGHTS).read_text(),
            "steps": [line["step"] for line in used],
            "tasks": [[g["task"] for g in line["groups"]] for line in used],
            "tokens": tokens,
            "metrics": [{k: v for k, v in row.items() if not k.startswith(MEASURED)} for row in rows],
        }

    def runs_logged(self, name: str) -> int:
        with LogStore.open(self.home / name / "log.db") as store:
            return sum(1 for _ in store.trajectories())


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    home = options.out or Path(tempfile.mkdtemp(prefix="nano-kill-"))
    torch.set_num_threads(1)
    bench = _bench(home, options.steps)
    started = time.monotonic()
    _finish(bench.begin("reference"))
    seconds = time.monotonic() - started
    expected = bench.outcome("reference")
    print(f"uninterrupted: {options.steps} steps in {seconds:.1f} s, weights {expected['weights'][:12]}")
    rng = random.Random(options.seed)
    kills: Counter[str] = Counter()
    trainings = same = orphans = 0
    while kills.total() < options.kills:
        name = f"killed-{trainings}"
        trainings += 1
        _train_killed(bench, name, rng, options.kills, seconds / options.steps, kills)
        outcome = bench.outcome(name)
        for part, value in expected.items():
            if outcome[part] != value:
                print(f"{name}: {part} differ from the uninterrupted training's")
                return 1
        same += 1
        print(
            f"{name}: the same weights, metrics, tasks and tokens; {kills.total()} kills so far", flush=True
        )
        orphans += bench.runs_logged(name) - len(expected["tokens"])
        shutil.rmtree(home / name)
    print(
        f"{kills.total()} kills ({kills['save']} in the middle of a save, {kills['before']} before the first"
        f" state) over {trainings} trainings of {options.steps} steps: {same} ended with the same weights,"
        f" metrics, tasks and tokens; {orphans} runs of killed steps stand in the logs beside those used"
    )
    if options.out is None:
        shutil.rmtree(home)
    return 0


def _train_killed(
    bench: Bench, name: str, rng: random.Random, limit: int, step_seconds: float, kills: Counter[str]
) -> None:
    """One training to its end, killed and resumed on the way."""
    states = bench.home / name / STATES
    while True:
        child = bench.begin(name)
        if kills.total() >= limit:
            return _finish(child)
        if rng.random() < AIMED_SHARE:
            ended = _until_saving(child, states, rng)
        else:
            ended = _until(child, rng.uniform(0, 2 * step_seconds))
        if ended:
            return None
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        if list(states.glob(".*.tmp-*")):
            kills["save"] += 1
        elif not list(states.glob("[0-9]*")):
            kills["before"] += 1
        else:
            kills["step"] += 1


def _until(child: int, seconds: float) -> bool:
    """Wait that long; whether the child ended first."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if _ended(child):
            return True
        time.sleep(0.002)
    return False


def _until_saving(child: int, states: Path, rng: random.Random) -> bool:
    """Wait for one of the next states to be in the making; whether the child ended first."""
    skipped = rng.randrange(2)
    seen: set[str] = set()
    while not _ended(child):
        seen |= {path.name for path in states.glob(".*.tmp-*")}
        if len(seen) > skipped:
            return False
    return True


def _ended(child: int) -> bool:
    done, status = os.waitpid(child, os.WNOHANG)
    if done and status:
        raise SystemExit(f"the training ended with status {status}")
    return bool(done)


def _finish(child: int) -> None:
    while not _ended(child):
        time.sleep(0.01)


def _bench(home: Path, steps: int) -> Bench:
    tasks = tuple(make_tasks(levels=[0], n=7, seed=1, split=Split.TRAIN, views=["copy"]))
    tasks = tuple(_short(task) for task in tasks)
    texts = [m.content for t in tasks for m in first_messages(COMPACT_1, t, ())]
    folder = build_tiny(home / "tiny", texts, hidden=32, layers=1, max_positions=256, vocab_size=300)
    config = TrainConfig(
        steps=steps, prompts_per_step=3, group_size=2, refill=1,
        optimizer=OptimizerConfig(learning_rate=1e-3), guards=GuardConfig(patience=10**6),
    )  # fmt: skip
    return Bench(home, tasks, open_weights(str(folder)), config)


def _short(task: Task) -> Task:
    """The task in at most two turns: what is tested is the loop around them."""
    return task.model_copy(update={"limits": task.limits.model_copy(update={"max_turns": 2})})


def _place(run: Trajectory) -> tuple[str, int | None]:
    return run.task.key, run.seed


def _sampled(run: Trajectory) -> list[tuple[int, ...]]:
    return [turn.completion.tokens.sampled_ids for turn in run.turns if turn.completion.tokens]


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--steps", type=int, default=10, help="of each training")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    parser.add_argument("--out", type=Path, help="keep everything there")
    return parse(parser, arguments, kills=1, steps=2)


if __name__ == "__main__":
    sys.exit(main())
