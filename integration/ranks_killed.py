"""Trains on ranks (torchrun, FSDP2) that are killed at random moments; the same command goes on.

Each kill is SIGKILL to one rank, drawn evenly, at a moment drawn evenly over the time that an undisturbed
training takes: while it starts, rolls out, updates, or saves. A training that was killed is started again
until it ends; then its weights must equal those of the undisturbed one bit for bit, with each step trained
once.

    python integration/ranks_killed.py --kills 30 --ranks 2
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch
from safetensors.torch import load_file
from smoke import parse

from integration.tiny_model import build_tiny
from nano_coder.agent.profiles import COMPACT_1, first_messages
from nano_rl.resume import STATES
from nano_rl.tasks.task_file import write_tasks
from nano_rl.training_record import USED, read_used
from nano_shared.types import Split
from nano_suites.drawing import make_tasks

END_SECONDS = 120.0
"""longest time from a kill to the end of all ranks"""


def start(home: Path, name: str, ranks: int, steps: int) -> subprocess.Popen[bytes]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    arguments = [
        "-m", "nano_rl", "train", "--name", name, "--model", str(home / "tiny"), "--tasks",
        str(home / "tasks.jsonl"), "--steps", str(steps), "--prompts", "2", "--group-size", "4", "--reward",
        "remote_engine:parity=1", "--set", "guards.patience=1000", "--limit", "max_completion_tokens=6",
        "--limit", "max_turns=1",
    ]  # fmt: skip
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    variables = {**os.environ, "NANO_HOME": str(home), "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    with (home / f"{name}.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, *torchrun, *arguments], env=variables, stdout=log, stderr=log
        )


def ranks_of(parent: int) -> Iterator[int]:
    """The processes of the ranks that live."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended meanwhile
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) == parent and b"nano_rl" in (folder / "cmdline").read_bytes():
                yield int(folder.name)


def moment(training: Path) -> str:
    """What a training is doing, by its files."""
    states = training / STATES
    if list(states.glob(".*.tmp-*")) or list((training / "shards").glob("**/.*tmp*")):
        return "while it saved"
    return "later" if list(states.glob("[0-9]*")) else "before its first state"


def kill_one(
    training: subprocess.Popen[bytes], seconds: float, draw: random.Random, home: Path
) -> str | None:
    """Kill a rank after so many seconds; returns when that was, None if the training ended first."""
    end = time.monotonic() + seconds
    while time.monotonic() < end or not list(ranks_of(training.pid)):
        if training.poll() is not None:
            return None
        time.sleep(0.01)
    victims = sorted(ranks_of(training.pid))
    place, when = draw.randrange(len(victims)), moment(home / "trainings" / "killed")
    try:
        os.kill(victims[place], signal.SIGKILL)
    except ProcessLookupError:
        return None
    return f"process {place}, {when}"


def check(home: Path, name: str, steps: int) -> dict[str, torch.Tensor]:
    """The weights of a training that ended; each step was trained once."""
    used = read_used(home / "trainings" / name / USED)
    assert [line["step"] for line in used] == list(range(steps)), f"{name}: each step once"
    (file,) = (home / "checkpoints" / name).rglob("*.safetensors")
    weights: dict[str, torch.Tensor] = load_file(file)
    return weights


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--kills", type=int, default=30)
    asked.add_argument("--ranks", type=int, default=2)
    asked.add_argument("--steps", type=int, default=6)
    asked.add_argument("--seed", type=int, default=0)
    asked.add_argument("--minutes", type=float, default=60.0, help="no further kill after them")
    given = parse(asked, kills=0, ranks=1, steps=1)
    draw, kills, until = random.Random(given.seed), Counter[str](), time.monotonic() + 60 * given.minutes
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        tasks = make_tasks(levels=[0], n=8, seed=1, split=Split.TRAIN, views=["copy"])
        write_tasks(home / "tasks.jsonl", tasks)
        texts = [m.content for task in tasks for m in first_messages(COMPACT_1, task, ())]
        build_tiny(home / "tiny", texts, hidden=32, layers=2, max_positions=512, vocab_size=400)
        began = time.monotonic()
        assert start(home, "whole", given.ranks, given.steps).wait() == 0, (home / "whole.log").read_text()[
            -4000:
        ]
        seconds, expected = time.monotonic() - began, check(home, "whole", given.steps)
        print(f"undisturbed: {given.steps} steps on {given.ranks} ranks in {seconds:.0f} s", flush=True)
        if given.smoke:
            return
        trainings = slowest = 0.0
        while kills.total() < given.kills and time.monotonic() < until:
            training = start(home, "killed", given.ranks, given.steps)
            when = kill_one(training, draw.uniform(0, seconds), draw, home)
            ended = time.monotonic()
            code = training.wait(timeout=END_SECONDS if when else None)
            saved = (home / "checkpoints" / "killed").exists()
            if when is not None:
                kills[when] += 1
                slowest = max(slowest, time.monotonic() - ended)
                print(
                    f"{kills.total()}: {when}; all ended after {time.monotonic() - ended:.0f} s", flush=True
                )
            elif code != 0:
                raise SystemExit((home / "killed.log").read_text()[-4000:])
            if saved:
                trainings += finished(home, given.steps, expected)
        if start(home, "killed", given.ranks, given.steps).wait() != 0:
            raise SystemExit((home / "killed.log").read_text()[-4000:])
        trainings += finished(home, given.steps, expected)
    print(
        f"{kills.total()} kills over {trainings:.0f} trainings, all with the undisturbed weights:"
        f" {dict(kills)}"
    )
    print(f"all ranks ended {slowest:.0f} s after a kill at most")


def finished(home: Path, steps: int, expected: dict[str, torch.Tensor]) -> int:
    """Compare a training that ended with the undisturbed one, and make way for the next."""
    found = check(home, "killed", steps)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items()), "other weights"
    for folder in ("trainings", "checkpoints"):
        (home / folder / "killed").rename(home / folder / f"done-{time.monotonic_ns()}")
    return 1


if __name__ == "__main__":
    main()
