"""The agent loop: complete -> parse -> execute -> observe -> record, until there is a reason to stop."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from nano_coder.agent.compaction import Compaction
from nano_coder.agent.dialects.api import FILTERED, Api
from nano_coder.agent.dialects.dialect import DIALECTS, Parsed
from nano_coder.agent.observation import limits_met, shorten
from nano_coder.agent.prompt import DELEGATE
from nano_coder.agent.sub_agent import answered, child_result, delegating, sub_agent
from nano_coder.agent.workspace import Workspace
from nano_coder.tools.registry import TOOLS, RecordedAnswers
from nano_coder.tools.run_control import submit
from nano_coder.tools.tool import ToolContext, ToolFailure, ToolResult
from nano_shared.errors import ContextFull
from nano_shared.hashing import content_hash
from nano_shared.policy import Conversation, Policy
from nano_shared.profile import InterfaceProfile
from nano_shared.snapshot import SnapshotError
from nano_shared.types import (
    SUMMARY,
    Completion,
    Finish,
    Message,
    Observation,
    Role,
    Sampling,
    StopReason,
    Task,
    ToolCall,
    ToolSpec,
    Turn,
)

if TYPE_CHECKING:
    from nano_coder.environment import OpenSession

_MAX_FORMAT_ERRORS = 3
_MAX_REPEATS = 4
_LONGEST_ROUND = 4
"""turns of a round that is a loop when it is repeated, such as a wrong call, and prose about its error"""
_SHOWN = 5
"""paths that a note names"""
_MAX_REPETITIONS = 2
"""answers that repeat themselves: the model is told once"""
SAID = "user"
"""tool name of an observation that is a further message of the user; no policy can call it"""
_NO_NOTES = ("compact",)
"""dialects whose frozen observations do not mention limits"""


def turn_seed(seed: int | None, index: int) -> int | None:
    """The seed of one completion: a function of the run's seed and the turn, so that resuming repeats it."""
    if seed is None:
        return None
    return int(content_hash([seed, index]).removeprefix("sha256:")[:15], 16)


