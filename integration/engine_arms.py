"""Trains with rollouts made in process, on `nano-coder serve` and on vLLM; each should gain the same.

A tiny policy that has imitated some oracles learns for twenty steps a seed in each arm, and is evaluated on
programs that training never saw. With `--base FOLDER`, a model such as SmolLM2-135M then trains as long on
each server, for its agreement with the trainer alone. Each step must be trained once, each run at most once,
and no token may be older than the weights that its step began with. A run that was stopped goes on by the
same command, after its last whole training.

    python integration/engine_arms.py --out FOLDER --vllm ~/vllm/bin/python --base FOLDER
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from async_faults import SCALE, Training, prepared, success
from engine_process import EngineProcess
from log_arms import SMOKE, Scale, over_seeds
from remote_engine import check, finish, mean, report, start_training
from smoke import parse

from nano_rl.tasks.task_file import write_tasks
from nano_shared.types import Split
from nano_suites.drawing import make_tasks

SEEDS = (0, 1, 2)
IN_PROCESS = "in process"


def train_tiny(
    home: Path, servers: dict[str, str | None], steps: int, seeds: Sequence[int] = SEEDS, scale: Scale = SCALE
) -> None:
    """`servers` names the arms on servers: the Python that has vLLM, or None for a server of ours."""
    bench = prepared(home, scale)
    path = home / "result.json"
    result: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    result.setdefault("before", success(bench, "warm"))
    print(f"held-out success before: {result['before']:.1%}", flush=True)
    for arm in (IN_PROCESS, *servers):
        rows = result.setdefault(arm, [])
        with ExitStack() as stack:
            more: list[str] = []
            if arm != IN_PROCESS and len(rows) < len(seeds):
                engine = stack.enter_context(EngineProcess(home, len(more), servers[arm]))
                engine.start(home / "checkpoints" / "warm")
                more = ["--engine", engine.url, "--set", "guards.mismatch_max=1e-3"]
            for seed in seeds[len(rows) :]:
                name = f"{arm.replace(' ', '-')}-{seed}"
                training = Training(home, name, seed, steps, *more, bound=0)
                training.finish()
                metrics = [row for row in training.check() if not row["skipped"]]
                rows.append(
                    {
                        "after": success(bench, name),
                        "reward": mean(metrics[-10:], "reward_mean"),
                        "mismatch": mean(metrics, "mismatch"),
                        "mismatch_max": max(row["mismatch_max"] for row in metrics),
                    }
                )
                print(f"{name}: {rows[-1]}", flush=True)
                path.write_text(json.dumps(result, indent=1) + "\n")
        gains = [row["after"] - result["before"] for row in rows]
        if len(gains) > 1:
            print("{}: {:+.1%} ({:+.1%} to {:+.1%} over seeds)".format(arm, *over_seeds(gains)), flush=True)


def train_base(home: Path, base: Path, servers: dict[str, str | None], steps: int) -> None:
    for arm, vllm in servers.items():
        of_arm = home / f"base-{arm}"
        of_arm.mkdir()
        tasks = make_tasks(levels=[0], n=8, seed=1, split=Split.TRAIN, views=["copy"])
        write_tasks(of_arm / "tasks.jsonl", tasks)
        with EngineProcess(of_arm, 0, vllm) as engine:
            engine.start(base, positions=1024)
            finish(start_training(of_arm, "base", [engine.url], steps, "--model", str(base)))
        folder = of_arm / "trainings" / "base"
        report(f"{base.name} on {arm}", folder, check(folder, of_arm, steps, 0))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="keep logs, checkpoints and result.json here")
    parser.add_argument("--vllm", help="the Python of an environment with vLLM")
    parser.add_argument("--base", type=Path, help="folder of a model that trains as well")
    parser.add_argument("--steps", type=int, default=20)
    given = parse(parser, steps=1)
    home = given.out.resolve()
    # the smoke of remote_engine.py has a server
    servers: dict[str, str | None] = {} if given.smoke else {"serve": None}
    if given.vllm:
        servers["vllm"] = given.vllm
    train_tiny(home, servers, given.steps, *(((0,), SMOKE) if given.smoke else ()))
    if given.base:
        train_base(home, given.base.resolve(), servers, given.steps)
    print("all held")


if __name__ == "__main__":
    main()
