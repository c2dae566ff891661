"""`nano-coder view` over a large log: how long its lists and a run take, over HTTP and in a browser.

    python benchmarks/viewer.py [--runs 100000] [--folder DIR] [--chromium /usr/bin/chromium]

The log is kept in DIR and made once: runs of 3 turns and 300 tokens, eight a task. Prints the median of five
requests of each kind, and with Playwright the time from opening a browser's page to its rows.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from urllib.parse import urlencode

import httpx
import uvicorn
from log_scale import bar, fill

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
from nano_view.app import view_app

SECONDS = 2.0
"""bar for opening the viewer"""


def template(number: int) -> Trajectory:
    """A finished run of three turns with a call each."""
    task = Task(key=f"sum-{number}", prompt=f"Mend add for number {number}.", files={"sums.py": "x = 1\n"})
    verdict = Verdict(reward=float(number % 2), trust=Trust.HIDDEN, grader="bench", graded_hash="g")
    return Trajectory(
        id=f"template-{number}", task=task, turns=tuple(map(turn, range(3))), stop=StopReason.FINISHED,
        runtime_version="0", profile="compact-1", profile_hash="p", template_hash="t", tools_hash="h",
        policy=f"policy-{number % 4}", started=0.0, ended=1.0, verdict=verdict,
    )  # fmt: skip


def turn(index: int) -> Turn:
    ids = tuple(random.choices(range(1000), k=30))
    tokens = TurnTokens(context_ids=ids + ids, sampled_ids=ids, logprobs=(-0.5,) * len(ids))
    completion = Completion(
        text="@read_file path=sums.py", finish=Finish.STOP, tokens=tokens, sampling=Sampling(), policy_id="w"
    )
    seen = Observation(tool="read_file", ok=True, text="x = 1\n" * 20, exit_code=0, started=0.0, ended=0.1)
    call = ToolCall(name="read_file", arguments={"path": "sums.py"})
    return Turn(
        index=index, completion=completion, calls=(call,), observations=(seen,), parser="compact",
        started=0.0, ended=1.0,
    )  # fmt: skip


def served(store: LogStore) -> tuple[str, uvicorn.Server]:
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(view_app(LogView(store)), log_level="error"))
    threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True).start()
    while not server.started:
        time.sleep(0.01)
    return f"http://127.0.0.1:{listening.getsockname()[1]}", server


def requests(client: httpx.Client) -> dict[str, str]:
    """Name -> path of what a reader asks for."""
    first = client.get("/api/runs").json()
    middle = json.dumps([first["rows"][-1]["started"] - 20_000, first["rows"][-1]["id"]])
    group = first["rows"][0]["id"]
    asked = {
        "the newest runs": ("runs", {}), "a page in the middle": ("runs", {"after": middle}),
        "by policy": ("runs", {"policy": "policy-1"}), "by reward": ("runs", {"reward": "full"}),
        "unfinished": ("runs", {"stop": "unfinished"}), "those that may train": ("runs", {"may": "train"}),
        "a text that is nowhere": ("runs", {"text": "no such text"}), "groups": ("groups", {}),
        "a group": ("group", {"id": group}), "a run": ("run", {"id": group}),
    }  # fmt: skip
    return {name: f"/api/{path}?{urlencode(query)}" for name, (path, query) in asked.items()}


def timed(client: httpx.Client, path: str) -> float:
    began = time.perf_counter()
    client.get(path).raise_for_status()
    return time.perf_counter() - began


def opened(root: str, chromium: str) -> tuple[float, float]:
    """Seconds until a page shows its first rows, and until 3,000 rows were scrolled through."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        page = play.chromium.launch(executable_path=chromium).new_page()
        began = time.perf_counter()
        page.goto(root)
        page.wait_for_selector("tr.row")
        shown = time.perf_counter()
        page.wait_for_function(
            "() => { scrollTo(0, document.body.scrollHeight);"
            " return Number(document.querySelector('tr.row:nth-last-child(2)').dataset.id) > 3000 }",
            timeout=60_000,
        )
        return shown - began, time.perf_counter() - shown


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--chromium", help="also measure in this browser, by Playwright")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="nano-viewer-"))
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"{options.runs}.db"
    if not log.exists():
        fill(log, [template(n) for n in range(50)], options.runs)
    with LogStore.open(log) as store:
        root, server = served(store)
        with httpx.Client(base_url=root, timeout=120) as client:
            took = {
                name: statistics.median(timed(client, path) for _ in range(5))
                for name, path in requests(client).items()
            }
        held = [bar(name, f"{s:.3f} s", s < SECONDS, f"< {SECONDS:g} s") for name, s in took.items()]
        if options.chromium:
            shown, scrolled = opened(root, options.chromium)
            held.append(bar("opened in a browser", f"{shown:.2f} s", shown < SECONDS, f"< {SECONDS:g} s"))
            print(f"scrolled through 3,000 rows in {scrolled:.1f} s")
        server.should_exit = True
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
