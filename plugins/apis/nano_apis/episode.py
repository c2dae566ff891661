"""The run that an external agent makes: its requests are the turns, under the run's sampling and limits."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from nano_apis.conversations import NAMELESS, ClientSession, Conversations, HeldConversation
from nano_apis.request import ModelAnswer, ModelRequest, OnText, RunEnded
from nano_apis.served_models import ServedModel
from nano_coder.agent.loop import turn_seed
from nano_shared.errors import ContextFull, PolicyError
from nano_shared.policy import Conversation
from nano_shared.store import new_run_id
from nano_shared.types import Sampling, StopReason, Trajectory, Turn

_PATIENCE_SECONDS = 60.0
"""for turns that are being sampled when their agent ends; each ends with its next token"""


class AgentEpisode(Conversations):
    """The conversations of one agent; the first gets the run's id."""

    is_rollout = True

    def __init__(
        self, model: ServedModel, run: Trajectory, sampling: Sampling, slot: int | None = None
    ) -> None:
        """`run` has no turns. What the agent asks for is not used in place of `sampling`, but for a smaller
        number of tokens, stop strings and the like. `slot` is the policy's, of the agent."""
        super().__init__(model)
        self.run, self.sampling, self.slot = run, sampling, slot
        self.reached: StopReason | None = None
        """the limit that was reached"""
        self.overflowed = False
        """whether the last request did not fit the context"""
        self.limited = threading.Event()
        """set when the agent gets no answers any more"""
        self.began = time.monotonic()
        self._turns = self._tokens = 0
        """sampled so far"""
        self._clock = threading.Lock()
        self._open = 0
        """requests that are being answered"""
        self._opened = self._queued = self._waited = 0.0
        """when the first of them came; seconds that those of them which are answered waited for other agents
        of the batch; the same of all before"""

    def reach(self, stop: StopReason) -> None:
        """The run is over for that reason, if it was not before."""
        self.reached = self.reached or stop
        self.limited.set()

    @property
    def seconds(self) -> float:
        """Of the run so far, not waiting for agents of the batch, whose answer counts once it is there."""
        with self._clock:
            now = time.monotonic()
            pending = now - self._opened if self._open and self.slot is not None else 0.0
            return now - self.began - self._waited - pending

    def answer(
        self, request: ModelRequest, session: ClientSession = NAMELESS, on_text: OnText | None = None,
        model: ServedModel | None = None, client: str = "",
    ) -> ModelAnswer:  # fmt: skip
        """As of a client, under the sampling of the run. Raises RunEnded for a run that gets no answers."""
        session = session._replace(run="")
        try:
            return super().answer(self._limited(request), session, on_text, model, client)
        except ContextFull:  # the agent may compact its history
            self.overflowed = True
            raise
        except PolicyError:
            self.reach(StopReason.POLICY_ERROR)
            raise

    def _limited(self, request: ModelRequest) -> ModelRequest:
        limits, asked = self.run.task.limits, request.sampling
        with self._lock:
            left = limits.max_tokens - self._tokens
            if left <= 0 or self._turns >= limits.max_turns:
                self.reach(StopReason.MAX_TOKENS if left <= 0 else StopReason.MAX_TURNS)
            if self.reached is not None:
                raise RunEnded(f"this run has ended ({self.reached.value}) and gets no further answer")
            number, self._turns = self._turns, self._turns + 1
        sampling = self.sampling.model_copy(
            update={
                "max_tokens": min(asked.max_tokens, self.sampling.max_tokens, left), "stop": asked.stop,
                "seed": turn_seed(self.run.seed, number), "grammar": asked.grammar,
            }
        )  # fmt: skip
        return replace(request, sampling=sampling, more={})

    def _recall(self, *_request: object) -> None:
        """Nothing of the log goes on in a rollout."""

    def _new_run(self, request: ModelRequest, tools_hash: str, model: ServedModel) -> Trajectory:
        id = new_run_id() if self.run.id in self._held else self.run.id
        return self.run.model_copy(update={"id": id, "tools_hash": tools_hash})

    def _rewritten(self, request: ModelRequest, model: ServedModel) -> HeldConversation | None:
        """The agent's conversation whose history the request wrote anew, marked as busy, or None. An agent
        that leaves out a refused answer, or shortens what it read, still makes one run: the request begins a
        token row of it. Without tokens there are no rows."""
        if request.prompt_ids:
            return None
        opening = model.rendered(request.messages[:2], request.tools, opening=True)[:1]
        for held in sorted(self._held.values(), key=lambda held: held.touched, reverse=True):
            turns = held.run.turns
            if not turns or held.busy or held.ended or held.model is not model:
                continue
            if turns[-1].completion.tokens and turns[0].messages[:1] == opening:
                held.busy = True
                return held
        return None

    @contextmanager
    def _asking(self, conversation: Conversation) -> Iterator[None]:
        """While a request is answered, whose seconds of waiting `conversation` then says."""
        with self._clock:
            if not self._open:
                self._opened = time.monotonic()
            self._open += 1
        try:
            yield
        finally:
            with self._clock:
                self._open -= 1
                self._queued += conversation.waited
                if not self._open:
                    self._waited += min(self._queued, time.monotonic() - self._opened)
                    self._queued = 0.0

    def _go_on(self, held: HeldConversation, turn: Turn, answer: ModelAnswer, answered: str) -> None:
        with self._lock:
            self.overflowed = False
            self._tokens += answer.sampled_tokens
            if self._tokens >= self.run.task.limits.max_tokens:
                self.reach(StopReason.MAX_TOKENS)
        super()._go_on(held, turn, answer, answered)

    def end(self, snapshot: str, diff: str, stop: StopReason, detail: str | None) -> Trajectory | None:
        """End the conversations, once what is being sampled is logged. Returns the longest, which left the
        workspace `snapshot`; None if the agent had no conversation."""
        with self._lock:
            self._lock.wait_for(lambda: not any(held.busy for held in self._held.values()), _PATIENCE_SECONDS)
            found = sorted(self._held.values(), key=lambda held: -len(held.run.own_turns))
            found = [held for held in found if held.run.own_turns]
            for other in found[1:]:
                self._end(other)
            if not found:
                return None
            held = found[0]
            held.ended = True
        turns, ended = held.run.turns, time.time()
        answer = turns[-1].completion.text
        end: dict[str, Any] = {
            "stop": stop, "stop_detail": detail, "answer": answer, "diff": diff, "ended": ended,
        }  # fmt: skip
        held.model.store.finish(held.run.id, snapshot=snapshot, **end)
        last = turns[-1].model_copy(update={"snapshot": snapshot})
        return held.run.model_copy(update={"turns": (*turns[:-1], last), **end})