@dataclass(slots=True, kw_only=True)
class Agent:
    """One execution in memory. `step` takes one turn; `stop` is the reason to stop, or None."""

    task: Task
    policy: Policy
    profile: InterfaceProfile
    tools: tuple[ToolSpec, ...]
    workspace: Workspace
    context: ToolContext
    conversation: Conversation
    sampling: Sampling
    seed: int | None
    put_blob: Callable[[bytes], str]
    turns: list[Turn] = field(default_factory=list)
    stop: StopReason | None = None
    answer: str | None = None
    compaction: Compaction | None = None
    """None: the run ends where its context is full"""
    session: OpenSession | None = None
    """of the environment that the task is of; None for a task of ours"""
    record: RecordedAnswers | None = None
    """recorded answers of a logged run, used instead of calling recorded tools"""
    elapsed: float = 0.0
    """seconds used before this process, if the run was resumed"""
    began: float = field(default_factory=time.monotonic)
    parent: int | None = None
    """of a sub-agent: index of the turn that delegated to it"""
    most_turns: int | None = None
    """of a sub-agent: turns that it may take"""
    child: Agent | None = None
    """the sub-agent at work, or the one whose logged turns are being replayed"""
    log_observation: Callable[[int, Observation], None] | None = None
    """gets the answer of a sub-agent, with the index of the turn that delegated to it"""
    _liberties: list[str] = field(default_factory=list)
    """deviations from the given arguments that tools accepted in the current turn"""

    def step(self) -> Turn:
        """The next turn: the active sub-agent's, else a summary if the context is nearly full, else an
        action."""
        if (at := self._delegating()) is not None:
            return self._delegated(self._child_of(at))
        if self.compaction is None:
            return self._act()
        if self.compaction.due(self.conversation, self.own):
            return self._summarise(self.compaction)
        try:
            return self._act()
        except ContextFull:  # a server reads less than it says
            if not self.conversation.rendered:
                raise
            return self._summarise(self.compaction)

    def _act(self) -> Turn:
        started = time.time()
        anew = self.own[-1].is_summary if self.own else self.parent is not None
        begun = self.conversation.messages if anew else ()
        completion = self.complete()
        parsed = self.parse(completion)
        self._liberties.clear()
        observations = self._execute_all(parsed.calls)
        if parsed.error:
            observations = self._refuse(parsed, completion)
        if observations and completion.finish.is_cut and self.profile.dialect not in _NO_NOTES:
            observations[-1] = _with_cut_note(observations[-1], completion)
        turn = Turn(
            index=len(self.turns),
            messages=begun,
            completion=completion,
            thought=parsed.thought,
            calls=parsed.calls,
            parse_error=parsed.error,
            parser=self.profile.dialect,
            repairs=(*parsed.repairs, *self._liberties),
            observations=tuple(observations),
            snapshot=self.workspace.snapshot if parsed.calls and not self.workspace.lost else None,
            started=started,
            ended=time.time(),
            delegated_by=self.parent,
        )
        self.take(turn)
        return turn

    def _summarise(self, compaction: Compaction) -> Turn:
        """Let the policy summarise the row. Raises ContextFull if there is no room."""
        started = time.time()
        compaction.refuse_more(self.own)
        messages = compaction.asking(self.conversation, self.own)
        self.conversation.replace_new(messages)
        completion = self.complete(compaction.summary_tokens())
        turn = Turn(
            index=len(self.turns), messages=tuple(messages), completion=completion,
            thought=self.parse_calls(completion).thought, parser=SUMMARY, started=started, ended=time.time(),
            delegated_by=self.parent,
        )  # fmt: skip
        self.take(turn)
        return turn

    def complete(self, most: int | None = None) -> Completion:
        """The policy's next completion, of at most `most` sampled tokens (None: the limit of an answer)."""
        self.conversation.deadline = time.monotonic() + self.task.limits.max_seconds - self._used()
        completion = self.policy.complete(self.conversation, self._sampling(most))
        self.conversation.record(completion)
        return completion

    def parse(self, completion: Completion) -> Parsed:
        """The calls of a completion. Prose that follows a turn of prose is the answer: no call, no error. So
        is what ends the last turn of an environment without a call, and all text where no tool is offered."""
        if not self.tools:
            return Parsed(thought=completion.text)
        parsed = self.parse_calls(completion)
        if not parsed.calls and completion.finish is Finish.STOP and self._ends_environment():
            return Parsed(thought=completion.text)
        if parsed.prose and completion.finish is Finish.STOP and self._asked():
            return Parsed(thought=parsed.thought)
        return parsed

    def _ends_environment(self) -> bool:
        """True in an environment at the last turn that its limits allow."""
        return self.session is not None and len(self.turns) + 1 >= self.task.limits.max_turns

    def _asked(self) -> bool:
        """True if the last turn was prose, after which the policy was asked for a call."""
        last = self.own[-1] if self.own else None
        return last is not None and last.parse_error is not None and self.parse_calls(last.completion).prose

    def parse_calls(self, completion: Completion) -> Parsed:
        if completion.api is not None and completion.api.filtered:
            return Parsed(thought=completion.text, error=FILTERED)
        dialect = DIALECTS.find(self.profile.dialect)
        if completion.api is not None and isinstance(dialect, Api):
            return dialect.parse_api(completion.text, completion.api, self.tools)
        return dialect.parse(completion.text, self.tools)

    def restore(self, turn: Turn) -> None:
        """Bring the conversation to the completion of a logged turn."""
        if turn.messages:
            self.conversation.replace_new(turn.messages)
        self.conversation.record(turn.completion)

    def inherit(self, turn: Turn) -> None:
        """Append a turn of the parent run. Does not apply stop conditions."""
        self.turns.append(turn)
        if turn.is_summary:
            new_row = self.compaction.new_row if self.compaction else _later
            self.conversation.begin_row(new_row(self.own, observation_messages))
        for message in observation_messages(turn):
            self.conversation.append(message)

    def take(self, turn: Turn) -> None:
        """Append a turn, new or logged: its observations become messages, and limits are applied."""
        self.inherit(turn)
        for call, observation in zip(turn.calls, turn.observations, strict=False):
            if call.name == submit.spec.name and observation.ok:
                answer = call.arguments.get("answer")
                self.stop, self.answer = StopReason.FINISHED, None if answer is None else str(answer)
        if not turn.calls and turn.parse_error is None and not turn.is_summary:
            cut = not self.tools and turn.completion.finish is Finish.LENGTH
            self.stop, self.answer = StopReason.MAX_TOKENS if cut else StopReason.FINISHED, turn.thought
        if self.session is not None and self.session.done:
            self.stop = self.stop or StopReason.FINISHED
        self.stop = self.stop or self._limit()

    def _sampling(self, most: int | None) -> Sampling:
        left = self.task.limits.max_tokens - self._sampled_tokens()
        if most is None:
            most = self.task.limits.completion_tokens or self.sampling.max_tokens
            if self.compaction:
                most = min(most, self.compaction.answer_tokens(self.conversation, self.own))
        return self.sampling.model_copy(
            update={
                "seed": turn_seed(self.seed, len(self.turns)),
                "max_tokens": max(1, min(most, left)),
            }
        )

    def execute(self, number: int, call: ToolCall) -> Observation:
        """Execute one call of the current turn."""
        started = time.time()
        recorded = self.record.take(call) if self.record else None
        try:
            result = recorded or self._tool(call)
        except ToolFailure as failure:
            result = ToolResult(text=f"error: {failure}", ok=False)
        self._liberties += (f"{call.name}: {name}" for name in result.repairs)
        changed: tuple[str, ...] = ()
        if not recorded and call.name in self._offered() and call.name in TOOLS and TOOLS[call.name].mutates:
            result, changed = self._kept(result)
        return self._observed(call.name, len(self.turns), number, result, started, changed)

    def _kept(self, result: ToolResult) -> tuple[ToolResult, tuple[str, ...]]:
        """Keep the workspace after a call. Returns its result, with what could not be kept, and the changed
        files."""
        known = self.workspace.left_out
        try:
            changed = self.workspace.refresh()
        except SnapshotError as problem:  # the workspace outgrew its limits, which the agent can mend
            return replace(result, text=f"error: {problem}\n{result.text}", ok=False), ()
        new = [repr(path) for path in self.workspace.left_out if path not in known]
        if new and self.profile.dialect not in _NO_NOTES:
            named = ", ".join(new[:_SHOWN]) + (f" and {len(new) - _SHOWN} more" if len(new) > _SHOWN else "")
            note = f"[in no diff, since it is no file, folder or link, or cannot be read: {named}]"
            result = replace(result, text=f"{result.text}\n{note}")
        return result, changed

    def _observed(
        self, name: str, turn: int, number: int, result: ToolResult, started: float,
        changed: tuple[str, ...] = (),
    ) -> Observation:  # fmt: skip
        """The observation of a result: truncated, with the whole text stored."""
        # a call can quote half a surrogate pair, which no tokenizer accepts
        full = result.text.encode("utf-8", "backslashreplace")
        spill = spill_path(turn, number)
        whole, form = full.decode(), self.profile.observation
        text, cut = shorten(whole, self.policy.count, form, full_output=spill, tool=name)
        blob = None
        if text != whole:
            blob = self.put_blob(full)
            with contextlib.suppress(OSError):  # the agent may have put something else at that path
                self.context.jail.write(spill, full)
        run = result.execution
        if run and self.profile.dialect not in _NO_NOTES:
            text += limits_met(run, self.task.limits)
        return Observation(
            tool=name,
            ok=result.ok,
            text=text,
            exit_code=run.exit_code if run else None,
            signal=run.signal if run else None,
            timed_out=run.timed_out if run else False,
            bytes_total=run.stdout_bytes + run.stderr_bytes if run else len(full),
            truncated=cut or (run.truncated if run else False),
            blob=blob,
            files_changed=changed,
            **({"denials": run.denials} if run else {}),
            started=started,
            ended=time.time(),
        )

    def _tool(self, call: ToolCall) -> ToolResult:
        offered = self._offered()
        if call.name not in offered:
            raise ToolFailure(f"unknown tool {call.name}; the tools are {', '.join(offered)}")
        if self.session is not None and self.session.offers(call.name):
            return self.session.step(call)
        context = replace(self.context, turn=len(self.turns))
        return TOOLS.find(call.name)(context, dict(call.arguments))

    def _offered(self) -> list[str]:
        """Names of the tools that this agent may call: not all that are installed."""
        return [tool.name for tool in self.tools]

    def _refuse(self, parsed: Parsed, completion: Completion) -> list[Observation]:
        """The parse error as an observation; one for each call of an API, which requires an answer to
        each."""
        now = time.time()
        text = f"error: {parsed.error}"
        size = len(text.encode())
        said = Observation(tool="", ok=False, text=text, bytes_total=size, started=now, ended=now)
        return [said] * max(1, len(completion.api.calls if completion.api else ()))

    @property
    def own(self) -> list[Turn]:
        """The turns of this agent, without its sub-agents'."""
        return [turn for turn in self.turns if turn.delegated_by == self.parent]

    def of(self, turn: Turn) -> Agent:
        """The agent of a logged turn: this one or its sub-agent."""
        if turn.delegated_by is not None:
            return self._child_of(turn.delegated_by)
        if self.child is not None:
            self._leave(self.child)
        return self

    def settle(self) -> None:
        """Record the answer of an ended sub-agent as the observation of the call that started it."""
        at = self._delegating()
        if at is None:
            if self.child is not None:
                self._leave(self.child)
            return
        self.stop = self.stop or self._budget()
        child = self._child_of(at)
        if child.stop is None and self.stop is None:
            return
        answer = self._observed(DELEGATE, at, len(self.turns[at].calls) - 1, child_result(child), time.time())
        self.turns[at] = answered(self.turns[at], answer)
        self.conversation.append(observation_messages(self.turns[at])[-1])
        self._leave(child)
        if self.log_observation is not None:
            self.log_observation(at, answer)
        self.stop = self.stop or self._limit()

    def _delegating(self) -> int | None:
        """The turn whose sub-agent is active."""
        return delegating(self.own)

    def _delegated(self, child: Agent) -> Turn:
        """The next turn of the sub-agent; if it has ended, the parent's next turn."""
        try:
            return child.step()
        except ContextFull:
            child.stop = StopReason.CONTEXT_FULL
        self.settle()
        return self.step()

    def _child_of(self, at: int) -> Agent:
        if self.child is None or self.child.parent != at:
            self.child = sub_agent(self, at)
        return self.child

    def _leave(self, child: Agent) -> None:
        self.conversation.last_row = child.conversation.last_row
        self.conversation.waited += child.conversation.waited
        self.child = None

    def _execute_all(self, calls: Sequence[ToolCall]) -> list[Observation]:
        """One observation for each call, except a last one that starts a sub-agent."""
        observations = []
        for number, call in enumerate(calls):
            if call.name == DELEGATE and number + 1 < len(calls):
                misplaced = ToolResult(text=f"error: {DELEGATE} must be the last call of a message", ok=False)
                observations.append(self._observed(DELEGATE, len(self.turns), number, misplaced, time.time()))
            else:
                observations.append(self.execute(number, call))
        if calls and calls[-1].name == DELEGATE and observations[-1].ok:
            observations.pop()
        return observations

    def _limit(self) -> StopReason | None:
        own = self.own
        if _trailing(own, lambda t: t.parse_error is not None) >= _MAX_FORMAT_ERRORS:
            return StopReason.FORMAT_ERRORS
        if sum(turn.completion.finish is Finish.REPETITION for turn in own) >= _MAX_REPETITIONS:
            return StopReason.REPETITION
        if _goes_round([_action_key(turn) for turn in own[-_MAX_REPEATS * _LONGEST_ROUND :]]):
            return StopReason.LOOP
        if self.most_turns is not None and len(own) >= self.most_turns:
            return StopReason.MAX_TURNS
        return self._budget()

    def _budget(self) -> StopReason | None:
        """The limit of the run that is reached; None: none."""
        limits = self.task.limits
        if len(self.turns) >= limits.max_turns:
            return StopReason.MAX_TURNS
        if self._sampled_tokens() >= limits.max_tokens:
            return StopReason.MAX_TOKENS
        if self._used() >= limits.max_seconds:
            return StopReason.MAX_SECONDS
        if limits.max_cost is not None and sum(map(turn_cost, self.turns)) >= limits.max_cost:
            return StopReason.MAX_COST
        return None

    def _used(self) -> float:
        """Seconds of the run so far, without time spent waiting for other rows of a batch."""
        return self.elapsed + time.monotonic() - self.began - self.conversation.waited

    def _sampled_tokens(self) -> int:
        return sum(turn_length(turn, self.policy.count) for turn in self.turns)


