"""Success of a policy on held-out tasks by temperature, against greedy.

    python benchmarks/temperature.py --model shipped --out temperature.json

Runs 200 held-out tasks once greedily and three times at each temperature, each run with a seed of its own,
through `nano-rl eval`. Prints the success, the difference to greedy and the highest temperature that costs at
most two points. Finished temperatures are read back from --out.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TEMPERATURES = (0.0, 0.3, 0.6, 1.0)
TASKS = ("--level", "0-2", "-n", "200", "--seed", "1", "--split", "test")
MOST_COST = 0.02
"""success that sampling may cost against greedy, as a fraction"""


def nano_rl(*arguments: str) -> str:
    command = [str(Path(sys.executable).with_name("nano-rl")), *arguments]
    return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout


def evaluate(tasks: Path, model: str, temperature: float, repeat: int, dtype: str) -> dict[str, Any]:
    """The row of all tasks: runs, successes and the 95 % interval."""
    how = ["--temperature", str(temperature), *(["--repeat", str(repeat)] if temperature else [])]
    told = nano_rl("eval", "--tasks", str(tasks), "--model", model, *how, "--set", f"dtype={dtype}", "--json")
    (whole,) = [row for row in json.loads(told)["rows"] if row["name"] == "all"]
    return dict(whole)


def main() -> None:
    parser = argparse.ArgumentParser(description="Success by temperature.")
    parser.add_argument("--model", default="shipped")
    parser.add_argument("--repeat", type=int, default=3, help="seeds at each temperature above 0")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", type=Path, default=Path("temperature.json"))
    options = parser.parse_args()
    rows = json.loads(options.out.read_text()) if options.out.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        tasks = Path(folder) / "test.jsonl"
        nano_rl("tasks", "make", *TASKS, "--out", str(tasks))
        for temperature in TEMPERATURES:
            if str(temperature) not in rows:
                rows[str(temperature)] = evaluate(
                    tasks, options.model, temperature, options.repeat, options.dtype
                )
                options.out.write_text(json.dumps(rows, indent=1))
    greedy = rows["0.0"]["rate"]
    for temperature, row in rows.items():
        print(f"{temperature:>4}: {row['rate']:6.1%} ({row['low']:.1%} to {row['high']:.1%})", end="  ")
        print(f"{row['rate'] - greedy:+.1%} against greedy, {row['graded']} runs")
    best = max(float(t) for t, row in rows.items() if row["rate"] >= greedy - MOST_COST)
    print(f"highest temperature within {MOST_COST:.0%} of greedy: {best}")


if __name__ == "__main__":
    main()
