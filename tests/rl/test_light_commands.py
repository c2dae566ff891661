"""Commands that only read a log, help and completion import no torch: all of them in one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from command_line import hosted_log

HEAVY = (
    "torch", "transformers", "tokenizers", "numpy", "alembic", "tenacity", "httpx", "uvicorn",
    "doctest", "nano_coder.verify.tokens", "nano_coder.grading.grade", "nano_coder.run.execution",
)  # fmt: skip
CODE = f"""
import io, json, os, sys
from contextlib import redirect_stdout
from nano_coder.cli import cli as coder
from nano_rl.cli import cli as rl

def told(app, *arguments):
    with redirect_stdout(io.StringIO()) as out:
        try:
            app(list(arguments), prog_name="nano-coder")
        except SystemExit as end:
            assert not end.code, (arguments, end.code)
    return out.getvalue()

said = {{" ".join(words): told(app, *words) for app, *words in (
    (coder, "--help"), (rl, "--help"), (coder, "log", "list", "--json"), (coder, "log", "show", "hosted-1"),
    (coder, "log", "stats", "--json"), (rl, "admit", "--json"),
)}}
os.environ |= {{"_NANO_CODER_COMPLETE": "complete_bash", "COMP_WORDS": "nano-coder lo", "COMP_CWORD": "1"}}
said["completion"] = told(coder)
print(json.dumps([said, [name for name in {HEAVY} if name in sys.modules]]))
"""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return hosted_log(tmp_path / "log.db")


def test_light_commands_import_no_torch(log: Path, tmp_path: Path) -> None:
    environment = os.environ | {"NANO_HOME": str(tmp_path), "NANO_LOG": str(log)}
    done = subprocess.run(
        [sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, check=True
    )
    said, heavy = json.loads(done.stdout)
    assert heavy == []
    assert [run["id"] for run in json.loads(said["log list --json"])] == ["hosted-1"]
    assert json.loads(said["log stats --json"])["runs"] == 1
    report = json.loads(said["admit --json"])
    assert (report["runs"], report["policy"], report["uses"]["policy gradient"]) == (1, None, 0)
    assert "no run of the log has tokens" in report["notes"][0]
    assert said["completion"].split() == ["log"]
