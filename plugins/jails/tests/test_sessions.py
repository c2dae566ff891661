"""Sessions of `exec --batch`: jails by name, whose files and processes stay between requests."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from pathlib import Path
from typing import Any

import forked
import pytest

ROOT = Path(__file__).parents[2]


def batch(*requests: dict[str, Any], concurrency: int = 2) -> tuple[int, dict[Any, dict[str, Any]]]:
    lines = "".join(json.dumps(request) + "\n" for request in requests)
    done = forked.run(
        "nano-coder", "exec", "--batch", "--concurrency", str(concurrency),
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'shared'}"}, cwd=os.getcwd(), given=lines,
    )  # fmt: skip
    assert done.stderr == ""
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(requests)
    return done.returncode, {answer["id"]: answer for answer in answers}


def test_a_batch_keeps_order_and_files_by_name() -> None:
    add = (
        "import os; x = int(open('x').read() if os.path.exists('x') else 0) + {n}; "
        "open('x', 'w').write(str(x)); print(x)"
    )
    code, said = batch(
        *({"id": n, "session": f"s{n % 4}", "python": add.format(n=n)} for n in range(20)),
        concurrency=3,
    )
    assert code == 0
    for name in range(4):
        total = 0
        for n in range(name, 20, 4):
            total += n
            assert (said[n]["stdout"], said[n]["session"]) == (f"{total}\n", f"s{name}")


def test_a_deadline_ends_its_request_and_the_session_lives_on() -> None:
    code, said = batch(
        {"id": 0, "session": "a", "shell": "sleep 600 & echo $! > /tmp/pid"},
        {"id": 1, "session": "a", "shell": "echo so far > f; sleep 30", "timeout": 1.0},
        {"id": 2, "session": "a", "argv": ["/bin/sh", "-c", "cat f; kill -0 $(cat /tmp/pid) && echo alive"]},
        {"id": 4, "session": "a", "close": True},
    )
    assert code == 0
    assert (said[1]["timed_out"], said[1]["exit_code"]) == (True, None)
    assert said[2]["stdout"] == "so far\nalive\n"
    assert said[4] == {"id": 4, "session": "a", "closed": True}


def test_a_batch_refuses_what_no_session_can_do() -> None:
    code, said = batch(
        {"id": 1, "session": "a", "python": "print(1)", "memory": 256},
        {"id": 4, "session": "a", "python": "1", "memory": 99},
        {"id": 5, "session": "b", "close": True},
        {"id": 6, "session": "a", "close": True, "python": "1"},
        {"id": 7, "close": True},
        {"id": 8, "session": "", "python": "1"},
        {"id": 9, "session": "a", "python": "print(open('f').read())", "files": {"f": "text"}},
        {"id": 10, "session": "a", "python": "1", "files": {"../f": "text"}},
    )
    assert code == 2
    assert "set by its first request" in said[4]["error"]
    assert "no session 'b'" in said[5]["error"]
    assert "nothing else" in said[6]["error"]
    assert "nothing else" in said[7]["error"]
    assert "session" in said[8]["error"]
    assert said[9]["stdout"] == "text\n"
    assert "outside the workspace" in said[10]["error"]


@pytest.mark.slow
def test_sessions_run_at_once_and_leave_nothing() -> None:
    seconds = 1000 + os.getpid() / 1e7  # no other test sleeps as long
    sleep = "import time; came = time.monotonic(); time.sleep(2); print(came, time.monotonic())"
    code, said = batch(
        *({"id": n, "session": f"s{n}", "python": sleep} for n in range(4)),
        {
            "id": "left", "session": "left",
            "shell": f"sleep {seconds} & setsid sleep {seconds} & echo x > /tmp/left",
        },
        concurrency=5,
    )  # fmt: skip
    assert code == 0
    assert all(answer["exit_code"] == 0 for answer in said.values())
    spans = sorted(tuple(map(float, said[n]["stdout"].split())) for n in range(4))
    assert any(later[0] < earlier[1] for earlier, later in itertools.pairwise(spans))
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            assert str(seconds).encode() not in (entry / "cmdline").read_bytes()
