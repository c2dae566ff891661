"""The learner: one model, its optimizer, and the update that every objective shares."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from nano_rl.batch import Batch
from nano_rl.errors import GuardTripped
from nano_rl.optimizer import clip_gradients, learning_rate_at, make_optimizer

Objective = Callable[[torch.nn.Module, Batch], tuple[torch.Tensor, dict[str, float]]]
"""model and micro-batch -> its share of the loss (a sum over the global denominator), its metrics"""

LORA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Learner:
    """Holds the live module. The trainable weights are float32; with LoRA the frozen base may be bfloat16."""

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        learning_rate: float,
        warmup: int,
        total_steps: int,
        weight_decay: float = 0.0,
        grad_clip: float = 1.0,
        autocast: bool = False,
    ) -> None:
        self.model = model
        self.step = 0
        self._schedule = (learning_rate, warmup, total_steps)
        self._grad_clip = grad_clip
        self._autocast = autocast
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._optimizer = make_optimizer(self._parameters, weight_decay=weight_decay)

    def update(self, batches: Sequence[Batch], objective: Objective) -> dict[str, float]:
        """One optimizer step over all micro-batches. Metrics are summed: each is a share of the global value.

        Raises GuardTripped where loss or gradient is not finite, before the weights are touched.
        """
        self.model.eval()  # no dropout: the old log-probs and these must come from the same function
        totals: dict[str, float] = {}
        for batch in batches:
            with self._arithmetic():
                loss, metrics = objective(self.model, batch)
            if loss.requires_grad:
                loss.backward()
            for key, value in {"loss": float(loss.detach()), **metrics}.items():
                totals[key] = (
                    max(totals.get(key, value), value)
                    if key.endswith("_max")
                    else totals.get(key, 0.0) + value
                )
        norm = clip_gradients(self._parameters, self._grad_clip)
        if not (math.isfinite(norm) and math.isfinite(totals.get("loss", 0.0))):
            raise GuardTripped(
                f"loss {totals.get('loss')} or gradient norm {norm} is not finite at step {self.step}; "
                "lower --learning-rate, or train in float32"
            )
        rate = learning_rate_at(self.step, *self._schedule)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return {**totals, "grad_norm": norm, "learning_rate": rate}

    def save(self, path: Path, extra: dict[str, Any]) -> None:
        """Everything that resuming needs: trainable weights, optimizer, step, and the caller's own state."""
        trainable = {n: p.detach() for n, p in self.model.named_parameters() if p.requires_grad}
        state = {
            "step": self.step,
            "weights": trainable,
            "optimizer": self._optimizer.state_dict(),
            "torch_rng": torch.get_rng_state(),
            "extra": extra,
        }
        temporary = path.with_suffix(".partial")
        torch.save(state, temporary)
        temporary.replace(path)

    def load(self, path: Path) -> dict[str, Any]:
        """Go on from `save`; returns the caller's own state."""
        state = torch.load(path, weights_only=True)
        parameters = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, value in state["weights"].items():
                parameters[name].copy_(value)
        self._optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["torch_rng"])
        self.step = state["step"]
        extra: dict[str, Any] = state["extra"]
        return extra

    def _arithmetic(self) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", torch.bfloat16) if self._autocast else nullcontext()


def add_lora(model: torch.nn.Module, rank: int, *, seed: int) -> torch.nn.Module:
    """The model under a fresh LoRA adapter of that rank on every linear layer (alpha twice the rank)."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    config = LoraConfig(
        r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules=LORA_TARGETS, task_type="CAUSAL_LM"
    )
    adapted: torch.nn.Module = get_peft_model(model, config)
    return adapted
