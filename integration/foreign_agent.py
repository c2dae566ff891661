"""An agent of others learns through its policy's server: mini-swe-agent, unmodified, on small repair tasks.

Install it outside /tmp with a Python below /usr, as examples/agents says, and name the folder:

    /usr/bin/python3 -m venv /srv/mini && /srv/mini/bin/pip install mini-swe-agent mcp
    python integration/foreign_agent.py --out FOLDER --agent-folder /srv/mini --seeds 0 1 2

First the policy imitates the agent with a teacher behind it, on `--demonstrations` tasks of their own: the
teacher knows each task's oracle and acts through the agent's own tool. With `--right` below 1 its choice of
an operator is drawn anew in each epoch, so that what is learned is its odds, and no choice by heart. Then for
each seed and arm the policy is trained on 60 tasks and measured on held-out ones, before and after, with the
same seeds of sampling: `fresh` is `train --agent`, `log` is `rollout --agent` and then `train --from-logs` on
what its server captured, without a rollout more. A seed that FOLDER/results.json holds is not run again, and
a training that was stopped goes on. The last line of each arm is its gain and interval over seeds; the exit
code is 1 where one reaches 0.

`--model tiny` is a policy of some million weights that has seen nothing but the demonstrations. Its tasks are
the shortest repairs, one wrong operator that a docstring contradicts, and the held-out ones are other
programs; those of any other model are of other program families. `--small` is one short step, to see that
everything is there.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from own_project import nano, told, write
from smoke import CANNOT, parse

from integration.tiny_model import build_tiny
from nano_coder.agent.profiles import COMPACT_1
from nano_coder.models.scripted import ScriptedPolicy
from nano_coder.run.execution import RunSettings, open_agent
from nano_rl.command_setup import oracle_runtime
from nano_rl.gather.rollouts import execute
from nano_rl.imitation import run_messages
from nano_rl.tasks.task_file import read_tasks
from nano_shared.types import Task, Trajectory

MINI = (
    "PYTHONPATH={folder} MSWEA_CONFIGURED=true MSWEA_COST_TRACKING=ignore_errors"
    " MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT=1 {folder}/bin/mini"
    " -c mini_textbased.yaml --model-class mini_model.NanoModel -m nano -t {{prompt}} -y --exit-immediately"
)
MODEL_CLASS = Path(__file__).parents[1] / "examples" / "agents" / "mini_model.py"
"""without litellm: most of the time of so short a run is the start of the agent"""
ARMS = ("fresh", "log")
LOOK = """python -m pytest -q; awk '{print NR"|"$0}' $(ls *.py | grep -v test_)"""
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
TINY_POSITIONS = 2048
OPERATORS = (("+", "-", "*", "//", "%"), ("==", "!=", "<", "<=", ">", ">="))
DEMONSTRATED = 1000
"""seed of the tasks that are imitated"""


def main() -> int:
    parser = argparse.ArgumentParser(description="Training a foreign agent's policy.")
    parser.add_argument("--out", type=Path, required=True, help="for homes, tasks and results.json")
    parser.add_argument("--agent-folder", type=Path, required=True, help="the virtual environment of mini")
    parser.add_argument("--agent", default=MINI, help="command; {folder} stands for --agent-folder")
    parser.add_argument("--model", default="tiny", help="policy that is trained: tiny, shipped, a folder")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--tasks", type=int, default=60)
    parser.add_argument("--held-out", type=int, default=40)
    parser.add_argument("--repeat", type=int, default=2, help="runs of each held-out task, before and after")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--prompts", type=int, default=8, help="tasks of a step")
    parser.add_argument("--temperature", default="1", help="of all runs, measured and trained")
    parser.add_argument("--max-turns", type=int, default=8, help="of a run")
    parser.add_argument(
        "--demonstrations", type=int, default=200, help="tasks of the teacher; 0: no imitation"
    )
    parser.add_argument("--right", type=float, default=1.0, help="share of right choices of tiny's teacher")
    parser.add_argument("--rate", type=float, default=8e-4, help="learning rate of imitation; not of tiny")
    parser.add_argument("--epochs", type=float, default=1.0, help="of imitation")
    parser.add_argument("--layers", type=int, default=4, help="of the tiny policy")
    parser.add_argument("--small", action="store_true", help="one step of two small groups")
    parser.add_argument("--train", nargs=argparse.REMAINDER, default=[], help="more for nano-rl train")
    options = parse(parser)
    if options.smoke and not options.agent_folder:
        print(f"{CANNOT}it needs an agent of others, in the folder of --agent-folder")
        return 0
    if options.small or options.smoke:
        options.tasks, options.held_out, options.repeat = 2, 1, 1
        options.group_size, options.steps, options.max_turns, options.seeds = 2, 1, 3, options.seeds[:1]
        options.demonstrations, options.epochs = 4, 1.0
    options.is_tiny = options.model == "tiny"
    if options.right < 1 and not options.is_tiny:
        parser.error("--right is for --model tiny, whose tasks are one operator")
    options.out.mkdir(parents=True, exist_ok=True)
    shutil.copy(MODEL_CLASS, options.agent_folder)
    if options.is_tiny or options.demonstrations:
        options.model = str(warm(options))
    file = options.out / "results.json"
    results: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    for seed in options.seeds:
        for arm in options.arms:
            name = f"{arm} {seed}"
            if name not in results:
                results[name] = one_arm(options, arm, str(seed))
                file.write_text(json.dumps(results, indent=2) + "\n")
            print(f"{name}:", json.dumps(results[name]), flush=True)
    ends = []
    for arm in options.arms:
        print(f"{arm}: ", end="")
        ends.append(told([results[f"{arm} {seed}"]["gain"] for seed in options.seeds]))
    return max(ends)


def warm(options: argparse.Namespace) -> Path:
    """The checkpoint of a policy that imitated the agent, with each task's oracle behind it."""
    home: Path = options.out / "warm"
    file, checkpoint = home / "tasks.jsonl", home / "checkpoints" / "warm"
    if checkpoint.exists():
        return checkpoint
    make_tasks(options, file, options.demonstrations, DEMONSTRATED)
    os.environ["NANO_HOME"] = str(home)
    tasks = list(read_tasks(file))
    command = options.agent.format(folder=options.agent_folder)
    agent = open_agent(command, [str(options.agent_folder)])
    runtime = replace(oracle_runtime(None), policy_name="teacher", settings=RunSettings(agent=agent))
    runs = execute(tasks, [ScriptedPolicy(solution(task), id="teacher") for task in tasks], runtime)
    print(f"demonstrations: {sum(run.reward == 1 for run in runs)} of {len(runs)} solved", flush=True)
    # the weights of a tiny policy are random: an adapter would leave them so
    rate, batch, rank = options.rate, 4, 16
    if options.is_tiny:
        options.model = build_tiny(
            home / "tiny", texts_of(runs), layers=options.layers, max_positions=TINY_POSITIONS
        )
        rate, batch, rank = 2e-3, 16, 0
    lessons, epochs = home / "lessons.jsonl", options.epochs
    source: tuple[object, ...] = ("--from-logs",)
    if options.right < 1:  # wrong choices too, which no log gives
        chance, epochs = random.Random(DEMONSTRATED), 1
        drawn = [
            {"messages": turns_of(run, task, chance.random() < options.right, chance)}
            for _ in range(round(options.epochs))
            for run, task in zip(runs, tasks, strict=True)
        ]
        write(home, {lessons.name: "".join(json.dumps(line) + "\n" for line in drawn)})
        source = ("--messages", lessons)
    nano(
        home, "nano-rl", "sft", "--name", "warm", *source, "--model", options.model, "--lora-rank", rank,
        "--learning-rate", rate, "--epochs", epochs, "--set", f"batch={batch}",
        "--set", "optimizer.schedule=linear", "--set", "optimizer.warmup_steps=20",
    )  # fmt: skip
    return checkpoint


