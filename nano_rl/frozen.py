"""The base of every config: frozen, and strict about what it is given."""

from pydantic import BaseModel, ConfigDict


class Config(BaseModel):
    """A frozen config that refuses unknown names and non-finite numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)
