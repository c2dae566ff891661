"""Reading logs for a training: groups for policy gradients, and runs for imitation and preferences.

Besides the refusals of `admission.py`, a training refuses runs by their age, runs that the policy was trained
on before, and runs of a task whose content differs between logs. A run that is refused for policy gradients
may still be imitated, or compared with another outcome. Only ids and columns of runs stay in memory. Tokens
are verified before training starts if the logs have at most `VERIFY_AT_START` runs together, and otherwise
when a step takes the run.

The age of a run comes from the policy's lineage. A turn names the weights that its process started from
(`policy_id`) and the number of updates that made the sampling weights (`policy_version`). Checkpoints name
their parents:

    base, version 0  ->  first checkpoint, version 40  ->  the policy, version 100

A run of the base at version 25 is 75 updates old if it was sampled in the training of the first checkpoint.
If it is from another training of the base, it is 25 updates away from the base, which is 100 updates away
from the policy: version -25. Runs of weights that are no ancestors have no known age.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from nano_coder.agent.profiles import serving_profile
from nano_coder.models.opening import OpenedWeights, weights_id
from nano_coder.verify.trainable import RefusalCode, imitation_refusal, interface_refusal
from nano_rl.config import TrainConfig
from nano_rl.learn.groups import Group, GroupMember, is_dead
from nano_rl.logs.admission import RunCheck, RunVerifier, TargetPolicy, check_runs
from nano_rl.training_record import USED, read_used
from nano_shared import snapshot
from nano_shared.checkpoint import MANIFEST, Manifest, read_checkpoint, resolve_checkpoint
from nano_shared.errors import CheckpointError, UsageError
from nano_shared.files import checkpoints_dir
from nano_shared.policy import InterfaceProfile
from nano_shared.run_facts import RunFacts
from nano_shared.store import LogStore
from nano_shared.types import Split, Task, Trajectory, Verdict

_GENERATIONS = 1000
"""bound on the number of ancestors, against circular parent names"""


@dataclass(frozen=True, slots=True, kw_only=True)
class AncestorWeights:
    id: str
    version: int
    """number of updates that made these weights"""
    until: int
    """version of its child in the lineage; its own for the policy itself"""
    next_runs: frozenset[str] | None
    """runs that the child was trained on; None if they are not all known"""

    def place(self, run: str, version: int) -> int:
        """The sampling version of a run as a version of the lineage with the same distance to the policy."""
        beyond = version - self.version
        in_lineage = version <= self.until and (self.next_runs is None or run in self.next_runs)
        return version if beyond <= 0 or in_lineage else self.version - beyond


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """A policy with its ancestors, and the runs that they were trained on."""

    weights: tuple[AncestorWeights, ...]
    """of the policy first, then of its ancestors"""
    learned_from: frozenset[str]
    """runs that any of them was trained on, as far as known"""

    @property
    def version(self) -> int:
        return self.weights[0].version

    def policy_version(self, run: Trajectory | RunFacts) -> int | None:
        """Version of the policy that sampled the oldest turn of a run, in this lineage; None if unknown.
        Negative for weights that are more updates away than the policy has."""
        by_id = {weights.id: weights for weights in self.weights}
        if isinstance(run, RunFacts):
            samplers = [(turn.policy_id, turn.policy_version) for turn in run.turns]
        else:
            samplers = [(turn.completion.policy_id, turn.completion.policy_version) for turn in run.turns]
        if not {policy for policy, _ in samplers} <= set(by_id):
            return None
        places = (by_id[policy].place(run.id, version) for policy, version in samplers)
        return min(places, default=None)


def lineage(opened: OpenedWeights) -> Lineage:
    """The lineage of the opened weights, as far back as checkpoints are found on this machine."""
    own = AncestorWeights(
        id=opened.loaded.id, version=opened.version, until=opened.version, next_runs=frozenset()
    )
    lineage, learned = [own], set[str]()
    for manifest, parent, version in _parents(opened.manifest):
        runs, whole = _runs(manifest)
        learned |= runs
        if parent is None:
            break
        next_runs = frozenset(runs) if whole else None
        lineage.append(
            AncestorWeights(id=parent, version=version, until=manifest.policy_version, next_runs=next_runs)
        )
    return Lineage(weights=tuple(lineage), learned_from=frozenset(learned))


def _parents(manifest: Manifest | None) -> Iterator[tuple[Manifest, str | None, int]]:
    """Each checkpoint of the lineage with the id and version of the weights that it was trained from; None
    if those are missing."""
    for _ in range(_GENERATIONS):
        if manifest is None:
            return
        above: Manifest | None = None
        identity: str | None = None
        if (name := manifest.parent) is not None:
            with suppress(CheckpointError):  # not a checkpoint, or deleted
                above = read_checkpoint(resolve_checkpoint(name), verify=False)
            with suppress(OSError, UsageError):
                # a full checkpoint names its starting weights; a model that is no checkpoint must be read
                identity = manifest.base_model if above and manifest.kind == "full" else weights_id(name)
        version = above.policy_version if above else 0
        known = identity is not None and version <= manifest.policy_version
        yield manifest, identity if known else None, version
        if not known:
            return
        manifest = above


def _runs(manifest: Manifest) -> tuple[set[str], bool]:
    """The runs that a checkpoint was trained on, and whether these are all of them. The manifest lists at
    most a thousand; the folder of the training lists all."""
    listed = set(manifest.trained_on.run_ids)
    used = checkpoints_dir().parent / "trainings" / manifest.name / USED
    if (checkpoints_dir() / manifest.name / MANIFEST).is_file() and used.is_file():
        listed |= {run for line in read_used(used) for group in line["groups"] for run in group["runs"]}
    return listed, len(listed) >= manifest.trained_on.runs


@dataclass(slots=True, kw_only=True)
class LoggedRuns:
    stores: Sequence[LogStore]
    verifiers: Sequence[RunVerifier] | None = None
    """[logs] checks of the tokens of a run when it is loaded; None if all runs were verified before"""
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    """run -> the verdict to train on, if it is not the newest one in the log"""
    refused: Counter[str] = field(default_factory=Counter)
    """refusal -> number of loaded runs that were refused"""

    def run(self, member: GroupMember) -> Trajectory:
        """Load a run. Raises LogError if it cannot be read."""
        run = self.stores[member.log].get(member.id)
        verdict = self.verdicts.get(member.id)
        return run if verdict is None else run.model_copy(update={"verdict": verdict})

    def task(self, log: int, run: str) -> Task:
        """The task of a run; its snapshot is copied to the first log, to which fresh runs are written."""
        task = self.stores[log].task(run)
        if log and task.snapshot is not None:
            snapshot.copy(task.snapshot, self.stores[log].blobs, self.stores[0].blobs)
        return task

    def verified(self, member: GroupMember) -> Trajectory | None:
        """Load a run; None, and counted in `refused`, if its tokens do not match its texts and template.
        Log-probs are not recomputed, since the weights have changed since training began; the trainer
        compares them with its own at every step."""
        run = self.run(member)
        refusal = self.verifiers[member.log].verify(run, score=False).refusal if self.verifiers else None
        if refusal is None:
            return run
        self.refused[refusal.value] += 1
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedGroup:
    """As `Group`, with runs that stay in their logs until `load`."""

    task_key: str
    """`Trajectory.group_key`"""
    forked: bool = False
    members: tuple[GroupMember, ...] = ()
    """[G]; empty if the task is only an environment for fresh rollouts"""
    runs: LoggedRuns
    example: tuple[int, str] | None = None
    """index of the log and id of a run with the task, if there are no members"""
    mutant: Task | None = None
    """the task, if it was made of a mutant: no run of it needs to be in a log"""

    @property
    def task(self) -> Task:
        return self.mutant or self.runs.task(*self._first)

    @property
    def rewards_G(self) -> tuple[float, ...]:
        """[G], as `Group.rewards_G`"""
        return tuple(member.reward for member in self.members)

    @property
    def singleton(self) -> bool:
        return sum(not math.isnan(reward) for reward in self.rewards_G) < 2

    @property
    def dead(self) -> bool:
        return is_dead(self.rewards_G)

    def only(self, runs: Sequence[str]) -> LoggedGroup:
        by_id = {member.id: member for member in self.members}
        return replace(self, members=tuple(by_id[run] for run in runs))

    def environment(self) -> LoggedGroup:
        """The task without its runs, as an environment for fresh rollouts."""
        return self if self.mutant else replace(self, members=(), example=self._first)

    @property
    def _first(self) -> tuple[int, str]:
        return self.example or (self.members[0].log, self.members[0].id)

    def load(self) -> Group | None:
        """Load the runs whose tokens are verified; None if there is none."""
        runs = [run for member in self.members if (run := self.runs.verified(member)) is not None]
        return Group(task_key=self.task_key, trajectories=tuple(runs)) if runs else None


class LoggedTasks(Sequence[Task]):
    """The task of each group, read from the log on access."""

    def __init__(self, groups: Sequence[Group | LoggedGroup]) -> None:
        self._groups = groups

    def __len__(self) -> int:
        return len(self._groups)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return LoggedTasks(self._groups[place])
        return self._groups[place].task


def members_of(groups: Collection[Group | LoggedGroup]) -> Mapping[str, Group | LoggedGroup]:
    return {member.id: group for group in groups for member in group.members}


Rescore = Callable[[list[Trajectory]], list[Trajectory]]
AGE_UNKNOWN = "age unknown: sampled by a policy that this one does not come from"
LEARNED = "this policy has learned from it already"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogContents:
    """The runs of logs by their use for one policy."""

    groups: tuple[LoggedGroup, ...] = ()
    """runs for policy gradients, by task; with fresh rollouts also tasks without such runs"""
    policy_versions: dict[str, int] = field(default_factory=dict)
    """run -> version of the policy that sampled it"""
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
        return {member.id for group in self.groups for member in group.members}

    @property
    def runs(self) -> int:
        return sum(len(group.members) for group in self.groups)

    def report(self) -> str:
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
    stores: Sequence[LogStore], opened: OpenedWeights, template_hash: str, lineage: Lineage,
    config: TrainConfig, *, rescore: Rescore | None = None,
) -> LogContents:  # fmt: skip
    """Read every run of the logs once. `rescore` gives the admitted runs the verdicts to train on, before
    groups are formed."""
    keeps_rest = bool(config.lambda_sft or config.logs.lambda_preference)
    target = TargetPolicy(profile=opened.profile, template_hash=template_hash)
    verifiers = [RunVerifier(opened, store) for store in stores]
    verify_now = rescore is not None or sum(len(store.ids()) for store in stores) <= VERIFY_AT_START
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
            can_imitate += code is not None and imitation_refusal(about, opened.profile) is None
            if keeps_rest and reason != LEARNED:
                rest += [store.get(about.id)] if _may_teach(about, opened) else []
    admitted = _form_groups(_newest_content(found, refused), runs)
    if rescore is not None:
        admitted = [_rescored(group, rescore) for group in admitted]
    groups = _comparable(admitted, config, refused, rest)
    if config.group_size:
        groups += _environments(examples, {group.task_key for group in groups}, runs)
    rest.sort(key=lambda run: (run.started, run.id))
    versions = {of.member.id: of.policy_version for of in found}
    return LogContents(
        groups=groups, rest=tuple(rest), refused=refused, seen=len(known), can_imitate=can_imitate,
        policy_versions={member.id: versions[member.id] for group in groups for member in group.members},
        passed=tuple((of.log, of.run) for of in sorted(passed.values(), reverse=True)),
        imitates=config.lambda_sft > 0 and config.imitate == "rest", verified=verify_now,
    )  # fmt: skip


VERIFY_AT_START = 2000
"""largest number of runs in all logs together that are verified before the first step"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _AdmittedRun:
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
            id=run.id, started=run.started, version=min(turn.policy_version for turn in run.turns),
            reward=math.nan if run.reward is None else run.reward, log=log,
        )  # fmt: skip
        key = run.group_key
        forked = key != run.task.key
        return cls(member=member, key=key, forked=forked, task=run.task_id, policy_version=policy_version)


