"""Shapes of models that are planned for before they are fetched."""

from __future__ import annotations

import re
from typing import Any

from nano_coder.models.catalogue import catalogue

_QWEN = re.compile(r"Qwen/Qwen2\.5-(?:Coder-)?([\d.]+B)(?:-Instruct)?(?:-GGUF)?", re.IGNORECASE)
_QWEN_SHAPES = {
    "0.5B": (896, 24, 14, 2, 4864), "1.5B": (1536, 28, 12, 2, 8960), "3B": (2048, 36, 16, 2, 11008),
    "7B": (3584, 28, 28, 4, 18944), "14B": (5120, 48, 40, 8, 13824), "32B": (5120, 64, 40, 8, 27648),
}  # fmt: skip
"""size -> hidden, layers, heads, heads of keys and values, intermediate"""


def known_shape(name: str) -> Any:
    """The configuration of a model of the catalogue, or of a hub id, whose shape is known; else None."""
    entry = catalogue().get(name)
    match = _QWEN.fullmatch(entry.hub if entry else name)
    shape = _QWEN_SHAPES.get(match[1].upper()) if match else None
    if shape is None:
        return None
    from transformers import Qwen2Config

    hidden, layers, heads, keys, inside = shape
    small = hidden < 3000
    return Qwen2Config(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=keys,
        intermediate_size=inside, vocab_size=151_936 if small else 152_064, tie_word_embeddings=small,
        max_position_embeddings=32_768,
    )  # fmt: skip
