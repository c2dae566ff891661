"""The metrics file survives a kill, and a resumed run continues it without a gap or a double."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from nano_rl.learn.metrics import MetricsWriter, read_metrics
from nano_shared.errors import UsageError


def write(path: Path, steps: range, **settings: int) -> None:
    with MetricsWriter(path, **settings) as writer:
        for step in steps:
            writer.write(step, {"loss": step / 2})


def test_rows_are_on_disk_when_write_returns(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "metrics.jsonl"
    writer = MetricsWriter(path)
    writer.write(0, {"loss": 0.5})
    assert read_metrics(path) == [{"step": 0, "loss": 0.5}]
    writer.close()


def test_resume_drops_the_steps_that_will_be_run_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(5))
    write(path, range(3, 6), resume_at=3)
    assert [row["step"] for row in read_metrics(path)] == [0, 1, 2, 3, 4, 5]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("torn", ['{"step": 3, "lo', '{"step": 3, "loss": 1.5}'])
def test_torn_last_line_is_dropped(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(3))
    with path.open("a") as file:
        file.write(torn)
    assert [row["step"] for row in read_metrics(path)] == [0, 1, 2]
    write(path, range(3, 5), resume_at=3)
    assert [row["step"] for row in read_metrics(path)] == [0, 1, 2, 3, 4]


def test_resume_before_the_first_row_starts_afresh(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(2), resume_at=0)
    write(path, range(1), resume_at=0)
    assert [row["step"] for row in read_metrics(path)] == [0]


def test_metrics_of_another_run_are_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(2))
    with pytest.raises(UsageError, match="holds metrics of another run"):
        MetricsWriter(path)
    assert len(read_metrics(path)) == 2


def test_numbers_that_json_lacks_become_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write(0, {"loss": math.nan, "grad_norm": math.inf, "kl": 0.0})
    assert json.loads(path.read_text()) == {"step": 0, "loss": None, "grad_norm": None, "kl": 0.0}


def test_foreign_file_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\nnot json\n')
    with pytest.raises(UsageError, match=r"metrics.jsonl:2 is not JSON"):
        read_metrics(path)
