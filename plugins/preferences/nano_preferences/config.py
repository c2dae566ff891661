"""Settings of DPO and of reward models."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from nano_rl.config import OfflineConfig, Quantise


class DpoConfig(OfflineConfig):
    """Settings of direct preference optimisation (formulas in `dpo.py`)."""

    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    """sigmoid (DPO), or ipo, which regresses the margin to a target instead of widening it without end"""
    beta: float = Field(0.1, gt=0)
    """strength of the KL constraint: a larger beta keeps the policy closer to its start"""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """assumed share of wrongly labelled pairs; with sigmoid only"""
    length_normalised: bool = False
    """compare mean log-probs per token instead of sums over answers"""
    lambda_sft: float = Field(0.0, ge=0)
    """weight of the negative log-likelihood of the chosen answers"""
    batch: int = Field(8, ge=1)
    """pairs of one optimizer step"""
    gradient_checkpointing: bool = False
    """compute activations again in the backward pass, which takes less memory and more time"""
    quantise: Quantise | None = None
    """load the base of a LoRA adapter in 4 or 8 bits (bitsandbytes)"""

    @model_validator(mode="after")
    def _applies(self) -> DpoConfig:
        if self.loss == "ipo" and self.label_smoothing > 0:
            raise ValueError("`label_smoothing` changes the sigmoid loss; leave it at 0 with loss = ipo")
        return self


class RewardModelConfig(OfflineConfig):
    """Settings of the training of a reward model on preference pairs."""

    epochs: float = Field(2.0, gt=0)
    """passes over the pairs"""
    held_out: float = Field(0.2, gt=0, lt=1)
    """share of the prompts whose pairs are held out for evaluation"""
    lora_rank: int = Field(0, ge=0)
    """rank of the adapter that is trained and then merged; 0 trains all weights"""
