"""A server of `nano-coder serve` or of vLLM in a process of its own, at a port that stays over restarts."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import httpx

KEY = secrets.token_hex(8)
"""may load adapters into a server of ours"""
START_SECONDS = 3600.0
_VLLM = {
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "auto", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1", "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "3600",
}  # fmt: skip
_VLLM_ARGUMENTS = (
    "--max-num-seqs", "16", "--enable-lora", "--max-lora-rank", "16", "--max-loras", "2",
    "--max-cpu-loras", "8", "--enforce-eager",
)  # fmt: skip


class EngineProcess:
    """One server. Ends with the block."""

    program = "from nano_coder.cli import main; main()"
    """of our server"""

    def __init__(self, home: Path, number: int = 0, vllm: str | None = None) -> None:
        """`home` gets its log; `vllm` is the Python of an environment with vLLM, in place of our server."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/v1"
        self.log = home / f"server-{number}.log"
        self._home, self._vllm = home / f"server-{number}", vllm
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def is_vllm(self) -> bool:
        return self._vllm is not None

    def start(self, model: Path | None, *more: str, dtype: str = "float32", positions: int = 512) -> float:
        """Serve that folder, or what `more` arguments name, and of vLLM a context of so many tokens. Returns
        the seconds until it answers. Raises SystemExit if it does not."""
        began = time.monotonic()
        base = ["--host", "127.0.0.1", "--port", str(self.port)]
        if model:
            base += [
                "--model",
                str(model),
                *(["--dtype", dtype] if self._vllm else ["--set", f"dtype={dtype}"]),
            ]
        variables = {**os.environ, "NANO_HOME": str(self._home), "NANO_SERVE_ADMIN_KEY": KEY}
        command = [sys.executable, "-c", self.program, "serve", *base, *more]
        if self._vllm:
            command = [self._vllm, "-m", "vllm.entrypoints.openai.api_server", *base, *_VLLM_ARGUMENTS]
            command += ["--max-model-len", str(positions), *more]
            variables = _without_ours(variables) | _VLLM
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command, env=variables, stdout=log, stderr=log, start_new_session=True
            )
        self._wait()
        return time.monotonic() - began

    def kill(self) -> None:
        """SIGKILL to it and its workers."""
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None

    def freeze(self) -> None:
        """SIGSTOP: its connections stay open, and nothing is answered."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, number)

    def _wait(self) -> None:
        until = time.monotonic() + START_SECONDS
        assert self._process is not None
        while time.monotonic() < until and self._process.poll() is None:
            with suppress(httpx.HTTPError):
                if httpx.get(f"http://127.0.0.1:{self.port}/health").is_success:
                    return
            time.sleep(0.2)
        raise SystemExit(f"no server at {self.url}; the end of its log:\n{self.log.read_text()[-4000:]}")


def _without_ours(variables: Mapping[str, str]) -> dict[str, str]:
    """An environment whose Python finds none of our packages."""
    return {name: value for name, value in variables.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