def misled(task: Task, chance: random.Random) -> Task:
    """The task whose oracle inserts another operator of the kind of the right one."""
    edit, *rest = task.oracle or ()
    right, old = str(edit.arguments["new"]), str(edit.arguments["old"])
    (kind,) = [kind for kind in OPERATORS if right in kind]
    new = chance.choice([other for other in kind if other not in (right, old)])
    wrong = edit.model_copy(update={"arguments": {**edit.arguments, "new": new}})
    return task.model_copy(update={"oracle": (wrong, *rest)})


def turns_of(run: Trajectory, task: Task, right: bool, chance: random.Random) -> list[dict[str, str]]:
    """The run of the task's oracle, or the same with a wrong operator: what the agent answers is the same."""
    said = dict(zip(solution(task), solution(task if right else misled(task, chance)), strict=True))
    return [
        {"role": turn.role.value, "content": said.get(turn.content, turn.content)}
        for turn in run_messages(run, COMPACT_1)
    ]


def texts_of(runs: list[Trajectory]) -> list[str]:
    """What the tokenizer of the tiny policy is built from."""
    return [message.content for run in runs for message in run_messages(run, COMPACT_1)]


def solution(task: Task) -> list[str]:
    """What the policy says: it looks, corrects the wrong line, and submits, each by a command."""
    (edit,) = [action for action in task.oracle or () if action.name == "edit_file"]
    path, new = str(edit.arguments["path"]), str(edit.arguments["new"])
    if "old" in edit.arguments:
        wrong = str(edit.arguments["old"]).replace("*", r"\*")
        return [said("", f"cat {path}"), said("", f"sed -i 's| {wrong} | {new} |' {path}"), said("", SUBMIT)]
    # a here-document, since code with quotation marks would have to be quoted
    line = edit.arguments["line"]
    mend = f"sed -i -e '{line}{{r /dev/stdin' -e 'd}}' {path} <<'EOF'\n{new}\nEOF"
    return [said("", LOOK), said(edit.thought, mend), said("", SUBMIT)]


