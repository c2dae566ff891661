"""The agent loop: complete -> parse -> execute -> observe -> record, until there is a reason to stop."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nano_coder.agent.actions import Actions
from nano_coder.agent.best_first import next_beginning
from nano_coder.agent.compaction import Compaction, compaction_of
from nano_coder.agent.dialects.api import FILTERED, Api
from nano_coder.agent.dialects.dialect import DIALECTS, Parsed
from nano_coder.agent.profiles import (
    delegating,
    first_messages,
    offered_tools,
    open_conversation,
    without_delegate,
)
from nano_coder.tools.repair import edit_line, find_places
from nano_coder.tools.run_control import DELEGATE, delegate, submit
from nano_coder.tools.tool import ToolResult
from nano_shared.errors import ContextFull, GivenUp
from nano_shared.files import content_hash
from nano_shared.policy import Conversation, InterfaceProfile, Likeliest, Policy
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
    Trajectory,
    Turn,
)

_MAX_FORMAT_ERRORS = 3
_MAX_REPEATS = 4
_LONGEST_ROUND = 4
"""turns of a round that is a loop when it is repeated, such as a wrong call, and prose about its error"""
_MAX_REPETITIONS = 2
"""answers that repeat themselves: the model is told once"""
_ENDING = (submit.spec.name, edit_line.spec.name)
"""tools whose success ends a run"""
_TRIED = 300
"""characters of an answer that is shown again as tried"""
SAID = "user"
"""tool name of an observation that is a further message of the user; no policy can call it"""


def derived_seed(*parts: int | str) -> int:
    return int(content_hash(list(parts)).removeprefix("sha256:")[:15], 16)


def turn_seed(seed: int | None, index: int) -> int | None:
    """The seed of one completion: a function of the run's seed and the turn, so that resuming repeats it."""
    return None if seed is None else derived_seed(seed, index)


@dataclass(slots=True, kw_only=True)
class Dialogue:
    policy: Policy
    conversation: Conversation
    sampling: Sampling
    """with the run's seed, from which each completion gets its own"""
    compaction: Compaction | None = None
    """None: the run ends where its context is full"""
    likeliest: dict[int, list[Likeliest]] = field(default_factory=dict)
    """by row, the likeliest tokens of each position of its completion"""

    def complete(
        self, number: int, most: int, deadline: float, earlier: Sequence[Completion] | None = None
    ) -> Completion:
        """The completion of turn `number` of the run, of at most `most` sampled tokens, by a time of the
        monotonic clock; where `earlier` holds those to the same prompt, the likeliest of the others."""
        self.conversation.deadline = deadline
        own = {"seed": turn_seed(self.sampling.seed, number), "max_tokens": most}
        sampling = self.sampling.model_copy(update=own)
        if earlier is None:
            completion = self.policy.complete(self.conversation, sampling)
        else:
            completion = self._next_likeliest(earlier, sampling)
        if completion.finish is Finish.CANCELLED:  # by the conversation's `stop`
            raise KeyboardInterrupt
        self.conversation.record(completion)
        return completion

    @property
    def best_first(self) -> bool:
        """Whether it can answer one prompt again and again, from the likeliest answer on."""
        return self.sampling.temperature == 0 and hasattr(self.policy, "complete_beginning")

    def _next_likeliest(self, earlier: Sequence[Completion], sampling: Sampling) -> Completion:
        """The likeliest answer behind those. Raises GivenUp where there is no other."""
        policy: Any = self.policy
        tokens = [one.tokens for one in earlier if one.tokens is not None]
        for one, its in zip(earlier, tokens, strict=True):
            if its.row not in self.likeliest:  # it is of a process before this one
                given = tuple(zip(its.sampled_ids, its.logprobs, strict=True))[: one.sampling.given]
                _, self.likeliest[its.row] = policy.complete_beginning(self.conversation, sampling, given)
        answers = [(its, self.likeliest[its.row]) for its in tokens]
        beginning = next_beginning(answers, policy.engine.eos_ids)
        if beginning is None:
            raise GivenUp(f"the model has no answer but the {len(answers)} that failed")
        completion: Completion
        completion, found = policy.complete_beginning(self.conversation, sampling, beginning)
        assert completion.tokens is not None
        self.likeliest[completion.tokens.row] = found
        return completion


