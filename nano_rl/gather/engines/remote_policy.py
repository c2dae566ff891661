"""The policy of rollouts on servers: rendered here, sampled there, tokens in and out as ids."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from nano_coder.models.local.policy import LocalPolicy
from nano_coder.models.local.sampler import OnToken, Sampled
from nano_rl.gather.engines.engine_pool import EnginePool
from nano_shared.policy import Conversation
from nano_shared.types import Completion, Sampling


class RemotePolicy(LocalPolicy):
    """A LocalPolicy whose tokens a pool samples; its own engine does nothing.

    Each turn carries the version of the adapter that sampled it, so a rollout may cross an update.
    """

    def __init__(self, local: LocalPolicy, pool: EnginePool) -> None:
        super().__init__(local.engine, local.template, id=local.id, version=local.version, scheduler="free")
        self.pool = pool

    @property
    def context_limit(self) -> int:
        return min(super().context_limit, self.pool.context_limit or super().context_limit)

    def complete(
        self,
        conversation: Conversation,
        sampling: Sampling,
        *,
        owner: int | None = None,
        on_token: OnToken | None = None,
        top_logprobs: int = 0,
    ) -> Completion:
        """Sample the next turn on a server. `owner`, `on_token` and `top_logprobs` are for local weights.

        Raises PolicyError if no server answers, ContextFull, and BudgetExhausted at the deadline.
        """
        number, delta = self.template.next_row(conversation)
        row = (*conversation.tokens, *delta) if number == conversation.row else delta
        served, adapter = self.pool.sample(row, self.fitting(row, sampling), conversation)
        sampled = Sampled(served.ids, served.logprobs, served.finish)
        completion = self._completion(sampled, number, delta, sampling)
        return completion.model_copy(update={"policy_version": adapter.version})

    def hosted(self) -> AbstractContextManager[Callable[[Future[Any]], None]]:  # type: ignore[override]
        """There is no engine to step while a thread waits."""
        return nullcontext(lambda future: None)

    def agents(self, count: int, at_once: int) -> list[Any]:
        return [nullcontext() for _ in range(count)]
