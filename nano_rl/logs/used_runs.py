"""The runs that each step was trained on: one JSON line per step, truncated to the saved state on resume.

The log also holds runs of steps that were killed; the runs listed here have changed the weights.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from nano_rl.learn.rows import Group
from nano_shared.errors import CheckpointError
from nano_shared.files import full_disk_explained, write_text


def learned_from(rows: Sequence[Mapping[str, float | None]]) -> dict[str, float]:
    """Totals over the steps of a training from its metrics, and mean shares of the loss parts.

    Empty for a training without logs.
    """
    if not any("logged_runs" in row for row in rows):
        return {}
    total = {name: _sum(rows, name) for name in ("logged_runs", "fresh_runs", "tokens", "weight_dropped")}
    total["stale_tokens_dropped"] = _sum(rows, "stale_dropped")
    total["too_old"] = rows[-1].get("too_old") or 0.0
    total["log_left"] = rows[-1].get("log_left") or 0.0
    total["sft_tokens"], total["preference_pairs"] = _sum(rows, "sft_tokens"), _sum(rows, "preference_pairs")
    total["log_share"] = total["logged_runs"] / max(1.0, total["logged_runs"] + total["fresh_runs"])
    for name in ("share_policy", "share_kl", "share_sft", "share_preference", "ess_logged", "ess_kept"):
        values = [value for row in rows if (value := row.get(name)) is not None]
        if values:
            total[name] = sum(values) / len(values)
    return total


def learned_table(rows: Sequence[Mapping[str, float | None]]) -> Table | None:
    """The totals as a table; None for a training without logs."""
    of = learned_from(rows)
    if not of:
        return None
    table = Table("learned from", "how much", "share of the loss", box=None, title="what was learned from")
    runs = f"{of['logged_runs']:.0f} logged and {of['fresh_runs']:.0f} fresh runs, {of['tokens']:.0f} tokens"
    table.add_row("policy gradient", runs, _percent(of.get("share_policy", 1.0)))
    if of["sft_tokens"]:
        table.add_row("imitation", f"{of['sft_tokens']:.0f} tokens", _percent(of.get("share_sft")))
    if of["preference_pairs"]:
        pairs = f"{of['preference_pairs']:.0f} pairs"
        table.add_row("preference", pairs, _percent(of.get("share_preference")))
    dropped = f"{of['too_old']:.0f} runs by age, {of['weight_dropped']:.0f} by importance weight"
    table.add_row("dropped", dropped, "")
    table.add_row("left in the logs", f"{of['log_left']:.0f} runs", "")
    return table


def _sum(rows: Sequence[Mapping[str, float | None]], name: str) -> float:
    return sum(row.get(name) or 0.0 for row in rows)


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


USED = "used.jsonl"
"""the file's name in the folder of a training"""


class UsedRuns:
    """The lines of the steps before `step`; lines of later steps, which were not saved, are dropped.

    Raises CheckpointError if a step of the saved state is missing in the file.
    """

    def __init__(self, path: Path, *, step: int) -> None:
        self._path = path
        lines = read_used(path)[:step] if path.exists() else []
        if [line["step"] for line in lines] != list(range(step)):
            raise CheckpointError(
                f"{path} does not hold the runs of the {step} steps that the saved state has learned from;"
                " put the file back, or start anew under another --name"
            )
        self._ids = [run for line in lines for group in line["groups"] for run in group["runs"]]
        write_text(path, "".join(json.dumps(line) + "\n" for line in lines), CheckpointError)

    @property
    def run_ids(self) -> list[str]:
        return list(self._ids)

    def append(self, step: int, groups: Sequence[Group]) -> None:
        """Append one line and sync it. Raises CheckpointError if the disk is full."""
        entries = [{"task": g.task_key, "runs": [t.id for t in g.trajectories]} for g in groups]
        with full_disk_explained(self._path, CheckpointError), self._path.open("a") as file:
            file.write(json.dumps({"step": step, "groups": entries}) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._ids += [run for group in entries for run in group["runs"]]


def read_used(path: Path) -> list[dict[str, Any]]:
    """The lines in order, without an incomplete last one."""
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in lines]
