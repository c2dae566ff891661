# ruff: noqa: E501
"""Python in a warm jail is Python: whatever a program does, it ends as `python -c` would have ended it."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from contextlib import closing

import pytest
from executions import stopped_after_output

from nano_coder.sandbox.protocol import ExecResult, Jail, Sandbox, open_sandbox
from nano_shared.types import Limits

SAME = {
    "nothing": "",
    "output": "print('out'); import sys; print('err', file=sys.stderr)",
    "unicode": "print('äß→🐍', repr('\\udc80'))",
    "bytes that are no text": "import sys; sys.stdout.buffer.write(bytes([0, 255, 10]))",
    "standard input": "import sys; print(input()); print(sys.stdin.read())",
    "arguments": "import sys; print(sys.argv)",
    "exit code": "raise SystemExit(3)",
    "exit with None": "import sys; sys.exit()",
    "exit with a text": "import sys; sys.exit('why')",
    "exit code beyond a byte": "import sys; sys.exit(513)",
    "exit code below zero": "import sys; sys.exit(-1)",
    "leaving at once": "import os; print('lost'); os._exit(7)",
    "an exception": "def f():\n    return 1 / 0\nf()",
    "a chain of exceptions": "try:\n    {}['a']\nexcept KeyError as e:\n    raise ValueError('b') from e",
    "an exception group": "raise ExceptionGroup('g', [ValueError(1), TypeError(2)])",
    "a syntax error": "print(1\nx = = 2",
    "a broken exception": "class E(Exception):\n    def __str__(self): raise ValueError('in str')\nraise E",
    "recursion": "def f(): f()\ntry:\n    f()\nexcept RecursionError:\n    print('deep')",
    "a signal": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "an interrupt": "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(9)",
    "an abort": "import os; os.abort()",
    "a caught signal": (
        "import os, signal\nsignal.signal(signal.SIGUSR1, lambda *a: print('caught'))\n"
        "os.kill(os.getpid(), signal.SIGUSR1)"
    ),
    "an alarm": "import signal, time; signal.alarm(1); time.sleep(9)",
    "exit handlers": "import atexit; atexit.register(print, 'bye'); atexit.register(print, 'first')",
    "an exit handler that fails": "import atexit; atexit.register(lambda: 1 / 0)",
    "a thread that outlives main": (
        "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.2), print('late'))).start()\nprint('main')"
    ),
    "a daemon thread": (
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\nprint('main')"
    ),
    "a file left open": "f = open('left.txt', 'w'); f.write('x'); import os; os.system('true')",
    "what was left open was written": "print(open('left.txt').read())",
    "a destructor": "class D:\n    def __del__(self): print('gone')\nd = D()",
    "a closed output": "import sys; print('a'); sys.stdout.close()",
    "the main module": "import __main__, sys; x = 1; print(__main__.x, __name__, __main__.__doc__, __spec__)",
    "the globals": "print(sorted(globals()))",
    "main has no file": "import __main__; print(hasattr(__main__, '__file__'))",
    "an import from the workspace": "open('mine.py', 'w').write('y = 2\\n')\nimport mine\nprint(mine.y, mine.__file__)",
    "path and prefix": "import sys; print(sys.path, sys.prefix, sys.base_prefix, sys.executable)",
    "the environment": "import os; print(sorted(os.environ.items()))",
    "the environment of children": "import subprocess; print(sorted(subprocess.check_output(['env'], text=True).split()))",
    "where it is": "import os; print(os.getcwd(), os.getuid(), os.umask(0o22))",
    "encodings": "import sys; print([(s.encoding, s.errors, s.line_buffering) for s in (sys.stdin, sys.stdout, sys.stderr)])",
    "open files": "import os; print(sorted(map(int, os.listdir('/proc/self/fd')))[:3])",
    "limits": "import resource as r; print([r.getrlimit(x) for x in (r.RLIMIT_AS, r.RLIMIT_NPROC, r.RLIMIT_CORE)])",
    "signals": "import signal; print(sorted((s.name, str(signal.getsignal(s))[:20]) for s in signal.valid_signals() if isinstance(s, signal.Signals)))",
    "hashes": "print(hash('a'), list({'a', 'b', 'c', 'd'}))",
    "a subprocess": "import subprocess, sys; print(subprocess.run([sys.executable, '-c', 'print(6)'], capture_output=True).stdout)",
    "a pipe that closes": "import subprocess; print(subprocess.run('yes | head -1', shell=True, capture_output=True).stdout)",
    "multiprocessing, forked": (
        "import multiprocessing as m\nwith m.get_context('fork').Pool(2) as p:\n    print(p.map(abs, [-1, -2]))"
    ),
    "multiprocessing, spawned": (
        "import multiprocessing as m\nwith m.get_context('spawn').Pool(2) as p:\n    print(p.map(abs, [-1, -2]))"
    ),
    "asyncio": "import asyncio\nasync def f():\n    await asyncio.sleep(0.01)\n    print('slept')\nasyncio.run(f())",
    "a database": "import sqlite3; c = sqlite3.connect('d.db'); c.execute('create table if not exists t(x)'); print(c.execute('select 1').fetchall())",
    "a temporary file": "import tempfile; print(tempfile.NamedTemporaryFile().name.startswith('/tmp/'))",
    "a dataclass": "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int = 1\nprint(P())",
    "annotations": "x: int = 1\nprint(__annotations__)",
    "a future import": "from __future__ import annotations\ndef f(x: nowhere): ...\nprint(f.__annotations__)",
    "pickling from main": "import pickle\nclass P: pass\nprint(pickle.loads(pickle.dumps(P())).__class__.__module__)",
    "warnings": "import warnings; warnings.warn('careful')",
    "an unraisable exception": "class D:\n    def __del__(self): 1 / 0\nd = D(); del d",
    "its own hook": "import sys; sys.excepthook = lambda *a: print('hook', a[0].__name__)\n1 / 0",
    "inspecting itself": "import inspect; print(inspect.currentframe().f_code.co_filename)",
    "no frames below": "import sys; print(sys._getframe().f_code.co_name)",
    "out of memory": "x = bytearray(1 << 30)",
    "doctest": "import doctest; print(doctest.testmod())",
    "numpy": "import numpy as np; print(np.arange(3).sum())",
    "readline of nothing": "import sys; sys.stdin.read(); print(repr(sys.stdin.readline()))",
    "exec and eval": "exec('a = 1'); print(eval('a + 1'))",
    "a main guard": "if __name__ == '__main__':\n    print('main')",
    "flushing without newline": "print('no newline', end='')",
    "much output": "print('x' * 300_000)",
}  # fmt: skip


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return open_sandbox("ns")


@pytest.fixture
def jail(sandbox: Sandbox) -> Iterator[Jail]:
    with closing(sandbox.open(None, Limits(memory_mb=768, tool_seconds=60))) as jail:
        jail.write("left.txt", b"before")
        yield jail


def ending(result: ExecResult) -> tuple[object, ...]:
    return result.exit_code, result.signal, result.stdout.decode(errors="replace"), _masked(result.stderr)


def _masked(stderr: bytes) -> str:
    """Object addresses are those of a process."""
    return re.sub(r"0x[0-9a-f]+", "0x", stderr.decode(errors="replace"))


@pytest.mark.some(5)
@pytest.mark.parametrize("source", SAME.values(), ids=SAME)
def test_a_warm_program_ends_as_a_cold_one(jail: Jail, source: str) -> None:
    cold = jail.run(["python", "-c", source, "arg"], stdin=b"line\nrest")
    warm = jail.run_python(source, ["arg"], stdin=b"line\nrest")
    assert ending(warm) == ending(cold)


def test_a_file_left_open_is_written(jail: Jail) -> None:
    jail.run_python("f = open('left.txt', 'w'); f.write('after')")
    assert jail.read("left.txt") == b"after"


def test_a_file_left_open_in_a_module_is_written(jail: Jail) -> None:
    jail.write("mine.py", b"f = open('left.txt', 'w'); f.write('after')")
    jail.run_python("import mine")
    assert jail.read("left.txt") == b"after"


def test_isolated_source_does_not_import_from_the_workspace(jail: Jail) -> None:
    jail.write("mine.py", b"")
    assert jail.run_python("import mine").exit_code == 0
    assert b"No module named 'mine'" in jail.run_python("import mine", isolated=True).stderr


def test_random_numbers_differ_between_runs_and_jails(sandbox: Sandbox) -> None:
    source = "import random, uuid, secrets; print(random.random(), uuid.uuid4(), secrets.token_hex())"
    seen = set()
    for _ in range(2):
        with closing(sandbox.open(None, Limits())) as jail:
            seen |= {jail.run_python(source).stdout for _ in range(3)}
    assert len(seen) == 6


def test_a_program_cannot_prepare_the_next(jail: Jail) -> None:
    spoil = """
        import builtins, sys, json, random
        builtins.print = lambda *a: None
        sys.modules["json"] = None
        random.seed = None
    """
    assert jail.run_python(textwrap.dedent(spoil)).exit_code == 0
    assert jail.run_python("import json; print(json.dumps(1))").stdout == b"1\n"


def test_source_may_be_longer_than_a_command_line(jail: Jail) -> None:
    assert jail.run_python(f"x = {'1' * 4000!r}\n" * 500 + "print(len(x))").stdout == b"4000\n"


def test_stopping_a_warm_program_keeps_its_output(jail: Jail) -> None:
    source = "import time; print('partial', flush=True); time.sleep(1000)"
    result = stopped_after_output(lambda seconds: jail.run_python(source, timeout=seconds))
    assert (result.timed_out, result.stdout) == (True, b"partial\n")


def test_what_a_run_used_is_told(jail: Jail) -> None:
    result = jail.run_python("x = bytearray(b'1' * (1 << 26)); [i * i for i in range(2_000_000)]")
    assert result.used.peak_bytes > 1 << 26
    assert 0.01 < result.used.cpu_s < 30
