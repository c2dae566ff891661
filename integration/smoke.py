"""`--smoke` of the scripts beside this file: the smallest true instance of each, in seconds.

    python integration/smoke.py [NAME ...]     those scripts, or all, one after the other; a JSON line each

Importing torch takes longer than most instances. So this process imports it once and is forked for each
script, and commands of ours which a script starts are forks too: real processes, with their own environment.
"""

from __future__ import annotations

import argparse
import atexit
import importlib
import json
import os
import runpy
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from io import BytesIO
from pathlib import Path
from typing import Any, NoReturn

HERE = Path(__file__).parent
CANNOT = "cannot be tried here: "
TOY = "toy==1.0"
_TOY_FILES = {
    "setup.py": "from setuptools import setup\nsetup(name='toy', version='1.0', py_modules=['toy'])\n",
    "toy.py": "def clamp(value, low, high):\n    \"\"\"The value, at least `low` and at most `high`.\"\"\"\n"
    "    if value < low:\n        return low\n    if value > high:\n        return high\n    return value\n",
    "PKG-INFO": "Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n",
    "tests/test_toy.py": "from toy import clamp\n\n\ndef test_clamp():\n    assert clamp(1, 2, 4) == 2\n"
    "    assert clamp(5, 2, 4) == 4\n    assert clamp(3, 2, 4) == 3\n    assert clamp(2, 2, 4) == 2\n",
}  # fmt: skip
_LOADED = ("peft", "transformers.models.llama.modeling_llama", "nano_rl.train", "nano_rl.commands.train",
           "nano_rl.commands.sft", "nano_rl.commands.eval", "nano_apis.command")  # fmt: skip


def parse(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None, **smallest: Any
) -> argparse.Namespace:
    """The options; `--smoke` needs no other, and sets `smallest` and a folder that is gone afterwards."""
    parser.add_argument("--smoke", action="store_true", help="the smallest true instance, in seconds")
    given = sys.argv[1:] if arguments is None else arguments
    if "--smoke" in given:
        parts: list[Any] = [*parser._actions, *parser._mutually_exclusive_groups]
        for part in parts:
            part.required = False
        for name in {action.dest for action in parser._actions} & {"out", "work"} - smallest.keys():
            smallest[name] = Path(tempfile.mkdtemp(prefix="nano-smoke-"))
            atexit.register(shutil.rmtree, smallest[name], ignore_errors=True)
        parser.set_defaults(**smallest)
    return parser.parse_args(given)


def toy_package(folder: Path) -> Path:
    """A source distribution of one function and its tests, where a script would have downloaded one."""
    folder.mkdir(parents=True, exist_ok=True)
    archive = folder / "toy-1.0.tar.gz"
    with tarfile.open(archive, "w:gz") as opened:
        for path, text in _TOY_FILES.items():
            entry = tarfile.TarInfo(f"toy-1.0/{path}")
            entry.size = len(text.encode())
            opened.addfile(entry, BytesIO(text.encode()))
    return archive


class _Forking(subprocess.Popen):  # type: ignore[type-arg]
    """Forks this process for commands of ours, which then need not import what it has imported."""

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any,
                       cwd: Any, env: Any, *rest: Any) -> None:  # fmt: skip
        command = _own([os.fspath(part) for part in args]) if isinstance(args, list | tuple) else None
        if command is None:
            super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest)  # type: ignore
            return
        pipes, session = rest[3:9], rest[-2]
        self.pid = os.fork()
        if self.pid == 0:
            for inner, place in zip((pipes[0], pipes[3], pipes[5]), range(3), strict=True):
                if inner != -1:
                    os.dup2(inner, place)
            os.closerange(3, 4096)
            if session:
                os.setsid()
            if cwd is not None:
                os.chdir(cwd)
            _become(command, env)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def _own(words: list[str]) -> Callable[[], object] | None:
    """What a command of ours runs, with `sys.argv` as it is to be; None for a command of others."""
    program, *rest = words
    if Path(program).name in ("nano-rl", "nano-coder"):
        module = Path(program).name.replace("-", "_")
        return _with([program, *rest], lambda: importlib.import_module(f"{module}.cli").main())
    if rest[:1] == ["-u"]:  # torchrun's workers
        rest = rest[1:]
    if program != sys.executable or not rest:
        return None
    if rest[0] == "-m" and rest[1] in ("nano_rl", "torch.distributed.run"):
        return _with(rest[1:], lambda: runpy.run_module(rest[1], run_name="__main__", alter_sys=True))
    if rest[0] == "-c" and "nano_coder.cli" in rest[1]:
        return _with(["-c", *rest[2:]], lambda: exec(rest[1], {"__name__": "__main__"}))
    if Path(rest[0]).resolve().parent == HERE:
        return _with(rest, lambda: runpy.run_path(rest[0], run_name="__main__"))
    return None


def _with(argv: list[str], main: Callable[[], object]) -> Callable[[], object]:
    def run() -> object:
        sys.argv = argv
        return main()

    return run


def _become(command: Callable[[], object], env: dict[str, str] | None = None) -> NoReturn:
    """Run the command as this process, and end it as an interpreter would."""
    code: object = 1
    try:
        if env is not None:
            os.environ.clear()
            os.environ.update(env)
            sys.path[:0] = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
        sys.stdout = os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", closefd=False)
        command()
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    if isinstance(code, str):
        print(code, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def scripts() -> list[str]:
    """The scripts that can be tried; the other files are parts of theirs."""
    return [one.stem for one in sorted(HERE.glob("*.py")) if "\nfrom smoke import" in one.read_text("utf-8")]


def tried(name: str, folder: Path) -> dict[str, Any]:
    """How the script ended, what it said last, and the seconds of processor that it and its commands took."""
    said, began = folder / f"{name}.txt", time.monotonic()
    path = HERE / f"{name}.py"
    child = os.fork()
    if child == 0:
        with said.open("wb") as out:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
        os.environ["NANO_HOME"] = str(folder / f"home-{name}")
        _become(_with([str(path), "--smoke"], lambda: runpy.run_path(str(path), run_name="__main__")))
    _, status, usage = os.wait4(child, 0)
    return {
        "script": name, "code": os.waitstatus_to_exitcode(status),
        "seconds": round(time.monotonic() - began, 1),
        "cpu": round(usage.ru_utime + usage.ru_stime, 1), "said": said.read_text(errors="replace")[-1500:],
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description="The smallest true instance of each script.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="all of them, unless given")
    names = parser.parse_args().names or scripts()
    if unknown := set(names).difference(scripts()):
        parser.error(f"no script {', '.join(sorted(unknown))}; there are {', '.join(scripts())}")
    sys.path.insert(0, str(HERE))
    sys.path.insert(0, str(HERE.parent))
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads would not survive a fork
    for module in _LOADED:
        importlib.import_module(module)
    subprocess.Popen = _Forking  # type: ignore[misc]
    failed = 0
    with tempfile.TemporaryDirectory(prefix="nano-smoke-") as folder:
        tempfile.tempdir = folder
        with redirect_stdout(sys.stderr):
            importlib.import_module("log_arms").prepare_smokes(Path(folder))
        for name in names:
            result = tried(name, Path(folder))
            failed += result["code"] != 0
            print(json.dumps(result), flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
