"""Several logs read together: groups for policy gradients, and the runs that can teach in another way.

What blocks a run is what `admission.py` and `second_look.py` say of it; added to that are the refusals that
belong to a training: its age, whether the policy has learned from it already, and a task whose content
differs between logs. A run that is refused for policy gradients may still be imitated, or compared with
another outcome.

Of runs for policy gradients nothing but ids and columns stays in memory. Their tokens are held against what
was logged beside them at once in a log of at most `AT_ONCE` runs, and otherwise when a step takes them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice

from nano_coder.agent.profiles import serving_profile
from nano_coder.models.opening import OpenedWeights
from nano_coder.verify.refusal import Refusal
from nano_rl.config.training import TrainConfig
from nano_rl.learn.rows.group import Group, Member
from nano_rl.logs.admission import Bench, Look, looked_at, may_imitate, serving
from nano_rl.logs.lineage import Lineage
from nano_rl.logs.logged_group import LoggedGroup, Shelf
from nano_rl.logs.token_verification import SecondLook
from nano_shared.errors import UsageError
from nano_shared.facts import RunFacts
from nano_shared.profile import InterfaceProfile
from nano_shared.store import LogStore
from nano_shared.types import CONTROL_GENERATOR, Split, Trajectory

Rescore = Callable[[list[Trajectory]], list[Trajectory]]
AGE_UNKNOWN = "age unknown: sampled by a policy that this one does not come from"
USED = "this policy has learned from it already"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogContents:
    """What logs hold for one policy."""

    groups: tuple[LoggedGroup, ...] = ()
    """runs that policy gradients may use, by task; where fresh rollouts join, also the tasks of the others"""
    born: dict[str, int] = field(default_factory=dict)
    """run -> version of the policy that sampled it, on the way to this one"""
    rest: tuple[Trajectory, ...] = ()
    """runs that policy gradients may not use, and that this policy could have written; only where the
    training imitates or compares"""
    refused: Counter[str] = field(default_factory=Counter)
    """reason -> runs that policy gradients may not use"""
    seen: int = 0
    """runs in the logs"""
    unknown_age: int = 0
    """admitted runs whose age is not known"""
    can_imitate: int = 0
    """runs that passed and that policy gradients may not use"""
    imitates: bool = False
    """the training imitates those"""
    looked: bool = True
    """the tokens of the admitted runs have been looked at; otherwise that is done when they are taken"""

    @property
    def usable(self) -> set[str]:
        """Ids of the admitted runs."""
        return {member.id for group in self.groups for member in group.members}

    @property
    def runs(self) -> int:
        return sum(len(group.members) for group in self.groups)

    def report(self) -> str:
        """What the logs can teach, in lines for a person."""
        lines = [f"admitted: {self.runs} runs of {sum(bool(g.members) for g in self.groups)} tasks"]
        if self.unknown_age:
            lines.append(
                f"  {self.unknown_age} of them of unknown age: counted as one update old, whatever they are"
            )
        if not self.looked:
            lines.append("  by their columns: the tokens of a run are looked at when a step takes it")
        lines += [f"refused: {count} runs ({reason})" for reason, count in self.refused.most_common()]
        if self.can_imitate and self.imitates:
            lines.append(f"{self.can_imitate} of these passed and are imitated beside (lambda_sft)")
        elif self.can_imitate:
            lines.append(
                f"{self.can_imitate} of these passed and can be imitated: nano-rl sft --from-logs, or"
                " --lambda-sft 0.1 beside this training"
            )
        return "\n".join(lines)

    def refuse_nothing(self, stores: Sequence[LogStore], *, fresh: bool) -> None:
        """Raises UsageError where no run can train this policy."""
        names = " and ".join(store.url for store in stores)
        if not self.seen:
            raise UsageError(f"{names} holds no runs; nano-coder run or nano-rl rollout adds some")
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.refused.most_common())
        if fresh:
            raise UsageError(
                f"none of the {self.seen} runs of {names} can train this policy ({reasons}), and none of"
                " their tasks can be graded again, so that no fresh rollout would earn anything: give"
                " nano-coder run a --check; nano-rl admit shows the runs by reason"
            )
        raise UsageError(
            f"none of the {self.seen} runs of {names} can train this policy by policy gradient ({reasons});"
            " nano-rl admit shows them by reason; --fresh 8 rolls their tasks out afresh, --lambda-sft and"
            " --lambda-preference take what is left"
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
    beside = bool(config.lambda_sft or config.lambda_preference)
    bench = Bench(profile=opened.profile, template_hash=template_hash)
    looks = [SecondLook(opened, store) for store in stores]
    at_once = rescore is not None or _few(stores)
    shelf = Shelf(stores=stores, looks=None if at_once else looks)
    refused: Counter[str] = Counter()
    found: list[_Found] = []
    rest: list[Trajectory] = []
    examples: dict[str, _Example] = {}
    unknown, known, can_imitate = 0, set[str](), 0
    for number, store in enumerate(stores):
        look = partial(_looked, store, looks[number]) if at_once else None
        for about, code in _judged(store, bench, look, known, refused):
            if (example := _Example.of(about, number, opened.profile)) is not None:
                examples[about.task.key] = max(example, examples.get(about.task.key, example))
            place = way.born(about)
            reason = code.value if code else _by_training(about, place, way, config)
            if reason is None:
                unknown += place is None
                found.append(_Found.of(about, number, way.version - 1 if place is None else place))
                continue
            refused[reason] += 1
            can_imitate += code is not None and may_imitate(about, code)
            if beside and reason != USED:
                run = store.get(about.id)
                rest += [run] if _teaches(run, opened) else []
    admitted = _form_groups(_one_content(found, refused), shelf)
    if rescore is not None:
        admitted = [_rescored(group, rescore) for group in admitted]
    groups = _comparable(admitted, config, refused, rest)
    if config.group_size:
        groups += _environments(examples, {group.task_key for group in groups}, shelf)
    rest.sort(key=lambda run: (run.started, run.id))
    born = {of.member.id: of.born for of in found}
    return LogContents(
        groups=groups,
        born={member.id: born[member.id] for group in groups for member in group.members},
        rest=tuple(rest),
        refused=refused,
        seen=len(known),
        unknown_age=unknown,
        can_imitate=can_imitate,
        imitates=config.lambda_sft > 0 and config.imitate == "rest",
        looked=at_once,
    )


AT_ONCE = 2000
"""runs of all logs together, whose tokens are looked at before the first step"""


def _few(stores: Sequence[LogStore]) -> bool:
    return sum(sum(1 for _ in islice(store.headings(), AT_ONCE + 1)) for store in stores) <= AT_ONCE


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """A run that its columns admit."""

    member: Member
    key: str
    """of its group"""
    forked: bool
    task: str
    """id of its task's content"""
    born: int

    @classmethod
    def of(cls, run: RunFacts, log: int, born: int) -> _Found:
        member = Member(
            id=run.id,
            started=run.started,
            version=min(turn.policy_version for turn in run.turns),
            reward=math.nan if run.reward is None else run.reward,
            log=log,
        )
        key = run.group_key
        return cls(member=member, key=key, forked=key != run.task.key, task=run.task.id, born=born)


