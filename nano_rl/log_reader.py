"""Several logs read together: groups for policy gradients, and the runs that can teach in another way.

What blocks a run is what `admission.py` and `second_look.py` say of it; added to that are the refusals that
belong to a training: its age, whether the policy has learned from it already, and a task whose content
differs between logs. A run that is refused for policy gradients may still be imitated, or compared with
another outcome.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from nano_coder.runtime import OpenedWeights, Refusal, serving_profile
from nano_rl.admission import Bench, looked_at
from nano_rl.config import TrainConfig
from nano_rl.group import Group, form_groups
from nano_rl.lineage import Lineage
from nano_rl.log_pairs import log_pairs
from nano_rl.preference_pairs import PreferencePair
from nano_rl.second_look import SecondLook
from nano_rl.tasks.impossible import is_control
from nano_shared.errors import UsageError
from nano_shared.store import LogStore
from nano_shared.types import Split, Trajectory

Rescore = Callable[[list[Trajectory]], list[Trajectory]]
AGE_UNKNOWN = "age unknown: sampled by a policy that this one does not come from"
USED = "this policy has learned from it already"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogContents:
    """What logs hold for one policy."""

    groups: tuple[Group, ...] = ()
    """runs that policy gradients may use, by task"""
    born: dict[str, int] = field(default_factory=dict)
    """run -> version of the policy that sampled it, on the way to this one"""
    rest: tuple[Trajectory, ...] = ()
    """runs that policy gradients may not use, and that this policy could have written; only where the
    training imitates or compares"""
    pairs: tuple[PreferencePair, ...] = ()
    """two outcomes of a task, at least one of them of `rest`"""
    refused: Counter[str] = field(default_factory=Counter)
    """reason -> runs that policy gradients may not use"""
    seen: int = 0
    """runs in the logs"""
    unknown_age: int = 0
    """admitted runs whose age is not known"""

    @property
    def runs(self) -> int:
        return sum(len(group.trajectories) for group in self.groups)

    def report(self) -> str:
        """What the logs can teach, in lines for a person."""
        lines = [f"admitted: {self.runs} runs of {len(self.groups)} tasks"]
        if self.unknown_age:
            lines.append(
                f"  {self.unknown_age} of them of unknown age: counted as one update old, whatever they are"
            )
        lines += [f"refused: {count} runs ({reason})" for reason, count in self.refused.most_common()]
        return "\n".join(lines)

    def refuse_nothing(self, stores: Sequence[LogStore]) -> None:
        """Raises UsageError where no run can train this policy."""
        names = " and ".join(store.url for store in stores)
        if not self.seen:
            raise UsageError(f"{names} holds no runs; nano-coder run or nano-rl rollout adds some")
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.refused.most_common())
        raise UsageError(
            f"none of the {self.seen} runs of {names} can train this policy by policy gradient ({reasons});"
            " nano-rl admit shows them by reason; --lambda-sft and --lambda-preference take what is left"
        )


def read_logs(
    stores: Sequence[LogStore],
    opened: OpenedWeights,
    template_hash: str,
    way: Lineage,
    config: TrainConfig,
    *,
    rescore: Rescore | None = None,
) -> LogContents:
    """Every run of the logs, once, by what it can teach. `rescore` gives the admitted runs the verdicts that
    they are to be trained on, before groups are compared."""
    refused: Counter[str] = Counter()
    admitted: list[Trajectory] = []
    rest: list[Trajectory] = []
    born: dict[str, int] = {}
    unknown, known = 0, set[str]()
    beside = bool(config.lambda_sft or config.lambda_preference)
    bench = Bench(profile=opened.profile, template_hash=template_hash)
    for store in stores:
        for run, code in _judged(store, bench, SecondLook(opened, store), known, refused):
            place = way.born(run)
            reason = code.value if code else _by_training(run, place, way, config)
            if reason is None:
                unknown += place is None
                born[run.id] = way.version - 1 if place is None else place
                admitted.append(run)
                continue
            refused[reason] += 1
            if beside and reason != USED and _teaches(run, opened):
                rest.append(run)
    for runs in (admitted, rest):
        runs.sort(key=lambda run: (run.started, run.id))
    if rescore is not None and admitted:
        admitted = rescore(admitted)
    groups = _comparable(_one_content(admitted, refused), config, refused, rest)
    usable = {t.id for group in groups for t in group.trajectories}
    return LogContents(
        groups=groups,
        born={run: place for run, place in born.items() if run in usable},
        rest=tuple(rest),
        pairs=_pairs(stores, {run.id for run in rest}, usable, config),
        refused=refused,
        seen=len(known),
        unknown_age=unknown,
    )


def _judged(
    store: LogStore, bench: Bench, look: SecondLook, known: set[str], refused: Counter[str]
) -> Iterator[tuple[Trajectory, Refusal | None]]:
    """The runs of a log that hold what happened, each with why policy gradients may not use it.

    The damaged ones and copies are counted as refused. All ids are added to `known`; runs whose ids are there
    are passed over.
    """
    facts = (run for run in store.facts() if run.id not in known)
    for looked in looked_at(facts, bench):
        for about, code in looked:
            known.add(about.id)
            if code is None or not _worthless(code):
                run = store.get(about.id)
                code = code or look.refusal(run)
                if code is None or not _worthless(code):
                    yield run, code
                    continue
            refused[code.value] += 1


def _worthless(code: Refusal) -> bool:
    return code.damage or code is Refusal.DUPLICATE


def _by_training(run: Trajectory, place: int | None, way: Lineage, config: TrainConfig) -> str | None:
    if run.id in way.learned_from and config.logs.uses == 1:
        return USED
    bound = config.objective.max_staleness
    if place is None:
        return AGE_UNKNOWN if config.logs.unknown_age == "refuse" else None
    if bound is not None and way.version - place > bound:
        return f"more than {bound} updates old"
    return None


def _teaches(run: Trajectory, opened: OpenedWeights) -> bool:
    """Whether a run that policy gradients may not use may be imitated or compared."""
    return (
        run.stop is not None
        and not run.stop.ours
        and bool(run.turns)
        and run.task.split is not Split.TEST
        and not is_control(run.task)
        and run.profile_hash == serving_profile(opened.profile, run.task).hash
    )


def _one_content(runs: Iterable[Trajectory], refused: Counter[str]) -> list[Trajectory]:
    """Runs whose task is the newest of its key: rewards of other contents share no baseline with it."""
    kept = list(runs)
    newest = {run.group_key: run.task.id for run in sorted(kept, key=lambda run: (run.started, run.id))}
    other = [run for run in kept if run.task.id != newest[run.group_key]]
    if other:
        refused["its task has changed under the same key"] += len(other)
    return [run for run in kept if run.task.id == newest[run.group_key]]


def _comparable(
    runs: Iterable[Trajectory], config: TrainConfig, refused: Counter[str], rest: list[Trajectory]
) -> tuple[Group, ...]:
    """The groups that may have a signal: all of them where fresh rollouts join, or other steps compare."""
    groups = form_groups(runs)
    objective = config.objective
    if config.group_size or objective.over_time or objective.baseline == "none":  # ppo among them
        return tuple(groups)
    kept = []
    for group in groups:
        if group.singleton:
            refused["lone in its group"] += len(group.trajectories)
        elif group.dead:
            refused["all of its group earned the same"] += len(group.trajectories)
        else:
            kept.append(group)
            continue
        if config.lambda_sft or config.lambda_preference:
            rest += group.trajectories
    return tuple(kept)


def _pairs(
    stores: Sequence[LogStore], rest: set[str], usable: set[str], config: TrainConfig
) -> tuple[PreferencePair, ...]:
    if config.lambda_preference == 0 or not rest:
        return ()
    found: dict[tuple[str | None, str | None], PreferencePair] = {}
    for store in stores:
        for pair in log_pairs(store, sources=("graded",), seed=config.seed).pairs:
            sides = {str(pair.chosen_run), str(pair.rejected_run)}
            if sides & rest and sides <= rest | usable:
                found[pair.chosen_run, pair.rejected_run] = pair
    return tuple(found.values())
