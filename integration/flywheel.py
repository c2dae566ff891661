"""The whole circle on a CPU, narrated: tasks, a warm start, logged runs, training, held-out success, a diff.

A tiny Llama (about 1 M parameters) learns to mend one wrong line of a file by reading, editing and running
its check. The functions are synthetic, and what is wrong in them is spread, so that no single answer is right
often. It imitates oracles and is stopped early; nano-coder runs it, and logs; it is trained on that log and
then on fresh rollouts; success is measured on programs that training never saw, and with the controls also on
such families and on longer functions. The exit code is 1 if it gained nothing, or if the best constant answer
is as good.

    python integration/flywheel.py                   three to seven minutes on two cores
    python integration/flywheel.py --small           a fifth of the runs
    python integration/flywheel.py --seed S --arms all --out docs/results/flywheel.json
                                                     with the controls; adds the seed's row, once

Arms: `log` imitates the successes in the log; `trained` goes on from there with GRPO on fresh rollouts; and
controls from the same warm start: `imitation` of its own successes on as many rollouts; `oracles` imitated
for as many tokens; `random`, the first two with runs drawn and verdicts dealt at random, and
`random_imitation`, the third with runs drawn at random: they must stay where they began, or the rates are too
high.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from log_arms import GROUP, Bench, Scale
from negative_controls import shuffled_rewards
from smoke import parse

from integration.paired import paired
from nano_rl.checkpoints.evaluate import row_of
from nano_shared import snapshot
from nano_shared.store import LogStore
from nano_shared.types import Split, Task, Trajectory
from nano_suites.drawing import make_tasks

COMMAND = "python integration/flywheel.py --seed S --arms all --out docs/results/flywheel.json"
PLAIN = ("start", "log", "trained")
CONTROLS = ("imitation", "oracles", "random", "random_imitation")


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How much the arms learn from; the defaults fill three to seven minutes of two cores."""

    logged: int = 64
    """tasks, each tried `GROUP` times"""
    steps: int = 8
    """on fresh rollouts"""
    prompts: int = 16
    oracles: int = 300
    held_out: int = 100
    epochs: float = 8.0
    """of the warm start, at most"""
    enough: float = 0.03
    """mean loss at which it ends"""
    learning_rate: float = 1e-4
    imitation_rate: float = 3e-4
    max_tokens: int = 64
    """of one completion"""

    @property
    def scale(self) -> Scale:
        return Scale(
            levels=(2,), views=("mend",), tasks=self.oracles + self.logged + self.steps * self.prompts,
            oracles=self.oracles, sft_epochs=self.epochs, sft_loss=self.enough, batch=8,
            held_out=self.held_out, learning_rate=self.learning_rate, max_tokens=self.max_tokens,
        )  # fmt: skip


SMALL = Budget(logged=32, steps=2, held_out=60)
SMOKE = Budget(logged=1, steps=1, prompts=1, oracles=8, held_out=1, epochs=2.0, max_tokens=12)


