"""The policy of rollouts on servers: rendered here, sampled there, tokens in and out as ids."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from nano_cluster import engine_pool
from nano_cluster.engine_pool import AdapterProbe, AnnounceAdapter, EnginePool, PublishedAdapter
from nano_cluster.own_vllm import START_SECONDS, OwnVllm
from nano_coder.models.local.policy import LocalPolicy
from nano_coder.models.local.sampler import OnToken, Sampled
from nano_coder.models.opening import OpenedWeights
from nano_coder.run.execution import Runtime
from nano_rl.config import TrainConfig
from nano_shared.checkpoint import folder_content
from nano_shared.errors import CheckpointError, UsageError
from nano_shared.files import durable_folder
from nano_shared.policy import Conversation
from nano_shared.types import Completion, Sampling


class RemotePolicy(LocalPolicy):
    """A LocalPolicy whose tokens a pool samples; its own engine does nothing.

    Each turn carries the version of the adapter that sampled it, so a rollout may cross an update.
    """

    def __init__(self, local: LocalPolicy, pool: EnginePool) -> None:
        super().__init__(local.engine, local.template, id=local.id, version=local.version, scheduler="free")
        self.pool = pool

    @property
    def context_limit(self) -> int:
        return min(super().context_limit, self.pool.context_limit or super().context_limit)

    def complete(
        self, conversation: Conversation, sampling: Sampling, *, owner: int | None = None,
        on_token: OnToken | None = None, top_logprobs: int = 0,
    ) -> Completion:  # fmt: skip
        """Sample the next turn on a server. Raises PolicyError, ContextFull and BudgetExhausted."""
        number, delta = self.template.next_row(conversation)
        row = (*conversation.tokens, *delta) if number == conversation.row else delta
        served, adapter = self.pool.sample(row, self.fitting(row, sampling), conversation)
        sampled = Sampled(served.ids, served.logprobs, served.finish)
        completion = self._completion(sampled, number, delta, sampling)
        return completion.model_copy(update={"policy_version": adapter.version})

    def hosted(self) -> AbstractContextManager[Callable[[Future[Any]], None]]:  # type: ignore[override]
        """There is no engine to step while a thread waits."""
        return nullcontext(lambda future: None)

    def agents(self, count: int, at_once: int) -> list[Any]:
        return [nullcontext() for _ in range(count)]


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
    on_change: Callable[[str], None], announce: AnnounceAdapter,
) -> AdapterPublisher:  # fmt: skip
    """A publisher for `config.engine`. Raises UsageError for a model trained whole, and as OwnVllm."""
    if not hasattr(opened.loaded.model, "peft_config"):
        raise UsageError(
            "--engine gives servers a LoRA adapter after each update, and all weights are trained here: give"
            " --lora-rank 16 (vLLM: --max-lora-rank 16), or leave --engine out"
        )
    own, probe = None, probe_of(opened, config)
    if config.engine[0].startswith("http"):
        pool = EnginePool(
            config.engine, probe, api_key=engine_key(), patience=engine_pool.PATIENCE_SECONDS,
            on_change=on_change, announce=announce,
        )  # fmt: skip
    else:
        own = OwnVllm(config.engine[0], opened, config, folder.parent, on_change)
        pool = EnginePool(
            [own.url], probe, api_key=own.key, patience=START_SECONDS, on_change=on_change, ended=own.ended
        )
    return AdapterPublisher(opened.loaded.model, pool, folder, save, config.off_policy_bound, own)


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
        self, model: nn.Module, pool: EnginePool, folder: Path, save: SaveAdapter, bound: int,
        own: OwnVllm | None = None,
    ) -> None:  # fmt: skip
        """`folder` is that of the adapters, which the servers must reach; `bound` the oldest version that
        rollouts may use; `own` the server that ends with this."""
        self.pool, self._own = pool, own
        self._model, self._folder, self._save = model, folder, save
        self._kept = bound + _KEPT
        self._last: PublishedAdapter | None = None

    def follow(self, runtime: Runtime, version: int) -> Runtime:
        """Publish the weights; the runtime with the pool as policy. Raises PolicyError."""
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
        if self._own is not None:
            self._own.close()
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
