"""What a tool is worth to a policy that is trained with it: the tiny policy, with the tool and without.

For each capability and seed: tasks of the shortest form of its suite; a warm start by imitation, of oracles
that use the tool and of ones that must do without; then two trainings by GRPO from these same weights, one
with the tool offered, one with it left out as by `nano-rl eval --without`. Both are measured on held-out
tasks, each under its own offer.

The arm without the tool is trained as long, rather than the warm policy measured without it, so that what can
be had otherwise (a guess, one look elsewhere) is had, and the difference is the tool's and not that of a
prompt the policy has never seen. Its demonstrations are the oracle without the calls of the tool: the answer,
as if known, which teaches the form of an answer and how often each is right.

    python integration/capabilities.py --out FOLDER                          all, three seeds
    python integration/capabilities.py --out FOLDER --only memory --seeds 0  a part
    python integration/capabilities.py --out FOLDER --write                  docs/results/capabilities.json

Finished arms are read back from FOLDER; the same command goes on after it was stopped.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from log_arms import over_seeds
from smoke import parse

from integration.tiny_model import build_tiny
from nano_coder.agent.dialects.dialect import DIALECTS
from nano_coder.agent.profiles import COMPACT_1, first_messages, offered_tools, serving_profile
from nano_coder.models.opening import OpenedWeights, local_policy, open_weights
from nano_coder.models.scripted import ScriptedPolicy
from nano_coder.run.execution import Runtime
from nano_coder.sandbox.protocol import open_sandbox
from nano_rl.checkpoints.checkpoint import Learned, save_checkpoint
from nano_rl.commands.eval import without_tools
from nano_rl.config import SftConfig, TrainConfig
from nano_rl.gather.rollouts import ORACLE, collect, execute
from nano_rl.gather.step_groups import Sources
from nano_rl.imitation import RunEncoder, oracle_runs, reader_of, train_sft
from nano_rl.learn.config import GuardConfig, OptimizerConfig
from nano_rl.learn.learner import prepare
from nano_rl.train import train
from nano_rl.training_record import Watch
from nano_shared.policy import CompactionFormat, Conversation, InterfaceProfile
from nano_shared.settings import Config
from nano_shared.store import LogStore
from nano_shared.types import (
    Completion,
    Finish,
    OracleAction,
    Sampling,
    Split,
    Task,
    Trajectory,
    TurnTokens,
)
from nano_suites.drawing import draw_tasks

RESULTS = Path(__file__).parents[1] / "docs" / "results" / "capabilities.json"
SEEDS = (0, 1, 2)
COMMAND = "python integration/capabilities.py --out FOLDER"


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """A suite whose tasks need a tool, and how long a tiny policy takes to learn them."""

    suite: str
    view: str
    tools: tuple[str, ...]
    """left out of the arm without"""
    otherwise: Callable[[Task], tuple[OracleAction, ...]] = lambda task: ()
    """what an oracle without the tool does before it answers"""
    demonstrations: int = 160
    """tasks whose oracles are imitated, with the tool and without"""
    epochs: float = 7.0
    steps: int = 12
    """of each training by GRPO"""
    prompts: int = 6
    held_out: int = 60
    batch: int = 8
    hidden: int = 128
    layers: int = 2
    learning_rate: float = 3e-4
    positions: int = 512
    completion: int = 64
    """tokens of an answer, at most"""
    summarises: bool = False
    """the capability is to summarise a full context; there is no tool to leave out"""


def _page_with_answer(task: Task) -> tuple[OracleAction, ...]:
    answer = str((task.oracle or ())[-1].arguments["answer"])
    path = next(path for path, text in sorted(task.files.items()) if answer in text)
    return (OracleAction(name="read_file", arguments={"path": path}),)


def _first_pages(task: Task) -> tuple[OracleAction, ...]:
    return (task.oracle or ())[:2]


SUMMARISING = COMPACT_1.model_copy(
    update={
        "name": "compact-1-summary",
        "compaction": CompactionFormat(
            request="The context is full. Write down what you know.", summary="\nYou know: {{ summary }}"
        ),
    }
)


class SummarisingOracle(ScriptedPolicy):
    """An oracle that is asked for summaries, each of which is the names on the pages that it has read.

    It logs tokens of a template, so that a row is full where it will be for the policy.
    """

    def __init__(self, task: Task, reader: RunEncoder, context_limit: int) -> None:
        actions = task.oracle or ()
        tools = offered_tools(COMPACT_1, task)
        texts = [DIALECTS["compact"].render(action.thought, (action,), tools) for action in actions]
        super().__init__(texts, context_limit=context_limit, id=ORACLE)
        self._names = str(actions[-1].arguments["answer"]).split()
        self._reader, self.template_hash = reader, reader.template.template_hash

    def complete(self, conversation: Conversation, sampling: Sampling) -> Completion:
        form = SUMMARISING.compaction
        asked = form is not None and conversation.messages[-1].content == form.request
        text = " ".join(self._names[: self._used]) if asked else self._next()
        template = self._reader.template
        row, context = template.next_row(conversation)
        sampled = template.written((*conversation.tokens, *context), text, self._reader.eos_id)
        tokens = TurnTokens(row=row, context_ids=context, sampled_ids=sampled, logprobs=(0.0,) * len(sampled))
        return self._completion(text, Finish.STOP, tokens, sampling)

    def count(self, text: str) -> int:
        return self._reader.template.count(text)


CAPABILITIES = {
    "memory": Capability(suite="memory", view="one_fact", tools=("remember", "recall")),
    "search": Capability(suite="search", view="one_fact", tools=("search",), otherwise=_page_with_answer),
    "plan": Capability(suite="plan", view="order", tools=("plan",), epochs=14.0, demonstrations=1200),
    "compaction": Capability(
        suite="search",
        view="pages",
        tools=(),
        otherwise=_first_pages,
        summarises=True,
        positions=448,
        completion=48,
        demonstrations=300,
        epochs=14.0,
        layers=3,
    ),
    "perceive": Capability(suite="perceive", view="bar", tools=("read_file",), epochs=24.0),
}


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    torch.set_num_threads(1)
    for seed in options.seeds if not options.write else ():
        for name in options.only:
            home = options.out / f"{name}-{seed}"
            home.mkdir(parents=True, exist_ok=True)
            of_smoke: dict[str, Any] = {
                "demonstrations": 4,
                "epochs": 1.0,
                "steps": 1,
                "prompts": 1,
                "held_out": 1,
            }
            capability = replace(CAPABILITIES[name], **of_smoke) if options.smoke else CAPABILITIES[name]
            Experiment(home, capability, seed).run()
    rows = report(options.out)
    if options.write:
        written = {row["capability"]: row for row in json.loads(RESULTS.read_text())["rows"]}
        written |= {row["capability"]: row for row in rows}
        kept = [written[name] for name in CAPABILITIES if name in written]
        RESULTS.write_text(json.dumps({"command": COMMAND, "rows": kept}, indent=1) + "\n")
    return 0


class Experiment:
    """One capability and seed: a warm policy and two trainings of it."""

    def __init__(self, home: Path, capability: Capability, seed: int) -> None:
        self.home, self.capability, self.seed = home, capability, seed
        self.sandbox, self.summarising = open_sandbox(), False
        drawn = draw_tasks(
            suite=capability.suite, levels=[0], seed=seed, split=Split.TRAIN, views=[capability.view]
        )
        self.tasks: list[Task] = []
        self.held_out: list[Task] = []
        while len(self.tasks) < 4 * capability.demonstrations or len(self.held_out) < capability.held_out:
            task = next(drawn)
            (self.held_out if _is_held_out(task) else self.tasks).append(task)
        del self.held_out[capability.held_out :]

    def run(self) -> None:
        for arm, offered in (("on", self.offered), ("off", self.without)):
            self.summarising = arm == "on" and self.capability.summarises
            path = self.home / f"arm-{arm}.json"
            if path.exists():
                continue
            started, warm = time.monotonic(), self._warm()
            trained = self._train(arm, warm, [offered(task) for task in self.tasks])
            held_out = [offered(task) for task in self.held_out]
            result: dict[str, Any] = {
                "warm": self._rewards(warm, held_out),
                "trained": self._rewards(trained, held_out),
                "seconds": time.monotonic() - started,
            }
            path.write_text(json.dumps(result) + "\n")
            shown = ", ".join(f"{at} {mean(result[at]):.1%}" for at in ("warm", "trained"))
            print(f"{self.home.name} {arm}: {shown}, {result['seconds']:.0f} s", flush=True)

    def offered(self, task: Task) -> Task:
        return task

    def without(self, task: Task) -> Task:
        """The task without the tool, and an oracle that does without it."""
        left = without_tools(task, self.capability.tools, serving_profile(COMPACT_1, task))
        earlier = tuple(self._doing_without(one, ()) for one in left.earlier)
        return self._doing_without(left, self.capability.otherwise(task)).model_copy(
            update={"earlier": earlier}
        )

    def _doing_without(self, task: Task, instead: tuple[OracleAction, ...]) -> Task:
        kept = [action for action in task.oracle or () if action.name not in self.capability.tools]
        return task.model_copy(update={"oracle": (*instead, *kept)})

    def _warm(self) -> Path:
        """A policy that has imitated oracles of both kinds for a while."""
        target = self.home / "warm"
        if target.exists():
            return target
        size = self.capability.demonstrations
        with_tool = self.tasks[:size]
        shown = [*with_tool, *map(self.without, self.tasks[size : size + size // 4])]
        with LogStore.open(self.home / "log.db") as store:
            runs = self._shown(shown, self._runtime(store))
            tiny = build_tiny(
                self.home / "tiny", _texts(runs), seed=self.seed, max_positions=self.capability.positions,
                hidden=self.capability.hidden, layers=self.capability.layers,
            )  # fmt: skip
            opened = self._opened(tiny)
            if self.capability.summarises:
                runs = [*self._summarised(with_tool, opened, store), *runs[len(with_tool) :]]
        config = SftConfig(
            epochs=self.capability.epochs, batch=self.capability.batch, max_tokens=8192, lora_rank=0,
            seed=self.seed, save_every=1000,
            optimizer=OptimizerConfig(learning_rate=2e-3, schedule="linear", warmup_steps=20),
        )  # fmt: skip
        model = prepare(opened.loaded.model, lora_rank=0, seed=self.seed)
        state = self.home / "warm-state"
        state.mkdir(exist_ok=True)
        reader = reader_of(opened)
        rows = [row for run in runs for row in reader.rows(run)]
        steps = train_sft(model, rows, config, state, _every(40, "loss"))
        self._save("warm", model, opened, config, steps)
        return target

    def _shown(self, tasks: Sequence[Task], runtime: Runtime) -> list[Trajectory]:
        """The runs that the warm start imitates."""
        return oracle_runs(tasks, runtime)

    def _summarised(self, tasks: Sequence[Task], opened: OpenedWeights, store: LogStore) -> list[Trajectory]:
        """The runs of oracles that write summaries, of those that are right."""
        reader = replace(reader_of(opened), profile=SUMMARISING)
        policies = [SummarisingOracle(task, reader, self.capability.positions) for task in tasks]
        runs = execute(tasks, policies, replace(self._runtime(store), profile=SUMMARISING))
        summaries = mean(sum(turn.is_summary for turn in run.turns) for run in runs)
        print(
            f"   oracles: {summaries:.1f} summaries a run, {mean(run.reward or 0 for run in runs):.1%} right"
        )
        return [run for run in runs if run.reward == 1]

    def _train(self, arm: str, warm: Path, tasks: Sequence[Task]) -> Path:
        target = self.home / arm
        if target.exists():
            return target
        steps, state = self.capability.steps, self.home / f"{arm}-state"
        state.mkdir(exist_ok=True)
        config = TrainConfig(
            steps=steps, prompts_per_step=self.capability.prompts, seed=self.seed, save_every=1000,
            optimizer=OptimizerConfig(learning_rate=self.capability.learning_rate),
            guards=GuardConfig(patience=steps + 1),
        )  # fmt: skip
        opened = self._opened(warm)
        model = prepare(opened.loaded.model, lora_rank=0, seed=self.seed)
        with LogStore.open(state / "log.db") as store:
            sources = Sources(tasks=tuple(tasks))
            train(
                model, opened, self._runtime(store), sources, config, state, Watch(_every(3, "reward_mean"))
            )
        self._save(arm, model, opened, config, steps)
        return target

    def _rewards(self, checkpoint: Path, tasks: Sequence[Task]) -> list[float]:
        """Of one run a task, sampled as in training; runs of earlier tasks have no row of their own."""
        opened = self._opened(checkpoint)
        policy = local_policy(opened.loaded, opened.profile, version=opened.version)
        with LogStore.open(self.home / "evaluation.db") as store:
            runs = collect(tasks, replace(self._runtime(store), policy=policy), seed=self.seed)
        asked = {task.key for task in tasks}
        return [run.reward or 0.0 for run in runs if run.task.key in asked]

    def _save(self, name: str, model: Any, opened: Any, config: Config, steps: int) -> None:
        save_checkpoint(
            self.home / name, model, replace(opened, profile=COMPACT_1),
            parent=str(opened.loaded.path), config=config,
            learned=Learned(steps=steps, tasks=self.tasks),
        )  # fmt: skip

    def _profile(self) -> InterfaceProfile:
        return SUMMARISING if self.summarising else COMPACT_1

    def _opened(self, folder: Path) -> OpenedWeights:
        return replace(open_weights(str(folder)), profile=self._profile())

    def _runtime(self, store: LogStore) -> Runtime:
        return Runtime(
            policy=ScriptedPolicy([]), sandbox=self.sandbox, store=store, profile=self._profile(),
            sampling=Sampling(max_tokens=self.capability.completion),
        )  # fmt: skip


def _texts(runs: Sequence[Trajectory]) -> list[str]:
    """What the tokenizer of a tiny policy is built from."""
    shown = [
        first_messages(serving_profile(SUMMARISING, run.task), run.task, sorted(run.task.files))
        for run in runs
    ]
    turns = [turn for run in runs for turn in run.turns]
    texts = [message.content for messages in shown for message in messages]
    texts += [turn.completion.text for turn in turns]
    return texts + [seen.text for turn in turns for seen in turn.observations]


def _is_held_out(task: Task) -> bool:
    """One program in five, by its hash."""
    return int(str(task.program_hash)[-8:], 16) % 5 == 0


def _every(n: int, key: str) -> Callable[[int, int, dict[str, float]], None]:
    def on_step(done: int, total: int, values: dict[str, float]) -> None:
        if done % n == 0 or done == total:
            print(f"   step {done}/{total}  {key} {values.get(key, float('nan')):.3f}", flush=True)

    return on_step


def report(out: Path) -> list[dict[str, Any]]:
    """A row for each capability of which an arm with and one without are done, in points; printed as well."""
    rows = []
    for name in CAPABILITIES:
        pairs = [pair for seed in SEEDS if (pair := _pair(out / f"{name}-{seed}"))]
        if not pairs:
            continue
        row: dict[str, Any] = {"capability": name, "seeds": len(pairs)}
        for arm, at in (("on", "warm"), ("off", "warm"), ("on", "trained"), ("off", "trained")):
            row[f"{arm}_{at}"] = [round(100 * mean(pair[arm][at]), 1) for pair in pairs]
        gains = [mean(pair["on"]["trained"]) - mean(pair["off"]["trained"]) for pair in pairs]
        if len(gains) > 1:
            gain, low, high = (round(100 * x, 1) for x in over_seeds(gains))
            row |= {"gain": gain, "low": low, "high": high}
        else:
            row |= {"gain": round(100 * gains[0], 1), "low": None, "high": None}
        row["held_out"] = len(pairs[0]["on"]["trained"])
        row["seconds"] = round(sum(pair[arm]["seconds"] for pair in pairs for arm in pair))
        rows.append(row)
        print(json.dumps(row))
    return rows


def _pair(home: Path) -> dict[str, Any] | None:
    arms = {arm: home / f"arm-{arm}.json" for arm in ("on", "off")}
    if not all(path.exists() for path in arms.values()):
        return None
    return {arm: json.loads(path.read_text()) for arm, path in arms.items()}


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A tiny policy, trained with a tool and without.")
    parser.add_argument("--out", type=Path, required=True, help="keep logs, checkpoints and results here")
    parser.add_argument("--only", nargs="+", choices=CAPABILITIES, default=list(CAPABILITIES))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--write", action="store_true", help="into docs/results/capabilities.json")
    return parse(parser, arguments, only=["search"], seeds=[0])


if __name__ == "__main__":
    sys.exit(main())
