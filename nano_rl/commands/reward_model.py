"""`nano-rl reward-model`: which of two runs people would prefer, learned from pairs."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING
from urllib.parse import quote

from nano_rl.commands.options import DeviceOption, Log, ModelOption, NameOption
from nano_rl.commands.pairs import FromLogs, Pairs
from nano_rl.config.training import RewardModelConfig
from nano_shared.command_line import JsonOption
from nano_shared.settings_options import Settings, settings_options

if TYPE_CHECKING:
    from nano_rl.preferences.reward_model import RewardModelReport as Report


@settings_options(
    RewardModelConfig,
    {"Learning": ("optimizer.learning_rate", "epochs", "lora_rank", "held_out")},
)
def command(
    settings: Settings[RewardModelConfig],
    name: NameOption,
    model: ModelOption = None,
    device: DeviceOption = None,
    pairs: Pairs = None,
    from_logs: FromLogs = False,
    log: Log = None,
    as_json: JsonOption = False,
) -> int:
    """Train a reward model on the backbone of --model; --reward preference:NAME=1 then uses it."""
    config = settings.config()
    from nano_rl.commands.session import model_to_train, training_folder, weights_to_train

    parent = model_to_train(model)  # before torch is imported, which takes seconds
    from nano_coder.view.page import answer_key, render_page
    from nano_rl.commands.pairs import open_pairs, trained_runs, trained_tasks
    from nano_rl.commands.progress import bar
    from nano_rl.learn.model.scalar_model import scalar_model
    from nano_rl.preferences.reward_checkpoint import CALIBRATION, save_reward_model
    from nano_rl.preferences.reward_model import held_out, measure, train_reward_model
    from nano_rl.report.page import calibration_page

    target, folder = training_folder(name)
    opened = weights_to_train(parent, config.dtype, device)
    rows = open_pairs(opened, pairs, from_logs, log, seed=config.seed)
    train, kept = held_out(rows, config.held_out, config.seed)
    scalar = scalar_model(opened.loaded.model, lora_rank=config.lora_rank, seed=config.seed, bias=False)
    with bar("reward model", 1) as progress:

        def on_step(done: int, total: int, values: dict[str, float]) -> None:
            progress.reach(done, total, f"loss {values['loss']:.3f}  accuracy {values['accuracy']:.2f}")

        steps = train_reward_model(scalar, train, config, folder, on_step)
    report = measure(scalar, kept, max_tokens=config.max_tokens)
    key = answer_key("training", {"name": name})
    page = render_page({key: calibration_page(report)}, start=f"#/training?name={quote(name)}", title=name)
    save_reward_model(
        target, scalar, opened, parent=parent, config=config, steps=steps, run_ids=trained_runs(train),
        tasks=trained_tasks(train), report=report, page=page,
    )  # fmt: skip
    if as_json:
        print(json.dumps({"checkpoint": str(target), "steps": steps, "held_out": asdict(report)}))
        return 0
    _show(report)
    print(target / CALIBRATION)
    print(target)
    return 0


def _show(report: Report) -> None:
    """Accuracy and calibration on held-out pairs, on stderr."""
    from rich.table import Table

    from nano_shared.console import Console

    title = (
        f"{report.pairs} held-out pairs: accuracy {report.accuracy:.1%}, log loss {report.log_loss:.3f},"
        f" expected calibration error {report.calibration_error:.3f}"
    )
    table = Table("sure by", "pairs", "mean confidence", "right", box=None, title=title)
    for one in report.bins:
        table.add_row(
            f"{one.low:.0%} to {one.high:.0%}", str(one.pairs), f"{one.confidence:.1%}", f"{one.accuracy:.1%}"
        )
    Console(stderr=True).print(table)
