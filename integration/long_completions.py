"""Completions of four thousand tokens, on a CPU: a tiny policy learns to write a file of a thousand lines.

    python integration/long_completions.py --out FOLDER

Each task names a word of which a file shall hold a thousand lines, written by one call. The policy first
imitates files of 20 to 60 lines, and stops as early. The reward is the share of the thousand lines that are
right up to the first wrong one, so GRPO draws its completions out to 4,000 tokens. Printed: the first and the
last step, and success on held-out words before and after; the exit code is 1 where that did not rise.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

from own_project import nano, write

from nano_rl.tiny_model import build_tiny

LINES = 1000
POSITIONS = 8192
CHECK = f"""
import json
word = json.load(open("word.json"))
try:
    lines = open("out.txt").read().split("\\n")
except OSError:
    lines = []
right = 0
while right < min(len(lines), {LINES}) and lines[right] == word:
    right += 1
json.dump(right / {LINES}, open("reward.json", "w"))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description="Completions of four thousand tokens on a CPU.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--demonstrations", type=int, default=400)
    parser.add_argument("--epochs", type=float, default=12)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--temperature", default="0.7")
    options = parser.parse_args()
    home = options.out / "home"
    drawn = random.Random(0)
    words = ["".join(drawn.choices("abcdefgh", k=3)) for _ in range(4 * options.demonstrations)]
    words = sorted(set(words), key=words.index)
    held_out, train, shown = words[:16], words[16:48], words[48:]
    demonstrations = [
        short(drawn.choice(shown), drawn.randint(20, 60), n) for n in range(options.demonstrations)
    ]
    files = {
        "shown": demonstrations,
        "train": [long(w) for w in train],
        "held_out": [long(w) for w in held_out],
    }
    write(options.out, {f"{n}.jsonl": "".join(json.dumps(t) + "\n" for t in ts) for n, ts in files.items()})
    tiny = options.out / "tiny"
    if not tiny.exists():
        texts = [json.dumps(task["oracle"]) + str(task["prompt"]) for task in demonstrations]
        build_tiny(tiny, texts, vocab_size=290, max_positions=POSITIONS)
    imitation = ("--lora-rank", 0, "--epochs", options.epochs, "--learning-rate", 2e-3, "--set", "batch=16")
    schedule = ("--set", "optimizer.schedule=linear", "--set", "optimizer.warmup_steps=5")
    tasks = options.out / "shown.jsonl"
    nano(home, "nano-rl", "sft", "--name", "warm", "--tasks", tasks, "--model", tiny, *imitation, *schedule)
    before = success(options.out, "warm", options.temperature)
    sizes = ("--steps", options.steps, "--prompts", 4, "--group-size", 8, "--lora-rank", 0)
    how = ("--learning-rate", 5e-4, "--set", f"temperature={options.temperature}", "--set", "max_tokens=8192")
    tasks = options.out / "train.jsonl"
    nano(home, "nano-rl", "train", "--name", "mine", "--model", "warm", "--tasks", tasks, *sizes, *how)
    after = success(options.out, "mine", options.temperature)
    rows = (home / "trainings" / "mine" / "metrics.jsonl").read_text().splitlines()
    for row in (rows[0], rows[-1]):
        print(row)
    print(json.dumps({"before": before, "after": after}))
    return int(after <= before)


def success(out: Path, model: str, temperature: str) -> float:
    """Share of held-out runs that wrote all lines."""
    asked = ("--tasks", out / "held_out.jsonl", "--model", model, "--temperature", temperature, "--json")
    return float(json.loads(nano(out / "home", "nano-rl", "eval", *asked))["rows"][0]["rate"])


def of(word: str, key: str) -> dict[str, object]:
    return {
        "key": f"lines-{key}", "prompt": f"Fill out.txt with lines {word}.",
        "tools": ["write_file", "submit"], "artifacts": ["out.txt"],
        "limits": {"max_turns": 3, "max_tokens": 6000, "completion_tokens": 5000, "max_seconds": 3600},
    }  # fmt: skip


def short(word: str, lines: int, number: int) -> dict[str, object]:
    text = f"{word}\n" * lines
    return of(word, f"{word}-{number}") | {
        "hidden": {"kind": "state", "state": [{"kind": "text", "path": "out.txt", "expected": text}]},
        "oracle": [
            {"name": "write_file", "arguments": {"path": "out.txt", "content": text}},
            {"name": "submit"},
        ],
    }


def long(word: str) -> dict[str, object]:
    checks = {"check.py": CHECK, "word.json": json.dumps(word)}
    hidden = {
        "kind": "reward_file",
        "command": "python check.py",
        "files": checks,
        "reward_path": "reward.json",
    }
    return of(word, word) | {"hidden": hidden}


if __name__ == "__main__":
    sys.exit(main())
