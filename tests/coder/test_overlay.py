"""Large workspaces as overlays: the same tree as a streamed one after the same steps, and bases that hold."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nano_coder.sandbox import workspace_archive as bases
from nano_coder.sandbox.namespaces import NsSandbox
from nano_coder.sandbox.workspace_archive import pack_workspace
from nano_shared.types import Limits

ROOT = Path(__file__).parents[2]
LIMITS = Limits(tool_seconds=100)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("large")
    for number in range(420):
        folder = top / f"d{number % 4}" / f"e{number % 3}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"f{number}").write_text(f"text {number}")
    (top / "d0/e0/f0").chmod(0o600)
    # writable: where a removal stops half-way depends on the order of names, which no file system promises
    (top / "d1/e1").chmod(0o750)
    (top / "link").symlink_to("d0/e0/f12")
    return top


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("home")
        patch.setenv("NANO_HOME", str(folder))
        patch.setattr(bases, "_in_use", {})
        yield folder


@pytest.fixture(scope="module")
def sandbox(home: Path) -> NsSandbox:
    return NsSandbox()


def streamed(large: Path) -> bytes:
    with pack_workspace(large).stream as stream:
        return stream.read()


_PATHS = st.sampled_from(
    [
        "d0",
        "d0/e0",
        "d0/e0/f0",
        "d0/e0/f12",
        "d1",
        "d1/e1",
        "d1/e1/f1",
        "d2/e2",
        "link",
        "new",
        "d3/new",
        "d0/f",
    ]
)
_OPERATIONS = st.tuples(
    st.sampled_from(
        ["write", "append", "remove", "mkdir", "move", "rename", "link", "hard", "chmod", "empty"]
    ),
    _PATHS,
    _PATHS,
)
_APPLY = """
import json, os, shutil, sys
for kind, one, two in json.load(sys.stdin):
    try:
        if kind == "write": open(one, "w").write(two)
        elif kind == "append": open(one, "a").write(two)
        elif kind == "remove" and os.path.isdir(one) and not os.path.islink(one): shutil.rmtree(one)
        elif kind == "remove": os.unlink(one)
        elif kind == "mkdir": os.makedirs(one)
        elif kind == "move": shutil.move(one, two)
        elif kind == "rename" and not os.path.isdir(one): os.rename(one, two)
        elif kind == "link": os.symlink(two, one)
        elif kind == "hard": os.link(one, two)
        elif kind == "chmod": os.chmod(one, 0o700 + len(two))
        elif kind == "empty":
            shutil.rmtree(one)
            os.mkdir(one)
    except (OSError, shutil.Error) as error:
        print(kind, one, two, type(error).__name__)
"""


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(_OPERATIONS, max_size=12))
def test_the_same_operations_give_the_same_tree(
    sandbox: NsSandbox, large: Path, operations: list[tuple[str, str, str]]
) -> None:
    import json

    given_to_both = json.dumps(operations).encode()
    with closing(sandbox.open(large, LIMITS)) as overlaid, closing(sandbox.open(None, LIMITS)) as plain:
        assert overlaid.run(["stat", "-f", "-c", "%T", "/work"]).stdout == b"overlayfs\n"
        plain.restore(streamed(large))
        said = [jail.run_python(_APPLY, stdin=given_to_both).stdout for jail in (overlaid, plain)]
        assert said[0] == said[1]
        assert overlaid.snapshot() == plain.snapshot()
        # and a snapshot of the middle of a run can be put back
        overlaid.restore(streamed(large))
        assert overlaid.snapshot() == streamed(large)


def test_a_jail_changes_neither_the_base_nor_what_another_sees(sandbox: NsSandbox, large: Path) -> None:
    with closing(sandbox.open(large, LIMITS)) as one, closing(sandbox.open(large, LIMITS)) as other:
        assert one.run(["sh", "-c", "rm -r d0 d2; echo changed > link; ls /opt/nano/bases"]).stdout == b""
        assert other.snapshot() == streamed(large)
        assert other.read("d0/e0/f0") == b"text 0"


def test_a_small_workspace_is_streamed_and_no_base_is_made(
    sandbox: NsSandbox, home: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("x")
    before = sorted((home / "bases").glob("*")) if (home / "bases").exists() else []
    with closing(sandbox.open(tmp_path, LIMITS)) as jail:
        assert jail.run(["stat", "-f", "-c", "%T", "/work"]).stdout == b"tmpfs\n"
    assert (sorted((home / "bases").glob("*")) if (home / "bases").exists() else []) == before


_BUILD = """
import sys
from nano_coder.sandbox import workspace_archive as bases
from nano_coder.sandbox.launcher import files
if sys.argv[2] == "slow":
    import time
    unpack = files.unpack
    def slow(root, stream):
        unpack(root, stream); print("unpacked", flush=True); time.sleep(60)
    files.unpack = slow
with open(sys.argv[1], "rb") as stream:
    print(bases.base_of(stream, None))
"""


def builder(home: Path, stream: Path, speed: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "NANO_HOME": str(home), "PYTHONPATH": f"{ROOT}:{ROOT / 'shared'}"}
    return subprocess.Popen(
        [sys.executable, "-c", _BUILD, str(stream), speed], stdout=subprocess.PIPE, env=environment
    )


def test_builders_may_race_and_be_killed(large: Path, tmp_path: Path) -> None:
    stream = tmp_path / "stream"
    with pack_workspace(large).stream as packed:
        stream.write_bytes(packed.read())
    killed = builder(tmp_path, stream, "slow")
    assert killed.stdout is not None
    assert killed.stdout.readline() == b"unpacked\n"
    waiting = [builder(tmp_path, stream, "fast") for _ in range(3)]
    time.sleep(1)
    assert [path.name for path in (tmp_path / "bases").iterdir() if "." not in path.name] == []
    os.kill(killed.pid, signal.SIGKILL)
    names = {process.communicate()[0] for process in waiting}
    killed.communicate()
    (name,) = names
    place = tmp_path / "bases" / name.decode().strip()
    assert sorted(path.name for path in place.parent.iterdir()) == [place.name, f"{place.name}.lock"]
    found = io.BytesIO()
    from nano_coder.sandbox.launcher import files

    files.pack(str(place / "tree"), found)
    assert found.getvalue() == stream.read_bytes()


def test_bases_that_nobody_uses_make_room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NANO_HOME", str(tmp_path))
    monkeypatch.setattr(bases, "KEPT_BASES", 2)
    monkeypatch.setattr(bases, "_in_use", {})
    made = []
    for number in range(4):
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w") as archive:
            archive.addfile(tarfile.TarInfo(f"file{number}"))
        made.append(bases.base_of(stream, None))
        if number != 1:  # this one stays in use
            os.close(bases._in_use[made[-1]])
        os.utime(tmp_path / "bases" / f"{made[-1]}.lock", (number, number))
    there = [(tmp_path / "bases" / name).exists() for name in made]
    os.close(bases._in_use[made[1]])
    assert there == [False, True, True, True]
