"""The process that rolls out the next step while the trainer learns from the last.

`remote_rollouts.py` starts it (`python -m nano_rl.gather.overlap.rollout_worker FOLDER`) and ends it. FOLDER
holds the opening; each line on stdin names a file there with a request, so that no pipe is ever full. Each
on stdout is a JSON object: `beat` (every second, from a thread of its own), `done` (ids of the runs, which
are in the log, in the order of the request) with `scored` (log-probs of the request's probe), or `failed`
with `exit_code` (an error of ours, after which this process ends). It ends with its trainer.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from nano_shared.errors import NanoError

if TYPE_CHECKING:
    from nano_rl.gather.overlap.rollout_request import Opening, RolloutRequest

BEAT_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1


class Line:
    """The way back to the trainer. Thread-safe."""

    def __init__(self) -> None:
        # whatever else prints goes to stderr, which the trainer keeps
        self._out: TextIO = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        self._lock = threading.Lock()

    def send(self, message: dict[str, Any]) -> None:
        with self._lock:
            self._out.write(json.dumps(message) + "\n")
            self._out.flush()

    def beat(self, ended: threading.Event) -> None:
        while not ended.wait(BEAT_SECONDS):
            self.send({"beat": True})


class Worker:
    """A copy of the policy, which takes the weights that each request names."""

    def __init__(self, opening: Opening) -> None:
        """Raises CheckpointError where the name stands for other weights by now."""
        from nano_coder.agent.profiles import find_profile
        from nano_coder.models.opening import local_policy, open_weights
        from nano_coder.models.scripted import ScriptedPolicy
        from nano_coder.run.execution import Runtime
        from nano_coder.run.log import guarded
        from nano_coder.sandbox.backend import open_sandbox
        from nano_rl.learn.model.learner import prepare
        from nano_shared.errors import CheckpointError
        from nano_shared.store import LogStore

        opened = open_weights(opening.model, dtype=opening.dtype, profile=opening.profile, merge=False)
        if opened.loaded.id != opening.model_id:
            raise CheckpointError(
                f"{opening.model} holds other weights than when this training opened it; begin it again"
            )
        self._opening, self._opened = opening, opened
        self._model = prepare(opened.loaded.model, lora_rank=opening.lora_rank, seed=opening.seed)
        self._runtime = Runtime(
            policy=ScriptedPolicy([]),
            sandbox=open_sandbox(),
            store=guarded(
                LogStore.open(opening.log, blobs=Path(opening.blobs)),
                local_policy(opened.loaded, opened.profile).template.encoder.decode,
            ),
            profile=find_profile(opening.runtime_profile),
            policy_name=opening.policy_name,
            limits=opening.limits,
        )

    def roll_out(self, request: RolloutRequest) -> dict[str, Any]:
        """`done`: ids of the runs, logged and graded, in the order of the request's tasks; `scored`: of its
        probe by the policy that sampled them."""
        from dataclasses import replace

        from safetensors.torch import load_file

        from nano_coder.models.opening import local_policy
        from nano_rl.gather.rollouts import collect
        from nano_rl.learn.model.learner import restore_weights

        restore_weights(self._model, load_file(request.weights))
        policy: Any = local_policy(
            replace(self._opened.loaded, model=self._model),
            self._opened.profile,
            version=request.version,
            scheduler=self._opening.scheduler,
        )
        runtime = replace(self._runtime, policy=policy, sampling=request.sampling)
        runs = collect(request.tasks, runtime, group_size=list(request.sizes), seed=request.seed)
        row, scored = request.probe, None
        if row is not None:
            (scored,) = policy.engine.score([row.ids], row.temperature, first=row.first)
        return {"done": [run.id for run in runs], "scored": scored}


def main(folder: Path) -> None:
    line, ended = Line(), threading.Event()
    beating = threading.Thread(target=line.beat, args=(ended,), daemon=True)
    beating.start()
    from nano_rl.gather.overlap.rollout_request import OPENING, Opening, RolloutRequest

    opening = Opening.model_validate_json((folder / OPENING).read_bytes())
    _end_with(opening.trainer)
    try:
        worker = Worker(opening)
        for name in sys.stdin:
            request = RolloutRequest.model_validate_json((folder / name.strip()).read_bytes())
            line.send(worker.roll_out(request))
    except NanoError as problem:
        line.send({"failed": str(problem), "exit_code": problem.exit_code})
    finally:
        ended.set()
        beating.join()


def _end_with(trainer: int) -> None:
    """Be killed when the trainer ends, however it ends; at once where it has ended already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != trainer:
        sys.exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
