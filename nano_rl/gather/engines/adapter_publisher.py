"""The trained adapter, written under its content name after each update and served by a pool."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from nano_coder.models.local.policy import LocalPolicy
from nano_coder.models.opening import OpenedWeights
from nano_coder.run.execution import Runtime
from nano_rl.config.training import TrainConfig
from nano_rl.gather.engines import engine_pool
from nano_rl.gather.engines.adapter_probe import AdapterProbe, PublishedAdapter
from nano_rl.gather.engines.engine_pool import AnnounceAdapter, EnginePool
from nano_rl.gather.engines.remote_policy import RemotePolicy
from nano_rl.gather.engines.workers import Workers
from nano_shared.checkpoint import folder_content
from nano_shared.errors import CheckpointError, UsageError
from nano_shared.files import durable_folder

SaveAdapter = Callable[..., None]
"""(model, folder=...) writes a model's adapter into a folder, in PEFT's format"""
ADAPTERS = "adapters"
"""their folder in that of a training"""
_KEPT = 2
"""adapters that stay on disk besides those that rollouts may use"""
_ROW = 64
"""tokens of the probe's row"""
_TEXT = """The function reads a file line by line, and returns the sum of its numbers.
def total(path):
    with open(path) as lines:
        return sum(int(line) for line in lines if line.strip())
"""


def open_publisher(
    opened: OpenedWeights, folder: Path, save: SaveAdapter, config: TrainConfig,
    on_change: Callable[[str], None], workers: Workers | None = None,
) -> AdapterPublisher:  # fmt: skip
    """A publisher for the servers of `config.engine`, from which `workers` sample too. `on_change`: of the
    pool. Raises UsageError as AdapterPublisher."""
    announce: AnnounceAdapter = workers.announce if workers else lambda *_: ()
    pool = EnginePool(
        config.engine, probe_of(opened, config), api_key=engine_key(), patience=engine_pool.PATIENCE_SECONDS,
        on_change=on_change, announce=announce,
    )  # fmt: skip
    return AdapterPublisher(opened.loaded.model, pool, folder, save, bound=config.off_policy_bound)


def probe_of(opened: OpenedWeights, config: TrainConfig) -> AdapterProbe:
    """What holds servers against a trainer of these weights."""
    causal: Any = opened.loaded.model
    return AdapterProbe(
        eos_ids=opened.loaded.eos_ids, vocab_size=causal.config.get_text_config().vocab_size,
        guards=config.guards, bfloat16=config.dtype == "bfloat16",
    )  # fmt: skip


def engine_key() -> str | None:
    return os.environ.get("NANO_ENGINE_KEY")


class AdapterPublisher:
    """Has a pool serve what is trained."""

    def __init__(
        self, model: nn.Module, pool: EnginePool, folder: Path, save: SaveAdapter, *, bound: int
    ) -> None:
        """`folder` is that of the adapters, which the servers must reach; `bound` the oldest version that
        rollouts may use. Raises UsageError for a model that is trained whole."""
        if not hasattr(model, "peft_config"):
            raise UsageError(
                "--engine gives servers a LoRA adapter after each update, and all weights are trained here:"
                " give --lora-rank 16 (vLLM: --max-lora-rank 16), or leave --engine out"
            )
        self.pool = pool
        self._model, self._folder, self._save = model, folder, save
        self._kept = bound + _KEPT
        self._last: PublishedAdapter | None = None

    def follow(self, runtime: Runtime, version: int) -> Runtime:
        """Publish the weights as they are now. Returns the runtime with the pool as its policy. Raises
        PolicyError if no server serves them."""
        policy: Any = runtime.policy
        assert isinstance(policy, LocalPolicy)
        self._last = self._written(policy, version)
        self.pool.publish(self._last)
        self._remove_old()
        return replace(runtime, policy=RemotePolicy(policy, self.pool))

    def metrics(self) -> dict[str, float]:
        return self.pool.metrics()

    def close(self) -> None:
        self.pool.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _written(self, policy: LocalPolicy, version: int) -> PublishedAdapter:
        self._folder.mkdir(parents=True, exist_ok=True)
        fresh = self._folder / f"version-{version}"
        shutil.rmtree(fresh, ignore_errors=True)
        with durable_folder(fresh, CheckpointError) as written:
            self._save(self._model, folder=written)
        content = folder_content(fresh)
        name = "nano-" + content.removeprefix("sha256:")[:16]
        target = (self._folder / name).absolute()
        shutil.rmtree(fresh) if target.exists() else fresh.rename(target)
        row = tuple(policy.template.encoder.text(_TEXT)[: min(_ROW, policy.context_limit // 2)])
        (expected,) = policy.engine.score([row])
        last = self._last
        before = last.previous if last and last.content == content else last and last.expected
        return PublishedAdapter(
            name=name, folder=target, content=content, version=version, row=row, expected=tuple(expected),
            previous=before,
        )  # fmt: skip

    def _remove_old(self) -> None:
        folders = sorted(self._folder.glob("nano-*"), key=lambda folder: folder.stat().st_mtime)
        for folder in folders[: -self._kept]:
            shutil.rmtree(folder, ignore_errors=True)
