"""Measures the costs of engines, agents, tools, graders, updates and syncs, and trainings to compare with.

    python benchmarks/scale_calibrate.py --out FOLDER [--steps 10] [--engines 1 2 3]

1. One `nano-coder serve` under 1 to 16 requests at a time: seconds of a request, a prefilled token, a decoded
   token, and a row of the batch, by least squares.
2. `nano-rl train --engine` with 1, 2 and 3 servers, synchronous and with `--async --max-off-policy-steps 4`:
   steps an hour and idle shares. Costs of turns, grading, updates and syncs are read from the log and the
   metrics of the synchronous training on one server alone.

Engines are processes of `nano-coder serve` on a tiny policy that has imitated oracles. Two cores cannot carry
three engines of a size that matters, so their passes, the tools' calls and the updates are lengthened by
sleeping (`delays.py`). Writes docs/results/scale_costs.json; FOLDER keeps what was trained.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any

import httpx
import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "integration"))

import delays  # noqa: E402
from engine_process import KEY, EngineProcess  # noqa: E402
from log_arms import Bench, Scale  # noqa: E402

from nano_rl.learn.metrics import METRICS, read_metrics  # noqa: E402
from nano_rl.tasks.task_file import write_tasks  # noqa: E402
from nano_shared.store import LogStore  # noqa: E402

RESULT = ROOT / "docs" / "results" / "scale_costs.json"
SCALE = Scale(tasks=300, oracles=300, held_out=10, max_tokens=32)
PROMPTS, GROUP, BOUND = 4, 4, 4
SKIPPED = 2
"""steps at the beginning that no figure counts: servers and caches are cold, and none is ahead yet"""
_PATH = os.pathsep.join([str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")])


class SlowEngine(EngineProcess):
    program = "import delays; delays.slow_engine(); from nano_coder.cli import main; main()"

    def __init__(self, home: Path, number: int) -> None:
        super().__init__(home, number)
        self.busy_file = home / f"busy-{number}"

    def begin(self, model: Path) -> None:
        os.environ |= {delays.BUSY: str(self.busy_file), "PYTHONPATH": _PATH}
        self.start(model)

    @property
    def busy(self) -> float:
        """Seconds of work so far."""
        held = self.busy_file.read_bytes() if self.busy_file.exists() else b""
        return float(struct.unpack("d", held)[0]) if held else 0.0


def measure_engine(home: Path, model: Path) -> dict[str, float]:
    """Seconds of a request (`request`), of a token that is prefilled (`prefill`) and decoded (`token`), and
    of each row of the batch meanwhile (`row`): latency = request + prefill p B + n token + (n - 1) row B,
    since the first token comes with the prefill, which is a pass too."""
    draw, features, seconds = Random(0), [], []
    with SlowEngine(home, 9) as engine:
        engine.begin(model)
        name = httpx.get(f"{engine.url}/models").json()["data"][0]["id"]

        def ask(size: int, new: int, at_once: int) -> None:
            ids = [draw.randrange(260, 500) for _ in range(size)]
            body = {
                "model": name, "prompt": ids, "max_tokens": new, "return_token_ids": True, "temperature": 1.0,
            }  # fmt: skip
            began = time.monotonic()
            answer = httpx.post(f"{engine.url}/completions", json=body, timeout=300).json()
            spent, found = time.monotonic() - began, len(answer["choices"][0]["token_ids"])
            # those that came at once are prefilled together, before any of them decodes
            features.append([1.0, size * at_once, found, (found - 1) * at_once])
            seconds.append(spent)

        for at_once in (1, 2, 4, 8, 16):
            with ThreadPoolExecutor(at_once) as threads:
                for size, new in ((60, 3), (60, 8), (300, 3), (300, 8)):
                    for done in [threads.submit(ask, size, new, at_once) for _ in range(at_once)]:
                        done.result()
    found, *_ = np.linalg.lstsq(np.array(features), np.array(seconds), rcond=None)
    off = np.abs(np.array(features) @ found - seconds) / seconds
    costs = dict(zip(("request", "prefill", "token", "row"), map(float, found), strict=True))
    return costs | {"median_error": float(np.median(off))}


def train(home: Path, model: Path, engines: Sequence[SlowEngine], steps: int, bound: int) -> dict[str, Any]:
    """One training; its row of the result. `bound` 0 is synchronous."""
    name = f"{'async' if bound else 'sync'}-{len(engines)}"
    folder = home / "trainings" / name
    arguments = [
        "train", "--name", name, "--model", str(model), "--tasks", str(home / "tasks.jsonl"), "--engine",
        ",".join(engine.url for engine in engines), "--lora-rank", "8", "--steps", str(steps), "--prompts",
        str(PROMPTS), "--group-size", str(GROUP), "--limit", "max_completion_tokens=32", "--log",
        str(folder.with_suffix(".db")), "--set", "guards.patience=1000", "--set", "guards.mismatch_max=1e-3",
        *(("--async", "--max-off-policy-steps", str(bound)) if bound else ()),
    ]  # fmt: skip
    program = "import delays; delays.slow_tools_and_trainer(); from nano_rl.cli import main; main()"
    variables = {**os.environ, "NANO_HOME": str(home), "NANO_ENGINE_KEY": KEY, "PYTHONPATH": _PATH}
    training = subprocess.Popen([sys.executable, "-c", program, *arguments], env=variables)
    marks: list[tuple[float, float, list[float]]] = []
    while training.poll() is None:
        done = len(read_metrics(folder / METRICS)) if (folder / METRICS).exists() else 0
        if done in (SKIPPED, steps) and len(marks) < 1 + (done == steps):
            marks.append((time.monotonic(), cpu_of(training.pid), [engine.busy for engine in engines]))
        time.sleep(0.02)
    assert training.returncode == 0, name
    rows = read_metrics(folder / METRICS)[SKIPPED:]
    (began, cpu, busy), (ended, cpu_after, busy_after) = marks[0], marks[-1]
    spent = sum(row["step_time"] or 0.0 for row in rows)
    waited = sum(row["seconds_waited"] or 0.0 for row in rows)
    return {
        "name": name, "engines": len(engines), "bound": bound, "steps_an_hour": 3600 * len(rows) / spent,
        "trainer_idle": waited / spent,
        "engine_idle": 1 - mean(b - a for a, b in zip(busy, busy_after, strict=True)) / (ended - began),
        "staleness": mean(row.get("staleness_mean") or 0.0 for row in rows),
        "sync": mean(row.get("seconds_sync") or 0.0 for row in rows),
        "cpu_a_step": (cpu_after - cpu) / len(rows),
        "load": os.getloadavg()[0],
    }  # fmt: skip


def cpu_of(pid: int) -> float:
    """CPU seconds of a process and of its children that have ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def work_of(home: Path, name: str, cpu_a_step: float) -> dict[str, Any]:
    """What the runs of a training consist of, from its log and metrics."""
    runs, gaps, starts, grades = [], [], [], []
    with LogStore.open(home / "trainings" / f"{name}.db", create=False) as store:
        created = dict(store.sql("SELECT run_id, created FROM verdicts").rows)
        for run in store.trajectories():
            turns = []
            for turn in run.turns:
                tokens = turn.completion.tokens
                assert tokens is not None
                tool = sum(seen.ended - seen.started for seen in turn.observations)
                turns.append([len(tokens.context_ids), len(tokens.sampled_ids), round(tool, 3)])
            runs.append(turns)
            gaps += [b.started - a.ended for a, b in zip(run.turns, run.turns[1:], strict=False)]
            starts.append(run.turns[0].started - run.started)
            grades.append(created[run.id] - (run.ended or created[run.id]))
    rows = read_metrics(home / "trainings" / name / METRICS)[SKIPPED:]
    tokens = mean(row["tokens_rollout"] or 0.0 for row in rows)
    update = mean(row["seconds_train"] or 0.0 for row in rows)
    busy = mean(r["seconds_train"] + r["seconds_waited"] + r["seconds_sync"] for r in rows)  # type: ignore
    (adapter,) = (home / "checkpoints" / name).rglob("adapter_model.safetensors")
    return {
        "runs": runs, "start": mean(starts), "gap": mean(gaps), "grade": mean(grades),
        "update": delays.UPDATE, "update_token": (update - delays.UPDATE) / tokens,
        "rest": mean(row["step_time"] or 0.0 for row in rows) - busy,
        "cpu_a_turn": cpu_a_step / (mean(map(len, runs)) * PROMPTS * GROUP),
        "adapter_bytes": adapter.stat().st_size,
    }  # fmt: skip


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    asked.add_argument("--out", type=Path, required=True)
    asked.add_argument("--steps", type=int, default=10, help="of each training")
    asked.add_argument("--engines", type=int, nargs="+", default=[1, 2, 3])
    given = asked.parse_args()
    home = given.out
    bench = Bench(home, SCALE, seed=0)
    warm = bench.warm()
    write_tasks(home / "tasks.jsonl", bench.tasks.train)
    engine, measured, work = measure_engine(home, warm), [], None
    print(json.dumps(engine), flush=True)
    for count in given.engines:
        for bound in (0, BOUND):
            with ExitStack() as stack:
                engines = [stack.enter_context(SlowEngine(home, number)) for number in range(count)]
                for each in engines:
                    each.begin(warm)
                measured.append(train(home, warm, engines, given.steps, bound))
            print(json.dumps(measured[-1]), flush=True)
            work = work or work_of(home, measured[-1]["name"], measured[-1]["cpu_a_step"])
    result = {
        "command": f"python benchmarks/scale_calibrate.py --out FOLDER --steps {given.steps}",
        "machine": "two cores, shared; engines, tools and updates lengthened by sleeping (delays.py)",
        "prompts": PROMPTS, "group": GROUP, "steps": given.steps, "engine": engine, "work": work,
        "sync": [row["sync"] for row in measured if not row["bound"]], "measured": measured,
    }  # fmt: skip
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
