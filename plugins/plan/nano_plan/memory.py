"""What a training takes before it begins: memory by part, and tokens a second.

Memory is counted on the model without its numbers (torch's meta device), by the code that trains.
"""

from __future__ import annotations

import copy
import time
from bisect import bisect_right
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nano_rl.learn.config import UpdateConfig
from nano_rl.learn.learner import prepare
from nano_rl.learn.logprob import (
    CHUNK_LOGITS,
    backbone,
    block_logits,
    config_objection,
    layers_of,
    tree_hidden,
)
from nano_rl.learn.prefix_tree import TokenTree
from nano_rl.learn.utilisation import seconds_of

_PROCESS = 450 * 2**20
"""Python, PyTorch and transformers without a model (measured); on a GPU about as much is taken by CUDA"""
_BITS = {"4bit": 0.516, "8bit": 1.002}
"""bytes of a quantised weight with its scales"""
_PASSING = 0.2
"""gradients of activations that exist for a moment, as a share of the activations (measured)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    rows: int
    """rollouts that are decoded together"""
    row_tokens: int
    """of the longest row, its prompt included"""
    kv_bytes: int
    """bound of the KV cache"""
    prompt_tokens: int = 0
    """leading tokens that the rows of a group share"""
    group_size: int = 1

    def kv_tokens(self, rows: int) -> int:
        """Tokens whose keys and values are held while so many rows are decoded: what each of them has for
        itself and the prompts of their groups, twice, since both are copied as rows join."""
        prompts = -(-rows // max(1, self.group_size)) * self.prompt_tokens
        return 2 * (rows * (self.row_tokens - self.prompt_tokens) + prompts)

    def rows_held(self, token_bytes: int) -> int:
        """Rows that are decoded together within `kv_bytes`; the others wait."""
        return bisect_right(
            range(1, self.rows + 1), self.kv_bytes, key=lambda n: self.kv_tokens(n) * token_bytes
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    parameters: int
    trained: int
    parts: dict[str, int]
    """bytes at the peak, of rank 0 if there are ranks"""
    other_rank: int = 0
    """bytes at the peak of each rank but rank 0, of one that rolls out if any does"""

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def plan_memory(
    skeleton: Callable[[torch.dtype], nn.Module],
    config: UpdateConfig,
    work: Workload,
    device: torch.device,
    *,
    ranks: int = 1,
    rollout_ranks: int = 1,
    offload: bool = False,
) -> MemoryPlan:
    """Memory of a training. `skeleton` makes the model on the meta device; an adapter that it carries is
    trained. Of its `ranks` so many roll out, each with a copy of the weights. With `offload` shards are kept
    in the memory of the host. Raises ConfigError for a model that cannot be trained."""
    dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
    with torch.device("meta"):
        model: Any = prepare(skeleton(dtype).eval(), lora_rank=config.lora_rank, seed=0)
    causal = model.get_base_model() if hasattr(model, "get_base_model") else model
    weights = {id(p): p for p in model.parameters()}.values()
    trained = [p for p in weights if p.requires_grad]
    linear = [m.weight for m in causal.modules() if isinstance(m, nn.Linear) and not m.weight.requires_grad]
    base = sum(p.numel() * p.element_size() for p in weights)
    if config.quantise:
        head = causal.get_output_embeddings().weight
        packed = [w for w in linear if w is not head and w.element_size() == dtype.itemsize]
        base += sum(round(w.numel() * (_BITS[config.quantise] - w.element_size())) for w in packed)
    count = sum(p.numel() for p in trained)
    masters = 4 * sum(p.numel() for p in trained if p.element_size() < 4)
    learner = {
        "masters in float32": masters,
        "gradients": 4 * count,
        "optimizer": (2 if config.optimizer.states == "8bit" else 8) * count,
    }
    terms = config.objective.terms
    sampled = {
        "weights": base,
        "reference": sum(p.numel() * p.element_size() for p in trained) * terms.needs_reference,
        "critic": (base + sum(learner.values())) * terms.critic,
    }
    if ranks > 1:
        frozen = sum(p.numel() * p.element_size() for p in weights if not p.requires_grad)
        shards = {
            "shards": frozen + 4 * count,
            "gradients": 4 * count,
            "optimizer": learner["optimizer"],
        }
        learner = {name: 0 if offload else size // ranks for name, size in shards.items()}
        learner["gathered weights"] = _gathered(model, dtype)
    tokens = max(config.max_tokens, work.row_tokens)
    logits = _logits(causal, tokens, dtype, device)
    on_cpu = device.type == "cpu"
    if on_cpu and (config.gradient_checkpointing or ranks > 1):
        # freed memory is returned; gradients come after logits
        logits = max(0, logits - learner["gradients"])
    learner |= {
        "activations": round((1 + _PASSING) * activation_bytes(causal, tokens, work, config)),
        "logits": logits,
        "process": _PROCESS,
    }
    sampler = {
        "KV cache": min(work.kv_bytes, work.kv_tokens(work.rows) * kv_token_bytes(causal, dtype)),
        "sampler's copy": _sampler_copy(causal, dtype, device, config),
    }
    if config.quantise:
        sampled["a layer dequantised"] = max((w.numel() * dtype.itemsize for w in packed), default=0)
    parts = {**sampled, **learner, **sampler}
    if not on_cpu:  # a CPU's allocator keeps what the sampler frees before learning begins
        parts["used in turn"] = -min(sum(sampler.values()), learner["activations"] + learner["logits"])
    alone = ("critic",) if rollout_ranks > 1 else (*sampled, *sampler, "used in turn")
    return MemoryPlan(
        parameters=sum(p.numel() for p in weights), trained=count, parts=parts,
        other_rank=sum(size for name, size in parts.items() if name not in alone) * (ranks > 1),
    )  # fmt: skip


def _gathered(model: nn.Module, dtype: torch.dtype) -> int:
    """Bytes of weights that FSDP2 has gathered at once: all outside of the layers, and two layers."""
    sizes = [sum(p.numel() for p in layer.parameters()) for layer in layers_of(model)]
    outside = sum(p.numel() for p in model.parameters()) - sum(sizes)
    return int(outside + 2 * max(sizes, default=0)) * dtype.itemsize


def row_bytes(skeleton: nn.Module, config: UpdateConfig, tokens: int, device: torch.device) -> int:
    """Memory that learning from one row takes beside weights, gradients and optimizer. `skeleton` is the
    model on the meta device."""
    work = Workload(rows=1, row_tokens=tokens, kv_bytes=0)
    kept = activation_bytes(skeleton, tokens, work, config)
    element = skeleton.get_output_embeddings().weight.dtype  # type: ignore[operator]
    return round((1 + _PASSING) * kept) + _logits(skeleton, tokens, element, device)


def kv_token_bytes(causal: Any, dtype: torch.dtype) -> int:
    """Bytes of keys and values of one token."""
    config = causal.config
    if not getattr(config, "num_attention_heads", None):  # a state space keeps one state a row
        return 0
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * dim * dtype.itemsize)


def activation_bytes(causal: Any, tokens: int, work: Workload, config: UpdateConfig) -> int:
    """Bytes that a forward pass over a micro-batch keeps for the backward pass."""
    element = int(causal.get_input_embeddings().weight.element_size())
    kept, weights = _Kept(), {p.untyped_storage()._cdata for p in causal.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata not in weights:
            kept.add(tensor)
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    try:
        with hooks, torch.device("meta"), torch.enable_grad():
            _forward(causal, tokens, work)
    # it decides by its numbers, as experts do, or it cannot be trained, which `refuse_untrainable` says
    except (RuntimeError, NotImplementedError, AttributeError, TypeError, ValueError):
        kept.bytes = _estimated(causal.config, tokens, work) * element
    if not config.gradient_checkpointing:
        return kept.bytes
    layers = int(causal.config.num_hidden_layers)
    return layers * tokens * int(causal.config.hidden_size) * element + kept.bytes // layers


def _forward(causal: Any, tokens: int, work: Workload) -> None:
    """A forward pass without numbers over a micro-batch: along a tree, or row by row."""
    if config_objection(causal.config) is None:
        ids_N = torch.empty(tokens, dtype=torch.int64)
        tree_hidden(
            causal,
            TokenTree(ids_N=ids_N, positions_N=ids_N, node_BT=ids_N[None], runs=((0, tokens),), crosses=()),
        )
        return
    length = min(tokens, work.row_tokens)
    ids_BT = torch.empty((max(1, tokens // length), length), dtype=torch.int64)
    mask: Any = torch.empty((ids_BT.shape[0], 1, length, length), dtype=torch.bool)
    kinds = set(getattr(causal.config, "layer_types", None) or ())
    if "sliding_attention" in kinds and "full_attention" in kinds:
        mask = dict.fromkeys(kinds, mask)
    positions_1T = torch.empty((1, length), dtype=torch.int64)
    backbone(causal)(input_ids=ids_BT, attention_mask=mask, position_ids=positions_1T, use_cache=False)


def _estimated(config: Any, tokens: int, work: Workload) -> int:
    heads = getattr(config, "num_attention_heads", None) or 1
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    chosen = getattr(config, "num_experts_per_tok", None) or 1
    inside = getattr(config, "moe_intermediate_size", None) or getattr(config, "intermediate_size", None)
    inside = chosen * (inside or 4 * config.hidden_size)
    width = 10 * config.hidden_size + 6 * heads * dim + 5 * inside
    eager = getattr(config, "_attn_implementation", None) == "eager"
    scores = 3 * heads * work.row_tokens * eager
    if "linear_attention" in (getattr(config, "layer_types", None) or ()):
        width *= 4  # its chunks are kept in float32
    return int(config.num_hidden_layers * tokens * (width + scores))


class _Kept:
    """Distinct storages, which it keeps alive, since addresses are used again."""

    def __init__(self) -> None:
        self._storages: dict[int, Any] = {}
        self.bytes = 0

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storages:
            self._storages[storage._cdata] = storage
            self.bytes += storage.nbytes()


def _logits(causal: Any, tokens: int, dtype: torch.dtype, device: torch.device) -> int:
    """Logits of a chunk, blocks in float32, states and their gradient, and the gradient of a trained head."""
    head: Tensor = causal.get_output_embeddings().weight
    chunk = min(CHUNK_LOGITS, tokens * head.shape[0]) * dtype.itemsize
    blocks = 4 * 4 * min(block_logits(device), tokens * head.shape[0])
    states = 2 * tokens * head.shape[1] * dtype.itemsize
    return chunk + blocks + states + (2 * head.numel() * dtype.itemsize if head.requires_grad else 0)


def _sampler_copy(causal: Any, dtype: torch.dtype, device: torch.device, config: UpdateConfig) -> int:
    """Layers that the sampler copies: merged with their adapter, or packed in bfloat16 for a CPU."""
    if config.quantise:
        return 0
    every = [
        m for m in causal.modules() if isinstance(m, nn.Linear) and m.weight.element_size() <= dtype.itemsize
    ]
    adapted = [
        m.base_layer for m in causal.modules() if isinstance(getattr(m, "base_layer", None), nn.Linear)
    ]
    packed = device.type == "cpu" and dtype == torch.bfloat16
    copied = every if packed else adapted
    return sum(m.weight.numel() * dtype.itemsize for m in copied)


def available_bytes(device: torch.device) -> int:
    """Memory that is free on the device; of the CPU, what programs may take without swapping."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        with suppress(OSError, ValueError):  # no such group, or `max`
            group = Path("/sys/fs/cgroup")
            free = min(free, int((group / limit).read_text()) - int((group / used).read_text()))
    return free


