"""The learner: a model, its optimizer with learning-rate schedule, and one guarded update of its weights."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from nano_rl.learn.batch import Batch
from nano_rl.learn.config import LearningRateSchedule, OptimizerConfig
from nano_rl.learn.logprob import checkpoint_layers, token_logprobs
from nano_rl.learn.loss import mean_metrics
from nano_shared.errors import CheckpointError, ConfigError
from nano_shared.extension_points import Extensions
from nano_shared.lora import round_once
from nano_shared.process import keep_freed_memory

if TYPE_CHECKING:
    from nano_rl.config import TrainConfig


class MasterWeights:
    """Float32 master copies of the trained weights of lower precision. The backward pass moves each gradient
    to its master as soon as it is complete; those of micro-batches are summed there in float32."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters: dict[str, nn.Parameter] = {}
        self._copies: list[tuple[nn.Parameter, nn.Parameter]] = []
        for name, weight in model.named_parameters():
            if not weight.requires_grad:
                continue
            self.parameters[name] = weight
            if torch.finfo(weight.dtype).bits < 32:
                master = nn.Parameter(weight.detach().float())
                self.parameters[name] = master
                self._copies.append((weight, master))
                weight.register_post_accumulate_grad_hook(_mover(master))

    @torch.no_grad()
    def publish(self) -> None:
        """Copy the masters into the model, rounded; called after every optimizer step."""
        for weight, master in self._copies:
            weight.copy_(master)

    @torch.no_grad()
    def restore(self, weights: Mapping[str, torch.Tensor]) -> None:
        for name, value in weights.items():
            self.parameters[name].copy_(value)
        self.publish()


def _mover(master: nn.Parameter) -> Callable[[torch.Tensor], None]:
    def move(weight: torch.Tensor) -> None:
        gradient, weight.grad = weight.grad, None
        if gradient is None:
            return
        if master.grad is None:
            master.grad = gradient.float()
        else:
            master.grad += gradient

    return move


GRAD_CLIP = 1.0
"""largest norm of the gradient of all trained weights; larger ones are scaled down"""
_FUSED = ("cpu", "cuda")


def make_optimizer(
    model: nn.Module | Mapping[str, nn.Parameter], config: OptimizerConfig
) -> torch.optim.Optimizer:
    """AdamW (Loshchilov and Hutter 2019) without decay over weights that require a gradient, of a model or by
    name. States of 8 bits are blockwise (Dettmers et al. 2021, arXiv 2110.02861).

    Raises ConfigError if no weight is trainable, without bitsandbytes for 8 bits, and for trainable weights
    below float32: at learning rates of RL an update is smaller than half a unit in the last place of
    bfloat16.
    """
    named = model.named_parameters() if isinstance(model, nn.Module) else model.items()
    trainable = {name: p for name, p in named if p.requires_grad}
    if not trainable:
        raise ConfigError("no weight requires a gradient: nothing to train; attach an adapter or unfreeze")
    for name, p in trainable.items():
        if torch.finfo(p.dtype).bits < 32:
            raise ConfigError(f"{name} is {p.dtype}: updates would be rounded away; give float32 masters")
    matrices = [p for p in trainable.values() if p.ndim >= 2]
    vectors = [p for p in trainable.values() if p.ndim < 2]
    # two groups, as saved states have them
    groups = [{"params": params, "weight_decay": 0.0} for params in (matrices, vectors) if params]
    if config.states == "8bit":
        if importlib.util.find_spec("bitsandbytes") is None:
            raise ConfigError("optimizer.states = 8bit needs bitsandbytes: pip install bitsandbytes")
        from bitsandbytes.optim import AdamW8bit

        return AdamW8bit(groups, lr=config.learning_rate)
    # fused: one pass over weights, gradients and moments instead of about twelve
    fused = all(p.device.type in _FUSED for p in trainable.values())
    return torch.optim.AdamW(groups, lr=config.learning_rate, fused=fused)