@dataclass(slots=True, kw_only=True)
class Agent:
    """One execution in memory. `step` takes one turn; `stop` is the reason to stop, or None."""

    task: Task
    profile: InterfaceProfile
    dialogue: Dialogue
    actions: Actions
    began: float
    """on the monotonic clock; of a run that was resumed, earlier by what it had used before"""
    turns: list[Turn] = field(default_factory=list)
    """of the run: sub-agents' too"""
    stop: StopReason | None = None
    answer: str | None = None
    parent: int | None = None
    """of a sub-agent: index of the turn that delegated to it"""
    child: Agent | None = None
    """the sub-agent at work, or the one whose logged turns are being replayed"""

    def step(self) -> Turn | None:
        """The next turn: the active sub-agent's, else a summary if the context is nearly full, else an
        action. None where a sub-agent has ended without one."""
        if (at := delegating(self.own_turns)) is not None:
            child = self._child_of(at)
            try:
                return child.step()
            except ContextFull:
                child.stop = StopReason.CONTEXT_FULL
                return None
        compaction, conversation = self.dialogue.compaction, self.dialogue.conversation
        if compaction is None:
            return self._act()
        if compaction.due(conversation, self.own_turns):
            return self._summarise(compaction)
        try:
            return self._act()
        except ContextFull:  # a server reads less than it says
            if not conversation.rendered:
                raise
            return self._summarise(compaction)

    def _act(self) -> Turn:
        started, own = time.time(), self.own_turns
        anew = own[-1].is_summary if own else self.parent is not None
        earlier = self._show_place() if self.profile.places else None
        begun = self.dialogue.conversation.messages if anew or self.profile.places else ()
        completion = self._complete(earlier=earlier)
        parsed = self._parse(completion)
        observations, repairs = self._execute(parsed.calls)
        if parsed.error:
            observations = _refused(parsed, completion)
        if observations and completion.finish.is_cut and self.actions.notes:
            most = completion.sampling.max_tokens
            note = f"your answer was cut at {most} tokens, the most that one may have (max_completion_tokens)"
            if completion.finish is Finish.REPETITION:
                note = (
                    "your answer repeated itself, and was ended there: write each thing once, then one call"
                )
            text = f"{observations[-1].text}\n[{note}]"
            observations[-1] = observations[-1].model_copy(update={"text": text})
        workspace = self.actions.workspace
        turn = Turn(
            index=len(self.turns), messages=begun, completion=completion, thought=parsed.thought,
            calls=parsed.calls, parse_error=parsed.error, parser=self.profile.dialect,
            repairs=(*parsed.repairs, *repairs), observations=tuple(observations),
            snapshot=workspace.snapshot if parsed.calls and not workspace.lost else None,
            started=started, ended=time.time(), delegated_by=self.parent,
        )  # fmt: skip
        self.append_turn(turn)
        return turn

    def _show_place(self) -> list[Completion] | None:
        """Begin a row with the next place, and return the answers to it so far; None: it shows them. Raises
        GivenUp after the last one, and where none can be found."""
        actions, conversation, number = self.actions, self.dialogue.conversation, len(self.turns)
        key = content_hash([actions.workspace.start, self.task.check])
        places = find_places(actions.context, key, self.profile.places)
        if number >= len(places):
            raise GivenUp(f"the check fails after {number} answers to {len({*places})} places")
        best_first = self.dialogue.best_first
        earlier = [t.completion for t, p in zip(self.turns, places, strict=False) if p == places[number]]
        texts = dict.fromkeys(one.text.strip() for one in earlier if not best_first)
        tried = [text[:_TRIED] for text in texts]
        shown = first_messages(self.profile, self.task, (), places[number], tried)
        if number:
            conversation.begin_row(shown)
        else:
            conversation.replace_new(shown)
        return earlier if best_first else None

    def _summarise(self, compaction: Compaction) -> Turn:
        """Let the policy summarise the row. Raises ContextFull if there is no room."""
        started, own, conversation = time.time(), self.own_turns, self.dialogue.conversation
        compaction.refuse_more(own)
        messages = compaction.asking(conversation, own)
        conversation.replace_new(messages)
        completion = self._complete(compaction.summary_tokens)
        turn = Turn(
            index=len(self.turns), messages=tuple(messages), completion=completion,
            thought=self._parse_calls(completion).thought, parser=SUMMARY, started=started,
            ended=time.time(), delegated_by=self.parent,
        )  # fmt: skip
        self.append_turn(turn)
        return turn

    def _complete(self, most: int | None = None, earlier: Sequence[Completion] | None = None) -> Completion:
        """The policy's next completion, of at most `most` sampled tokens (None: the limit of an answer);
        `earlier` as of `Dialogue.complete`."""
        limits, dialogue = self.task.limits, self.dialogue
        if most is None:
            most = limits.completion_tokens or dialogue.sampling.max_tokens
            if dialogue.compaction:
                most = min(most, dialogue.compaction.answer_tokens(dialogue.conversation, self.own_turns))
        left = limits.max_tokens - self._sampled_tokens()
        deadline = self.began + dialogue.conversation.waited + limits.max_seconds
        return dialogue.complete(len(self.turns), max(1, min(most, left)), deadline, earlier)

    def _parse(self, completion: Completion) -> Parsed:
        """The calls of a completion. Prose that follows a turn of prose is the answer: no call, no error. So
        is what ends the last turn of an environment without a call, and all text where no tool is offered."""
        if not self.tools:
            return Parsed(thought=completion.text)
        parsed = self._parse_calls(completion)
        if completion.finish is not Finish.STOP:
            return parsed
        in_environment = self.actions.session is not None
        if not parsed.calls and in_environment and len(self.turns) + 1 >= self.task.limits.max_turns:
            return Parsed(thought=completion.text)
        last = self.own_turns[-1] if self.own_turns else None
        asked = last is not None and last.parse_error and self._parse_calls(last.completion).prose
        return Parsed(thought=parsed.thought) if parsed.prose and asked else parsed

    def _parse_calls(self, completion: Completion) -> Parsed:
        if completion.api is not None and completion.api.filtered:
            return Parsed(thought=completion.text, error=FILTERED)
        dialect = DIALECTS.find(self.profile.dialect)
        if completion.api is not None and isinstance(dialect, Api):
            return dialect.parse_api(completion.text, completion.api, self.tools)
        return dialect.parse(completion.text, self.tools)

    def _execute(self, calls: Sequence[ToolCall]) -> tuple[list[Observation], list[str]]:
        """One observation for each call, except a last one that starts a sub-agent; and repairs of tools."""
        observations, repairs, turn = [], list[str](), len(self.turns)
        offered = [tool.name for tool in self.tools]  # not all that are installed
        for number, call in enumerate(calls):
            if call.name == DELEGATE and number + 1 < len(calls):
                misplaced = ToolResult(text=f"error: {DELEGATE} must be the last call of a message", ok=False)
                seen = self.actions.observed(DELEGATE, turn, number, misplaced, time.time())
            else:
                seen, more = self.actions.execute(turn, number, call, offered)
                repairs += more
            observations.append(seen)
        if calls and calls[-1].name == DELEGATE and observations[-1].ok:
            observations.pop()
        return observations, repairs

    def append_turn(self, turn: Turn) -> None:
        """Append a turn, new or logged: its observations become messages, and limits are applied."""
        self.replay_turn(turn)
        for call, observation in zip(turn.calls, turn.observations, strict=False):
            if call.name in _ENDING and observation.ok:
                answer = call.arguments.get("answer")
                self.stop, self.answer = StopReason.FINISHED, None if answer is None else str(answer)
        if not turn.calls and turn.parse_error is None and not turn.is_summary:
            cut = not self.tools and turn.completion.finish is Finish.LENGTH
            self.stop, self.answer = StopReason.MAX_TOKENS if cut else StopReason.FINISHED, turn.thought
        if self.actions.session is not None and self.actions.session.done:
            self.stop = self.stop or StopReason.FINISHED
        self.stop = self.stop or self._limit()

    def replay_turn(self, turn: Turn) -> None:
        self.turns.append(turn)
        conversation, compaction = self.dialogue.conversation, self.dialogue.compaction
        if turn.is_summary:  # without compaction, the new row's messages are in the turn after it
            row = compaction.new_row(self.own_turns, observation_messages) if compaction else []
            conversation.begin_row(row)
        for message in observation_messages(turn):
            conversation.append(message)

    def restore(self, turn: Turn) -> None:
        """Bring the conversation to the completion of a logged turn."""
        if turn.messages:
            self.dialogue.conversation.replace_new(turn.messages)
        self.dialogue.conversation.record(turn.completion)

    @property
    def tools(self) -> tuple[ToolSpec, ...]:
        return offered_tools(self.profile, self.task)

    @property
    def own_turns(self) -> list[Turn]:
        return [turn for turn in self.turns if turn.delegated_by == self.parent]

    # -------------------------------------------------------------------------------- sub-agents

    def of(self, turn: Turn) -> Agent:
        """The agent of a logged turn: this one or its sub-agent."""
        if turn.delegated_by is not None:
            return self._child_of(turn.delegated_by)
        self._detach()
        return self

    def finish_subagent(self) -> tuple[int, Observation] | None:
        """If a sub-agent has ended: the index of the turn that delegated, and the observation that its call
        has now. None otherwise."""
        at = delegating(self.own_turns)
        if at is None:
            self._detach()
            return None
        self.stop = self.stop or self._budget()
        child = self._child_of(at)
        if child.stop is None and self.stop is None:
            return None
        number = len(self.turns[at].calls) - 1
        result = ToolResult(text=child.answer or "(the sub-agent ended without an answer)")
        if child.stop is not StopReason.FINISHED:  # why there is no answer, and its last text
            last = child.own_turns[-1].thought.strip() if child.own_turns else ""
            told = f"error: the sub-agent gave no answer ({child.stop or 'the run ended'})"
            result = ToolResult(text=told + (last and f"\n{last}"), ok=False)
        answer = self.actions.observed(DELEGATE, at, number, result, time.time())
        self.turns[at] = answered(self.turns[at], answer)
        self.dialogue.conversation.append(observation_messages(self.turns[at])[-1])
        self._detach()
        self.stop = self.stop or self._limit()
        return at, answer

    def _child_of(self, at: int) -> Agent:
        if self.child is None or self.child.parent != at:
            self.child = sub_agent(self, at)
        return self.child

    def _detach(self) -> None:
        if self.child is not None:
            own, theirs = self.dialogue.conversation, self.child.dialogue.conversation
            own.last_row = theirs.last_row
            own.waited += theirs.waited
            self.child = None

    # ------------------------------------------------------------------------------------ limits

    def _limit(self) -> StopReason | None:
        own, last = self.own_turns, self.own_turns[-_MAX_FORMAT_ERRORS:]
        wrong = len(last) == _MAX_FORMAT_ERRORS and all(turn.parse_error is not None for turn in last)
        if wrong and not self.profile.places:
            return StopReason.FORMAT_ERRORS
        if sum(turn.completion.finish is Finish.REPETITION for turn in own) >= _MAX_REPETITIONS:
            return StopReason.REPETITION
        if not self.profile.places and _goes_round(own[-_MAX_REPEATS * _LONGEST_ROUND :]):
            return StopReason.LOOP
        if self.parent is not None and len(own) >= assignment(self.turns[self.parent])["max_turns"]:
            return StopReason.MAX_TURNS
        return self._budget()

    def _budget(self) -> StopReason | None:
        limits = self.task.limits
        if len(self.turns) >= limits.max_turns:
            return StopReason.MAX_TURNS
        if self._sampled_tokens() >= limits.max_tokens:
            return StopReason.MAX_TOKENS
        # without time spent waiting for other rows of a batch
        if time.monotonic() - self.began - self.dialogue.conversation.waited >= limits.max_seconds:
            return StopReason.MAX_SECONDS
        if limits.max_cost is not None and sum(map(turn_cost, self.turns)) >= limits.max_cost:
            return StopReason.MAX_COST
        return None

    def _sampled_tokens(self) -> int:
        return sum(turn_length(turn, self.dialogue.policy.count) for turn in self.turns)


