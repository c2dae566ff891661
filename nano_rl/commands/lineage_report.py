"""What `nano-rl checkpoints list` and `show` say of a checkpoint: lineage, scores, promotions."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from nano_rl.checkpoints.checkpoint import Ancestor, ancestry
from nano_rl.checkpoints.evaluate import Evaluation, manifest_hash, stored_evaluations
from nano_rl.checkpoints.promotion_history import Promotion, promotions_of
from nano_shared.checkpoint import (
    Manifest,
    checkpoint_names,
    checkpoints_dir,
    latest_checkpoint,
    read_checkpoint,
)
from nano_shared.errors import CheckpointError
from nano_shared.printable import printable


def summaries() -> list[dict[str, Any]]:
    """A row for each checkpoint in NANO_HOME. A damaged one has a `problem` and nothing else."""
    promoted = latest_checkpoint()
    newest: dict[str, Evaluation] = {}
    for evaluation in stored_evaluations():
        if evaluation.manifest_hash:
            newest.setdefault(evaluation.manifest_hash, evaluation)
    rows = []
    for name in checkpoint_names():
        folder = checkpoints_dir() / name
        row = {"name": name, "promoted": folder == promoted, "parent": None, "score": None, "problem": None}
        try:
            manifest = read_checkpoint(folder, verify=False)
            row |= {"parent": manifest.parent, "kind": manifest.kind}
            evaluation = newest.get(str(manifest_hash(str(folder))))
            row["score"] = score(evaluation) if evaluation else None
        except CheckpointError as problem:
            row["problem"] = str(problem)
        rows.append(row)
    return rows


def print_summaries(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        marked = "  (promoted)" if row["promoted"] else ""
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
    """When and why, in one line."""
    line = f"{_when(record.created)}  {record.kind.replace('_', ' ')}, nano {record.code_version}"
    if record.evidence is not None:
        line += f"; {record.evidence.overall} against {record.evidence.baseline_model}"
        line += (
            f", seed {record.evidence.conditions.seed}, tasks {record.evidence.conditions.tasks_hash[:19]}"
        )
    return line + "".join(f"; against it: {text}" for text in record.objections)


def _step(step: Ancestor) -> dict[str, Any]:
    fields: dict[str, Any] = {"name": step.name, "problem": step.remark}
    if step.manifest is not None:
        fields |= {
            "kind": step.manifest.kind,
            "policy_version": step.manifest.policy_version,
            "runs": step.manifest.trained_on.runs,
            "tasks": step.manifest.trained_on.tasks,
            "code_version": step.manifest.code_version,
            "created": step.manifest.created,
        }
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
