"""The whole circle, in its small form: it gains on unseen programs, and more than any constant answer."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from nano_shared.types import Split
from nano_suites.drawing import make_tasks
from nano_suites.functions.mend_views import KINDS

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "integration"))


@pytest.mark.slow  # its smoke goes the whole way in `make test`, without asking for a gain
@pytest.mark.timeout(900)
def test_the_small_flywheel_gains_on_held_out_programs(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    command = [sys.executable, "integration/flywheel.py", "--small", "--out", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (row,) = json.loads(file.read_text())["rows"]
    assert row["gain"]["programs"][0] > 0
    assert row["above_constant"] > 0
    assert row["arms"]["trained"]["rollouts"] > row["arms"]["log"]["rollouts"] > 0
    assert "difference on programs" in done.stdout.splitlines()[-1]
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert again.stdout == f"{file} has the row of seed 0\n"


@pytest.mark.parametrize("level", [2, 3])
def test_no_answer_is_right_on_more_than_a_seventh_of_the_tasks(level: int) -> None:
    from flywheel import answer

    tasks = make_tasks(levels=[level], n=200, seed=100, split=Split.TRAIN, views=["mend"])
    counts = Counter(map(answer, tasks))
    assert max(counts.values()) <= 0.15 * len(tasks), counts.most_common(3)
    signs = ("+", "-", "*", "//", "%"), ("<", "<=", ">", ">=", "==", "!=")
    operators, comparisons = (sum(counts[sign] for sign in of) for of in signs)
    constants = sum(count for text, count in counts.items() if text.isdigit())
    bounds = counts["+ 1"] + counts[""]
    names = len(tasks) - operators - comparisons - constants - bounds
    each = (operators, comparisons, constants, bounds, names)
    assert len(each) == len(KINDS)
    assert all(0.1 * len(tasks) <= of <= 0.3 * len(tasks) for of in each), each
