"""Episodes: logged and graded runs whose actions come from an external caller, one at a time."""

from __future__ import annotations

import queue
import time
from multiprocessing.pool import ThreadPool

from pydantic import JsonValue

from nano_coder.agent.chat_template import CHATML
from nano_coder.agent.dialects.dialect import DIALECTS
from nano_coder.agent.profiles import find_profile, offered_tools, serving_profile
from nano_coder.run.execution import RunHooks, Runtime, grade_run, run_task
from nano_coder.sandbox.protocol import Sandbox
from nano_shared.errors import PolicyError, UsageError
from nano_shared.files import content_hash
from nano_shared.policy import Conversation
from nano_shared.store import LogStore
from nano_shared.types import (
    Completion,
    Finish,
    Observation,
    Sampling,
    Task,
    ToolCall,
    ToolSpec,
    Trajectory,
    Turn,
    Verdict,
)

PROFILE = find_profile("hermes-1")
"""a profile whose dialect represents any JSON argument"""
SUBMIT = "submit"
_CHARS_A_TOKEN = 4


class EpisodeOver(UsageError):
    """The episode has ended, so that no further action can be taken."""


class Episode:
    """One task in its own jail. `act` takes an action, `finish` ends and grades it, `close` releases it. An
    episode without actions for the time limit of the task ends without a reward. Not thread-safe."""

    def __init__(self, task: Task, sandbox: Sandbox, store: LogStore, *, actor: str = "external") -> None:
        """Raises UsageError for a task whose tools this runtime does not have."""
        if task.tools is not None and SUBMIT not in task.tools:
            task = task.model_copy(update={"tools": (*task.tools, SUBMIT)})
        self.task = task
        profile = serving_profile(PROFILE, task)
        self.tools: tuple[ToolSpec, ...] = offered_tools(profile, task)
        self.touched = time.monotonic()
        self.trajectory: Trajectory | None = None
        self._verdict: Verdict | None = None
        self._graded = False
        self._inbox: queue.Queue[ToolCall | None] = queue.Queue()
        self._outbox: queue.Queue[Turn | Trajectory | BaseException] = queue.Queue()
        policy = _Outside(self._inbox, self.tools, task.limits.max_seconds, actor)
        self._runtime = Runtime(
            policy=policy, sandbox=sandbox, store=store, profile=profile, policy_name=actor,
            hooks=RunHooks(turn=self._outbox.put),
        )  # fmt: skip
        self._pool = ThreadPool(1)  # its thread is a daemon: an abandoned episode keeps no program alive
        put = self._outbox.put
        self._pool.apply_async(run_task, (task, self._runtime), callback=put, error_callback=put)

    def act(self, name: str, arguments: dict[str, JsonValue]) -> Observation:
        """Call a tool. Raises EpisodeOver if the episode has ended, by a limit or by `submit`."""
        self.touched = time.monotonic()
        if self.trajectory is None:
            self._inbox.put(ToolCall(name=name, arguments=arguments))
            came = self._await()
            if isinstance(came, Turn):
                return came.observations[0]
        assert self.trajectory is not None
        raise EpisodeOver(f"the episode has ended ({self.trajectory.stop}); no further action is taken")

    def finish(self, answer: str | None = None) -> Verdict | None:
        """End the episode and grade it once; None without a check. An answer given before is kept."""
        self.touched = time.monotonic()
        if self.trajectory is None:
            self._inbox.put(ToolCall(name=SUBMIT, arguments=_answering(answer)))
            if isinstance(came := self._await(), Turn):
                if not came.observations[0].ok:
                    self._inbox.put(None)
                self._await()
        assert self.trajectory is not None
        self.close()
        if not self._graded:
            self.trajectory = grade_run(self.trajectory, self._runtime)
            self._verdict, self._graded = self.trajectory.verdict, True
        return self._verdict

    def close(self) -> None:
        """End a running episode without a verdict. Idempotent."""
        self._inbox.put(None)
        self._pool.close()

    def _await(self) -> Turn | Trajectory:
        came = self._outbox.get()
        if isinstance(came, BaseException):
            raise came
        if isinstance(came, Trajectory):
            self.trajectory = came
        return came


def _answering(answer: str | None) -> dict[str, JsonValue]:
    """The arguments of `submit`; lone surrogates are escaped."""
    return {} if answer is None else {"answer": answer.encode("utf-8", "backslashreplace").decode()}


class _Outside:
    """The policy of an episode, which completes with the calls of the external caller."""

    version = 0
    context_limit = 1 << 40
    template_hash = content_hash(CHATML)

    def __init__(
        self, inbox: queue.Queue[ToolCall | None], tools: tuple[ToolSpec, ...], patience: float, actor: str
    ) -> None:
        self.id, self._inbox, self._tools, self._patience = actor, inbox, tools, patience

    def complete(self, conversation: Conversation, sampling: Sampling) -> Completion:
        """The next call in the dialect. Raises PolicyError if none comes in time."""
        try:
            call = self._inbox.get(timeout=self._patience)
        except queue.Empty:
            raise PolicyError(f"no action came within {self._patience:g} seconds") from None
        if call is None:
            raise PolicyError("the episode was closed before it ended")
        text = DIALECTS[PROFILE.dialect].render("", (call,), self._tools)
        return Completion(text=text, finish=Finish.STOP, sampling=sampling, policy_id=self.id)

    def count(self, text: str) -> int:
        """An estimate, since the tokenizer of the caller is unknown."""
        return -(-len(text) // _CHARS_A_TOKEN)
