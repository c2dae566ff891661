"""Model openers: `SCHEME:NAME` to a policy, for models that are no local weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from nano_shared.errors import ConfigError
from nano_shared.extensions import Extensions, call_extension, described, is_reference, takes
from nano_shared.policy import Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """What the user said of the model beside its name; None where nothing was said."""

    base_url: str | None = None
    api_key: str | None = None
    dtype: str = "auto"
    own_temperature: bool = False
    """whether a hosted model samples at its server's temperature"""


Opener = Callable[[str, ModelOptions], Policy]
"""NAME of `SCHEME:NAME`, and the options -> the policy"""
MODELS: Extensions[Opener] = Extensions("nano.models", check=lambda value: takes(value, "name", "options"))


def find_opener(model: str) -> Callable[[ModelOptions], Policy] | None:
    """What opens a model named `SCHEME:NAME` or `path.py:function`; None for the name of local weights.

    Raises ConfigError for an extension that cannot be loaded.
    """
    scheme, colon, name = (model, ":", "") if is_reference(model) else model.partition(":")
    if not colon or (scheme not in MODELS and not is_reference(model)):
        return None
    return partial(_open, MODELS.find(scheme), name, model)


def _open(opener: Opener, name: str, model: str, options: ModelOptions) -> Policy:
    policy = call_extension(opener, name, options, name=f"model {model}")
    if not isinstance(policy, Policy):
        raise ConfigError(
            f"model {model} is {described(policy)}, and no Policy: it needs id, version, context_limit,"
            " template_hash, complete and count"
        )
    return policy