def _refused(parsed: Parsed, completion: Completion) -> list[Observation]:
    """The parse error as an observation; one for each call of an API, which requires an answer to each."""
    said = plain_observation("", f"error: {parsed.error}")
    return [said] * max(1, len(completion.api.calls if completion.api else ()))


def plain_observation(tool: str, text: str, *, ok: bool = False) -> Observation:
    """An observation that no tool made, of this moment."""
    now = time.time()
    return Observation(tool=tool, ok=ok, text=text, bytes_total=len(text.encode()), started=now, ended=now)


def observation_messages(turn: Turn) -> list[Message]:
    """The messages that a turn's observations append to the conversation. An API takes the role `tool` for
    answers to its calls alone: other observations come from the user."""
    if turn.parser != Api.name:
        return [
            Message(role=Role.USER if seen.tool == SAID else Role.TOOL, content=seen.text, images=seen.images)
            for seen in turn.observations
        ]
    ids = [call.id for call in turn.completion.api.calls] if turn.completion.api else []
    return [
        Message(role=Role.TOOL, content=seen.text, images=seen.images, call_id=ids[at])
        if at < len(ids)
        else Message(role=Role.USER, content=seen.text, images=seen.images)
        for at, seen in enumerate(turn.observations)
    ]


def in_dialect(run: Trajectory, profile: InterfaceProfile) -> Trajectory:
    """The run with the calls that an API returned beside the text written as the profile's dialect does; a
    turn becomes several where the dialect writes one call a turn. Raises ValueError as `written` does."""
    turns = (one for turn in run.turns for one in _in_dialect(turn, profile, one_each=not run.is_served))
    return run.model_copy(update={"turns": tuple(turns)})


