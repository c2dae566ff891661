"""Held-out success of GRPO against the age of its rollouts: 0, 1, 2, 4 and 8 steps, with and without clip.

    python benchmarks/staleness.py --out FOLDER --seeds 0 1 2       about a minute an arm on one core
    python benchmarks/staleness.py --out FOLDER --report [--write]  the table; --write: docs/results,
                                                                  in place of rows of no more seeds

A tiny policy imitates oracles and is then trained on fresh rollouts, each sampled by the weights of K steps
before: what `--async --max-off-policy-steps K` comes to where sampling is much faster than training. Two
updates a step. With clip: the ratio within 0.2 of 1, importance weights truncated at 2 (the defaults);
without: neither bound. An arm that a guard stopped counts with the weights before it.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "integration"))

from log_arms import GROUP, Bench, Scale, rate  # noqa: E402

import nano_rl.train as loop  # noqa: E402
from nano_coder.models.opening import local_policy, open_weights  # noqa: E402
from nano_coder.models.scripted import ScriptedPolicy  # noqa: E402
from nano_coder.run.execution import Runtime  # noqa: E402
from nano_rl.config import TrainConfig  # noqa: E402
from nano_rl.gather.rollouts import OnRun  # noqa: E402
from nano_rl.gather.step_groups import Gatherer, Sources  # noqa: E402
from nano_rl.learn.config import GuardConfig, OptimizerConfig  # noqa: E402
from nano_rl.learn.groups import RolloutBatch  # noqa: E402
from nano_rl.learn.learner import prepare  # noqa: E402
from nano_rl.learn.metrics import METRICS, read_metrics  # noqa: E402
from nano_rl.learn.objectives import RECIPE, ObjectiveConfig  # noqa: E402
from nano_shared.errors import GuardTripped  # noqa: E402
from nano_shared.store import LogStore  # noqa: E402

AGES = (0, 1, 2, 4, 8)
STEPS, PROMPTS, RATE = 24, 8, 5e-4
SCALE = Scale(tasks=300, oracles=300, held_out=200, max_tokens=32)
UNBOUNDED = RECIPE.with_terms(tis_cap=1e9, clip_low=1.0, clip_high=1e9)
OBJECTIVES = {
    "clip": ObjectiveConfig(),
    "no clip": ObjectiveConfig(objective=f"{__file__}:UNBOUNDED"),
}
RESULT = ROOT / "docs" / "results" / "staleness.json"


class LateGatherer(Gatherer):
    """Rolls out with the weights of `age` updates before, or the first ones."""

    def __init__(self, sources: Sources, config: TrainConfig, opened: Any, age: int) -> None:
        super().__init__(sources, config)
        self._opened, self._kept = opened, deque[dict[str, Any]](maxlen=age + 1)
        self._copy = copy.deepcopy(opened.loaded.model).eval()

    def gather(self, runtime: Runtime, step: int, version: int, on_run: OnRun | None = None) -> RolloutBatch:
        now: Any = runtime.policy
        self._kept.append(copy.deepcopy(now.engine.model.state_dict()))
        age = len(self._kept) - 1
        if age:
            self._copy.load_state_dict(self._kept[0])
            loaded = replace(self._opened.loaded, model=self._copy)
            late = local_policy(loaded, self._opened.profile, version=version - age)
            runtime = replace(runtime, policy=late)
        return replace(super().gather(runtime, step, version, on_run), off_policy_steps=age)


def trained(bench: Bench, warm: Path, name: str, age: int, objective: ObjectiveConfig) -> Path:
    """The checkpoint of one arm."""
    folder = bench.home / "state" / name
    folder.mkdir(parents=True, exist_ok=True)
    config = TrainConfig(
        steps=STEPS, prompts_per_step=PROMPTS, group_size=GROUP, seed=bench.seed, save_every=STEPS,
        minibatches=2, optimizer=OptimizerConfig(learning_rate=RATE), objective=objective,
        guards=GuardConfig(patience=STEPS + 1),
    )  # fmt: skip
    opened = open_weights(str(warm))
    model = prepare(opened.loaded.model, lora_rank=0, seed=bench.seed)
    loop.Gatherer = lambda sources, config: LateGatherer(sources, config, opened, age)  # type: ignore
    with LogStore.open(folder / "log.db") as store:
        runtime = replace(bench._runtime(warm, store), policy=ScriptedPolicy([]))
        sources, used = Sources(tasks=tuple(bench.tasks.train)), []
        try:
            used = loop.train(model, opened, runtime, sources, config, folder)
        except GuardTripped as problem:
            (folder / "stopped").write_text(str(problem))
            print(f"{name}: {problem}")
    done = len(read_metrics(folder / METRICS))
    return bench.save(name, model, opened, config, warm, done, used)


def run(home: Path, seed: int, ages: Sequence[int]) -> None:
    bench = Bench(home, SCALE, seed=seed)
    warm = bench.warm()
    bench.arm("start", lambda: warm, age=0, kind="start")
    for age in ages:
        for kind, objective in OBJECTIVES.items():
            name = f"{kind.replace(' ', '-')}-{age}"
            bench.arm(name, lambda: trained(bench, warm, name, age, objective), age=age, kind=kind)  # noqa: B023


def report(out: Path, write: bool) -> None:
    """Mean success over the seeds that have the arm, and each seed's."""
    found = [json.loads(path.read_text()) for path in sorted(out.glob("seed-*/arm-*.json"))]
    rows = []
    for kind, age in [("start", 0), *((kind, age) for kind in OBJECTIVES for age in AGES)]:
        of = [r for r in found if (r["kind"], r["age"]) == (kind, age)]
        if not of:
            continue
        name = f"{kind.replace(' ', '-')}-{age}"
        ess = [row["ess"] for r in of for row in r["curve"] if row["ess"] is not None]
        rows.append(
            {
                "kind": kind, "age": age, "success": round(100 * mean(map(rate, of)), 1),
                "seeds": [round(100 * rate(r), 1) for r in of],
                "ess_least": round(min(ess), 2) if ess else None,
                "stopped": sum((out / f"seed-{r['seed']}" / "state" / name / "stopped").exists() for r in of),
            }
        )  # fmt: skip
        print(rows[-1])
    if write:
        known = {(row["kind"], row["age"]): row for row in json.loads(RESULT.read_text())["rows"]}
        for row in rows:
            last = known.get(key := (row["kind"], row["age"]))
            if last is None or len(row["seeds"]) >= len(last["seeds"]):
                known[key] = row
        order = {kind: n for n, kind in enumerate(("start", *OBJECTIVES))}
        told = {
            "command": "python benchmarks/staleness.py --out FOLDER --seeds 0 1 2", "steps": STEPS,
            "rows": sorted(known.values(), key=lambda row: (order[row["kind"]], row["age"])),
        }  # fmt: skip
        RESULT.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="a folder a seed; what is there is not redone"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--ages", type=int, nargs="+", default=AGES, help="steps")
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--write", action="store_true", help="also write docs/results/staleness.json")
    given = parser.parse_args(arguments)
    for seed in () if given.report else given.seeds:
        run(given.out / f"seed-{seed}", seed, given.ages)
    report(given.out, given.write)


if __name__ == "__main__":
    main()
