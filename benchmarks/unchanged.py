"""What moving code must not change: task files, tiny trainings, sampled tokens, exit codes.

    python benchmarks/unchanged.py --write docs/results/unchanged.json     records the figures
    python benchmarks/unchanged.py --against docs/results/unchanged.json   runs again, prints each figure that
                                                                           differs; exit code 1 if one does

Only the commands are called, and only files that they write are read, so that modules may move under it. Each
section has a NANO_HOME of its own in a temporary folder; seeds are fixed, the device is the CPU, one thread.

Weights, metrics and tokens are functions of the processor and of the versions of Python, torch and
transformers too: the record names them, and a comparison under others says so first; record anew there.

Left out, because two runs of the same code differ in it: run ids, times, rates and memory in metrics.jsonl
(`VARYING`), log probabilities (which runs share a forward pass depends on the timing of threads, and on that
the last bit), trainings from a log of rollouts (which read those; `tests/rl/test_training_bytes.py` has one),
and manifests (they contain run ids and times). Help texts may change and are left out.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

PROGRAMS = {"nano-coder": "nano_coder.cli", "nano-rl": "nano_rl.cli"}
VARYING = re.compile(r"second|time|^perf/|^heartbeat")
"""keys of metrics.jsonl whose values depend on the clock or on the machine's memory"""

TINY = "--model warm --device cpu --learning-rate 1e-3"
STEPS = f"--tasks tasks.jsonl --seed 2 --steps 2 --prompts 8 --group-size 4 --lora-rank 0 {TINY}"
TRAININGS = {
    "sft": "sft --name sft --log sft.db --tasks tasks.jsonl --set max_tokens=1024 --set batch=32"
    f" --set seed=2 --lora-rank 0 {TINY}",
    "grpo": f"train --name grpo --log grpo.db --objective grpo {STEPS}",
    "ppo": f"train --name ppo --log ppo.db --objective ppo {STEPS}",
}
WARM = (
    "sft --model ./tiny --name warm --log warm.db --tasks tasks.jsonl --set seed=1 --set batch=8"
    " --epochs 12 --learning-rate 4e-3 --lora-rank 0 --device cpu"
)
"""how the tiny policy comes to pass some of its tasks: without that, no group has signal"""
ROLLOUT = "rollout --device cpu --seed 2 --limit max_completion_tokens=64"

COMMANDS = {
    "nano-coder": """
run, resume, say, chat, apply, diff, undo, restore, fork, feedback, log list, log show,
log verify, log export, log import, log migrate, log redact, log path, serve, view, exec, doctor,
memory list, memory edit, memory forget, mcp list, mcp add, mcp inspect, mcp test, mcp serve, tools,
models, trust, config show
""",
    "nano-rl": """
tasks make, tasks check, tasks import, tasks export, tasks serve, tasks from-log, tasks mine,
tasks list, rollout, sft, admit, train, cluster status, preferences build, reward-model, dpo, plan,
eval, export, grade, report, conformance, checkpoints list, checkpoints show, checkpoints promote,
checkpoints rollback, checkpoints history, checkpoints best, checkpoints export
""",
}
"""each is called with --help and with an unknown option"""
REFUSALS = {
    "nano-coder": """
no-such, run, run task -C missing, run task --model no-such, run task --sandbox no-such,
run task --tool no-such, run task --limit no_such=1, run task --max-turns 0,
run task --config missing.toml, resume no-such, say no-such text, apply, diff no-such,
fork no-such, feedback, log list, log show no-such, log show last --log missing.db,
log export --format no-such, log import missing.jsonl, log migrate missing.db other.db, exec,
exec missing.py, memory list, memory forget, mcp list, mcp inspect no-such, tools,
tools --profile no-such, models get no-such, trust, config show, config show --set no_such=1,
view no-such
""",
    "nano-rl": """
no-such, tasks list, tasks list missing.jsonl, tasks make --suite no-such, tasks make --level 99,
tasks make --view no-such, tasks check missing.jsonl, tasks import no-such, tasks mine missing,
rollout, rollout --tasks missing.jsonl, rollout --env no-such:name, sft --name x,
sft --name x --messages missing.jsonl, train, train --name x,
train --name x --objective no-such --tasks missing.jsonl, train --name x --set no_such=1,
train --name x --print-config, preferences build, dpo --name x, dpo --name x --pairs missing.jsonl,
reward-model --name x, eval --tasks missing.jsonl, export --format no-such, grade, grade no-such,
report no-such, checkpoints list, checkpoints show no-such, checkpoints promote no-such,
checkpoints rollback
""",
}
"""no argument, missing files, unknown names and values"""


