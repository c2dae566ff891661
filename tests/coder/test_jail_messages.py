"""The end of a request is told by init alone: checked by the agent, and out of reach of every program."""

from __future__ import annotations

import socket
import struct
import textwrap
import time
from collections.abc import Iterator
from contextlib import closing

import pytest
from executions import stopped_after_output
from hypothesis import given
from hypothesis import strategies as st

from nano_coder.sandbox.launcher import message
from nano_coder.sandbox.launcher.message import RequestOutcome
from nano_coder.sandbox.namespaces import NsJail, NsSandbox
from nano_coder.sandbox.protocol import open_sandbox
from nano_shared.errors import SandboxError
from nano_shared.types import Limits

ENDS = st.tuples(st.integers(0, 255), st.none()) | st.tuples(st.none(), st.integers(1, 64))
TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=50)
OUTCOMES = st.builds(
    lambda end, *rest: RequestOutcome(*end, *rest),
    ENDS,
    st.booleans(),
    st.floats(0, 1e9),
    st.integers(0, 2**63),
    st.none() | st.tuples(st.integers(1, 200), TEXTS),
)
# a program that writes words to all that it holds, then goes on
FORGE = """
    import os, struct, sys
    word = struct.pack("=hBdQH235s", 0, 0, 0.0, 0, 0, b"")
    for fd in range(3, 4096):
        for text in (word, word[:1] * 2, b"forged"):
            try: os.write(fd, text)
            except OSError: pass
    print("went on", flush=True)
"""


@pytest.fixture
def sandbox() -> NsSandbox:
    opened = open_sandbox("ns")
    assert isinstance(opened, NsSandbox)
    return opened


@pytest.fixture
def jail(sandbox: NsSandbox) -> Iterator[NsJail]:
    with closing(sandbox.open(None, Limits(memory_mb=512, tool_seconds=60))) as jail:
        yield jail


@given(OUTCOMES)
def test_a_word_says_what_was_meant(outcome: RequestOutcome) -> None:
    assert message.decode_outcome(message.encode_outcome(outcome)) == outcome


@given(OUTCOMES)
def test_every_word_has_one_size(outcome: RequestOutcome) -> None:
    assert len(message.encode_outcome(outcome)) == message.OUTCOME_SIZE


@given(
    st.binary(max_size=2 * message.OUTCOME_SIZE)
    | st.binary(min_size=message.OUTCOME_SIZE, max_size=message.OUTCOME_SIZE)
)
def test_any_bytes_are_a_word_or_nonsense(data: bytes) -> None:
    try:
        said = message.decode_outcome(data)
    except ValueError:
        return
    assert (said.exit_code is None) != (said.signal is None)
    assert said.exit_code is None or 0 <= said.exit_code <= 255
    assert said.signal is None or 1 <= said.signal <= 64
    assert 0 <= said.cpu_s < float("inf")


@pytest.mark.parametrize(
    "fields",
    [(256, 0, 0.0), (-65, 0, 0.0), (0, 4, 0.0), (0, 0, -1.0), (0, 0, float("nan")), (0, 0, float("inf"))],
)
def test_what_no_init_says_is_nonsense(fields: tuple[int, int, float]) -> None:
    with pytest.raises(ValueError):
        message.decode_outcome(struct.pack("=hBdQH235s", *fields, 0, 0, b""))