def _later(turns: Sequence[Turn], messages: Callable[[Turn], list[Message]]) -> list[Message]:
    """A row whose messages are in the log, in the turn after the summary."""
    return []


def _with_cut_note(observation: Observation, completion: Completion) -> Observation:
    """The observation, with a note that the answer before it was cut off."""
    most = completion.sampling.max_tokens
    note = f"[your answer was cut at {most} tokens, the most that one may have (max_completion_tokens)]"
    if completion.finish is Finish.REPETITION:
        note = "[your answer repeated itself, and was ended there: write each thing once, then one call]"
    return observation.model_copy(update={"text": f"{observation.text}\n{note}"})


def spill_path(turn: int, call: int) -> str:
    """Path at which the agent finds the whole output of a truncated observation; snapshots leave it out."""
    return f".nano/output_{turn}{f'_{call}' if call else ''}.txt"


def observation_messages(turn: Turn) -> list[Message]:
    """The messages that a turn's observations append to the conversation.

    An API takes the role `tool` for answers to its calls alone: other observations come from the user.
    """
    texts = [observation.text for observation in turn.observations]
    if turn.parser != Api.name:
        roles = [Role.USER if observation.tool == SAID else Role.TOOL for observation in turn.observations]
        return [Message(role=role, content=text) for role, text in zip(roles, texts, strict=True)]
    ids = [call.id for call in turn.completion.api.calls] if turn.completion.api else []
    return [
        Message(role=Role.TOOL, content=text, call_id=ids[at])
        if at < len(ids)
        else Message(role=Role.USER, content=text)
        for at, text in enumerate(texts)
    ]


