"""The tool `apply_patch`: adds, deletes, updates and moves files by one patch, all of it or nothing."""

from __future__ import annotations

import difflib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from nano_coder.tools.text_files import BOM, TextFile, read_text, said_by
from nano_coder.tools.tool import ToolContext, ToolFailure, ToolResult, tool

BEGIN, END, END_OF_FILE = "*** Begin Patch", "*** End Patch", "*** End of File"
_HEADER = re.compile(r"\*\*\* (Add|Delete|Update) File: (.+)")
_MOVE = re.compile(r"\*\*\* Move to: (.+)")
_HEREDOC = re.compile(r"<<\s*(['\"]?)(\w+)\1")
_PUNCTUATION = str.maketrans(
    {c: "-" for c in "\u2010\u2011\u2012\u2013\u2014\u2015\u2212"}
    | {c: "'" for c in "\u2018\u2019\u201a\u201b"}
    | {c: '"' for c in "\u201c\u201d\u201e\u201f"}
    | {c: " " for c in "\u00a0\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000"}
)
_STEPS: tuple[tuple[str, Callable[[str], str]], ...] = (
    ("", str),
    ("trailing blanks", str.rstrip),
    ("blanks at both ends", str.strip),
    ("typographic punctuation", lambda line: line.strip().translate(_PUNCTUATION)),
)
"""what a match may overlook, from the strictest on"""
_COMMON = 100
"""occurrences above which a line does not help to find the nearest place"""
_LONGEST_SHOWN = 200


class PatchError(Exception):
    """A patch cannot be read or does not fit; the message says where and what is there."""


class PatchLine(NamedTuple):
    sign: str
    """' ' stays, '-' goes, '+' comes"""
    text: str


@dataclass(frozen=True, slots=True)
class Hunk:
    number: int
    """line of the patch at which it begins, from 1"""
    headers: tuple[str, ...]
    """lines that are found one below the other, above the hunk"""
    lines: tuple[PatchLine, ...]
    at_end: bool
    """its old lines are the last of the file"""

    @property
    def old(self) -> list[str]:
        return [line.text for line in self.lines if line.sign != "+"]


@dataclass(frozen=True, slots=True)
class FilePatch:
    """What a patch does to one file: adds it (`text`), deletes it, or updates it by hunks."""

    kind: str
    path: str
    move_to: str | None = None
    text: str = ""
    hunks: tuple[Hunk, ...] = ()


def read_patch(text: str) -> list[FilePatch]:
    """The changes of a patch, in order. Raises PatchError with the number of the line that is wrong."""
    lines = [line.removesuffix("\r") for line in text.strip().split("\n")]
    skipped = len(text) - len(text.lstrip())
    first = text[:skipped].count("\n") + 1
    heredoc = _HEREDOC.fullmatch(lines[0].strip())
    if heredoc and len(lines) > 2 and lines[-1].strip() == heredoc[2]:
        lines, first = lines[1:-1], first + 1
    if lines[0].strip() != BEGIN:
        raise PatchError(f"the first line of a patch is {BEGIN!r}, not {_excerpt(lines[0])}")
    if lines[-1].strip() != END or len(lines) < 2:
        raise PatchError(f"the last line of a patch is {END!r}, not {_excerpt(lines[-1])}")
    changes = list(_Reader(lines[1:-1], first + 1).changes())
    if not changes:
        raise PatchError("the patch is empty: it adds, deletes and updates no file")
    return changes