def _looked(store: LogStore, look: SecondLook, run: RunFacts) -> Refusal | None:
    return look.refusal(store.get(run.id))


def _judged(
    store: LogStore, bench: Bench, look: Look | None, known: set[str], refused: Counter[str]
) -> Iterator[tuple[RunFacts, Refusal | None]]:
    """The runs of a log that hold what happened, each with why policy gradients may not use it.

    The damaged ones and copies are counted as refused. All ids are added to `known`; runs whose ids are there
    are passed over.
    """
    facts = (run for run in store.facts() if run.id not in known)
    for looked in looked_at(facts, bench, look):
        for about, code in looked:
            known.add(about.id)
            if code is not None and _worthless(code):
                refused[code.value] += 1
            else:
                yield about, code


def _worthless(code: Refusal) -> bool:
    return code.damage or code is Refusal.DUPLICATE


def _by_training(run: RunFacts, place: int | None, way: Lineage, config: TrainConfig) -> str | None:
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
        and not run.task.is_control
        and run.profile_hash == serving_profile(opened.profile, run.task).hash
    )


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class _Example:
    """A run that holds a task which fresh rollouts may be made of; of one key the newest is taken."""

    started: float
    run: str
    log: int

    @classmethod
    def of(cls, run: RunFacts, log: int, profile: InterfaceProfile) -> _Example | None:
        about = run.task
        offered = {tool.name for tool in serving(profile, about).tools}
        served = set(about.tools or ()) <= offered
        runs = run.verdict is None or run.verdict.failure_kind != "check_not_found"
        if about.split == Split.TEST or about.generator == CONTROL_GENERATOR or not (served and runs):
            return None
        return cls(started=run.started, run=run.id, log=log)


