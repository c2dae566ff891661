"""What is seen of a proxy that is trained on: how far it can be believed, and when it is flattered."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from builders import verdict
from hypothesis import given
from hypothesis import strategies as st

from nano_preferences.reward_model import Bin, RewardModelReport
from nano_rl.cli import cli
from nano_rl.gather.rollouts import success_metrics
from nano_rl.learn.groups import form_groups
from nano_rl.learn.metrics import METRICS, MetricsRow, MetricsWriter, read_metrics
from nano_shared.command_line import run_command
from nano_shared.types import Trajectory, composed_grader
from nano_view.report.page import calibration_page, training_page
from nano_view.report.training import GOLD, gold_and_proxy, over_optimised, proxy_of, read_training

ROOT = Path(__file__).parents[3]
PROXY = "part/preference"


def steps(
    gold: list[float], proxy: list[float], *, graded: float = 64.0, kl: bool = True
) -> list[MetricsRow]:
    rows: list[MetricsRow] = []
    for step, (right, praised) in enumerate(zip(gold, proxy, strict=True)):
        rows.append({"step": step, GOLD: right, "graded/all": graded, PROXY: praised})
        if kl:
            rows[-1]["kl_reference"] = 0.01 * step
    return rows


def rising(count: int) -> list[float]:
    return [0.4 + 0.5 * i / count for i in range(count)]


FALL = [0.8] * 10 + [0.8 - 0.02 * i for i in range(20)]


# --------------------------------------------------------------------------------- over-optimisation


def test_a_proxy_that_rises_while_gold_falls_is_over_optimised() -> None:
    found = over_optimised(steps(FALL, rising(30)))
    assert found is not None
    assert (found.best.gold, found.best.step) == (pytest.approx(0.8), 2.0)
    assert found.last.gold == pytest.approx(0.44)
    assert found.last.proxy > found.best.proxy
    assert "80.0%" in found.sentence
    assert "44.0%" in found.sentence
    assert "KL 0.010, then 0.280" in found.sentence


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        (steps([0.8] * 30, rising(30)), "gold did not fall"),
        (steps(FALL, rising(30)[::-1]), "the proxy fell with it"),
        (steps(FALL, rising(30), graded=2.0), "a fall that chance explains"),
        ([{k: v for k, v in row.items() if k != PROXY} for row in steps(FALL, rising(30))], "no proxy"),
        (steps(FALL[:3], rising(3)), "too few steps"),
        ([], "none"),
    ],
)
def test_anything_else_is_not(rows: list[MetricsRow], why: str) -> None:
    assert over_optimised(rows) is None, why


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=40))
def test_windows_lie_within_what_was_measured(values: list[tuple[float, float]]) -> None:
    gold, proxy = [g for g, _ in values], [p for _, p in values]
    rows = steps(gold, proxy, kl=False)
    assert proxy_of(rows) == PROXY
    for window in gold_and_proxy(rows):
        assert min(gold) - 1e-9 <= window.gold <= max(gold) + 1e-9
        assert min(proxy) - 1e-9 <= window.proxy <= max(proxy) + 1e-9
        assert window.kl is None


def test_the_parts_of_a_composed_reward_are_metrics_whether_they_count_or_not(run: Trajectory) -> None:
    made = verdict(0.5).model_copy(
        update={
            "components": {"tests": 1.0, "preference": 0.25, "judge": None, "judge.swap_agreement": 1.0},
            "grader": composed_grader("test", "tests=1"),
        }
    )
    other = made.model_copy(update={"components": {"tests": 0.0, "preference": 0.75}})
    runs = [run.model_copy(update={"id": f"r{i}", "verdict": v}) for i, v in enumerate([made, other])]
    metrics = success_metrics(form_groups(runs))
    assert {k: v for k, v in metrics.items() if k.startswith("part/")} == {
        "part/tests": 0.5, PROXY: 0.5,
    }  # fmt: skip
    assert metrics[GOLD] == 0.5


@pytest.fixture
def run() -> Trajectory:
    from builders import trajectory

    return trajectory()


# ------------------------------------------------------------------------------------------ pages


def test_the_report_shows_gold_against_proxy_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NANO_HOME", str(tmp_path))
    folder = tmp_path / "trainings" / "flattered"
    with MetricsWriter(folder / METRICS) as metrics:
        for row in steps(FALL, rising(30)):
            metrics.write(int(row.pop("step") or 0), {k: v or 0.0 for k, v in row.items()})
    assert len(read_metrics(folder / METRICS)) == 30
    curves = training_page(read_training(folder))["sections"][0]
    by_kl = next(plot for plot in curves["plots"] if plot["title"] == "Gold and proxy by KL")
    assert [curve["name"] for curve in by_kl["curves"]] == ["gold: tests", "proxy: preference"]
    assert "over-optimised: tests passed by 80.0%" in curves["alert"]
    with pytest.raises(SystemExit) as ended:
        run_command(cli, ["report", "flattered"])
    assert ended.value.code == 0
    assert "over-optimised" in capsys.readouterr().out


def test_calibration_is_drawn_with_its_intervals() -> None:
    bins = (
        Bin(low=0.5, high=0.6, pairs=4, confidence=0.55, accuracy=0.5),
        Bin(low=0.9, high=1.0, pairs=16, confidence=0.97, accuracy=1.0),
    )
    report = RewardModelReport(pairs=20, accuracy=0.9, log_loss=0.2, calibration_error=0.034, bins=bins)
    page = calibration_page(report)
    (section,) = page["sections"]
    (curve,) = section["plots"][0]["curves"]
    assert (curve["steps"], curve["values"]) == ((0.55, 0.97), (0.5, 1.0))
    bounds = zip(curve["low"], curve["values"], curve["high"], strict=True)
    assert all(low <= rate <= high for low, rate, high in bounds)
    assert section["tables"][0]["rows"][0] == ["50.0% to 60.0%", "4", "55.0%", "50.0%"]
    assert ("accuracy", "90.0%", "a coin: 50 %") in page["tiles"]


# ------------------------------------------------------------------------------------------ the circle


@pytest.mark.slow
def test_the_circle_closes_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """Every part of integration/rlhf.py at a size that shows nothing but that they fit."""
    script = [sys.executable, str(ROOT / "integration" / "rlhf.py"), "--small", "--out", str(tmp_path)]
    first = subprocess.run([*script, "--arms", "kl"], capture_output=True, text=True, check=False)
    assert first.returncode == 0, first.stderr
    again = subprocess.run([*script, "--arms", "kl", "dpo"], capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert "arm kl" not in again.stdout
    result = json.loads((tmp_path / "seed-0" / "result.json").read_text())
    assert set(result["arms"]) == {"kl", "dpo"}
    assert result["feedback"]["rows"] == result["feedback"]["pairs"] > 0
    assert [row["kl_reference"] is not None for row in result["arms"]["kl"]["curve"]] == [True, True]
