"""Operations of a training while it runs, and its model FLOPs utilisation (MFU).

    forward   2 a token and weight of a linear layer, 4 x heads x dim a layer, token and key of the attention
    backward  the same for the gradient of the inputs, and 2 a token and trained weight

Each shared prefix counts once, and what gradient checkpointing computes again not at all (Chowdhery et al.
2022, arXiv 2204.02311, appendix B).
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from nano_rl.learn.config import UpdateConfig
from nano_rl.learn.logprob import backbone
from nano_rl.learn.metrics import SHORTEST


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


class FlopCounter:
    """Counts the operations of a model's forward and backward passes."""

    def __init__(self, model: Any) -> None:
        causal = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._body = backbone(causal)
        self._linear, self._trained = _linear_weights(self._body)
        config = causal.config.get_text_config()
        heads = getattr(config, "num_attention_heads", 0)
        dim = getattr(config, "head_dim", None) or config.hidden_size // max(1, heads)
        self._attention = 4 * config.num_hidden_layers * heads * dim
        head = causal.get_output_embeddings().weight
        self._head = head.numel() * (6 if head.requires_grad else 4)
        self._tokens = {True: 0, False: 0}
        self._keys: dict[bool, list[Tensor]] = {True: [], False: []}

    @contextmanager
    def __call__(self) -> Iterator[None]:
        self._tokens, self._keys = {True: 0, False: 0}, {True: [], False: []}
        hook = self._body.register_forward_pre_hook(self._count, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()

    def _count(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        if ids is None:
            return
        gradient, positions = torch.is_grad_enabled(), kwargs.get("position_ids")
        self._tokens[gradient] += ids.numel()
        if positions is None:
            positions = torch.arange(ids.shape[-1], device=ids.device).expand(ids.shape)
        self._keys[gradient].append((positions + 1).sum())

    def total(self, trained_tokens: float) -> float:
        """Operations counted so far, and those of the head for this number of trained tokens."""
        keys = {kind: float(sum(int(part) for part in parts)) for kind, parts in self._keys.items()}
        forward = {
            kind: 2 * self._linear * n + self._attention * keys[kind] for kind, n in self._tokens.items()
        }
        inputs = 2 * self._linear * self._tokens[True] + 2 * self._attention * keys[True]
        backward = inputs + 2 * self._trained * self._tokens[True]
        return sum(forward.values()) + backward + self._head * trained_tokens


def _linear_weights(body: nn.Module) -> tuple[float, float]:
    """Weights that a token is multiplied with, and those of them that are trained; of experts the chosen."""
    config: Any = getattr(body, "config", None)
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    share = (getattr(config, "num_experts_per_tok", None) or 1) / experts if experts else 1.0
    used = trained = 0.0
    for module in body.modules():
        for name, weight in module.named_parameters(recurse=False):
            if isinstance(module, nn.Embedding) or weight.ndim < 2:
                continue
            size = float(weight.numel()) * (share if weight.ndim == 3 else 1.0)
            if name == "weight" and isinstance(module, nn.Linear):  # weights of 4 bits lie packed
                size = float(module.in_features * module.out_features)
            used += size
            trained += size * weight.requires_grad
    return used, trained


@cache
def measured_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of a large matrix product, the best of several; some tens of milliseconds."""
    size = 1024 if device.type == "cpu" else 8192
    a = torch.ones((size, size), device=device, dtype=dtype)
    best = float("inf")
    for _ in range(4):
        best = min(best, seconds_of(lambda: a @ a, device))
    return 2 * size**3 / best


def utilisation(
    values: Mapping[str, float], flops: FlopCounter, model: nn.Module, config: UpdateConfig
) -> dict[str, float]:
    """`perf/mfu/actor` of the training part of a step, and peak memory of this process so far, GiB:
    `perf/max_memory_rss_gb`; on a GPU also the allocator's."""
    device = next(model.parameters()).device
    metrics = {"perf/max_memory_rss_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}
    if device.type == "cuda":
        metrics["perf/max_memory_allocated_gb"] = torch.cuda.max_memory_allocated(device) / 2**30
        metrics["perf/max_memory_reserved_gb"] = torch.cuda.max_memory_reserved(device) / 2**30
    tokens, seconds = values.get("tokens", 0.0), values.get("seconds_train", 0.0)
    if tokens and seconds >= SHORTEST:
        dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
        done = flops.total(tokens * config.updates_per_step)
        metrics["perf/mfu/actor"] = done / seconds / measured_flops(device, dtype)
    return metrics
