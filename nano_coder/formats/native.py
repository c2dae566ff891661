"""Our own format: every run with its verdicts, its feedback and its blobs, and nothing lost.

The first line is `{"nano_log": 1}`. A blob comes before the first run that names it.
"""

from __future__ import annotations

import base64
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from nano_coder.formats.run_format import RunFormat
from nano_shared import snapshot
from nano_shared.blobs import BlobStore
from nano_shared.errors import LogError, UsageError
from nano_shared.hashing import content_hash
from nano_shared.logged_run import LoggedRun
from nano_shared.refusal import Refused
from nano_shared.strict_json import Row, at_place, json_lines, validated

FORMAT = 1
"""a program reads the formats up to its own"""
_HEADER = "nano_log"
_REMEMBERED = 50_000
"""blobs known to be in the file; of more, some may be written twice, which is harmless"""


def write(runs: Iterable[LoggedRun], blobs: BlobStore | None, missing: set[str]) -> Iterator[Row]:
    """The lines of a file, with no blobs where `blobs` is None; ids of those that are lost are added to
    `missing`."""
    yield {_HEADER: FORMAT}
    written: OrderedDict[str, None] = OrderedDict()
    for run in runs:
        for blob in _blobs(run, blobs) if blobs is not None else ():
            assert blobs is not None
            if blob in written:
                written.move_to_end(blob)
                continue
            try:
                data = blobs.get(blob)
            except LogError:
                missing.add(blob)
                continue
            yield {"blob": blob, "base64": base64.b64encode(data).decode()}
            written[blob] = None
            if len(written) > _REMEMBERED:
                written.popitem(last=False)
        yield run.as_json()


def _blobs(run: LoggedRun, blobs: BlobStore) -> Iterator[str]:
    """Every blob that a run names: outputs, snapshots, and the files in those."""
    trajectory = run.trajectory
    trees = [trajectory.task.snapshot, trajectory.snapshot, *(turn.snapshot for turn in trajectory.turns)]
    for tree in dict.fromkeys(tree for tree in trees if tree is not None):
        yield tree
        try:
            entries = snapshot.load(tree, blobs).entries
        except UsageError:  # it is missing, which is said when its own id is read
            continue
        yield from (e.content for e in entries if e.kind is snapshot.EntryKind.FILE and e.content is not None)
    for turn in trajectory.turns:
        yield from (seen.blob for seen in turn.observations if seen.blob is not None)


def read(path: Path, blobs: BlobStore | None) -> Iterator[tuple[str, LoggedRun]]:
    """The runs of a file with their places, one in memory at a time; blobs are stored where `blobs` is given.

    Raises Refused with file, line and field of the first bad line.
    """
    lines = json_lines(path, finite=False)
    where, header = next(lines, (str(path), {}))
    with at_place(where):
        _check_header(header)
    for where, row in lines:
        with at_place(where):
            if "blob" in row:
                _store(row, blobs)
                continue
            run = validated(LoggedRun, row)
            if run.whole != run.trajectory:
                raise Refused("verdicts", "the last one is not the trajectory's verdict")
        yield where, run


def _check_header(header: Row) -> None:
    version = header.get(_HEADER)
    if type(version) is not int or version < 1:
        raise Refused(_HEADER, "is missing in the first line: nano-coder log export --format jsonl writes it")
    if version > FORMAT:
        raise Refused(
            _HEADER, f"is {version}: a newer nano wrote the file, and this one reads up to {FORMAT}; upgrade"
        )


def _store(row: dict[str, Any], blobs: BlobStore | None) -> None:
    try:
        data = base64.b64decode(row.get("base64", ""), validate=True)
    except (ValueError, TypeError):
        raise Refused("base64", "is not base64") from None
    if content_hash(data) != row["blob"]:
        raise Refused("blob", f"{row['blob']!r:.80} is not the hash of its bytes: the file was changed")
    if blobs is not None:
        blobs.put(data)


NATIVE = RunFormat(
    name="jsonl", read=lambda path, blobs: (run for _, run in read(path, blobs)), write_file=write
)