class _Reader:
    """Reads the lines between the first and the last of a patch."""

    def __init__(self, lines: list[str], first: int) -> None:
        self._lines = lines
        self._first = first
        self._at = 0

    def changes(self) -> Iterator[FilePatch]:
        while self._at < len(self._lines):
            line = self._lines[self._at].strip()
            header = _HEADER.fullmatch(line)
            if header is None and not line:
                self._at += 1
                continue
            if header is None:
                raise self._wrong(
                    f"{_excerpt(line)} is no header; there are '*** Add File: PATH', '*** Delete File: PATH'"
                    " and '*** Update File: PATH'"
                )
            self._at += 1
            kind, path = header[1], header[2].strip()
            if kind == "Add":
                yield FilePatch(kind, path, text="".join(f"{line[1:]}\n" for line in self._added()))
            elif kind == "Delete":
                yield FilePatch(kind, path)
            else:
                yield self._update(path)

    def _added(self) -> Iterator[str]:
        while self._at < len(self._lines) and self._lines[self._at].startswith("+"):
            self._at += 1
            yield self._lines[self._at - 1]

    def _update(self, path: str) -> FilePatch:
        start = self._at
        move = _MOVE.fullmatch(self._lines[self._at].strip()) if self._at < len(self._lines) else None
        self._at += move is not None
        hunks: list[Hunk] = []
        while self._at < len(self._lines) and not self._lines[self._at].lstrip().startswith("***"):
            if self._lines[self._at].strip():
                hunks.append(self._hunk(bare=not hunks))
            else:
                self._at += 1
        if not hunks:
            self._at = start - 1
            raise self._wrong(f"the update of {path} holds no hunk")
        return FilePatch("Update", path, move_to=move[1].strip() if move else None, hunks=tuple(hunks))

    def _hunk(self, *, bare: bool) -> Hunk:
        begin, headers = self._at, []
        while self._at < len(self._lines) and self._lines[self._at].startswith("@@"):
            headers.append(self._lines[self._at][2:].removeprefix(" "))
            self._at += 1
        if not headers and not bare:
            raise self._wrong(f"a hunk begins with @@, not with {_excerpt(self._lines[self._at])}")
        lines = list(self._hunk_lines())
        if not lines:
            found = _excerpt(self._lines[self._at]) if self._at < len(self._lines) else "the end of the patch"
            raise self._wrong(f"{found}: a line of a hunk begins with a blank (stays), + (comes) or - (goes)")
        at_end = self._at < len(self._lines) and self._lines[self._at].strip() == END_OF_FILE
        self._at += at_end
        wanted = tuple(header for header in headers if header.strip())
        return Hunk(self._first + begin, wanted, tuple(lines), at_end)

    def _hunk_lines(self) -> Iterator[PatchLine]:
        while self._at < len(self._lines):
            line = self._lines[self._at]
            if line and line[0] not in " +-":
                return
            self._at += 1
            yield PatchLine(line[:1] or " ", line[1:].removeprefix(BOM))

    def _wrong(self, message: str) -> PatchError:
        return PatchError(f"line {self._first + self._at} of the patch: {message}")


# ----------------------------------------------------------------------------------------- applying


class _Line(NamedTuple):
    text: str
    end: str
    """its line end, LF or CRLF; of a last line without one that of most lines"""


@dataclass(slots=True)
class _Place:
    start: int
    count: int
    hunk: Hunk
    dropped: bool = False
    """whether the hunk's last old line, an empty one, stands for the end of the file"""


def patched(path: str, text: str, hunks: Sequence[Hunk]) -> tuple[str, tuple[str, ...]]:
    """The text after the hunks, and what their matches overlooked, by name.

    A text whose last line is new, or was replaced, ends with a line end. Raises PatchError for a hunk that
    does not fit.
    """
    *whole, last = text.split("\n")
    lines = [_Line(line.removesuffix("\r"), "\r\n" if line.endswith("\r") else "\n") for line in whole]
    usual = "\r\n" if sum(line.end == "\r\n" for line in lines) * 2 > len(lines) else "\n"
    if last:
        lines.append(final := _Line(last, usual))
    finder = _Finder(path, [line.text for line in lines])
    places = sorted((finder.place(hunk) for hunk in hunks), key=lambda place: place.start)
    done: list[_Line] = []
    at = 0
    for place in places:
        done += lines[at : place.start]
        new = list(_replaced(lines[place.start : place.start + place.count], place, usual))
        done += new[:-1] if place.dropped and new and not new[-1].text else new
        at = place.start + place.count
    done += lines[at:]
    if last and done and done[-1] is final:
        done[-1] = final._replace(end="")
    return "".join(line.text + line.end for line in done), tuple(dict.fromkeys(finder.overlooked))


