"""Seconds of a step's rollouts dealt over all ranks beside those of rank 0 alone, in turn, of a model of 10
million random weights.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/rank_rollouts.py [ROUNDS]

Prints medians: {"all": {"wall": s, "cpu": [s of each rank]}, "rank 0 alone": ..., "load": of the machine}.
Without other load the wall takes as long as the rank of the most CPU time, where each has a core.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))
from integration.tiny_model import build_tiny
from nano_cluster.rank_rollouts import HAND_IN, FollowingRollouts, LeadingRollouts
from nano_cluster.ranks import LEAVE, Ranks
from nano_coder.agent.profiles import COMPACT_1, first_messages
from nano_coder.models.opening import local_policy, open_weights
from nano_coder.models.scripted import ScriptedPolicy
from nano_coder.run.execution import Runtime
from nano_coder.sandbox.protocol import open_sandbox
from nano_rl.config import TrainConfig
from nano_shared.store import LogStore
from nano_shared.types import Sampling, Split
from nano_suites.drawing import make_tasks

TASKS = [
    task.model_copy(update={"limits": task.limits.model_copy(update={"max_turns": 1})})
    for task in make_tasks(levels=[0], n=8, seed=1, split=Split.TRAIN, views=["copy"])
]


def main(rounds: int) -> None:
    torch.set_num_threads(1)
    ranks = Ranks.connect()
    ranks.join("cpu")
    with ranks.beating(), TemporaryDirectory() if ranks.rank == 0 else nullcontext("") as folder:
        place = Path(ranks.scatter([folder] * ranks.size if ranks.rank == 0 else None))
        if ranks.rank == 0:
            texts = [message.content for task in TASKS for message in first_messages(COMPACT_1, task, ())]
            build_tiny(
                place / "model", texts, hidden=384, layers=6, max_positions=512, vocab_size=300, seed=0
            )
        ranks.agree()
        opened = open_weights(str(place / "model"))
        if ranks.rank:
            following, spent = FollowingRollouts(ranks, opened, TrainConfig()), 0.0
            for order, _ in ranks.orders():
                began = time.process_time()
                following.follow(order)
                if order == HAND_IN:
                    ranks.gather(spent)
                else:
                    spent = time.process_time() - began
        else:
            print(json.dumps(measured(ranks, opened, place, rounds)))
            ranks.order(LEAVE)
    dist.destroy_process_group()


def measured(ranks: Ranks, opened: Any, folder: Path, rounds: int) -> dict[str, Any]:
    runtime = Runtime(
        policy=ScriptedPolicy([]), sandbox=open_sandbox(), store=LogStore.open(folder / "log.db"),
        sampling=Sampling(max_tokens=48), policy_name="small",
    )  # fmt: skip
    kinds = {"all": LeadingRollouts(ranks, ranks.size), "rank 0 alone": LeadingRollouts(ranks, 1)}
    found: dict[str, list[list[float]]] = {name: [] for name in kinds}
    with runtime.store:
        for seed in range(rounds + 1):
            for name, leading in kinds.items():
                policy = local_policy(opened.loaded, opened.profile, scheduler="lockstep")
                wall, cpu = time.monotonic(), time.process_time()
                leading.collect(TASKS, replace(runtime, policy=policy), group_size=8, seed=seed)
                spent = [time.monotonic() - wall, time.process_time() - cpu]
                others = (ranks.gather(None) or [])[1:]
                found[name] += [[*spent, *others]] * (seed > 0)  # the first round opens logs and jails
    medians = {
        name: [round(statistics.median(column), 2) for column in zip(*rows, strict=True)]
        for name, rows in found.items()
    }
    seconds = {name: {"wall": wall, "cpu": cpu} for name, (wall, *cpu) in medians.items()}
    return {**seconds, "load": os.getloadavg()[0], "rounds": rounds}


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else 5)