def _in_dialect(turn: Turn, profile: InterfaceProfile, *, one_each: bool) -> list[Turn]:
    if turn.completion.api is None or not turn.calls:
        return [turn]
    parts = written(turn.thought, turn.calls, profile, one_each=one_each)
    turns, seen = list[Turn](), 0
    for text, calls in parts:
        last = len(turns) + 1 == len(parts)
        own = turn.observations[seen:] if last else turn.observations[seen : seen + len(calls)]
        completion = turn.completion.model_copy(update={"text": text, "api": None})
        turns.append(turn.model_copy(update={"completion": completion, "calls": calls, "observations": own}))
        seen += len(calls)
    return turns


Written = tuple[str, tuple[ToolCall, ...]]
"""a text, and the calls that a dialect reads in it"""


def written(
    thought: str, calls: Sequence[ToolCall], profile: InterfaceProfile, *, one_each: bool = True
) -> list[Written]:
    """A thought and calls as the profile's dialect writes them: in one text, or `one_each` in one for each
    call where it cannot write them together. Each text is read again as the same calls. Raises ValueError,
    with the reason, for calls that the dialect cannot write or the profile does not have."""
    known, thought = {tool.name for tool in profile.tools}, thought.strip()
    if missing := [call.name for call in calls if call.name not in known]:
        raise ValueError(f"profile {profile.name} has no tool {missing[0]}")
    try:
        return [_written(thought, tuple(calls), profile)]
    except ValueError:
        if not one_each or len(calls) < 2:
            raise
    return [_written("" if number else thought, (call,), profile) for number, call in enumerate(calls)]


