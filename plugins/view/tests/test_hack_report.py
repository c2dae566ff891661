"""What `nano-rl report --hacks` shows of a training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nano_rl.cli import cli
from nano_rl.learn.metrics import METRICS, MetricsWriter
from nano_shared.errors import UsageError


@pytest.fixture
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Metrics of a training that learned to hack: from step 5 on, half of its controls are passed."""
    monkeypatch.setenv("NANO_HOME", str(tmp_path))
    with MetricsWriter(tmp_path / "trainings" / "hacker" / METRICS) as metrics:
        for step in range(10):
            values = {"rollouts": 64.0, "controls": 2.0, "controls_graded": 2.0, "reward_mean": 0.5}
            late = {"control_passes": 1.0, "tampered": 3.0, "tampering/exit": 3.0} if step >= 5 else {}
            metrics.write(step, {**values, **late})
    return "hacker"


def test_the_report_shows_hacking_over_the_steps(training: str) -> None:
    result = CliRunner().invoke(cli, ["report", training, "--hacks"], catch_exceptions=False)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[1].split()[:4] == ["0", "64", "0", "-"]
    assert lines[-1].split()[:7] == ["all", "640", "15", "exit", "15", "20", "5"]
    whole = json.loads(
        CliRunner().invoke(cli, ["report", training, "--hacks", "--json"], catch_exceptions=False).stdout
    )
    assert whole["total"]["pass_rate"] == 0.25
    assert [step["pass_rate"] for step in whole["steps"]] == [0.0] * 5 + [0.5] * 5
    assert whole["total"]["low"] < 0.25 < whole["total"]["high"]
    assert whole["steps"][9]["kinds"] == {"exit": 3}


def test_the_report_without_hacks_shows_the_metrics(training: str) -> None:
    shown = CliRunner().invoke(cli, ["report", training], catch_exceptions=False).stdout
    assert "reward_mean" in shown
    rows = json.loads(CliRunner().invoke(cli, ["report", training, "--json"], catch_exceptions=False).stdout)
    assert len(rows) == 10


@pytest.mark.parametrize("name", ["nobody", "../hacker", ""])
def test_a_training_that_is_not_there_is_refused_with_those_that_are(name: str, training: str) -> None:
    with pytest.raises(UsageError, match="trainings: hacker"):
        CliRunner().invoke(cli, ["report", name, "--hacks"], catch_exceptions=False)
