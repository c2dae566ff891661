"""llama.cpp's server in a child process, so that a file that breaks it ends the child alone."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Mapping
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from nano_shared.errors import PolicyError, UsageError
from nano_shared.process import own_python

_END_SECONDS = 5.0
"""that a child which closed its output has to end"""


class LlamaServer:
    """A model that is loaded. The child ends with this process, however that ends."""

    def __init__(self, file: Path, *, context: int, rows: int, device: str) -> None:
        """`context`: tokens of all rows together, of which `rows` are decoded at once. Raises UsageError for
        a file that llama.cpp cannot load."""
        self._file, self._log = file, tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as the child
        self._headers = {"Authorization": f"Bearer {(key := secrets.token_hex(16))}"}
        self._child = subprocess.Popen(
            own_python("-m", __name__), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
            text=True, start_new_session=True,
        )  # fmt: skip
        self._end = weakref.finalize(self, _end, self._child, self._log)
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        asked = {"path": str(file), "context": context, "rows": rows, "key": key, "cpu": device == "cpu"}
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.write(json.dumps(asked) + "\n")
            self._child.stdin.flush()
        self._address = urlsplit(self._child.stdout.readline().strip()).netloc
        if not self._address:
            raise UsageError(f"{str(file)!r} cannot be loaded: llama.cpp says: {self._problem()}")

    def post(self, body: Mapping[str, Any]) -> HTTPConnection:
        """Begin a completion; closing the connection cancels it. Raises PolicyError."""
        return self._request("POST", "/completion", json.dumps(body))

    def describe(self) -> Mapping[str, Any]:
        """What the server says of the model: n_ctx, n_vocab, ..."""
        found: Mapping[str, Any] = self.answer(self._request("GET", "/v1/models"))["data"][0]["meta"]
        return found

    def answer(self, connection: HTTPConnection) -> Any:
        """The answer on a connection. Raises PolicyError for a refusal, and for a server that ended."""
        try:
            response = connection.getresponse()
            body = json.loads(response.read())
        except (OSError, HTTPException, ValueError) as problem:
            raise self._ended(problem) from None
        finally:
            connection.close()
        if response.status != 200:
            raise PolicyError(f"llama.cpp refused: {body.get('error', {}).get('message', response.status)}")
        return body

    def close(self) -> None:
        self._end()

    def _request(self, method: str, route: str, body: str | None = None) -> HTTPConnection:
        connection = HTTPConnection(self._address)
        try:
            connection.request(method, route, body, self._headers)
        except (OSError, HTTPException) as problem:
            connection.close()
            raise self._ended(problem) from None
        return connection

    def _ended(self, problem: Exception) -> PolicyError:
        said = f"gave no answer ({problem}): {self._problem()}"
        return PolicyError(f"llama.cpp, which ran {self._file.name}, {said}")

    def _problem(self) -> str:
        """The first error of the child's log, else how it ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(_END_SECONDS)
        self._log.seek(0)
        lines = self._log.read().decode("utf-8", "replace").strip().splitlines()
        errors = [line.partition(" E ")[2] for line in lines if " E " in line]
        code = self._child.returncode
        ended = "it is still running" if code is None else f"it ended with {code}"
        return (errors or [ended if not lines else f"{lines[-1]} ({ended})"])[0][:300]


def _end(child: subprocess.Popen[str], log: IO[bytes]) -> None:
    child.kill()
    child.wait()
    for stream in (child.stdin, child.stdout, log):
        with contextlib.suppress(OSError):
            stream.close()  # type: ignore[union-attr]


def main() -> None:
    """The child: settings come as a line on stdin, the address goes to stdout; it ends when stdin does."""
    told = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the library prints
    asked = json.loads(sys.stdin.readline())

    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.api_keys = asked["path"], [asked["key"]]
    params.n_ctx, params.n_parallel, params.kv_unified = asked["context"], asked["rows"], True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = _threads()
    if asked["cpu"]:
        params.n_gpu_layers = 0
    params.cache_ram_mib = 0  # what leaves the KV cache is not kept elsewhere
    params.fit_params = params.warmup = params.ui = False
    params.verbosity = 1
    try:
        server = xllamacpp.Server(params)
    except RuntimeError:  # the log says why: its thread writes what is left when the process exits as usual
        sys.exit(1)
    print(server.listening_address, file=told, flush=True)
    sys.stdin.read()
    os._exit(0)


def _threads() -> int:
    given = os.environ.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdecimal() and int(given) else len(os.sched_getaffinity(0))


if __name__ == "__main__":
    main()
