"""Are logged log-probs those of the weights? Recomputes 200 logged turns of a policy in float32.

python benchmarks/exact_tokens.py --model shipped --tasks FILE
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from nano_coder.models.opening import local_policy, open_weights
from nano_coder.run.execution import RunSettings, Runtime
from nano_coder.sandbox.protocol import open_sandbox
from nano_coder.verify.trainable import verify
from nano_rl.gather.rollouts import collect
from nano_rl.tasks.task_file import read_tasks
from nano_shared.store import LogStore
from nano_shared.types import Sampling, Trajectory

TURNS = 200
WAVE = 16
"""agents decoded together"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--tasks", type=Path, required=True)
    options = parser.parse_args()
    opened = open_weights(options.model)
    policy = local_policy(opened.loaded, opened.profile, version=opened.version)
    with tempfile.TemporaryDirectory() as folder:
        store = LogStore.open(Path(folder) / "log.db")
        runtime = Runtime(
            policy=policy, sandbox=open_sandbox(), store=store, profile=opened.profile,
            sampling=Sampling(temperature=1.0), policy_name=options.model,
            settings=RunSettings(at_once=WAVE),
        )  # fmt: skip
        tasks = read_tasks(options.tasks)
        differences: list[float] = []
        turns = broken = 0
        for start in range(0, len(tasks), WAVE):
            for run in collect(tasks[start : start + WAVE], runtime, seed=start):
                logged = store.get(run.id)
                differences += compare(logged, policy)
                turns += len(logged.turns)
                broken += any(finding.blocks for finding in verify(logged))
            if turns >= TURNS:
                break
    print(
        f"{turns} turns, {len(differences)} sampled tokens: |difference| mean"
        f" {sum(differences) / len(differences):.2e}, largest {max(differences):.2e};"
        f" runs that verify refuses: {broken}"
    )


def compare(run: Trajectory, policy) -> list[float]:  # type: ignore[no-untyped-def]
    """|logged - recomputed| for each sampled token of a run, its row scored in one pass."""
    row: list[int] = []
    places: list[int] = []
    logged: list[float] = []
    for turn in run.turns:
        tokens = turn.completion.tokens
        assert tokens is not None
        row += tokens.context_ids
        places += range(len(row), len(row) + len(tokens.sampled_ids))
        row += tokens.sampled_ids
        logged += tokens.logprobs
    (scores,) = policy.engine.score([tuple(row)])
    return [abs(scores[place - 1] - value) for place, value in zip(places, logged, strict=True)]


if __name__ == "__main__":
    main()