def _verified(store: LogStore, verifier: RunVerifier, run: RunFacts) -> RefusalCode | None:
    return verifier.refusal(store.get(run.id))


def _undamaged(
    store: LogStore, target: TargetPolicy, verify: RunCheck | None, known: set[str], refused: Counter[str]
) -> Iterator[tuple[RunFacts, RefusalCode | None]]:
    """The runs of a log that nothing bars and that are no copies, each with why policy gradients may not use
    it. Barred runs and copies are counted in `refused`. Runs in `known` are skipped, and all ids are added to
    it."""
    facts = (run for run in store.facts() if run.id not in known)
    for checked in check_runs(facts, target, verify):
        for about, code in checked:
            known.add(about.id)
            if code is not None and (code.bars or code is RefusalCode.DUPLICATE):
                refused[code.value] += 1
            else:
                yield about, code


def _training_refusal(
    run: RunFacts, version: int | None, lineage: Lineage, config: TrainConfig
) -> str | None:
    """Why this training may not use a run that admission accepts: used before, of unknown age, or too old."""
    if run.id in lineage.learned_from and config.logs.uses == 1:
        return LEARNED
    bound = config.objective.max_staleness
    if version is None:
        return AGE_UNKNOWN
    if bound is not None and lineage.version - version > bound:
        return f"more than {bound} updates old"
    return None


def _may_teach(run: RunFacts, opened: OpenedWeights) -> bool:
    """True if a run that policy gradients may not use may be imitated or compared."""
    return (
        run.stop is not None
        and not run.stop.ours
        and bool(run.turns)
        and run.task.split is not Split.TEST
        and not run.task.is_control
        and interface_refusal(run, opened.profile) is None
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
            groups.append(LoggedGroup(task_key=key, runs=runs, example=(of.log, of.run)))
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
    by_key: dict[tuple[str, bool], list[GroupMember]] = {}
    for of in found:
        by_key.setdefault((of.key, of.forked), []).append(of.member)
    return [
        LoggedGroup(task_key=key, forked=forked, members=tuple(members), runs=runs)
        for (key, forked), members in by_key.items()
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