def _replaced(old: list[_Line], place: _Place, usual: str) -> Iterator[_Line]:
    """The hunk's lines over the old ones: those that stay are the file's own."""
    end, at = (old[0].end if old else usual), 0
    for sign, text in place.hunk.lines:
        if sign == "+":
            yield _Line(text, end)
        elif at < len(old):
            end = old[at].end
            if sign == " ":
                yield old[at]
            at += 1
        elif sign == " ":  # the empty line of `dropped`, behind which lines may come
            yield _Line(text, end)


class _Finder:
    """Finds hunks in a file, each below the one before."""

    def __init__(self, path: str, lines: list[str]) -> None:
        self.path = path
        self.overlooked: list[str] = []
        self._lines = lines
        self._forms: list[list[str]] = [lines]
        """the lines as each step compares them; made when they are needed"""
        self._from = 0

    def place(self, hunk: Hunk) -> _Place:
        for header in hunk.headers:
            self._from = self._header(hunk, header) + 1
        old = hunk.old
        if not old:  # only additions: below the header, else at the end
            at = self._from if hunk.headers else len(self._lines)
            return _Place(at, 0, hunk)
        found = self._seek(old, hunk.at_end)
        if dropped := found is None and old[-1] == "" and len(old) > 1:
            old = old[:-1]
            found = self._seek(old, hunk.at_end)
            if found is not None:
                self.overlooked.append("an empty last line")
        if found is None:
            raise self._misfit(hunk)
        self._from = found + len(old)
        return _Place(found, len(old), hunk, dropped)

    def _header(self, hunk: Hunk, header: str) -> int:
        found = self._seek([header], False)
        if found is None:
            near = difflib.get_close_matches(header.strip(), [line.strip() for line in self._lines], 1, 0.5)
            at = next((n for n, line in enumerate(self._lines, 1) if near and line.strip() == near[0]), None)
            nearest = f"; nearest is line {at}: {_excerpt(self._lines[at - 1])}" if at else ""
            below = f" below line {self._from}" if self._from else ""
            raise PatchError(
                f"{self.path}: no line{below} reads as the header {_excerpt(header)} of line {hunk.number} of"
                f" the patch{nearest}"
            )
        return found

    def _seek(self, wanted: list[str], at_end: bool) -> int | None:
        last = len(self._lines) - len(wanted)
        starts = range(max(self._from, last) if at_end else self._from, last + 1)
        for step, (name, form) in enumerate(_STEPS):
            if step == len(self._forms):
                self._forms.append([form(line) for line in self._lines])
            lines, pattern = self._forms[step], [form(line) for line in wanted]
            for at in starts:
                if lines[at] == pattern[0] and lines[at : at + len(pattern)] == pattern:
                    if name:
                        self.overlooked.append(name)
                    return at
        return None

    def _misfit(self, hunk: Hunk) -> PatchError:
        """The error for a hunk whose old lines are nowhere: the nearest place, and its first difference."""
        old = hunk.old
        normal = [_STEPS[-1][1](line) for line in self._lines]
        pattern = [_STEPS[-1][1](line) for line in old]
        start = _nearest(normal, pattern)
        there = normal[start : start + len(old)]
        alike = sum(a == b for a, b in zip(there, pattern, strict=False))
        said = f"{self.path}: the hunk at line {hunk.number} of the patch does not fit"
        if there == pattern:
            where = f"lines {start + 1} to {start + len(old)}"
            if start < self._from:
                return PatchError(
                    f"{said} below line {self._from}: its lines are {where}; hunks go from top to bottom"
                )
            return PatchError(f"{said}: its lines are {where}, not the last ones as {END_OF_FILE!r} says")
        first = next((n for n, (a, b) in enumerate(zip(there, pattern, strict=False)) if a != b), len(there))
        number = start + first + 1
        found = _excerpt(self._lines[number - 1]) if number <= len(self._lines) else "the end of the file"
        near = (
            f" (nearest place: from line {start + 1} on, {alike} of {len(old)} lines alike)" if alike else ""
        )
        return PatchError(f"{said}: expected {_excerpt(old[first])}, and line {number} is {found}{near}")


