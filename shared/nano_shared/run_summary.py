"""A run in one line: what `log list` shows, read from columns without its turns."""

from __future__ import annotations

from nano_shared.types import StopReason, Value


class RunSummary(Value):
    id: str
    started: float
    """unix seconds"""
    ended: float | None
    task_key: str
    prompt: str
    policy: str
    """as the user named it"""
    policy_id: str | None
    """weights that sampled the last turn; None before the first"""
    stop: StopReason | None
    reward: float | None
    """of the newest verdict"""
    turns: int
    sampled_tokens: int
    trainable: bool
    """every turn holds token ids and log-probs"""
