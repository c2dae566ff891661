"""What a training learned from, in all: runs and tokens by use, and the share of each in the loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table

Row = Mapping[str, float | None]


def learned_from(rows: Sequence[Row]) -> dict[str, float]:
    """Sums over the steps of a training, from its metrics, and shares of the loss as means over the steps
    that had it; `log_share` is that of all runs. Empty for a training without logs."""
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


def learned_table(rows: Sequence[Row]) -> Table | None:
    """The same for a person; None for a training without logs."""
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


def _sum(rows: Sequence[Row], name: str) -> float:
    return sum(row.get(name) or 0.0 for row in rows)


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"
