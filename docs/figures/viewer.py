"""Draw docs/figures/viewer.png: the viewer's page of a group's best and worst run, in Chromium.

    python docs/figures/viewer.py [--chromium /usr/bin/chromium]

The runs are two answers to one repair task, written here and encoded with a tokenizer that is made of them.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import shutil
import tempfile
from pathlib import Path

from nano_shared.store import LogStore
from nano_shared.types import (
    Completion,
    Finish,
    Observation,
    Sampling,
    StopReason,
    Task,
    ToolCall,
    Trajectory,
    Trust,
    Turn,
    TurnTokens,
    Verdict,
)
from nano_view.answers import LogView
from nano_view.page import run_answers, write_page

PICTURE = Path(__file__).with_suffix(".png")
READ = "The mean of an empty list should be 0. I read the module first.\n@read_file path=stats.py"
SOURCE = "def mean(values):\n    return sum(values) / len(values)\n"
EDIT = "@edit_file path=stats.py line=2\n    return "
GOOD = f"The sum is right; only the length can be 0.\n{EDIT}sum(values) / max(1, len(values))"
BAD = f"The sum is wrong, so I begin it at 1.\n{EDIT}sum(values, 1) / len(values)"


def turn(index: int, text: str, tool: str, result: Observation, encode: object) -> Turn:
    ids = tuple(encode(text).ids)  # type: ignore[operator]
    rng = random.Random(text)
    logprobs = tuple(math.log(rng.choice([0.99, 0.97, 0.95, 0.8, 0.4, 0.15, 0.03])) for _ in ids)
    tokens = TurnTokens(context_ids=(1, 2, 3), sampled_ids=ids, logprobs=logprobs)
    completion = Completion(
        text=text, finish=Finish.STOP, tokens=tokens, sampling=Sampling(), policy_id="shipped"
    )
    call = ToolCall(name=tool, arguments={"path": "stats.py"})
    return Turn(
        index=index, completion=completion, calls=(call,), observations=(result,), parser="compact",
        started=0.0, ended=0.8,
    )  # fmt: skip


def run(name: str, edit: str, reward: float, encode: object) -> Trajectory:
    read = Observation(tool="read_file", ok=True, text=SOURCE, started=0.0, ended=0.1)
    line = edit.rpartition("\n")[2]
    changed = Observation(
        tool="edit_file", ok=True, text="stats.py: 1 line changed", files_changed=("stats.py",),
        started=0.0, ended=0.1,
    )  # fmt: skip
    diff = f"--- a/stats.py\n+++ b/stats.py\n@@ -2 +2 @@\n-    return sum(values) / len(values)\n+{line}\n"
    prompt = "The tests fail. Find the bug in stats.py."
    return Trajectory(
        id=name, task=Task(key="stats", prompt=prompt, files={"stats.py": SOURCE}),
        turns=(turn(0, READ, "read_file", read, encode), turn(1, edit, "edit_file", changed, encode)),
        stop=StopReason.FINISHED, diff=diff, runtime_version="0", profile="compact-1", profile_hash="",
        template_hash="", tools_hash="", policy="shipped", started=1.8e9, ended=1.8e9 + 4,
        verdict=Verdict(reward=reward, trust=Trust.HIDDEN, grader="tests", graded_hash=""),
    )  # fmt: skip


def main() -> None:
    from playwright.sync_api import sync_playwright

    from integration.tiny_model import build_tiny

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--chromium", default=shutil.which("chromium"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch)
        os.environ["NANO_HOME"] = scratch
        texts = [READ, GOOD, BAD, SOURCE]
        folder = build_tiny(home / "checkpoints" / "shipped", texts, hidden=32, layers=1, vocab_size=420)
        from tokenizers import Tokenizer

        encode = Tokenizer.from_file(str(folder / "tokenizer.json")).encode
        with LogStore.open(home / "log.db") as log:
            for each in (run("worst", BAD, 0.0, encode), run("best", GOOD, 1.0, encode)):
                log.append(each)
            answers = run_answers(LogView(log), ["best", "worst"])
        page = home / "page.html"
        write_page(page, answers, start="#/pair?left=best&right=worst", title="log")
        with sync_playwright() as play:
            chromium = play.chromium.launch(executable_path=options.chromium)
            shown = chromium.new_page(viewport={"width": 1000, "height": 720})
            shown.goto(page.as_uri())
            shown.wait_for_selector(".differs")
            shown.screenshot(path=PICTURE)
            chromium.close()
    print(PICTURE)


if __name__ == "__main__":
    main()
