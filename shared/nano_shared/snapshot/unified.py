"""Unified diffs between two snapshots, as `git apply` accepts them."""

from __future__ import annotations

import base64
import hashlib
import re
import string
import zlib
from collections import Counter
from collections.abc import Iterator
from difflib import SequenceMatcher

from nano_shared.blobs import BlobStore
from nano_shared.snapshot.tree import Entry, EntryKind, Snapshot, differing_paths, load, worth_naming

_CONTEXT = 3
_MAX_BYTES, _MAX_PATCHES = 2**20, 2**24
# pairs of equal lines that the matcher may visit; beyond that, the changed region is replaced as a whole
_MAX_PAIRS = 1_000_000
_HASH_DIGITS = 7
_LINE, _LENGTHS = 52, string.ascii_uppercase + string.ascii_lowercase
_FILE_TYPE, _LINK_MODE = 0o100000, 0o120000
_PLAIN_NAME = re.compile(r'[^\x00-\x1f"\\\x7f\ud800-\udfff]+')


def diff(before: str | Snapshot, after: str | Snapshot, blobs: BlobStore, *, whole: bool = False) -> str:
    """Git-style unified diff; empty if nothing differs.

    Binary files, files that are no UTF-8 and files over 1 MiB are named without contents, and so is
    everything after 16 MiB of patches; `whole` gives them as git's binary patches, which `git apply` takes.
    Git has no entries for directories: empty ones and changed modes of directories are `#` lines at
    the top, which `git apply` ignores.
    """
    old, new = load(before, blobs), load(after, blobs)
    paths = differing_paths(old, new)
    notes: list[str] = []
    for path in worth_naming(old, new, paths):
        notes.extend(_directory_note(path, old.by_path.get(path), new.by_path.get(path)))
    patches: list[str] = []
    room = None if whole else _MAX_PATCHES
    for path in paths:
        patches.append(_patch(_not_directory(old, path), _not_directory(new, path), blobs, room))
        if room is None:
            continue
        room -= len(patches[-1])
    return "".join(notes) + "".join(patches)


def _not_directory(snapshot: Snapshot, path: str) -> Entry | None:
    entry = snapshot.by_path.get(path)
    return None if entry is None or entry.kind is EntryKind.DIRECTORY else entry


def _directory_note(path: str, old: Entry | None, new: Entry | None) -> Iterator[str]:
    was = old is not None and old.kind is EntryKind.DIRECTORY
    is_now = new is not None and new.kind is EntryKind.DIRECTORY
    if old and new and was and is_now:
        yield f"# directory mode {old.mode:o} -> {new.mode:o}: {_quoted(path)}\n"
    elif was and new is None:
        yield f"# directory removed: {_quoted(path)}\n"
    elif is_now and old is None:
        yield f"# directory created: {_quoted(path)}\n"


def _patch(old: Entry | None, new: Entry | None, blobs: BlobStore, room: int | None) -> str:
    """The patch of one path. `room`: characters that are left; None for a patch with all contents."""
    if old and new and old.kind is not new.kind:
        return _patch(old, None, blobs, room) + _patch(None, new, blobs, room)
    known = old or new
    if known is None:
        return ""
    left, right = _quoted(f"a/{known.path}"), _quoted(f"b/{known.path}")
    header = f"diff --git {left} {right}\n" + _mode_lines(old, new)
    if old and new and old.content == new.content:
        return header
    data = _data(old, blobs), _data(new, blobs)
    texts = _text(data[0]), _text(data[1])
    binary = None in texts or max(map(len, data)) > _MAX_BYTES
    digits = 40 if binary and room is None else _HASH_DIGITS
    header += f"index {_git_hash(old, data[0], digits)}..{_git_hash(new, data[1], digits)}"
    header += f" {_mode(new):06o}\n" if old and new and old.mode == new.mode else "\n"
    if binary and room is None:
        return f"{header}GIT binary patch\n{_literal(data[1])}\n{_literal(data[0])}\n"
    left, right = left if old else "/dev/null", right if new else "/dev/null"
    if texts[0] is None or texts[1] is None:
        return header + f"Binary files {left} and {right} differ\n"
    if binary or (room is not None and max(map(len, data)) > room):
        return header + f"Large files {left} and {right} differ ({len(data[0])} and {len(data[1])} bytes)\n"
    hunks = "".join(_hunks(texts[0], texts[1]))
    names = f"--- {_ended(left)}\n+++ {_ended(right)}\n"
    return header + (names + hunks if hunks else "")


