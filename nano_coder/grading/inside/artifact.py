"""The artifact inside its jail: writes its files, and imports it as a module."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import types
from typing import Any

ROOT = "/work"


def write_files(root: str, files: dict[str, str]) -> None:
    """Write texts by path; a surrogate stands for a byte that is not UTF-8."""
    for path, text in files.items():
        place = os.path.join(root, path)
        os.makedirs(os.path.dirname(place), exist_ok=True)
        with open(place, "w", encoding="utf-8", errors="surrogateescape", newline="") as file:
            file.write(text)


def module_name(root: str, target: str) -> str:
    """The name under which tests import the target; appends its folder to sys.path."""
    parts = target.removesuffix(".py").split("/")
    folder = root
    while len(parts) > 1 and not os.path.exists(os.path.join(folder, parts[0], "__init__.py")):
        folder = os.path.join(folder, parts.pop(0))
    sys.path += [place for place in dict.fromkeys((folder, root)) if place not in sys.path]
    return ".".join(parts)


def load(root: str, target: str) -> types.ModuleType:
    """Import the target from its file, even if another module has its name."""
    name = module_name(root, target)
    if "." in name:
        importlib.import_module(name.rpartition(".")[0])
    spec: Any = importlib.util.spec_from_file_location(name, os.path.join(root, target))
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(name, module)
    spec.loader.exec_module(module)
    return module
