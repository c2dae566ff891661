"""Doctests of files that an agent changed: the code is its work, the examples are the check."""

from __future__ import annotations

import ast
import doctest
from collections.abc import Iterator

from nano_shared.syntax import parse

_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_Edit = tuple[int, int, bytes]
"""start byte, end byte, replacement"""


def with_original_examples(original: bytes, changed: bytes, *, code: bool) -> bytes | None:
    """`changed` with the examples that it lost put back; None if every example of `original` is still there.

    In `code`, examples are those of the docstrings that doctest finds; any other file is one text.
    """
    if not code:
        return None if _kept(_text(original), _text(changed)) else original
    try:
        old, new = _documented(parse(original)), _documented(parse(changed))
    except (SyntaxError, ValueError, RecursionError):
        return None  # the file cannot be run
    lost = {
        name: doc for name, (_, doc) in old.items() if not _kept(doc, new[name][1] if name in new else "")
    }
    if not lost:
        return None
    lines = changed.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    edits = [_edit(new[name][0], doc, changed, starts) for name, doc in lost.items() if name in new]
    for first, end, text in sorted(edits, reverse=True):
        changed = changed[:first] + text + changed[end:]
    removed = [doc for name, doc in lost.items() if name not in new]
    more = (f"\n\n\ndef _examples_{n}():\n    {doc!r}\n" for n, doc in enumerate(removed))
    return changed + "".join(more).encode("utf-8", "backslashreplace")


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _kept(original: str, changed: str) -> bool:
    """Whether the examples of one text occur in the other in the same order, with anything between them."""
    rest = iter(_examples(changed))
    return all(example in rest for example in _examples(original))


def _examples(text: str) -> list[tuple[str, str, str]]:
    try:
        found = doctest.DocTestParser().get_examples(text)
    except ValueError:
        return [(text, "", "")]
    return [(e.source, e.want, repr((e.exc_msg, sorted(e.options.items())))) for e in found]


def _documented(tree: ast.Module) -> dict[str, tuple[_Documented, str]]:
    """Name -> the definition with that name and its docstring; the last definition counts."""
    return {name: (node, ast.get_docstring(node, clean=False) or "") for name, node in _walk(tree, "")}


def _walk(node: _Documented, name: str) -> Iterator[tuple[str, _Documented]]:
    yield name, node
    for child in node.body if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else ():
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _walk(child, f"{name}.{child.name}")


def _edit(node: _Documented, doc: str, source: bytes, starts: list[int]) -> _Edit:
    """The edit that gives a definition this docstring."""
    text = ascii(doc).encode()
    first = node.body[0] if node.body else None
    if first is None:
        return 0, 0, text + b"\n"
    begin = starts[first.lineno - 1] + first.col_offset
    assert first.end_lineno is not None
    assert first.end_col_offset is not None
    if ast.get_docstring(node, clean=False) is not None:
        return begin, starts[first.end_lineno - 1] + first.end_col_offset, text
    line = source[starts[first.lineno - 1] : begin]
    if isinstance(first, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and first.decorator_list:
        begin = starts[first.decorator_list[0].lineno - 1] + len(line)
    return begin, begin, text + (b"\n" + line if not line.strip() else b"; ")
