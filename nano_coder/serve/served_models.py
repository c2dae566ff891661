"""Served models: the one that is served now, its adapters, and the threads that step their engines.

Adapters stand on the base weights that they share. Each has an engine of its own, by its content: two names
of equal files are one engine, and a name whose files have changed gets another, so that no KV outlives the
weights that it was computed with.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from nano_coder.models.endpoint.policy import EndpointPolicy
from nano_coder.models.local.policy import LocalPolicy
from nano_coder.models.opening import at_hand, locate
from nano_coder.serve.conversations import Conversations
from nano_coder.serve.request import BadRequest
from nano_coder.serve.served_model import ServedModel
from nano_coder.verify.trainable import hashes
from nano_shared.checkpoint import (
    MANIFEST,
    checkpoint_names,
    checkpoints_dir,
    folder_content,
    read_checkpoint,
)
from nano_shared.errors import CheckpointError, NanoError, UsageError
from nano_shared.files import user_path

_log = logging.getLogger("nano_coder.serve")
_SENT_UNASKED = ("claude-", "gpt-")
"""how names begin that Claude Code and Codex send for small work of their own"""
MOST_OPENED = 8
"""checkpoints that requests have named and that stay opened; the one named longest ago is closed first"""
MOST_LOADED = 64
"""adapters that load_lora_adapter has named"""
_LONGEST_NAME = 200


class Adapters:
    """A server's adapters by name: checkpoints of this machine, and those that were loaded. Thread-safe."""

    def __init__(
        self, base: str, stands_on: Callable[[Path], str | None], open: Callable[[Path], ServedModel]
    ) -> None:
        """`stands_on` names the base of an adapter's folder, None for a folder of another kind; `open` opens
        one over the base `base`. It raises NanoError."""
        self.base = base
        self._stands_on = stands_on
        self._open = open
        self._lock = threading.Lock()
        self._loaded: dict[str, tuple[Path, str]] = {}
        """name -> folder and content"""
        self._opened: OrderedDict[str, ServedModel] = OrderedDict()
        """by content"""
        self._hashed: dict[Path, tuple[list[object], str]] = {}
        """content of folders, with sizes and times of the files that were read"""

    def find(self, name: str) -> ServedModel | None:
        """The adapter of that name; None if neither a loaded adapter nor a checkpoint has it.

        Raises BadRequest for a checkpoint that stands on another base or cannot be opened.
        """
        with self._lock:
            if name in self._loaded:
                return self._opened[self._loaded[name][1]]
            if name not in checkpoint_names():
                return None
            folder = checkpoints_dir() / name
            self._refuse(folder, name)
            return self._at(folder, self._content(folder))

    def load(self, name: str, path: str, *, replace: bool = False) -> None:
        """Open an adapter under a name. Raises BadRequest."""
        folder = user_path(path)
        if not 0 < len(name) <= _LONGEST_NAME:
            raise BadRequest(f"lora_name must have 1 to {_LONGEST_NAME} characters", param="lora_name")
        with self._lock:
            if name in self._loaded and not replace:
                raise BadRequest(
                    f"the adapter {name!r} is loaded; unload it first, or send load_inplace",
                    param="lora_name",
                )
            if len(self._loaded) >= MOST_LOADED and name not in self._loaded:
                raise BadRequest(f"{MOST_LOADED} adapters are loaded; unload one first", param="lora_name")
            self._refuse(folder, str(path))
            content = self._content(folder)
            self._at(folder, content)
            _, replaced = self._loaded.get(name, (folder, content))
            self._loaded[name] = (folder, content)
            self._close(replaced)
            self._close_unnamed()

    def unload(self, name: str) -> None:
        """Forget a name, and close the adapter; requests in flight finish. Raises BadRequest."""
        with self._lock:
            unloaded = self._loaded.pop(name, None)
            if unloaded is None:
                known = ", ".join(sorted(self._loaded)) or "none"
                raise BadRequest(
                    f"no adapter {name!r:.200} is loaded; loaded: {known}", status=404, param="lora_name",
                    code="model_not_found",
                )  # fmt: skip
            self._close(unloaded[1])

    def cards(self) -> Iterator[dict[str, Any]]:
        with self._lock:
            named: dict[str, tuple[Path, str | None]] = dict(self._loaded)
        for name in checkpoint_names():
            if self._stands_on(checkpoints_dir() / name) == self.base:
                named.setdefault(name, (checkpoints_dir() / name, None))
        for name, (folder, content) in named.items():
            card = {"id": name, "root": str(folder), **_manifest_card(folder, self.base)}
            yield card | ({"content": content} if content else {})

    def opened(self) -> list[ServedModel]:
        with self._lock:
            return list(self._opened.values())

    def _refuse(self, folder: Path, name: str) -> None:
        try:
            base = self._stands_on(folder)
        except NanoError as problem:
            raise BadRequest(str(problem), param="model") from None
        if base is None:
            raise BadRequest(
                f"{name!r:.200} is no adapter: its folder holds no adapter_config.json", param="model"
            )
        if base != self.base:
            raise BadRequest(
                f"{name!r:.200} stands on {base}, and this server holds {self.base}; start another server",
                param="model",
            )

    def _content(self, folder: Path) -> str:
        """Hash of an adapter's files; its manifest, which holds its name and date, does not count."""
        try:
            files = sorted(file for file in folder.iterdir() if file.is_file() and file.name != MANIFEST)
            times = [(file.name, (at := file.stat()).st_size, at.st_mtime_ns, at.st_ino) for file in files]
            if self._hashed.get(folder, ([], ""))[0] != times:
                self._hashed[folder] = ([*times], folder_content(folder))
        except OSError as problem:
            raise BadRequest(f"{folder} cannot be read: {problem.strerror}", param="model") from None
        return self._hashed[folder][1]

    def _at(self, folder: Path, content: str) -> ServedModel:
        if content not in self._opened:
            try:
                self._opened[content] = self._open(folder)
            except UsageError as problem:
                raise BadRequest(str(problem), param="model") from None
        self._opened.move_to_end(content)
        model = self._opened[content]
        self._close_unnamed()
        return model

    def _close(self, content: str) -> None:
        """Close an adapter unless a name is left for it."""
        if content not in {named for _, named in self._loaded.values()}:
            self._opened.pop(content, None)

    def _close_unnamed(self) -> None:
        named = {content for _, content in self._loaded.values()}
        surplus = [content for content in self._opened if content not in named][:-MOST_OPENED]
        for content in surplus:
            del self._opened[content]


def _manifest_card(folder: Path, base: str | None) -> dict[str, Any]:
    """The card's fields that a manifest knows: parent, version and times."""
    try:
        manifest = read_checkpoint(folder, verify=False) if (folder / MANIFEST).is_file() else None
    except (CheckpointError, OSError):
        manifest = None
    if manifest is None:
        return {"parent": base}
    return {
        "parent": manifest.parent or manifest.base_model, "weight_version": manifest.policy_version,
        "created": int(manifest.created), "profile": manifest.profile,
    }  # fmt: skip


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
        model = self.current
        policy: Any = model.policy
        base = self._adapters.base if self._adapters else None
        usual = {
            "object": "model", "created": self._started, "owned_by": "nano",
            "max_model_len": policy.context_limit, "meta": {"context_length": policy.context_limit},
        }  # fmt: skip
        card = {"id": model.name, **usual}
        if base is not None:
            card |= _manifest_card(Path(locate(model.name)), base if base != model.name else None)
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
