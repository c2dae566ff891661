"""The pool of warm jails: single-use, apart from each other, replaced when killed, quiet at the end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nano_coder.sandbox.launcher import message
from nano_coder.sandbox.namespaces import NsSandbox
from nano_coder.sandbox.protocol import open_sandbox
from nano_coder.sandbox.warm_pool import Pool, close_pools
from nano_shared.errors import SandboxError
from nano_shared.types import Limits

LIMITS = Limits(tool_seconds=60)


@pytest.fixture
def sandbox() -> Iterator[NsSandbox]:
    """With a pool that no other test has used."""
    close_pools()
    opened = open_sandbox("ns")
    assert isinstance(opened, NsSandbox)
    yield opened
    close_pools()


def eventually(holds: Callable[[], bool]) -> bool:
    for _ in range(6000):
        if holds():
            return True
        time.sleep(0.02)
    return False


def filled(sandbox: NsSandbox) -> bool:
    """Use the pool until jails wait in it."""
    for _ in range(3):
        sandbox.open(None, LIMITS).close()
    return eventually(lambda: len(sandbox.pool) == sandbox.pool.size)


def launchers() -> list[int]:
    """Supervisors below this process."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and b"zygote" in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except (OSError, ValueError, IndexError):
            continue
    return found


def test_nothing_of_one_jail_is_in_the_next(sandbox: NsSandbox) -> None:
    leave = (
        "import os; [open(f'{d}/left', 'w') for d in ('/work', '/tmp', '/dev/shm')]; os.environ['LEFT'] = '1'"
    )
    look = "import os; print([os.listdir(d) for d in ('/work', '/tmp', '/dev/shm')], 'LEFT' in os.environ)"
    assert filled(sandbox)
    for _ in range(2 * sandbox.pool.size):
        with closing(sandbox.open(None, LIMITS)) as jail:
            assert jail.run_python(look).stdout == b"[[], [], []] False\n"
            assert jail.run_python(leave).exit_code == 0


def test_two_jails_see_nothing_of_each_other(sandbox: NsSandbox) -> None:
    with closing(sandbox.open(None, LIMITS)) as one, closing(sandbox.open(None, LIMITS)) as other:
        one.write("secret", b"x")
        look = "import os; print(os.listdir('/work'), [p for p in os.listdir('/proc') if p.isdigit()])"
        assert other.run_python(look).stdout == b"[] ['1', '2']\n"


def test_many_callers_at_once_get_their_own_answers(sandbox: NsSandbox) -> None:
    def ask(number: int) -> bool:
        with closing(sandbox.open(None, LIMITS)) as jail:
            jail.write("number", str(number).encode())
            return jail.run_python("print(open('number').read())").stdout == f"{number}\n".encode()

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(ask, range(60)))


def test_a_jail_killed_while_it_waits_is_not_handed_out(sandbox: NsSandbox) -> None:
    assert filled(sandbox)
    waiting = sandbox.pool.ready()
    for jail in waiting:
        jail.kill()
    assert eventually(lambda: not any(jail.alive for jail in waiting))
    with closing(sandbox.open(None, LIMITS)) as jail:
        assert jail.run_python("print(1)").stdout == b"1\n"


@pytest.mark.parametrize("filling", [True, False], ids=["filled", "empty"])
def test_a_killed_launcher_is_replaced(sandbox: NsSandbox, filling: bool) -> None:
    held = sandbox.open(None, LIMITS)
    if filling:
        assert filled(sandbox)
    waiting = sandbox.pool.ready()
    killed = launchers()
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: not any(jail.alive for jail in waiting))
    assert eventually(lambda: not set(killed) & set(launchers()))  # each has ended, and not only been told to
    with pytest.raises(SandboxError, match="ended"):
        held.run(["sleep", "60"])
    with closing(sandbox.open(None, LIMITS)) as jail:
        assert jail.run_python("print(1)").stdout == b"1\n"
    held.close()


def test_a_launcher_serves_its_time_and_its_jails_outlive_it(
    sandbox: NsSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nano_coder.sandbox.warm_pool.JAILS_A_LAUNCHER", 2)
    with closing(sandbox.open_new(None, LIMITS)) as old:
        first = launchers()
        for _ in range(3):
            sandbox.open_new(None, LIMITS).close()
        assert set(launchers()) > set(first)
        assert old.run_python("print(1)").stdout == b"1\n"
    assert eventually(lambda: first[0] not in launchers())


def test_a_fork_of_the_agent_has_jails_of_its_own(sandbox: NsSandbox) -> None:
    code = """
        import os
        from contextlib import closing
        from nano_coder.sandbox.protocol import open_sandbox
        from nano_shared.types import Limits
        def ask():
            with closing(open_sandbox().open(None, Limits())) as jail:
                return jail.run_python("print(1)").stdout == b"1\\n"
        ask(), ask()
        if (pid := os.fork()) == 0:
            os._exit(0 if ask() else 1)
        print(os.waitpid(pid, 0)[1], ask())
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, check=False)
    assert (done.stdout, done.returncode) == (b"0 True\n", 0), done.stderr


def test_jails_are_made_ahead_by_a_process_that_is_very_nice_already() -> None:
    code = """
        import os, time
        from nano_coder.sandbox.warm_pool import Pool
        if os.geteuid() == 0:
            os.setresuid(65534, 65534, 65534)
        os.nice(15)
        class Jail:
            alive = True
            def close(self): pass
        pool = Pool({}, {}, size=2)
        pool.make = lambda room, rehearse=False: Jail()
        pool.take(), pool.take()
        for _ in range(6000):
            if len(pool) == pool.size: break
            time.sleep(0.02)
        print(len(pool))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, check=False)
    assert done.stdout == b"2\n", done.stderr


def test_a_closed_pool_says_so(sandbox: NsSandbox) -> None:
    pool: Pool = sandbox.pool
    pool.close()
    pool.close()
    with pytest.raises(SandboxError, match="closed"):
        pool.take()


def test_a_sandbox_outlives_its_pool(sandbox: NsSandbox) -> None:
    for close in (close_pools, sandbox.pool.close):
        close()
        with closing(sandbox.open(None, LIMITS)) as jail:
            assert jail.run(["echo", "here"]).stdout == b"here\n"


# ------------------------------------------------------------------------------------- protocol


@given(st.lists(st.binary(max_size=64), max_size=4), st.integers(0, 2**32 - 1))
def test_nonsense_on_the_wire_is_no_message(chunks: list[bytes], size: int) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(size.to_bytes(4, "big") + b"".join(chunks))
        theirs.shutdown(socket.SHUT_WR)
        received = message.receive(ours)
    payload = b"".join(chunks)
    try:
        said = json.loads(payload[:size]) if len(payload) >= size else None
    except ValueError:
        said = None
    assert (received[0] if received else None) == (said if isinstance(said, dict) else None)


@given(
    st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5), max_size=5), st.integers(0, 3)
)
def test_a_message_arrives_as_it_was_sent(said: dict[str, object], fds: int) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        message.send(theirs, said, [theirs.fileno()] * fds)
        received = message.receive(ours)
        assert received is not None
        assert (received[0], len(received[1])) == (said, fds)
        for fd in received[1]:
            os.close(fd)


def test_descriptors_of_a_broken_message_are_closed() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        before = len(os.listdir("/proc/self/fd"))
        socket.send_fds(theirs, [(99).to_bytes(4, "big")], [theirs.fileno()] * 3)
        theirs.shutdown(socket.SHUT_WR)
        assert message.receive(ours) is None
        assert len(os.listdir("/proc/self/fd")) == before
