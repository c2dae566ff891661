"""Imitation of oracle runs and of successes in the log: SFT, and a term beside the policy loss."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor, nn

from nano_coder.agent.profiles import serving_profile
from nano_coder.models.opening import OpenedWeights, local_policy
from nano_coder.run.execution import Runtime, as_served
from nano_coder.verify.trainable import blocking
from nano_rl.config.training import SftConfig, TrainConfig
from nano_rl.gather.rollouts import OnRun, execute
from nano_rl.imitation.rows import NO_DIRECTORY, RunEncoder, all_that_fit, opens, own_successes, succeeded
from nano_rl.learn.loss import sft_loss
from nano_rl.learn.model.learner import Learner
from nano_rl.learn.model.logprob import can_share, token_logprobs
from nano_rl.learn.offline import OnStep, step_indices, train_rows, usual_guards
from nano_rl.learn.rows.batch import Batch, enough_tokens, make_batches
from nano_rl.learn.rows.group import Group
from nano_rl.learn.rows.sample import TrainSample
from nano_rl.tasks.attempts import ORACLE, oracle_policy
from nano_shared.errors import UsageError
from nano_shared.store import LogStore
from nano_shared.types import Split, StopReason, Task, Trajectory


def oracle_runs(tasks: Sequence[Task], runtime: Runtime, on_run: OnRun | None = None) -> list[Trajectory]:
    """One successful oracle run per task, earlier tasks of its project before it, in task order: from the
    log, or executed now.

    Raises UsageError for a task whose oracle does not earn a reward of 1.
    """
    runs = _oracles(tasks, runtime, on_run)
    for run in runs:
        if run.reward != 1:
            raise UsageError(_unsolved(run))
    return runs


def solved_oracles(tasks: Sequence[Task], runtime: Runtime) -> list[Trajectory]:
    """The successful oracle runs of tasks, in task order: from the log, or executed now."""
    return [run for run in _oracles(tasks, runtime) if run.reward == 1]


def _oracles(tasks: Sequence[Task], runtime: Runtime, on_run: OnRun | None = None) -> list[Trajectory]:
    runtime = replace(runtime, policy_name=ORACLE, settings=replace(runtime.settings, agent=None))
    tasks = [as_served(task, runtime) for task in tasks]
    wanted = [one for task in tasks for one in (*task.earlier, task)]
    found = {run.task.id: run for run in logged_oracles(wanted, runtime)}
    missing = [task for task in tasks if any(one.id not in found for one in (*task.earlier, task))]
    if missing:
        policies = [oracle_policy(task, runtime.profile) for task in missing]
        found |= {run.task.id: run for run in execute(missing, policies, runtime, on_run=on_run)}
    return [found[one.id] for one in wanted]


def _unsolved(run: Trajectory) -> str:
    why, way_out = "does not solve it", "leave it out"
    if run.stop is not None and run.stop.budget:
        why, way_out = f"was ended by {run.stop}", "raise the task's limit or leave it out"
    if run.stop is StopReason.MAX_TOKENS:
        why += ", where a byte of text counts as a token"
    return f"the oracle of task {run.task.key!r} {why} (run {run.id}); {way_out}"


def logged_oracles(tasks: Sequence[Task], runtime: Runtime) -> list[Trajectory]:
    """The successful oracle runs of these tasks that are in the log."""
    wanted = {task.id for task in tasks}
    return [
        run
        for run in runtime.store.trajectories(policy=ORACLE)
        if run.task.id in wanted
        and run.reward == 1
        and run.profile_hash == serving_profile(runtime.profile, run.task).hash
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstrations:
    """Rows that a training imitates in addition to its rollouts, some in each step."""

    rows: tuple[TrainSample, ...]
    batch: int
    """number of rows of one step"""
    seed: int

    def draw(self, step: int) -> list[TrainSample]:
        """The rows of a step: every row once before any is repeated."""
        size = len(self.rows)
        if size == 0:
            return []
        chosen = step_indices(step, size=size, batch=min(self.batch, size), seed=self.seed)
        return [self.rows[i] for i in chosen]

    @property
    def run_ids(self) -> list[str]:
        return sorted({row.run_id for row in self.rows})


@dataclass(frozen=True, slots=True, kw_only=True)
class ImitationTerm:
    """`LossTerm`: the negative log-likelihood of the demonstrations of a step, a mean over trained tokens."""

    weight: float
    max_tokens: int
    """tokens of one micro-batch"""
    demonstrations: Demonstrations | None = None
    """None: imitate the step's own successes"""
    name: str = "sft"

    def draw(self, step: int, groups: Sequence[Group]) -> Sequence[TrainSample]:
        return self.demonstrations.draw(step) if self.demonstrations else own_successes(groups)

    def part(self, drawn: Sequence[TrainSample], index: int, count: int, *, trees: bool) -> ImitationPart:
        # consecutive rows share prompts
        rows = drawn[len(drawn) * index // count : len(drawn) * (index + 1) // count]
        return ImitationPart(batches=make_batches(rows, max_tokens=self.max_tokens, trees=trees))

    @property
    def run_ids(self) -> list[str]:
        return self.demonstrations.run_ids if self.demonstrations else []


@dataclass(frozen=True, slots=True, kw_only=True)
class ImitationPart:
    """`TermPart`: the demonstrations of one minibatch."""

    batches: list[Batch]

    @staticmethod
    def loss(model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        return imitation_loss(model, batch)

    def metrics(self) -> dict[str, float]:
        """`sft_tokens`"""
        return {"sft_tokens": float(sum(int(batch.mask_BT.sum()) for batch in self.batches))}


def imitation_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, float]]:
    """The batch's share of the negative log-likelihood of the trained tokens, and its metrics."""
    return sft_loss(token_logprobs(model, batch), batch)


