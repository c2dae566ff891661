"""A server's description of a model at `GET /models`: context, and whether it returns token ids."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from nano_coder.agent.profiles import PROFILES
from nano_shared.checkpoint import MANIFEST, Manifest, read_checkpoint
from nano_shared.errors import NanoError

OWNER = "nano"
"""`owned_by` of our own server's models"""
RUN_HEADER = "X-Nano-Run"
"""header of a request whose answer a run logs: the run's id"""
_GIVING = (OWNER, "vllm")
"""owners whose servers know `return_token_ids`"""
_MOST_BYTES = 4 << 20
_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """The default describes a server that reports nothing."""

    id: str = ""
    ours: bool = False
    """whether `nano-coder serve` answers: roles as they are, sessions, log-probs at the temperature"""
    gives_tokens: bool = False
    """whether ids and log-probs may be asked for"""
    context_limit: int | None = None
    profile: str | None = None
    """a profile of this nano, under which the server's prompts are those of the policy itself"""
    template_hash: str | None = None
    policy_id: str | None = None
    version: int = 0
    root: str = ""
    """folder of the weights on the server, or what it names in its place"""
    content: str | None = None
    """`folder_content` of an adapter as it was opened"""


def read_cards(base_url: str, api_key: str | None) -> list[ModelCard]:
    """The models of a server; none if it does not list them within five seconds."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        answer = json.loads(_get(f"{base_url.rstrip('/')}/models", headers))
        listed = answer["data"]
        return [_card(card) for card in listed if isinstance(card, dict) and isinstance(card.get("id"), str)]
    except (httpx.HTTPError, httpx.InvalidURL, LookupError, TypeError, ValueError, RecursionError):
        return []


def run_headers(run: str | None) -> dict[str, str]:
    """What tells our own server which run logs its answer: one that is open in the server's log is not
    logged a second time."""
    return {RUN_HEADER: run} if run and run.isascii() and run.isprintable() else {}


def card_of(model: str, cards: list[ModelCard]) -> ModelCard:
    """The card of that model; our own server's only one answers to any name."""
    only = cards[0] if len(cards) == 1 and cards[0].ours else ModelCard()
    return next((card for card in cards if card.id == model), only)


def _get(url: str, headers: Mapping[str, str]) -> bytes:
    until, data = time.monotonic() + _SECONDS, b""
    with httpx.stream("GET", url, headers=headers, timeout=_SECONDS) as response:
        response.raise_for_status()
        for part in response.iter_bytes():
            data += part
            if len(data) > _MOST_BYTES or time.monotonic() > until:
                raise ValueError("no list of models")
    return data


def _card(card: Mapping[str, Any]) -> ModelCard:
    length, version = card.get("max_model_len"), card.get("weight_version")
    limit = length if isinstance(length, int) and length > 0 else None
    owner, root = card.get("owned_by"), card.get("root")
    claimed = ModelCard(
        id=card["id"], gives_tokens=owner in _GIVING, context_limit=limit, root=_text(root) or ""
    )
    if owner != OWNER:
        return _of_checkpoint(root, claimed) if claimed.gives_tokens and isinstance(root, str) else claimed
    return ModelCard(
        id=claimed.id, ours=True, gives_tokens=card.get("gives_tokens") is not False, context_limit=limit,
        profile=_known(card.get("profile"), card.get("profile_hash")),
        template_hash=_text(card.get("template_hash")), policy_id=_text(root), root=claimed.root,
        content=_text(card.get("content")),
        version=version if isinstance(version, int) and version >= 0 else 0,
    )  # fmt: skip


def _of_checkpoint(root: str, claimed: ModelCard) -> ModelCard:
    """The card with what the manifest says, where another server's model is a checkpoint of this machine."""
    from nano_coder.models.weights import policy_id

    try:
        manifest: Manifest | None = read_checkpoint(Path(root)) if (Path(root) / MANIFEST).is_file() else None
        if manifest is None:
            return claimed
        weights = policy_id(root)
    except (NanoError, OSError, ValueError):
        return claimed
    return ModelCard(
        id=claimed.id, gives_tokens=True, context_limit=claimed.context_limit, root=root,
        profile=_known(manifest.profile, manifest.profile_hash), template_hash=manifest.template_hash,
        policy_id=weights, version=manifest.policy_version,
    )  # fmt: skip


def _known(name: Any, profile_hash: Any) -> str | None:
    """The profile for a client of that name, if this nano has the same one; None for one of APIs.

    A native profile's tools are described in the system message: a server does not show them otherwise.
    """
    if not isinstance(name, str) or name not in PROFILES:
        return None
    profile = PROFILES.find(name)
    if profile.hash != profile_hash or profile.dialect == "api":
        return None
    return profile.describing or profile.name


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None
