"""Code of users while it runs: its prints, its numbers, its event loop, what raised, and what hangs."""

from __future__ import annotations

import ast
import asyncio
import json
import math
import subprocess
import sys
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from nano_shared import extension_points
from nano_shared.errors import ConfigError, UsageError
from nano_shared.extension_points import call_extension, read_number, source_hash, source_hashes, user_module

ROOT = Path(__file__).parents[2]
FUNCTIONS = """
import asyncio, time

one_at_a_time = asyncio.Semaphore(1)

async def guarded(text):
    async with one_at_a_time:
        await asyncio.sleep(0.001)
        return len(text)

async def lengths(texts):
    return await asyncio.gather(*map(guarded, texts))

async def leaves():
    raise SystemExit(3)

def fails(text):
    return int(text)

async def stops():
    asyncio.get_running_loop().stop()
    await asyncio.sleep(0.001)
    return 1

def waits():
    time.sleep(60)
"""


@pytest.fixture
def functions(tmp_path: Path) -> object:
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    return user_module(f"{tmp_path}/mine.py")


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (0.5, 0.5),
        (True, 1.0),
        (Decimal("0.25"), 0.25),
        (Fraction(1, 4), 0.25),
        (np.float32(0.5), 0.5),
        (np.int64(1), 1.0),
        (np.bool_(True), 1.0),
        (np.array(0.5), 0.5),
        (np.array([0.5]), 0.5),
        (math.inf, math.inf),
        ("0.5", None),
        (np.str_("0.5"), None),
        (b"1", None),
        (None, None),
        ([0.5], None),
        (1j, None),
        (np.array([0.5, 1.0]), None),
    ],
)
def test_a_number_of_any_library_is_read_and_text_is_none(given: object, read: float | None) -> None:
    assert read_number(given) == read


def test_one_event_loop_runs_all_calls(functions: object) -> None:
    for texts in (["a", "bb"], ["ccc", "d", "ee"]):
        called = call_extension(functions.lengths, texts, name="lengths")  # type: ignore[attr-defined]
        assert called == list(map(len, texts))
    with pytest.raises(ConfigError, match="lengths raised SystemExit: 3"):
        call_extension(functions.leaves, name="lengths")  # type: ignore[attr-defined]
    assert call_extension(functions.stops, name="stops") == 1  # type: ignore[attr-defined]
    assert call_extension(functions.lengths, ["a"], name="lengths") == [1]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "raised", ["GeneratorExit", "BaseException", "asyncio.CancelledError", "pytest.fail"]
)
def test_no_exception_of_users_comes_through_whole(raised: str, tmp_path: Path) -> None:
    """Some libraries' exceptions are no `Exception`, those of `pytest.fail` for instance."""
    code = f"raise {raised}('no')" if raised != "pytest.fail" else "pytest.fail('no')"
    (tmp_path / "f.py").write_text(f"import asyncio, pytest\ndef f(): {code}\nasync def g(): {code}\n")
    module = user_module(f"{tmp_path}/f.py")
    for function in (module.f, module.g):
        with pytest.raises(UsageError, match=r"^mine raised "):
            call_extension(function, name="mine", error=UsageError)
    (tmp_path / "top.py").write_text(f"import asyncio, pytest\n{code}\n")
    with pytest.raises(ConfigError, match=r"at import \(.*top\.py, line 2\)$"):
        user_module(f"{tmp_path}/top.py")


