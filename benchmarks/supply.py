"""How many admitted tasks a second: the whole of `nano-rl tasks make --check`, drawing included.

    python benchmarks/supply.py [-n N] [--jobs JOBS] [--level 0-3] [--view VIEWS]

The bar is 5,000 admitted problems in under 10 minutes on two cores, 8.4 a second.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter

from nano_mining.task_check import admitted_tasks
from nano_shared.types import Split
from nano_suites.commands import parse_levels
from nano_suites.drawing import draw_tasks

BAR = 5000 / 600


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("-n", type=int, default=500, help="tasks to admit")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--suite", default="functions")
    parser.add_argument("--level", default="0-3")
    parser.add_argument("--view", default="", help="separated by commas; default all of the levels")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    drawn = draw_tasks(
        suite=options.suite,
        levels=parse_levels(options.level),
        seed=options.seed,
        split=Split.TRAIN,
        views=tuple(filter(None, options.view.split(","))),
    )
    started = time.monotonic()
    tasks, findings = admitted_tasks(drawn, options.n, jobs=options.jobs)
    seconds = time.monotonic() - started
    print(f"{'level':6}{'view':18}{'checked':>8}{'admitted':>9}{'seconds each':>14}")
    spent: Counter[tuple[int | None, str | None]] = Counter()
    for finding in findings:
        spent[finding.level, finding.view] += finding.seconds  # type: ignore[assignment]
    for (level, view), total in sorted(spent.items(), key=str):
        own = [f for f in findings if (f.level, f.view) == (level, view)]
        print(f"{level!s:6}{view!s:18}{len(own):8}{sum(f.admitted for f in own):9}{total / len(own):14.3f}")
    rate = len(tasks) / seconds
    refused = Counter(reason.split(":")[0] for f in findings for reason in f.reasons)
    print(f"refused: {dict(refused) or 'none'}")
    print(f"{len(tasks)} admitted of {len(findings)} drawn in {seconds:.1f} s: {rate:.1f} a second")
    print(f"5,000 would take {5000 / rate / 60:.1f} minutes; the bar is 10 ({BAR:.1f} a second)")


if __name__ == "__main__":
    main()