SAVINGS: tuple[dict[str, Any], ...] = (
    {"gradient_checkpointing": True}, {"dtype": "bfloat16"}, {"lora_rank": 16}, {"max_tokens": 1024},
    {"quantise": "8bit"}, {"quantise": "4bit"},
)  # fmt: skip
"""settings that save memory, those that cost least first"""


def settings_that_fit(
    plan: Callable[[UpdateConfig], float], config: UpdateConfig, room: int
) -> dict[str, Any] | None:
    """The fewest of `SAVINGS`, taken in order, with which the training fits; None if none do."""
    taken: dict[str, Any] = {}
    for saving in SAVINGS:
        ((name, value),) = saving.items()
        now = getattr(config, name)
        if name == "quantise" and not (config.lora_rank or "lora_rank" in taken):
            continue
        if now == value or (name == "lora_rank" and now) or (name == "max_tokens" and now <= value):
            continue
        alone = plan(config.model_copy(update=saving))
        if alone <= room:
            return saving
        taken |= saving
        if plan(config.model_copy(update=taken)) <= room:
            return taken
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    training: float
    decoding: float


_PROBE_TOKENS = 256
_PROBE_SECONDS = 1.0


def probe_speed(
    build: Callable[[Any], nn.Module],
    model_config: Any,
    config: UpdateConfig,
    rows: int,
    device: torch.device,
) -> Speed:
    """Time one and three layers of the model with constant weights, and extend the line to all of them: a
    pass over a row forward and backward, and a decoding step of all rows."""
    depth = int(model_config.num_hidden_layers)
    seconds: list[tuple[float, float]] = []
    for layers in (1, 3):
        shallow = copy.deepcopy(model_config)
        shallow.num_hidden_layers = layers
        if getattr(shallow, "layer_types", None):
            shallow.layer_types = shallow.layer_types[:layers]
        with torch.device("meta"):
            model = build(shallow).eval()
        model = model.to(torch.bfloat16 if config.dtype == "bfloat16" else torch.float32)
        model = model.to_empty(device=device)
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data.fill_(0.01)  # drawing random weights would take longer than the probe
        trained: Any = prepare(model, lora_rank=config.lora_rank, seed=0)
        vocabulary = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
        ids_1T = torch.arange(_PROBE_TOKENS, device=device)[None] % vocabulary
        step_B1 = torch.arange(rows, device=device)[:, None] % vocabulary

        def learn(model: Any = trained, ids_1T: Tensor = ids_1T) -> None:
            model(input_ids=ids_1T, use_cache=False).logits.float().logsumexp(-1).sum().backward()
            model.zero_grad()

        @torch.no_grad()
        def decode(model: Any = trained, step_B1: Tensor = step_B1) -> None:
            model(input_ids=step_B1, use_cache=False)

        seconds.append((_timed(learn, device), _timed(decode, device)))
        del model, trained
    (learn_1, decode_1), (learn_3, decode_3) = seconds
    again = 4 / 3 if config.gradient_checkpointing else 1.0
    return Speed(
        training=_PROBE_TOKENS / _extended(learn_1, learn_3, depth) / again,
        decoding=rows / _extended(decode_1, decode_3, depth),
    )


def _extended(one: float, three: float, depth: int) -> float:
    layer = max((three - one) / 2, three / 10)
    return max(one - layer, 0.0) + depth * layer


def _timed(work: Callable[[], None], device: torch.device) -> float:
    """Seconds of one call: the best of several in about `_PROBE_SECONDS`, after a first one that is not
    counted unless it takes longer."""

    once = partial(seconds_of, work, device)
    if (first := once()) > _PROBE_SECONDS:
        return first
    end, best = time.perf_counter() + _PROBE_SECONDS, once()
    while time.perf_counter() < end:
        best = min(best, once())
    return best
