"""Trains a tiny policy whose rollouts servers make, in step and ahead; kills servers and trainer on the way.

The servers are processes of `nano-coder serve`, or one of vLLM with `--vllm PYTHON`, the interpreter of an
environment that has it. Each training is `nano-rl train --engine URL,...` with a LoRA adapter that the
servers load after each update. In the first one a server is killed, started again with other weights, which
must be found, and then with the right ones, which must be taken back. The second one rolls out ahead
(`--async`), is killed with SIGKILL in the middle and goes on: each step must be trained once, each run at
most once, and no token may be older than the bound.

    python integration/remote_engine.py --steps 20 --servers 2
    python integration/remote_engine.py --steps 20 --vllm ~/vllm/bin/python
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from engine_process import KEY, EngineProcess
from smoke import parse

from integration.tiny_model import build_tiny
from nano_cluster.adapter_publisher import ADAPTERS
from nano_coder.agent.profiles import COMPACT_1, first_messages
from nano_rl.learn.metrics import METRICS, read_metrics
from nano_rl.tasks.task_file import write_tasks
from nano_rl.training_record import USED, read_events, read_used
from nano_shared.store import LogStore
from nano_shared.types import Split
from nano_suites.drawing import make_tasks


def parity(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
    """A reward that varies from run to run and depends on the sampled text alone."""
    return [float(sum(map(ord, text)) % 2) for text in completions]


def start_training(
    home: Path, name: str, urls: Sequence[str], steps: int, *more: str
) -> subprocess.Popen[bytes]:
    arguments = [
        "--name", name, "--model", str(home / "tiny"), "--tasks", str(home / "tasks.jsonl"), "--engine",
        ",".join(urls), "--lora-rank", "8", "--steps", str(steps), "--prompts", "2", "--group-size", "4",
        "--learning-rate", "1e-3", "--reward", "remote_engine:parity=1", "--limit",
        "max_completion_tokens=16", "--set", "guards.patience=1000", "--set", "guards.mismatch_max=1e-3",
        *more,
    ]  # fmt: skip
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    variables = {**os.environ, "NANO_HOME": str(home), "NANO_ENGINE_KEY": KEY, "PYTHONPATH": path}
    return subprocess.Popen([sys.executable, "-m", "nano_rl", "train", *arguments], env=variables)


def finish(training: subprocess.Popen[bytes]) -> None:
    if training.wait() != 0:
        raise SystemExit(f"the training ended with {training.returncode}")


def wait_until(training: subprocess.Popen[bytes], reached: Callable[[], bool], what: str) -> None:
    while not reached():
        if training.poll() is not None:
            raise SystemExit(f"the training ended before {what}")
        time.sleep(0.05)


def steps_done(folder: Path) -> int:
    return len(read_metrics(folder / METRICS)) if (folder / METRICS).exists() else 0


def count_events(folder: Path, words: str) -> int:
    """Events of a training that hold these words."""
    return sum(words in event.text for event in read_events(folder))


def restart(training: subprocess.Popen[bytes], engine: EngineProcess, home: Path, folder: Path) -> None:
    """Kill a server, start it again with other weights and then with the right ones; the training must leave
    it out, find the other weights, and take it back."""
    left_out, ready = count_events(folder, "left out"), count_events(folder, "is ready with")
    engine.kill()
    wait_until(training, lambda: count_events(folder, "left out") > left_out, "a killed server was left out")
    if engine.is_vllm:
        *_, before, newest = sorted((folder / ADAPTERS).glob("nano-*"), key=lambda f: f.stat().st_mtime)
        engine.start(home / "tiny", "--lora-modules", f"{newest.name}={before}")
        found = f"holds other files under the name {newest.name}"
    else:
        engine.start(home / "other")
        found = "this server holds"
    wait_until(training, lambda: count_events(folder, found) > 0, "other weights were found")
    engine.kill()
    engine.start(home / "tiny")
    wait_until(training, lambda: count_events(folder, "is ready with") > ready, "the server was taken back")


def check(folder: Path, home: Path, steps: int, bound: int) -> list[dict[str, float]]:
    """The metrics, after: each step once, each run once, no token older than the bound or encoded anew."""
    used = read_used(folder / USED)
    assert [line["step"] for line in used] == list(range(steps)), "each step once"
    runs = [[run for group in line["groups"] for run in group["runs"]] for line in used]
    trained = [run for of_step in runs for run in of_step]
    assert len(trained) == len(set(trained)) == steps * 8, "each run once"
    with LogStore.open(home / "log.db") as store:
        for step, of_step in enumerate(runs):
            for run in map(store.get, of_step):
                answers = [turn.completion for turn in run.turns]
                assert all(0 <= step - answer.policy_version <= bound for answer in answers), run.id
                assert all(answer.tokens and answer.tokens.row == 0 for answer in answers), "encoded anew"
    rows = read_metrics(folder / METRICS)
    assert all(row["stale_dropped"] == 0 for row in rows if not row["skipped"])
    return rows


def report(name: str, folder: Path, rows: Sequence[dict[str, float]]) -> None:
    learned = [row for row in rows if not row["skipped"]]
    tokens = sum(row["tokens_rollout"] for row in rows)
    print(f"{name}: {len(rows)} steps, {len(learned)} with an update; {tokens:.0f} tokens sampled")
    print(
        f"  log-probs of engines against the trainer's: mean {mean(rows, 'engine_mismatch'):.1e}, largest"
        f" {max(row['engine_mismatch_max'] for row in rows):.1e} nats (probe)"
    )
    fresh = [row for row in learned if not row["stale_tokens"]]
    if fresh:
        worst = max(row["mismatch_max"] for row in fresh)
        print(f"  and of what they sampled: mean {mean(fresh, 'mismatch'):.1e}, largest {worst:.1e} nats")
    ages = [int(row["staleness_max"]) for row in rows]
    print(f"  age of the oldest token of each step, in updates: {ages}")
    age, sync = mean(rows, "staleness_mean"), mean(rows, "seconds_sync")
    print(f"  mean age of a token {age:.2f}; a sync took {sync:.2f} s")
    for event in read_events(folder):
        if event.text:
            print(f"  {event.text}")


def mean(rows: Sequence[dict[str, float]], name: str) -> float:
    return sum(row[name] for row in rows) / len(rows)


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--steps", type=int, default=20)
    arguments.add_argument("--servers", type=int, default=1)
    arguments.add_argument(
        "--bound", type=int, default=4, help="--max-off-policy-steps of the second training"
    )
    arguments.add_argument("--vllm", help="the Python of an environment with vLLM, in place of our servers")
    given = parse(arguments, steps=1)
    with tempfile.TemporaryDirectory() as made, ExitStack() as stack:
        home = Path(made)
        tasks = make_tasks(levels=[0], n=8, seed=1, split=Split.TRAIN, views=["copy"])
        write_tasks(home / "tasks.jsonl", tasks)
        texts = [m.content for task in tasks for m in first_messages(COMPACT_1, task, ())]
        for name, seed in (("tiny", 0), ("other", 1)):
            build_tiny(home / name, texts, seed=seed, hidden=64, layers=2, max_positions=512, vocab_size=400)
        count = 1 if given.vllm else given.servers
        engines = [stack.enter_context(EngineProcess(home, n, given.vllm)) for n in range(count)]
        for engine in engines:
            print(f"{engine.url}: answers after {engine.start(home / 'tiny'):.0f} s")
        urls = [engine.url for engine in engines]
        training, folder = start_training(home, "in-step", urls, given.steps), home / "trainings/in-step"
        if not given.smoke:
            wait_until(training, lambda: steps_done(folder) >= given.steps // 3, "its server was killed")
            restart(training, engines[0], home, folder)
        finish(training)
        report("in step", folder, check(folder, home, given.steps, 0))
        if given.smoke:
            return
        ahead = ("--async", "--max-off-policy-steps", str(given.bound))
        training, folder = start_training(home, "ahead", urls, given.steps, *ahead), folder.with_name("ahead")
        wait_until(training, lambda: steps_done(folder) >= given.steps // 2, "it was killed")
        training.kill()
        training.wait()
        finish(start_training(home, "ahead", urls, given.steps, *ahead))
        report("ahead", folder, check(folder, home, given.steps, given.bound))
    print("all held")


if __name__ == "__main__":
    main()