@pytest.mark.parametrize(
    "leaves",
    [
        "os.chdir('/')",
        "os.chdir(d := tempfile.mkdtemp()); os.rmdir(d)",
        "sys.stdout = None",
        "sys.stderr = io.StringIO()",
    ],
)
def test_code_of_users_leaves_folder_and_streams_as_they_were(
    leaves: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = (sys.stdout, sys.stderr)
    Path("moves.py").write_text(f"import io, os, sys, tempfile\n{leaves}\ndef f():\n    {leaves}\n")
    module = user_module("moves.py")
    assert (Path.cwd(), sys.stdout, sys.stderr) == (tmp_path, *before)
    call_extension(module.f, name="moves")
    assert (Path.cwd(), sys.stdout, sys.stderr) == (tmp_path, *before)


def test_what_raises_is_named_with_file_and_line(functions: object, tmp_path: Path) -> None:
    line = FUNCTIONS.splitlines().index("    return int(text)") + 1
    with pytest.raises(
        UsageError, match=rf"^mine raised ValueError: .*\({tmp_path}/mine\.py, line {line}\)$"
    ):
        call_extension(functions.fails, "x", name="mine", error=UsageError)  # type: ignore[attr-defined]
    (tmp_path / "broken.py").write_text("import json\n\njson.loads('{')\n")
    with pytest.raises(ConfigError, match=r"JSONDecodeError: .* at import \(.*broken\.py, line 3\)$"):
        user_module(f"{tmp_path}/broken.py")
    (tmp_path / "lacking.py").write_text("import no_such_module\n")
    with pytest.raises(ConfigError, match=r"cannot import no_such_module: .*lacking\.py, line 1\)"):
        user_module(f"{tmp_path}/lacking.py")
    (tmp_path / "worse.py").write_text("x = (\n")
    with pytest.raises(ConfigError, match=r"SyntaxError: .*worse\.py, line 1"):
        user_module(f"{tmp_path}/worse.py")


def test_a_call_that_takes_long_is_named_and_a_deadline_ends_the_wait(
    functions: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(extension_points, "PATIENCE", 0.01)
    with pytest.raises(TimeoutError):
        call_extension(functions.waits, name="mine.py:waits", seconds=1.5)  # type: ignore[attr-defined]
    said = capsys.readouterr().err
    assert "nano: mine.py:waits has been running for" in said


def test_a_source_is_hashed_when_it_is_imported(functions: object, tmp_path: Path) -> None:
    file = str(tmp_path / "mine.py")
    before = source_hashes()[file]
    (tmp_path / "mine.py").write_text("")
    assert source_hash(functions.fails) == before == source_hashes()[file]  # type: ignore[attr-defined]
    assert source_hash(asyncio.run) is None


PRINTS = """
import os, sys, threading, time
from nano_shared.command_line import as_command, lazy_app, run_command, JsonOption
from nano_shared.extension_points import call_extension

def users():
    print("USER")
    thread = threading.Thread(target=print, args=("THREAD",))
    thread.start(); thread.join()
    os.system("echo PROGRAM")

def hangs():
    try:
        time.sleep(60)
    finally:
        print("ENDED", file=sys.stderr)

def command(hang: bool = False, as_json: JsonOption = False) -> int:
    call_extension(hangs if hang else users, name="mine")
    print('{"ours": 1}')
    return 0

commands = {"show": ("__main__:command", "Show."), "list": ("__main__:command", "List.")}
app = lazy_app("program", commands, help="x")
run_command(app)
"""


def test_stdout_holds_what_is_ours_whatever_a_users_function_prints() -> None:
    asked = [sys.executable, "-c", PRINTS, "show"]
    done = subprocess.run([*asked, "--json"], capture_output=True, text=True, check=False)
    assert json.loads(done.stdout) == {"ours": 1}, done.stderr
    assert all(word in done.stderr for word in ("USER", "THREAD", "PROGRAM"))
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    assert "USER" not in done.stdout
    assert "USER" in done.stderr


LEAVES = """
import os, signal, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from nano_shared import command_line, extension_points
from nano_shared.extension_points import call_extension

extension_points.GRACE = 0.2
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it

def hangs():
    time.sleep(60)

with command_line.interrupted_in_time(), ThreadPoolExecutor(1) as pool:
    future = pool.submit(lambda: call_extension(hangs, name="mine.py:hangs"))
    while not extension_points._calls:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)
    future.result()
"""


def test_ctrl_c_does_not_wait_for_a_function_that_hangs_in_a_thread() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LEAVES], capture_output=True, text=True, check=False, timeout=50
    )
    assert done.returncode in (130, -2), done.stderr  # -2: KeyboardInterrupt reached the end
    assert "mine.py:hangs is still running 0.2 s later, and is not waited for" in done.stderr


def test_files_of_users_are_imported_in_one_place() -> None:
    ours = [
        path
        for folder in ("nano_coder", "nano_rl", "shared/nano_shared")
        for path in (ROOT / folder).rglob("*.py")
        if "inside" not in path.parts
    ]
    found = {
        path.relative_to(ROOT).as_posix()
        for path in ours
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ("exec_module", "spec_from_file_location")
    }
    assert found == {"shared/nano_shared/extension_points.py"}
