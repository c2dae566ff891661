"""The policy's own backbone with a scalar head: one number for each position. A critic, or a reward model."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nano_rl.learn.model.learner import prepare
from nano_rl.learn.trees.forward import row_states


class ScalarModel(nn.Module):
    """A causal backbone and a linear head in float32, which starts at 0 and so says nothing at first."""

    def __init__(self, lm: nn.Module, *, bias: bool) -> None:
        """`lm` is a causal LM, bare or under PEFT; its own head is not used. It is taken over, not copied."""
        super().__init__()
        config: Any = lm.config
        self.lm = lm.eval()
        self.head = nn.Linear(config.hidden_size, 1, bias=bias).to(next(lm.parameters()).device)
        nn.init.zeros_(self.head.weight)
        if bias:
            nn.init.zeros_(self.head.bias)

    @property
    def causal(self) -> Any:
        """The LM without its adapter's wrapper."""
        lm: Any = self.lm
        return lm.get_base_model() if hasattr(lm, "peft_config") else lm

    @property
    def backbone(self) -> Any:
        return self.causal.model

    def forward(self, ids_BT: Tensor, attention_BT: Tensor) -> Tensor:
        """[B, T] float32: what the state after each token is worth, in the padding anything.

        Rows are padded on the right. What they share is computed once where the model can."""
        states_MH, node_BT = row_states(self.causal, ids_BT, attention_BT)
        worth_M: Tensor = self.head(states_MH.to(self.head.weight.dtype)).squeeze(-1)
        return worth_M[node_BT]


def scalar_model(policy: Any, *, lora_rank: int, seed: int, bias: bool) -> ScalarModel:
    """A scalar model that starts from a copy of the policy's weights, an adapter merged into them.

    It is trained as the policy is: all weights, or a fresh adapter, of `lora_rank` or of the rank of the
    adapter that the policy has.
    """
    adapters = getattr(policy, "peft_config", None)
    if adapters and not lora_rank:
        lora_rank = int(adapters["default"].r)
    lm: Any = copy.deepcopy(policy)
    if adapters:
        lm = lm.merge_and_unload()
    lm.requires_grad_(False)
    # the language head has no part in this and would be trained on nothing
    lm.lm_head = nn.Identity()
    return ScalarModel(prepare(lm, lora_rank=lora_rank, seed=seed), bias=bias)


def by_budget(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """The indices of the rows of each micro-batch of at most `max_tokens` positions, padding included,
    longest rows first; a row longer than that gets one of its own."""
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
