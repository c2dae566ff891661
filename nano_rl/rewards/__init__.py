"""Rewards beside the grader's own."""

from nano_rl.rewards.reward import COMPOSERS, Reward

__all__ = ["COMPOSERS", "Reward"]