def _written(thought: str, calls: tuple[ToolCall, ...], profile: InterfaceProfile) -> Written:
    dialect = DIALECTS.find(profile.dialect)
    text = dialect.render(thought, calls, profile.tools)
    parsed = dialect.parse(text, profile.tools)
    if (parsed.thought, parsed.calls, parsed.error, parsed.repairs) != (thought, calls, None, ()):
        raise ValueError(
            f"the dialect {dialect.name} reads what it writes of {calls[0].name} as another call"
        )
    return text, calls


def turn_length(turn: Turn, count: Callable[[str], int]) -> int:
    """Number of sampled tokens of a turn; counted by `count` if neither log nor server has it."""
    completion = turn.completion
    if completion.api is not None:
        return completion.api.usage.completion
    return len(completion.tokens.sampled_ids) if completion.tokens else count(completion.text)


def turn_cost(turn: Turn) -> float:
    """Dollars of a turn; 0 for a policy that is no API, or has no price."""
    return (turn.completion.api.usage.cost or 0.0) if turn.completion.api else 0.0


def _goes_round(turns: Sequence[Turn]) -> bool:
    """Whether the last turns are one round of up to _LONGEST_ROUND turns, _MAX_REPEATS times over, by their
    calls and observations."""
    keys = [(turn.calls, [seen.text for seen in turn.observations], turn.parse_error) for turn in turns]
    return any(
        len(keys) >= _MAX_REPEATS * period
        and all(keys[-i] == keys[-i - period] for i in range(1, (_MAX_REPEATS - 1) * period + 1))
        for period in range(1, _LONGEST_ROUND + 1)
    )


