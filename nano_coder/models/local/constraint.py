"""Constrained decoding: which tokens a grammar allows next, computed by llguidance."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nano_shared.errors import ConfigError, PolicyError, UsageError

if TYPE_CHECKING:
    from torch import Tensor

MISSING = "llguidance is missing, which constrains what is sampled; pip install 'nano-rl-coder[constrained]'"


class Grammars:
    """Compiles grammars over one tokenizer. Thread-safe."""

    def __init__(self, tokenizer: str, eos_ids: Sequence[int], vocab_size: int) -> None:
        """`tokenizer` is the content of a tokenizer.json; `eos_ids` end a text that the grammar accepts."""
        self._tokenizer, self._eos_ids, self._vocab_size = tokenizer, sorted(eos_ids), vocab_size
        self._lock = threading.Lock()
        self._vocabulary: Any = None

    def constraint(self, grammar: str) -> Constraint:
        """The state of a new text. Raises UsageError for a grammar that cannot be compiled, and ConfigError
        without llguidance."""
        try:
            from llguidance import LLMatcher, LLTokenizer
        except ModuleNotFoundError:
            raise ConfigError(MISSING) from None
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = LLTokenizer(
                    self._tokenizer, n_vocab=self._vocab_size, eos_token=self._eos_ids
                )
        matcher = LLMatcher(self._vocabulary, grammar, log_level=0)
        if matcher.is_error():
            raise UsageError(f"the grammar cannot be compiled: {matcher.get_error()}")
        return Constraint(matcher, self._eos_ids, self._vocab_size)


class Constraint:
    """The grammar's state after the tokens sampled so far, for one row."""

    def __init__(self, matcher: Any, eos_ids: Sequence[int], vocab_size: int) -> None:
        from llguidance.numpy import allocate_token_bitmask

        self._matcher, self._eos_ids = matcher, eos_ids
        self._bits = allocate_token_bitmask(1, vocab_size)

    def allowed(self, vocab_size: int) -> Tensor:
        """[V] bool: tokens that may come next; only those that end the text once the matcher has failed."""
        import numpy as np
        import torch
        from llguidance.numpy import fill_next_token_bitmask

        allowed = np.zeros(vocab_size, dtype=bool)
        if not self._matcher.is_error():
            fill_next_token_bitmask(self._matcher, self._bits)
        if self._matcher.is_error():
            allowed[self._eos_ids] = True
        else:
            bits = np.unpackbits(self._bits.view(np.uint8), bitorder="little")[:vocab_size]
            allowed[: len(bits)] = bits
        return torch.from_numpy(allowed)

    def take(self, token: int) -> None:
        """Advance by a sampled token."""
        if token not in self._eos_ids:
            self._matcher.consume_token(token)

    def check(self) -> None:
        """Raises PolicyError if the grammar has become too complex for the text, which then breaks it."""
        if self._matcher.is_error():
            raise PolicyError(f"the grammar could not be followed: {self._matcher.get_error():.300}")
