"""RLHF and RLAIF with judges whose preferences are known: a reward model in two rounds, a judge, principles.

A tiny policy doubles numbers and may say why first. Synthetic annotators compare two of its answers to a
question. They like a reason, and take a round number for a right one, since they do not check the sum; some
of what they say is noise. What they said goes into the log as feedback rows; pairs, a reward model and the
trainings follow by the functions that the commands call, on three numbers of four:

    no_kl         against the reward model alone, hardly held
    kl            against the reward model alone, held by KL
    gated         tests=1,preference=1: the reward model counts among right answers, held by KL
    dpo           straight from the pairs
    second        goes on from `kl`: its answers are annotated, a reward model learns from both rounds
    judge         against a judge behind HTTP, which wants a reason and errs in one answer of ten
    constitution  against two principles: one that the same judge decides, and one that a rule does

On the numbers left out, at temperature 1: right answers, and the share that gives a reason. The reward model
should predict held-out pairs (over 80 %), every training should give more reasons, and the one that nothing
holds should be praised more and more for answers that are wrong.

    python integration/rlhf.py --out FOLDER --seeds 0 1 2 [--write]
                                                             some 20 minutes a seed on one thread; goes on if
                                                             stopped; docs/results/rlhf.json
    python integration/rlhf.py --report FOLDER               what lies there; the exit code: whether it holds
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from math import exp
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any

from smoke import parse

from integration.judge_server import honest, judging, right
from integration.tiny_model import build_tiny
from nano_coder.agent.profiles import COMPACT_1, first_messages
from nano_coder.models.opening import OpenedWeights, local_policy, open_weights
from nano_coder.models.scripted import ScriptedPolicy
from nano_coder.run.execution import Runtime
from nano_coder.sandbox.protocol import open_sandbox
from nano_preferences.config import DpoConfig, RewardModelConfig
from nano_preferences.critic import scalar_model
from nano_preferences.dpo import train_dpo
from nano_preferences.log_pairs import log_pairs
from nano_preferences.pairs import PairRows, pair_rows, read_pairs, write_pairs
from nano_preferences.registry import open_reward, parse_reward
from nano_preferences.reward_checkpoint import open_reward_model, save_reward_model
from nano_preferences.reward_model import held_out, measure, train_reward_model
from nano_rl.checkpoints.checkpoint import Learned, save_checkpoint
from nano_rl.config import RewardConfig, SftConfig, TrainConfig
from nano_rl.gather.rollouts import collect
from nano_rl.gather.step_groups import Sources
from nano_rl.imitation import reader_of, train_sft
from nano_rl.learn.config import GuardConfig, OptimizerConfig
from nano_rl.learn.learner import prepare
from nano_rl.learn.metrics import METRICS, read_metrics
from nano_rl.learn.objectives import ObjectiveConfig
from nano_rl.train import train
from nano_rl.training_record import Watch
from nano_shared.checkpoint import read_checkpoint
from nano_shared.hidden_checks import AnswerChecks
from nano_shared.logged_run import Feedback, FeedbackKind
from nano_shared.settings import Config
from nano_shared.store import LogStore
from nano_shared.types import Limits, Message, Role, Sampling, Split, Task, Trajectory
from nano_view.report.training import GOLD, over_optimised, proxy_of

REASON = "because"
FILLERS = ("so", "well", "now", "then")
RESULT = "result.json"
ARMS = ("no_kl", "kl", "gated", "dpo", "second", "judge", "constitution")
FIRST, SECOND = "", "-2"
"""what the names of the pairs and of the reward model of each round end in"""
RESULTS = Path(__file__).parents[1] / "docs" / "results" / "rlhf.json"
PRINCIPLES = """
[[principles]]
id = "reasons"
text = "The answer gives a reason."
[[principles]]
id = "stays_inside"
text = "Nothing is attempted that the sandbox has to refuse."
check = { kind = "no_denials" }
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much of everything."""

    numbers: int = 40
    demonstrations: int = 24
    """of each number, for the warm start"""
    wrong: float = 0.2
    """share of the demonstrations whose answer is"""
    sft_epochs: float = 12.0
    runs: int = 16
    """of each number, that annotators compare"""
    comparisons: int = 12
    """of each number"""
    steps: int = 60
    prompts: int = 8
    group_size: int = 8
    beta: float = 0.3
    gated_beta: float = 0.05
    """right answers are held by the tests there"""
    learning_rate: float = 6e-4
    evaluated: int = 24
    """runs of each number left out"""


SMALL = Scale(
    numbers=12, demonstrations=8, sft_epochs=2.0, runs=6, comparisons=6, steps=2, prompts=2, group_size=4,
    evaluated=1,
)  # fmt: skip
"""runs every part and shows nothing; one of the tests"""
SMOKE = replace(SMALL, demonstrations=4, sft_epochs=12.0, comparisons=4, steps=1)


# ------------------------------------------------------------------------------------ what is asked


def make_tasks(count: int) -> list[Task]:
    """`Double N.`, graded by the number that is submitted."""
    return [
        Task(
            key=f"double-{n}", prompt=f"Double {n}.", tools=("submit",), split=Split.TRAIN,
            limits=Limits(max_turns=1), hidden=AnswerChecks(answer=str(2 * n)),
        )
        for n in range(1, count + 1)
    ]  # fmt: skip


def demonstration(task: Task, random: Random, wrong: float) -> str:
    """An answer as the policy is first taught: a reason in one of four, sometimes a wrong number."""
    assert isinstance(task.hidden, AnswerChecks)
    right = int(str(task.hidden.answer))
    number = random.randrange(2, 100) if random.random() < wrong else right
    words = [random.choice(FILLERS) for _ in range(random.randrange(3))]
    if random.random() < 0.25:
        words.insert(0, REASON)
    return " ".join(words) + ("\n" if words else "") + f"@submit answer={number}"


# ------------------------------------------------------------------------------------ who prefers


@dataclass(frozen=True, slots=True, kw_only=True)
class Annotator:
    """Likes a reason and a round number, dislikes length, errs now and then, abstains from close calls."""

    reason: float = 0.7
    round: float = 1.4
    word: float = -0.05
    sharpness: float = 3.0
    """the probability of the better side is the logistic of this times the difference"""
    close: float = 0.2

    def worth(self, run: Trajectory) -> float:
        return self.reason * reasoned(run) + self.round * rounded(run) + self.word * len(_words(run))

    def choose(
        self, one: Trajectory, other: Trajectory, random: Random
    ) -> tuple[Trajectory, Trajectory] | None:
        """The preferred run and its rival; None for a close call."""
        difference = self.worth(one) - self.worth(other)
        if abs(difference) < self.close:
            return None
        first = random.random() < 1 / (1 + exp(-self.sharpness * difference))
        return (one, other) if first else (other, one)


def reasoned(run: Trajectory) -> bool:
    return REASON in _words(run)


def rounded(run: Trajectory) -> bool:
    return (run.answer or "").endswith("0")


def _words(run: Trajectory) -> list[str]:
    return [word for turn in run.turns for word in turn.thought.split()]


def annotate(store: LogStore, runs: Sequence[Trajectory], per_task: int, seed: int) -> None:
    """Feedback rows, each on the preferred run and naming its rival; tasks that have some get no more."""
    annotator, random = Annotator(), Random(f"annotator {seed}")
    by_task: dict[str, list[Trajectory]] = {}
    for run in runs:
        by_task.setdefault(run.task.key, []).append(run)
    done = {said.run for said in store.all_feedback()}
    for members in by_task.values():
        if done.intersection(run.id for run in members):
            continue
        pairs = list(combinations(members, 2))
        random.shuffle(pairs)
        choices = (annotator.choose(*pair, random) for pair in pairs)
        for _, choice in zip(range(per_task), filter(None, choices), strict=False):
            preferred, rival = choice
            row = Feedback(
                kind=FeedbackKind.PREFER, text=rival.id, author=f"annotator-{seed}", created=time.time()
            )
            store.add_feedback(preferred.id, row)


@contextmanager
def reasons_judge(seed: int) -> Iterator[str]:
    """The address of a judge that wants a reason, and errs on one candidate of ten."""

    def worth(work: str) -> float:
        errs = "answers: " in work and Random(f"{seed} {work}").random() < 0.1
        return float((REASON in work) != errs) + 2 * right(work)  # the probe's work is right or wrong

    with judging(honest(worth)) as server:
        yield server.url


# ------------------------------------------------------------------------------------- the circle


class Circle:
    """One seed; each method is one arrow, and does nothing where its result lies in the folder already."""

    def __init__(self, home: Path, scale: Scale, seed: int) -> None:
        home.mkdir(parents=True, exist_ok=True)
        self.home, self.scale, self.seed = home, scale, seed
        self.store = LogStore.open(home / "log.db")
        self.sandbox = open_sandbox()
        self.tasks = make_tasks(scale.numbers)
        self.trained, self.left_out = [t for i, t in enumerate(self.tasks) if i % 4], self.tasks[::4]

    def warm_start(self) -> Path:
        target = self.home / "checkpoints" / "warm"
        if target.exists():
            return target
        random = Random(f"demonstrations {self.seed}")
        shown = [
            (task, demonstration(task, random, self.scale.wrong))
            for task in self.tasks
            for _ in range(self.scale.demonstrations)
        ]
        texts = [m.content for t in self.tasks for m in first_messages(COMPACT_1, t, ())]
        tiny = build_tiny(
            self.home / "tiny", [*texts, *(text for _, text in shown)], seed=self.seed, vocab_size=600,
            hidden=96, layers=2, max_positions=256,
        )  # fmt: skip
        opened = open_weights(str(tiny))
        reader = reader_of(opened)
        rows = []
        for number, (task, text) in enumerate(shown):
            messages = (*first_messages(COMPACT_1, task, ()), Message(role=Role.ASSISTANT, content=text))
            rows += reader.messages(f"shown {number}", messages, [False, False, True])
        config = SftConfig(
            epochs=self.scale.sft_epochs, batch=32, max_tokens=8192, lora_rank=0, seed=self.seed,
            save_every=1000,
            optimizer=OptimizerConfig(learning_rate=3e-3, schedule="linear", warmup_steps=10),
        )  # fmt: skip
        model = prepare(opened.loaded.model, lora_rank=0, seed=self.seed)
        steps = train_sft(model, rows, config, self._state("warm"), _every(50, "loss"))
        return self._save(target, model, opened, config, steps, [])

    def feedback(self, policy: Path, of_round: str = FIRST) -> dict[str, Any]:
        """Logged runs of a policy, and what annotators say of them; then the pairs so far."""
        path = self.home / f"pairs{of_round}.jsonl"
        if not path.exists():
            logged = f"{policy.name} for pairs{of_round}"
            runs = list(self.store.trajectories(policy=logged))
            if len(runs) < len(self.trained) * self.scale.runs:  # else it stopped among the annotations
                runs = self.sample(policy, self.trained, self.scale.runs, seed=self.seed, logged=logged)
            annotate(self.store, runs, self.scale.comparisons, self.seed)
            write_pairs(path, log_pairs(self.store, sources=("feedback",), seed=self.seed).pairs)
        return {"pairs": len(read_pairs(path)), "rows": sum(1 for _ in self.store.all_feedback())}

    def pairs(self, opened: OpenedWeights, of_round: str = FIRST) -> list[PairRows]:
        return pair_rows(read_pairs(self.home / f"pairs{of_round}.jsonl"), reader_of(opened))

    def reward_model(self, warm: Path, of_round: str = FIRST) -> dict[str, float]:
        """Trained on four prompts of five; its figures on the fifth."""
        target = self._reward_model(of_round)
        if not target.exists():
            opened = open_weights(str(warm))
            config = RewardModelConfig(
                epochs=4.0, seed=self.seed, save_every=1000,
                optimizer=OptimizerConfig(learning_rate=1e-3, schedule="linear", warmup_steps=5),
            )  # fmt: skip
            kept_in, kept_out = held_out(self.pairs(opened, of_round), config.held_out, self.seed)
            model = scalar_model(opened.loaded.model, lora_rank=0, seed=self.seed, bias=False)
            state = self._state(target.name)
            steps = train_reward_model(model, kept_in, config, state, _every(20, "accuracy"))
            report = measure(model, kept_out, max_tokens=config.max_tokens)
            save_reward_model(
                target, model, opened, parent=str(warm), config=config, steps=steps, run_ids=[], report=report
            )
        return {k: v for k, v in read_checkpoint(target).metrics.items() if k.startswith("held_out")}

    def arm(self, name: str, warm: Path) -> dict[str, Any]:
        """Train one arm and measure what became of it."""
        started, more = time.monotonic(), dict[str, Any]()
        if name == "dpo":
            trained = self.dpo(warm)
        elif name == "second":
            first = self.train("kl", warm)
            more = self.feedback(first, SECOND) | self.reward_model(warm, SECOND)
            trained = self.train(name, first)
        elif name in ("judge", "constitution"):
            with reasons_judge(self.seed) as url:
                trained = self.train(name, warm, url)
        else:
            trained = self.train(name, warm)
        result: dict[str, Any] = self.measured(trained) | more | {"seconds": time.monotonic() - started}
        if name != "dpo":
            rows = read_metrics(self.home / f"{name}-state" / METRICS)
            names = ("step", "reward_mean", GOLD, proxy_of(rows), "kl_reference")
            found = over_optimised(rows)
            result["curve"] = [{n: row.get(n) for n in names if n} for row in rows]
            result["over_optimised"] = None if found is None else asdict(found)
        return result

    def dpo(self, warm: Path) -> Path:
        target = self.home / "checkpoints" / "dpo"
        if target.exists():
            return target
        opened = open_weights(str(warm))
        config = DpoConfig(
            epochs=2.0, lora_rank=0, seed=self.seed, save_every=1000,
            optimizer=OptimizerConfig(learning_rate=2e-4, schedule="linear", warmup_steps=5),
        )  # fmt: skip
        model = prepare(opened.loaded.model, lora_rank=0, seed=self.seed)
        steps = train_dpo(model, self.pairs(opened), config, self._state("dpo"), _every(20, "accuracy"))
        return self._save(target, model, opened, config, steps, [])

    def train(self, name: str, start: Path, url: str = "") -> Path:
        target = self.home / "checkpoints" / name
        if target.exists():
            return target
        opened = open_weights(str(start))
        # a KL that is measured and does not hold: without any weight nothing would be compared with
        beta = {"no_kl": 1e-9, "gated": self.scale.gated_beta}.get(name, self.scale.beta)
        config = TrainConfig(
            steps=self.scale.steps, prompts_per_step=self.scale.prompts, group_size=self.scale.group_size,
            seed=self.seed, save_every=20,
            reward=self.reward(name, url),
            objective=ObjectiveConfig(beta=beta),
            optimizer=OptimizerConfig(learning_rate=self.scale.learning_rate),
            # the collapse of the arm that nothing holds is what is to be seen
            guards=GuardConfig(patience=self.scale.steps + 1),
        )  # fmt: skip
        assert config.reward is not None
        model = prepare(opened.loaded.model, lora_rank=0, seed=self.seed)
        used = train(
            model, opened, self._runtime(ScriptedPolicy([]), name),
            Sources(tasks=tuple(self.trained), reward=open_reward(config.reward)), config,
            self._state(name), Watch(_every(10, GOLD)),
        )  # fmt: skip
        return self._save(target, model, opened, config, config.steps, used)

    def reward(self, arm: str, url: str) -> RewardConfig:
        if arm == "judge":
            return parse_reward(f"judge:{url}=1")
        if arm == "constitution":
            (principles := self.home / "principles.toml").write_text(PRINCIPLES)
            asked = {"weight": 1.0, "path": str(principles), "url": url}
            return RewardConfig(parts={"constitution": asked})
        model = f"preference:{self._reward_model(SECOND if arm == 'second' else FIRST)}=1"
        return parse_reward(f"tests=1,{model}" if arm == "gated" else model)

    def sample(
        self, checkpoint: Path, tasks: Sequence[Task], runs: int, *, seed: int, logged: str = ""
    ) -> list[Trajectory]:
        opened = open_weights(str(checkpoint))
        policy = local_policy(opened.loaded, opened.profile, version=opened.version)
        runtime = self._runtime(policy, logged or checkpoint.name)
        return collect(tasks, runtime, group_size=runs, seed=seed)

    def measured(self, checkpoint: Path) -> dict[str, float]:
        """What a policy does now: right answers, reasons, round numbers, and what the reward model says."""
        runs = self.sample(checkpoint, self.left_out, self.scale.evaluated, seed=self.seed + 1000)
        judge = open_reward_model(str(self._reward_model(FIRST)))
        assert judge is not None
        return {
            "tests": mean(run.reward or 0.0 for run in runs),
            "reasons": mean(map(reasoned, runs)),
            "round": mean(map(rounded, runs)),
            "proxy": mean(1 / (1 + exp(-min(max(score, -700.0), 700.0))) for score in judge(runs)),
            "runs": float(len(runs)),
        }

    def _reward_model(self, of_round: str) -> Path:
        """The checkpoint of a round's reward model."""
        return self.home / "checkpoints" / f"reward-model{of_round}"

    def _state(self, name: str) -> Path:
        folder = self.home / f"{name}-state"
        folder.mkdir(exist_ok=True)
        return folder

    def _save(
        self, target: Path, model: object, opened: OpenedWeights, config: Config, steps: int, runs: list[str]
    ) -> Path:
        save_checkpoint(
            target, model, opened, parent=str(opened.loaded.path), config=config,
            learned=Learned(steps=steps, run_ids=runs, tasks=self.tasks),
        )  # fmt: skip
        return target

    def _runtime(self, policy: object, name: str) -> Runtime:
        return Runtime(
            policy=policy,  # type: ignore[arg-type]
            sandbox=self.sandbox,
            store=self.store,
            sampling=Sampling(temperature=1.0, max_tokens=24),
            policy_name=name,
        )


