"""Over-optimisation: the proxy that is trained on goes on rising while what it stands for falls.

Gold is the share of rollouts whose tests pass, the proxy what a reward model or judge says of them (Gao et
al. 2023, arXiv 2210.10760). Both are means over windows of steps, so that the noise of a step proves nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from nano_rl.learn.metrics import GRADED, PART, SUCCESS, Row

GOLD = f"{SUCCESS}all"
PROXIES = tuple(f"{PART}{name}" for name in ("preference", "judge", "constitution"))
"""parts of a reward that are opinions about a result, and can be flattered"""
_KL = "kl_reference"
_ERRORS = 3.0
"""standard errors of the difference of two windows that a fall must exceed"""
_LEAST = 0.05
"""share of rollouts under which a fall is not worth a word"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Means over neighbouring steps."""

    step: float
    """the last of them"""
    gold: float
    proxy: float
    kl: float | None
    """to the reference, nats a token; None where it was not measured"""
    graded: float
    """rollouts behind `gold`"""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverOptimised:
    best: Window
    """where gold was highest"""
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
            "; hold the policy with a larger --beta, put tests into the reward, or stop earlier"
        )


def proxy_of(rows: Sequence[Row]) -> str | None:
    """The metric of the proxy that these steps were trained on; None where there is none."""
    return next((name for name in PROXIES if any(row.get(name) is not None for row in rows)), None)


def over_optimised(rows: Sequence[Row]) -> OverOptimised | None:
    """Where gold fell by more than chance from its best window to the last, and the proxy rose; else None."""
    windows = gold_and_proxy(rows)
    if len(windows) < 2:
        return None
    best, last = max(windows, key=lambda window: window.gold), windows[-1]
    fall = best.gold - last.gold
    if fall <= max(_LEAST, _ERRORS * math.hypot(_error(best), _error(last))) or last.proxy <= best.proxy:
        return None
    return OverOptimised(best=best, last=last)


def gold_and_proxy(rows: Sequence[Row]) -> list[Window]:
    """Every window of a tenth of the steps, and at least three; empty where either was not measured."""
    proxy = proxy_of(rows)
    known = [r for r in rows if proxy and r.get(GOLD) is not None and r.get(proxy) is not None]
    size = max(3, len(known) // 10)
    return [_window(known[end - size : end], str(proxy)) for end in range(size, len(known) + 1)]


def _window(rows: Sequence[Row], proxy: str) -> Window:
    def average(name: str) -> float | None:
        values = [value for row in rows if (value := row.get(name)) is not None]
        return math.fsum(values) / len(values) if values else None

    graded = math.fsum(row.get(f"{GRADED}all") or 0.0 for row in rows)
    return Window(
        step=rows[-1].get("step") or 0.0, gold=average(GOLD) or 0.0, proxy=average(proxy) or 0.0,
        kl=average(_KL), graded=graded,
    )  # fmt: skip


def _error(window: Window) -> float:
    """Standard error of a share, of one more success and failure than were seen, so that it is never 0."""
    count = window.graded + 2
    share = (window.gold * window.graded + 1) / count
    return math.sqrt(share * (1 - share) / count)