def _nearest(lines: Sequence[str], pattern: Sequence[str]) -> int:
    """The start at which most lines of a pattern are where they should be; else near its likest line."""
    places: dict[str, list[int]] = {}
    for at, line in enumerate(lines):
        places.setdefault(line, []).append(at)
    votes: Counter[int] = Counter()
    for offset, line in enumerate(pattern):
        found = places.get(line, [])
        votes.update(at - offset for at in found if len(found) <= _COMMON and at >= offset)
    if votes:
        most = max(votes.values())
        return min(start for start, count in votes.items() if count == most)
    offset = next((n for n, line in enumerate(pattern) if line), 0)
    near = difflib.get_close_matches(pattern[offset], list(places)[:5000], 1, 0.4)
    return max(0, places[near[0]][0] - offset) if near else 0


def _excerpt(line: str) -> str:
    return repr(line if len(line) <= _LONGEST_SHOWN else f"{line[:_LONGEST_SHOWN]}...")


# Runs inside the jail: everything is written beside its place first, and moved there at the end.
_PROGRAM = """
import json, os, secrets, stat, sys

order = json.load(sys.stdin)
mark = ".nano-apply-" + secrets.token_hex(6)
staged, made, moved = [], [], []


def look(path):
    parts = path.split("/")
    for depth in range(1, len(parts) + 1):
        part = "/".join(parts[:depth])
        try:
            mode = os.lstat(part).st_mode
        except FileNotFoundError:
            return None
        if stat.S_ISLNK(mode):
            sys.exit(f"{part} is a link; patch what it leads to, by its own path")
        if depth < len(parts) and not stat.S_ISDIR(mode):
            sys.exit(f"{part} is no directory")
    if not stat.S_ISREG(mode):
        sys.exit(f"{path} is a directory" if stat.S_ISDIR(mode) else f"{path} is no regular file")
    return mode


def stage(path, text, like):
    folder = os.path.dirname(path)
    missing = []
    while folder and not os.path.isdir(folder):
        missing.append(folder)
        folder = os.path.dirname(folder)
    for folder in reversed(missing):
        os.mkdir(folder)
        made.append(folder)
    new = os.path.join(os.path.dirname(path), f"{mark}-{len(staged)}")
    staged.append((new, path))
    with open(new, "wb") as file:
        file.write(text.encode("latin-1"))
    if like is not None:
        os.chmod(new, like & 0o777)


def move(source, target):
    os.replace(source, target)
    moved.append((source, target))


def undo():
    for source, target in reversed(moved):
        os.replace(target, source)
    for new, _ in staged:
        if os.path.lexists(new):
            os.unlink(new)
    for folder in reversed(made):
        os.rmdir(folder)


modes = {path: look(path) for path in [*order["write"], *order["delete"]]}
try:
    for path, (text, source) in order["write"].items():
        stage(path, text, modes[path] if modes.get(source) is None else modes[source])
    for new, path in staged:
        if modes[path] is not None:
            move(path, new + "-old")
        move(new, path)
    for number, path in enumerate(order["delete"]):
        move(path, os.path.join(os.path.dirname(path), f"{mark}-gone-{number}"))
except OSError as problem:
    undo()
    sys.exit(f"{problem.filename2 or problem.filename}: {problem.strerror}")
for _, target in moved:
    if os.path.basename(target).startswith(mark):
        os.unlink(target)
"""