class Flywheel:
    """One seed: each method is one arrow of the circle, or an arm beside it."""

    def __init__(self, home: Path, budget: Budget, *, seed: int, controls: bool) -> None:
        self.budget, self.seed = budget, seed
        self.bench = Bench(home, budget.scale, seed=seed)
        sets = self.bench.tasks
        self.held_out = {"programs": sets.held_out}
        if controls:
            harder = make_tasks(levels=[3], n=budget.held_out, seed=seed, split=Split.TRAIN, views=["mend"])
            self.held_out |= {"families": sets.families, "harder": harder}
        self.new = sets.train[budget.oracles :]
        """tasks that the warm start did not see"""
        self.arms: dict[str, dict[str, Any]] = {}
        self.runs: dict[str, dict[str, list[Trajectory]]] = {}

    def run(self, arm: str) -> None:
        """Make the arm's checkpoint and measure it."""
        began = time.monotonic()
        checkpoint = self.bench.warm() if arm == "start" else getattr(self, f"_{arm}")()
        runs = {name: self.bench.evaluate(checkpoint, tasks) for name, tasks in self.held_out.items()}
        rates = {name: round(100 * row_of("", of).rate, 1) for name, of in runs.items()}
        self.runs[arm] = runs
        self.arms[arm] = {
            **rates, "seconds": round(time.monotonic() - began), **self._spent(arm)
        }  # fmt: skip
        print(f"   {arm}: " + ", ".join(f"{name} {rate:.1f} %" for name, rate in rates.items()), flush=True)

    def _log(self, prefix: str = "") -> Path:
        """The checkpoint that imitated the successes in the log of the warm start, or as many random runs."""
        warm, budget = self.bench.warm(), self.budget
        with self.bench.log("warm", warm, self.new[: budget.logged]) as store:
            return self.bench.imitate(
                f"{prefix}log", warm, [store], steps=max(1, budget.logged // 4),
                learning_rate=budget.imitation_rate, at_random=bool(prefix),
            )  # fmt: skip

    def _trained(self, prefix: str = "") -> Path:
        budget = self.budget
        return self.bench.train(
            f"{prefix}trained", self._log(prefix), steps=budget.steps, prompts=budget.prompts, fresh=GROUP,
            tasks=self.new[budget.logged :],
        )  # fmt: skip

    def _random(self) -> Path:
        with shuffled_rewards():
            return self._trained("random-")

    def _imitation(self, prefix: str = "") -> Path:
        warm, budget = self.bench.warm(), self.budget
        with (
            self.bench.log("warm", warm, self.new[: budget.logged]) as one,
            self.bench.log("rest", warm, self.new[budget.logged :]) as other,
        ):
            return self.bench.imitate(
                f"{prefix}imitation", warm, [one, other], steps=max(1, len(self.new) // 4),
                learning_rate=budget.imitation_rate, at_random=bool(prefix),
            )  # fmt: skip

    def _random_imitation(self) -> Path:
        return self._imitation("random-")

    def _oracles(self) -> Path:
        return self.bench.imitate_oracles(
            "oracles", self.bench.warm(), self.new, tokens=self.arms["trained"]["tokens"],
            learning_rate=self.budget.imitation_rate,
        )  # fmt: skip

    def _spent(self, arm: str) -> dict[str, int]:
        """Rollouts that the arm learned from, and their sampled tokens."""
        home = self.bench.home
        stores = {
            "log": ["log-warm"], "trained": ["log-warm", "state/trained"],
            "imitation": ["log-warm", "log-rest"], "random_imitation": ["log-warm", "log-rest"],
            "random": ["log-warm", "state/random-trained"],
        }.get(arm, [])  # fmt: skip
        runs: list[Trajectory] = []
        for name in stores:
            with LogStore.open(home / name / "log.db") as store:
                runs += store.trajectories()
        sampled = [turn.completion.tokens for run in runs for turn in run.turns]
        return {"rollouts": len(runs), "tokens": sum(len(one.sampled_ids) for one in sampled if one)}

    def show_a_diff(self) -> None:
        """On a held-out task that the old policy failed and the new one solved: what each changed."""
        both = zip(self.runs["start"]["programs"], self.runs["trained"]["programs"], strict=True)
        better = [(old, new) for old, new in both if old.reward == 0 and new.reward == 1]
        for old, new in better[:1]:
            print(new.task.files["solution.py"])
            for name, run in (("old", old), ("new", new)):
                print(f"   the {name} policy, in {len(run.turns)} turns, changes:")
                print(self._diff(run) or "nothing")
        if not better:
            print("there is no such task")

    def _diff(self, run: Trajectory) -> str:
        with LogStore.open(self.bench.home / "evaluation.db") as store:
            files = snapshot.load(str(run.last_snapshot), store.blobs).by_path
            entry = files.get("solution.py")
            text = store.get_blob(str(entry.content)).decode() if entry else ""
        was = run.task.files["solution.py"]
        lines = difflib.unified_diff(was.splitlines(), text.splitlines(), n=0, lineterm="")
        return "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))

    def constants(self) -> dict[str, Any]:
        """The success of the best constant answer: chosen on the training tasks, and in hindsight."""
        print("   histogram of the right answers in training:", _histogram(self.new))
        chosen = Counter(map(answer, self.new)).most_common(1)[0][0]
        found: dict[str, Any] = {"answer": chosen}
        for name, tasks in self.held_out.items():
            right = Counter(map(answer, tasks))
            print(f"   and in the held-out {name}: {_histogram(tasks)}")
            found[name] = round(100 * right[chosen] / len(tasks), 1)
            found[f"{name}_hindsight"] = round(100 * max(right.values()) / len(tasks), 1)
        return found


def answer(task: Task) -> str:
    """What belongs in the place of the wrong text: all that a policy says who is told where that is."""
    wrong = _tokens(task.files["solution.py"].split("\n")[2])
    (edit,) = (action for action in task.oracle or () if action.name == "edit_file")
    right = _tokens(str(edit.arguments["new"]))
    changes = difflib.SequenceMatcher(None, wrong, right, autojunk=False).get_opcodes()
    return " ".join(token for tag, _, _, one, two in changes if tag != "equal" for token in right[one:two])


def _tokens(line: str) -> list[str]:
    return re.findall(r"\w+|//|[<>=!]=|\S", line)


def _histogram(tasks: Sequence[Task]) -> str:
    counts = Counter(map(answer, tasks)).most_common()
    shown = ", ".join(f"{text or 'nothing'} {count}" for text, count in counts[:16])
    return f"{shown}, and {len(counts) - 16} more" if len(counts) > 16 else shown


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    budget = SMOKE if options.smoke else SMALL if options.small else Budget()
    if options.learning_rate:
        budget = replace(budget, learning_rate=options.learning_rate)
    arms = PLAIN + (CONTROLS if options.arms == ["all"] else tuple(options.arms))
    rows = json.loads(options.out.read_text())["rows"] if options.out and options.out.exists() else []
    row = next((one for one in rows if one["seed"] == options.seed), None)
    missing = [arm for arm in arms if row is None or arm not in row["arms"]]
    if not missing:
        print(f"{options.out} has the row of seed {options.seed}")
        return 0
    with nullcontext(options.work) if options.work else tempfile.TemporaryDirectory() as work:
        if row and not set(missing) & set(PLAIN):
            circle = Flywheel(Path(work), budget, seed=options.seed, controls=True)
            circle.arms = row["arms"]
            for arm in missing:
                circle.run(arm)
        else:
            row = _run(Path(work), budget, options.seed, arms)
    if options.out:
        rows = sorted(
            [row, *(one for one in rows if one["seed"] != options.seed)], key=lambda one: one["seed"]
        )
        options.out.write_text(json.dumps({"command": COMMAND, "rows": rows}, indent=1) + "\n")
    gained = row["gain"]["programs"][0] > 0
    return 0 if options.smoke or (gained and row["above_constant"] > 0) else 1


def _run(work: Path, budget: Budget, seed: int, arms: Sequence[str]) -> dict[str, Any]:
    """The narrated circle, and the row of it."""
    started = time.monotonic()
    say(started, "1. Tasks: one wrong line a file, and programs held out")
    circle = Flywheel(work, budget, seed=seed, controls=len(arms) > len(PLAIN))
    constant = circle.constants()
    say(started, f"2. Warm start: a tiny model imitates {budget.oracles} oracle runs, and is stopped early")
    circle.run("start")
    say(
        started,
        f"3. nano-coder runs it {budget.logged * GROUP} times, logs, and the log alone is learned from",
    )
    circle.run("log")
    say(
        started,
        f"4. Training on {budget.steps * budget.prompts * GROUP} fresh rollouts through the same runtime",
    )
    circle.run("trained")
    plain = time.monotonic() - started
    say(started, "5. A held-out task that the old policy failed and the new one solved")
    circle.show_a_diff()
    for arm in arms[len(PLAIN) :]:
        say(started, f"Beside it: {arm}")
        circle.run(arm)
    runs = circle.runs
    gain = {name: paired(runs["trained"][name], runs["start"][name]) for name in circle.held_out}
    by_log = paired(runs["log"]["programs"], runs["start"]["programs"])
    row = {
        "seed": seed,
        "commit": _commit(),
        "seconds": round(plain),
        "constant": constant,
        "arms": circle.arms,
        "gain": {name: _points(of) for name, of in gain.items()},
        "log_gain": _points(by_log),
        "above_constant": round(circle.arms["trained"]["programs"] - _best(constant, "programs"), 1),
    }
    say(started, f"held-out programs: {circle.arms['start']['programs']} % before, best constant answer "
        f"{constant['programs']} % ({constant['answer']!r}, chosen in training; "
        f"{constant['programs_hindsight']} % in hindsight), {circle.arms['log']['programs']} % by the log "
        "alone")  # fmt: skip
    for arm in CONTROLS:
        if arm in circle.arms:
            print(f"{arm}: {circle.arms[arm]['programs']} %")
    for name in list(gain)[1:]:
        print(f"difference on {name}: {_interval(gain[name])}")
    print(f"difference on programs by the log alone: {_interval(by_log)}")
    print(f"difference on programs: {_interval(gain['programs'])}; {plain:.0f} s")
    return row


def _best(constant: dict[str, Any], name: str) -> float:
    return float(max(constant[name], constant[f"{name}_hindsight"]))


def _points(difference: tuple[float, float, float]) -> list[float]:
    return [round(100 * part, 1) for part in difference]


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=8"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def say(started: float, text: str) -> None:
    print(f"\n[{time.monotonic() - started:4.0f} s] {text}", flush=True)


def _interval(difference: tuple[float, float, float]) -> str:
    mean, low, high = difference
    return f"{mean:+.1%} (95 % interval {low:+.1%} to {high:+.1%}, paired)"


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The whole circle on a CPU, narrated.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--small", action="store_true", help="a fifth of the runs")
    parser.add_argument(
        "--arms", nargs="+", choices=(*CONTROLS, "all"), default=(), help="controls beside the circle"
    )
    parser.add_argument("--learning-rate", type=float)
    parser.add_argument("--out", type=Path, help="add the seed's row to this JSON file")
    parser.add_argument("--work", type=Path, help="keep logs and checkpoints here, and go on from them")
    return parse(parser, arguments, out=None, work=None)


if __name__ == "__main__":
    sys.exit(main())
