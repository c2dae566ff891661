"""Whether a checkpoint may be promoted: better than the promoted one beyond noise, and worse in no suite."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from nano_rl.checkpoints.evaluations import Conditions, Evaluation, stored_evaluations
from nano_rl.checkpoints.statistics import bootstrap, by_cluster, sign_flip
from nano_shared.checkpoint import Manifest
from nano_shared.errors import UsageError
from nano_shared.types import Split, Value

ALPHA = 0.025
"""one-sided, beside a 95 % interval"""


class Difference(Value):
    """Candidate minus baseline on the tasks that both were graded on; a task counts once."""

    name: str
    tasks: int
    clusters: int | None = None
    """programs, or whatever else tasks rise and fall with; None in what was stored before that was kept"""
    changed: int
    """tasks whose success differs"""
    mean: float
    low: float
    high: float
    """95 % bootstrap interval over clusters"""
    p_better: float
    p_worse: float
    """one-sided sign-flip tests over clusters: the bootstrap alone believes four that changed, which are not
    enough"""

    @property
    def better(self) -> bool:
        return self.low > 0 and self.p_better <= ALPHA

    @property
    def worse(self) -> bool:
        return self.high < 0 and self.p_worse <= ALPHA

    def __str__(self) -> str:
        programs = "1 program" if self.clusters == 1 else f"{self.clusters} programs"
        of = f" of {programs}" if (self.clusters or self.tasks) < self.tasks else ""
        return f"{self.mean:+.1%} (95 % interval {self.low:+.1%} to {self.high:+.1%}, {self.tasks} tasks{of})"


class Evidence(Value):
    """A comparison of two stored evaluations, with everything needed to look at it again."""

    candidate: str
    """id of its evaluation"""
    baseline: str
    baseline_model: str
    baseline_manifest_hash: str | None
    conditions: Conditions
    log: str
    overall: Difference
    suites: tuple[Difference, ...]
    earlier: int
    """other comparisons of these two that are stored: whoever tries often enough is lucky once"""


def compare(candidate: Evaluation, baseline: Evaluation, *, earlier: int = 0) -> Evidence:
    """Raises UsageError where the two were not made under the same conditions or share no graded task."""
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


def difference(name: str, values: Sequence[tuple[str, float]]) -> Difference:
    """Of the tasks of a suite, each with its cluster and what the candidate gains on it."""
    clusters = by_cluster(values)
    mean, low, high = bootstrap(clusters, seed=0)
    return Difference(
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
    """The newest stored comparison of two checkpoints, by the hashes of their manifests.

    One on tasks that training has not seen, by the candidate's `ancestors`, goes before a newer one that
    could not count.
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
    """Why the evidence does not carry a promotion; empty where it does."""
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
    """What says that training has seen the tasks: their split, or a manifest of the lineage."""
    train = sum(task.split is Split.TRAIN for task in evaluation.tasks)
    if train:
        yield f"{train} of the {len(evaluation.tasks)} tasks are of the split train"
    ids = {task.id for task in evaluation.tasks}
    for manifest in ancestors:
        trained_on = manifest.trained_on
        shared = len(ids & set(trained_on.task_ids))
        if shared or evaluation.conditions.tasks_hash in (trained_on.tasks_hash, *trained_on.splits.values()):
            yield f"checkpoint {manifest.name} was trained on {shared or 'all'} of the tasks"
