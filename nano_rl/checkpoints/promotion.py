"""The promotion criterion: significantly better than the promoted checkpoint, and worse on no suite."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from nano_rl.checkpoints.evaluate import Conditions, Evaluation, stored_evaluations
from nano_rl.checkpoints.statistics import bootstrap, by_cluster, sign_flip
from nano_shared.checkpoint import Manifest
from nano_shared.errors import UsageError
from nano_shared.types import Split, Value

ALPHA = 0.025
"""significance level of the one-sided tests"""


class SuccessDifference(Value):
    """Success of candidate minus baseline on common graded tasks; each task counts once."""

    name: str
    tasks: int
    clusters: int | None = None
    """number of clusters (`cluster_of`); None in evidence of older versions"""
    changed: int
    """number of tasks with different success"""
    mean: float
    low: float
    high: float
    """95 % bootstrap interval over clusters"""
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
    """id of its evaluation"""
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
        candidate=candidate.id,
        baseline=baseline.id,
        baseline_model=baseline.model,
        baseline_manifest_hash=baseline.manifest_hash,
        conditions=candidate.conditions,
        log=candidate.log,
        overall=difference("all", everything),
        suites=tuple(difference(name, differences[name]) for name in sorted(differences)),
        earlier=earlier,
    )


def difference(name: str, values: Sequence[tuple[str, float]]) -> SuccessDifference:
    """The difference on a suite; `values` are (cluster, difference) of its tasks."""
    clusters = by_cluster(values)
    mean, low, high = bootstrap(clusters, seed=0)
    return SuccessDifference(
        name=name,
        tasks=len(values),
        clusters=len(clusters),
        changed=sum(value != 0 for _, value in values),
        mean=mean,
        low=low,
        high=high,
        p_better=sign_flip(clusters, seed=0),
        p_worse=sign_flip([[-value for value in values] for values in clusters], seed=0),
    )


def stored_evidence(
    candidate_hash: str, baseline_hash: str, ancestors: Sequence[Manifest]
) -> Evidence | None:
    """The newest stored comparison of two checkpoints, given by the hashes of their manifests.

    Comparisons on tasks that the candidate and its `ancestors` were not trained on are preferred.
    """
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
    """The reasons against a promotion by this evidence; empty if there are none."""
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
