"""Rolls out on three raylets of this machine while workers are killed at random, then reads the log.

Each run takes four turns in a jail and is graded. Workers are killed with SIGKILL, every fifth with SIGSTOP,
which is a worker that hangs; `--raylets 1` kills a raylet with all its workers too. Afterwards each run must
be in the log once, finished and graded, and none of another beside it that counts.

    python integration/ray_endurance.py --runs 2000 --kills 50 --workers 12
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from smoke import parse

from nano_cluster.ray_cluster import set_variables
from nano_cluster.ray_rollouts import RayRollouts
from nano_cluster.ray_setup import setup_of
from nano_cluster.worker_status import ClusterStatus
from nano_coder.agent.profiles import COMPACT_1
from nano_coder.config import AgentConfig
from nano_coder.models.scripted import ScriptedPolicy
from nano_coder.run.execution import Runtime
from nano_coder.sandbox.protocol import open_sandbox
from nano_rl.gather.rollouts import oracle_policy
from nano_shared.policy import Conversation
from nano_shared.store import LogStore
from nano_shared.types import Completion, Role, Sampling, Split, StopReason, Task
from nano_suites.drawing import make_tasks

SLEEP = 0.2
"""longest time of a turn, seconds, as if a server sampled it"""


class ByTurn(ScriptedPolicy):
    """Answers turn k of any conversation with text k of its task, so that a run may be gone on with."""

    def __init__(self, texts: dict[str, tuple[str, ...]]) -> None:
        super().__init__([])
        self._by_prompt = texts

    def complete(self, conversation: Conversation, sampling: Sampling) -> Completion:
        time.sleep(random.uniform(0, SLEEP))
        read = "\n".join(m.content for m in conversation.messages if m.role is not Role.ASSISTANT)
        (texts,) = (each for prompt, each in self._by_prompt.items() if prompt in read)
        turn = sum(message.role is Role.ASSISTANT for message in conversation.messages)
        return ScriptedPolicy([texts[min(turn, len(texts) - 1)]]).complete(conversation, sampling)


def open_by_turn(texts: dict[str, tuple[str, ...]], on_change: Callable[[str], None]) -> ByTurn:
    return ByTurn(texts)


def texts_of(task: Task) -> tuple[str, ...]:
    """The solution, whose edit is made three times."""
    solution: Any = oracle_policy(task, COMPACT_1)
    return (solution._texts[0], solution._texts[0], *solution._texts)


def with_turns(task: Task) -> Task:
    return task.model_copy(update={"limits": task.limits.model_copy(update={"max_turns": 8})})


@contextmanager
def raylets(count: int) -> Iterator[Any]:
    """A cluster of so many raylets on loopback."""
    set_variables(local=True)
    import ray
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 2, "object_store_memory": 80 << 20, "node_ip_address": "127.0.0.1"}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    for _ in range(count - 1):
        cluster.add_node(**node)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
    try:
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def kill_some(workers: RayRollouts, kills: int, seconds: float, ended: threading.Event) -> Counter[str]:
    """Kill ready workers, one each `seconds` or so; returns how many by which signal."""
    done: Counter[str] = Counter()
    while sum(done.values()) < kills and not ended.wait(random.uniform(0.5, 1.5) * seconds):
        if ready := [each for each in workers.status().workers if each.opened and each.running]:
            kind = signal.SIGSTOP if sum(done.values()) % 5 == 4 else signal.SIGKILL
            with suppress(ProcessLookupError):
                os.kill(random.choice(ready).pid, kind)
                done[kind.name] += 1
    return done


def check(log: Path, returned: list[str], jobs: int) -> Counter[str]:
    """Read the log; returns how its runs ended."""
    assert len(returned) == len(set(returned)) == jobs, "a run for each job, and each once"
    counts: Counter[tuple[str, int | None]] = Counter()
    ends: Counter[str] = Counter()
    with LogStore.open(log, create=False) as store:
        for summary in store.runs():
            run = store.get(summary.id)
            ends[run.stop.value if run.stop else "not ended"] += 1
            if run.stop not in (None, StopReason.INTERRUPTED):
                assert run.verdict is not None, run.id
                assert run.id in returned, f"{run.id} counts, and nobody was given it"
                counts[run.task.key, run.seed] += 1
    assert len(counts) == jobs
    assert set(counts.values()) == {1}, "each job once"
    return ends


def memory_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("--runs", type=int, default=2000)
    arguments.add_argument("--kills", type=int, default=50)
    arguments.add_argument("--workers", type=int, default=12)
    arguments.add_argument("--every", type=float, default=5.0, help="seconds between two kills")
    arguments.add_argument("--raylets", type=int, default=0, choices=(0, 1), help="raylets to kill")
    arguments.add_argument("--seed", type=int, default=0)
    given = parse(arguments, runs=4, kills=0, workers=1)
    random.seed(given.seed)
    made = make_tasks(levels=[1], n=40, seed=1, split=Split.TRAIN)
    tasks = [with_turns(task) for task in made if "edit_file" in task.tools][:4]
    events: list[str] = []
    with tempfile.TemporaryDirectory() as folder, raylets(1 if given.smoke else 3) as cluster:
        log = Path(folder) / "log.db"
        runtime = Runtime(policy=ScriptedPolicy([]), sandbox=open_sandbox(), store=LogStore.open(log))
        policy = partial(open_by_turn, {task.prompt: texts_of(task) for task in tasks})
        began, memory = time.monotonic(), [memory_mb()]
        workers = RayRollouts(
            setup_of(runtime, policy, AgentConfig()), cluster.address, workers=given.workers, patience=20.0,
            follows=False, on_change=events.append,
        )  # fmt: skip
        ended, killed = threading.Event(), list[Counter[str]]()
        killer = threading.Thread(
            target=lambda: killed.append(kill_some(workers, given.kills, given.every, ended))
        )
        killer.start()
        most = [0]

        def record(status: ClusterStatus) -> None:
            most[0] = max(most[0], *(worker.running for worker in status.workers), 0)
            memory.append(memory_mb())

        watch = threading.Thread(
            target=lambda: [record(workers.status()) for _ in iter(lambda: ended.wait(1), True)]
        )
        watch.start()
        returned: list[str] = []
        try:
            each = given.runs // len(tasks)
            if given.raylets:
                node = next(iter(cluster.worker_nodes))
                threading.Timer(60, lambda: cluster.remove_node(node, allow_graceful=False)).start()
            returned = [run.id for run in workers.collect(tasks, runtime, group_size=each)]
        finally:
            ended.set()
            killer.join()
            watch.join()
            status = workers.status()
            workers.close()
        seconds = time.monotonic() - began
        runtime.store.close()
        ends = check(log, returned, each * len(tasks))
    print(f"{len(returned)} runs in {seconds:.0f} s, {len(returned) / seconds * 3600:.0f} an hour")
    print(f"killed {dict(killed[0])}, {given.raylets} raylets; replaced {status.replaced} workers")
    print(f"given to a second worker: {status.repeated} runs; in the log: {dict(ends)}")
    print(
        f"at most {most[0]} runs of a worker at a time; trainer's memory {memory[1]:.0f} to"
        f" {max(memory):.0f} MB"
    )
    for event in events[:10]:
        print(f"  {event}")
    print("all held")


if __name__ == "__main__":
    main()
