"""Files without their secrets: blobs, and the snapshots that are made of them."""

from __future__ import annotations

from dataclasses import replace

from nano_shared.blobs import BlobStore
from nano_shared.redact.known import Known
from nano_shared.redact.redactor import Redactor
from nano_shared.snapshot.tree import Kind, load, make_snapshot, save


def scrub_bytes(data: bytes, redactor: Redactor, known: Known | None = None) -> bytes:
    """A file with markers for its secrets; the same object where it holds none.

    What is not UTF-8 is read byte by byte, so that a secret in a binary file is found as well; such a file
    is whole no longer, which is better than one that gives a key away.
    """
    try:
        text, codec = data.decode("utf-8"), "utf-8"
    except UnicodeDecodeError:
        text, codec = data.decode("latin-1"), "latin-1"
    scrubbed, spans = redactor.scrub(text, known)
    return scrubbed.encode(codec) if spans else data


def scrub_blob(blob: str, source: BlobStore, target: BlobStore, redactor: Redactor, known: Known) -> str:
    """Copy a blob without its secrets; its id in `target`. Raises LogError where it is missing."""
    return target.put(scrub_bytes(source.get(blob), redactor, known))


def scrub_snapshot(
    snapshot: str,
    source: BlobStore,
    target: BlobStore,
    redactor: Redactor | None = None,
    known: Known | None = None,
) -> str:
    """Copy a snapshot with the secrets of its files and link targets redacted; its id in `target`.

    Names of files stay, since tools and diffs call them by name. Raises LogError where a file is missing.
    """
    redactor, known = redactor or Redactor(), known or Known()
    entries = []
    for entry in load(snapshot, source).entries:
        content = entry.content
        if content is not None and entry.kind is Kind.FILE:
            content = scrub_blob(content, source, target, redactor, known)
        elif content is not None:
            content = redactor.scrub(content, known)[0]
        entries.append(replace(entry, content=content))
    return save(make_snapshot(entries), target)
