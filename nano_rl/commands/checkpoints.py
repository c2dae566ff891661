"""`nano-rl checkpoints`: list, show, promote, roll back, export, and the best of a training."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from nano_coder.commands.options import open_log
from nano_coder.models.opening import default_model
from nano_rl.checkpoints.checkpoint import Ancestor, ancestry
from nano_rl.checkpoints.evaluate import Evaluation, manifest_hash, stored_evaluations
from nano_rl.checkpoints.promotion import (
    Evidence,
    Promotion,
    not_held_out,
    objections,
    promote,
    promotions_of,
    read_history,
    roll_back,
    stored_evidence,
)
from nano_rl.command_setup import checkpoint_target, look_first, trainings_dir
from nano_rl.commands.eval import print_differences
from nano_rl.commands.options import Log
from nano_rl.improve.project import directory_named
from nano_shared.checkpoint import (
    Manifest,
    checkpoint_names,
    latest_checkpoint,
    promoted_for_projects,
    read_checkpoint,
    resolve_checkpoint,
)
from nano_shared.command_line import JsonOption, emit, lazy_app
from nano_shared.errors import CheckpointError, UsageError
from nano_shared.files import checkpoints_dir
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
        "export": ("+formats", "Write it for programs without nano."),
    },
    help="List checkpoints, show one's lineage, promote on evidence, go back, keep a training's best state.",
)
Checkpoint = Annotated[str, Argument(metavar="NAME", help="Of a checkpoint.")]


def list_checkpoints(as_json: JsonOption = False) -> int:
    """Every checkpoint, with its parent and its newest score; the promoted one is marked."""
    rows = summaries()
    emit(rows, as_json, lambda: print_summaries(rows))
    return 0


def show(name: Checkpoint, as_json: JsonOption = False) -> int:
    """Where a checkpoint comes from, its files verified: parents up to the base, what it was trained on, its
    settings, its scores, and on what evidence it was promoted."""
    folder = Path(resolve_checkpoint(name))
    emit(as_json_report(folder), as_json, lambda: print_lineage(folder))
    return 0


def promote_checkpoint(
    name: Checkpoint,
    against: Annotated[
        str | None, Option(help="Checkpoint to beat, if not the promoted or the shipped one.")
    ] = None,
    force: Annotated[
        bool, Option("--force", help="Promote whatever the evidence says; that is recorded.")
    ] = False,
    as_json: JsonOption = False,
) -> int:
    """Make NAME the model that nano-coder runs when none is named, if it is better beyond noise.

    The evidence is what `nano-rl eval --model NAME --against OTHER` found on held-out tasks. Better: paired,
    the lower end of the 95 % interval above 0, and worse on no suite. Exit code 1 where it is not, 2 where
    there is no evidence.
    """
    look_first(models=(against,))
    decision = decide(Path(resolve_checkpoint(name)), name, against, force=force)
    emit(decision.report(), as_json, decision.show)
    return 0 if decision.promoted else 1


def rollback(
    to: Annotated[
        str | None, Option(help="A checkpoint that was promoted earlier, if not the one before.")
    ] = None,
) -> int:
    """Promote again what was promoted before; repeated, it goes further back."""
    record = roll_back(to)
    print(f"{record.previous} is no longer promoted; ", end="")
    print(f"{record.name} is" if record.name else "nothing is, so nano-coder runs the shipped policy")
    return 0


def history(as_json: JsonOption = False) -> int:
    """Every promotion and every way back, the oldest first."""
    records = read_history()
    lines = (f"{record.name or 'the shipped policy'}  {promotion_line(record)}" for record in records)
    emit(records, as_json, lambda: [print(printable(line)) for line in lines])
    return 0


def best(
    training: Annotated[str, Argument(metavar="TRAINING", help="Its name.")],
    name: Annotated[str, Option("--as", help="Name of the checkpoint to write.")],
    log: Log = None,
) -> int:
    """Make a checkpoint of the best state that TRAINING has saved, also when it was stopped short."""
    from nano_rl.resume import save_best

    target = checkpoint_target(name, "--as")
    with open_log(log, create=True) as store:
        print(save_best(trainings_dir() / training, target, store).model_dump_json(indent=2))
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    name: str
    baseline: str
    evidence: Evidence | None
    objections: tuple[str, ...]
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

    def show(self) -> None:
        if self.evidence:
            print_differences(self.evidence.overall, self.evidence.suites)
        print("\n".join(self.sentences()))

    def sentences(self) -> list[str]:
        lines = [f"against it: {text}" for text in self.objections]
        if self.evidence and self.evidence.earlier:
            lines.append(f"stored besides: {self.evidence.earlier} other comparisons of these two")
        if self.promoted:
            forced = ", by force, which is recorded" if self.objections else ""
            return [*lines, f"{self.name} is promoted{forced}; nano-rl checkpoints rollback takes it back"]
        return [*lines, f"{self.name} is not promoted; --force promotes it and records that"]


def decide(folder: Path, name: str, against: str | None, *, force: bool) -> Decision:
    """Compare, judge, and promote where nothing speaks against it or `force` overrules.

    Raises UsageError where there is no evidence, saying which command makes some.
    """
    baseline = against or _standing(force)
    evidence, against_it = _evidence(folder, name, baseline, force=force)
    promoted = force or not against_it
    if promoted:
        promote(folder, evidence=evidence, objections=tuple(against_it), forced=force and bool(against_it))
    return Decision(
        name=name, baseline=baseline, evidence=evidence, objections=tuple(against_it), promoted=promoted
    )


def _standing(force: bool) -> str:
    """What nano-coder runs now. With `force`, a pointer that leads nowhere is no obstacle."""
    try:
        return default_model()
    except UsageError:
        if force:
            return "none"
        raise


def _evidence(folder: Path, name: str, baseline: str, *, force: bool) -> tuple[Evidence | None, list[str]]:
    new = manifest_hash(str(folder))
    old = manifest_hash(baseline)
    if new == old:
        raise UsageError(f"{name} is what it would be compared with; name another with --against, or --force")
    manifests = [step.manifest for step in ancestry(folder) if step.manifest is not None]
    stored = stored_evidence(str(new), old, manifests) if old else None
    if stored is None:
        if not force:
            raise UsageError(
                f"nothing says that {name} is better than {baseline}: run `nano-rl eval --model {name}"
                f" --against {baseline} --tasks FILE` on held-out tasks first, or --force it"
            )
        return None, ["there was no evidence"]
    candidate = next(one for one in stored_evaluations(str(new)) if one.id == stored.candidate)
    return stored, [*not_held_out(candidate, manifests), *objections(stored)]


# ------------------------------------------------------------------------------------- lineage


def summaries() -> list[dict[str, Any]]:
    """A row for each checkpoint in NANO_HOME. A damaged one has a `problem` and nothing else."""
    promoted, projects = latest_checkpoint(), promoted_for_projects()
    newest: dict[str, Evaluation] = {}
    for evaluation in stored_evaluations():
        if evaluation.manifest_hash:
            newest.setdefault(evaluation.manifest_hash, evaluation)
    rows = []
    for name in checkpoint_names():
        folder = checkpoints_dir() / name
        row = {"name": name, "promoted": folder == promoted, "parent": None, "score": None, "problem": None}
        row["projects"] = [directory_named(id) for id, of in projects.items() if of == name]
        try:
            manifest = read_checkpoint(folder, verify=False)
            row |= {"parent": manifest.parent, "kind": manifest.kind}
            latest = newest.get(str(manifest_hash(str(folder))))
            row["score"] = score(latest) if latest else None
        except CheckpointError as problem:
            row["problem"] = str(problem)
        rows.append(row)
    return rows


def print_summaries(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        marked = "  (promoted)" if row["promoted"] else ""
        marked += "".join(f"  (promoted for {directory})" for directory in row["projects"])
        description = row["problem"] or f"from {row['parent'] or '-'}  {row['score'] or 'not evaluated'}"
        print(printable(f"{row['name']}  {description}{marked}"))


def score(evaluation: Evaluation) -> str:
    of = evaluation.success
    return f"{of.mean:.1%} ({of.low:.1%} to {of.high:.1%}, {len(evaluation.tasks)} tasks)"


def as_json_report(folder: Path) -> dict[str, Any]:
    """Everything: the manifest, the lineage, the evaluations and the promotions with their evidence."""
    chain = ancestry(folder)
    assert chain[0].manifest is not None
    return {
        **chain[0].manifest.model_dump(mode="json"),
        "lineage": [_step(step) for step in chain],
        "evaluations": [e.model_dump(mode="json") for e in stored_evaluations(manifest_hash(str(folder)))],
        "promotions": [record.model_dump(mode="json") for record in promotions_of(folder)],
    }


def print_lineage(folder: Path) -> None:
    chain = ancestry(folder)
    manifest = chain[0].manifest
    assert manifest is not None
    lines = [
        f"{manifest.name}  {manifest.kind}, {manifest.policy_version} steps, nano {manifest.code_version}, "
        f"{_when(manifest.created)}",
        f"profile      {manifest.profile}",
        f"trained on   {_trained_on(manifest)}",
        "lineage",
        *(f"  {_sentence(step)}" for step in chain[1:]),
        "settings",
        *(f"  {key} = {json.dumps(value)}" for key, value in sorted(manifest.config.items())),
        "metrics",
        *(f"  {key} = {json.dumps(value)}" for key, value in sorted(manifest.metrics.items())),
        "evaluations",
        *(
            f"  {e.id}  {score(e)}, seed {e.conditions.seed}, tasks {e.conditions.tasks_hash[:19]}"
            for e in stored_evaluations(manifest_hash(str(folder)))
        ),
        "promotions",
        *(f"  {promotion_line(record)}" for record in promotions_of(folder)),
    ]
    print("\n".join(map(printable, lines)))


def promotion_line(record: Promotion) -> str:
    line = f"{_when(record.created)}  {record.kind.replace('_', ' ')}, nano {record.code_version}"
    if record.evidence is not None:
        of = record.evidence.conditions
        line += f"; {record.evidence.overall} against {record.evidence.baseline_model}"
        line += f", seed {of.seed}, tasks {of.tasks_hash[:19]}"
    return line + "".join(f"; against it: {text}" for text in record.objections)


def _step(step: Ancestor) -> dict[str, Any]:
    fields: dict[str, Any] = {"name": step.name, "problem": step.remark}
    if (of := step.manifest) is not None:
        fields |= {name: getattr(of, name) for name in ("kind", "policy_version")}
        fields |= {name: getattr(of.trained_on, name) for name in ("runs", "tasks")}
        fields |= {name: getattr(of, name) for name in ("code_version", "created")}
    return fields


def _sentence(step: Ancestor) -> str:
    if step.manifest is not None:
        return f"from {step.name}: trained on {_trained_on(step.manifest)}, nano {step.manifest.code_version}"
    return f"from {step.name}: {step.remark}" if step.remark else f"from {step.name}, the base"


def _trained_on(manifest: Manifest) -> str:
    of = manifest.trained_on
    splits = f" (split {', '.join(of.splits)})" if of.splits else ""
    # checkpoints of before tasks were counted have their hash alone
    tasks = f"{of.tasks} tasks" if of.tasks or not of.splits else "tasks that were not counted"
    return f"{of.runs} logged runs, {tasks}{splits}"


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
