"""Sub-agents: an agent of its own context that works on a part of the task, inside the run of its parent.

Its turns are turns of the run, in token rows of their own, and name the turn that delegated. That turn is
logged with its call, before the sub-agent works; the answer is added to it as the call's observation.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nano_coder.agent.compaction import compaction_of
from nano_coder.agent.prompt import DELEGATE, delegating, open_conversation, without_delegate
from nano_coder.tools.run_control import delegate
from nano_coder.tools.tool import ToolResult
from nano_shared.types import Observation, StopReason, Turn

if TYPE_CHECKING:
    from nano_coder.agent.loop import Agent


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
    conversation.run = before.run
    most = task.limits.completion_tokens or parent.dialogue.sampling.max_tokens
    form = parent.profile.compaction
    compaction = compaction_of(form, policy, conversation, most) if form else None
    dialogue = replace(parent.dialogue, conversation=conversation, compaction=compaction)
    return replace(
        parent, task=task, dialogue=dialogue, parent=at, began=parent.began + before.waited, child=None,
        stop=None, answer=None,
    )  # fmt: skip


def child_result(child: Agent) -> ToolResult:
    """The result of a sub-agent: its answer, or why there is none and its last text."""
    if child.stop is StopReason.FINISHED:
        return ToolResult(text=child.answer or "(the sub-agent ended without an answer)")
    last = child.own_turns[-1].thought.strip() if child.own_turns else ""
    why = child.stop or "the run ended"
    return ToolResult(text=f"error: the sub-agent gave no answer ({why})" + (last and f"\n{last}"), ok=False)


def answered(turn: Turn, observation: Observation) -> Turn:
    """The turn with one more observation."""
    return turn.model_copy(update={"observations": (*turn.observations, observation)})


def last_main(turns: Sequence[Turn]) -> Turn:
    """The last turn of a run that is no sub-agent's."""
    return next(turn for turn in reversed(turns) if turn.delegated_by is None)


def observed_last(turns: Sequence[Turn], observation: Observation) -> tuple[Turn, ...]:
    """The turns of a run, the last that is no sub-agent's with one more observation. An active sub-agent ends
    without an answer."""
    last = last_main(turns)
    changed = last
    if delegating([last]) is not None:
        now, text = time.time(), "error: the sub-agent gave no answer (interrupted)"
        size = len(text.encode())
        said = Observation(tool=DELEGATE, ok=False, text=text, bytes_total=size, started=now, ended=now)
        changed = answered(last, said)
    return (*turns[: last.index], answered(changed, observation), *turns[last.index + 1 :])


def cut_turns(turns: Sequence[Turn], at: int) -> tuple[Turn, ...]:
    """The first turns of a run. A sub-agent that was active then has not answered yet."""
    parent = turns[at].delegated_by if at < len(turns) else None
    if parent is None:
        return tuple(turns[:at])
    waiting = turns[parent].model_copy(update={"observations": turns[parent].observations[:-1]})
    return (*turns[:parent], waiting, *turns[parent + 1 : at])
