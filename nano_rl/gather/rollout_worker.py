"""The worker process of `overlap`: it rolls out the next step while the trainer learns from the last one.

`remote_rollouts.py` starts it (`python -m nano_rl.gather.rollout_worker FOLDER`) and ends it. FOLDER
holds the worker's config. Each line on stdin names a request file in FOLDER, so that the pipe cannot fill up.
Each line on stdout is a JSON object: `beat` (a heartbeat every second, from its own thread); `done` (run ids
in the log, in the order of the request) with `scored` (log-probs of the request's probe); or `failed` with
`exit_code` (a NanoError, after which the process ends). The process is killed when its trainer ends.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any, Literal, TextIO

from pydantic import Field, JsonValue

from nano_shared.errors import NanoError
from nano_shared.types import Sampling, Task, Value

CONFIG_FILE = "worker.json"
"""name of the worker's config in the folder that trainer and worker share"""


class WorkerConfig(Value):
    """The settings of a worker, the same for a whole training."""

    trainer: int
    """process id of the trainer; the worker ends with it"""
    model: str
    """the starting weights of the training, as `open_weights` takes them"""
    model_id: str
    """content hash of those weights, which is logged with each turn"""
    dtype: Literal["float32", "bfloat16"]
    quantise: Literal["4bit", "8bit"] | None
    device: str
    """where the trainer's weights are"""
    kv_gib: float | None
    lora_rank: int
    seed: int
    profile: str
    """profile of the weights"""
    runtime_profile: str
    tool_files: tuple[str, ...] = ()
    """tools of that profile that are in files, as `path.py:name`"""
    environments: tuple[str, ...] = ()
    """as `--env` takes them"""
    scheduler: Literal["lockstep", "free"] | None
    log: str
    """address of the log with its password, as `LogStore.open` takes it"""
    blobs: str
    policy_name: str
    limits: dict[str, JsonValue] = Field({})
    """limits that replace those of the tasks"""
    hosts: frozenset[str] = Field(frozenset())
    """hosts that runs may reach"""
    sandbox: str
    python: str | None
    image: str | None
    """of the sandbox, as `open_sandbox` takes it"""


class ProbeRow(Value):
    """A row to score: the tokens from index `first` on, at a temperature."""

    ids: tuple[int, ...]
    first: int
    temperature: float


class RolloutRequest(Value):
    """The rollouts of one step, or of one refill round of it."""

    version: int
    weights: str
    """path of the trained weights of that version (safetensors)"""
    seed: int
    sampling: Sampling
    tasks: tuple[Task, ...]
    sizes: tuple[int, ...] = Field(min_length=1)
    """[tasks] number of rollouts of each"""
    probe: ProbeRow | None = None
    """a row for the sampler to score, to check that it has these weights"""


BEAT_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1


class MessageStream:
    """Messages to the trainer: JSON lines on stdout. Thread-safe."""

    def __init__(self) -> None:
        # other output to stdout is redirected to stderr, which the trainer keeps in a file
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
    """A copy of the policy that loads the weights of each request."""

    def __init__(self, config: WorkerConfig) -> None:
        """Raises CheckpointError if the model's weights have changed since training began."""
        from nano_coder.agent.profiles import find_profile
        from nano_coder.environment import Environments
        from nano_coder.models.opening import local_policy, open_weights
        from nano_coder.models.scripted import ScriptedPolicy
        from nano_coder.run.execution import RunSettings, Runtime
        from nano_coder.run.redacting_log import redacting_store
        from nano_coder.sandbox.backend import open_sandbox
        from nano_coder.tools.registry import TOOLS
        from nano_rl.learn.model.learner import prepare
        from nano_shared.errors import CheckpointError
        from nano_shared.store import LogStore

        for tool in config.tool_files:
            TOOLS.give(tool)
        opened = open_weights(
            config.model, dtype=config.dtype, profile=config.profile, device=config.device,
            quantise=config.quantise, kv_gib=config.kv_gib,
        )  # fmt: skip
        if opened.loaded.id != config.model_id:
            raise CheckpointError(
                f"{config.model} holds other weights than when this training opened it; begin it again"
            )
        self._config, self._opened = config, opened
        self._model = prepare(opened.loaded.model, lora_rank=config.lora_rank, seed=config.seed)
        self._runtime = Runtime(
            policy=ScriptedPolicy([]),
            sandbox=open_sandbox(config.sandbox, python=config.python, image=config.image),
            store=redacting_store(
                LogStore.open(config.log, blobs=config.blobs),
                local_policy(opened.loaded, opened.profile).template.encoder.decode,
            ),
            profile=find_profile(config.runtime_profile),
            policy_name=config.policy_name,
            settings=RunSettings(limits=config.limits, hosts=config.hosts),
            environments=Environments.open(config.environments),
        )

    def roll_out(self, request: RolloutRequest) -> dict[str, Any]:
        """Roll out, grade and log the request's tasks.

        Returns `done`, the run ids in the order of the request, and `scored`, the log-probs of its probe.
        """
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
            scheduler=self._config.scheduler,
        )
        runtime = replace(self._runtime, policy=policy, sampling=request.sampling)
        runs = collect(request.tasks, runtime, group_size=list(request.sizes), seed=request.seed)
        row, scored = request.probe, None
        if row is not None:
            (scored,) = policy.engine.score([row.ids], row.temperature, first=row.first)
        return {"done": [run.id for run in runs], "scored": scored}


def main(folder: Path) -> None:
    stream, ended = MessageStream(), threading.Event()
    heartbeat = threading.Thread(target=stream.beat, args=(ended,), daemon=True)
    heartbeat.start()
    config = WorkerConfig.model_validate_json((folder / CONFIG_FILE).read_bytes())
    _die_with(config.trainer)
    try:
        worker = Worker(config)
        for name in sys.stdin:
            request = RolloutRequest.model_validate_json((folder / name.strip()).read_bytes())
            stream.send(worker.roll_out(request))
    except NanoError as problem:
        stream.send({"failed": str(problem), "exit_code": problem.exit_code})
    finally:
        ended.set()
        heartbeat.join()


def _die_with(trainer: int) -> None:
    """Have the kernel kill this process when the trainer ends; exit if it has ended already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != trainer:
        sys.exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
