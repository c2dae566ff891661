"""One name, one meaning: no class and no type alias is defined twice in the three packages."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("nano_coder", "nano_rl", "shared/nano_shared")

ALLOWED: dict[str, str] = {}
"""name -> why it may be defined more than once"""


def defined_names(source: str) -> list[str]:
    """Names of the classes and type aliases at the top of a module.

    An alias is an assignment to a name in CamelCase; constants are in capitals.
    """
    names = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            names.append(node.name)
        target = (
            node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        )  # an alias has one target
        if isinstance(target, ast.Name) and _is_camel_case(target.id):
            names.append(target.id)
    return names


def _is_camel_case(name: str) -> bool:
    bare = name.lstrip("_")
    return len(bare) > 1 and bare[0].isupper() and not bare.isupper() and "_" not in bare


def test_a_name_has_one_meaning() -> None:
    places = defaultdict(list)
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for name in defined_names(path.read_text(encoding="utf-8")):
                places[name].append(str(path.relative_to(ROOT)))
    twice = {name: found for name, found in places.items() if len(found) > 1 and name not in ALLOWED}
    listed = "\n".join(f"{name}: {', '.join(found)}" for name, found in sorted(twice.items()))
    assert not twice, f"defined more than once; rename all but one:\n{listed}"
    outdated = [name for name in ALLOWED if len(places[name]) < 2]
    assert not outdated, f"no longer defined twice; remove from ALLOWED: {outdated}"


def test_classes_and_aliases_are_found() -> None:
    source = (
        "A_CONSTANT = 1\nRow = dict[str, int]\nclass Slot: ...\nKind: type = int\nT = TypeVar('T')\nlow = 1\n"
    )
    assert defined_names(source) == ["Row", "Slot", "Kind"]