def test_a_jail_that_speaks_nonsense_is_given_up(jail: NsJail, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    with theirs, jail._process._control:
        monkeypatch.setattr(jail._process, "_control", ours)
        theirs.sendall(b"\xff" * message.OUTCOME_SIZE)
        with pytest.raises(SandboxError, match="nonsense"):
            jail.run_python("import time; time.sleep(30)")  # its own end is not what is heard first
    with pytest.raises(SandboxError, match="closed"):
        jail.run_python("print(1)")


# ------------------------------------------------------------------------------ what a program may reach


@pytest.mark.parametrize("warm", [True, False], ids=["warm", "cold"])
def test_a_program_holds_no_socket(jail: NsJail, warm: bool) -> None:
    code = """
        import os, stat
        for name in os.listdir("/proc/self/fd"):
            try: print(stat.S_ISSOCK(os.fstat(int(name)).st_mode))
            except OSError: pass
    """
    run = jail.run_python if warm else lambda code: jail.run(["python", "-c", code])
    for _ in range(2):
        assert set(run(textwrap.dedent(code)).stdout.split()) == {b"False"}


@pytest.mark.slow
def test_what_a_program_writes_everywhere_is_no_word(jail: NsJail) -> None:
    for _ in range(2):
        result = jail.run_python(textwrap.dedent(FORGE) + "sys.exit(7)")
        assert (result.stdout, result.exit_code, result.signal) == (b"went on\n", 7, None)


def test_an_end_that_a_program_announces_is_its_end(jail: NsJail) -> None:
    # what the trusted code around Python source writes to init: no more than `os._exit` can say
    code = """
        import os, time
        for fd in range(3, 256):
            try: os.write(fd, bytes([5]))
            except OSError: pass
        time.sleep(1)
        print("went on", flush=True)
        open("/work/late", "w").close()
    """
    result = jail.run_python(textwrap.dedent(code))
    assert (result.stdout, result.exit_code) == (b"", 5)
    assert jail.run(["ls", "/work"]).stdout == b""


def test_a_forged_word_does_not_hide_a_signal(jail: NsJail) -> None:
    result = jail.run_python(textwrap.dedent(FORGE) + "os.abort()")
    assert (result.stdout, result.exit_code, result.signal) == (b"went on\n", None, 6)


def test_a_forged_word_does_not_hide_a_time_out(jail: NsJail) -> None:
    code = textwrap.dedent(FORGE) + "import time; time.sleep(1000)"
    result = stopped_after_output(lambda seconds: jail.run_python(code, timeout=seconds))
    assert (result.stdout, result.exit_code, result.timed_out) == (b"went on\n", None, True)


def test_a_program_has_no_other_way_to_an_init(jail: NsJail) -> None:
    code = """
        import glob, os
        for path in glob.glob("/proc/1/fd/*") + ["/proc/1/fd"]:
            try: print("opened", os.listdir(path) if os.path.isdir(path) else os.open(path, os.O_WRONLY))
            except OSError as error: print(type(error).__name__)
    """
    assert jail.run_python(textwrap.dedent(code)).stdout == b"PermissionError\n"


def test_a_child_of_a_program_does_not_speak_for_it(jail: NsJail) -> None:
    code = """
        import os, sys
        if os.fork() == 0:
            sys.exit(5)
        os.wait()
        print("parent", flush=True)
        sys.exit(3)
    """
    result = jail.run_python(textwrap.dedent(code))
    assert (result.stdout, result.exit_code) == (b"parent\n", 3)


def test_what_was_used_is_what_the_kernel_counted(jail: NsJail) -> None:
    spoil = """
        import resource, time
        resource.getrusage = time.process_time = None
        began, turns = time.monotonic(), 0
        while turns < 3_000_000: turns += 1
        x = bytearray(b"1" * (1 << 26))
    """
    result = jail.run_python(textwrap.dedent(spoil))
    assert (result.exit_code, result.used.peak_bytes > 1 << 26) == (0, True)
    assert 0.02 < result.used.cpu_s < 30


def test_what_children_used_is_counted(jail: NsJail) -> None:
    code = """
        import subprocess, sys
        work = "x = bytearray(b'1' * (1 << 26)); [i * i for i in range(2_000_000)]"
        subprocess.run([sys.executable, "-c", work], check=True)
    """
    result = jail.run_python(textwrap.dedent(code))
    assert (result.exit_code, result.used.peak_bytes > 1 << 26) == (0, True)
    assert 0.02 < result.used.cpu_s < 30


def test_getting_ready_is_not_counted(jail: NsJail) -> None:
    used = [jail.run_python("pass").used.cpu_s for _ in range(20)]
    assert min(used) < 0.02


# ------------------------------------------------------------------------- an end that the agent hears itself


def test_many_ends_in_one_jail_are_told_apart(jail: NsJail) -> None:
    for number in range(12):
        early = jail.run_python(f"print({number}); raise SystemExit({number})")
        assert (early.stdout, early.exit_code) == (f"{number}\n".encode(), number)
        if number % 2:
            assert jail.run(["sh", "-c", f"echo {number}; exit 9"]).exit_code == 9
        if number % 3:
            assert len(jail.snapshot()) > 0
        time.sleep(0.03 * (number % 4))  # init wakes after 50 ms


@pytest.mark.slow
def test_a_program_that_announces_its_end_is_ended_soon_though_nobody_asks(jail: NsJail) -> None:
    code = """
        import os, time
        if os.fork() == 0:
            while True:
                with open("/work/beat", "a") as file: file.write("x")
                time.sleep(0.005)
        for fd in range(3, 256):
            try: os.write(fd, bytes([0]))
            except OSError: pass
        time.sleep(60)
    """
    assert jail.run_python(textwrap.dedent(code)).exit_code == 0
    time.sleep(3.0)
    # it was over long before this question ended it
    assert len(jail.read("beat")) < 300


def test_what_a_background_writer_adds_for_ever_does_not_hold_up_the_end(jail: NsJail) -> None:
    code = """
        import os, time
        if os.fork() == 0:
            while True:
                os.write(1, b"y" * 4096)
                time.sleep(0.0002)  # slower than a flood, which would be a reason to kill
        time.sleep(0.05)
    """
    result = jail.run_python(textwrap.dedent(code))
    assert (result.exit_code, result.timed_out) == (0, False)


def test_a_snapshot_after_an_early_end_holds_what_was_written_and_no_later(jail: NsJail) -> None:
    code = """
        import os, time
        open("done", "w").write("1")
        if os.fork() == 0:
            time.sleep(0.3)
            open("late", "w").close()
            os._exit(0)
    """
    for _ in range(3):
        jail.run_python(textwrap.dedent(code))
        assert b"done" in jail.snapshot()
        time.sleep(0.4)
        assert b"late" not in jail.snapshot()


def test_what_fills_a_memory_file_system_counts_from_the_beginning(sandbox: NsSandbox) -> None:
    code = "import time\nfor n in range(5): open(f'/tmp/{n}', 'wb').write(b'x' * (40 << 20))\ntime.sleep(60)"
    with closing(sandbox.open(None, Limits(memory_mb=128, tool_seconds=60))) as jail:
        result = jail.run_python(code)
    assert (result.exit_code, result.oom) == (None, True)
