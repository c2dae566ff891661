"""The learner: one live model, its optimizer, and the update that every objective shares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nano_rl.batch import Batch
from nano_rl.config import OptimizerConfig
from nano_rl.loss import mean_metrics
from nano_rl.masters import Masters
from nano_rl.optimizer import clip_gradients, lr_at, make_optimizer, set_lr

Objective = Callable[[nn.Module, Batch], tuple[Tensor, dict[str, float]]]
"""model and micro-batch -> its share of the loss, and metrics that add up over micro-batches"""
Guard = Callable[[dict[str, float]], None]
"""judges the metrics of an update before it is applied; raises GuardTripped"""

LORA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Learner:
    """Trains a module in place: the very one that samples. Where its weights are bfloat16, they are the
    rounded copy of float32 masters, which the optimizer moves and the state keeps."""

    def __init__(self, model: nn.Module, config: OptimizerConfig, *, steps: int) -> None:
        """`steps` is the length of the learning-rate schedule."""
        self.model = model
        self.step = 0
        self._config = config
        self._steps = steps
        self._masters = Masters(model)
        self._trained = self._masters.parameters
        self._optimizer = make_optimizer(self._trained, config)

    def update(self, batches: Sequence[Batch], objective: Objective, guard: Guard) -> dict[str, float]:
        """One optimizer step over all micro-batches; its metrics. A guard that trips spares the weights."""
        parts = []
        for batch in batches:
            loss, metrics = objective(self.model, batch)
            loss.backward()
            parts.append(metrics)
        rate = lr_at(
            self.step,
            peak=self._config.learning_rate,
            schedule=self._config.schedule,
            warmup_steps=self._config.warmup_steps,
            steps=self._steps,
        )
        norm = clip_gradients(self._trained.values(), self._config.grad_clip)
        values = {**mean_metrics(parts), "grad_norm": norm, "learning_rate": rate, "step": float(self.step)}
        try:
            guard(values)
            set_lr(self._optimizer, rate)
            self._optimizer.step()
            self._masters.publish()
        finally:
            self._optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return values

    def save(self, path: Path, extra: dict[str, Any]) -> None:
        """Everything that resuming needs, in one file that is replaced whole."""
        state = {
            "step": self.step,
            "weights": {name: p.detach() for name, p in self._trained.items()},
            "optimizer": self._optimizer.state_dict(),
            "extra": extra,
        }
        temporary = path.with_suffix(".partial")
        torch.save(state, temporary)
        temporary.replace(path)

    def load(self, path: Path) -> dict[str, Any]:
        """Go on from `save`; returns the caller's own state."""
        state = torch.load(path, weights_only=True)
        with torch.no_grad():
            for name, value in state["weights"].items():
                self._trained[name].copy_(value)
        self._masters.publish()
        self._optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]
        extra: dict[str, Any] = state["extra"]
        return extra


def prepare(model: nn.Module, *, lora_rank: int, seed: int) -> nn.Module:
    """Make a loaded model trainable: all weights, the adapter it has, or a fresh adapter of that rank."""
    if hasattr(model, "peft_config"):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_" in name)
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
        return model
    if lora_rank == 0:
        return model.requires_grad_(True)
    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = LoraConfig(
            r=lora_rank,
            lora_alpha=2 * lora_rank,
            lora_dropout=0.0,
            target_modules=LORA_TARGETS,
            task_type="CAUSAL_LM",
        )
        adapted: nn.Module = get_peft_model(model, config)  # type: ignore[arg-type]
    return adapted
