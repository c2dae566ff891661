"""Commands of nano in forks of one process that has imported their modules.

Each command is a process of its own, with its own arguments, environment, directory and streams; only the
second that a fresh interpreter spends on imports is saved. What depends on the start of an interpreter (light
imports, PYTHON* variables, -P) is tested with a fresh one.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

_SERVER = """
import atexit, gc, importlib, json, os, resource, socket, sys, tempfile, threading, traceback

link = socket.socket(fileno=int(sys.argv[1]))
for name in sys.argv[2:]:
    importlib.import_module(name)
sys.modules["empty_log"].empty_log()
sys.modules["nano_shared.extension_points"]._entry_points()
gc.freeze()
while True:
    request, fds, _, _ = socket.recv_fds(link, 1 << 20, 3)
    if not request:
        os._exit(0)
    if os.fork() == 0:
        break
    for fd in fds:
        os.close(fd)
    link.send(str(os.waitstatus_to_exitcode(os.wait()[1])).encode())
link.close()
for number, fd in enumerate(fds):
    os.dup2(fd, number)
    os.close(fd)
wanted = json.loads(request)
os.environ.clear()
os.environ.update(wanted["env"])
os.chdir(wanted["cwd"])
if wanted["file_size"]:
    resource.setrlimit(resource.RLIMIT_FSIZE, (wanted["file_size"],) * 2)
sys.argv = [wanted["program"], *wanted["argv"]]
tempfile.tempdir = None
sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)
sys.stdout = open(1, "w", encoding="utf-8", errors="surrogateescape", closefd=False)
sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)
main = importlib.import_module(wanted["program"].replace("-", "_") + ".cli").main
try:
    code = main()
except SystemExit as end:
    code = end.code
except BaseException:
    traceback.print_exc()
    code = 1
if not isinstance(code, int):
    print(*filter(None, [code]), end="\\n" * bool(code), file=sys.stderr)
    code = int(bool(code))
threading._shutdown()
atexit._run_exitfuncs()
sys.stdout.flush()
sys.stderr.flush()
os._exit(code & 0xFF)  # taking the modules apart would take longer than most commands
"""
_IMPORTED = (
    "nano_coder.commands.changes", "nano_coder.commands.config", "nano_jails.exec",
    "nano_coder.commands.log", "nano_coder.commands.run",
    "nano_coder.agent.profiles", "nano_coder.grading.grade", "nano_coder.models.endpoint.policy",
    "nano_coder.models.opening", "nano_coder.run.execution", "nano_coder.config",
    "nano_coder.sandbox.namespaces", "nano_rl.commands.rollout",
    # what these import where it is used
    "alembic.command", "alembic.config", "anyio", "certifi", "httpcore", "nano_coder.cli", "nano_rl.cli",
    "encodings.idna", "nano_coder.commands.resume", "rich.markdown", "sqlalchemy.dialects.sqlite",
    "empty_log",
)  # fmt: skip


def run(
    program: str, *argv: str, env: Mapping[str, str], cwd: Path | str, given: str = "", file_size: int = 0
) -> subprocess.CompletedProcess[str]:
    """Run `program` (nano-coder or nano-rl) to its end, with the text `given` as its standard input; with a
    `file_size` it writes no file of more bytes."""
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        stdin.write(given.encode())
        stdin.seek(0)
        fds = [file.fileno() for file in (stdin, out, err)]
        code = begin(program, *argv, env=env, cwd=cwd, fds=fds, file_size=file_size)()
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode("utf-8", "strict").replace("\r\n", "\n"))
    return subprocess.CompletedProcess([program, *argv], code, *texts)


def begin(
    program: str, *argv: str, env: Mapping[str, str], cwd: Path | str, fds: Sequence[int], file_size: int = 0
) -> Callable[[], int]:
    """Start `program` with its three streams; what is returned waits for its exit code. One at a time."""
    request = {"program": program, "argv": argv, "env": dict(env), "cwd": str(cwd), "file_size": file_size}
    link, _ = _server(os.getpid())
    socket.send_fds(link, [json.dumps(request).encode()], fds)
    return lambda: int(link.recv(100))


@cache
def _server(process: int) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """The server of a test process, and the socket to it; the server ends with the process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    path = os.pathsep.join(p for p in sys.path if p)
    with theirs:
        server = subprocess.Popen(
            [sys.executable, "-c", _SERVER, str(theirs.fileno()), *_IMPORTED],
            pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
    return ours, server
