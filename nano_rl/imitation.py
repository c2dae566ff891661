"""Samples for imitation: from the logged tokens of a run if they are this policy's, else from its texts."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from nano_coder.agent.chat_template import ChatTemplate
from nano_coder.agent.loop import in_dialect
from nano_coder.agent.profiles import first_started, open_conversation, rendered, serving_profile, shown_files
from nano_coder.models.opening import OpenedWeights, local_policy
from nano_coder.run.execution import Runtime, as_served
from nano_coder.run.tries import OnRun
from nano_coder.verify.trainable import RefusalCode, imitation_refusal, interface_refusal, may_teach
from nano_rl.config import SftConfig, TrainConfig
from nano_rl.gather.rollouts import ORACLE, execute, oracle_policy
from nano_rl.learn.groups import Group, TrainSample, to_samples
from nano_rl.tasks.task_file import read_models
from nano_shared.errors import PolicyError, UsageError
from nano_shared.policy import Conversation, InterfaceProfile
from nano_shared.run_facts import facts_of
from nano_shared.snapshot import BlobStore
from nano_shared.store import LogStore
from nano_shared.types import (
    MARKER,
    Completion,
    Finish,
    Message,
    Role,
    Sampling,
    StopReason,
    Task,
    Trajectory,
    Turn,
    TurnTokens,
    outcome,
)

# torch is imported where rows are trained: the log is read and admitted without it
if TYPE_CHECKING:
    from torch import Tensor, nn

    from nano_rl.learn.batch import Batch
    from nano_rl.learn.learner import Learner
    from nano_rl.train_fixed_rows import OnStep


class LongRow(UsageError):
    """A row is longer than the context of the model."""


Item = TypeVar("Item")
Encoded = TypeVar("Encoded")


def all_that_fit(items: Iterable[Item], encode: Callable[[Item], Encoded]) -> list[Encoded]:
    """What `encode` makes of each item; items with a row longer than the model's context are left out, and
    said on stderr."""
    kept: list[Encoded] = []
    long: list[LongRow] = []
    for item in items:
        try:
            kept.append(encode(item))
        except LongRow as problem:
            long.append(problem)
    if long:
        print(f"left out: {len(long)} longer than the model's context; the first: {long[0]}", file=sys.stderr)
    return kept


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEncoder:
    """Encodes runs and texts for one policy: its profile, chat template and end-of-turn token."""

    profile: InterfaceProfile
    template: ChatTemplate
    eos_id: int
    context_limit: int | None = None
    """largest number of tokens of a row; None: not checked"""
    vocabulary: int | None = None
    """number of tokens that the model embeds; None: not checked"""

    def reads(self, run: Trajectory) -> bool:
        """True if the logged tokens of a run have this policy's template, profile and vocabulary."""
        return (
            run.has_tokens
            and not run.is_redacted
            and run.template_hash == self.template.template_hash
            and self.speaks(run)
            and self._shows(run)
            and all(self._spells(turn.completion) for turn in run.turns)
        )

    def speaks(self, run: Trajectory) -> bool:
        """True if the policy may imitate the texts of the run (`interface_refusal`)."""
        return interface_refusal(facts_of(run), self.profile) is None

    def rows(self, run: Trajectory, blobs: BlobStore | None = None) -> list[TrainSample]:
        """The samples of a run, from its logged tokens or its encoded texts; refused turns are not trained.
        `blobs` are the log's, for the directories in which runs began (`run_messages`)."""
        if self.reads(run):
            return self.fitting(run.id, imitated_samples(run))
        rows = imitation_samples(run, self.profile, self.template, self.eos_id, blobs)
        return self.fitting(run.id, rows)

    def last_row(self, run: Trajectory, blobs: BlobStore | None = None) -> tuple[int, ...]:
        """The token ids of the last row of a run, with refused turns, for a reward model."""
        if self.reads(run):
            return to_samples(run, 1.0, imitation=True)[-1].ids
        shown = row_conversations(run, self.profile, blobs)[-1][0]
        trained = [m.role is Role.ASSISTANT for m in shown.messages]
        return conversation_samples(run.id, shown, trained, self.template, self.eos_id)[-1].ids

    def messages(self, name: str, messages: Sequence[Message], trained: Sequence[bool]) -> list[TrainSample]:
        shown = Conversation(tuple(messages))
        return self.fitting(name, conversation_samples(name, shown, trained, self.template, self.eos_id))

    def fitting(self, name: str, rows: list[TrainSample]) -> list[TrainSample]:
        """The rows of `name`. Raises LongRow if one is longer than the context, UsageError if one holds a
        token that the model does not embed."""
        longest = max((len(row.ids) for row in rows), default=0)
        if self.context_limit is not None and longest > self.context_limit:
            raise LongRow(f"{name} has {longest} tokens, of the {self.context_limit} that the model reads")
        highest = max((max(row.ids) for row in rows), default=0)
        if self.vocabulary is not None and highest >= self.vocabulary:
            token = self.template.encoder.decode([highest])
            raise UsageError(
                f"{name} holds {token!r}, token {highest} of the tokenizer, and the model embeds the first"
                f" {self.vocabulary}: use the tokenizer that belongs to it, or resize its embeddings"
            )
        return rows

    def _shows(self, run: Trajectory) -> bool:
        """True if the first prompt, decoded by this vocabulary, contains the task's prompt."""
        tokens = run.turns[0].completion.tokens
        return tokens is not None and run.task.prompt in self.template.encoder.decode(tokens.context_ids)

    def _spells(self, completion: Completion) -> bool:
        assert completion.tokens is not None
        return self.template.encoder.decode(completion.tokens.sampled_ids).startswith(completion.text)


