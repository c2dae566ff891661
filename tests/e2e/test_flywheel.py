"""The whole circle, in its small form: it ends with a gain on programs that training never saw."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow  # test_native_model.py goes the whole way in `make test`, without asking for a gain
@pytest.mark.timeout(900)
def test_the_small_flywheel_gains_on_held_out_programs(tmp_path: Path) -> None:
    command = [sys.executable, "integration/flywheel.py", "--small", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["difference"][1] > 0
    assert result["before"]["graded"] == result["after"]["graded"] > 0
    assert "difference on programs" in done.stdout.splitlines()[-1]
