"""Served models: the one that is served now, its adapters, and the threads that step their engines."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from nano_coder.models.endpoint.policy import EndpointPolicy
from nano_coder.models.local.policy import LocalPolicy
from nano_coder.models.opening import at_hand, locate
from nano_coder.serve.adapters import Adapters, lineage_card
from nano_coder.serve.conversations import Conversations
from nano_coder.serve.request import BadRequest
from nano_coder.serve.served_model import ServedModel
from nano_coder.verify.trainable import hashes
from nano_shared.errors import NanoError

_log = logging.getLogger("nano_coder.serve")
_SENT_UNASKED = ("claude-", "gpt-")
"""how names begin that Claude Code and Codex send for small work of their own"""
Promoted = Callable[[], ServedModel | None]
"""the model that was promoted since the last call; None if none was"""


class ServedModels:
    """The models of one server. Thread-safe."""

    def __init__(
        self, conversations: Conversations, adapters: Adapters | None = None, promoted: Promoted | None = None
    ) -> None:
        self._conversations, self._adapters, self._promoted = conversations, adapters, promoted
        self._started = int(time.time())
        self._starting = threading.Lock()
        self._engines: dict[LocalPolicy, Future[None]] = {}
        """policies with a thread that steps their engine, until the future is done"""

    @property
    def current(self) -> ServedModel:
        return self._conversations.model

    def opened(self) -> list[ServedModel]:
        """The current model and the adapters that are in memory."""
        return [self.current, *(self._adapters.opened() if self._adapters else ())]

    def find(self, name: object) -> ServedModel:
        """The model that a request names: the current one, also without a name, or an adapter. To the agent
        of a rollout every name is the current one. Raises BadRequest for a name that is not here.
        """
        current = self.current.name
        if name is None or self._conversations.is_rollout:
            return self.current
        if not isinstance(name, str):
            raise BadRequest("model must be a text", param="model")
        own = {current, Path(current).name, current.partition(":")[2], "nano"}
        if name in own or (at_hand(name) or name) == current or name.startswith(_SENT_UNASKED):
            return self.current
        found = self._adapters.find(name) if self._adapters else None
        if found is None:
            raise BadRequest(
                f"no model {name!r:.100} here; this server answers as {current} or nano, and GET /v1/models"
                " lists its adapters",
                status=404, param="model", code="model_not_found",
            )  # fmt: skip
        self.start_engine(found.policy)
        return found

    def cards(self) -> list[dict[str, Any]]:
        """What `/v1/models` says of each, the current one first."""
        model = self.current
        policy: Any = model.policy
        base = self._adapters.base if self._adapters else None
        usual = {
            "object": "model", "created": self._started, "owned_by": "nano",
            "max_model_len": policy.context_limit, "meta": {"context_length": policy.context_limit},
        }  # fmt: skip
        card = {"id": model.name, **usual}
        if base is not None:
            card |= lineage_card(Path(locate(model.name)), base if base != model.name else None)
        card |= {
            "root": policy.id, "weight_version": policy.version,
            "profile": model.profile.name, "profile_hash": hashes(model.profile)[0],
            "template_hash": policy.template_hash,
            "gives_tokens": not isinstance(policy, EndpointPolicy) or policy.card.gives_tokens,
        }  # fmt: skip
        return [card, *({**usual, **card} for card in (self._adapters.cards() if self._adapters else ()))]

    def load_adapter(self, body: Mapping[str, Any]) -> str:
        """Load the adapter of a request of vLLM's form; its name. Raises BadRequest."""
        name, path = (body.get(key) for key in ("lora_name", "lora_path"))
        if not isinstance(name, str) or not isinstance(path, str) or name == self.current.name:
            raise BadRequest("lora_name and lora_path must be texts, the name not that of the served model")
        self._loadable().load(name, path, replace=bool(body.get("load_inplace")))
        return name

    def unload_adapter(self, body: Mapping[str, Any]) -> str:
        """As `load_adapter`."""
        name = body.get("lora_name")
        if not isinstance(name, str):
            raise BadRequest("lora_name must be a text", param="lora_name")
        self._loadable().unload(name)
        return name

    def _loadable(self) -> Adapters:
        if self._adapters is None:
            raise BadRequest("only local weights take adapters, and this server has none")
        return self._adapters

    def start_engine(self, policy: Any) -> None:
        """Start the thread that steps this policy's engine, where there is none."""
        with self._starting:
            if isinstance(policy, LocalPolicy) and policy not in self._engines:
                stopping: Future[None] = Future()
                self._engines[policy] = stopping
                threading.Thread(target=_lead, args=(policy, stopping), name="engine", daemon=True).start()

    def follow(self) -> None:
        """Answer by the model that was promoted since; what is in flight ends with the one it began with."""
        try:
            model = self._promoted() if self._promoted is not None else None
        except NanoError as problem:
            _log.warning("the promoted model is not served: %s", problem)
            model = None
        if model is not None:
            self._conversations.model = model
            self.start_engine(model.policy)
            _log.warning("serving %s from now on", model.name)
        kept = [model.policy for model in self._adapters.opened()] if self._adapters else []
        for policy in self._conversations.unused(tuple(self._engines), kept):
            self._engines.pop(policy).set_result(None)
            policy.rest()
            self._conversations.leave(policy)

    def stop(self) -> None:
        for stopping in self._engines.values():
            stopping.set_result(None)


def _lead(policy: LocalPolicy, stopping: Future[None]) -> None:
    with policy.hosted() as lead:
        lead(stopping)