def train_sft(
    model: nn.Module, samples: Sequence[TrainSample], config: SftConfig, folder: Path, on_step: OnStep
) -> int:
    """Supervised fine-tuning in place, continuing from a state in `folder`. Returns the total of steps done.

    A step has `config.batch` rows; gradients are accumulated over its micro-batches, and each trained token
    has the same weight. Raises UsageError without rows.
    """
    if not samples:
        raise UsageError("there is nothing to imitate: no row is left; name other tasks, runs or messages")

    def do_step(learner: Learner, indices: Sequence[int]) -> dict[str, float]:
        chosen = [samples[i] for i in indices]
        enough = enough_tokens(next(model.parameters()).device, config.max_tokens)
        batches = make_batches(chosen, max_tokens=config.max_tokens, trees=can_share(model), enough=enough)
        values = learner.update(batches, imitation_loss, usual_guards)
        return {**values, "seen": float(sum(len(sample.ids) for sample in chosen))}

    rows = [(sample,) for sample in samples]
    return train_rows(model, rows, config, folder, on_step, do_step, stop_after=config.stop_after)


def undamaged(store: LogStore, refused: Counter[str]) -> Iterator[Trajectory]:
    """The runs without damage in their columns, oldest first; damaged ones are counted in `refused`."""
    whole = []
    for run in store.facts():
        damage = next((code for code in blocking(run) if code.damage), None)
        if damage is None:
            whole.append((run.started, run.id))
        else:
            refused[damage.value] += 1
    for _, run_id in sorted(whole):
        yield store.get(run_id)


def reader_of(opened: OpenedWeights) -> RunEncoder:
    """The reader for the tokens of a model."""
    template = local_policy(opened.loaded, opened.profile).template
    loaded = opened.loaded
    return RunEncoder(
        profile=opened.profile, template=template, context_limit=loaded.context_limit,
        vocabulary=loaded.vocabulary,
        eos_id=loaded.end_id(opened.profile.chat_template or loaded.chat_template),
    )  # fmt: skip


def imitation_term(
    config: TrainConfig,
    tasks: Sequence[Task],
    runtime: Runtime,
    opened: OpenedWeights,
    rest: Sequence[Trajectory] = (),
) -> ImitationTerm | None:
    """The loss term of `lambda_sft`; None if it is 0.

    `rest` are the runs from which `imitate` = rest takes the successes. Raises UsageError for a task without
    a working oracle, and if the log has no success.
    """
    if config.lambda_sft == 0:
        return None
    term = ImitationTerm(weight=config.lambda_sft, max_tokens=config.max_tokens)
    if config.imitate == "own":
        return term
    reader = reader_of(opened)
    if config.imitate == "oracles":
        runs = oracle_runs(tasks, runtime)
    elif config.imitate == "rest":
        runs = [run for run in rest if succeeded(run) and reader.speaks(run)]
    else:
        runs, refused = logged_successes(runtime.store, reader, keys={task.key for task in tasks})
        if not runs:
            raise UsageError(
                f"imitate = log: the log holds no success on these tasks that could be imitated{why(refused)}"
            )
    rows = all_that_fit(runs, lambda run: reader.rows(run, runtime.store.blobs))
    shown = tuple(row for rows_of_run in rows for row in rows_of_run)
    return replace(
        term, demonstrations=Demonstrations(rows=shown, batch=config.prompts_per_step, seed=config.seed)
    )


def logged_successes(
    store: LogStore, reader: RunEncoder, *, keys: Collection[str] | None = None
) -> tuple[list[Trajectory], Counter[str]]:
    """(successful runs that may be imitated, oldest first; reason -> number of others).

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
    """The counts of refused runs, as the end of a sentence."""
    listed = ", ".join(f"{count} {reason}" for reason, count in refused.most_common())
    return f" ({listed})" if listed else ""
