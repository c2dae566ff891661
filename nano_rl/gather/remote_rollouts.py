"""The trainer's side of `overlap`: starts the rollout worker, sends requests, and replaces a lost worker.

Trainer and worker share a scratch folder, in memory if there is room, with the worker's config, a file for
each request, and the trained weights, which are put in place by a rename. The folder is removed when the
trainer ends; after a kill, by the next process that makes a scratch folder.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

import nano_shared
from nano_rl.gather.rollout_worker import CONFIG_FILE, RolloutRequest, WorkerConfig
from nano_shared.errors import RolloutsFailed
from nano_shared.interpreter import own_python
from nano_shared.scratch import ScratchFolder, in_memory, sweep

MODULE = "nano_rl.gather.rollout_worker"
"""the module that a worker runs"""
RESTARTS = 3
"""restarts for one request; one more lost worker ends the training"""
_STDERR_FILE = "worker.log"
_GRACE_SECONDS = 5.0
"""for an idle worker to end by itself"""


class WorkerLost(Exception):
    """A worker has ended, or sends no messages any more."""


class WorkerProcess:
    """One worker process."""

    def __init__(self, folder: Path, threads: int) -> None:
        places = dict.fromkeys(
            # nano_coder lies beside nano_rl
            str(path)
            for path in (Path(__file__).parents[2], Path(str(nano_shared.__file__)).parents[1])
        )
        path = os.pathsep.join([*places, *filter(None, [os.environ.get("PYTHONPATH")])])
        with (folder / _STDERR_FILE).open("wb") as stderr:
            self._process = subprocess.Popen(
                own_python("-m", MODULE, str(folder)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,  # Ctrl-C goes to the trainer alone, which finishes its step
                env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": str(threads)},
            )
        self._stderr = folder / _STDERR_FILE
        self._messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        threading.Thread(target=self._listen, name="nano-rollout-worker", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, name: str) -> None:
        """Send the name of a request file. A worker that has ended is detected by `answer`."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.write(name.encode() + b"\n")
            self._process.stdin.flush()

    def answer(self, patience: float) -> dict[str, Any]:
        """The next message that is no heartbeat.

        Raises WorkerLost if the worker has ended or was silent for `patience` seconds.
        """
        while True:
            try:
                line = self._messages.get(timeout=patience)
            except queue.Empty:
                raise WorkerLost(f"was silent for {patience:g} seconds") from None
            if line is None:
                raise WorkerLost(f"ended with {self._ending()}")
            message: dict[str, Any] = json.loads(line)
            if "beat" not in message:
                return message

    def stop(self) -> None:
        """End an idle worker, which closes its jails first."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE_SECONDS)
        self.kill()

    def kill(self) -> None:
        """Kill the worker and its jails, and remove the scratch folders that they leave."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            with suppress(OSError, AttributeError):
                stream.close()  # type: ignore[union-attr]
        for parent in {tempfile.gettempdir(), in_memory()} - {None}:
            sweep(str(parent))

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with suppress(OSError, ValueError):  # the stream was closed by `kill`
            for line in self._process.stdout:
                self._messages.put(line)
        self._messages.put(None)

    def _ending(self) -> str:
        """Its exit code or signal, and the last line of its stderr."""
        code = self._process.wait()
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        last = self._stderr.read_text(errors="replace").strip().splitlines()[-1:]
        return how + "".join(f" ({line})" for line in last)


class RemoteRollouts:
    """Sends one request at a time to a worker. Not thread-safe.

    A lost worker is replaced, and the new one gets the same request: the same tasks and seed give the same
    rollouts. Runs of the lost worker stay in the log and are not used.
    """

    def __init__(
        self, config: WorkerConfig, *, threads: int, patience: float, on_restart: Callable[[str], None]
    ) -> None:
        """A worker that is silent for `patience` seconds is lost; `on_restart` is called with the reason."""
        self._config, self._threads, self._patience = config, threads, patience
        self._on_restart = on_restart
        self._scratch: ScratchFolder | None = None
        self._worker: WorkerProcess | None = None
        self._request: str | None = None
        self._sent = 0
        self._published: tuple[int, Path, dict[str, Tensor]] | None = None
        self.restarts = 0
        """number of workers that were replaced"""
        self.scored: list[float] | None = None
        """log-probs of the probe of the last request, from the worker"""

    @property
    def under_way(self) -> bool:
        """True if a request was submitted and its answer not yet taken."""
        return self._request is not None

    @property
    def pid(self) -> int | None:
        """Process id of the worker; None if none is running."""
        return self._worker.pid if self._worker else None

    def publish(self, weights: Mapping[str, Tensor], version: int) -> dict[str, Tensor]:
        """Write the weights of a version to the shared folder, replacing the previous ones; returns them as
        read back from the file."""
        if self._published is not None and self._published[0] == version:
            return self._published[2]
        from safetensors.torch import load_file, save_file

        path = self._folder / f"weights-{version}.safetensors"
        partial = path.with_suffix(".partial")
        save_file({name: value.detach().cpu().contiguous() for name, value in weights.items()}, str(partial))
        partial.replace(path)
        if self._published is not None:
            self._published[1].unlink()
        self._published = version, path, load_file(str(path))
        return self._published[2]

    def weights_file(self) -> str:
        """Path of the weights that were published last."""
        assert self._published is not None
        return str(self._published[1])

    def submit(self, request: RolloutRequest) -> None:
        """Send a request; starts a worker if none is running."""
        assert self._request is None
        self._sent += 1
        self._request = f"request-{self._sent}.json"
        self._write(self._request, request.model_dump_json())
        self._send()

    def take(self) -> list[str]:
        """Wait for the request to be served; returns the ids of its runs, which are in the log.

        Raises RolloutsFailed if the worker failed, or too many workers were lost.
        """
        assert self._request is not None
        assert self._worker is not None
        lost = 0
        while True:
            try:
                answer = self._worker.answer(self._patience)
            except WorkerLost as problem:
                lost += 1
                self._replace(str(problem), lost)
                continue
            if "failed" in answer:
                raise RolloutsFailed(answer["failed"], answer["exit_code"])
            (self._folder / self._request).unlink()
            self._request = None
            runs: list[str] = answer["done"]
            self.scored = answer["scored"]
            return runs

    def close(self) -> None:
        """End the worker and remove the shared folder. Idempotent."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.kill() if self.under_way else worker.stop()
        self._request = None
        scratch, self._scratch = self._scratch, None
        if scratch is not None:
            scratch.remove()

    @property
    def _folder(self) -> Path:
        if self._scratch is None:
            self._scratch = ScratchFolder("rollouts", in_memory())
            self._write(CONFIG_FILE, self._config.model_dump_json())
        return self._scratch.path

    def _replace(self, problem: str, lost: int) -> None:
        assert self._worker is not None
        self._worker.kill()
        self._worker = None
        if lost > RESTARTS:
            raise RolloutsFailed(
                f"the rollout worker {problem}, as did {RESTARTS} before it in this step; train without"
                " --async, which rolls out in one process, or give a longer --heartbeat-seconds where it"
                " was only slow; the same command goes on from the last saved state"
            )
        self.restarts += 1
        self._on_restart(f"the rollout worker {problem}; another one rolls out the same tasks")
        self._send()

    def _send(self) -> None:
        assert self._request is not None
        folder = self._folder
        if self._worker is None:
            self._worker = WorkerProcess(folder, self._threads)
        self._worker.send(self._request)

    def _write(self, name: str, text: str) -> None:
        assert self._scratch is not None
        (self._scratch.path / name).write_text(text, encoding="utf-8")
