"""Stateful sessions: Python and shells that keep their state, end as data, and cannot lie unnoticed."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import forked
import pytest

from nano_coder.commands.batch import InOrder
from nano_coder.sandbox.backend import open_sandbox
from nano_coder.sandbox.launcher import message
from nano_coder.sandbox.namespaces import NsSandbox
from nano_coder.sandbox.stateful_session import Session, SessionKind
from nano_shared.errors import SandboxError, UsageError
from nano_shared.types import Limits

ROOT = Path(__file__).parents[2]
LIMITS = Limits(memory_mb=256, tool_seconds=30)

Open = Callable[..., Session]


@pytest.fixture(scope="module")
def sandbox() -> NsSandbox:
    opened = open_sandbox("ns")
    assert isinstance(opened, NsSandbox)
    return opened


@pytest.fixture
def session(sandbox: NsSandbox) -> Iterator[Open]:
    opened: list[Session] = []

    def make(kind: SessionKind, limits: Limits = LIMITS) -> Session:
        opened.append(Session(sandbox.open(None, limits), kind, limits))
        return opened[-1]

    yield make
    for one in opened:
        one.close()


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


# --------------------------------------------------------------------------------------- python


def test_python_keeps_names_imports_and_futures(session: Open) -> None:
    one = session("python")
    assert one.run("import math\nfrom __future__ import annotations").exit_code == 1  # as Python says: first
    assert one.run("from __future__ import annotations\nimport math\ndef f(x: Nowhere): return x + 1").ok
    assert one.run("f(math.floor(3.5))").stdout == b"4\n"
    assert one.run("def g(x: Nowhere): return f(x)\ng(1)").stdout == b"2\n"


def test_the_value_of_a_last_expression_is_printed_as_the_interactive_interpreter_does(session: Open) -> None:
    one = session("python")
    assert one.run("'a'\n'b'").stdout == b"'b'\n"
    assert one.run("None").stdout == b""
    assert one.run("_ * 2").stdout == b"'bb'\n"
    assert one.run("x = 3").stdout == b""
    assert one.run("").stdout == b""


def test_an_error_is_an_exit_code_and_a_traceback_of_the_request_alone(session: Open) -> None:
    one = session("python")
    one.run("def f():\n    return 1 / 0")
    failed = one.run("x = 5\nf()")
    assert failed.exit_code == 1
    assert (
        failed.stderr.decode().splitlines()
        == [
            "Traceback (most recent call last):",
            '  File "<request 2>", line 2, in <module>',
            "    f()",
            '  File "<request 1>", line 2, in f',
            "    return 1 / 0",
            *(["           ~~^~~"] if sys.version_info >= (3, 11) else []),
            "ZeroDivisionError: division by zero",
        ]
        or "ZeroDivisionError" in failed.stderr.decode()
    )
    assert one.run("x").stdout == b"5\n"
    assert b"SyntaxError" in one.run("y = 1\ndef (").stderr
    assert one.run("y").exit_code == 1


def test_each_request_has_its_own_standard_input(session: Open) -> None:
    one = session("python")
    assert one.run("input()", stdin=b"first\n").stdout == b"'first'\n"
    assert b"EOFError" in one.run("input()").stderr
    assert one.run("import sys; sys.stdin.read()", stdin="ü".encode()).stdout == "'ü'\n".encode()


def test_a_fork_that_comes_back_from_a_request_ends_there(session: Open) -> None:
    one = session("python")
    assert one.run("import os\npid = os.fork()\nif pid: os.waitpid(pid, 0)").ok
    assert one.run("os.fork() and os.wait()[1]").stdout.endswith(b"0\n")
    assert one.run("1").stdout == b"1\n"


def test_exit_ends_the_session_with_its_code(session: Open) -> None:
    one = session("python")
    assert (one.run("print('x', end=''); exit(3)").exit_code, one.lost) == (
        3, "the session's program ended (exit code 3)",
    )  # fmt: skip
    with pytest.raises(SandboxError, match=r"exit code 3\); its state is gone"):
        one.run("1")


# ---------------------------------------------------------------------------------------- shell


def test_a_shell_keeps_variables_functions_and_directory(session: Open) -> None:
    one = session("shell")
    assert one.run("x='a b'; f() { echo \"<$1>\"; }; mkdir -p deep; cd deep").exit_code == 0
    assert one.run('f "$x"; pwd').stdout == b"<a b>\n/work/deep\n"
    assert one.run("false").exit_code == 1
    assert one.run("echo $?; exec 2>&1; nosuch").exit_code == 127


def test_a_shell_survives_an_error_of_syntax(session: Open) -> None:
    one = session("shell")
    one.run("x=1")
    failed = one.run("if")
    assert (failed.exit_code, b"yntax error" in failed.stderr) == (2, True)
    assert one.run("echo $x").stdout == b"1\n"


def test_text_reaches_the_shell_as_it_is(session: Open) -> None:
    one = session("shell")
    assert one.run("printf '%s' 'it'\"'\"'s \\n' \"$(cat)\"", stdin=b"in\n").stdout == b"it's \\nin"
    assert one.run("cat <<'E'\n$x `y` \\\nE").stdout == b"$x `y` \\\n"
    assert one.run("# only a comment").exit_code == 0
    assert one.run('read x; echo "$x"', stdin=b"line\nmore\n").stdout == b"line\n"
    assert one.run("cat; ls -A /tmp").stdout == b""
    with pytest.raises(UsageError, match="NUL"):
        one.run("echo \0")


def test_a_program_of_the_shell_holds_no_descriptor_of_ours(session: Open) -> None:
    assert session("shell").run("ls /proc/self/fd").stdout == b"0\n1\n2\n3\n"
    assert (
        session("python")
        .run("import os; sorted(map(int, os.listdir('/proc/self/fd')))[:4]")
        .stdout.startswith(b"[0, 1, 2, 3]")
    )


def test_the_shell_that_execs_or_dies_ends_the_session(session: Open) -> None:
    one = session("shell")
    assert (one.run("exec sh -c 'exit 7'").exit_code, one.lost is not None) == (7, True)
    other = session("shell")
    assert other.run("kill -KILL $$").signal == 9
    assert other.lost == "the session's program ended (signal 9)"


# --------------------------------------------------------------------------- limits, and ends as data


@pytest.mark.parametrize(
    ("kind", "endless"), [("python", "while True: pass"), ("shell", "while :; do :; done")]
)
def test_a_deadline_ends_the_session_and_keeps_what_was_written(
    session: Open, kind: SessionKind, endless: str
) -> None:
    one = session(kind)
    one.run({"python": "print('first', flush=True)", "shell": "echo first"}[kind])
    result = one.run(
        {"python": "print('so far', flush=True)\n", "shell": "echo so far\n"}[kind] + endless, timeout=2.0
    )
    assert (result.timed_out, result.signal, result.exit_code) == (True, 9, None)
    assert result.stdout == b"so far\n"
    with pytest.raises(SandboxError, match="deadline of its last request; its state is gone"):
        one.run("1")


def test_memory_of_all_processes_together_ends_the_session(session: Open) -> None:
    one = session("python", Limits(memory_mb=96, tool_seconds=30))
    result = one.run(
        "import os, time\nfor _ in range(3):\n    if os.fork() == 0:\n"
        "        x = b'x' * (60 << 20); time.sleep(60)\ntime.sleep(20)"
    )
    assert (result.oom, result.signal, result.timed_out) == (True, 9, False)
    assert one.lost == "the session ran out of memory and was ended"


def test_output_is_capped_for_each_request_and_a_flood_ends_the_session(session: Open) -> None:
    one = session("python", Limits(memory_mb=256, tool_seconds=60, output_bytes=1024))
    big = one.run("print('a' * 5000 + 'end')")
    assert (big.stdout_bytes, len(big.stdout), big.truncated, big.stdout[-5:]) == (
        5004,
        1024,
        True,
        b"aend\n"[-5:],
    )
    assert one.run("print(1)").stdout_bytes == 2
    flood = one.run("import os\nwhile True: os.write(1, b'x' * 65536)")
    assert (flood.signal, flood.truncated, flood.timed_out) == (9, True, False)
    assert one.lost is not None
    assert "64 MB" in one.lost


def test_a_process_in_the_background_lives_on_and_does_not_hold_a_request_up(session: Open) -> None:
    one = session("shell")
    assert one.run("yes > /dev/null & echo $! ; yes &").exit_code == 0
    assert one.run("kill -0 $! && echo alive").exit_code == 0
    assert one.run("kill %1 %2 2>/dev/null; kill $!; true").exit_code == 0


def test_a_killed_jail_is_data_for_the_next_request(session: Open) -> None:
    one = session("python")
    one.run("x = 1")
    one._jail._process.kill()

    def ask_until_it_fails() -> None:
        for _ in range(100):  # the kernel takes its time to kill
            one.run("x")

    with pytest.raises(SandboxError, match=r"state is gone|was ended"):
        ask_until_it_fails()
    assert one.lost is not None


def test_close_wakes_a_request_under_way(session: Open) -> None:
    one = session("python")
    one.run("1")
    threading.Timer(0.3, one.close).start()
    with pytest.raises(SandboxError):  # and no answer, which it would have given after 20 s
        one.run("import time; time.sleep(20)")
    one.close()


# ------------------------------------------------------------------------------------- honesty

_FIND_CHANNEL = """
import os, socket, stat
fd = next(int(n) for n in os.listdir('/proc/self/fd') if os.path.exists(f'/proc/self/fd/{n}')
          and stat.S_ISSOCK(os.stat(f'/proc/self/fd/{n}').st_mode))
