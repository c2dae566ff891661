"""Settings of plug-ins: the table `[NAME]` of a configuration is checked by what registers NAME in
`nano.settings`.

A layer's table is as trusted as its file: a plug-in has no say in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, Field, create_model

from nano_shared.errors import ConfigError, UsageError
from nano_shared.extensions import PLUGINS, Extensions, call_extension, missing_plugin

M = TypeVar("M", bound=BaseModel)


def _checked_hosts(value: str) -> str:
    from nano_coder.sandbox.protocol import allowed_hosts

    try:
        allowed_hosts(value)
    except UsageError:
        raise ValueError("say none, or allow=HOST,... with names such as api.example.org") from None
    return value


HostsSetting = Annotated[str, AfterValidator(_checked_hosts)]
"""none, or allow=HOST,..."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectTable:
    """A file of a project that holds settings of a plug-in. It is not read before the user trusts it."""

    file: str
    """its name, as .mcp.json"""
    brings: str
    """what it holds, as a plural"""
    read: Callable[[Path, bytes], dict[str, Any]]
    """the values of the table, tables by name. Raises ConfigError, which names the path"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsTable:
    """The settings of a plug-in, and how the core handles them. Values are plain, as TOML holds them."""

    model: type[BaseModel]
    """frozen, with a default for each setting; it forbids what it does not know"""
    joined: Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]] = lambda below, above: below | above
    """the table of a layer over that of those below"""
    masked: Callable[[Any, str | None], BaseModel] = lambda settings, mark: settings
    """the settings as they are shown: a mark for each secret, or with None nothing"""
    project: ProjectTable | None = None

    def over(self, below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
        return dict(call_extension(self.joined, below, above, name="settings of a plug-in"))

    def shown(self, settings: object, mark: str | None) -> BaseModel:
        masked: BaseModel = call_extension(self.masked, settings, mark, name="settings of a plug-in")
        return masked

    def in_project(self, path: Path, content: bytes) -> dict[str, Any]:
        """The values of the project's file. Raises ConfigError."""
        assert self.project is not None
        return dict(call_extension(self.project.read, path, content, name=str(path)))


TABLES: Extensions[SettingsTable] = Extensions("nano.settings", SettingsTable)


def with_tables(name: str, kind: type[M]) -> type[M]:
    """The model of a configuration with the tables of the installed plug-ins.

    Raises ConfigError for a plug-in that cannot be loaded, and for a table that has the name of a setting.
    """
    if clash := [table for table in TABLES if table in kind.model_fields]:
        raise ConfigError(
            f"{TABLES.source(clash[0])}: {clash[0]} is a setting of nano; name the table otherwise"
        )
    fields: dict[str, Any] = {
        key: (table.model, Field(table.model(), description=table.model.__doc__))
        for key, table in TABLES.items()
    }
    return create_model(name, __base__=kind, __module__=kind.__module__, __doc__=kind.__doc__, **fields)


def settings_of(config: BaseModel, table: str, kind: type[M]) -> M:
    """The settings of a plug-in in a configuration."""
    found = getattr(config, table)
    assert isinstance(found, kind)
    return found


def missing_table(name: str) -> str | None:
    """About a setting of our plug-in that is not installed."""
    table = name.partition(".")[0]
    plugin = PLUGINS[TABLES.group].get(table)
    return str(missing_plugin(f"[{table}]", plugin)) if plugin and table not in TABLES else None
