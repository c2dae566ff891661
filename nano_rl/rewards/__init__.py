"""Rewards made of named parts: the outcome first, shaping behind its gate, each part logged apart."""

from nano_coder.verify.trainable import outcome
from nano_rl.rewards.registry import open_reward, parse_reward
from nano_rl.rewards.reward import Reward

__all__ = ["Reward", "open_reward", "outcome", "parse_reward"]