def assignment(turn: Turn) -> dict[str, Any]:
    """What a turn delegates: `prompt` and `max_turns`."""
    return delegate.arguments.model_validate(turn.calls[-1].arguments).model_dump()


def sub_agent(parent: Agent, at: int) -> Agent:
    """The agent to which the turn `at` delegates: same files, tools and limits, another task and context."""
    names = tuple(tool.name for tool in without_delegate(parent.tools))
    prompt = assignment(parent.turns[at])["prompt"]
    task = parent.task.model_copy(update={"prompt": prompt, "tools": names, "check": None})
    before, policy = parent.dialogue.conversation, parent.dialogue.policy
    conversation = open_conversation(parent.profile, task, parent.actions.workspace.files(), before.started)
    conversation.row = conversation.last_row = before.last_row + 1
    conversation.on_text, conversation.ends_repetition = before.on_text, before.ends_repetition
    conversation.run, conversation.stop = before.run, before.stop
    conversation.get_blob = before.get_blob
    most = task.limits.completion_tokens or parent.dialogue.sampling.max_tokens
    form = parent.profile.compaction
    compaction = compaction_of(form, policy, conversation, most) if form else None
    dialogue = replace(parent.dialogue, conversation=conversation, compaction=compaction)
    return replace(
        parent, task=task, dialogue=dialogue, parent=at, began=parent.began + before.waited, child=None,
        stop=None, answer=None,
    )  # fmt: skip


def answered(turn: Turn, observation: Observation) -> Turn:
    return turn.model_copy(update={"observations": (*turn.observations, observation)})


def last_main(turns: Sequence[Turn]) -> Turn:
    return next(turn for turn in reversed(turns) if turn.delegated_by is None)


def observed_last(turns: Sequence[Turn], observation: Observation) -> tuple[Turn, ...]:
    """The turns of a run, the last that is no sub-agent's with one more observation. An active sub-agent ends
    without an answer."""
    last = last_main(turns)
    changed = last
    if delegating([last]) is not None:
        said = plain_observation(DELEGATE, "error: the sub-agent gave no answer (interrupted)")
        changed = answered(last, said)
    return (*turns[: last.index], answered(changed, observation), *turns[last.index + 1 :])


def cut_turns(turns: Sequence[Turn], at: int) -> tuple[Turn, ...]:
    """The first turns of a run. A sub-agent that was active then has not answered yet."""
    parent = turns[at].delegated_by if at < len(turns) else None
    if parent is None:
        return tuple(turns[:at])
    waiting = turns[parent].model_copy(update={"observations": turns[parent].observations[:-1]})
    return (*turns[:parent], waiting, *turns[parent + 1 : at])
