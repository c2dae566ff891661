"""The policy of a GGUF file: a local policy whose engine is llama.cpp."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from nano_coder.agent.profiles import find_profile
from nano_coder.models.local.policy import LocalPolicy
from nano_coder.models.opening import ModelOptions, bound_template, own_profile
from nano_coder.models.weights import end_of_turn, load_tokenizer
from nano_gguf.engine import WAY_OUT, LlamaEngine
from nano_gguf.server import LlamaServer
from nano_shared.errors import UsageError
from nano_shared.files import content_hash, user_path
from nano_shared.types import Sampling

ROWS = 8
"""decoded at once; more wait"""
_KV_GIB = 1.0
"""of the KV cache, which is allocated when the file is loaded, where kv_gib is not set"""
_CONTEXT = 8192
"""tokens, where the file does not say how large a token's keys and values are"""
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""of the scalars, by their number in the GGUF specification"""
_STRING, _ARRAY = 8, 9


class GgufPolicy(LocalPolicy):
    """Its log-probs are those of the quantised weights: its id is none of the dequantised ones."""

    engine: LlamaEngine  # type: ignore[assignment]
    profile: str
    """of runs that name none"""

    @property
    def vocab_size(self) -> int:
        return self.engine.vocab_size

    def fitting(self, row: Sequence[int], sampling: Sampling) -> Sampling:
        """As that of a local policy. Raises UsageError for what llama.cpp would not sample as ours."""
        if sampling.grammar is not None or sampling.shaping is not None:
            self.check_grammar("")
        return super().fitting(row, sampling)

    def check_grammar(self, grammar: str) -> None:
        raise UsageError(f"llama.cpp runs this model here without grammars and penalties; {WAY_OUT}")


def open_gguf(name: str, options: ModelOptions) -> GgufPolicy:
    """The policy of a GGUF file under its profile. Raises UsageError for one that cannot be read, that has no
    chat template, or that llama.cpp cannot load."""
    file = user_path(name)
    if not file.is_file():
        raise UsageError(f"no such file: {file}")
    profile = find_profile(options.profile or own_profile(str(file)))
    tokenizer, own = load_tokenizer(str(file))
    template = bound_template(profile, tokenizer, own)
    ends = {tokenizer.eos_token_id, end_of_turn(tokenizer, template.source)} - {None}
    if not ends:
        raise UsageError(f"{name} has no end-of-turn token: its tokenizer.ggml.eos_token_id is not set")
    context = _context(file, options.kv_gib or _KV_GIB)
    server = LlamaServer(file, context=context, rows=ROWS, device=options.device)
    encoder = template.encoder
    engine: Any = LlamaEngine(
        server, eos_ids=frozenset(ends), rows=ROWS, plain=encoder.text("a")[-1], decode=encoder.decode
    )
    weights = (Path(tokenizer.name_or_path) / "weights_id").read_text()
    policy = GgufPolicy(engine, template, id=content_hash(["llama.cpp", weights]), scheduler="free")
    policy.profile = profile.name
    return policy


def _context(file: Path, gib: float) -> int:
    """Tokens whose keys and values, as float16, fit into so many GiB, at most those that the model reads."""
    facts = _facts(file)

    def fact(key: str) -> Any:
        return facts.get(f"{facts.get('general.architecture')}.{key}")

    layers, heads, keys = fact("block_count"), fact("attention.head_count"), fact("attention.head_count_kv")
    width, longest = fact("embedding_length"), fact("context_length")
    if not all(isinstance(each, int) and each > 0 for each in (layers, heads, width, longest)):
        return _CONTEXT
    size = fact("attention.key_length") or width // heads
    token_bytes = 2 * 2 * layers * (keys or heads) * size
    return int(max(256, min(longest, gib * 2**30 // token_bytes)))


def _facts(file: Path) -> dict[str, Any]:
    """The scalars of the file's header before those of its tokenizer, which it holds by the hundred thousand.
    What is no GGUF file has none."""
    found: dict[str, Any] = {}
    with file.open("rb") as stream:
        try:
            magic, _, _, count = struct.unpack("<4sIQQ", stream.read(24))
            for _ in range(count if magic == b"GGUF" else 0):
                key = _value(stream, _STRING)
                if key.startswith("tokenizer."):
                    break
                found[key] = _value(stream, _scalar(stream, "I"))
        except (struct.error, KeyError, UnicodeDecodeError, OverflowError, MemoryError):
            pass  # llama.cpp says what is wrong with it
    return found


def _value(stream: BinaryIO, kind: int) -> Any:
    if kind == _STRING:
        return stream.read(_scalar(stream, "Q")).decode()
    if kind == _ARRAY:
        kind, count = _scalar(stream, "I"), _scalar(stream, "Q")
        return [_value(stream, kind) for _ in range(count)]
    return _scalar(stream, _FORMATS[kind])


def _scalar(stream: BinaryIO, kind: str) -> Any:
    return struct.unpack(f"<{kind}", stream.read(struct.calcsize(f"<{kind}")))[0]