def _mode_lines(old: Entry | None, new: Entry | None) -> str:
    if old and new:
        return "" if old.mode == new.mode else f"old mode {_mode(old):06o}\nnew mode {_mode(new):06o}\n"
    if new:
        return f"new file mode {_mode(new):06o}\n"
    return f"deleted file mode {_mode(old):06o}\n" if old else ""


def _mode(entry: Entry) -> int:
    return _LINK_MODE if entry.kind is EntryKind.SYMLINK else _FILE_TYPE | entry.mode


def _git_hash(entry: Entry | None, data: bytes, digits: int) -> str:
    """Git's hash of the content, which git compares with the file before it applies a binary patch."""
    if entry is None:
        return "0" * digits
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()[:digits]


def _literal(data: bytes) -> str:
    """A content as git's binary patches hold it: deflated, in lines of 52 bytes behind a letter for their
    number."""
    packed = zlib.compress(data)
    lines = [packed[at : at + _LINE] for at in range(0, len(packed), _LINE)]
    rows = (_LENGTHS[len(line) - 1] + base64.b85encode(line, pad=True).decode() for line in lines)
    return f"literal {len(data)}\n" + "".join(f"{row}\n" for row in rows)


def _data(entry: Entry | None, blobs: BlobStore) -> bytes:
    if entry is None:
        return b""
    content = str(entry.content)
    if entry.kind is EntryKind.SYMLINK:
        return content.encode("utf-8", "surrogateescape")
    return blobs.get(content)


def _text(data: bytes) -> str | None:
    """The text; None for a binary file: one with NUL bytes, or not UTF-8."""
    if b"\0" in data:
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def _quoted(name: str) -> str:
    """A name as git writes it: plain, or quoted with escapes if a byte could be misread."""
    if _PLAIN_NAME.fullmatch(name):
        return name
    escaped = []
    for byte in name.encode("utf-8", "surrogateescape"):
        character = chr(byte)
        plain = 0x20 <= byte < 0x7F and character not in '"\\'
        escaped.append(character if plain else f"\\{byte:03o}")
    return '"' + "".join(escaped) + '"'


def _ended(name: str) -> str:
    # a name with spaces needs a tab at its end
    return f"{name}\t" if " " in name and not name.startswith('"') else name


class _Coarse(SequenceMatcher[str]):
    """A matcher that replaces everything between the common ends, for files that take too long line by
    line."""

    def __init__(self, left: list[str], right: list[str]) -> None:
        super().__init__(None, left, right)
        self._left, self._right = left, right

    def get_opcodes(self) -> list[tuple[str, int, int, int, int]]:  # type: ignore[override]
        left, right = self._left, self._right
        head = _common(left, right)
        tail = _common(left[head:][::-1], right[head:][::-1])
        i, j = len(left) - tail, len(right) - tail
        codes = [
            ("equal", 0, head, 0, head),
            ("replace", head, i, head, j),
            ("equal", i, i + tail, j, j + tail),
        ]
        return [code for code in codes if code[2] > code[1] or code[4] > code[3]]


def _matcher(left: list[str], right: list[str]) -> SequenceMatcher[str]:
    counts, popular = Counter(right), len(right) // 100 + 1
    # SequenceMatcher ignores popular lines in texts of 200 lines or more
    rare = {line: n for line, n in counts.items() if n <= popular or len(right) < 200}
    pairs = sum(rare.get(line, 0) for line in left)
    return SequenceMatcher(None, left, right) if pairs <= _MAX_PAIRS else _Coarse(left, right)


def _common(left: list[str], right: list[str]) -> int:
    """Number of leading lines in common."""
    for number, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return number
    return min(len(left), len(right))


def _hunks(old: str, new: str) -> Iterator[str]:
    left, right = _lines(old), _lines(new)
    for group in _matcher(left, right).get_grouped_opcodes(_CONTEXT):
        first, last = group[0], group[-1]
        yield f"@@ -{_range(first[1], last[2])} +{_range(first[3], last[4])} @@\n"
        for tag, i1, i2, j1, j2 in group:
            if tag == "equal":
                yield from (_line(" ", line) for line in left[i1:i2])
            else:
                yield from (_line("-", line) for line in left[i1:i2])
                yield from (_line("+", line) for line in right[j1:j2])


def _lines(text: str) -> list[str]:
    # str.splitlines would also split at form feeds and the like, which git does not treat as line ends
    lines = text.split("\n")
    return [line + "\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])


def _line(sign: str, line: str) -> str:
    return sign + line if line.endswith("\n") else f"{sign}{line}\n\\ No newline at end of file\n"


def _range(start: int, stop: int) -> str:
    length = stop - start
    if length == 1:
        return str(start + 1)
    return f"{start + 1 if length else start},{length}"