def lr_at(step: int, *, peak: float, schedule: LearningRateSchedule, warmup_steps: int, steps: int) -> float:
    """Learning rate at `step`, counted from 0: rises over `warmup_steps` to `peak`, then stays constant, or
    decays to 0 at `steps`, linearly or along half a cosine."""
    if step < warmup_steps:
        return peak * (step + 1) / (warmup_steps + 1)
    done = min((step - warmup_steps) / max(steps - warmup_steps, 1), 1.0)
    if schedule == "linear":
        return peak * (1 - done)
    if schedule == "cosine":
        return peak * (1 + math.cos(math.pi * done)) / 2
    return peak


def set_lr(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> float:
    """Scale the gradients to a joint norm of at most `max_norm`; returns the norm before, on which the guards
    stop if it is not finite."""
    weights = [p for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm([p.grad for p in weights if p.grad is not None])
    if hasattr(norm, "full_tensor"):  # gradients that are sharded over ranks
        norm = norm.full_tensor()
    if not bool(norm <= max_norm):  # also true for NaN
        torch.nn.utils.clip_grads_with_norm_(weights, max_norm, norm)
    return norm.item()


class Reference:
    """The reference model of the KL: a copy of the trained weights at the start of the training, so that the
    reference of an adapter is that adapter. Create it before the first update."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        trained = model.named_parameters()
        self._start = {name: p.detach().clone() for name, p in trained if p.requires_grad}

    @torch.no_grad()
    def score(self, batches: Sequence[Batch]) -> list[Batch]:
        with with_weights(self._model, self._start):
            return [batch.with_reference(token_logprobs(self._model, batch)) for batch in batches]


@contextmanager
def with_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Temporarily give the trained parameters other values, without a copy on the same device."""
    parameters = dict(model.named_parameters())
    live = {name: parameters[name].data for name in weights}
    try:
        for name, value in weights.items():
            parameters[name].data = value.to(live[name])
        yield
    finally:
        for name, data in live.items():
            parameters[name].data = data


BatchLoss = Callable[[nn.Module, Batch], tuple[Tensor, dict[str, float]]]
"""model and micro-batch -> its share of the loss, and metrics that are summed over micro-batches"""
LossPart = tuple[Batch, BatchLoss]
Guard = Callable[[dict[str, float]], None]
"""checks the metrics of an update before it is applied; raises GuardTripped"""

_MAMBA = ("falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h")
"""model types with fused kernels for state spaces, as PEFT lists them"""
_FUSED_PROJECTIONS = ("out_proj",)
"""layers of these whose weight their kernels read themselves"""
_ROUTERS = ("router", "gate", "shared_expert_gate")
"""names of linear layers that choose experts; they get no adapter"""
_BESIDE_EXPERTS = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""names that PEFT reads as experts of an older layout where a model has experts"""


class Stateful(Protocol):
    """Anything with a state dict, as torch's modules and optimizers have."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


class Learner:
    """Trains a model in place, the same module that samples."""

    roll_out: Any = None
    """a `RollOut` on all processes that train; None: rollouts are those of this process"""

    def __init__(self, model: nn.Module, config: OptimizerConfig, *, steps: int) -> None:
        """`steps` is the length of the learning-rate schedule."""
        keep_freed_memory()
        self.model = model
        self.step = 0
        self._config = config
        self.steps = steps
        self._masters = MasterWeights(model)
        self._trained = self._masters.parameters
        self._optimizer = make_optimizer(self._trained, config)
        self._attached: dict[str, Stateful] = {}

    def update(
        self, batches: Sequence[Batch], objective: BatchLoss, guard: Guard, *, ends_step: bool = True
    ) -> dict[str, float]:
        return self.update_parts([(batch, objective) for batch in batches], guard, ends_step=ends_step)

    def reference(self) -> Reference:
        """The weights as they are now. Call it before the first update."""
        return Reference(self.model)

    @torch.no_grad()
    def logprobs(self, batches: Sequence[Batch]) -> list[Tensor]:
        return [token_logprobs(self.model, batch) for batch in batches]

    @torch.enable_grad()  # code of users may have switched it off for the process
    def update_parts(
        self, work: Sequence[LossPart], guard: Guard, *, ends_step: bool = True
    ) -> dict[str, float]:
        """One optimizer step over all micro-batches; returns its metrics. Raises GuardTripped from `guard`,
        before the weights change. `ends_step`: the step counter and the learning rate advance once per step.
        """
        parts = []
        device = next(self.model.parameters()).device
        for batch, objective in work:
            # a micro-batch is placed when its turn comes
            placed = batch.to(device) if isinstance(batch, Batch) else batch
            loss, metrics = objective(self.model, placed)
            loss.backward()
            parts.append(metrics)
        config = self._config
        rate = lr_at(
            self.step, peak=config.learning_rate, schedule=config.schedule,
            warmup_steps=config.warmup_steps, steps=self.steps,
        )  # fmt: skip
        norm = clip_gradients(self._trained.values(), GRAD_CLIP)
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
        """Save and restore another part with the learner, such as a critic."""
        self._attached[name] = part

    def state(self) -> dict[str, Any]:
        """The state as a tree (`states.save_tree`), for `restore`. Shares the live tensors."""
        return {
            "step": self.step,
            "weights": {name: p.detach() for name, p in self._trained.items()},
            "optimizer": self._optimizer.state_dict(),
            "attached": {name: part.state_dict() for name, part in self._attached.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state()`. Raises CheckpointError for the state of another model."""
        if "shards" in state:
            raise CheckpointError(
                "the saved state lies in shards of several ranks: go on with `torchrun --nproc-per-node N"
                " -m nano_rl train` and the same settings; N = 1 does too"
            )
        other = set(state["attached"]) ^ set(self._attached)
        if other:
            raise CheckpointError(f"the saved state has other parts: {sorted(other)}; give the same settings")
        restore_weights(self.model, state["weights"])
        self._masters.restore(state["weights"])
        self._optimizer.load_state_dict(state["optimizer"])
        for name, part in self._attached.items():
            part.load_state_dict(state["attached"][name])
        self.step = state["step"]


def restore_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy saved weights into the trained ones. Raises CheckpointError if names or shapes differ."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    saved = {name: tuple(value.shape) for name, value in weights.items()}
    differing = set(saved.items()) ^ {(name, tuple(p.shape)) for name, p in trained.items()}
    if differing:
        name, shape = min(differing)
        raise CheckpointError(
            f"the saved state is of another model: {name} {shape} is in one of the two alone; give the same"
            " --model and settings"
        )
    with torch.no_grad():
        for name, value in weights.items():
            trained[name].copy_(value)


def prepare(
    model: nn.Module, *, lora_rank: int, seed: int, gradient_checkpointing: bool = False
) -> nn.Module:
    """Make a loaded model trainable: its adapter, or all weights (rank 0), or a new LoRA adapter. Raises
    ConfigError for a quantised base without an adapter."""
    trained = _trainable(model, lora_rank, seed)
    if hasattr(trained, "peft_config"):
        round_once(trained)
    if gradient_checkpointing:
        checkpoint_layers(trained)
    return trained


def _trainable(model: nn.Module, lora_rank: int, seed: int) -> nn.Module:
    if hasattr(model, "peft_config"):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_" in name)
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
        return model
    if lora_rank == 0:
        if getattr(model, "is_quantized", False):
            raise ConfigError("weights of 4 or 8 bits cannot be trained themselves; give lora_rank, say 16")
        return model.requires_grad_(True)
    from peft import LoraConfig, get_peft_model

    modules, experts = lora_targets(model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = LoraConfig(
            r=lora_rank, lora_alpha=2 * lora_rank, lora_dropout=0.0, target_modules=modules,
            target_parameters=experts or None, fan_in_fan_out=any(map(_is_conv1d, model.modules())),
            task_type="CAUSAL_LM",
        )  # fmt: skip
        try:
            adapted: nn.Module = get_peft_model(model, config)  # type: ignore[arg-type]
        except ValueError as problem:  # PEFT's, of a model that it cannot adapt
            reason = str(problem).strip().splitlines()[0]
            raise ConfigError(
                f"PEFT cannot adapt {type(model).__name__}: {reason}; lora_rank = 0 trains all weights"
            ) from None
    return adapted


def lora_targets(model: nn.Module) -> tuple[list[str], list[str]]:
    """Names of the linear layers that get an adapter, and of the parameters that hold experts: all linear
    layers but the head and the routers; stderr says which others PEFT cannot name. Raises ConfigError if
    there is none."""
    experts = dict.fromkeys(
        ".".join(f"{name}.{key}".split(".")[-2:])
        for name, part in model.named_modules()
        for key, parameter in part.named_parameters(recurse=False)
        if parameter.ndim == 3 and not isinstance(part, nn.modules.conv._ConvNd)
    )
    head = getattr(model, "get_output_embeddings", lambda: None)()
    heads = {_last(name) for name, part in model.named_modules() if part is head}
    linear = [
        _last(name) for name, part in model.named_modules() if isinstance(part, nn.Linear) or _is_conv1d(part)
    ]
    unnamed = {name for name in linear if experts and name in _BESIDE_EXPERTS}
    if unnamed:
        print(
            f"nano: {', '.join(sorted(unnamed))} of dense layers and shared experts get no adapter, since"
            " PEFT cannot name them beside experts; lora_rank = 0 trains all weights",
            file=sys.stderr,
        )
    model_type = getattr(getattr(model, "config", None), "model_type", "")
    fused = {name for name in linear if name in _FUSED_PROJECTIONS and model_type in _MAMBA}
    if fused:
        print(
            f"nano: {', '.join(sorted(fused))} of {model_type} gets no adapter, since its kernels read the"
            " weight past one; lora_rank = 0 trains all weights",
            file=sys.stderr,
        )
    left_out = {"lm_head", *heads, *_ROUTERS, *unnamed, *fused}
    modules = dict.fromkeys(name for name in linear if name not in left_out)
    if not modules:
        raise ConfigError(
            f"{type(model).__name__} has no linear layer for LoRA to adapt; lora_rank = 0 trains all weights"
        )
    return list(modules), list(experts)


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _is_conv1d(module: nn.Module) -> bool:
    """True for the linear layer of GPT-2, whose weight is transposed."""
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"


class RankedTraining(Protocol):
    """Trains in the processes that torchrun starts: an extension of `nano.learners`, a module."""

    def run_ranks(self, command: Callable[[], None]) -> None:
        """Run the command line on rank 0, and follow it on the others."""

    def leader(self) -> Any:
        """This process among the ranks: `size`, and `beside`, how many others this machine has; None if it
        does not lead them."""

    def open_sharded(
        self, ranks: Any, model_name: str, settings: TrainConfig, folder: Path, model: nn.Module,
        config: OptimizerConfig, *, steps: int,
    ) -> Learner:  # fmt: skip
        """The learner of rank 0, with the model spread over all ranks."""


RANKED_TRAININGS: Extensions[RankedTraining] = Extensions("nano.learners")


_started: list[RankedTraining] = []


def run_on_ranks(command: Callable[[], None]) -> None:
    """As `RankedTraining.run_ranks` of the installed one. Raises ConfigError where there is none."""
    _started.append(RANKED_TRAININGS.find("ranks"))
    _started[0].run_ranks(command)


def started_ranks() -> RankedTraining | None:
    """What torchrun's processes train with; None in a process that torchrun did not start."""
    return _started[0] if _started else None