@tool(body="patch", mutates=True)
def apply_patch(context: ToolContext, patch: str) -> ToolResult:
    """Change files by a patch: "*** Begin Patch", then for each file "*** Add File: PATH" with lines that
    begin with +, "*** Delete File: PATH", or "*** Update File: PATH" (then "*** Move to: PATH" to rename it)
    with hunks, and "*** End Patch". A hunk is "@@", or "@@ LINE" with a line above it such as a def or class,
    and then lines that begin with a blank (they stay), - (they go) or + (they come), three that stay around
    each change; "*** End of File" below it says that they are the last. Paths are relative. If one hunk does
    not fit, nothing is changed."""
    try:
        changes = read_patch(patch)
        order = _Order(context)
        for change in changes:
            order.take(change)
    except PatchError as problem:
        raise ToolFailure(f"{problem}. Nothing was changed.") from None
    order.carry_out()
    said = [f"{kind} {path}" for path, kind in order.kinds.items()]
    notes = [f"matched by overlooking {name}" for name in order.overlooked]
    return ToolResult(text="\n".join([*said, *notes]), repairs=tuple(order.overlooked))


class _Order:
    """The files as the patch leaves them, each change upon those before it."""

    def __init__(self, context: ToolContext) -> None:
        self._context = context
        self._texts: dict[str, TextFile | None] = {}
        """None: deleted"""
        self._sources: dict[str, str] = {}
        """path -> the file whose permissions it gets"""
        self.kinds: dict[str, str] = {}
        """path -> A, M or D"""
        self.overlooked: list[str] = []

    def take(self, change: FilePatch) -> None:
        path = _inside(change.path)
        match change.kind:
            case "Add":
                self._put(path, TextFile(change.text), "A" if path not in self._texts else "M")
            case "Delete":
                self._read(path)
                self._put(path, None, "D")
            case _:
                file = self._read(path)
                text, seen = patched(path, file.text, change.hunks)
                self.overlooked += [name for name in seen if name not in self.overlooked]
                target = path if change.move_to is None else _inside(change.move_to)
                if target != path:
                    self._put(path, None, "D")
                    self._sources[target] = path
                self._put(target, file.edited(text), "M" if target == path else "A")

    def carry_out(self) -> None:
        """Write all files, or none. Raises ToolFailure."""
        # JSON holds text: a byte is the letter of its number
        write = {
            path: (file.data(path).decode("latin-1"), self._sources.get(path, path))
            for path, file in self._texts.items()
            if file is not None
        }
        # what was added and deleted by the same patch was never there
        deleted = [p for p, text in self._texts.items() if text is None and self._exists(p)]
        data = json.dumps({"write": write, "delete": deleted}).encode()
        try:
            said_by(self._context, _PROGRAM, stdin=data)
        except ToolFailure as problem:
            raise ToolFailure(f"{problem}. Nothing was changed.") from None

    def _put(self, path: str, text: TextFile | None, kind: str) -> None:
        self._texts[path] = text
        self.kinds[path] = kind

    def _read(self, path: str) -> TextFile:
        if path in self._texts:
            text = self._texts[path]
            if text is None:
                raise PatchError(f"{path} was deleted or moved by this patch")
            return text
        try:
            return read_text(self._context.jail, path)
        except ToolFailure as problem:
            raise PatchError(str(problem)) from None

    def _exists(self, path: str) -> bool:
        try:
            self._context.jail.read(path)
        except OSError:
            return False
        return True


def _inside(path: str) -> str:
    """The path without `./`. Raises PatchError for one that no patch may touch."""
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if path.startswith("/") or ".." in parts or not parts or "\0" in path or path.endswith("/"):
        raise PatchError(f"{path!r}: paths are relative to the workspace, and stay in it")
    if ".git" in parts:
        raise PatchError(f"{path!r}: what lies in .git is changed by git alone")
    return "/".join(parts)