def imitation_samples(
    trajectory: Trajectory, profile: InterfaceProfile, template: ChatTemplate, eos_id: int,
    blobs: BlobStore | None = None,
) -> list[TrainSample]:  # fmt: skip
    """Samples from the texts of a run, rendered turn by turn by the serving template: the mask is 1 on
    completions and their end-of-turn tokens. Refused turns, redacted completions and the turns before a fork
    are context."""
    samples, own = [], {turn.index for turn in trajectory.own_turns}
    trajectory = in_dialect(trajectory, profile)
    for shown, turns in row_conversations(trajectory, profile, blobs):
        said = iter(turns)
        sampled = [next(said) if m.role is Role.ASSISTANT else None for m in shown.messages]
        trained = [turn is not None and turn.index in own and _teaches(turn) for turn in sampled]
        if any(trained) or not (trajectory.has_summary or trajectory.turns[-1].messages):
            samples += conversation_samples(trajectory.id, shown, trained, template, eos_id)
    return samples


def run_messages(
    trajectory: Trajectory, profile: InterfaceProfile, blobs: BlobStore | None = None
) -> list[Message]:
    return list(run_conversation(trajectory, profile, blobs).messages)


def run_conversation(
    trajectory: Trajectory, profile: InterfaceProfile, blobs: BlobStore | None = None
) -> Conversation:
    """The conversation of a run as its policy saw it under the profile that serves its task, without tokens.

    The task message lists the files of the directory in which the run began if `blobs` has it. A history that
    was summarised is shown whole, and one that a client wrote anew as it was last. Raises LogError if that
    directory belongs to the task and is damaged or missing.
    """
    trajectory = in_dialect(trajectory, profile)
    shown = _opened(trajectory, profile, blobs)
    sent = not any(turn.is_aside for turn in trajectory.turns)  # by a client
    for turn in trajectory.turns:
        if trajectory.restates(turn):
            shown = Conversation(started=shown.started)
        for message in turn.messages if sent else ():
            shown.append(message)
        if not turn.is_aside:
            _append(shown, turn)
    return shown