def text_in(turn: Turn, profile: InterfaceProfile) -> str:
    """A completion as the profile's dialect writes it: its own text, or calls that an API returned beside it.

    Raises ValueError for calls that the dialect cannot write.
    """
    if turn.completion.api is None or not turn.calls:
        return turn.completion.text
    return DIALECTS.find(profile.dialect).render(turn.thought, turn.calls, profile.tools)


def turn_length(turn: Turn, count: Callable[[str], int]) -> int:
    """Number of sampled tokens of a turn; counted by `count` if neither log nor server has it."""
    completion = turn.completion
    if completion.api is not None:
        return completion.api.usage.completion
    return len(completion.tokens.sampled_ids) if completion.tokens else count(completion.text)


def turn_cost(turn: Turn) -> float:
    """Dollars of a turn; 0 for a policy that is no API, or has no price."""
    return (turn.completion.api.usage.cost or 0.0) if turn.completion.api else 0.0


def _trailing(turns: Sequence[Turn], holds: Callable[[Turn], bool]) -> int:
    number = 0
    for turn in reversed(turns):
        if not holds(turn):
            break
        number += 1
    return number


def _goes_round(keys: Sequence[object]) -> bool:
    """Whether the last turns are one round of up to _LONGEST_ROUND turns, _MAX_REPEATS times over."""
    return any(
        len(keys) >= _MAX_REPEATS * period
        and all(keys[-i] == keys[-i - period] for i in range(1, (_MAX_REPEATS - 1) * period + 1))
        for period in range(1, _LONGEST_ROUND + 1)
    )


def _action_key(turn: Turn) -> tuple[object, ...]:
    """Calls and observations of a turn, for loop detection: repeated equal turns are a loop."""
    return turn.calls, tuple(o.text for o in turn.observations), turn.parse_error
