"""What a text or a file holds in another form, where secrets are looked for too."""

from __future__ import annotations

import binascii
import bz2
import gzip
import io
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote

import re2

DEEPEST = 3
"""encodings inside each other"""
_LARGEST = 256 << 20
"""bytes of a compressed file's content"""
_ENCODED = re2.compile(
    r"(?P<base64>[A-Za-z0-9+/_\-]{16,}(?:(?:\\[nr]|\s){1,3}[A-Za-z0-9+/_\-]{16,})*={0,2})"
    r"|(?P<hex>(?:\\x[0-9A-Fa-f]{2}){8,})|(?P<percent>[A-Za-z0-9+/_.~&=\-]*(?:%[0-9A-Fa-f]{2}[A-Za-z0-9+/_.~&=\-]*)+)"
)
_HEX = re.compile(r"(?:0x)?((?:[0-9A-Fa-f]{2}){12,})")
_DROPPED = re.compile(r"\\[nr]|\s")


def encoded_parts(text: str) -> Iterator[tuple[tuple[int, int], str]]:
    """Spans that are text in base 64, hexadecimal, or escapes of URLs and strings, and what they say."""
    for match in _ENCODED.finditer(text):
        if match["percent"] is not None:
            decoded: str | None = unquote(match[0], errors="replace")
        elif match["hex"] is not None or _HEX.fullmatch(match[0]):
            decoded = _text(bytes.fromhex(match[0].removeprefix("0x").replace("\\x", "")))
        else:
            decoded = from_base64(match[0])
        if decoded is not None and len(decoded) >= 8:
            yield match.span(), decoded


def from_base64(text: str) -> str | None:
    """The printable text that base 64 of either alphabet says, line ends dropped; None for other bytes."""
    digits = _DROPPED.sub("", text).rstrip("=").replace("-", "+").replace("_", "/")
    if len(digits) % 4 == 1:
        return None
    try:
        return _text(binascii.a2b_base64(digits + "=" * (-len(digits) % 4), strict_mode=True))
    except binascii.Error:  # other characters among them
        return None


_SPACES = dict.fromkeys(map(ord, "\n\r\t\x00\ufeff"))


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


_COMPRESSED: tuple[tuple[bytes, Any, Callable[[bytes], bytes]], ...] = (
    (b"\x1f\x8b", lambda file: gzip.GzipFile(fileobj=file), lambda data: gzip.compress(data, mtime=0)),
    (b"BZh", bz2.BZ2File, bz2.compress),
    (b"\xfd7zXZ\0", lzma.LZMAFile, lzma.compress),
)
Encode = Callable[[str], bytes]


def file_form(data: bytes) -> tuple[str, Encode]:
    """The text of a file (compressed, UTF-8, UTF-16, or bytes as characters), and how it is written."""
    for magic, opened, compress in _COMPRESSED:
        if data.startswith(magic) and (content := _decompressed(data, opened)) is not None:
            return _inside(*file_form(content), compress)
    for codec in filter(None, (_utf_16(data), "utf-8")):
        try:
            return data.decode(codec), lambda text, codec=codec: text.encode(codec)
        except UnicodeDecodeError:
            continue
    return data.decode("latin-1"), lambda text: text.encode("latin-1")


def _inside(text: str, encode: Encode, compress: Callable[[bytes], bytes]) -> tuple[str, Encode]:
    return text, lambda changed: compress(encode(changed))


def _decompressed(data: bytes, opened: Any) -> bytes | None:
    """The content of a file; None where it is none, or larger than is looked at."""
    try:
        content: bytes = opened(io.BytesIO(data)).read(_LARGEST + 1)
    except (zlib.error, OSError, lzma.LZMAError, EOFError):
        return None
    return content if len(content) <= _LARGEST else None


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