# -------------------------------------------------------------------------------------- the script


def run_seed(home: Path, scale: Scale, seed: int, arms: Sequence[str]) -> dict[str, Any]:
    """All of one seed; what is in its result.json is not done again."""
    path = home / RESULT
    result: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"seed": seed, "arms": {}}
    started = time.monotonic()

    def keep() -> None:
        """Whole or not at all: a process that is killed leaves what was there."""
        path.with_suffix(".new").write_text(json.dumps(result, indent=2))
        path.with_suffix(".new").replace(path)

    def step(name: str, make: Callable[[], Any]) -> None:
        if name not in result:
            say(started, f"seed {seed}: {name}")
            result[name] = make()
            keep()

    circle = Circle(home, scale, seed)
    say(started, f"seed {seed}: warm start")
    warm = circle.warm_start()
    step("feedback", lambda: circle.feedback(warm))
    step("reward_model", lambda: circle.reward_model(warm))
    step("warm", lambda: circle.measured(warm))
    for name in arms:
        if name not in result["arms"]:
            say(started, f"seed {seed}: arm {name}")
            result["arms"][name] = circle.arm(name, warm)
            keep()
    circle.store.close()
    return result


def judge_seed(result: dict[str, Any]) -> dict[str, bool]:
    """What should hold of a seed, and whether it does; of the arms that were run."""
    warm, arms = result["warm"], result["arms"]
    held = {"the reward model predicts over 80 %": result["reward_model"]["held_out_accuracy"] > 0.8}
    for name, arm in arms.items():
        held[f"{name} gives more reasons"] = arm["reasons"] > warm["reasons"] + 0.2
    if "no_kl" in arms:
        held["without KL, praise rises while right answers fall"] = (
            arms["no_kl"]["proxy"] > warm["proxy"] and arms["no_kl"]["tests"] < warm["tests"] - 0.1
        )
        held["and the report says so"] = arms["no_kl"]["over_optimised"] is not None
    if {"no_kl", "kl"} <= set(arms):
        held["KL keeps right answers"] = arms["kl"]["tests"] > warm["tests"] - 0.1
        held["and stays closer to the start"] = _last_kl(arms["kl"]) < _last_kl(arms["no_kl"])
    return held


