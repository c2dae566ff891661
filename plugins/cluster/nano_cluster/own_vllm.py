"""vLLM as the engine of a training on one machine: started with it, watched, and ended with it.

Its process is the child of a supervisor, which starts it again when it ends, and ends it when the trainer has
ended.
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx

from nano_coder.models.opening import OpenedWeights
from nano_rl.config import TrainConfig, vllm_python
from nano_shared.errors import CheckpointError, UsageError
from nano_shared.files import durable_folder
from nano_shared.process import own_python

MORE = "NANO_VLLM_ARGS"
"""environment variable with further arguments of vLLM's server, which override those of `command`"""
START_SECONDS = 1800.0
"""that vLLM may take to load a model and to compile"""
_STARTS = 5
_PAUSE = 1.0
"""seconds before it is started again"""
_END_SECONDS = 10.0
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""largest ranks of adapters that vLLM can be set to"""


class OwnVllm:
    """A vLLM server that holds the base of the trained adapter. Ends with `close`."""

    def __init__(
        self, engine: str, opened: OpenedWeights, config: TrainConfig, folder: Path,
        on_change: Callable[[str], None],
    ) -> None:  # fmt: skip
        """`engine`: vllm:PYTHON, the interpreter of an environment with vLLM, or vllm, this one. `folder`
        gets `vllm.log`, and the base if no folder holds it alone. Waits until it answers. Raises UsageError
        for an interpreter that is not there, and for a server that ended instead."""
        python = vllm_python(engine)
        self.key = secrets.token_hex(16)
        self.log = folder / "vllm.log"
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}/v1"
        folder.mkdir(parents=True, exist_ok=True)
        base = _base_folder(opened, folder / "base")
        on_change(f"vLLM starts; what it says is in {self.log}")
        asked = {"command": command(python, base, port, opened, config), "log": str(self.log)}
        self._supervisor = subprocess.Popen(
            own_python("-m", __name__, json.dumps(asked)), stdin=subprocess.PIPE,
            env={**os.environ, "VLLM_API_KEY": self.key}, start_new_session=True,
        )  # fmt: skip
        with ExitStack() as failed:
            failed.callback(self.close)
            self._wait(python)
            failed.pop_all()

    def ended(self) -> bool:
        """Whether it has ended for good: it was started often enough, or nobody is left to start it."""
        return self._supervisor.poll() is not None

    def close(self) -> None:
        """End it; returns when it has."""
        assert self._supervisor.stdin is not None
        with suppress(OSError):
            self._supervisor.stdin.close()
        self._supervisor.wait()

    def _wait(self, python: str) -> None:
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until:
            with suppress(httpx.HTTPError):
                if httpx.get(f"{self.url.removesuffix('/v1')}/health", timeout=5).is_success:
                    return
            if self._supervisor.poll() is not None:
                lines = self.log.read_text(errors="replace").strip().splitlines()
                said = next((line for line in reversed(lines) if "Error" in line), lines[-1] if lines else "")
                raise UsageError(f"{python} -m vllm ended before it answered: {said[:300]} ({self.log})")
            time.sleep(0.2)
        raise UsageError(f"{python} -m vllm did not answer within {START_SECONDS:.0f} s ({self.log})")


def command(python: str, base: Path, port: int, opened: OpenedWeights, config: TrainConfig) -> list[str]:
    """vLLM's server of the folder `base` on loopback, by its module: the CPU build has no `vllm serve`."""
    rank = next((rank for rank in _RANKS if rank >= config.lora_rank), _RANKS[-1])
    rows = min(256, max(16, config.prompts_per_step * max(config.group_size, 1)))
    arguments: dict[str, object] = {
        "host": "127.0.0.1", "port": port, "model": base, "dtype": config.dtype,
        "max-model-len": opened.loaded.context_limit, "max-num-seqs": rows,
        "max-lora-rank": rank, "max-loras": 2, "max-cpu-loras": 8,
    }  # fmt: skip
    flags = ["--enable-lora"]
    if opened.loaded.model.device.type == "cpu":  # type: ignore[union-attr]
        flags.append("--enforce-eager")
    else:  # the trainer's weights are on the same card
        arguments["gpu-memory-utilization"] = 0.4
    words = [word for name, value in arguments.items() for word in (f"--{name}", str(value))]
    more = shlex.split(os.environ.get(MORE, ""))
    return [python, "-m", "vllm.entrypoints.openai.api_server", *words, *flags, *more]


def _environment(ours: Mapping[str, str]) -> dict[str, str]:
    """Ours, without what would show its Python our packages; variables that are set override our defaults."""
    left = {name: value for name, value in ours.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    defaults = {
        "VLLM_CPU_OMP_THREADS_BIND": "auto", "VLLM_HOST_IP": "127.0.0.1", "VLLM_NO_USAGE_STATS": "1",
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "3600", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    return defaults | left | {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}


def _base_folder(opened: OpenedWeights, target: Path) -> Path:
    """A folder with the weights below the adapter: the model's own, or `target`, once."""
    loaded: Any = opened.loaded
    if loaded.kind == "full" and loaded.path is not None:
        return Path(loaded.path).resolve()
    if not target.exists():
        base = loaded.model.get_base_model()
        state = {
            name.replace(".base_layer.", "."): value
            for name, value in base.state_dict().items() if "lora_" not in name
        }  # fmt: skip
        with durable_folder(target, CheckpointError) as folder:
            base.save_pretrained(folder, state_dict=state)
            loaded.tokenizer.save_pretrained(folder)
    return target.resolve()


def main() -> None:
    """The supervisor: what to run comes as its argument; the trainer holds its stdin open."""
    asked = json.loads(sys.argv[1])
    gone = threading.Event()
    child: subprocess.Popen[bytes] | None = None

    def wait_for_trainer() -> None:
        sys.stdin.buffer.read()
        gone.set()
        if child is not None:
            _end(child)

    threading.Thread(target=wait_for_trainer, daemon=True).start()
    for start in range(_STARTS):
        with Path(asked["log"]).open("ab") as log:
            child = subprocess.Popen(
                asked["command"], stdout=log, stderr=log, env=_environment(os.environ), start_new_session=True
            )
        began = time.monotonic()
        if gone.is_set():  # the trainer ended while this was started
            _end(child)
        child.wait()
        _end(child)  # its workers
        if gone.wait(_PAUSE) or (start == 0 and time.monotonic() - began < _END_SECONDS):
            break


def _end(child: subprocess.Popen[bytes]) -> None:
    """SIGTERM to it and its workers, and SIGKILL to those that stay."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        with suppress(subprocess.TimeoutExpired):
            child.wait(_END_SECONDS)


if __name__ == "__main__":
    main()
