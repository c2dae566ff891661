"""Modules of ours as the text of one program, for jails that do not show them."""

from __future__ import annotations

import base64
import functools
import importlib.util
import marshal
from pathlib import Path

_INSIDE = Path(__file__).with_name("inside")
_TEMPLATE = """\
import base64, importlib.util, marshal, sys, types
sys.modules["inside"] = package = types.ModuleType("inside")
package.__path__ = []
for name, code, text in {modules!r}:
    module = sys.modules["inside." + name] = types.ModuleType("inside." + name)
    module.__package__ = "inside"
    if importlib.util.MAGIC_NUMBER == {magic!r}:
        code = marshal.loads(base64.b64decode(code))
    else:
        code = compile(text, name, "exec")
    exec(code, vars(module))
    setattr(package, name, module)
package.{call}
"""


@functools.cache
def _bundled(modules: tuple[str, ...]) -> list[tuple[str, str, str]]:
    """Name, compiled code and text of each module."""
    bundled = []
    for name in modules:
        text = (_INSIDE / f"{name}.py").read_text(encoding="utf-8")
        code = marshal.dumps(compile(text, name, "exec", dont_inherit=True, optimize=0))
        bundled.append((name, base64.b64encode(code).decode(), text))
    return bundled


def program(call: str, *modules: str) -> str:
    """Python source that makes the modules of `inside` importable and then evaluates `call` on the package.

    `modules` stand in the order in which they import each other.
    The compiled code serves where the jail's interpreter is of our version, the text elsewhere.
    """
    return _TEMPLATE.format(
        modules=_bundled(modules), magic=importlib.util.MAGIC_NUMBER, call=call
    )
