"""When the cycles of `--every` begin: in a time of the day, on a machine that is idle and not on battery."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from datetime import datetime, timedelta

import psutil

from nano_shared.errors import UsageError

_UNITS = {"m": 60, "h": 3600, "d": 86400}
BUSY = 0.5
"""share of the cores that other processes use, above which a cycle waits"""
_LOOK = 60.0
"""seconds between two looks"""
Window = tuple[int, int]
"""minutes of the day, from and to; where from is later, it goes over midnight"""


def parse_pause(text: str) -> float:
    """Seconds of `90m`, `24h` or `1d`. Raises UsageError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([mhd])", text.strip())
    if match is None or float(match[1]) == 0:
        raise UsageError(f"--every {text!r} is no time: write 90m, 24h or 1d")
    return float(match[1]) * _UNITS[match[2]]


def parse_window(text: str) -> Window:
    """Minutes of the day of `22:00-07:00`. Raises UsageError."""
    match = re.fullmatch(r"(\d{1,2}):(\d\d)-(\d{1,2}):(\d\d)", text.strip())
    hours = [int(match[n]) for n in (1, 3)] if match else []
    minutes = [int(match[n]) for n in (2, 4)] if match else []
    if not match or max(hours) > 23 or max(minutes) > 59 or (hours[0], minutes[0]) == (hours[1], minutes[1]):
        raise UsageError(f"--between {text!r} is no time of the day: write 22:00-07:00")
    return hours[0] * 60 + minutes[0], hours[1] * 60 + minutes[1]


def minutes_until(window: Window, now: datetime) -> int:
    """Minutes until a window opens; 0 within it."""
    opens, closes = window
    minute = now.hour * 60 + now.minute
    inside = opens <= minute < closes if opens < closes else not closes <= minute < opens
    return 0 if inside else (opens - minute) % (24 * 60)


def obstacle(window: Window | None, now: datetime) -> str | None:
    """Why no cycle begins now; None: nothing is in its way. Looks at the processors for a second."""
    if window is not None and (wait := minutes_until(window, now)):
        return f"waits until {(now + timedelta(minutes=wait)):%H:%M}"
    battery = getattr(psutil, "sensors_battery", lambda: None)()  # macOS and Windows have no sensors in jails
    if battery is not None and not battery.power_plugged:
        return "waits for the mains: the machine runs on its battery"
    used = psutil.cpu_percent(interval=1.0) / 100
    return f"waits for an idle machine: {used:.0%} of its cores are used" if used > BUSY else None


def wait_until_quiet(window: Window | None, say: Callable[[str], None]) -> None:
    """Wait until nothing is in the way of a cycle; what is, is said once."""
    said = None
    while (why := obstacle(window, datetime.now())) is not None:
        if why.partition(":")[0] != (said or "").partition(":")[0]:
            say(said := why)
        time.sleep(_LOOK)
