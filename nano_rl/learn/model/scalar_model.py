"""A backbone with a scalar head, one number per position: the network of critics and reward models."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nano_rl.learn.model.learner import prepare
from nano_rl.learn.tree_forward import backbone, row_states
from nano_shared.lora import merge_adapter


class ScalarModel(nn.Module):
    """A causal backbone and a linear head in float32, initialised to 0."""

    def __init__(self, lm: nn.Module, *, bias: bool) -> None:
        """`lm` is a causal LM, bare or under PEFT, and is not copied; its language head is not used."""
        super().__init__()
        config: Any = lm.config
        self.lm = lm.eval()
        self.head = nn.Linear(config.hidden_size, 1, bias=bias).to(next(lm.parameters()).device)
        nn.init.zeros_(self.head.weight)
        if bias:
            nn.init.zeros_(self.head.bias)

    @property
    def causal(self) -> Any:
        """The LM without the PEFT wrapper."""
        lm: Any = self.lm
        return lm.get_base_model() if hasattr(lm, "peft_config") else lm

    @property
    def backbone(self) -> Any:
        return backbone(self.causal)

    def forward(self, ids_BT: Tensor, attention_BT: Tensor) -> Tensor:
        """[B, T] float32 score of the state after each token; arbitrary in the padding.

        Rows are padded on the right; shared prefixes are computed once if the model supports it.
        """
        states_MH, node_BT = row_states(self.causal, ids_BT, attention_BT)
        worth_M: Tensor = self.head(states_MH.to(self.head.weight.dtype)).squeeze(-1)
        return worth_M[node_BT]


def scalar_model(policy: Any, *, lora_rank: int, seed: int, bias: bool) -> ScalarModel:
    """A scalar model initialised from a copy of the policy's weights, with an adapter merged.

    All weights are trained, or a new adapter of rank `lora_rank`, by default that of the policy's adapter.
    """
    adapters = getattr(policy, "peft_config", None)
    if adapters and not lora_rank:
        lora_rank = int(adapters["default"].r)
    lm: Any = copy.deepcopy(policy)
    if adapters:
        lm, _ = merge_adapter(lm)
    lm.requires_grad_(False)
    # the language head is not used and must not be trained
    lm.set_output_embeddings(nn.Identity())
    return ScalarModel(prepare(lm, lora_rank=lora_rank, seed=seed), bias=bias)


def by_budget(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Row indices of micro-batches of at most `max_tokens` positions with padding, longest rows first.

    A longer row gets a micro-batch of its own.
    """
    parts: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not parts or (len(parts[-1]) + 1) * lengths[parts[-1][0]] > max_tokens:
            parts.append([])
        parts[-1].append(index)
    return parts


def padded(rows: Sequence[Sequence[float]], dtype: torch.dtype) -> Tensor:
    """[B, T] rows padded on the right with 0."""
    width = max(len(row) for row in rows)
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], dtype=dtype)
