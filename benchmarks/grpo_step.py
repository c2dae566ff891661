"""A GRPO step of ours against one of TRL, on the same work, alternating in one run on two cores.

    python benchmarks/grpo_step.py [--cases smollm2-full tiny ...] [--warmup 2] [--steps 5] [--json FILE]

Both sides are processes of their own that wait for each other: ours makes a step, the peer makes a step, and
so on; medians of wall and CPU seconds, and the largest resident set of each process. The peer lives in an
environment that this script makes beside the project's (or `--peer-python`), with TRL 1.16.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from grpo_step_case import Case
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
PEER = ("torch==2.13.0", "trl==1.16.0", "peft")
CASES = (
    Case(name="smollm2-full", model="smollm2", prompts=4, rollouts=8, new_tokens=64, dtype="bfloat16",
         times_faster=5, times_smaller=1.4),
    Case(name="smollm2-lora", model="smollm2", prompts=4, rollouts=8, new_tokens=64, dtype="bfloat16",
         lora_rank=16, times_faster=6, times_smaller=2.5),
    Case(name="smollm2-full-1x8", model="smollm2", prompts=1, rollouts=8, new_tokens=64, dtype="bfloat16",
         times_faster=5, times_smaller=1.4),
    Case(name="smollm2-lora-1x8", model="smollm2", prompts=1, rollouts=8, new_tokens=64, dtype="bfloat16",
         lora_rank=16, times_faster=6, times_smaller=2.5),
    Case(name="smollm2-fp32-1x8", model="smollm2", prompts=1, rollouts=8, new_tokens=64,
         times_faster=3.5, times_smaller=2),
    Case(name="tiny", model="tiny", prompts=8, rollouts=8, new_tokens=128, peer_micro=64,
         times_faster=3, times_smaller=4),
    Case(name="tiny-turns", model="tiny", prompts=8, rollouts=8, new_tokens=64, turns=3, peer_micro=64,
         times_faster=2.5),
    Case(name="tiny-ragged", model="tiny", prompts=8, rollouts=8, new_tokens=128, peer_micro=64, ragged=True),
    Case(name="tiny-turns-slow-tools", model="tiny", prompts=8, rollouts=8, new_tokens=64, turns=3,
         peer_micro=64, tool_seconds=0.1),
)  # fmt: skip


class Side:
    """One side in a process of its own, which makes a step when it is asked to."""

    def __init__(self, python: str, script: str, folder: Path, case: Case) -> None:
        self.rows: list[dict[str, float]] = []
        environment = {**os.environ, "OMP_NUM_THREADS": "2", "TOKENIZERS_PARALLELISM": "false"}
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed with the process
        self._process = subprocess.Popen(
            [python, str(HERE / script), str(folder), case.to_json()],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, env=environment,
        )  # fmt: skip

    def step(self) -> dict[str, float]:
        """Its figures; kept in `rows`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("STEP "):
                self.rows.append(json.loads(line.removeprefix("STEP ")))
                return self.rows[-1]
        self._errors.seek(0)
        raise SystemExit(f"a side of the benchmark died:\n{self._errors.read()[-3000:]}")

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()


def run_case(case: Case, folder: Path, peer_python: str, *, warmup: int, steps: int) -> dict[str, Any]:
    """Alternate both sides, and what came of it."""
    with ExitStack() as stack:
        ours = stack.enter_context(Side(sys.executable, "grpo_step_nano.py", folder, case))
        peer = stack.enter_context(Side(peer_python, "grpo_step_trl.py", folder, case))
        for step in range(warmup + steps):
            pair = ours.step(), peer.step()
            seconds = f"ours {pair[0]['seconds']:.2f} s, peer {pair[1]['seconds']:.2f} s"
            print(f"{case.name} step {step - warmup}: {seconds}", file=sys.stderr)
    return {"case": case.name, "nano": _summary(ours.rows, warmup), "trl": _summary(peer.rows, warmup)}


def _summary(rows: Sequence[dict[str, float]], warmup: int) -> dict[str, float]:
    """Medians of the measured steps; the peak is that of the whole process."""
    measured = rows[warmup:]
    medians = {name: median(row[name] for row in measured) for name in measured[0]}
    return {
        **medians,
        "train": medians["seconds"] - medians["rollout"],
        "fastest": min(row["seconds"] for row in measured),
        "slowest": max(row["seconds"] for row in measured),
        "peak_mb": rows[-1]["peak_mb"],
    }


def print_table(results: Sequence[dict[str, Any]]) -> None:
    """Seconds and megabytes side by side, and each ratio against its bar."""
    table = Table(
        "case", "TRL s (rollout + train)", "nano s (rollout + train)", "times faster", "by CPU",
        "TRL MB", "nano MB", "times smaller", box=None,
    )  # fmt: skip
    bars = {case.name: case for case in CASES}
    for result in results:
        ours, peer, case = result["nano"], result["trl"], bars[result["case"]]
        table.add_row(
            case.name,
            *(f"{s['seconds']:.2f} ({s['rollout']:.2f} + {s['train']:.2f})" for s in (peer, ours)),
            _against(peer["seconds"] / ours["seconds"], case.times_faster),
            f"{peer['cpu_seconds'] / ours['cpu_seconds']:.2f}",
            f"{peer['peak_mb']:.0f}", f"{ours['peak_mb']:.0f}",
            _against(peer["peak_mb"] / ours["peak_mb"], case.times_smaller),
        )  # fmt: skip
    Console(width=160).print(table)


def _against(ratio: float, bar: float) -> str:
    return f"{ratio:.2f}" + (f" (bar {bar:g}, {'met' if ratio >= bar else 'MISSED'})" if bar else "")


def make_models(folder: Path) -> dict[str, Path]:
    """Both models in Hugging Face format, as either side loads them."""
    import sysconfig

    from integration.tiny_model import build_tiny
    from nano_coder.models.weights import BASE, load_policy

    library = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:120]
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in library]
    tiny = build_tiny(folder / "tiny", texts, vocab_size=1536, hidden=192, layers=6, max_positions=4096)
    base = load_policy(BASE)
    base.model.save_pretrained(folder / "smollm2")
    base.tokenizer.save_pretrained(folder / "smollm2")
    return {"tiny": tiny, "smollm2": folder / "smollm2"}


def peer_environment() -> str:
    """The Python of the peer's environment, made once beside the project's."""
    folder = HERE.parent / ".venv" / "peer"
    python = folder / "bin" / "python"
    if not (folder / ".installed").exists():
        print("making the peer's environment (1.5 GB)", file=sys.stderr)
        venv.create(folder, with_pip=True)
        for package in (PEER[:1], PEER):
            subprocess.run([python, "-m", "pip", "install", "-q", *package], check=True)
        (folder / ".installed").touch()
    return str(python)


def main() -> None:
    parser = argparse.ArgumentParser(description="A GRPO step of ours against one of TRL.")
    parser.add_argument(
        "--cases", nargs="+", default=[c.name for c in CASES], choices=[c.name for c in CASES]
    )
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--peer-python", help="a Python that has trl 1.16; by default one is set up")
    parser.add_argument("--json", type=Path, help="write all figures here")
    options = parser.parse_args()
    peer_python = options.peer_python or peer_environment()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        models = make_models(Path(folder))
        for case in (c for c in CASES if c.name in options.cases):
            results.append(
                run_case(case, models[case.model], peer_python, warmup=options.warmup, steps=options.steps)
            )
            if options.json:
                options.json.write_text(json.dumps(results, indent=1))
    print_table(results)


if __name__ == "__main__":
    main()
