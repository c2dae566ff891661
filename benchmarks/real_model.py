"""What a real local model makes of the agent: its calls, its tokens and its time, task by task.

    python benchmarks/real_model.py --model coder-1.5b [--base-url URL] [--seeds 0 1] [--out FILE]

Runs `examples/buggy_stats` and the tasks of `examples/seeds.jsonl` with each seed; seed 0 is greedy. FILE
gets, beside the figures of each run, every answer with the calls that were executed and the error that was
told: whether an answer without a call meant one is for a person to say. Exits with 1 where a run took more
than five minutes or finished on an answer that nobody read.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from nano_shared.store import LogStore
from nano_shared.types import StopReason, Trajectory

EXAMPLES = Path(__file__).parents[1] / "examples"
TASK = "The tests fail. Find the bug in stats.py and fix it."
CHECK = "python -m pytest -q"
MOST_SECONDS = 300.0
_MAIN = "import sys; from {} import main; sys.exit(main())"


def run(log: Path, model: list[str], seed: int, seconds: float) -> None:
    """Run all tasks with this seed, each in a process of its own."""
    sampling = ["--seed", str(seed), "--temperature", "0" if seed == 0 else "0.3"]
    common, limit = [*model, *sampling, "--log", str(log)], f"max_seconds={seconds:g}"
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder) / "buggy_stats"
        shutil.copytree(EXAMPLES / "buggy_stats", work)
        task = ["run", TASK, "-C", str(work), "--check", CHECK, "--limit", f"max_seconds={seconds}", "--json"]
        _call("nano_coder.cli", [*task, *common])
        for line in (EXAMPLES / "seeds.jsonl").read_text().splitlines():
            (one := Path(folder) / "task.jsonl").write_text(line)
            _call(
                "nano_rl.cli",
                ["rollout", "--tasks", str(one), "--limit", limit, *common],
            )


def _call(module: str, arguments: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", _MAIN.format(module), *arguments], stdout=subprocess.DEVNULL)
    print(f"{module} {arguments[0]}: exit code {done.returncode}", file=sys.stderr, flush=True)


def figures(run: Trajectory) -> dict[str, Any]:
    """The row of a run."""
    return {
        "task": run.task.key if run.task.key.startswith("seeds:") else "buggy_stats",
        "seed": run.seed,
        "stop": run.stop,
        "reward": run.reward,
        "seconds": round((run.ended or run.started) - run.started, 1),
        "tokens": run.num_sampled_tokens,
        "answers": [
            {
                "text": turn.completion.text,
                "finish": turn.completion.finish,
                "calls": [call.model_dump() for call in turn.calls],
                "repairs": turn.repairs,
                "error": turn.parse_error,
            }
            for turn in run.turns
        ],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="coder-1.5b")
    parser.add_argument("--base-url")
    parser.add_argument("--profile")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1])
    parser.add_argument("--seconds", type=float, default=MOST_SECONDS)
    parser.add_argument("--log", type=Path)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    model = ["--model", asked.model]
    model += ["--base-url", asked.base_url] if asked.base_url else []
    model += ["--profile", asked.profile] if asked.profile else []
    with tempfile.TemporaryDirectory() as folder:
        log = asked.log or Path(folder) / "log.db"
        for seed in asked.seeds:
            run(log, model, seed, asked.seconds)
        store = LogStore.open(str(log))
        rows = [figures(run) for run in store.trajectories()]
    for row in rows:
        executed = sum(len(answer["calls"]) for answer in row["answers"])
        print(f"{row['task']:16} seed {row['seed']}  {row['stop']:14} reward {row['reward']}  "
              f"{row['seconds']:6.1f} s  {row['tokens']:5} tokens  {executed} calls in "
              f"{len(row['answers'])} answers")  # fmt: skip
    if asked.out:
        asked.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    unread = [row for row in rows if row["stop"] == StopReason.FINISHED and row["answers"][-1]["error"]]
    return int(bool(unread) or any(row["seconds"] > MOST_SECONDS for row in rows))


if __name__ == "__main__":
    sys.exit(main())