def _last_kl(arm: dict[str, Any]) -> float:
    return mean(row["kl_reference"] or 0.0 for row in arm["curve"][-5:])


def report(results: Sequence[dict[str, Any]]) -> bool:
    """Print each seed; whether all holds in all of them."""
    fine = True
    for result in results:
        model = result["reward_model"]
        print(
            f"seed {result['seed']}: {result['feedback']['rows']} rows, {result['feedback']['pairs']} pairs;"
            f" reward model {model['held_out_accuracy']:.1%} of {model['held_out_pairs']:.0f} held-out pairs,"
            f" calibration error {model['held_out_calibration_error']:.3f}"
        )
        for name, arm in (("warm", result["warm"]), *result["arms"].items()):
            kl = f"  KL {_last_kl(arm):.3f}" if arm.get("curve") else ""
            print(
                f"  {name:6} right {arm['tests']:6.1%}  reasons {arm['reasons']:6.1%}"
                f"  round {arm['round']:6.1%}  praise {arm['proxy']:.3f}{kl}"
            )
        for what, holds in judge_seed(result).items():
            print(f"  {'yes' if holds else 'NO '} {what}")
            fine &= holds
    return fine


NAMES = {
    "warm": "start", "no_kl": "without KL", "kl": "with KL", "gated": "behind the tests", "dpo": "DPO",
    "second": "with KL, second round", "judge": "judge", "constitution": "constitution",
}  # fmt: skip


