"""Reward over-optimisation: the proxy reward keeps rising while the gold reward falls.

Gold is the share of rollouts whose tests pass, the proxy is the score of a reward model or judge (Gao et al.
2023, arXiv 2210.10760). Both are averaged over windows of steps to reduce noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from nano_rl.learn.metrics import GRADED, PART, SUCCESS, MetricsRow

GOLD = f"{SUCCESS}all"
PROXIES = tuple(f"{PART}{name}" for name in ("preference", "judge", "constitution"))
"""reward parts that are opinions about a result"""
_KL = "kl_reference"
_ERRORS = 3.0
"""number of standard errors of a difference of windows that a fall must exceed"""
_LEAST = 0.05
"""smallest fall that is reported, as a share of rollouts"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Means over neighbouring steps."""

    step: float
    """the last step"""
    gold: float
    proxy: float
    kl: float | None
    """KL to the reference, nats per token; None if not measured"""
    graded: float
    """number of graded rollouts"""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverOptimised:
    best: Window
    """the window with the highest gold"""
    last: Window

    @property
    def sentence(self) -> str:
        best, last = self.best, self.last
        kl = (
            ""
            if best.kl is None or last.kl is None
            else f"; KL {best.kl:.3f}, then {last.kl:.3f} nats a token"
        )
        return (
            f"over-optimised: tests passed by {best.gold:.1%} around step {best.step:.0f} and by"
            f" {last.gold:.1%} at the end, while the proxy rose from {best.proxy:.3f} to {last.proxy:.3f}{kl}"
            "; hold the policy with a larger objective.beta, put tests into the reward, or stop earlier"
        )


def proxy_of(rows: Sequence[MetricsRow]) -> str | None:
    """The metric of the proxy in these steps; None if there is none."""
    return next((name for name in PROXIES if any(row.get(name) is not None for row in rows)), None)


def over_optimised(rows: Sequence[MetricsRow]) -> OverOptimised | None:
    """Best and last window if gold fell significantly between them and the proxy rose; else None."""
    windows = gold_and_proxy(rows)
    if len(windows) < 2:
        return None
    best, last = max(windows, key=lambda window: window.gold), windows[-1]
    fall = best.gold - last.gold
    if fall <= max(_LEAST, _ERRORS * math.hypot(_error(best), _error(last))) or last.proxy <= best.proxy:
        return None
    return OverOptimised(best=best, last=last)


def gold_and_proxy(rows: Sequence[MetricsRow]) -> list[Window]:
    """Sliding windows of a tenth of the steps, at least three; empty if gold or proxy was not measured."""
    proxy = proxy_of(rows)
    known = [r for r in rows if proxy and r.get(GOLD) is not None and r.get(proxy) is not None]
    size = max(3, len(known) // 10)
    return [_window(known[end - size : end], str(proxy)) for end in range(size, len(known) + 1)]


def _window(rows: Sequence[MetricsRow], proxy: str) -> Window:
    def average(name: str) -> float | None:
        values = [value for row in rows if (value := row.get(name)) is not None]
        return math.fsum(values) / len(values) if values else None

    graded = math.fsum(row.get(f"{GRADED}all") or 0.0 for row in rows)
    return Window(
        step=rows[-1].get("step") or 0.0, gold=average(GOLD) or 0.0, proxy=average(proxy) or 0.0,
        kl=average(_KL), graded=graded,
    )  # fmt: skip


def _error(window: Window) -> float:
    """Standard error of a share, with one success and one failure added so that it is never 0."""
    count = window.graded + 2
    share = (window.gold * window.graded + 1) / count
    return math.sqrt(share * (1 - share) / count)