def _environments(
    examples: Mapping[str, _Example], known: Collection[str], shelf: Shelf
) -> tuple[LoggedGroup, ...]:
    """A group without members for each task that can be graded and has none that may train."""
    groups = []
    for key, of in examples.items():
        task = shelf.stores[of.log].task(of.run) if key not in known else None
        if task is not None and (task.check or task.hidden):
            group = LoggedGroup(task_key=key, forked=False, members=(), shelf=shelf, example=(of.log, of.run))
            groups.append(group)
    return tuple(groups)


def _one_content(found: Iterable[_Found], refused: Counter[str]) -> list[_Found]:
    """Runs whose task is the newest of its key, oldest first: rewards of other contents share no baseline
    with it."""
    kept = sorted(found, key=lambda of: (of.member.started, of.member.id))
    newest = {of.key: of.task for of in kept}
    same = [of for of in kept if of.task == newest[of.key]]
    if len(same) < len(kept):
        refused["its task has changed under the same key"] += len(kept) - len(same)
    return same


def _form_groups(found: Iterable[_Found], shelf: Shelf) -> list[LoggedGroup]:
    """By key, in the order in which the keys first appear."""
    by_key: dict[str, list[_Found]] = {}
    for of in found:
        by_key.setdefault(of.key, []).append(of)
    return [
        LoggedGroup(
            task_key=key, forked=members[0].forked, members=tuple(of.member for of in members), shelf=shelf
        )
        for key, members in by_key.items()
    ]


def _rescored(group: LoggedGroup, rescore: Rescore) -> LoggedGroup:
    """The group with the verdicts that it is to be trained on; the runs themselves are let go again."""
    runs = rescore([group.shelf.run(member) for member in group.members])
    group.shelf.verdicts.update({run.id: run.verdict for run in runs if run.verdict is not None})
    rewards = Group(task_key=group.task_key, trajectories=tuple(runs)).rewards_G
    members = zip(group.members, rewards, strict=True)
    return replace(group, members=tuple(replace(member, reward=reward) for member, reward in members))


def _comparable(
    groups: Iterable[LoggedGroup], config: TrainConfig, refused: Counter[str], rest: list[Trajectory]
) -> tuple[LoggedGroup, ...]:
    """The groups that may have a signal: all of them where fresh rollouts join, or other steps compare."""
    objective = config.objective
    if config.group_size or objective.over_time or objective.baseline == "none":  # ppo among them
        return tuple(groups)
    kept = []
    for group in groups:
        if group.singleton:
            refused["lone in its group"] += len(group.members)
        elif group.dead:
            refused["all of its group earned the same"] += len(group.members)
        else:
            kept.append(group)
            continue
        if config.lambda_sft or config.lambda_preference:
            rest += [run for member in group.members if (run := group.shelf.sound(member)) is not None]
    return tuple(kept)