channel = socket.socket(fileno=os.dup(fd))
"""
RIGHT = message.encode_outcome(message.RequestOutcome(0))


def test_a_forged_answer_is_noticed_at_the_next_request(session: Open) -> None:
    """The session's own process can answer in its place: that does not pass unnoticed."""
    one = session("python")
    one.run(_FIND_CHANNEL)
    forged = one.run(f"channel.sendall({RIGHT!r})\nimport time; time.sleep(0.3)\n1/0")
    assert forged.exit_code == 0
    time.sleep(0.6)
    with pytest.raises(SandboxError, match="out of turn"):
        one.run("1")


@pytest.mark.parametrize(
    "data", [b"{" * 5000, b"\xff", RIGHT + RIGHT, b"\xff" * len(RIGHT)], ids=lambda data: str(len(data))
)
def test_nonsense_ends_the_session(session: Open, data: bytes) -> None:
    one = session("python")
    one.run(_FIND_CHANNEL)
    with pytest.raises(SandboxError, match="out of turn"):
        one.run(f"channel.sendall({data!r})\nimport time; time.sleep(20)")


def test_a_report_that_the_shell_did_not_write_ends_the_session(session: Open) -> None:
    one = session("shell")
    assert one.run("echo '0123 0' >&8").exit_code != 0  # closed while a request runs
    forge = (
        "for fd in /proc/$$/fd/*; do"
        " [ -p $fd ] && [ ${fd##*/} -gt 2 ] && echo 'x 0' > $fd 2>/dev/null; done; true"
    )
    with pytest.raises(SandboxError, match="out of turn"):
        one.run(forge)


