"""`train_offline`: what imitation, DPO and reward models have in common from their rows to a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nano_rl.config import SftConfig
from nano_rl.session import training_folder, weights_to_train

if TYPE_CHECKING:
    from nano_coder.models.opening import OpenedWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineRows:
    rows: Sequence[Any]
    run_ids: Sequence[str]
    tasks: Sequence[Any]


def train_offline(
    name: str, parent: str, config: SftConfig, device: str | None,
    read: Callable[[OpenedWeights], OfflineRows], train: Callable[..., int], *, label: str,
    shown: Mapping[str, str], as_json: bool,
) -> None:  # fmt: skip
    """Train on rows and write checkpoint `name`. `train` takes the model, the rows, the config, the folder
    and a callback for each step; `shown` maps metrics to their form in the bar."""
    from nano_rl.checkpoints.checkpoint import Learned, save_checkpoint
    from nano_rl.commands.progress import bar, print_trained
    from nano_rl.learn.learner import prepare

    target, folder = training_folder(name)
    opened = weights_to_train(parent, config.dtype, device, config.quantise)
    found, last = read(opened), dict[str, float]()
    trained = prepare(
        opened.loaded.model, lora_rank=config.lora_rank, seed=config.seed,
        gradient_checkpointing=config.gradient_checkpointing,
    )  # fmt: skip
    with bar(label, 1) as progress:

        def on_step(done: int, total: int, values: dict[str, float]) -> None:
            last.update(values)
            told = (f"{metric} {values[metric]:{form}}" for metric, form in shown.items())
            progress.reach(done, total, f"{'  '.join(told)}  {values['tokens_per_second']:.0f} tokens/s")

        steps = train(trained, found.rows, config, folder, on_step)
    metrics = {name: last[name] for name in shown if name in last}
    learned = Learned(steps=steps, run_ids=found.run_ids, tasks=found.tasks, metrics=metrics)
    save_checkpoint(target, trained, opened, parent=parent, config=config, learned=learned)
    print_trained(target, folder, as_json=as_json)
