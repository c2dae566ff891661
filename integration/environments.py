"""A training in an environment of others, whose server is killed on the way: what is lost, and what is not.

    python integration/environments.py --out FOLDER --env 'verifiers:NAME num_tasks=8'
    python integration/environments.py --out FOLDER --env 'openenv:URL tasks=8' --server 'uvicorn ...:app'
    python integration/environments.py --out FOLDER --env 'nemo-gym:URL rows=FILE' --server 'python ...'

A tiny policy, warmed up on the actions that --act names ('@add number=1'), trains for ten steps. With
--server that command is started, and killed after the third step: the training ends with a sentence, in which
no run without a reward was learned from. Then it is started again, and the training goes on with the same
tasks. Exit code 1 where something else was seen.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import httpx
from smoke import parse

from integration.tiny_model import build_tiny
from nano_coder.agent.profiles import COMPACT_1, first_messages, with_specs
from nano_coder.environment import ENVIRONMENTS, Environments, open_environment
from nano_rl.learn.metrics import METRICS, read_metrics
from nano_rl.training_record import ROLLOUTS, read_rollouts
from nano_shared.store import LogStore
from nano_shared.types import Split

GUESS = Path(__file__).parents[1] / "examples/plugins/src/nano_example_plugins/guess.py"
SECONDS = 300.0
"""for a server to answer"""


class Server:
    """A command that serves the environment's URL."""

    def __init__(self, command: str, url: str) -> None:
        self._command, self._url = shlex.split(command), httpx.URL(url)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns once its port answers."""
        self._process = subprocess.Popen(self._command, start_new_session=True)
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            try:
                socket.create_connection((self._url.host, self._url.port or 80), 1).close()
            except OSError:
                time.sleep(0.2)
            else:
                return
        raise SystemExit(f"{self._url} does not answer")

    def kill(self) -> None:
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def train(home: Path, arguments: Sequence[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "nano_rl", "train", "--name", "tried", *arguments]
    return subprocess.Popen(
        command, env=os.environ | {"NANO_HOME": str(home)}, stderr=subprocess.PIPE, text=True
    )


def warm_up(home: Path, env: str, actions: Sequence[str]) -> None:
    """A tiny policy that answers each task's first message with one of the actions."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    environments = Environments.open([env])
    shown = []
    for task in list(environments.tasks(Split.TRAIN, 0))[:8]:
        session = environments.start(task)
        joined = session.joined(task)
        shown.append(first_messages(with_specs(COMPACT_1, session.tools), joined, ()))
        session.close()
    texts = [message.content for messages in shown for message in messages] + list(actions)
    build_tiny(home / "tiny", texts, hidden=64, layers=2, vocab_size=500)
    tokenizer = AutoTokenizer.from_pretrained(home / "tiny")
    model = AutoModelForCausalLM.from_pretrained(home / "tiny")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for number in range(25 * len(actions)):
        said = [message.model_dump(include={"role", "content"}) for message in shown[number % len(shown)]]
        prompt = tokenizer.apply_chat_template(said, add_generation_prompt=True, return_dict=False)
        action = tokenizer.encode(f"{actions[number % len(actions)]}<|im_end|>")
        labels = torch.tensor([[-100] * len(prompt) + action])
        model(torch.tensor([prompt + action]), labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(home / "tiny")


def steps_done(home: Path) -> int:
    file = home / "trainings" / "tried" / METRICS
    return len(read_metrics(file)) if file.exists() else 0


def kill_on_the_way(home: Path, arguments: Sequence[str], server: Server) -> str:
    """What the training says whose server is killed after its third step."""
    training = train(home, arguments)
    while steps_done(home) < 3 and training.poll() is None:
        time.sleep(0.05)
    server.kill()
    _, error = training.communicate()
    print(f"server killed after step {steps_done(home)}; exit code {training.returncode}")
    said = error.strip().splitlines()[-1]
    print(f"  {said}")
    if training.returncode != 4 or "Traceback" in error:
        raise SystemExit(f"exit code 4 and a sentence were expected:\n{error}")
    return said


def main() -> int:
    parser = argparse.ArgumentParser(description="A training in an environment of others.")
    parser.add_argument("--out", type=Path, required=True, help="NANO_HOME of the training")
    parser.add_argument("--env", required=True, help="as nano-rl train takes it")
    parser.add_argument("--server", help="command that serves the environment")
    parser.add_argument("--act", action="append", default=["@submit\n1"], help="action of the warm-up")
    parser.add_argument("--steps", type=int, default=10)
    options = parse(parser, env=f"{GUESS}:Guess", act=["@guess number=1"], steps=1)
    home: Path = options.out.resolve()
    home.mkdir(parents=True, exist_ok=True)
    server = Server(options.server, shlex.split(options.env)[0].partition(":")[2]) if options.server else None
    if server:
        server.start()
    tasks = open_environment(options.env).tasks(Split.TRAIN, 0)
    print(f"{len(tasks)} tasks; environments at hand: {', '.join(ENVIRONMENTS)}", flush=True)
    warm_up(home, options.env, options.act)
    arguments = [
        "--env", options.env, "--model", str(home / "tiny"), "--steps", str(options.steps), "--prompts", "2",
        "--group-size", "4", "--limit", "max_turns=3", "--limit", "max_completion_tokens=24",
        "--set", "guards.patience=99",
    ]  # fmt: skip
    if server:
        kill_on_the_way(home, arguments, server)
        server.start()
        arguments.append("--resume")
    training = train(home, arguments)
    _, error = training.communicate()
    if server:
        server.kill()
    if training.returncode:
        raise SystemExit(error)
    return report(home, options.steps)


def report(home: Path, steps: int) -> int:
    """What the log and the record say of the training; 1 where a step or a run is there twice."""
    folder = home / "trainings" / "tried"
    rows = [int(row["step"] or 0) for row in read_metrics(folder / METRICS)]
    trained = [run for of_step in read_rollouts(folder / ROLLOUTS).values() for run in of_step]
    store = LogStore.open(str(home / "log.db"), create=False)
    logged = Counter(str(store.get(run.id).stop) for run in store.runs(limit=10_000))
    twice = [run for run, times in Counter(run.id for run in trained).items() if times > 1]
    unrewarded = sum(run.reward is None for run in trained)
    rewards = [run.reward for run in trained if run.reward is not None]
    print(f"steps {rows}; {len(trained)} runs of them, {unrewarded} without a reward, {len(twice)} twice")
    print(f"mean reward {sum(rewards) / max(1, len(rewards)):.3f}; runs in the log by how they ended:")
    print(f"  {dict(logged)}")
    return int(bool(twice) or rows != list(range(steps)))


if __name__ == "__main__":
    sys.exit(main())
