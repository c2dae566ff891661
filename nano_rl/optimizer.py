"""AdamW, its learning-rate schedule and gradient clipping."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def make_optimizer(parameters: Sequence[torch.nn.Parameter], *, weight_decay: float) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter, 2019) with betas 0.9 and 0.99; the rate is set at each step."""
    return torch.optim.AdamW(parameters, lr=0.0, betas=(0.9, 0.99), weight_decay=weight_decay, fused=True)


def learning_rate_at(step: int, peak: float, warmup: int, total: int, floor: float = 0.1) -> float:
    """Linear warm-up over `warmup` steps, then linear decay to `floor * peak` at `total`; 0-based steps."""
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return peak * (1.0 - (1.0 - floor) * progress)


def clip_gradients(parameters: Sequence[torch.nn.Parameter], limit: float) -> float:
    """Scale the gradient to at most `limit` in global L2 norm; returns the norm before that."""
    return float(torch.nn.utils.clip_grad_norm_([p for p in parameters if p.grad is not None], limit))
