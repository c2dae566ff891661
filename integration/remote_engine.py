"""Trains a tiny policy whose rollouts servers make, in step and ahead, and kills the trainer on the way.

The servers are processes of `nano-coder serve`, or one of vLLM with `--vllm PYTHON`, the interpreter of an
environment that has it. Each training is `nano-rl train --engine URL,...` with a LoRA adapter that the
servers load after each update. The second one rolls out ahead (`--async`), is killed with SIGKILL in the
middle and goes on: each step must be trained once, each run at most once, and no token may be older than
the bound.

    python integration/remote_engine.py --steps 20 --servers 2
    python integration/remote_engine.py --steps 20 --vllm ~/vllm/bin/python
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from nano_coder.agent.profiles import COMPACT_1
from nano_coder.agent.prompt import first_messages
from nano_rl.learn.metrics import METRICS, read_metrics
from nano_rl.logs.used_runs import USED, read_used
from nano_rl.record.training_record import read_events
from nano_rl.tasks.make import make_tasks, write_tasks
from nano_rl.tiny_model import build_tiny
from nano_shared.store import LogStore
from nano_shared.types import Split

KEY = secrets.token_hex(8)
VLLM = {
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "auto", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
}  # fmt: skip
VLLM_ARGUMENTS = [
    "--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "16", "--enable-lora",
    "--max-lora-rank", "16", "--max-loras", "2", "--max-cpu-loras", "8",
]  # fmt: skip


def parity(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
    """A reward that varies from run to run and depends on the sampled text alone."""
    return [float(sum(map(ord, text)) % 2) for text in completions]


@contextmanager
def server(model: Path, home: Path, number: int, vllm: str | None) -> Iterator[str]:
    """The URL of a server of the model, which ends with the block."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    base = ["--model", str(model), "--host", "127.0.0.1", "--port", str(port)]
    variables = {**os.environ, "NANO_HOME": str(home / f"server-{number}"), "NANO_SERVE_ADMIN_KEY": KEY}
    program = "from nano_coder.cli import main; main()"
    command = [sys.executable, "-c", program, "serve", *base, "--dtype", "float32"]
    if vllm:
        command = [vllm, "-m", "vllm.entrypoints.openai.api_server", *base, *VLLM_ARGUMENTS]
        variables = {**variables, **VLLM}
    with (home / f"server-{number}.log").open("wb") as log:
        process = subprocess.Popen(command, env=variables, stdout=log, stderr=log, start_new_session=True)
    try:
        wait_for(f"http://127.0.0.1:{port}/health", process)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + 900
    while time.monotonic() < until and process.poll() is None:
        try:
            if httpx.get(url).is_success:
                return
        except httpx.HTTPError:
            time.sleep(0.2)
    raise SystemExit(f"no server at {url}: its log is beside the trainings")


def start_training(
    home: Path, name: str, urls: Sequence[str], steps: int, *more: str
) -> subprocess.Popen[bytes]:
    arguments = [
        "--name", name, "--model", str(home / "tiny"), "--tasks", str(home / "tasks.jsonl"), "--engine",
        ",".join(urls), "--lora-rank", "8", "--steps", str(steps), "--prompts", "2", "--group-size", "4",
        "--learning-rate", "1e-3", "--reward", "py:remote_engine:parity=1", "--limit",
        "max_completion_tokens=16", "--set", "guards.patience=1000", "--set", "guards.mismatch_max=1e-3",
        *more,
    ]  # fmt: skip
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    variables = {**os.environ, "NANO_HOME": str(home), "NANO_ENGINE_KEY": KEY, "PYTHONPATH": path}
    return subprocess.Popen([sys.executable, "-m", "nano_rl", "train", *arguments], env=variables)


def finish(training: subprocess.Popen[bytes]) -> None:
    if training.wait() != 0:
        raise SystemExit(f"the training ended with {training.returncode}")


def kill_after(training: subprocess.Popen[bytes], metrics: Path, steps: int) -> None:
    while training.poll() is None and not (metrics.exists() and len(read_metrics(metrics)) >= steps):
        time.sleep(0.05)
    if training.poll() is not None:
        raise SystemExit("the training ended before it could be killed")
    training.kill()
    training.wait()


def check(folder: Path, home: Path, steps: int, bound: int) -> list[dict[str, float]]:
    """The metrics, after: each step once, each run once, and no token older than the bound."""
    used = read_used(folder / USED)
    assert [line["step"] for line in used] == list(range(steps)), "each step once"
    runs = [[run for group in line["groups"] for run in group["runs"]] for line in used]
    trained = [run for of_step in runs for run in of_step]
    assert len(trained) == len(set(trained)) == steps * 8, "each run once"
    with LogStore.open(home / "log.db") as store:
        for step, of_step in enumerate(runs):
            for run in map(store.get, of_step):
                assert all(0 <= step - t.completion.policy_version <= bound for t in run.turns), run.id
    rows = read_metrics(folder / METRICS)
    assert all(row["stale_dropped"] == 0 for row in rows if not row["skipped"])
    return rows


def report(name: str, rows: Sequence[dict[str, float]], events: Sequence[str]) -> None:
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
    for event in events:
        print(f"  {event}")


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
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        home = Path(folder)
        tasks = make_tasks(levels=[0], n=8, seed=1, split=Split.TRAIN, views=["copy"])
        write_tasks(home / "tasks.jsonl", tasks)
        texts = [m.content for task in tasks for m in first_messages(COMPACT_1, task, ())]
        build_tiny(home / "tiny", texts, hidden=64, layers=2, max_positions=512, vocab_size=400)
        count = 1 if given.vllm else given.servers
        urls = [stack.enter_context(server(home / "tiny", home, n, given.vllm)) for n in range(count)]
        trainings = home / "trainings"
        finish(start_training(home, "in-step", urls, given.steps))
        rows = check(trainings / "in-step", home, given.steps, 0)
        report("in step", rows, [])
        ahead = ("--async", "--max-off-policy-steps", str(given.bound))
        first = start_training(home, "ahead", urls, given.steps, *ahead)
        kill_after(first, trainings / "ahead" / METRICS, given.steps // 2)
        finish(start_training(home, "ahead", urls, given.steps, *ahead))
        rows = check(trainings / "ahead", home, given.steps, given.bound)
        report("ahead", rows, [event.text for event in read_events(trainings / "ahead") if event.text])
    print("all held")


if __name__ == "__main__":
    main()
