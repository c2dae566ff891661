"""The promotion criterion: significantly better than the promoted checkpoint, and worse on no suite."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout
from pydantic import ValidationError

from nano_coder import __version__ as runtime_version
from nano_rl.checkpoints.evaluate import (
    Conditions,
    Evaluation,
    bootstrap,
    by_cluster,
    sign_flip,
    stored_evaluations,
)
from nano_shared.checkpoint import MANIFEST, Manifest, latest_name, point_latest, pointer_of, read_checkpoint
from nano_shared.errors import CheckpointError, UsageError
from nano_shared.files import checkpoints_dir, file_hash, write_text
from nano_shared.types import Split, Value

ALPHA = 0.025
"""significance level of the one-sided tests"""


class SuccessDifference(Value):
    name: str
    tasks: int
    clusters: int | None = None
    """number of clusters (`cluster_of`); None in evidence of older versions"""
    changed: int
    mean: float
    low: float
    high: float
    p_better: float
    p_worse: float
    """p-values of one-sided sign-flip tests over clusters; the bootstrap alone accepts differences in as few
    as four clusters"""

    @property
    def better(self) -> bool:
        return self.low > 0 and self.p_better <= ALPHA

    @property
    def worse(self) -> bool:
        return self.high < 0 and self.p_worse <= ALPHA

    def __str__(self) -> str:
        if self.clusters == 1:
            return (
                f"{self.mean:+.1%} ({self.tasks} tasks of one program, which give no interval; take several)"
            )
        of = f" of {self.clusters} programs" if (self.clusters or self.tasks) < self.tasks else ""
        return f"{self.mean:+.1%} (95 % interval {self.low:+.1%} to {self.high:+.1%}, {self.tasks} tasks{of})"


class Evidence(Value):
    """A comparison of two stored evaluations, with everything needed to repeat it."""

    candidate: str
    baseline: str
    baseline_model: str
    baseline_manifest_hash: str | None
    conditions: Conditions
    log: str
    overall: SuccessDifference
    suites: tuple[SuccessDifference, ...]
    earlier: int
    """number of other stored comparisons of the two, since repeated tests find a difference by chance"""


def compare(candidate: Evaluation, baseline: Evaluation, *, earlier: int = 0) -> Evidence:
    """Compare two evaluations. Raises UsageError if their conditions differ or they share no graded task."""
    if candidate.conditions != baseline.conditions:
        raise UsageError(
            f"evaluations {candidate.id} and {baseline.id} were made under different conditions;"
            " evaluate both again"
        )
    before = {task.id: task.mean for task in baseline.tasks}
    differences: dict[str, list[tuple[str, float]]] = defaultdict(list)
    for task in candidate.tasks:
        old = before.get(task.id)
        if task.mean is not None and old is not None:
            differences[task.suite].append((task.cluster or task.id, task.mean - old))
    everything = [value for values in differences.values() for value in values]
    if not everything:
        raise UsageError(
            f"{candidate.model} and {baseline.model} were graded on no task in common, by failures of ours;"
            " nano-coder log list shows them"
        )
    return Evidence(
        candidate=candidate.id, baseline=baseline.id, baseline_model=baseline.model,
        baseline_manifest_hash=baseline.manifest_hash, conditions=candidate.conditions, log=candidate.log,
        overall=difference("all", everything), earlier=earlier,
        suites=tuple(difference(name, differences[name]) for name in sorted(differences)),
    )  # fmt: skip


def difference(name: str, values: Sequence[tuple[str, float]]) -> SuccessDifference:
    """The difference on a suite; `values` are (cluster, difference) of its tasks."""
    clusters = by_cluster(values)
    mean, low, high = bootstrap(clusters, seed=0)
    return SuccessDifference(
        name=name, tasks=len(values), clusters=len(clusters), mean=mean, low=low, high=high,
        changed=sum(value != 0 for _, value in values), p_better=sign_flip(clusters),
        p_worse=sign_flip([[-value for value in values] for values in clusters]),
    )  # fmt: skip


def stored_evidence(
    candidate_hash: str, baseline_hash: str, ancestors: Sequence[Manifest]
) -> Evidence | None:
    """The newest stored comparison of two checkpoints, given by the hashes of their manifests. Comparisons on
    tasks that the candidate and its `ancestors` were not trained on are preferred."""
    of_candidate = list(stored_evaluations(candidate_hash))
    of_baseline = list(stored_evaluations(baseline_hash))
    pairs = [(new, old) for new in of_candidate for old in of_baseline if new.conditions == old.conditions]
    pairs.sort(key=lambda pair: any(not_held_out(pair[0], ancestors)))  # stable: the newest first
    return (
        compare(*pairs[0], earlier=len({new.conditions.model_dump_json() for new, _ in pairs}) - 1)
        if pairs
        else None
    )


def objections(evidence: Evidence) -> list[str]:
    found = []
    overall = evidence.overall
    if not overall.better:
        found.append(
            f"not better than {evidence.baseline_model} beyond noise: {overall}, sign-flip p"
            f" {overall.p_better:.3f}"
        )
    found += [f"worse on suite {suite.name}: {suite}" for suite in evidence.suites if suite.worse]
    return found


def not_held_out(evaluation: Evaluation, ancestors: Iterable[Manifest]) -> Iterator[str]:
    """The reasons why the tasks were trained on: their split, or the manifest of an ancestor."""
    train = sum(task.split is Split.TRAIN for task in evaluation.tasks)
    if train:
        yield f"{train} of the {len(evaluation.tasks)} tasks are of the split train"
    ids = {task.id for task in evaluation.tasks}
    for manifest in ancestors:
        trained_on = manifest.trained_on
        shared = len(ids & set(trained_on.task_ids))
        if shared or evaluation.conditions.tasks_hash in (trained_on.tasks_hash, *trained_on.splits.values()):
            yield f"checkpoint {manifest.name} was trained on {shared or 'all'} of the tasks"


HISTORY = "promotions.json"


class Promotion(Value):
    kind: Literal["promoted", "forced", "rolled_back"]
    name: str | None
    """the new target of `latest`; None: no target, so that the shipped policy runs"""
    previous: str | None
    manifest_hash: str | None
    created: float
    code_version: str = runtime_version
    evidence: Evidence | None = None
    objections: tuple[str, ...] = ()
    project: str | None = None
    """id of the project that it was promoted for; None: for all"""


class PromotionHistory(Value):
    version: Literal[1] = 1
    promotions: tuple[Promotion, ...] = ()


def promote(
    folder: Path, *, evidence: Evidence | None = None, objections: tuple[str, ...] = (),
    forced: bool = False, project: str | None = None,
) -> Promotion:  # fmt: skip
    """Promote the checkpoint in `folder`, for a project or for all, and record the evidence. Raises
    CheckpointError for a damaged checkpoint and for a reward model."""
    manifest = read_checkpoint(folder)
    if manifest.kind == "reward_model":
        raise CheckpointError(f"{manifest.name} is a reward model, which runs no task; promote a policy")
    with _locked():
        return _move(
            latest_name(folder), project, kind="forced" if forced else "promoted",
            manifest_hash=file_hash(folder / MANIFEST), evidence=evidence, objections=objections,
        )  # fmt: skip


def roll_back(to: str | None = None, project: str | None = None) -> Promotion:
    """Promote the checkpoint that was promoted before the present one for a project or for all, or `to`, one
    of those before it; repeated, it goes further back, finally to none. Raises UsageError if there is no
    earlier promotion, CheckpointError if that checkpoint is missing or damaged."""
    with _locked():
        stack = _stack(read_history(project))
        if not stack or stack[-1] != _pointer(project):
            raise UsageError("there is no promotion to take back; nano-rl checkpoints promote NAME makes one")
        before = stack[:-1]
        if to is not None:
            name: str | None = latest_name(Path(to)) if "/" in to else to
            if name not in before:
                known = ", ".join(dict.fromkeys(before)) or "none"
                raise UsageError(f"{to} was not promoted before {stack[-1]}; before it were: {known}")
        else:
            name = before[-1] if before else None
        hashed = None
        if name is not None:
            read_checkpoint(target := checkpoints_dir() / name)
            hashed = file_hash(target / MANIFEST)
        return _move(name, project, kind="rolled_back", manifest_hash=hashed)


def read_history(project: str | None = None) -> tuple[Promotion, ...]:
    """The completed promotions for a project or for all, oldest first. Raises CheckpointError for a damaged
    file."""
    records = tuple(one for one in _records() if one.project == project)
    last = records[-1] if records else None
    killed = last and last.name != _pointer(project) and last.previous == _pointer(project)
    return records[:-1] if killed else records


def _records() -> tuple[Promotion, ...]:
    path = checkpoints_dir() / HISTORY
    try:
        return PromotionHistory.model_validate_json(path.read_bytes()).promotions
    except FileNotFoundError:
        return ()
    except ValidationError as error:
        first = error.errors()[0]
        raise CheckpointError(
            f"{path} is damaged or of a newer nano ({first['msg']}); move it away to begin a new history"
        ) from None


def promotions_of(folder: Path) -> list[Promotion]:
    """The promotions of this checkpoint, under any name."""
    hashed = file_hash(folder / MANIFEST)
    everywhere = {one.project for one in _records()}
    made = (one for where in everywhere for one in read_history(where) if one.manifest_hash == hashed)
    return sorted(made, key=lambda one: one.created)


def _move(name: str | None, project: str | None, **fields: Any) -> Promotion:
    record = Promotion(name=name, previous=_pointer(project), created=time.time(), project=project, **fields)
    others = (one for one in _records() if one.project != project)
    history = PromotionHistory(promotions=(*others, *read_history(project), record))
    write_text(checkpoints_dir() / HISTORY, history.model_dump_json(indent=1) + "\n", CheckpointError)
    point_latest(name, project)
    return record


def _stack(records: tuple[Promotion, ...]) -> list[str]:
    stack: list[str] = []
    for record in records:
        if record.kind != "rolled_back":
            if record.name is not None and stack[-1:] != [record.name]:
                if not stack and record.previous is not None:
                    stack.append(record.previous)  # promoted before there was a history
                stack.append(record.name)
        else:
            while stack and stack[-1] != record.name:
                stack.pop()
    return stack


def _pointer(project: str | None = None) -> str | None:
    try:
        return pointer_of(project).read_text().strip()
    except FileNotFoundError:
        return None


@contextmanager
def _locked() -> Iterator[None]:
    checkpoints_dir().mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(checkpoints_dir() / ".promotions.lock", timeout=10):
            yield
    except Timeout:
        raise CheckpointError(
            "another process is promoting a checkpoint; try again when it is done"
        ) from None
