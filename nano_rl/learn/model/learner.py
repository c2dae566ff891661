"""The learner: one live model, its optimizer, and the update that every objective shares."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from nano_rl.learn.config.training import OptimizerConfig
from nano_rl.learn.model.logprob import token_logprobs
from nano_rl.learn.model.optimizer import Masters, clip_gradients, lr_at, make_optimizer, set_lr
from nano_rl.learn.objectives.loss import mean_metrics
from nano_rl.learn.rows.batch import Batch
from nano_shared.allocator import keep_freed_memory
from nano_shared.durable import full_disk_explained, sync
from nano_shared.errors import CheckpointError


class Reference:
    """Scores batches with the starting weights: a copy of all that is trained, and of nothing else.

    So the reference of an adapter that has learnt before is that adapter, not the bare model under it.
    Create it before the first update. A resumed run loads the starting weights first, then its state.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._start = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}

    @torch.no_grad()
    def score(self, batches: Sequence[Batch]) -> list[Batch]:
        """The batches with `reference_logprobs_BT` filled in."""
        with self._at_the_start():
            return [batch.with_reference(token_logprobs(self._model, batch)) for batch in batches]

    @contextmanager
    def _at_the_start(self) -> Iterator[None]:
        trained = {name: p for name, p in self._model.named_parameters() if name in self._start}
        now = {name: p.data for name, p in trained.items()}
        for name, parameter in trained.items():
            parameter.data = self._start[name]
        try:
            yield
        finally:
            for name, parameter in trained.items():
                parameter.data = now[name]


Objective = Callable[[nn.Module, Batch], tuple[Tensor, dict[str, float]]]
"""model and micro-batch -> its share of the loss, and metrics that add up over micro-batches"""
LossPart = tuple[Batch, Objective]
"""a micro-batch and the loss that it belongs to"""
Guard = Callable[[dict[str, float]], None]
"""judges the metrics of an update before it is applied; raises GuardTripped"""

LORA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Stateful(Protocol):
    """What torch's modules and optimizers are."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


class Learner:
    """Trains a module in place: the very one that samples. Where its weights are bfloat16, they are the
    rounded copy of float32 masters, which the optimizer moves and the state keeps."""

    def __init__(self, model: nn.Module, config: OptimizerConfig, *, steps: int) -> None:
        """`steps` is the length of the learning-rate schedule."""
        keep_freed_memory()
        self.model = model
        self.step = 0
        self._config = config
        self._steps = steps
        self._masters = Masters(model)
        self._trained = self._masters.parameters
        self._optimizer = make_optimizer(self._trained, config)
        self._attached: dict[str, Stateful] = {}

    def update(
        self, batches: Sequence[Batch], objective: Objective, guard: Guard, *, ends_step: bool = True
    ) -> dict[str, float]:
        """One optimizer step over all micro-batches under one loss (`update_parts`)."""
        return self.update_parts([(batch, objective) for batch in batches], guard, ends_step=ends_step)

    def update_parts(
        self, work: Sequence[LossPart], guard: Guard, *, ends_step: bool = True
    ) -> dict[str, float]:
        """One optimizer step over all micro-batches; its metrics. A guard that trips spares the weights.

        `ends_step` is False for all but the last of several updates that make up one step: the step counts,
        and sets the learning rate, once.
        """
        parts = []
        for batch, objective in work:
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
        self.step += ends_step
        return values

    def attach(self, name: str, part: Stateful) -> None:
        """Save and restore another part with the learner: a value head, a second optimizer."""
        self._attached[name] = part

    def state(self) -> dict[str, Any]:
        """Everything that going on needs, as a tree (`tensor_tree`) that shares the live tensors."""
        return {
            "step": self.step,
            "weights": {name: p.detach() for name, p in self._trained.items()},
            "optimizer": self._optimizer.state_dict(),
            "attached": {name: part.state_dict() for name, part in self._attached.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state()`. Raises CheckpointError for the state of a model of other weights."""
        other = set(state["attached"]) ^ set(self._attached)
        if other:
            raise CheckpointError(f"the saved state has other parts: {sorted(other)}; give the same settings")
        restore_weights(self.model, state["weights"])
        self._masters.restore(state["weights"])
        self._optimizer.load_state_dict(state["optimizer"])
        for name, part in self._attached.items():
            part.load_state_dict(state["attached"][name])
        self.step = state["step"]

    def save(self, path: Path, extra: dict[str, Any]) -> None:
        """The state and the caller's own in one file that is replaced whole."""
        temporary = path.with_suffix(".partial")
        with full_disk_explained(path, CheckpointError):
            try:
                with temporary.open("wb") as file:
                    torch.save({**self.state(), "extra": extra}, file)
            except RuntimeError as error:
                # torch's archive has an error of its own over that of the file
                raise error.__context__ if isinstance(error.__context__, OSError) else error from None
            sync(temporary)
            temporary.replace(path)

    def load(self, path: Path) -> dict[str, Any]:
        """Go on from `save`; returns the caller's own state."""
        state = torch.load(path, weights_only=True)
        self.restore(state)
        extra: dict[str, Any] = state["extra"]
        return extra


def restore_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Put saved weights into the trained ones. Raises CheckpointError for those of another model."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    told = {name: tuple(value.shape) for name, value in weights.items()}
    differing = set(told.items()) ^ {(name, tuple(p.shape)) for name, p in trained.items()}
    if differing:
        name, shape = min(differing)
        raise CheckpointError(
            f"the saved state is of another model: {name} {shape} is in one of the two alone; give the same"
            " --model and settings"
        )
    with torch.no_grad():
        for name, value in weights.items():
            trained[name].copy_(value)


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
