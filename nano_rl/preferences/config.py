"""What a training on preference pairs is set to: DPO, and reward models."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from nano_rl.learn.config.objective import Config
from nano_rl.learn.config.training import OptimizerConfig


class DpoConfig(Config):
    """One training by direct preference optimisation. Sources of the maths stand in `dpo.py`."""

    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    """sigmoid (DPO) or ipo, which has a margin to reach instead of one to widen for ever"""
    beta: float = Field(0.1, gt=0)
    """how strongly the policy is held to where it started: the larger, the closer"""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """share of pairs that are taken to be labelled the wrong way round; with sigmoid only"""
    length_normalised: bool = False
    """compare log-probs a token instead of those of whole answers"""
    lambda_sft: float = Field(0.0, ge=0)
    """weight of imitating the chosen answers beside the comparison"""
    epochs: float = Field(1.0, gt=0)
    """passes over the pairs"""
    batch: int = Field(8, ge=1)
    """pairs of one optimizer step"""
    max_tokens: int = Field(8192, ge=1)
    """positions of one micro-batch, padding included"""
    lora_rank: int = Field(16, ge=0)
    """rank of the adapter that is trained; 0 trains all weights"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """of the weights; those that are trained keep a float32 copy, which takes the updates"""
    seed: int = Field(0, ge=0)
    """of the order of the pairs and of a fresh adapter"""
    save_every: int = Field(10, ge=1)
    """steps between saved states"""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-4, schedule="linear", warmup_steps=5)

    @model_validator(mode="after")
    def _applies(self) -> DpoConfig:
        if self.loss == "ipo" and self.label_smoothing > 0:
            raise ValueError("`label_smoothing` changes the sigmoid loss; leave it at 0 with loss = ipo")
        return self


class RewardModelConfig(Config):
    """One training of a reward model on preference pairs."""

    epochs: float = Field(2.0, gt=0)
    """passes over the pairs"""
    batch: int = Field(16, ge=1)
    """pairs of one optimizer step"""
    held_out: float = Field(0.2, gt=0, lt=1)
    """share of the prompts whose pairs are kept for measuring"""
    max_tokens: int = Field(8192, ge=1)
    """positions of one micro-batch, padding included"""
    lora_rank: int = Field(0, ge=0)
    """rank of the adapter that is trained and then merged; 0 trains all weights"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """of the weights; those that are trained keep a float32 copy, which takes the updates"""
    seed: int = Field(0, ge=0)
    """of the order of the pairs, of what is held out and of a fresh adapter"""
    save_every: int = Field(10, ge=1)
    """steps between saved states"""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-4, schedule="linear", warmup_steps=5)