def said(thought: str, command: str) -> str:
    """An answer of the form that mini_textbased.yaml of the agent asks for."""
    return f"{thought}\n\n```mswea_bash_command\n{command}\n```".strip()


def make_tasks(
    options: argparse.Namespace, file: Path, count: int, seed: int, *, held_out: bool = False
) -> None:
    """Write tasks whose limits are those of the options. None held out has the program of another."""
    split = "test" if held_out and not options.is_tiny else "train"
    drawn = count * 12 if options.is_tiny else count  # one in five is held out, and some are drawn twice
    view = ("--view", "replace" if options.is_tiny else "repair", "--level", "2")
    made = ("--suite", "functions", *view, "-n", drawn, "--seed", seed, "--split", split)
    file.parent.mkdir(parents=True, exist_ok=True)
    nano(options.out / "home", "nano-rl", "tasks", "make", *made, "--out", file)
    own = {"max_turns": options.max_turns, "max_seconds": 3600}
    if options.is_tiny:  # one that has lost its way rambles
        own |= {"max_tokens": 512, "completion_tokens": 128}
    tasks = [json.loads(line) for line in file.read_text().splitlines()]
    if options.is_tiny:
        tasks = [task for task in tasks if held_out == (int(task["program_hash"][-8:], 16) % 5 == 0)][:count]
    limited = [task | {"limits": task.get("limits", {}) | own} for task in tasks]
    write(file.parent, {file.name: "".join(json.dumps(task) + "\n" for task in limited)})


def one_arm(options: argparse.Namespace, arm: str, seed: str) -> dict[str, Any]:
    """Train on the tasks, and measure on the held-out ones: success before and after, and minutes."""
    folder = options.out / f"seed-{seed}"
    home = folder / arm
    train, held_out = folder / "train.jsonl", folder / "held_out.jsonl"
    if not train.exists():
        make_tasks(options, train, options.tasks, int(seed))
        make_tasks(options, held_out, options.held_out, int(seed), held_out=True)
    agent = (
        "--agent", options.agent.format(folder=options.agent_folder),
        "--agent-folders", options.agent_folder,
    )  # fmt: skip

    def success(home: Path, model: str, file: Path) -> float:
        """On the held-out tasks; what was measured is read back."""
        if not file.exists():
            sampled = ("--temperature", options.temperature, "--repeat", options.repeat, "--seed", seed)
            asked = ("--tasks", held_out, "--model", model, *agent, *sampled, "--json")
            measured = nano(home, "nano-rl", "eval", *asked)
            write(folder, {file.name: measured})
        return float(json.loads(file.read_text())["rows"][0]["rate"])

    before = success(folder / "before", options.model, folder / "before.json")
    began = time.monotonic()
    steps = ("--steps", options.steps, "--prompts", min(options.prompts, options.tasks), "--seed", seed)
    if not (home / "checkpoints" / "mine").exists():
        how: tuple[object, ...] = ("--tasks", train, *agent, "--group-size", options.group_size)
        if arm == "log":
            if not (home / "rolled_out").exists():
                rolled = ("--model", options.model, "--temperature", options.temperature, "--seed", seed)
                nano(home, "nano-rl", "rollout", *rolled, *how)
                (home / "rolled_out").touch()
            nano(home, "nano-rl", "admit", "--model", options.model)
            how = ("--from-logs", "--fresh", "0")
        mine = ("--name", "mine", "--model", options.model, "--set", f"temperature={options.temperature}")
        nano(home, "nano-rl", "train", *mine, *how, *steps, *options.train)
    trained = time.monotonic()

    after = success(home, "mine", folder / f"{arm}.json")
    return {
        "before": before, "after": after, "gain": after - before, "model": Path(options.model).name,
        "tasks": options.tasks, "group": options.group_size, "held out": options.held_out,
        "steps": options.steps, "minutes of training, evaluation": [
            round((trained - began) / 60, 1), round((time.monotonic() - trained) / 60, 1),
        ],
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
