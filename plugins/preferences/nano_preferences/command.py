"""`nano-rl dpo` and `nano-rl reward-model`: what preference pairs train."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.table import Table
from typer import Option

from nano_coder.commands.options import open_log
from nano_coder.installed_views import VIEWS
from nano_preferences.config import DpoConfig, RewardModelConfig
from nano_rl.commands.options import DeviceOption, Log, ModelOption, NameOption
from nano_shared.command_line import Console, JsonOption
from nano_shared.errors import UsageError
from nano_shared.extension_points import call_extension
from nano_shared.settings import Settings, settings_options

if TYPE_CHECKING:
    from nano_coder.models.opening import OpenedWeights
    from nano_preferences.pairs import PairRows, PairTask
    from nano_preferences.reward_model import RewardModelReport

Pairs = Annotated[Path | None, Option(help="JSON lines file of preference pairs.")]
FromLogs = Annotated[
    bool, Option("--from-logs", help="Pairs from the log, as `preferences build` makes them.")
]


def _calibration(name: str, report: RewardModelReport) -> str | None:
    """The page of the first installed view that draws calibrations."""
    drawn = (
        call_extension(v.calibration, name, report, name=f"the view {kind}") for kind, v in VIEWS.items()
    )
    return next((page for page in drawn if page is not None), None)


@settings_options(DpoConfig, {"Learning": ("loss", "beta", "optimizer.learning_rate", "epochs", "lora_rank")})
def dpo(
    settings: Settings[DpoConfig],
    name: NameOption,
    model: ModelOption = None,
    device: DeviceOption = None,
    pairs: Pairs = None,
    from_logs: FromLogs = False,
    log: Log = None,
    as_json: JsonOption = False,
) -> int:
    """Train on preference pairs and write checkpoint NAME: --pairs FILE, or --from-logs."""
    from nano_rl.command_setup import adapter_rank
    from nano_rl.commands.progress import OfflineRows, train_offline

    config = settings.config(adapter_rank(settings, model))
    parent = _looked_first(model, pairs, from_logs, log)
    from nano_preferences.dpo import train_dpo

    def read(opened: OpenedWeights) -> OfflineRows:
        rows = open_pairs(opened, pairs, from_logs, log, seed=config.seed)
        return OfflineRows(rows=rows, run_ids=trained_runs(rows), tasks=trained_tasks(rows))

    train_offline(
        name, parent, config, device, read, train_dpo, label="preferences",
        shown={"loss": ".3f", "accuracy": ".2f", "margin": ".3f"}, as_json=as_json,
    )  # fmt: skip
    return 0


@settings_options(
    RewardModelConfig, {"Learning": ("optimizer.learning_rate", "epochs", "lora_rank", "held_out")}
)
def reward_model(
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
    parent = _looked_first(model, pairs, from_logs, log)
    from nano_preferences.critic import scalar_model
    from nano_preferences.reward_checkpoint import CALIBRATION, save_reward_model
    from nano_preferences.reward_model import held_out, measure, train_reward_model
    from nano_rl.command_setup import training_folder, weights_to_train
    from nano_rl.commands.progress import bar

    target, folder = training_folder(name)
    opened = weights_to_train(parent, config.dtype, device)
    rows = open_pairs(opened, pairs, from_logs, log, seed=config.seed)
    train, kept = held_out(rows, config.held_out, config.seed)
    scalar = scalar_model(opened.loaded.model, lora_rank=config.lora_rank, seed=config.seed, bias=False)
    with bar("reward model", 1, "; the same command goes on from the last saved state") as progress:

        def on_step(done: int, total: int, values: dict[str, float]) -> None:
            progress.reach(done, total, f"loss {values['loss']:.3f}  accuracy {values['accuracy']:.2f}")

        steps = train_reward_model(scalar, train, config, folder, on_step)
    report = measure(scalar, kept, max_tokens=config.max_tokens)
    page = _calibration(name, report)
    save_reward_model(
        target, scalar, opened, parent=parent, config=config, steps=steps, run_ids=trained_runs(train),
        tasks=trained_tasks(train), report=report, page=page,
    )  # fmt: skip
    if as_json:
        print(json.dumps({"checkpoint": str(target), "steps": steps, "held_out": asdict(report)}))
        return 0
    _show(report)
    if page is None:
        print(f"the plug-in view draws {CALIBRATION}: pip install 'nano-rl-coder[view]'", file=sys.stderr)
    else:
        print(target / CALIBRATION)
    print(target)
    return 0


def _looked_first(model: str | None, pairs: Path | None, from_logs: bool, log: str | None) -> str:
    """The model to train, looked at with the pairs before torch is imported and a model is loaded.

    Raises UsageError for what is not there, LogError for a log.
    """
    from nano_rl.command_setup import looked_first

    if from_logs == (pairs is not None):
        raise UsageError("give either --pairs FILE, or --from-logs")
    return looked_first(model, (pairs,), log, from_logs)


def _show(report: RewardModelReport) -> None:
    """Accuracy and calibration on held-out pairs, on stderr."""
    title = (
        f"{report.pairs} held-out pairs: accuracy {report.accuracy:.1%}, log loss {report.log_loss:.3f},"
        f" expected calibration error {report.calibration_error:.3f}"
    )
    table = Table("sure by", "pairs", "mean confidence", "right", box=None, title=title)
    for one in report.bins:
        shares = f"{one.confidence:.1%}", f"{one.accuracy:.1%}"
        table.add_row(f"{one.low:.0%} to {one.high:.0%}", str(one.pairs), *shares)
    Console(stderr=True).print(table)


def open_pairs(
    opened: OpenedWeights, pairs_file: Path | None, from_logs: bool, log: str | None, *, seed: int
) -> list[PairRows]:
    """The pairs as one policy reads them; says on stderr what was refused and what had to be encoded.

    Raises UsageError for a bad row, a pair of another policy's tokens, and where there is no pair.
    """
    from nano_preferences.log_pairs import log_pairs
    from nano_preferences.pairs import pair_rows, read_pairs
    from nano_rl.imitation import reader_of

    if pairs_file is not None:
        pairs = read_pairs(pairs_file)
    else:
        found = log_pairs(open_log(log), seed=seed)
        say(found.refused)
        if not found.pairs:
            raise UsageError(no_pair(found.refused))
        pairs = list(found.pairs)
    rows = pair_rows(pairs, reader_of(opened), f"{pairs_file}, " if pairs_file else "")
    if not rows:
        raise UsageError(
            "no pair fits the context of the model: shorten them, or name a model that reads more"
        )
    encoded = sum(row.encoded for row in rows)
    exact = f"{len(rows) - encoded} with the tokens that were logged"
    print(f"pairs: {len(rows)}, {exact}, {encoded} text-only, encoded here by the template", file=sys.stderr)
    return rows


def say(refused: Counter[str]) -> None:
    """What made no pair, a line a reason, on stderr."""
    for reason, count in refused.most_common():
        print(f"left out: {count} ({reason})", file=sys.stderr)


def no_pair(refused: Counter[str]) -> str:
    """Why a log made none, and what would help."""
    symptoms = ((symptom, reason) for reason, _ in refused.most_common() for symptom in _ADVICE)
    found = next((symptom for symptom, reason in symptoms if symptom and symptom in reason), "")
    return f"the log holds no preference pair: {_ADVICE[found]}"


_ADVICE = {
    "judge_unparseable": "the judge's answers name no winner; a larger model would",
    "judge_injectable": "the judge prefers wrong work that tells it to; name a better one",
    "judge_": "the judge did not answer (see above); check --judge-url and --judge-model",
    "": "it needs a success and a failure of one task, or feedback; nano-rl rollout --group-size 4 adds runs",
}
"""what a failure of the judge asks for, the particular ones first, and what helps without one"""


def trained_tasks(pairs: Iterable[PairRows]) -> list[PairTask]:
    return [pair.task for pair in pairs if pair.task is not None]


def trained_runs(pairs: Iterable[PairRows]) -> list[str]:
    return sorted({run for pair in pairs for run in pair.run_ids})
