"""Builders of rollouts from token counts, and of batches from hand-written numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from nano_rl.learn.batch import Batch
from nano_rl.learn.objectives import Objective, find_objective
from nano_shared.types import (
    Completion,
    Finish,
    Sampling,
    StopReason,
    Task,
    Trajectory,
    Trust,
    Turn,
    TurnTokens,
    Verdict,
)

# the machine's cores belong to the parallel test processes
torch.set_num_threads(1)

VOCABULARY = 11


def turn(
    context: Sequence[int] | int,
    sampled: Sequence[int] | int,
    *,
    row: int = 0,
    index: int = 0,
    version: int = 0,
    sampling: Sampling | None = None,
    logprobs: Sequence[float] | None = None,
    text_only: bool = False,
) -> Turn:
    """A turn from token ids, or from token counts."""
    context_ids = _ids(context, start=1)
    sampled_ids = _ids(sampled, start=3)
    tokens = TurnTokens(
        row=row,
        context_ids=context_ids,
        sampled_ids=sampled_ids,
        logprobs=tuple(logprobs or [-0.1 * (i + 1) for i in range(len(sampled_ids))]),
    )
    completion = Completion(
        text="text", finish=Finish.STOP, tokens=None if text_only else tokens,
        sampling=sampling or Sampling(), policy_id="tiny", policy_version=version,
    )  # fmt: skip
    return Turn(index=index, completion=completion, parser="compact", started=0.0, ended=1.0)


def trajectory(
    *turns: Turn,
    run_id: str = "run-0",
    key: str = "task-0",
    prompt: str = "Do it.",
    reward: float | None = None,
    stop: StopReason = StopReason.FINISHED,
) -> Trajectory:
    return Trajectory(
        id=run_id, task=Task(key=key, prompt=prompt), turns=turns or (turn(2, 3),), stop=stop,
        runtime_version="0", profile="compact", profile_hash="p", template_hash="t", tools_hash="h",
        policy="tiny", started=0.0, verdict=verdict(reward),
    )  # fmt: skip


def verdict(reward: float | None) -> Verdict:
    return Verdict(reward=reward, trust=Trust.HIDDEN, grader="test", graded_hash="g")


def flat_batch(
    advantages: Sequence[float],
    *,
    behaviour: Sequence[float] | None = None,
    old: Sequence[float] | None = None,
    reference: Sequence[float] | None = None,
    num_action_tokens: int | None = None,
) -> Batch:
    """One row whose every token but the first is trained, with the numbers given for those tokens."""

    def row(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor([[0.0, *values]], dtype=torch.float64)

    n = len(advantages)
    count = n if num_action_tokens is None else num_action_tokens
    return Batch(
        ids_BT=torch.ones(1, n + 1, dtype=torch.int64),
        attention_BT=torch.ones(1, n + 1, dtype=torch.int64),
        mask_BT=torch.tensor([[False] + [True] * n]),
        behaviour_logprobs_BT=row(behaviour or [0.0] * n),
        advantages_BT=row(advantages),
        temperature_B=torch.ones(1, dtype=torch.float64),
        weight_BT=row([1 / max(count, 1)] * n),
        run_ids=("run-0",),
        old_logprobs_BT=None if old is None else row(old),
        reference_logprobs_BT=None if reference is None else row(reference),
    )


def flat_logprobs(values: Sequence[float]) -> torch.Tensor:
    """[1, 1 + N] current log-probs for `flat_batch`, with gradient."""
    return torch.tensor([[0.0, *values]], dtype=torch.float64, requires_grad=True)


def logs(ratios: Sequence[float]) -> list[float]:
    return [math.log(r) for r in ratios]


def tiny_llama(dtype: torch.dtype = torch.float64, **settings: object) -> torch.nn.Module:
    """A causal LM of a few thousand weights, the same at every call."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64, initializer_range=0.5,
        bos_token_id=0, eos_token_id=1, **settings,
    )  # fmt: skip
    return exact(LlamaForCausalLM(config).to(dtype).eval())


def exact(model: torch.nn.Module) -> torch.nn.Module:
    """The same model with norms in its own precision. transformers computes them in float32 even where the
    weights are float64, so that two orders of the same sum differ by 1e-7 in the gradient."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and module.weight.dtype is torch.float64:
            module.forward = partial(_norm, module)  # type: ignore[method-assign]
    return model


def _norm(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    variance = hidden.square().mean(-1, keepdim=True)
    return module.weight * hidden * torch.rsqrt(variance + module.variance_epsilon)


def _ids(tokens: Sequence[int] | int, *, start: int) -> tuple[int, ...]:
    if isinstance(tokens, int):
        return tuple((start + i) % VOCABULARY for i in range(tokens))
    return tuple(tokens)


def terms(objective: str = "recipe", **changed: Any) -> Objective:
    """An objective by name, with other terms."""
    return find_objective(objective).with_terms(**changed)
