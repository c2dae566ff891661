"""A row that is longer than a micro-batch is learned from whole, or refused before it is."""

from __future__ import annotations

from pathlib import Path

import pytest
from builders import trajectory, turn
from looping import CONFIG, Loop, tiny_model

from nano_rl.learn.groups import row_tokens
from nano_rl.learn.metrics import read_metrics
from nano_shared.errors import UsageError


def test_the_longest_row_of_a_run_counts_all_turns_of_it() -> None:
    turns = turn(5, 2), turn(3, 4, index=1), turn(6, 1, row=1, index=2)
    assert row_tokens(trajectory(*turns)) == 14
    assert row_tokens(trajectory(turn(5, 2, text_only=True))) == 0


@pytest.mark.slow
def test_a_row_that_fits_no_memory_is_said_and_nothing_is_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = tiny_model(tmp_path / "tiny")
    whole = Loop(tiny, tmp_path / "whole")
    whole.go(CONFIG, max_tokens=8)  # rows of some hundred tokens, one a micro-batch
    assert any(not row["skipped"] for row in read_metrics(whole.folder / "metrics.jsonl"))
    monkeypatch.setattr("nano_plan.fit.available_bytes", lambda device: 1000)
    loop = Loop(tiny, tmp_path / "loop")
    with pytest.raises(UsageError, match=r"a row of \d+ tokens takes 0\.0 GiB .* no setting makes it"):
        loop.go(CONFIG, max_tokens=8)
    assert not (loop.folder / "metrics.jsonl").exists() or not read_metrics(loop.folder / "metrics.jsonl")
    loop.go(CONFIG, max_tokens=4096, resume=True)  # no row is longer, so nothing is asked
