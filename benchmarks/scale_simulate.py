"""A discrete-event simulation (SimPy) of trainer, engines, agents, tools and graders, against measurement.

    python benchmarks/scale_simulate.py             predicts each training of docs/results/scale_costs.json
    python benchmarks/scale_simulate.py --write     also 8, 64 and 512 engines; writes scale_simulation.json

Costs are those that `scale_calibrate.py` measured: the tokens and tool times of whole runs are drawn from its
runs, the rest are means. The rules are nano's: step k begins at version k - K, two steps roll out at a time,
each by 64 agents and 8 graders; an engine prefills what joins and then decodes a token for each of its rows.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Generator
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import simpy

RESULTS = Path(__file__).parents[1] / "docs" / "results"
AT_ONCE, AGENTS, GRADERS = 2, 64, 8
"""steps rolled out at a time, and of each the runs and the gradings at a time (nano_rl/gather)"""
PROBE = 64, 8
"""tokens that a probe prefills and samples on each engine after an update"""
SKIPPED = 2
BOUND = 20.0
"""largest error of a prediction of steps an hour, percent"""
Process = Generator[simpy.Event, Any, Any]


@dataclass(kw_only=True)
class Cluster:
    """Sizes of what is simulated. `agent_cores`, `store` and `network` are what all runs share."""

    engines: int
    bound: int
    prompts: int
    group: int
    steps: int
    sync: float
    """seconds to write an adapter, and to load it, without its probes"""
    agents: int = AGENTS
    """runs at a time of a step"""
    graders: int = GRADERS
    agent_cores: int = 2
    trainers: int = 1
    """ranks among which the tokens of an update are divided"""
    store: float = 2000.0
    """turns a second that the log takes"""
    beside: bool = False
    """syncs beside updates, which nano does not do: steps begin when theirs is done, and no update waits"""
    network: float = 1.25e9
    """bytes a second of the disk or link from which engines read an adapter"""


class Engine:
    """Continuous batching: rows that join are prefilled together, then each pass gives each row a token.

    `nano-coder serve` has a batch for each adapter, so that rows of two versions take two passes.
    """

    def __init__(self, env: simpy.Environment, costs: dict[str, float]) -> None:
        self.env, self.costs = env, costs
        self.rows: dict[simpy.Event, float] = {}
        """finished -> tokens that are still to be sampled"""
        self.versions: dict[simpy.Event, int] = {}
        self.waiting: list[tuple[simpy.Event, int, int]] = []
        self.joined, self.busy = env.event(), 0.0
        self.running = 0
        """requests that the pool has sent"""
        env.process(self.run())

    @property
    def load(self) -> int:
        return len(self.rows) + len(self.waiting)

    def sample(self, version: int, prefill: int, tokens: int) -> simpy.Event:
        done = self.env.event()
        self.versions[done] = version
        self.waiting.append((done, prefill, tokens))
        if not self.joined.triggered:
            self.joined.succeed()
        return done

    def run(self) -> Process:
        while True:
            if not self.load:
                yield self.joined
            if self.joined.triggered:
                self.joined = self.env.event()
            began = self.env.now
            if self.waiting:
                joining, self.waiting = self.waiting, []
                size = sum(prefill for _, prefill, _ in joining)
                yield self.env.timeout(self.costs["token"] + self.costs["prefill"] * size)
                for done, _, tokens in joining:
                    if tokens > 1:  # the first comes with the prefill
                        self.rows[done] = tokens - 1.0
                    else:
                        self.end(done)
                if not self.rows:
                    self.busy += self.env.now - began
                    continue
            versions = len({self.versions[done] for done in self.rows})
            step = self.costs["token"] * versions + self.costs["row"] * len(self.rows)
            # until a row ends or another joins nothing changes
            least = self.env.timeout(step * min(self.rows.values()))
            start = self.env.now
            yield least | self.joined if not self.waiting else self.env.timeout(step)
            passes = (self.env.now - start) / step
            if not least.processed:  # one that joins waits for the end of a pass
                whole = math.ceil(passes - 1e-6)
                yield self.env.timeout(max(0.0, whole - passes) * step)
                passes = whole
            self.busy += self.env.now - began
            self.rows = {done: left - passes for done, left in self.rows.items()}
            for done in [done for done, left in self.rows.items() if left < 1e-6]:
                del self.rows[done]
                self.end(done)

    def end(self, done: simpy.Event) -> None:
        del self.versions[done]
        done.succeed()


@dataclass
class Training:
    """One training; `result` after `run`."""

    costs: dict[str, Any]
    cluster: Cluster
    seed: int = 0
    version: int = 0
    tokens: dict[int, int] = field(default_factory=dict)
    ages: list[int] = field(default_factory=list)
    busy: dict[str, float] = field(default_factory=dict)

    def run(self) -> dict[str, Any]:
        self.env, self.draw = simpy.Environment(), Random(self.seed)
        env, cluster = self.env, self.cluster
        self.engines = [Engine(env, self.costs["engine"]) for _ in range(cluster.engines)]
        self.cores = simpy.Resource(env, cluster.agent_cores)
        self.store = simpy.Resource(env, 1)
        self.turn = simpy.Resource(env, AT_ONCE)
        self.done: dict[int, simpy.Event] = {}
        env.run(env.process(self.train()))
        return self.result

    def spend(self, name: str, resource: simpy.Resource, seconds: float) -> Process:
        with resource.request() as mine:
            yield mine
            yield self.env.timeout(seconds)
        self.note(name, seconds)

    def note(self, name: str, seconds: float) -> None:
        self.busy[name] = self.busy.get(name, 0.0) + seconds

    def train(self) -> Process:
        work, cluster, env = self.costs["work"], self.cluster, self.env
        marks, waited, synced = {}, 0.0, None
        for step in range(cluster.steps):
            if step == SKIPPED:
                marks = {"now": env.now, "waited": waited, "engines": sum(e.busy for e in self.engines)}
                marks |= {f"busy {name}": spent for name, spent in self.busy.items()}
                self.ages.clear()
            if synced is not None:
                yield synced
            synced = env.process(self.sync(step))
            if not cluster.beside or step not in self.done:
                yield synced
            start = env.now
            yield self.done[step]
            waited += env.now - start
            update = work["update"] + work["update_token"] * self.tokens[step] / cluster.trainers
            yield env.timeout(update + work["rest"])
            self.note("trainer", update + work["rest"])
        spent = env.now - marks["now"]
        steps = cluster.steps - SKIPPED
        sizes = {
            "trainer": 1, "syncs": 1, "agents at a time": AT_ONCE * cluster.agents,
            "graders": AT_ONCE * cluster.graders,
            "cores of agents": cluster.agent_cores, "log": 1,
        }  # fmt: skip
        shares = {
            name: (self.busy[name] - marks.get(f"busy {name}", 0.0)) / spent / size
            for name, size in sizes.items()
        }
        engines = (sum(e.busy for e in self.engines) - marks["engines"]) / spent / cluster.engines
        idle = (waited - marks["waited"]) / spent
        self.result = {
            "steps_an_hour": 3600 * steps / spent, "trainer_idle": idle, "engine_idle": 1 - engines,
            "staleness": sum(self.ages) / max(1, len(self.ages)),
            "busy": {"engines": engines, **shares},
            "tokens_a_second": sum(self.tokens[s] for s in range(SKIPPED, cluster.steps)) / spent,
        }  # fmt: skip

    def sync(self, step: int) -> Process:
        """Publish version `step`, and begin the steps that it allows."""
        work, cluster, start = self.costs["work"], self.cluster, self.env.now
        yield self.env.timeout(cluster.sync + work["adapter_bytes"] * cluster.engines / cluster.network)
        yield self.env.all_of([engine.sample(step, *PROBE) for engine in self.engines])
        self.note("syncs", self.env.now - start)
        if not cluster.beside:
            self.note("trainer", self.env.now - start)
        self.version = step
        for begun in range(len(self.done), min(cluster.steps, step + cluster.bound + 1)):
            self.done[begun] = self.env.process(self.roll_out(begun))

    def roll_out(self, step: int) -> Process:
        cluster, env = self.cluster, self.env
        self.tokens[step] = 0
        with self.turn.request() as mine:
            yield mine
            agents, graders = simpy.Resource(env, cluster.agents), simpy.Resource(env, cluster.graders)
            runs = [self.episode(step, agents, graders) for _ in range(cluster.prompts * cluster.group)]
            yield env.all_of([env.process(run) for run in runs])

    def episode(self, step: int, agents: simpy.Resource, graders: simpy.Resource) -> Process:
        work, env = self.costs["work"], self.env
        turns = self.draw.choice(work["runs"])
        engine: Engine | None = None
        with agents.request() as mine:
            yield mine
            began = env.now
            yield env.timeout(work["start"])
            for place, (context, sampled, tool) in enumerate(turns):
                engine = engine or min(self.engines, key=lambda each: each.running)
                engine.running += 1
                yield env.timeout(self.costs["engine"]["request"])
                self.ages += [step - self.version] * sampled
                yield engine.sample(self.version, context, sampled)
                engine.running -= 1
                self.tokens[step] += sampled
                yield env.timeout(tool)
                yield from self.spend("cores of agents", self.cores, work["cpu_a_turn"])
                yield from self.spend("log", self.store, 1 / self.cluster.store)
                if place + 1 < len(turns):
                    yield env.timeout(max(0.0, work["gap"] - work["cpu_a_turn"]))
        self.note("agents at a time", env.now - began)
        yield from self.spend("graders", graders, work["grade"])


def without_probe(costs: dict[str, Any], engines: int) -> float:
    """Seconds of a sync, as measured on idle engines, less those of its probe."""
    engine, (size, tokens) = costs["engine"], PROBE
    probe = engine["prefill"] * size + tokens * engine["token"] + (tokens - 1) * engine["row"]
    return max(0.0, float(costs["sync"][engines - 1]) - probe)


def predictions(costs: dict[str, Any], seeds: int = 5) -> list[dict[str, Any]]:
    """Each measured training, and what the simulation says of it (mean over seeds)."""
    rows = []
    for measured in costs["measured"]:
        cluster = Cluster(
            engines=measured["engines"], bound=measured["bound"], prompts=costs["prompts"],
            group=costs["group"], steps=costs["steps"], sync=without_probe(costs, measured["engines"]),
        )  # fmt: skip
        found = [Training(costs, cluster, seed).run() for seed in range(seeds)]
        names = ("steps_an_hour", "trainer_idle", "engine_idle", "staleness")
        said = {name: sum(one[name] for one in found) / seeds for name in names}
        off = 100 * (said["steps_an_hour"] / measured["steps_an_hour"] - 1)
        rows.append(
            {**{k: measured[k] for k in ("name", "engines", "bound", *names)}, "said": said, "off": off}
        )
    return rows


def enlarged(costs: dict[str, Any]) -> list[dict[str, Any]]:
    """1 to 512 engines with 16 runs of a step for each: on one trainer as it is started without more, and
    with agents and graders on Ray and ranks that grow with the engines."""
    work, rows = costs["work"], []
    turns = sum(map(len, work["runs"])) / len(work["runs"])
    for engines in (1, 8, 64, 512):
        alone = Cluster(
            engines=engines, bound=4, prompts=costs["prompts"] * engines, group=costs["group"],
            steps=12 if engines < 512 else 8, sync=without_probe(costs, 1),
        )  # fmt: skip
        more = {
            "agents": 16 * engines,
            "graders": 8 * engines,
            "agent_cores": 2 * engines,
            "trainers": engines,
        }
        many = replace(alone, **more)
        kinds = {"alone": alone, "ray and ranks": many, "and syncs beside": replace(many, beside=True)}
        for kind, cluster in kinds.items():
            found = Training(costs, cluster).run()
            name, share = max(found["busy"].items(), key=lambda item: item[1])
            seconds = 3600 / found["steps_an_hour"]
            runs = cluster.prompts * cluster.group
            rows.append(
                {
                    "engines": engines, "kind": kind, **found, "bottleneck": name, "bottleneck_busy": share,
                    "runs_a_second": runs / seconds, "turns_a_second": turns * runs / seconds,
                    "sync_bytes": work["adapter_bytes"] * engines,
                }
            )  # fmt: skip
            print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    asked.add_argument("--costs", type=Path, default=RESULTS / "scale_costs.json")
    asked.add_argument("--write", action="store_true")
    given = asked.parse_args()
    costs = json.loads(given.costs.read_text(encoding="utf-8"))
    rows = predictions(costs)
    for row in rows:
        said = row["said"]
        print(
            f"{row['name']:<8} measured {row['steps_an_hour']:6.1f} steps/h, predicted"
            f" {said['steps_an_hour']:6.1f} ({row['off']:+.1f} %); trainer idle {row['trainer_idle']:.0%},"
            f" said {said['trainer_idle']:.0%}; engines {row['engine_idle']:.0%},"
            f" said {said['engine_idle']:.0%}"
        )
    print("within" if all(abs(row["off"]) <= BOUND for row in rows) else "NOT within", f"{BOUND:g} %")
    if given.write:
        told = {
            "command": "python benchmarks/scale_simulate.py --write",
            "rows": rows,
            "larger": enlarged(costs),
        }
        (RESULTS / "scale_simulation.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