def row_conversations(
    trajectory: Trajectory, profile: InterfaceProfile, blobs: BlobStore | None = None
) -> list[tuple[Conversation, list[Turn | None]]]:
    """The conversation of each row, with the turns of its assistant messages, None for those of the row
    before; without sub-agents' turns. One row if nothing was summarised or the profile summarises nothing."""
    form = serving_profile(profile, trajectory.task).compaction
    trajectory = in_dialect(trajectory, profile)
    if any(map(trajectory.restates, trajectory.turns)):
        return _client_rows(trajectory)
    if form is None or not trajectory.has_summary:
        turns: list[Turn | None] = [turn for turn in trajectory.turns if not turn.is_aside]
        return [(run_conversation(trajectory, profile, blobs), turns)]
    rows: list[tuple[Conversation, list[Turn | None]]] = []
    main = [turn for turn in trajectory.turns if turn.delegated_by is None]
    for number, turn in enumerate(main):
        before = main[number - 1] if number else None
        if before is None or before.is_summary:
            summary = rendered(form.summary, summary=before.thought.strip()) if before else ""
            kept = sum(m.role is Role.ASSISTANT for m in turn.messages) if before else 0
            shown = _opened(trajectory, profile, blobs, summary)
            for earlier in main[number - 1 - kept : number - 1] if kept else ():
                _append(shown, earlier)
            rows.append((shown, [None] * kept))
        if turn.is_summary:
            rows[-1][0].append(Message(role=Role.USER, content=form.request))
        _append(rows[-1][0], turn)
        rows[-1][1].append(turn)
    return rows


def _client_rows(trajectory: Trajectory) -> list[tuple[Conversation, list[Turn | None]]]:
    """`row_conversations` of a run whose client wrote its history anew."""
    rows: list[tuple[Conversation, list[Turn | None]]] = []
    for turn in trajectory.turns:
        if turn.index == 0 or trajectory.restates(turn):
            rows.append((Conversation(started=first_started(trajectory)), []))
        shown, turns = rows[-1]
        for message in turn.messages:
            shown.append(message)
            turns += [None] * (message.role is Role.ASSISTANT)
        _append(shown, turn)
        turns.append(turn)
    return rows


def _opened(
    trajectory: Trajectory, profile: InterfaceProfile, blobs: BlobStore | None, summary: str = ""
) -> Conversation:
    """The conversation before the first turn, with a summary behind the task; empty if a client sent it."""
    task, started = trajectory.task, first_started(trajectory)
    if trajectory.turns and trajectory.turns[0].messages:
        return Conversation(started=started)
    files = shown_files(trajectory, blobs) if blobs else sorted(task.files)
    shown = open_conversation(serving_profile(profile, task), task, files, started)
    *first, asked = shown.messages
    asked = asked.model_copy(update={"content": asked.content + summary})
    return Conversation((*first, asked), tools=shown.tools, started=started)


def _append(shown: Conversation, turn: Turn) -> None:
    shown.append(Message(role=Role.ASSISTANT, content=turn.completion.text))
    for observation in turn.observations:
        shown.append(Message(role=Role.TOOL, content=observation.text))


def opens(run: Trajectory, blobs: BlobStore) -> bool:
    """True if `run_messages` can reproduce the first message of the run."""
    return run.task.snapshot is None or run.task.snapshot in blobs


