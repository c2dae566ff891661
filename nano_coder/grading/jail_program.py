"""Bundles modules of `inside` into the text of one program, since jails do not contain them."""

from __future__ import annotations

import base64
import functools
import importlib.util
import marshal
import zlib
from pathlib import Path

_INSIDE = Path(__file__).with_name("inside")
_TEMPLATE = """\
import base64, importlib.util, marshal, sys, types, zlib
sys.modules["inside"] = package = types.ModuleType("inside")
package.__path__ = []
same = importlib.util.MAGIC_NUMBER == {magic!r}
for name, code, text in {modules!r}:
    module = sys.modules["inside." + name] = types.ModuleType("inside." + name)
    module.__package__ = "inside"
    packed = zlib.decompress(base64.b64decode(code if same else text))
    exec(marshal.loads(packed) if same else compile(packed, name, "exec"), vars(module))
    setattr(package, name, module)
package.{call}
"""


def program(call: str, *modules: str) -> str:
    """Python source that makes the modules of `inside` importable and then evaluates `call` on the package.

    `modules` are in import order. Compiled code is used if the jail's interpreter has our version, else the
    source. The program fits into one command-line argument.
    """
    bundled = [(name, *_packed(name)) for name in modules]
    return _TEMPLATE.format(modules=bundled, magic=importlib.util.MAGIC_NUMBER, call=call)


@functools.cache
def _packed(name: str) -> tuple[str, str]:
    """A module's compiled code and its text, compressed."""
    text = (_INSIDE / f"{name}.py").read_bytes()
    code = marshal.dumps(compile(text, f"inside/{name}.py", "exec", dont_inherit=True, optimize=0))
    return (
        base64.b64encode(zlib.compress(code, 9)).decode(),
        base64.b64encode(zlib.compress(text, 9)).decode(),
    )