def write(results: Sequence[dict[str, Any]]) -> None:
    """Into RESULTS: a row a policy and seed."""
    rows = []
    for result in results:
        arms = {"warm": {**result["reward_model"], **result["warm"]}, **result["arms"]}
        for name, arm in arms.items():
            row = {"seed": result["seed"], "policy": NAMES[name], "right": round(100 * arm["tests"], 1)}
            row |= {"reasons": round(100 * arm["reasons"], 1), "proxy": round(arm["proxy"], 3)}
            if "curve" in arm:
                row["kl"] = round(_last_kl(arm), 3)
            if "held_out_accuracy" in arm:
                row["reward_model"] = round(100 * arm["held_out_accuracy"], 1)
            rows.append(row)
    command = "python integration/rlhf.py --out FOLDER --seeds 0 1 2 --write"
    RESULTS.write_text(json.dumps({"command": command, "rows": rows}, indent=1) + "\n")


def say(started: float, text: str) -> None:
    print(f"[{time.monotonic() - started:4.0f} s] {text}", flush=True)


def _every(n: int, key: str) -> Callable[[int, int, dict[str, float]], None]:
    def on_step(done: int, total: int, values: dict[str, float]) -> None:
        if done % n == 0 or done == total:
            named = {k: v for k, v in values.items() if k in (key, "reward_mean", "kl_reference")}
            print(
                f"   step {done}/{total}  " + "  ".join(f"{k} {v:.3f}" for k, v in named.items()), flush=True
            )

    return on_step


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    if options.report:
        found = sorted(options.report.glob(f"seed-*/{RESULT}"))
        return 0 if report([json.loads(path.read_text()) for path in found]) and found else 1
    scale = SMOKE if options.smoke else SMALL if options.small else Scale()
    results = [
        run_seed(options.out / f"seed-{seed}", scale, seed, options.arms or ARMS) for seed in options.seeds
    ]
    fine = report(results)
    if options.write:
        write(results)
    return 0 if fine or options.small or options.smoke else 1


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="RLHF with annotators whose preferences are known.")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--out", type=Path, help="keep logs, checkpoints and a result.json a seed here")
    where.add_argument("--report", type=Path, help="print what lies in such a folder")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--arms", nargs="+", choices=ARMS, help="all of them, unless given")
    parser.add_argument("--small", action="store_true", help="runs every part and shows nothing")
    parser.add_argument("--write", action="store_true", help="into docs/results/rlhf.json")
    return parse(parser, arguments, arms=("second", "judge", "dpo"))


if __name__ == "__main__":
    sys.exit(main())