def conversation_samples(
    name: str, shown: Conversation, trained: Sequence[bool], template: ChatTemplate, eos_id: int
) -> list[TrainSample]:
    """Encode a text conversation, one sample for each row: the mask is 1 on the trained assistant messages
    and their end-of-turn tokens. Messages after the last trained one are left out."""
    if any(t and m.role is not Role.ASSISTANT for m, t in zip(shown.messages, trained, strict=True)):
        raise ValueError(f"{name}: only assistant messages can be trained")
    if not any(trained):
        raise ValueError(f"{name}: no assistant message is left to train on")
    last = max(i for i, train in enumerate(trained) if train)
    conversation = Conversation(tools=shown.tools, started=shown.started)
    rows: list[tuple[list[int], list[int]]] = []
    for message, train in zip(shown.messages[: last + 1], trained, strict=False):
        if message.role is not Role.ASSISTANT:
            conversation.append(message)
            continue
        row, context = template.next_row(conversation)
        if row == len(rows):
            rows.append(([], []))
        before = conversation.tokens if row == conversation.row else []
        written = template.written((*before, *context), message.content, eos_id)
        conversation.record(_completion(message.content, row, context, written))
        ids, mask = rows[-1]
        ids += (*context, *written)
        mask += [0] * len(context) + [int(train)] * len(written)
    return [imitated_sample(name, ids, mask) for ids, mask in rows if any(mask)]


def imitated_sample(name: str, ids: Sequence[int], mask: Sequence[int]) -> TrainSample:
    """A sample without a behaviour policy, with an advantage of 1 on each token of the mask."""
    zeros = (0,) * len(mask)
    return TrainSample(
        run_id=name, ids=tuple(ids), mask=tuple(mask), logprobs=tuple(map(float, zeros)),
        versions=zeros, advantage=1.0, temperature=1.0,
    )  # fmt: skip


def _completion(text: str, row: int, context: tuple[int, ...], written: tuple[int, ...]) -> Completion:
    tokens = TurnTokens(row=row, context_ids=context, sampled_ids=written, logprobs=(0.0,) * len(written))
    return Completion(text=text, finish=Finish.STOP, tokens=tokens, sampling=Sampling(), policy_id="text")


def succeeded(run: Trajectory) -> bool:
    """True if a rollout may be imitated by its own policy: it ended without a failure of ours, has a turn
    that was neither redacted nor refused, and has outcome 1 on a task that is no impossible control. Logged
    runs are judged by `imitation_refusal`."""
    ended = run.stop is not None and not run.stop.ours and not run.task.is_control
    earned = outcome(run.verdict) == 1.0 and may_teach(run.verdict)
    return ended and any(map(_teaches, run.own_turns)) and earned


def _teaches(turn: Turn) -> bool:
    return not turn.refused and not MARKER.search(turn.completion.text)


def imitated_samples(run: Trajectory) -> list[TrainSample]:
    return to_samples(run, 1.0, imitation=True, context_turns=[t.index for t in run.turns if t.refused])


def own_successes(groups: Iterable[Group]) -> list[TrainSample]:
    runs = [run for group in groups for run in group.trajectories if succeeded(run)]
    return [row for run in runs for row in imitated_samples(run)]


