"""Rollouts in a process of their own: weights published, requests told, a worker that dies replaced.

Both sides share a scratch folder, in memory where there is room: the opening, a file for each request, and
the trained weights, which are put in place by a rename. Nothing of it is left when the trainer ends; where it
was killed, the worker dies with it and the next process that makes a scratch folder removes this one.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

import nano_shared
from nano_rl.gather.overlap.rollout_request import OPENING, Opening, RolloutRequest
from nano_shared.errors import RolloutsFailed
from nano_shared.scratch import ScratchFolder, in_memory, sweep

MODULE = "nano_rl.gather.overlap.rollout_worker"
"""what a worker runs"""
RESTARTS = 3
"""in a row, of one request; a worker that dies once more ends the training"""
_LAST_WORDS = "worker.log"
_GRACE_SECONDS = 5.0
"""for a worker without work to leave by itself"""


class Lost(Exception):
    """A worker is gone, or says nothing any more."""


class WorkerProcess:
    """One worker, from its start to its end."""

    def __init__(self, folder: Path, threads: int) -> None:
        places = dict.fromkeys(
            # nano_coder lies beside nano_rl
            str(path)
            for path in (Path(__file__).parents[3], Path(str(nano_shared.__file__)).parents[1])
        )
        path = os.pathsep.join([*places, *filter(None, [os.environ.get("PYTHONPATH")])])
        with (folder / _LAST_WORDS).open("wb") as words:
            self._process = subprocess.Popen(
                # -P: the folder that the user stands in may hold modules of any name
                [sys.executable, "-P", "-m", MODULE, str(folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=words,
                start_new_session=True,  # Ctrl-C is the trainer's, which finishes its step first
                env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": str(threads)},
            )
        self._words = folder / _LAST_WORDS
        self._heard: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        threading.Thread(target=self._listen, name="nano-rollout-worker", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, name: str) -> None:
        """Name the file of a request. A worker that is gone is noticed when it is listened to."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.write(name.encode() + b"\n")
            self._process.stdin.flush()

    def answer(self, patience: float) -> dict[str, Any]:
        """What it says beside its beats. Raises Lost where it ended, or was silent for `patience` seconds."""
        while True:
            try:
                line = self._heard.get(timeout=patience)
            except queue.Empty:
                raise Lost(f"was silent for {patience:g} seconds") from None
            if line is None:
                raise Lost(f"ended with {self._ending()}")
            message: dict[str, Any] = json.loads(line)
            if "beat" not in message:
                return message

    def leave(self) -> None:
        """End it, which has no work: it closes its jails and goes."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE_SECONDS)
        self.kill()

    def kill(self) -> None:
        """End it at once. Its jails die with it; what they leave on the disk is nobody's, and removed."""
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
        with suppress(OSError, ValueError):  # closed under us
            for line in self._process.stdout:
                self._heard.put(line)
        self._heard.put(None)

    def _ending(self) -> str:
        """Its exit code, or the signal it died of, and the last line that it wrote."""
        code = self._process.wait()
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        last = self._words.read_text(errors="replace").strip().splitlines()[-1:]
        return how + "".join(f" ({line})" for line in last)


class RemoteRollouts:
    """One request at a time, whichever worker serves it. Not thread-safe.

    A worker that dies or falls silent is replaced by another, which gets the same request: the same tasks and
    the same seed give the same rollouts. Runs of the one that was lost stay in the log and are not used.
    """

    def __init__(
        self, opening: Opening, *, threads: int, patience: float, on_restart: Callable[[str], None]
    ) -> None:
        """`patience` is in seconds of silence; `on_restart` hears why a worker is replaced."""
        self._opening, self._threads, self._patience = opening, threads, patience
        self._on_restart = on_restart
        self._scratch: ScratchFolder | None = None
        self._worker: WorkerProcess | None = None
        self._asked: str | None = None
        self._requests = 0
        self._published: tuple[int, Path, dict[str, Tensor]] | None = None
        self.restarts = 0
        """workers that were replaced"""
        self.scored: list[float] | None = None
        """log-probs of the last request's probe, by the policy that sampled its runs"""

    @property
    def under_way(self) -> bool:
        """Whether a request was submitted whose answer was not taken."""
        return self._asked is not None

    @property
    def pid(self) -> int | None:
        """Of the worker, while there is one."""
        return self._worker.pid if self._worker else None

    def publish(self, weights: Mapping[str, Tensor], version: int) -> dict[str, Tensor]:
        """Write the weights of a version, in place of the one before; the same, as they rest in that file."""
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
        """Of the version that was published last."""
        assert self._published is not None
        return str(self._published[1])

    def submit(self, request: RolloutRequest) -> None:
        """Have it rolled out; the worker is started where there is none."""
        assert self._asked is None
        self._requests += 1
        self._asked = f"request-{self._requests}.json"
        self._write(self._asked, request.model_dump_json())
        self._tell()

    def take(self) -> list[str]:
        """Wait for the ids of the runs that were asked for, which are in the log.

        Raises RolloutsFailed where a request cannot be served, or no worker lives to serve it.
        """
        assert self._asked is not None
        assert self._worker is not None
        lost = 0
        while True:
            try:
                answer = self._worker.answer(self._patience)
            except Lost as problem:
                lost += 1
                self._replace(str(problem), lost)
                continue
            if "failed" in answer:
                raise RolloutsFailed(answer["failed"], answer["exit_code"])
            (self._folder / self._asked).unlink()
            self._asked = None
            runs: list[str] = answer["done"]
            self.scored = answer["scored"]
            return runs

    def close(self) -> None:
        """End the worker and remove what both shared. Idempotent."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.kill() if self.under_way else worker.leave()
        self._asked = None
        scratch, self._scratch = self._scratch, None
        if scratch is not None:
            scratch.remove()

    @property
    def _folder(self) -> Path:
        if self._scratch is None:
            self._scratch = ScratchFolder("rollouts", in_memory())
            self._write(OPENING, self._opening.model_dump_json())
        return self._scratch.path

    def _replace(self, problem: str, lost: int) -> None:
        assert self._worker is not None
        self._worker.kill()
        self._worker = None
        if lost > RESTARTS:
            raise RolloutsFailed(
                f"the rollout worker {problem}, as did {RESTARTS} before it in this step; train without"
                " --overlap, which rolls out in one process, or give a longer --heartbeat-seconds where it"
                " was only slow; the same command goes on from the last saved state"
            )
        self.restarts += 1
        self._on_restart(f"the rollout worker {problem}; another one rolls out the same tasks")
        self._tell()

    def _tell(self) -> None:
        assert self._asked is not None
        folder = self._folder
        if self._worker is None:
            self._worker = WorkerProcess(folder, self._threads)
        self._worker.tell(self._asked)

    def _write(self, name: str, text: str) -> None:
        assert self._scratch is not None
        (self._scratch.path / name).write_text(text, encoding="utf-8")
