"""Text to token ids and back, keeping control tokens apart from text that only looks like them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class Encoder:
    """Encodes with private copies of a tokenizer, so that nobody else's settings can leak in.

    Control tokens are the added tokens marked special. Text is defused before it meets a template: a mark
    is put inside every spelling of a control token, and taken out again only after the control tokens of
    the template itself were found.
    """

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer` is a `tokenizers.Tokenizer` or a fast tokenizer of transformers."""
        backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
        self._parsing = _copy(backend)
        self._plain = _copy(backend)
        self._plain.encode_special_tokens = True
        added = self._parsing.get_added_tokens_decoder()
        self.control_tokens: dict[int, str] = {i: t.content for i, t in added.items() if t.special}
        self._control_ids = {text: i for i, text in self.control_tokens.items()}
        self._control = _alternatives(self._control_ids)
        self._spelling = _spelling(self._control_ids)

    def text(self, text: str) -> list[int]:
        """Ids of plain text: no control token, whatever the text spells."""
        return list(self._plain.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, control tokens included; bytes that are not UTF-8 become U+FFFD."""
        return str(self._parsing.decode(list(ids), skip_special_tokens=False))

    def defuser(self, texts: Sequence[str]) -> tuple[str, Callable[[str], str]]:
        """A mark that occurs in none of the texts, and the function that defuses a text with it."""
        everything = "".join(texts)
        # Supplementary private use: no template writes it and hardly any text holds it.
        mark = next(c for c in map(chr, range(0xF0000, 0x10FFFE)) if c not in everything)
        return mark, lambda text: self._spelling.sub(lambda m: m[0][0] + mark + m[0][1:], text)

    def rendered(self, text: str, mark: str) -> list[int]:
        """Ids of a rendered template: its control tokens parsed, those under the mark kept as text."""
        if mark not in text:
            ids = list(self._parsing.encode(text, add_special_tokens=False).ids)
            if [i for i in ids if i in self.control_tokens] == [
                self._control_ids[found] for found in self._control.findall(text)
            ]:
                return ids
        ids = []
        start = 0
        for match in self._control.finditer(text):
            ids += [*self.text(text[start : match.start()].replace(mark, "")), self._control_ids[match[0]]]
            start = match.end()
        return ids + self.text(text[start:].replace(mark, ""))


def _copy(backend: Tokenizer) -> Tokenizer:
    copy: Tokenizer = type(backend).from_str(backend.to_str())
    copy.no_truncation()
    copy.no_padding()
    return copy


def _alternatives(texts: Sequence[str] | dict[str, int]) -> re.Pattern[str]:
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _spelling(controls: dict[str, int]) -> re.Pattern[str]:
    """A control token anywhere, or the beginning of one at the end, where a template might complete it."""
    beginnings = {text[:n] for text in controls for n in range(1, len(text))}
    whole, partial = _alternatives(controls).pattern, _alternatives(dict.fromkeys(beginnings, 0)).pattern
    return re.compile(f"(?:{whole})|(?:{partial})\\Z")