class ChatMessage(BaseModel):
    """A message of a chat file; tool calls are part of its text."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    role: Role
    content: str
    weight: Literal[0, 1] | None = None
    """of an assistant message: 1 (default) trains it, 0 keeps it as context"""

    @field_validator("content", mode="before")
    @classmethod
    def _text(cls, content: Any) -> Any:
        if content is None:
            raise ValueError("is null; write tool calls into the text, as the model's template does")
        if isinstance(content, list) and all(isinstance(part, dict) for part in content):  # OpenAI's parts
            texts = [part.get("text") for part in content if part.get("type") == "text"]
            if len(texts) == len(content) and all(isinstance(text, str) for text in texts):
                return "".join(texts)
        return content

    @model_validator(mode="after")
    def _of_the_assistant(self) -> ChatMessage:
        if self.weight is not None and self.role is not Role.ASSISTANT:
            raise ValueError("only assistant messages have a weight")
        return self

    @property
    def trained(self) -> bool:
        return self.role is Role.ASSISTANT and self.weight != 0


class Chat(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    messages: tuple[ChatMessage, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _teaches(self) -> Chat:
        if not any(message.trained for message in self.messages):
            raise ValueError("no assistant message is left to train on")
        return self


def read_messages(path: Path, reader: RunEncoder) -> list[TrainSample]:
    """The conversations of a file as samples. Raises UsageError with line and field of the first bad row, and
    for a file without any."""

    def encode(row: tuple[str, Chat]) -> list[TrainSample]:
        where, chat = row
        messages = [Message(role=m.role, content=m.content) for m in chat.messages]
        try:
            return reader.messages(where, messages, [m.trained for m in chat.messages])
        except PolicyError as problem:
            raise UsageError(f"{where}: {problem}") from None

    chats = list(read_models(path, Chat))
    if not chats:
        raise UsageError(f'{path} holds no conversation; each line is {{"messages": [...]}}')
    return [sample for samples in all_that_fit(chats, encode) for sample in samples]


def oracle_runs(tasks: Sequence[Task], runtime: Runtime, on_run: OnRun | None = None) -> list[Trajectory]:
    """One successful oracle run per task, behind those of earlier tasks of its project: from the log, or
    executed now. Raises UsageError for a task whose oracle does not earn a reward of 1."""
    runs = _oracles(tasks, runtime, on_run)
    if (run := next((run for run in runs if run.reward != 1), None)) is None:
        return runs
    why, way_out = "does not solve it", "leave it out"
    if run.stop is not None and run.stop.budget:
        why, way_out = f"was ended by {run.stop}", "raise the task's limit or leave it out"
    if run.stop is StopReason.MAX_TOKENS:
        why += ", where a byte of text counts as a token"
    raise UsageError(f"the oracle of task {run.task.key!r} {why} (run {run.id}); {way_out}")


def solved_oracles(tasks: Sequence[Task], runtime: Runtime) -> list[Trajectory]:
    """The successful oracle runs of tasks, in task order: from the log, or executed now."""
    return [run for run in _oracles(tasks, runtime) if run.reward == 1]


def _oracles(tasks: Sequence[Task], runtime: Runtime, on_run: OnRun | None = None) -> list[Trajectory]:
    runtime = replace(runtime, policy_name=ORACLE, settings=replace(runtime.settings, agent=None))
    tasks = [as_served(task, runtime) for task in tasks]
    wanted = [one for task in tasks for one in (*task.earlier, task)]
    ids = {task.id for task in wanted}
    found = {
        run.task.id: run
        for run in runtime.store.trajectories(policy=ORACLE)
        if run.task.id in ids
        and run.reward == 1
        and run.profile_hash == serving_profile(runtime.profile, run.task).hash
    }
    missing = [task for task in tasks if any(one.id not in found for one in (*task.earlier, task))]
    if missing:
        policies = [oracle_policy(task, runtime.profile) for task in missing]
        found |= {run.task.id: run for run in execute(missing, policies, runtime, on_run=on_run)}
    return [found[one.id] for one in wanted]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImitationTerm:
    """`LossTerm`: the negative log-likelihood of some rows in each step, a mean over trained tokens."""

    weight: float
    max_tokens: int
    rows: tuple[TrainSample, ...] | None = None
    """demonstrations, every one drawn once before any is repeated; None: the step's own successes"""
    batch: int = 1
    """demonstrations of a step"""
    seed: int = 0
    name: str = "sft"

    def draw(self, step: int, groups: Sequence[Group]) -> Sequence[TrainSample]:
        if self.rows is None:
            return own_successes(groups)
        from nano_rl.train_fixed_rows import step_indices

        size = len(self.rows)
        chosen = step_indices(step, size=size, batch=min(self.batch, size), seed=self.seed)
        return [self.rows[i] for i in chosen]

    def part(self, drawn: Sequence[TrainSample], index: int, count: int, *, trees: bool) -> ImitationPart:
        from nano_rl.learn.batch import make_batches

        # consecutive rows share prompts
        rows = drawn[len(drawn) * index // count : len(drawn) * (index + 1) // count]
        return ImitationPart(batches=make_batches(rows, max_tokens=self.max_tokens, trees=trees))

    @property
    def run_ids(self) -> list[str]:
        return sorted({row.run_id for row in self.rows or ()})


def imitation_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, float]]:
    from nano_rl.learn.logprob import token_logprobs
    from nano_rl.learn.loss import sft_loss

    return sft_loss(token_logprobs(model, batch), batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImitationPart:
    batches: list[Batch]

    loss = staticmethod(imitation_loss)

    def metrics(self) -> dict[str, float]:
        return {"sft_tokens": float(sum(int(batch.mask_BT.sum()) for batch in self.batches))}


def train_sft(
    model: nn.Module, samples: Sequence[TrainSample], config: SftConfig, folder: Path, on_step: OnStep, *,
    until: float | None = None,
) -> int:  # fmt: skip
    """Supervised fine-tuning in place, continuing from a state in `folder`; each trained token of a step has
    the same weight. `until` is that of `train_rows`. Returns the total of steps done. Raises UsageError
    without rows."""
    from nano_rl.learn.batch import enough_tokens, make_batches
    from nano_rl.learn.logprob import can_share
    from nano_rl.train_fixed_rows import train_rows, usual_guards

    if not samples:
        raise UsageError("there is nothing to imitate: no row is left; name other tasks, runs or messages")

    def do_step(learner: Learner, indices: Sequence[int]) -> dict[str, float]:
        chosen = [samples[i] for i in indices]
        enough = enough_tokens(next(model.parameters()).device, config.max_tokens)
        batches = make_batches(chosen, max_tokens=config.max_tokens, trees=can_share(model), enough=enough)
        values = learner.update(batches, imitation_loss, usual_guards)
        return {**values, "seen": float(sum(len(sample.ids) for sample in chosen))}

    rows = [(sample,) for sample in samples]
    return train_rows(model, rows, config, folder, on_step, do_step, until=until)


def reader_of(opened: OpenedWeights) -> RunEncoder:
    template = local_policy(opened.loaded, opened.profile).template
    loaded = opened.loaded
    return RunEncoder(
        profile=opened.profile, template=template, context_limit=loaded.context_limit,
        vocabulary=loaded.vocabulary,
        eos_id=loaded.end_id(opened.profile.chat_template or loaded.chat_template),
    )  # fmt: skip


def imitation_term(
    config: TrainConfig, tasks: Sequence[Task], runtime: Runtime, opened: OpenedWeights,
    rest: Sequence[Trajectory] = (),
) -> ImitationTerm | None:  # fmt: skip
    """The loss term of `lambda_sft`; None if it is 0. `rest` are the runs of `imitate` = rest. Raises
    UsageError for a task without a working oracle, and if the log has no success."""
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
    return replace(term, rows=shown, batch=config.prompts_per_step, seed=config.seed)


def logged_successes(
    store: LogStore, reader: RunEncoder, *, keys: Collection[str] | None = None
) -> tuple[list[Trajectory], Counter[str]]:
    """(successful runs that may be imitated, oldest first, none of the test split; reason -> number of
    others). `keys` keeps the runs of some tasks."""
    may, refused = list[tuple[float, str]](), Counter[str]()
    for facts in store.facts():
        if keys is not None and facts.task.key not in keys:
            continue
        if (found := imitation_refusal(facts, reader.profile, store.blobs)) is not None:
            refused[found.kind] += 1
        else:
            may.append((facts.started, facts.id))
    kept = []
    for _, run_id in sorted(may):
        run = store.get(run_id)
        if reader.reads(run) or opens(run, store.blobs):
            kept.append(run)
        else:
            refused[RefusalCode.NO_DIRECTORY.value] += 1
    return kept, refused


def why(refused: Counter[str]) -> str:
    listed = ", ".join(f"{count} {reason}" for reason, count in refused.most_common())
    return f" ({listed})" if listed else ""
