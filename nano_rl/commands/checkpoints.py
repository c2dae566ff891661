"""`nano-rl checkpoints`: list, show, promote, roll back, export, and the best of a training."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Argument, Option

from nano_coder.commands.options import Setup, agent_options, open_log
from nano_coder.models.opening import default_model
from nano_rl.checkpoints.checkpoint import ancestry
from nano_rl.checkpoints.evaluate import manifest_hash, stored_evaluations
from nano_rl.checkpoints.promotion import Evidence, compare, not_held_out, objections, stored_evidence
from nano_rl.checkpoints.promotion_history import promote
from nano_rl.commands.eval import How, Repeat, Temperature, print_differences
from nano_rl.commands.lineage_report import as_json_report, print_lineage, summaries
from nano_rl.commands.options import Log, RewardOption, Seed
from nano_rl.commands.session import checkpoint_target, look_first, trainings_dir
from nano_shared.checkpoint import latest_checkpoint, latest_name, resolve_checkpoint
from nano_shared.command_line import JsonOption, lazy_app
from nano_shared.errors import UsageError
from nano_shared.printable import printable

command = lazy_app(
    "nano-rl.checkpoints",
    {
        "list": (f"{__name__}:list_checkpoints", "Every checkpoint, with its parent and its newest score."),
        "show": (f"{__name__}:show", "Where a checkpoint comes from, its files verified."),
        "promote": (f"{__name__}:promote_checkpoint", "Make it the model that runs when none is named."),
        "rollback": (f"{__name__}:rollback", "Promote again what was promoted before."),
        "history": (f"{__name__}:history", "Every promotion and every way back, the oldest first."),
        "best": (f"{__name__}:best", "Make a checkpoint of the best state of a training."),
        "export": (f"{__name__}:export", "Write it for programs without nano."),
    },
    help="List checkpoints, show one's lineage, promote on evidence, go back, keep a training's best state.",
)
Checkpoint = Annotated[str, Argument(metavar="NAME", help="Of a checkpoint.")]


def list_checkpoints(as_json: JsonOption = False) -> int:
    """Every checkpoint, with its parent and its newest score; the promoted one is marked."""
    found = summaries()
    if as_json:
        print(json.dumps(found))
        return 0
    for row in found:
        marked = "  (promoted)" if row["promoted"] else ""
        description = row["problem"] or f"from {row['parent'] or '-'}  {row['score'] or 'not evaluated'}"
        print(printable(f"{row['name']}  {description}{marked}"))
    return 0


def show(name: Checkpoint, as_json: JsonOption = False) -> int:
    """Where a checkpoint comes from, its files verified: parents up to the base, what it was trained on, its
    settings, its scores, and on what evidence it was promoted."""
    folder = Path(resolve_checkpoint(name))
    if as_json:
        print(json.dumps(as_json_report(folder)))
    else:
        print_lineage(folder)
    return 0


@agent_options("log", more=("limit",))
def promote_checkpoint(
    setup: Setup,
    name: Checkpoint,
    tasks: Annotated[
        Path | None,
        Option(help="Held-out tasks to compare on now; else a stored nano-rl eval is the evidence."),
    ] = None,
    against: Annotated[
        str | None, Option(help="Checkpoint to beat, if not the promoted or the shipped one.")
    ] = None,
    force: Annotated[
        bool, Option("--force", help="Promote whatever the evidence says; that is recorded.")
    ] = False,
    temperature: Temperature = 0.0,
    repeat: Repeat = 1,
    reward: RewardOption = None,
    seed: Seed = 0,
    as_json: JsonOption = False,
) -> int:
    """Make NAME the model that nano-coder runs when none is named, if it is better beyond noise.

    Better: on held-out tasks, paired, the lower end of the 95 % interval above 0, and worse on no suite.
    Exit code 1 where it is not, 2 where there is no evidence.
    """
    from nano_rl.commands.checkpoints import decide
    from nano_rl.tasks.make import read_tasks

    look_first(files=(tasks,), models=(against,))
    how = How(
        tasks=read_tasks(tasks), setup=setup, reward=reward, seed=seed, repeat=repeat,
        temperature=temperature,
    ) if tasks else None  # fmt: skip
    decision = decide(Path(resolve_checkpoint(name)), name, how, against, force=force)
    if as_json:
        print(json.dumps(decision.report()))
    else:
        if decision.evidence:
            print_differences(decision.evidence.overall, decision.evidence.suites)
        print("\n".join(decision.sentences()))
    return 0 if decision.promoted else 1


def rollback(
    to: Annotated[
        str | None, Option(help="A checkpoint that was promoted earlier, if not the one before.")
    ] = None,
) -> int:
    """Promote again what was promoted before; repeated, it goes further back."""
    from nano_rl.checkpoints.promotion_history import roll_back

    record = roll_back(to)
    print(f"{record.previous} is no longer promoted; ", end="")
    print(f"{record.name} is" if record.name else "nothing is, so nano-coder runs the shipped policy")
    return 0


def history(as_json: JsonOption = False) -> int:
    """Every promotion and every way back, the oldest first."""
    from nano_rl.checkpoints.promotion_history import read_history
    from nano_rl.commands.lineage_report import promotion_line

    records = read_history()
    if as_json:
        print(json.dumps([record.model_dump(mode="json") for record in records]))
        return 0
    for record in records:
        print(printable(f"{record.name or 'the shipped policy'}  {promotion_line(record)}"))
    return 0


def best(
    training: Annotated[str, Argument(metavar="TRAINING", help="Its name.")],
    name: Annotated[str, Option("--as", help="Name of the checkpoint to write.")],
    log: Log = None,
) -> int:
    """Make a checkpoint of the best state that TRAINING has saved, also when it was stopped short."""
    from nano_rl.resume.progress import save_best

    target = checkpoint_target(name)
    with open_log(log, create=True) as store:
        print(save_best(trainings_dir() / training, target, store).model_dump_json(indent=2))
    return 0


def export(
    name: Checkpoint,
    target: Annotated[Path, Option("--to", help="New folder to write, with its parents.")],
    adapter: Annotated[
        bool, Option("--adapter", help="Adapter and base apart, in TO/adapter and TO/base.")
    ] = False,
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None,
        Option(help="Of the written weights.", show_default="as they are stored"),
    ] = None,
) -> int:
    """Write NAME for programs without nano: a model that transformers and vLLM load, or with --adapter a PEFT
    adapter beside its base."""
    from nano_rl.checkpoints.checkpoint import ADAPTER_FOLDER, BASE_FOLDER, export_checkpoint

    said = export_checkpoint(name, target, adapter=adapter, dtype=dtype)
    if said:
        print(said, file=sys.stderr)
    print(printable(str(target / ADAPTER_FOLDER if adapter else target)))
    if adapter:
        print(printable(f"its base: {target / BASE_FOLDER}"), file=sys.stderr)
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    name: str
    baseline: str
    evidence: Evidence | None
    objections: tuple[str, ...]
    """why not; overruled where it was promoted all the same"""
    promoted: bool

    def report(self) -> dict[str, Any]:
        return {
            "checkpoint": self.name,
            "against": self.baseline,
            "promoted": self.promoted,
            "forced": self.promoted and bool(self.objections),
            "objections": list(self.objections),
            "evidence": self.evidence.model_dump(mode="json") if self.evidence else None,
        }

    def sentences(self) -> list[str]:
        lines = [f"against it: {text}" for text in self.objections]
        if self.evidence and self.evidence.earlier:
            lines.append(f"stored besides: {self.evidence.earlier} other comparisons of these two")
        if self.promoted:
            forced = ", by force, which is recorded" if self.objections else ""
            return [*lines, f"{self.name} is promoted{forced}; nano-rl checkpoints rollback takes it back"]
        return [*lines, f"{self.name} is not promoted; --force promotes it and records that"]


def decide(folder: Path, name: str, how: How | None, against: str | None, *, force: bool) -> Decision:
    """Compare, judge, and promote where nothing speaks against it or `force` overrules.

    Raises UsageError where there is no evidence, saying which command makes some.
    """
    baseline = against or _standing(force)
    evidence, against_it = _evidence(folder, name, how, baseline, force=force)
    promoted = force or not against_it
    if promoted:
        promote(folder, evidence=evidence, objections=tuple(against_it), forced=force and bool(against_it))
    return Decision(
        name=name, baseline=baseline, evidence=evidence, objections=tuple(against_it), promoted=promoted
    )


def _standing(force: bool) -> str:
    """What nano-coder runs now. With `force`, a pointer that leads nowhere is no obstacle."""
    try:
        promoted = latest_checkpoint()
        return latest_name(promoted) if promoted else default_model()
    except UsageError:
        if force:
            return "none"
        raise


def _evidence(
    folder: Path, name: str, how: How | None, baseline: str, *, force: bool
) -> tuple[Evidence | None, list[str]]:
    new = manifest_hash(str(folder))
    old = manifest_hash(baseline)
    if new == old:
        raise UsageError(f"{name} is what it would be compared with; name another with --against, or --force")
    manifests = [step.manifest for step in ancestry(folder) if step.manifest is not None]
    if how is not None:
        candidate, _ = how.evaluate(name)
        found = compare(candidate, how.evaluate(baseline)[0])
    else:
        stored = stored_evidence(str(new), old, manifests) if old else None
        if stored is None:
            wanted = f"nano-rl eval --model {name} --against {baseline} --tasks FILE"
            if not force:
                raise UsageError(
                    f"nothing says that {name} is better than {baseline}: promote it with --tasks FILE of "
                    f"held-out tasks, run `{wanted}` first, or --force it"
                )
            return None, ["there was no evidence"]
        found = stored
        candidate = next(one for one in stored_evaluations(str(new)) if one.id == found.candidate)
    return found, [*not_held_out(candidate, manifests), *objections(found)]
