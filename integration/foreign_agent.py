"""An agent of others learns through its policy's server: mini-swe-agent, unmodified, on small repair tasks.

Install it outside /tmp with a Python below /usr, as examples/agents says, and name the folder:

    /usr/bin/python3 -m venv /srv/mini && /srv/mini/bin/pip install mini-swe-agent mcp
    python integration/foreign_agent.py --out FOLDER --agent-folder /srv/mini --seeds 0 1 2

For each seed and arm the policy is trained on 60 tasks and measured on held-out ones of other program
families, before and after, with the same seeds of sampling: `fresh` is `train --agent`, `log` is `rollout
--agent` and then `train --from-logs` on what its server captured, without a rollout more. A seed that
FOLDER/results.json holds is not run again, and a training that was stopped goes on. The last line of each arm
is its gain and interval over seeds; the exit code is 1 where one reaches 0. `--tiny` is one small step, to
see that everything is there.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from own_project import nano, told, write

MINI = (
    "MSWEA_CONFIGURED=true MSWEA_COST_TRACKING=ignore_errors"
    " {folder}/bin/mini -m openai/nano -t {{prompt}} -y --exit-immediately"
)
SUITE = ("--suite", "functions", "--view", "repair")
ARMS = ("fresh", "log")


def main() -> int:
    parser = argparse.ArgumentParser(description="Training a foreign agent's policy.")
    parser.add_argument("--out", type=Path, required=True, help="for homes, tasks and results.json")
    parser.add_argument("--agent-folder", type=Path, required=True, help="the virtual environment of mini")
    parser.add_argument("--agent", default=MINI, help="command; {folder} stands for --agent-folder")
    parser.add_argument("--model", default="shipped", help="policy that is trained")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--tasks", type=int, default=60)
    parser.add_argument("--held-out", type=int, default=40)
    parser.add_argument("--level", default="2", help="of the tasks")
    parser.add_argument("--repeat", type=int, default=2, help="runs of each held-out task, before and after")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--max-turns", type=int, default=8, help="of a run")
    parser.add_argument("--tiny", action="store_true", help="one step of two small groups")
    parser.add_argument("--train", nargs=argparse.REMAINDER, default=[], help="more for nano-rl train")
    options = parser.parse_args()
    if options.tiny:
        options.tasks, options.held_out, options.repeat = 2, 1, 1
        options.group_size, options.steps, options.max_turns, options.seeds = 2, 1, 2, options.seeds[:1]
    options.out.mkdir(parents=True, exist_ok=True)
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


def one_arm(options: argparse.Namespace, arm: str, seed: str) -> dict[str, Any]:
    """Train on the tasks, and measure on the held-out ones: success before and after, and minutes."""
    folder = options.out / f"seed-{seed}"
    home = folder / arm
    train, held_out = folder / "train.jsonl", folder / "held_out.jsonl"
    for file, split, count in ((train, "train", options.tasks), (held_out, "test", options.held_out)):
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            made = (*SUITE, "--level", options.level, "-n", count, "--seed", seed, "--split", split)
            nano(home, "nano-rl", "tasks", "make", *made, "--out", file)
            tasks = [json.loads(line) for line in file.read_text().splitlines()]
            own = {"max_turns": options.max_turns}
            limited = [task | {"limits": task.get("limits", {}) | own} for task in tasks]
            write(folder, {file.name: "".join(json.dumps(task) + "\n" for task in limited)})
    agent = (
        "--agent", options.agent.format(folder=options.agent_folder),
        "--agent-folders", options.agent_folder,
    )  # fmt: skip
    began = time.monotonic()
    steps = ("--steps", options.steps, "--prompts", min(8, options.tasks), "--seed", seed)
    if not (home / "checkpoints" / "mine").exists():
        how = ("--tasks", train, *agent, "--group-size", options.group_size)
        if arm == "log":
            if not (home / "rolled_out").exists():
                rolled = ("--model", options.model, "--temperature", "1", "--seed", seed)
                nano(home, "nano-rl", "rollout", *rolled, *how)
                (home / "rolled_out").touch()
            nano(home, "nano-rl", "admit", "--model", options.model)
            how = ("--from-logs", "--fresh", "0")
        mine = ("--name", "mine", "--model", options.model)
        nano(home, "nano-rl", "train", *mine, *how, *steps, *options.train)
    trained = time.monotonic()
    sampled = ("--temperature", "1", "--repeat", options.repeat, "--seed", seed, "--json")
    models = ("--model", "mine", "--against", options.model)
    said = json.loads(nano(home, "nano-rl", "eval", "--tasks", held_out, *models, *agent, *sampled))
    after, before = said["rows"][0]["rate"], said["against"][0]["rate"]
    return {
        "before": before, "after": after, "gain": after - before, "paired": said["difference"],
        "model": options.model, "tasks": options.tasks, "held out": options.held_out, "steps": options.steps,
        "minutes of training, evaluation": [
            round((trained - began) / 60, 1), round((time.monotonic() - trained) / 60, 1),
        ],
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
