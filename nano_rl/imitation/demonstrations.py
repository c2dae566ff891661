"""Where demonstrations come from: the tasks' oracles, run for real, or successes that lie in the log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from nano_coder.models.opening import OpenedWeights, local_policy
from nano_coder.run.execution import Runtime
from nano_coder.verify.refusal import Refusal
from nano_coder.verify.trainable import blocking
from nano_rl.config.training import TrainConfig
from nano_rl.imitation.oracle_runs import oracle_runs
from nano_rl.imitation.rows import NO_DIRECTORY, Reader, opens, succeeded
from nano_rl.imitation.term import Demonstrations, ImitationTerm
from nano_rl.learn.rows.group import Group, form_groups
from nano_rl.logs.admission import Bench, Look, looked_at, refusal_of, uncomparable
from nano_rl.logs.token_verification import SecondLook
from nano_rl.tasks.oracle import ORACLE
from nano_shared.errors import UsageError
from nano_shared.facts import RunFacts, facts_of
from nano_shared.profile import InterfaceProfile
from nano_shared.store import LogStore
from nano_shared.types import Split, Task, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """What a log can teach: groups with a comparison in them, and a count for each reason of refusal."""

    groups: tuple[Group, ...]
    refused: Counter[str]

    @property
    def runs(self) -> int:
        return sum(len(group.trajectories) for group in self.groups)


def admit(
    store: LogStore,
    profile: InterfaceProfile,
    template_hash: str,
    *,
    rescore: Callable[[list[Trajectory]], list[Trajectory]] | None = None,
    look: SecondLook | None = None,
) -> Admission:
    """Groups by task key of every logged run that may train this policy.

    `rescore` gives the admitted runs the verdicts they are to be trained on, before groups are compared.
    `look` is taken at each run that its columns admit: give it to train, since only the policy's tokenizer
    and weights can tell a shifted mask or an invented log-prob.
    """
    refused: Counter[str] = Counter()
    admitted: list[Trajectory] = []

    def load(run: RunFacts) -> Refusal | None:
        trajectory = store.get(run.id)
        refusal = look.refusal(trajectory) if look is not None else None
        if refusal is None:
            admitted.append(trajectory)
        return refusal

    take: Look = load
    for looked in looked_at(store.facts(), Bench(profile=profile, template_hash=template_hash), take):
        refused.update(code.value for _, code in looked if code is not None)
    admitted.sort(key=lambda run: (run.started, run.id))
    if rescore is not None:
        admitted = rescore(admitted)
    return Admission(groups=tuple(_comparable(admitted, refused)), refused=refused)


def refusal(trajectory: Trajectory, profile: InterfaceProfile, template_hash: str) -> str | None:
    """Why a run may not train a policy gradient under this profile and template, or None if it may."""
    return refusal_of(facts_of(trajectory), Bench(profile=profile, template_hash=template_hash))


def undamaged(store: LogStore, refused: Counter[str]) -> Iterator[Trajectory]:
    """Every run whose columns are whole, oldest first; the others are counted by their damage."""
    whole = []
    for run in store.facts():
        damage = next((code for code in blocking(run) if code.damage), None)
        if damage is None:
            whole.append((run.started, run.id))
        else:
            refused[damage.value] += 1
    for _, run_id in sorted(whole):
        yield store.get(run_id)


def _comparable(trajectories: Iterable[Trajectory], refused: Counter[str]) -> Iterable[Group]:
    for group in form_groups(trajectories):
        scored = [reward for reward in group.rewards_G if reward == reward]
        code = uncomparable(scored)
        if code is not None:
            refused[code.value] += len(group.trajectories)
        else:
            yield group


def report(admission: Admission) -> str:
    """What the log can teach, in lines for a person."""
    lines = [f"admitted: {admission.runs} runs in {len(admission.groups)} groups"]
    lines += [f"refused: {count} runs ({reason})" for reason, count in admission.refused.most_common()]
    return "\n".join(lines)


def reader_of(opened: OpenedWeights) -> Reader:
    """How a model's tokens are read and written."""
    template = local_policy(opened.loaded, opened.profile).template
    return Reader(profile=opened.profile, template=template, eos_id=opened.loaded.tokenizer.eos_token_id)


def imitation_term(
    config: TrainConfig,
    tasks: Sequence[Task],
    runtime: Runtime,
    opened: OpenedWeights,
    rest: Sequence[Trajectory] = (),
) -> ImitationTerm | None:
    """What `lambda_sft` adds to the loss; None where it is 0. Raises as `open_demonstrations` does."""
    if config.lambda_sft == 0:
        return None
    shown = open_demonstrations(config, tasks, runtime, opened, rest)
    return ImitationTerm(weight=config.lambda_sft, max_tokens=config.max_tokens, demonstrations=shown)


def open_demonstrations(
    config: TrainConfig,
    tasks: Sequence[Task],
    runtime: Runtime,
    opened: OpenedWeights,
    rest: Sequence[Trajectory] = (),
) -> Demonstrations | None:
    """What `lambda_sft` imitates besides the step's own successes; None where it imitates those, or nothing.

    `rest` are the runs that `imitate` = rest chooses the successes of. Raises UsageError for a task without
    an oracle that works, and where the log holds no success.
    """
    if config.lambda_sft == 0 or config.imitate == "own":
        return None
    if config.imitate == "oracles":
        runs = oracle_runs(tasks, replace(runtime, policy_name=ORACLE))
    elif config.imitate == "rest":
        reader = reader_of(opened)
        runs = [run for run in rest if succeeded(run) and reader.speaks(run)]
    else:
        runs, refused = logged_successes(runtime.store, reader_of(opened), keys={task.key for task in tasks})
        if not runs:
            raise UsageError(
                f"imitate = log: the log holds no success on these tasks that could be imitated{why(refused)}"
            )
    reader = reader_of(opened)
    rows = tuple(row for run in runs for row in reader.rows(run, runtime.store.blobs))
    return Demonstrations(rows=rows, batch=config.prompts_per_step, seed=config.seed)


def logged_successes(
    store: LogStore, reader: Reader, *, keys: Collection[str] | None = None
) -> tuple[list[Trajectory], Counter[str]]:
    """The runs that passed what graded them and may be imitated, oldest first, and why others may not.

    Runs of the test split are never imitated. `keys` keeps the runs of some tasks.
    """
    kept, refused = [], Counter[str]()
    for run in undamaged(store, refused):
        if keys is not None and run.task.key not in keys:
            continue
        if run.task.split is Split.TEST:
            refused["of the test split"] += 1
        elif not succeeded(run):
            refused["no success"] += 1
        elif not reader.speaks(run):
            refused[f"profile {run.profile}, not {reader.profile.name}"] += 1
        elif not reader.reads(run) and not opens(run, store.blobs):
            refused[NO_DIRECTORY] += 1
        else:
            kept.append(run)
    return kept, refused


def why(refused: Counter[str]) -> str:
    """The counts of a refusal as the end of a sentence."""
    listed = ", ".join(f"{count} {reason}" for reason, count in refused.most_common())
    return f" ({listed})" if listed else ""
