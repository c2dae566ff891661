"""Reading logs for a training: groups for policy gradients, and runs for imitation and preferences.

Besides the refusals of `admission.py`, a training refuses runs by their age, runs that the policy was trained
on before, and runs of a task whose content differs between logs. A run that is refused for policy gradients
may still be imitated, or compared with another outcome.

Only ids and columns of runs stay in memory. Tokens are verified before training starts if the logs have at
most `VERIFY_AT_START` runs together, and otherwise when a step takes the run.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from nano_coder.agent.profiles import serving_profile
from nano_coder.models.opening import OpenedWeights
from nano_coder.verify.refusal_codes import RefusalCode
from nano_rl.config import TrainConfig
from nano_rl.learn.rows import Group, GroupMember
from nano_rl.logs.admission import RunCheck, RunVerifier, TargetPolicy, check_runs, may_imitate
from nano_rl.logs.lineage import Lineage
from nano_rl.logs.logged_group import LoggedGroup, LoggedRuns
from nano_shared.errors import UsageError
from nano_shared.profile import InterfaceProfile
from nano_shared.run_facts import RunFacts
from nano_shared.store import LogStore
from nano_shared.types import Split, Trajectory

Rescore = Callable[[list[Trajectory]], list[Trajectory]]
AGE_UNKNOWN = "age unknown: sampled by a policy that this one does not come from"
USED = "this policy has learned from it already"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogContents:
    """The runs of logs by their use for one policy."""

    groups: tuple[LoggedGroup, ...] = ()
    """runs for policy gradients, by task; with fresh rollouts also tasks without such runs"""
    policy_versions: dict[str, int] = field(default_factory=dict)
    """run -> version of the policy that sampled it (`lineage.py`)"""
    rest: tuple[Trajectory, ...] = ()
    """runs that policy gradients may not use, made under this policy's profile; only loaded if the training
    imitates or compares"""
    passed: tuple[tuple[int, str], ...] = ()
    """index of the log and id of the newest passing run of each task that may be rolled out, newest first"""
    refused: Counter[str] = field(default_factory=Counter)
    """reason -> number of runs that policy gradients may not use"""
    seen: int = 0
    """number of runs in the logs"""
    can_imitate: int = 0
    """number of successful runs that policy gradients may not use"""
    imitates: bool = False
    """True if the training imitates them"""
    verified: bool = True
    """True if the tokens of the admitted runs were verified; otherwise they are when a step takes them"""

    @property
    def usable(self) -> set[str]:
        """Ids of the admitted runs."""
        return {member.id for group in self.groups for member in group.members}

    @property
    def runs(self) -> int:
        return sum(len(group.members) for group in self.groups)

    def report(self) -> str:
        """A summary in lines of text."""
        lines = [f"admitted: {self.runs} runs of {sum(bool(g.members) for g in self.groups)} tasks"]
        if not self.verified:
            lines.append("  by their columns: the tokens of a run are looked at when a step takes it")
        lines += [f"refused: {count} runs ({reason})" for reason, count in self.refused.most_common()]
        if self.can_imitate and self.imitates:
            lines.append(f"{self.can_imitate} of these passed and are imitated beside (lambda_sft)")
        elif self.can_imitate:
            lines.append(
                f"{self.can_imitate} of these passed and can be imitated: nano-rl sft --from-logs, or"
                " --set lambda_sft=0.1 beside this training"
            )
        return "\n".join(lines)

    def refuse_nothing(self, stores: Sequence[LogStore], *, fresh: bool) -> None:
        """Raises UsageError, because no run can train this policy."""
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
            " nano-rl admit shows them by reason; --fresh 8 rolls their tasks out afresh, lambda_sft and"
            " logs.lambda_preference take what is left"
        )


def read_logs(
    stores: Sequence[LogStore],
    opened: OpenedWeights,
    template_hash: str,
    lineage: Lineage,
    config: TrainConfig,
    *,
    rescore: Rescore | None = None,
) -> LogContents:
    """Read every run of the logs once. `rescore` gives the admitted runs the verdicts to train on, before
    groups are formed."""
    keeps_rest = bool(config.lambda_sft or config.logs.lambda_preference)
    target = TargetPolicy(profile=opened.profile, template_hash=template_hash)
    verifiers = [RunVerifier(opened, store) for store in stores]
    verify_now = rescore is not None or _few(stores)
    runs = LoggedRuns(stores=stores, verifiers=None if verify_now else verifiers)
    refused: Counter[str] = Counter()
    found: list[_AdmittedRun] = []
    rest: list[Trajectory] = []
    examples: dict[str, _Example] = {}
    passed: dict[str, _Example] = {}
    known, can_imitate = set[str](), 0
    for number, store in enumerate(stores):
        verify = partial(_verified, store, verifiers[number]) if verify_now else None
        for about, code in _undamaged(store, target, verify, known, refused):
            if (example := _Example.of(about, number, opened.profile)) is not None:
                examples[about.task.key] = max(example, examples.get(about.task.key, example))
                if about.reward == 1:
                    passed[about.task.key] = max(example, passed.get(about.task.key, example))
            version = lineage.policy_version(about)
            reason = code.value if code else _training_refusal(about, version, lineage, config)
            if reason is None and version is not None:
                found.append(_AdmittedRun.of(about, number, version))
                continue
            assert reason is not None  # a run of unknown age is refused
            refused[reason] += 1
            can_imitate += code is not None and may_imitate(about, code)
            if keeps_rest and reason != USED:
                run = store.get(about.id)
                rest += [run] if _may_teach(run, opened) else []
    admitted = _form_groups(_newest_content(found, refused), runs)
    if rescore is not None:
        admitted = [_rescored(group, rescore) for group in admitted]
    groups = _comparable(admitted, config, refused, rest)
    if config.group_size:
        groups += _environments(examples, {group.task_key for group in groups}, runs)
    rest.sort(key=lambda run: (run.started, run.id))
    versions = {of.member.id: of.policy_version for of in found}
    return LogContents(
        groups=groups,
        policy_versions={member.id: versions[member.id] for group in groups for member in group.members},
        rest=tuple(rest),
        passed=tuple((of.log, of.run) for of in sorted(passed.values(), reverse=True)),
        refused=refused,
        seen=len(known),
        can_imitate=can_imitate,
        imitates=config.lambda_sft > 0 and config.imitate == "rest",
        verified=verify_now,
    )


VERIFY_AT_START = 2000
"""largest number of runs in all logs together that are verified before the first step"""


def _few(stores: Sequence[LogStore]) -> bool:
    return sum(len(store.ids()) for store in stores) <= VERIFY_AT_START


@dataclass(frozen=True, slots=True, kw_only=True)
class _AdmittedRun:
    """A run that policy gradients may use."""

    member: GroupMember
    key: str
    """key of its group"""
    forked: bool
    task: str
    """content id of its task"""
    policy_version: int

    @classmethod
    def of(cls, run: RunFacts, log: int, policy_version: int) -> _AdmittedRun:
        member = GroupMember(
            id=run.id,
            started=run.started,
            version=min(turn.policy_version for turn in run.turns),
            reward=math.nan if run.reward is None else run.reward,
            log=log,
        )
        key = run.group_key
        return cls(
            member=member, key=key, forked=key != run.task.key, task=run.task_id,
            policy_version=policy_version,
        )  # fmt: skip


def _verified(store: LogStore, verifier: RunVerifier, run: RunFacts) -> RefusalCode | None:
    return verifier.refusal(store.get(run.id))


def _undamaged(
    store: LogStore, target: TargetPolicy, verify: RunCheck | None, known: set[str], refused: Counter[str]
) -> Iterator[tuple[RunFacts, RefusalCode | None]]:
    """The runs of a log that are neither damaged nor copies, each with why policy gradients may not use it.

    Damaged runs and copies are counted in `refused`. Runs in `known` are skipped, and all ids are added to
    it.
    """
    facts = (run for run in store.facts() if run.id not in known)
    for checked in check_runs(facts, target, verify):
        for about, code in checked:
            known.add(about.id)
            if code is not None and (code.damage or code is RefusalCode.DUPLICATE):
                refused[code.value] += 1
            else:
                yield about, code


def _training_refusal(
    run: RunFacts, version: int | None, lineage: Lineage, config: TrainConfig
) -> str | None:
    """Why this training may not use a run that admission accepts: used before, of unknown age, or too old."""
    if run.id in lineage.learned_from and config.logs.uses == 1:
        return USED
    bound = config.objective.max_staleness
    if version is None:
        return AGE_UNKNOWN
    if bound is not None and lineage.version - version > bound:
        return f"more than {bound} updates old"
    return None


def _may_teach(run: Trajectory, opened: OpenedWeights) -> bool:
    """True if a run that policy gradients may not use may be imitated or compared."""
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
    """A run whose task can be rolled out afresh; the newest run of each task key is taken."""

    started: float
    run: str
    log: int

    @classmethod
    def of(cls, run: RunFacts, log: int, profile: InterfaceProfile) -> _Example | None:
        about = run.task
        offered = {tool.name for tool in serving_profile(profile, about).tools}
        served = set(about.tools or ()) <= offered
        runs = run.verdict is None or run.verdict.failure_kind != "check_not_found"
        if about.split == Split.TEST or about.is_control or not (served and runs):
            return None
        return cls(started=run.started, run=run.id, log=log)


def _environments(
    examples: Mapping[str, _Example], known: Collection[str], runs: LoggedRuns
) -> tuple[LoggedGroup, ...]:
    """A group without members for each task that can be graded and has no runs for policy gradients."""
    groups = []
    for key, of in examples.items():
        task = runs.stores[of.log].task(of.run) if key not in known else None
        if task is not None and (task.check or task.hidden):
            group = LoggedGroup(task_key=key, forked=False, members=(), runs=runs, example=(of.log, of.run))
            groups.append(group)
    return tuple(groups)


def _newest_content(found: Iterable[_AdmittedRun], refused: Counter[str]) -> list[_AdmittedRun]:
    """Runs of the newest content of each task key, oldest first: other contents share no baseline with it."""
    kept = sorted(found, key=lambda of: (of.member.started, of.member.id))
    newest = {of.key: of.task for of in kept}
    same = [of for of in kept if of.task == newest[of.key]]
    if len(same) < len(kept):
        refused["its task has changed under the same key"] += len(kept) - len(same)
    return same


def _form_groups(found: Iterable[_AdmittedRun], runs: LoggedRuns) -> list[LoggedGroup]:
    """Groups by key, in the order of first appearance."""
    by_key: dict[str, list[_AdmittedRun]] = {}
    for of in found:
        by_key.setdefault(of.key, []).append(of)
    return [
        LoggedGroup(
            task_key=key, forked=members[0].forked, members=tuple(of.member for of in members), runs=runs
        )
        for key, members in by_key.items()
    ]


def _rescored(group: LoggedGroup, rescore: Rescore) -> LoggedGroup:
    """The group with the rewards of new verdicts; the loaded runs are not kept."""
    runs = rescore([group.runs.run(member) for member in group.members])
    group.runs.verdicts.update({run.id: run.verdict for run in runs if run.verdict is not None})
    rewards = Group(task_key=group.task_key, trajectories=tuple(runs)).rewards_G
    members = zip(group.members, rewards, strict=True)
    return replace(group, members=tuple(replace(member, reward=reward) for member, reward in members))


def _comparable(
    groups: Iterable[LoggedGroup], config: TrainConfig, refused: Counter[str], rest: list[Trajectory]
) -> tuple[LoggedGroup, ...]:
    """The groups that can have a signal: all of them with fresh rollouts, or a baseline outside the group."""
    if config.group_size or config.objective.terms.baseline == "none":  # ppo among them
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
        if config.lambda_sft or config.logs.lambda_preference:
            rest += [run for member in group.members if (run := group.runs.verified(member)) is not None]
    return tuple(kept)
