"""`nano-rl vision`: trains a vision-language model on logged runs that it sampled, images included."""

from __future__ import annotations

import sys
from collections import Counter
from functools import partial
from typing import Annotated

from typer import Option

from nano_coder.commands.options import Log, TaskChoice, open_log
from nano_rl.commands.options import DeviceOption
from nano_shared.errors import UsageError
from nano_shared.files import checkpoints_dir
from nano_shared.run_facts import ChosenRuns
from nano_shared.types import Trajectory


def command(
    model: Annotated[str, Option(help="vision:FOLDER, or an adapter that this command wrote.")],
    name: Annotated[str, Option(help="Name of the adapter that is written.")],
    task: TaskChoice = None,
    learning_rate: Annotated[float, Option(min=0)] = 2e-5,
    lora_rank: Annotated[int, Option(min=1)] = 16,
    device: DeviceOption = None,
    log: Log = None,
) -> int:
    """Train an adapter on the logged runs of a vision-language model, by policy gradient.

    The runs of a task are a group: one update each, once, on the policy loss of the trainer. Only runs that
    these very weights sampled, that ended and have a reward are used; sample them at temperature 1 without
    top-p and top-k.
    """
    from nano_rl.learn.objectives import find_objective
    from nano_vision.model import load_vision
    from nano_vision.training import add_adapter, refusal_of, train_adapter, vision_rows

    folder = checkpoints_dir() / name
    if folder.exists():
        raise UsageError(f"--name {name}: there is a checkpoint of that name; choose another one")
    loaded = load_vision(model.removeprefix("vision:"), device=device or "auto")
    store, refused, runs = open_log(log), Counter[str](), list[Trajectory]()
    for run in (one.trajectory for one in ChosenRuns(task=task).read(store)):
        if run.has_tokens or run.images:
            why = refusal_of(run, loaded.id)
            refused.update([why] if why else [])
            runs += [] if why else [run]
    groups = vision_rows(runs, loaded, store.blobs.get)
    left_out = "".join(f"\n  {count} {why}" for why, count in refused.most_common())
    if not groups:
        raise UsageError(
            f"no task of the log has two runs of {loaded.id} with different rewards: of {len(runs)} that may"
            f" train{left_out and f', and left out:{left_out}'}"
        )
    print(f"{len(groups)} groups of {len(runs)} runs{left_out}", file=sys.stderr)
    adapted = add_adapter(loaded.model, rank=lora_rank, seed=0)
    trained = loaded.with_model(adapted)
    train_adapter(
        trained, groups, find_objective("recipe"), learning_rate=learning_rate,
        on_step=partial(_tell, len(groups)),
    )  # fmt: skip
    adapted.save_pretrained(str(folder))
    print(f"wrote {folder}; nano-coder run --model vision:{folder} samples from it")
    return 0


def _tell(total: int, metrics: dict[str, float]) -> None:
    shown = ", ".join(f"{name} {metrics[name]:.4g}" for name in ("loss", "mismatch", "gradient"))
    print(f"update of {total}: {shown}", file=sys.stderr)
