"""`nano-coder exec`: a command, a file, a line of shell, a record, and batches; each in a jail of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import pytest

Exec = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(tmp_path: Path) -> Exec:
    def call(*arguments: str, given: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join(p for p in sys.path if p)
        env = {**os.environ, "PYTHONPATH": path, "NANO_HOME": str(tmp_path / "home"), **environment}
        return forked.run("nano-coder", "exec", *arguments, env=env, cwd=tmp_path, given=given)

    return call


def answers(done: subprocess.CompletedProcess[str]) -> dict[Any, dict[str, Any]]:
    return {said["id"]: said for said in map(json.loads, done.stdout.splitlines())}


def batch(run: Exec, *requests: dict[str, Any] | str, flags: tuple[str, ...] = ()) -> Any:
    lines = [r if isinstance(r, str) else json.dumps(r) for r in requests]
    return run("--batch", *flags, given="\n".join(lines) + "\n")


# ------------------------------------------------------------------------------------ one command


def test_a_line_of_shell(run: Exec) -> None:
    done = run("-c", "cat; echo err >&2; exit 5", given="given")
    assert (done.stdout, done.stderr, done.returncode) == ("given", "err\n", 5)


def test_a_file_of_the_host_is_run_with_its_arguments(run: Exec, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/script.py").write_text("import sys; print(sys.argv[1:], input(), __name__)")
    done = run("sub/script.py", "a", "--flag", given="line")
    assert done.stdout == "['a', '--flag'] line __main__\n"


def test_a_file_of_the_workspace_finds_its_neighbours(run: Exec, tmp_path: Path) -> None:
    (tmp_path / "ws").mkdir()
    (tmp_path / "ws/main.py").write_text("import other")
    (tmp_path / "ws/other.py").write_text("print('other')")
    assert run("--workspace", "ws", "main.py").stdout == "other\n"


def test_the_record_says_everything(run: Exec) -> None:
    done = run("--json", "--", "sh", "-c", "echo out; echo err >&2; kill -9 $$")
    said = json.loads(done.stdout)
    assert (said["exit_code"], said["signal"], said["timed_out"], said["oom"]) == (None, 9, False, False)
    assert (said["stdout"], said["stderr"], said["truncated"]) == ("out\n", "err\n", False)
    assert 0 < said["wall_s"] < 30
    assert said["cpu_s"] > 0
    assert said["peak_memory_bytes"] > 100_000
    assert said["layers"]["network_namespace"] is True
    assert done.returncode == 128 + 9


def test_a_record_of_much_output_tells_its_size(run: Exec) -> None:
    said = json.loads(run("--json", "-c", "head -c 3000000 /dev/zero | tr '\\0' x").stdout)
    assert (said["truncated"], said["stdout_bytes"], len(said["stdout"])) == (True, 3_000_000, 1_000_000)


def test_output_beyond_the_cap_is_told_and_the_cap_can_be_raised(run: Exec) -> None:
    line = "head -c 1500000 /dev/zero | tr '\\0' x; echo err >&2"
    cut = run("-c", line)
    assert (len(cut.stdout), cut.returncode) == (1_000_000, 0)
    assert cut.stderr.splitlines()[0] == "err"
    assert "stdout had 1500000 bytes" in cut.stderr
    assert "--max-output" in cut.stderr
    whole = run("--max-output", "1500000", "-c", line)
    assert (len(whole.stdout), whole.stderr) == (1_500_000, "err\n")


def test_a_flood_is_told(run: Exec) -> None:
    done = run("--max-output", "4096", "--", "cat", "/dev/zero")
    assert done.returncode == 128 + 9
    assert "ended for more than 67108864 bytes of output" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("line", ["sleep 60", "cat", "read x"])
def test_an_open_silent_input_does_not_outlast_the_time_limit(tmp_path: Path, line: str) -> None:
    program = [sys.executable, "-c", "from nano_coder.cli import main; main()", "exec", "--timeout", "1"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "NANO_HOME": str(tmp_path)}
    with subprocess.Popen([*program, "-c", line], stdin=subprocess.PIPE, env=env) as silent:
        assert silent.wait(60) == 124


def test_a_program_that_reads_nothing_ends_though_its_input_does_not(tmp_path: Path) -> None:
    program = [sys.executable, "-c", "from nano_coder.cli import main; main()", "exec", "--", "echo", "1"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "NANO_HOME": str(tmp_path)}
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as silent:
        assert silent.wait(60) == 0
        assert silent.stdout is not None
        assert silent.stdout.read() == b"1\n"


def test_a_long_input_arrives_whole(run: Exec) -> None:
    assert run("-c", "wc -c", given="x" * 3_000_000).stdout == "3000000\n"


@pytest.mark.some(5)
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--max-output", "0", "--", "ls"), "--max-output"),
        (("--max-output", "99999999999", "--", "ls"), "--max-output"),
        ((), "name one thing to run"),
        (("--pyhton", "x", "--", "ls"), "no such option: --pyhton"),
        (("-c", "ls", "--", "ls"), "name one thing to run"),
        (("--batch", "--", "ls"), "name one thing to run"),
        (("nowhere.py",), "cannot read nowhere.py"),
        (("--timeout", "0", "--", "ls"), "--timeout"),
        (("--timeout", "nan", "--", "ls"), "--timeout"),
        (("--timeout", "1e9", "--", "ls"), "--timeout"),
        (("--memory", "0", "--", "ls"), "--memory"),
        (("--memory", "99999999999", "--", "ls"), "--memory"),
        (("--concurrency", "0", "--batch"), "--concurrency"),
        (("--net", "everything", "--", "ls"), "allow=HOST"),
        (("--net", "allow=a.org", "--batch"), "no network"),
        (("--workspace", "nowhere", "--", "ls"), "no such directory: nowhere"),
    ],
)
def test_bad_input_is_one_sentence(run: Exec, arguments: tuple[str, ...], words: str) -> None:
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert words in line


def test_no_isolation_needs_leave(run: Exec) -> None:
    done = run("--sandbox", "none", "--", "echo", "1")
    assert (done.returncode, done.stdout) == (125, "")
    assert "NANO_ALLOW_NO_SANDBOX=1" in done.stderr
    assert run("--sandbox", "none", "--", "echo", "1", NANO_ALLOW_NO_SANDBOX="1").stdout == "1\n"


# ---------------------------------------------------------------------------------------- batches


def test_every_kind_of_request_is_answered(run: Exec) -> None:
    done = batch(
        run,
        {
            "id": 1,
            "python": "print(open('a/b.txt').read() + input())",
            "files": {"a/b.txt": "x"},
            "stdin": "y",
        },
        {"id": "two", "shell": "cat; exit 3", "stdin": "in"},
        {"id": None, "argv": ["sh", "-c", "kill -15 $$"]},
        {"id": 4, "shell": "echo partial; sleep 60", "timeout": 0.5},
        {"id": 5, "python": "x = b'x' * (1 << 29); input()", "memory": 64},
        "",
    )
    said = answers(done)
    assert done.returncode == 0
    assert (said[1]["stdout"], said[1]["exit_code"]) == ("xy\n", 0)
    assert (said["two"]["stdout"], said["two"]["exit_code"]) == ("in", 3)
    assert (said[None]["signal"], said[None]["exit_code"]) == (15, None)
    assert (said[4]["timed_out"], said[4]["stdout"]) == (True, "partial\n")
    assert said[5]["oom"]
    assert set(said[1]) == {
        "id", "exit_code", "signal", "timed_out", "oom", "stdout", "stderr", "truncated", "wall_s",
    }  # fmt: skip


@pytest.mark.slow
def test_answers_come_as_they_finish(run: Exec) -> None:
    done = batch(
        run, {"id": "slow", "shell": "sleep 1"}, {"id": "fast", "shell": "true"}, flags=("--concurrency", "2")
    )
    assert [json.loads(line)["id"] for line in done.stdout.splitlines()] == ["fast", "slow"]


def test_requests_share_nothing(run: Exec) -> None:
    spoil = "import os; open('/tmp/x', 'w'); open('x', 'w'); os.environ['X'] = '1'"
    look = "import os; print(os.listdir('/tmp') + os.listdir('.'), os.environ.get('X'))"
    requests = [{"id": n, "python": spoil if n % 2 else look} for n in range(20)]
    said = answers(batch(run, *requests, flags=("--concurrency", "4")))
    assert {said[n]["stdout"] for n in range(0, 20, 2)} == {"[] None\n"}


def test_a_line_that_is_no_request_is_told_and_the_others_go_on(run: Exec) -> None:
    done = batch(
        run,
        "{broken",
        "[1]",
        {"id": 1},
        {"id": 2, "python": "1", "shell": "2"},
        {"id": 3, "shell": "true", "timeout": 0},
        {"id": 4, "shell": "true", "unknown": 1},
        {"id": 5, "shell": "true", "files": {"../x": ""}},
        {"id": 6, "argv": []},
        {"id": 7, "argv": ["a\0b"]},
        {"id": 8, "shell": "echo fine"},
    )
    said = answers(done)
    assert done.returncode == 2
    assert said[8]["stdout"] == "fine\n"
    words = {1: "exactly one", 2: "exactly one", 3: "timeout", 4: "unknown", 5: "../x", 6: "argv", 7: "NUL"}
    assert [n for n, word in words.items() if word not in said[n]["error"]] == []
    assert len(done.stdout.splitlines()) == 10


def test_a_batch_of_nothing_is_nothing(run: Exec) -> None:
    done = run("--batch", given="\n\n")
    assert (done.stdout, done.returncode) == ("", 0)
