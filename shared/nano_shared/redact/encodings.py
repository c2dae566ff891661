"""What a text or a file holds in another form, where secrets are looked for too; and patterns that are tried
only in texts in which RE2 finds them without their assertions."""

from __future__ import annotations

import binascii
import bz2
import gzip
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from urllib.parse import unquote

import re2

_ASSERTION = re.compile(r"\(\?<?[!=](?:[^()\[\]\\]|\\.|\[(?:[^\]\\]|\\.)*\])*\)|\\b")
_BOUND = re.compile(r"\{(\d+),\d+\}")
_REFERENCE = re.compile(r"\(\?P=\w+\)")


def loose(source: str) -> str:
    """A pattern for RE2 that matches somewhere in each text in which `source` does, and in others.

    `source` may hold no `\\s` outside of a negated set: spaces of Unicode are none to RE2.
    """
    return _BOUND.sub(r"{\1,}", _ASSERTION.sub("", _REFERENCE.sub(".", source)))


class Gated:
    """A compiled pattern, with the finds of `re` and most of RE2's speed; texts hold no lone surrogates."""

    def __init__(self, source: str, flags: int = 0, gate: str | None = None) -> None:
        self.pattern = re.compile(source, flags)
        multiline = "(?m)" if flags & re.MULTILINE else ""
        self._gate: Any = re2.compile(multiline + (loose(source) if gate is None else gate))

    def finditer(self, text: str) -> Iterator[re.Match[str]]:
        return self.pattern.finditer(text) if self._gate.search(text) else iter(())


DEEPEST = 3
"""encodings inside each other"""
_LARGEST = 256 << 20
"""bytes of a compressed file's content"""
_BASE64 = Gated(
    r"(?<![A-Za-z0-9+/_\-])[A-Za-z0-9+/_\-]{16,}(?:(?:\\[nr]|\s){1,3}[A-Za-z0-9+/_\-]{16,})*={0,2}",
    gate=r"[A-Za-z0-9+/_\-]{16}",
)
_HEX = Gated(r"(?<![A-Za-z0-9])(?:0x)?((?:[0-9A-Fa-f]{2}){12,})(?![A-Za-z0-9])")
_ESCAPED = Gated(r"(?:\\x[0-9A-Fa-f]{2}){8,}")
_PERCENT = Gated(r"(?<![A-Za-z0-9+/_.~&=\-])[A-Za-z0-9+/_.~&=\-]*(?:%[0-9A-Fa-f]{2}[A-Za-z0-9+/_.~&=\-]*)+")
_DROPPED = re.compile(r"\\[nr]|\s")


def encoded_parts(text: str) -> Iterator[tuple[tuple[int, int], str]]:
    """Spans that are text in base 64, hexadecimal, or escapes of URLs and strings, and what they say."""
    for pattern, decode in _DECODERS:
        for match in pattern.finditer(text):
            decoded = decode(match[0])
            if decoded is not None and len(decoded) >= 8:
                yield match.span(), decoded


def from_base64(text: str) -> str | None:
    """The printable text that base 64 of either alphabet says, line ends dropped; None for other bytes."""
    digits = _DROPPED.sub("", text).rstrip("=").replace("-", "+").replace("_", "/")
    if len(digits) % 4 == 1:
        return None
    return _text(binascii.a2b_base64(digits + "=" * (-len(digits) % 4)))


def _from_hex(text: str) -> str | None:
    return _text(bytes.fromhex(text.removeprefix("0x").replace("\\x", "")))


def _from_url(text: str) -> str | None:
    return unquote(text, errors="replace")


_DECODERS: tuple[tuple[Gated, Callable[[str], str | None]], ...] = (
    (_BASE64, from_base64), (_HEX, _from_hex), (_ESCAPED, _from_hex), (_PERCENT, _from_url),
)  # fmt: skip


def _text(data: bytes) -> str | None:
    """Printable text of bytes, which may be compressed or UTF-16; None for other bytes."""
    if data[:2] == b"\x1f\x8b":
        try:
            data = zlib.decompressobj(31).decompress(data, 1 << 20)
        except zlib.error:
            return None
    try:
        text = data.decode(_utf_16(data) or "utf-8")
    except UnicodeDecodeError:
        return None
    return text if text.translate(_SPACES).isprintable() else None


_SPACES = dict.fromkeys(map(ord, "\n\r\t\x00\ufeff"))


class FileForm(NamedTuple):
    """How a file's bytes are read as text, and written again."""

    text: str
    encode: Callable[[str], bytes]


def file_form(data: bytes) -> FileForm:
    """The text of a file: compressed, UTF-8, UTF-16, or else each byte as a character."""
    for magic, decompress, compress in _COMPRESSED:
        if data.startswith(magic) and (content := _decompressed(data, decompress)) is not None:
            return _inside(file_form(content), compress)
    for codec in filter(None, (_utf_16(data), "utf-8")):
        try:
            return FileForm(data.decode(codec), lambda text, codec=codec: text.encode(codec))  # type: ignore[misc]
        except UnicodeDecodeError:
            continue
    return FileForm(data.decode("latin-1"), lambda text: text.encode("latin-1"))


def _inside(form: FileForm, compress: Callable[[bytes], bytes]) -> FileForm:
    return FileForm(form.text, lambda text: compress(form.encode(text)))


def _utf_16(data: bytes) -> str | None:
    """The codec of UTF-16, which a byte order mark and the zeros of ASCII show."""
    if len(data) < 4 or len(data) % 2:
        return None
    head = data[:1024]
    for codec, mark, zeros in (("utf-16-le", b"\xff\xfe", head[1::2]), ("utf-16-be", b"\xfe\xff", head[::2])):
        share = 0.1 if data.startswith(mark) else 0.8  # a binary file may begin with a mark by chance
        if zeros.count(0) > share * len(zeros):
            return codec
    return None


def _decompressed(data: bytes, decompressor: Callable[[], object]) -> bytes | None:
    """The content of a file; None where it is none, or larger than is looked at."""
    out, left = b"", data
    try:
        while left:
            one: object = decompressor()
            out += one.decompress(left, _LARGEST - len(out) + 1)  # type: ignore[attr-defined]
            if len(out) > _LARGEST or not one.eof:  # type: ignore[attr-defined]
                return None
            left = one.unused_data.lstrip(b"\0")  # type: ignore[attr-defined]
    except (zlib.error, OSError, lzma.LZMAError, EOFError):
        return None
    return out


_COMPRESSED: tuple[tuple[bytes, Callable[[], object], Callable[[bytes], bytes]], ...] = (
    (b"\x1f\x8b", lambda: zlib.decompressobj(31), lambda data: gzip.compress(data, mtime=0)),
    (b"BZh", bz2.BZ2Decompressor, bz2.compress),
    (b"\xfd7zXZ\0", lzma.LZMADecompressor, lzma.compress),
)