def test_the_process_between_agent_and_shell_cannot_be_looked_into(session: Open) -> None:
    one = session("shell")
    looked = one.run(
        "for p in /proc/[0-9]*; do"
        " [ -r $p/mem ] && head -c0 $p/mem 2>/dev/null && echo ${p#/proc/}; done; echo $$"
    )
    readable = looked.stdout.decode().split()
    parent = one.run("sed -n 's/^PPid:\\t//p' /proc/$$/status").stdout.decode().strip()
    assert parent not in readable[:-1]


# --------------------------------------------------------------------------------------- batch


def test_a_batch_keeps_order_and_state_by_name() -> None:
    code, said = batch(
        *(
            {"id": n, "session": f"s{n % 4}", "python": f"x = globals().get('x', 0) + {n}\nx"}
            for n in range(40)
        ),
        concurrency=3,
    )
    assert code == 0
    for name in range(4):
        total = 0
        for n in range(name, 40, 4):
            total += n
            assert (said[n]["stdout"], said[n]["session"]) == (f"{total}\n", f"s{name}")


def test_a_batch_says_once_that_state_is_gone_and_begins_anew() -> None:
    code, said = batch(
        {"id": 1, "session": "a", "shell": "x=1; sleep 30", "timeout": 0.5},
        {"id": 2, "session": "a", "shell": "echo $x"},
        {"id": 3, "session": "a", "shell": "echo new $x"},
        {"id": 4, "session": "a", "close": True},
    )
    assert code == 0
    assert (said[1]["timed_out"], said[1]["signal"]) == (True, 9)
    assert "deadline" in said[1]["lost"]
    assert said[2]["lost"] is True
    assert "its state is gone" in said[2]["error"]
    assert (said[3]["stdout"], "lost" in said[3]) == ("new\n", False)
    assert said[4] == {"id": 4, "session": "a", "closed": True}


def test_a_batch_refuses_what_no_session_can_do() -> None:
    code, said = batch(
        {"id": 1, "session": "a", "python": "1"},
        {"id": 2, "session": "a", "shell": "1"},
        {"id": 3, "session": "a", "argv": ["ls"]},
        {"id": 4, "session": "a", "python": "1", "memory": 99},
        {"id": 5, "session": "b", "close": True},
        {"id": 6, "session": "a", "close": True, "python": "1"},
        {"id": 7, "close": True},
        {"id": 8, "session": "", "python": "1"},
        {"id": 9, "session": "a", "python": "open('f').read()", "files": {"f": "text"}},
        {"id": 10, "session": "a", "python": "1", "files": {"../f": "text"}},
    )
    assert code == 2
    assert "is a python session" in said[2]["error"]
    assert "not argv" in said[3]["error"]
    assert "set by its first request" in said[4]["error"]
    assert "no session 'b'" in said[5]["error"]
    assert "nothing else" in said[6]["error"]
    assert "nothing else" in said[7]["error"]
    assert "session" in said[8]["error"]
    assert said[9]["stdout"] == "'text'\n"
    assert "outside the workspace" in said[10]["error"]


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


def test_jobs_of_one_name_keep_their_order() -> None:
    done: list[tuple[str, int]] = []
    with ThreadPoolExecutor(4) as workers:
        in_order = InOrder(workers.submit)
        for n in range(200):
            in_order.add("ab"[n % 2], lambda n=n: done.append(("ab"[n % 2], n)))  # type: ignore[misc]
    for name in "ab":
        numbers = [n for said, n in done if said == name]
        assert numbers == sorted(numbers)
        assert len(numbers) == 100
