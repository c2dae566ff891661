"""Completions of thousands of tokens, trained on a CPU: a tiny policy that has to write long files.

A task names a word and asks for a file that holds it on 2,000 lines or more: over 4,000 tokens, in one call.
The policy first imitates short files, then longer ones, up to 3,000 lines whatever was asked for, so that it
stops anywhere; then GRPO, whose reward is whether the word is there so often. Success is that before and
after, on words that GRPO has not seen.

    python integration/long_completions.py --out FOLDER --seeds 0 1 2

What FOLDER holds is not done again, and a training that was stopped goes on. Then the cost of decoding by the
length of a completion, one row, measured in turn. The last line is the gain and its interval over seeds; the
exit code is 1 where that reaches 0.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from own_project import nano, told, write
from smoke import parse

from integration.tiny_model import build_tiny
from nano_coder.agent.profiles import COMPACT_1, first_messages
from nano_coder.models.local.engine import Engine
from nano_coder.models.local.sampler import GenerationRequest
from nano_coder.models.weights import load_policy
from nano_rl.tasks.task_file import read_tasks
from nano_shared.types import Sampling

LINES = 2000
"""that a file has to have"""
STAGES = ((1, 20, 10, 8.0), (20, 300, 3, 4.0), (100, 3000, 4, 4.0))
"""of imitation: lines of a file, least and most, files of a word, epochs"""
HELD_OUT = 12
"""words that GRPO does not see"""
POSITIONS = 8192
COMPLETION = 7400
WORDS = (  # noqa: SIM905 (words are read more easily)
    "apple bread candle door eagle forest garden hammer island jacket kettle lemon mirror needle orange "
    "paper queen river silver table umbrella valley window yellow anchor basket copper dragon engine "
    "flower glove honey iron jungle king ladder marble nest ocean pencil rabbit saddle tiger velvet "
    "water zebra"
).split()
LENGTHS = (500, 1000, 2000, 4000, 6000)
"""of the completions whose decoding is timed"""


def main() -> int:
    parser = argparse.ArgumentParser(description="Long completions on a CPU.")
    parser.add_argument("--out", type=Path, required=True, help="for homes, tasks and results.json")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=4, help="runs of each held-out task, before and after")
    parser.add_argument("--train", nargs=argparse.REMAINDER, default=[], help="more for nano-rl train")
    options = parse(parser, steps=1, repeat=1, train=["--prompts", "1", "--group-size", "2"])
    if options.smoke:
        globals().update(
            LINES=2, STAGES=((1, 3, 1, 1.0),), HELD_OUT=1, WORDS=WORDS[:3], POSITIONS=256, COMPLETION=16,
            LENGTHS=(8,),
        )  # fmt: skip
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "results.json"
    results: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    for seed in map(str, options.seeds):
        if seed not in results:
            results[seed] = one_seed(options, options.out / f"seed-{seed}", int(seed))
            file.write_text(json.dumps(results, indent=2) + "\n")
        print(f"seed {seed}:", json.dumps(results[seed]), flush=True)
    for length, seconds in decoding(options.out / f"seed-{options.seeds[0]}" / "tiny").items():
        print(f"a completion of {length} tokens: {seconds:.2f} s, {1000 * seconds / length:.2f} ms a token")
    gained = told([results[str(seed)]["gain"] for seed in options.seeds])
    return 0 if options.smoke else gained


def one_seed(options: argparse.Namespace, folder: Path, seed: int) -> dict[str, Any]:
    """Imitate, train and measure: success before and after, tokens of a completion, minutes of each part."""
    home, chance, began = folder / "home", random.Random(seed), [time.monotonic()]
    words = chance.sample(WORDS, len(WORDS))
    write_tasks(folder / "train.jsonl", words[HELD_OUT:], 1, LINES, LINES, chance)
    write_tasks(folder / "held_out.jsonl", words[:HELD_OUT], 1, LINES, LINES, chance)
    if not (home / "checkpoints" / "warm").exists():
        imitate(folder, home, seed, words, chance)
    began.append(time.monotonic())
    before = success(options, folder, "warm", seed)
    began.append(time.monotonic())
    if not (home / "checkpoints" / "long").exists():
        nano(home, "nano-rl", "tasks", "check", folder / "train.jsonl", "--out", folder / "checked.jsonl")
        nano(
            home, "nano-rl", "train", "--tasks", folder / "checked.jsonl", "--name", "long",
            "--model", "warm", "--lora-rank", 0, "--learning-rate", 1e-3, "--steps", options.steps,
            "--prompts", 3, "--group-size", 8, "--seed", seed, "--set", "max_tokens=8192",
            "--set", "guards.patience=100",
            *options.train,
        )  # fmt: skip
    began.append(time.monotonic())
    after = success(options, folder, "long", seed)
    metrics = [json.loads(line) for line in (home / "trainings/long/metrics.jsonl").read_text().splitlines()]
    minutes = [round((end - start) / 60, 1) for start, end in pairwise(began)]
    return {
        "before": before, "after": after, "gain": after - before,
        "mean tokens of a completion, by step": [round(row["completions/mean_length"]) for row in metrics],
        "minutes of imitation, evaluation, training": minutes,
    }  # fmt: skip


def imitate(folder: Path, home: Path, seed: int, words: list[str], chance: random.Random) -> None:
    """The checkpoint `warm`, in stages of files that grow."""
    model: Path | str = folder / "tiny"
    for number, (least, most, files, epochs) in enumerate(STAGES):
        file = folder / f"stage-{number}.jsonl"
        write_tasks(file, words, files, least, most, chance)
        if number == 0:
            shown = list(read_tasks(file))
            texts = [message.content for one in shown for message in first_messages(COMPACT_1, one, [])]
            texts += [f"@write_file path=lines.txt\n{edit.arguments['content']}" for one in shown
                      for edit in (one.oracle or ())[:1]]  # fmt: skip
            build_tiny(folder / "tiny", texts, seed=seed, layers=2, max_positions=POSITIONS)
        name = "warm" if number == len(STAGES) - 1 else f"stage-{number}"
        nano(
            home, "nano-rl", "sft", "--tasks", file, "--name", name, "--model", model, "--lora-rank", 0,
            "--learning-rate", 2e-3 if number == 0 else 5e-4, "--epochs", epochs, "--set", f"seed={seed}",
            "--set", f"batch={16 if number == 0 else 4}", "--set", "max_tokens=8192",
        )  # fmt: skip
        model = name


def write_tasks(
    file: Path, words: list[str], files: int, least: int, most: int, chance: random.Random
) -> None:
    rows = [
        json.dumps(task(f"{word}-{number}", word, chance.randint(least, most)))
        for word in words
        for number in range(files)
    ]
    write(file.parent, {file.name: "".join(row + "\n" for row in rows)})


def task(key: str, word: str, lines: int) -> dict[str, Any]:
    """A row of a task file, and an oracle that writes so many lines, which are enough if it is imitated."""
    checker = (
        f"rows = open('lines.txt').read().splitlines()\nassert rows.count({word!r}) >= {min(lines, LINES)}\n"
    )
    content = f"{word}\n" * lines
    return {
        "key": key, "prompt": f"Write lines.txt, {LINES} lines or more, each: {word}",
        "hidden": {"kind": "command", "command": "python check.py", "files": {"check.py": checker}},
        "oracle": [
            {"name": "write_file", "arguments": {"path": "lines.txt", "content": content}},
            {"name": "submit", "arguments": {"answer": "done"}},
        ],
        "split": "train", "tools": ["write_file", "submit"],
        "limits": {
            "max_turns": 2, "max_tokens": POSITIONS, "completion_tokens": COMPLETION, "max_seconds": 3600
        },
    }  # fmt: skip


def success(options: argparse.Namespace, folder: Path, model: str, seed: int) -> float:
    """On the held-out tasks; what was measured is read back."""
    file = folder / f"{model}.json"
    if not file.exists():
        how = ("--temperature", "1", "--repeat", options.repeat, "--seed", seed, "--json")
        asked = ("--tasks", folder / "held_out.jsonl", "--model", model)
        write(folder, {file.name: nano(folder / "home", "nano-rl", "eval", *asked, *how)})
    return float(json.loads(file.read_text())["rows"][0]["rate"])


def decoding(folder: Path, rounds: int = 3) -> dict[int, float]:
    """Median seconds of a completion of each length behind one prompt, lengths in turn."""
    model: Any = load_policy(str(folder)).model
    seconds: dict[int, list[float]] = {length: [] for length in LENGTHS}
    prompt = tuple(torch.randint(5, model.config.vocab_size, (64,)).tolist())
    for _ in range(rounds):
        for length, taken in seconds.items():
            engine = Engine(model, eos_ids=frozenset(), context_limit=POSITIONS)
            started = time.perf_counter()
            engine.generate([GenerationRequest(prompt, Sampling(max_tokens=length), 0)])
            taken.append(time.perf_counter() - started)
    return {length: median(taken) for length, taken in seconds.items()}


if __name__ == "__main__":
    sys.exit(main())