def call(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command line in the folder, with the folder's own NANO_HOME."""
    program, *arguments = line.split()
    source = f"import sys; sys.argv[0] = {program!r}; from {PROGRAMS[program]} import main; main()"
    environ = {k: v for k, v in os.environ.items() if not k.startswith("NANO_")}
    environ |= {"NANO_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1", "COLUMNS": "100", "NO_COLOR": "1"}
    argv = [sys.executable, "-P", "-c", source, *arguments]
    return subprocess.run(
        argv, cwd=folder, env=environ, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
    )


def must(line: str, folder: Path) -> str:
    """The standard output of a command that has to succeed."""
    done = call(line, folder)
    if done.returncode:
        sys.exit(f"{line}\nexit code {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


def digest(content: bytes | str) -> str:
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()[:32]


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def tasks(folder: Path) -> dict[str, str]:
    """Each suite with all its levels, train and held-out, and each view that is only made by name."""
    listed = json.loads(must("nano-rl tasks list --suites --json", folder))
    levels: dict[str, list[int]] = {}
    made = []
    for row in listed:
        levels.setdefault(row["suite"], []).append(row["level"])
        for view in re.findall(r"(\w+) \(by name only\)", row["views"]):
            made.append(f"--suite {row['suite']} --split train -n 4 --level {row['level']} --view {view}")
    for suite, of_suite in levels.items():
        span = f"--level {min(of_suite)}-{max(of_suite)}"
        made += [f"--suite {suite} --split {split} -n 24 {span}" for split in ("train", "test")]
    figures = {}
    for options in made:
        must(f"nano-rl tasks make {options} --seed 3 --out made.jsonl", folder)
        figures[f"{options}: ids"] = digest("\n".join(row["key"] for row in rows(folder / "made.jsonl")))
        figures[f"{options}: file"] = digest((folder / "made.jsonl").read_bytes())
        (folder / "made.jsonl").unlink()
    return figures


CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""to the letter the template by which a folder of weights gets the compact profile"""


def build_tiny(folder: Path, texts: list[str]) -> None:
    """A random Llama of 0.15 M parameters in the format of Hugging Face, with a tokenizer of the texts."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    bpe: Any = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=special, show_progress=False)
    trainer.initial_alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token=special[0], bos_token=special[1], eos_token=special[2]
    )
    tokenizer.chat_template = CHATML
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=192, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=1024, initializer_range=0.125,
        tie_word_embeddings=True, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def trainings(folder: Path) -> dict[str, str]:
    """Weights and metrics of each tiny training; all of them start at one warm-started policy."""
    must("nano-rl tasks make --level 0 --view copy -n 64 --seed 1 --out tasks.jsonl", folder)
    build_tiny(folder / "tiny", [row["prompt"] for row in rows(folder / "tasks.jsonl")])
    figures = {"tiny: weights": weights(folder / "tiny")}
    must(f"nano-rl {WARM}", folder)
    for name in ("warm", *TRAININGS):
        if name in TRAININGS:
            must(f"nano-rl {TRAININGS[name]}", folder)
        figures[f"{name}: weights"] = weights(folder / "home" / "checkpoints" / name)
        steps = [
            {key: value for key, value in row.items() if not VARYING.search(key)}
            for row in rows(folder / "home" / "trainings" / name / "metrics.jsonl")
        ]
        figures[f"{name}: metrics of {len(steps)} steps"] = digest(json.dumps(steps, sort_keys=True))
    return figures


def weights(folder: Path) -> str:
    """Digest of all safetensors of a folder, with their names."""
    files = sorted(folder.rglob("*.safetensors"))
    assert files, f"no weights in {folder}"
    return digest("".join(f"{f.relative_to(folder)} {digest(f.read_bytes())}\n" for f in files))


def tokens(folder: Path) -> dict[str, str]:
    """Ids that the shipped policy samples on 20 tasks of five suites, greedily, and its own id."""
    for suite in ("functions", "data", "logic", "shell", "sql"):
        must(f"nano-rl tasks make --suite {suite} -n 4 --seed 5 --out {suite}.jsonl", folder)
        with (folder / "tasks.jsonl").open("a") as all_suites:
            all_suites.write((folder / f"{suite}.jsonl").read_text())
    must(f"nano-rl {ROLLOUT} --tasks tasks.jsonl --temperature 0 --limit max_turns=3", folder)
    must("nano-coder log export --format jsonl --out runs.jsonl", folder)
    runs = [row["trajectory"] for row in rows(folder / "runs.jsonl") if "trajectory" in row]
    assert len(runs) == 20, len(runs)
    figures = {}
    for run in sorted(runs, key=lambda run: run["task"]["key"]):
        sampled = [turn["completion"]["tokens"]["sampled_ids"] for turn in run["turns"]]
        figures[run["task"]["key"]] = f"{sum(map(len, sampled))} tokens, {digest(json.dumps(sampled))}"
        figures["policy"] = run["turns"][0]["completion"]["policy_id"]
    return figures


def commands(folder: Path) -> dict[str, str]:
    """Exit code and first line of standard error of each command line; the folder is written as FOLDER."""
    lines = [
        f"{program} {' '.join(rest.split())}" for program in PROGRAMS for rest in REFUSALS[program].split(",")
    ]
    for program, names in COMMANDS.items():
        for name in map(str.strip, names.split(",")):
            lines += [f"{program} {name} --help", f"{program} {name} --no-such-option"]
    figures = {}
    for line in lines:
        done = call(line, folder)
        said = [text for text in done.stderr.splitlines() if text.strip()] or [""]
        figures[line] = f"{done.returncode} {said[0].replace(str(folder), 'FOLDER')}".strip()
    return figures


def record() -> dict[str, dict[str, str]]:
    """Every section, two at a time, each in a new folder."""
    with tempfile.TemporaryDirectory() as home, ThreadPoolExecutor(2) as pool:
        running = {}
        for section in (tokens, trainings, tasks, commands):
            folder = Path(home).resolve() / section.__name__
            folder.mkdir()
            running[section.__name__] = pool.submit(section, folder)
        machine = {name: version(name) for name in ("torch", "transformers", "tokenizers")}
        machine |= {"python": platform.python_version(), "processor": processor()}
        return {"machine": machine} | {name: future.result() for name, future in running.items()}


def processor() -> str:
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", info.read_text()) if info.exists() else []
    return names[0] if names else platform.machine()


def main() -> int:
    parser = argparse.ArgumentParser(description="What moving code must not change.")
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--write", type=Path, metavar="FILE", help="record the figures")
    chosen.add_argument("--against", type=Path, metavar="FILE", help="print what differs from a record")
    options = parser.parse_args()
    before = json.loads(options.against.read_text()) if options.against else {}
    now = record()
    if options.write:
        options.write.write_text(json.dumps(now, indent=1) + "\n")
        return 0
    changed = 0
    for section in before | now:
        was, figures = before.get(section, {}), now.get(section, {})
        different = [name for name in was | figures if was.get(name) != figures.get(name)]
        changed += len(different) if section != "machine" else 0
        for name in different:
            print(f"{section}: {name}\n  was {was.get(name)!r}\n  now {figures.get(name)!r}")
    print(f"{changed} of {sum(map(len, now.values())) - len(now['machine'])} figures differ")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
