"""The agent loop: complete -> parse -> execute -> observe -> record, until there is a reason to stop."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from nano_coder.agent.dialects.api import Api
from nano_coder.agent.dialects.dialect import Parsed
from nano_coder.agent.dialects.registry import DIALECTS
from nano_coder.agent.observation import limits_met, shorten
from nano_coder.agent.recorded_answers import RecordedAnswers
from nano_coder.agent.workspace import Workspace
from nano_coder.tools.registry import TOOLS
from nano_coder.tools.submit import submit
from nano_coder.tools.tool import ToolContext, ToolFailure, ToolResult
from nano_shared.hashing import content_hash
from nano_shared.policy import Conversation, Policy
from nano_shared.profile import InterfaceProfile
from nano_shared.snapshot import SnapshotError
from nano_shared.types import (
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

_MAX_FORMAT_ERRORS = 3
_MAX_REPEATS = 4
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
    record: RecordedAnswers | None = None
    """answers of a logged run, which take the place of calls to tools that are recorded"""
    elapsed: float = 0.0
    """seconds used before this process, if the run was resumed"""
    began: float = field(default_factory=time.monotonic)
    _liberties: list[str] = field(default_factory=list)
    """those that tools took with the calls of the current turn"""

    def step(self) -> Turn:
        started = time.time()
        completion = self.complete()
        parsed = self.parse(completion)
        self._liberties.clear()
        observations = [self.execute(*numbered) for numbered in enumerate(parsed.calls)]
        if parsed.error:
            observations = self._refuse(parsed, completion)
        if observations and completion.finish is Finish.LENGTH and self.profile.dialect not in _NO_NOTES:
            observations[-1] = _with_cut_note(observations[-1], completion)
        turn = Turn(
            index=len(self.turns),
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
        )
        self.take(turn)
        return turn

    def complete(self) -> Completion:
        self.conversation.deadline = time.monotonic() + self.task.limits.max_seconds - self._used()
        completion = self.policy.complete(self.conversation, self._sampling())
        self.conversation.record(completion)
        return completion

    def parse(self, completion: Completion) -> Parsed:
        """The calls of a completion. Prose that follows a turn of prose is the answer: no call, no error."""
        parsed = self._parse(completion)
        if parsed.prose and completion.finish is Finish.STOP and self._asked():
            return Parsed(thought=parsed.thought)
        return parsed

    def _asked(self) -> bool:
        """Whether the last turn was prose, and was asked for a call."""
        last = self.turns[-1] if self.turns else None
        return last is not None and last.parse_error is not None and self._parse(last.completion).prose

    def _parse(self, completion: Completion) -> Parsed:
        dialect = DIALECTS.find(self.profile.dialect)
        if completion.api is not None and isinstance(dialect, Api):
            return dialect.parse_api(completion.text, completion.api, self.tools)
        return dialect.parse(completion.text, self.tools)

    def inherit(self, turn: Turn) -> None:
        """Append a turn of the parent run. Does not apply stop conditions."""
        self.turns.append(turn)
        for message in observation_messages(turn):
            self.conversation.append(message)

    def take(self, turn: Turn) -> None:
        """Append a turn, new or logged: its observations become messages, and limits are applied."""
        self.inherit(turn)
        for call, observation in zip(turn.calls, turn.observations, strict=False):
            if call.name == submit.spec.name and observation.ok:
                answer = call.arguments.get("answer")
                self.stop, self.answer = StopReason.FINISHED, None if answer is None else str(answer)
        if not turn.calls and turn.parse_error is None:
            self.stop, self.answer = StopReason.FINISHED, turn.thought
        self.stop = self.stop or self._limit()

    def _sampling(self) -> Sampling:
        left = self.task.limits.max_tokens - self._sampled_tokens()
        most = self.task.limits.completion_tokens or self.sampling.max_tokens
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
        if not recorded and call.name in TOOLS and TOOLS.find(call.name).mutates:
            try:
                changed = self.workspace.refresh()
            except SnapshotError as problem:  # the workspace outgrew its limits, which the agent can mend
                result = ToolResult(text=f"error: {problem}", ok=False, execution=result.execution)
        # a call can quote half a surrogate pair, which no tokenizer accepts
        full = result.text.encode("utf-8", "backslashreplace")
        spill = spill_path(len(self.turns), number)
        text, cut = shorten(full.decode(), self.policy.count, self.profile.observation, full_output=spill)
        blob = None
        if cut:
            blob = self.put_blob(full)
            with contextlib.suppress(OSError):  # the agent may have put something else at that path
                self.context.jail.write(spill, full)
        run = result.execution
        if run and self.profile.dialect not in _NO_NOTES:
            text += limits_met(run, self.task.limits)
        return Observation(
            tool=call.name,
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
        offered = [tool.name for tool in self.tools]
        if call.name not in offered:
            raise ToolFailure(f"unknown tool {call.name}; the tools are {', '.join(offered)}")
        context = replace(self.context, turn=len(self.turns))
        return TOOLS.find(call.name)(context, dict(call.arguments))

    def _refuse(self, parsed: Parsed, completion: Completion) -> list[Observation]:
        """The parse error as an observation; one for each call that an API returned, which all want an
        answer."""
        now = time.time()
        text = f"error: {parsed.error}"
        size = len(text.encode())
        said = Observation(tool="", ok=False, text=text, bytes_total=size, started=now, ended=now)
        return [said] * max(1, len(completion.api.calls if completion.api else ()))

    def _limit(self) -> StopReason | None:
        limits = self.task.limits
        if _trailing(self.turns, lambda t: t.parse_error is not None) >= _MAX_FORMAT_ERRORS:
            return StopReason.FORMAT_ERRORS
        if _trailing(self.turns, lambda t: _action_key(t) == _action_key(self.turns[-1])) >= _MAX_REPEATS:
            return StopReason.LOOP
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
        """Seconds of the run so far, without those spent waiting for other conversations of a batch."""
        return self.elapsed + time.monotonic() - self.began - self.conversation.waited

    def _sampled_tokens(self) -> int:
        return sum(turn_length(turn, self.policy.count) for turn in self.turns)


def _with_cut_note(observation: Observation, completion: Completion) -> Observation:
    """The observation, with a note that the answer before it was cut off."""
    most = completion.sampling.max_tokens
    note = f"[your answer was cut at {most} tokens, the most that one may have (max_completion_tokens)]"
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


def _action_key(turn: Turn) -> tuple[object, ...]:
    """What a turn did and saw, for loop detection: repeated equal turns are a loop."""
    return turn.calls, tuple(o.text for o in turn.observations), turn.parse_error
