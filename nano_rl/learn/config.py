"""Settings of learning: optimizer, guards, use of logged runs, updates. Imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from nano_rl.learn.objectives import ObjectiveConfig
from nano_shared.settings import Config

Quantise = Literal["4bit", "8bit"]
LearningRateSchedule = Literal["constant", "linear", "cosine"]


class OptimizerConfig(Config):
    """AdamW and its learning rate."""

    learning_rate: float = Field(1e-5, gt=0)
    """peak, reached after the warm-up"""
    schedule: LearningRateSchedule = "constant"
    """learning rate after the warm-up: constant, or decaying to 0 linearly or along half a cosine"""
    warmup_steps: int = Field(0, ge=0)
    """steps over which the learning rate rises to its peak"""
    states: Literal["float32", "8bit"] = "float32"
    """the two moments of each weight: 8 bytes, or 2 in blocks of 256 with a scale (8bit, by bitsandbytes)"""


class OfflineConfig(Config):
    """Settings of a training over a fixed set of rows: imitation, DPO, reward models."""

    epochs: float = Field(1.0, gt=0)
    """passes over the rows"""
    batch: int = Field(16, ge=1)
    """rows (trajectories or pairs) of one optimizer step"""
    max_tokens: int = Field(8192, ge=1)
    """positions of one micro-batch, padding included"""
    lora_rank: int = Field(16, ge=0)
    """rank of the adapter that is trained; 0 trains all weights"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """of the weights; trained weights have a float32 master copy, which is updated"""
    seed: int = Field(0, ge=0)
    """seed of the order of rows and of a new adapter"""
    save_every: int = Field(10, ge=1)
    """steps between saved states"""
    stop_after: int | None = Field(None, ge=1)
    """steps after which to stop short of the schedule, which `epochs` alone sets"""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-4, schedule="linear", warmup_steps=5)


class GuardConfig(Config):
    """Bounds at which a training stops by itself."""

    mismatch_max: float | None = Field(None, gt=0)
    """largest |log-prob of sampler - of trainer| of any fresh token, nats, for a log-prob below -1 divided by
    it; with bfloat16 weights the largest mean. None: 1e-4, with bfloat16 0.05"""
    patience: int = Field(3, ge=1)
    """number of steps in a row without any signal, all cut off, or collapsed, after which training stops"""


class LogsConfig(Config):
    """Use of logged runs by --from-logs; without effect on other trainings."""

    uses: int | None = Field(1, ge=1)
    """how often a logged run may be trained on, by this policy and its ancestors together. None: any"""
    mutants: int = Field(32, ge=0)
    """with fresh rollouts: further tasks, each the workspace that a passing logged run left with one line
    changed so that the run's check fails; 0 for none"""
    lambda_preference: float = Field(0.0, ge=0)
    """weight of the preference loss on outcomes that policy gradients may not use"""


class UpdateConfig(Config):
    """The settings that the updates of a training use."""

    steps: int = Field(40, ge=1)
    """number of steps; each gathers groups and learns from them"""
    max_tokens: int = Field(4096, ge=1)
    """tokens of one micro-batch, shared prefixes counted once (padded positions if they cannot be shared)"""
    lora_rank: int = Field(0, ge=0)
    """rank of the LoRA adapter that is trained; 0 trains all weights"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """of the weights; trained weights have a float32 master copy, which is updated"""
    gradient_checkpointing: bool = False
    """keep one state a layer and token for the backward pass and compute the rest again: a fraction of the
    memory of activations, for a third more time"""
    quantise: Quantise | None = None
    """load the base of a LoRA adapter in 4 or 8 bits (bitsandbytes)"""
    seed: int = Field(0, ge=0)
    """seed of tasks, rollouts and adapters: the same seed repeats a training"""
    objective: ObjectiveConfig = Field(default_factory=ObjectiveConfig)
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-4)
    guards: GuardConfig = GuardConfig()
    updates_per_step: int = Field(1, ge=1)
    """passes over the rollouts of a step; the ratio is to the weights before the first pass"""
    minibatches: int = Field(1, ge=1)
    """parts of each pass, made of whole groups, with one update each"""
    logs: LogsConfig = LogsConfig()
