"""A tree of tensors and plain values on disk: safetensors beside JSON, so nothing in it can run code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor

_TENSOR, _DICT = "tensor", "dict"


def save_tree(folder: Path, name: str, tree: Any) -> None:
    """Write `NAME.json` and, for its tensors, `NAME.safetensors`. Floats come back as they were.

    A tree is made of dicts with text or integer keys, lists, tuples (which come back as lists), tensors,
    text, numbers, booleans and None. Raises TypeError for anything else, and what a full disk raises.
    """
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    plain = _split(tree, tensors)
    save_file(tensors, str(folder / f"{name}.safetensors"))
    (folder / f"{name}.json").write_text(json.dumps(plain), encoding="utf-8")


def load_tree(folder: Path, name: str) -> Any:
    """The tree that `save_tree` wrote, its tensors on the CPU."""
    from safetensors.torch import load_file

    tensors = load_file(str(folder / f"{name}.safetensors"))
    return _join(json.loads((folder / f"{name}.json").read_text(encoding="utf-8")), tensors)


def _split(tree: Any, tensors: dict[str, Tensor]) -> Any:
    """The tree as JSON: tensors become their names, dicts lists of pairs, since JSON's keys are text."""
    if isinstance(tree, Tensor):
        value = tree.detach().contiguous()
        # safetensors refuses memory that is shared, as by a weight that two parts of the tree hold
        for name, other in tensors.items():
            if value.data_ptr() == other.data_ptr() and value.numel() and value.shape == other.shape:
                return {_TENSOR: name}
        tensors[name := str(len(tensors))] = value
        return {_TENSOR: name}
    if isinstance(tree, dict):
        return {_DICT: [[key, _split(value, tensors)] for key, value in tree.items()]}
    if isinstance(tree, list | tuple):
        return [_split(value, tensors) for value in tree]
    return tree


def _join(plain: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(plain, list):
        return [_join(value, tensors) for value in plain]
    if isinstance(plain, dict):
        if _TENSOR in plain:
            return tensors[plain[_TENSOR]]
        return {key: _join(value, tensors) for key, value in plain[_DICT]}
    return plain
