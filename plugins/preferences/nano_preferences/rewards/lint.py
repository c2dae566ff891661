"""`lint`: new findings of ruff in the changed Python files lower the score.

The text is passed to ruff on standard input, in an empty folder, with `--isolated` and `--ignore-noqa`:
neither the configuration of the workspace nor comments of the agent change the findings.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
from collections import Counter
from collections.abc import Sequence

from pydantic import Field

from nano_coder.run.execution import Runtime
from nano_preferences.rewards.size import changes, falling
from nano_rl.rewards.reward import SILENT, Part, Score
from nano_shared.errors import ConfigError
from nano_shared.files import scratch_folder
from nano_shared.process import own_python
from nano_shared.types import Trajectory

_SECONDS = 20.0
_LARGEST = 1 << 20


class Lint(Part):
    costly = True

    select: tuple[str, ...] = ("E4", "E7", "E9", "F", "B", "SIM")
    """ruff's rules, by prefix"""
    at_most: int = Field(5, ge=1)
    """new findings at which the score is 0"""

    def prepare(self) -> None:
        if not _ruff():
            raise ConfigError("lint needs ruff: pip install ruff")

    def score_run(self, run: Trajectory, runtime: Runtime) -> Score:
        """1 without new findings, falling to 0 at `at_most`; no score if no Python file was changed."""
        python = [c for path, c in changes(run, runtime.store.blobs).items() if path.endswith(".py")]
        texts = [c for c in python if c.after is not None]
        if not texts:
            return SILENT
        if any(len(c.after or "") > _LARGEST for c in texts):
            return Score(value=0.0)
        new = 0
        for change in texts:
            found, known = (findings(text or "", self.select) for text in (change.after, change.before))
            if found is None or known is None:
                return Score(value=None, failure="lint_failed")
            new += sum((found - known).values())
        return Score(value=falling(new, 0, self.at_most))


def findings(text: str, select: Sequence[str]) -> Counter[str] | None:
    """Rule -> number of findings of ruff in a Python text; None if ruff failed."""
    command = [
        *_ruff(), "check", "--isolated", "--no-cache", "--ignore-noqa", "--output-format", "json",
        "--select", ",".join(select), "--stdin-filename", "changed.py", "-",
    ]  # fmt: skip
    with scratch_folder("lint") as empty:
        try:
            done = subprocess.run(
                command, input=text.encode("utf-8", "replace"), capture_output=True, cwd=empty,
                timeout=_SECONDS, check=False,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired):
            return None
    if done.returncode not in (0, 1):  # 2: ruff failed; findings are 1
        return None
    return Counter(str(found["code"] or "syntax") for found in json.loads(done.stdout))


def _ruff() -> list[str]:
    if importlib.util.find_spec("ruff") is not None:
        return own_python("-m", "ruff")
    found = shutil.which("ruff")
    return [found] if found else []
