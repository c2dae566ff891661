"""Our tar against `tarfile`, and workspaces packed and unpacked: exact for trees, harmless when hostile."""

from __future__ import annotations

import io
import os
import stat
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nano_coder.sandbox.launcher import files
from nano_coder.sandbox.launcher.files import DIRECTORY, FILE, SYMLINK, TarMember

PARTS = (
    st.binary(min_size=1, max_size=8)
    | st.sampled_from(
        [b"a", b"b", b"n" * 99, b"n" * 200, b"\xff\xfe", "ü🦎".encode(), b" ", b"-", b"...", b"\n"]
    )
).filter(lambda part: b"/" not in part and b"\0" not in part and part not in (b".", b".."))
PATHS = st.lists(PARTS, min_size=1, max_size=4).map(b"/".join)
TARGETS = st.binary(min_size=1, max_size=300).filter(lambda target: b"\0" not in target) | st.sampled_from(
    [b"..", b"/etc/passwd", b"a" * 101]
)
NODES = st.one_of(
    st.tuples(st.just(FILE), st.binary(max_size=1600), st.integers(0, 0o777)),
    st.tuples(st.just(DIRECTORY), st.just(b""), st.integers(0, 0o777)),
    st.tuples(st.just(SYMLINK), TARGETS, st.just(0o777)),
)
Node = tuple[bytes, bytes, int]


def plant(top: str, tree: dict[bytes, Node]) -> None:
    """Make the tree, as far as its paths do not contradict each other."""
    modes = []
    for path, (kind, data, mode) in tree.items():
        full = os.path.join(os.fsencode(top), path)
        folders = [full[:end] for end in range(len(top) + 1, len(full)) if full[end : end + 1] == b"/"]
        if any(map(os.path.islink, folders)):
            continue  # it leads elsewhere
        try:
            os.makedirs(full if kind == DIRECTORY else os.path.dirname(full), exist_ok=True)
            if kind == FILE:
                with open(full, "xb") as file:
                    file.write(data)
            elif kind == SYMLINK:
                os.symlink(data, full)
        except (FileExistsError, NotADirectoryError):
            continue
        if kind != SYMLINK:
            # what an ordinary user may not read it cannot pack
            modes.append((full, mode | (0o700 if kind == DIRECTORY else 0o400)))
    for full, mode in reversed(modes):
        os.chmod(full, mode)


def seen(top: str) -> dict[str, Node]:
    """Everything below `top`, without following a link."""
    found: dict[str, Node] = {}
    for folder, folders, names in os.walk(top):
        for name in (*folders, *names):
            path = os.path.join(folder, name)
            status = os.lstat(path)
            mode = status.st_mode & 0o777
            if stat.S_ISLNK(status.st_mode):
                node = (SYMLINK, os.fsencode(os.readlink(path)), 0o777)
            elif stat.S_ISDIR(status.st_mode):
                node = (DIRECTORY, b"", mode)
            else:
                node = (FILE, Path(path).read_bytes(), mode)
            found[os.path.relpath(path, top)] = node
    return found


def packed(top: str) -> bytes:
    out = io.BytesIO()
    files.pack(top, out, frozenset())
    return out.getvalue()


def unpack(top: str, data: bytes) -> None:
    root = os.open(top, os.O_PATH | os.O_DIRECTORY)
    try:
        files.unpack(root, io.BytesIO(data))
    finally:
        os.close(root)


def read_all(data: bytes) -> list[tuple[TarMember, bytes]]:
    reader = files.TarReader(io.BytesIO(data))
    return [(member, b"".join(reader.contents()) if member.kind == FILE else b"") for member in reader]


# ----------------------------------------------------------------------------------------- exact


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(PATHS, NODES, max_size=8))
def test_a_tree_comes_back_as_it_was(tree: dict[bytes, Node]) -> None:
    with tempfile.TemporaryDirectory() as before, tempfile.TemporaryDirectory() as after:
        plant(before, tree)
        data = packed(before)
        unpack(after, data)
        assert seen(after) == seen(before)
        assert packed(after) == data


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(PATHS, NODES, max_size=8))
def test_tarfile_reads_what_we_write(tree: dict[bytes, Node]) -> None:
    with tempfile.TemporaryDirectory() as top:
        plant(top, tree)
        data, there = packed(top), seen(top)
    with tarfile.open(fileobj=io.BytesIO(data), errors="surrogateescape") as ours:
        read = {
            member.name: (
                (SYMLINK, os.fsencode(member.linkname), 0o777)
                if member.issym()
                else (DIRECTORY, b"", member.mode)
                if member.isdir()
                else (FILE, ours.extractfile(member).read(), member.mode)  # type: ignore[union-attr]
            )
            for member in ours
        }
    assert read == there


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(PATHS, NODES, max_size=6),
    st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
)
def test_we_read_what_tarfile_writes(tree: dict[bytes, Node], form: int) -> None:
    out, wanted = io.BytesIO(), []
    with tarfile.open(fileobj=out, mode="w", format=form, errors="surrogateescape") as theirs:
        for path, (kind, data, mode) in tree.items():
            member = tarfile.TarInfo(os.fsdecode(path))
            member.type, member.mode = kind, mode
            if kind == FILE:
                member.size = len(data)
            elif kind == SYMLINK:
                member.linkname = os.fsdecode(data)
            try:
                theirs.addfile(member, io.BytesIO(data))
            except ValueError:  # the oldest format cannot say long names
                continue
            wanted.append((os.fsdecode(path), kind, mode, data))
    read = [
        (m.name.rstrip("/"), m.kind, m.mode, os.fsencode(m.target) if m.kind == SYMLINK else data)
        for m, data in read_all(out.getvalue())
    ]
    assert read == [(name.rstrip("/"), *rest) for name, *rest in wanted]


def test_a_file_beyond_what_octal_says_has_its_size() -> None:
    out = io.BytesIO()
    files.write_member(out, TarMember("huge", FILE, 0o600, size=9 << 30))
    assert next(iter(files.TarReader(io.BytesIO(out.getvalue())))).size == 9 << 30
    with tarfile.open(fileobj=io.BytesIO(out.getvalue())) as theirs:
        assert theirs.next().size == 9 << 30  # type: ignore[union-attr]


def test_times_and_owners_are_not_in_the_stream(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    before = packed(str(tmp_path))
    os.utime(tmp_path / "file", (1, 1))
    assert packed(str(tmp_path)) == before


def test_unpacked_files_have_the_time_of_all_others(tmp_path: Path) -> None:
    (tmp_path / "from/folder").mkdir(parents=True)
    (tmp_path / "from/folder/file").write_text("x")
    (tmp_path / "to").mkdir()
    unpack(str(tmp_path / "to"), packed(str(tmp_path / "from")))
    times = {(tmp_path / "to" / name).stat().st_mtime for name in ("folder", "folder/file")}
    assert times == {files.EPOCH}


def test_a_workspace_that_is_long_is_not_kept_in_memory(tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(b"x" * 1000)
    assert files.pack_small(str(tmp_path)) == packed(str(tmp_path))
    (tmp_path / "long").write_bytes(b"x" * files.SMALL_BYTES)
    assert files.pack_small(str(tmp_path)) is None


# --------------------------------------------------------------------------------------- hostile


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=2000), st.data())
def test_any_bytes_are_an_archive_or_an_error(noise: bytes, data: st.DataObject) -> None:
    good = io.BytesIO()
    files.write_member(good, TarMember("file", FILE, 0o644, size=3))
    good.write(b"abc")
    files.write_padding(good, 3)
    files.write_end(good)
    stream = bytearray(good.getvalue())
    place = data.draw(st.integers(0, len(stream)))
    stream[place : place + len(noise)] = noise
    with tempfile.TemporaryDirectory() as top:
        try:
            unpack(top, bytes(stream))
        except OSError:
            return
        assert len(seen(top)) <= 1


@given(st.integers(0, 1535))
def test_a_stream_cut_short_is_an_error(length: int) -> None:
    out = io.BytesIO()
    files.write_member(out, TarMember("file", FILE, 0o644, size=3))
    out.write(b"abc")
    files.write_padding(out, 3)
    files.write_end(out)
    with pytest.raises(OSError, match="damaged"):
        read_all(out.getvalue()[:length])


def tar(*members: TarMember | bytes) -> bytes:
    out = io.BytesIO()
    for member in members:
        if isinstance(member, bytes):
            out.write(member)
        else:
            files.write_member(out, member)
    files.write_end(out)
    return out.getvalue()


HOSTILE: dict[str, Callable[[str], bytes]] = {
    "a name that climbs": lambda out: tar(TarMember("../evil", FILE, 0o644)),
    "a name that climbs later": lambda out: tar(TarMember("a/../../evil", FILE, 0o644)),
    "an absolute name": lambda out: tar(TarMember(f"{out}/evil", FILE, 0o644)),
    "a long absolute name": lambda out: tar(TarMember(f"{out}/{'e' * 150}", FILE, 0o644)),
    "a file through a link": lambda out: tar(
        TarMember("door", SYMLINK, 0, target=out), TarMember("door/evil", FILE, 0o644)
    ),
    "a file through a relative link": lambda out: tar(
        TarMember("door", SYMLINK, 0, target=".."), TarMember("door/evil", FILE, 0o644)
    ),
    "a folder through a link": lambda out: tar(
        TarMember("door", SYMLINK, 0, target=out), TarMember("door/evil", DIRECTORY, 0o755)
    ),
    "a link through a link": lambda out: tar(
        TarMember("door", SYMLINK, 0, target=out), TarMember("door/evil", SYMLINK, 0, target="x")
    ),
    "a link in place of a folder": lambda out: tar(
        TarMember("door", DIRECTORY, 0o755), TarMember("door", SYMLINK, 0, target=out)
    ),
    "a file over a link": lambda out: tar(
        TarMember("evil", SYMLINK, 0, target=f"{out}/evil"), TarMember("evil", FILE, 0o644)
    ),
    "a folder's mode through a link": lambda out: tar(
        TarMember("door", SYMLINK, 0, target=out), TarMember("door", DIRECTORY, 0o777)
    ),
    "the same file twice": lambda out: tar(TarMember("file", FILE, 0o644), TarMember("file", FILE, 0o644)),
    "a name of a megabyte": lambda out: tar(TarMember("n" * (1 << 20), FILE, 0o644)),
    "a name that no system takes": lambda out: tar(TarMember("n" * 300, FILE, 0o644)),
    "an empty link": lambda out: tar(TarMember("link", SYMLINK, 0)),
    "no archive": lambda out: b"no archive" * 100,
    "nothing": lambda out: b"",
}  # fmt: skip


@pytest.mark.parametrize("make", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_stream_is_refused_and_changes_nothing_outside(
    tmp_path: Path, make: Callable[[str], bytes]
) -> None:
    outside, inside = tmp_path / "outside", tmp_path / "inside"
    outside.mkdir(mode=0o700)
    inside.mkdir()
    with pytest.raises(OSError):
        unpack(str(inside), make(str(outside)))
    assert list(outside.iterdir()) == []
    assert outside.stat().st_mode & 0o777 == 0o700
    assert sorted(path.name for path in tmp_path.iterdir()) == ["inside", "outside"]


@pytest.mark.parametrize(
    "kind", [b"1", b"3", b"4", b"6", b"S"], ids=["hard", "char", "block", "fifo", "sparse"]
)
def test_what_a_workspace_does_not_hold_is_passed_over(tmp_path: Path, kind: bytes) -> None:
    unpack(
        str(tmp_path),
        tar(TarMember("odd", kind, 0o644, target="/etc/passwd"), TarMember("file", FILE, 0o644)),
    )
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_no_set_uid_bit_is_unpacked(tmp_path: Path) -> None:
    unpack(str(tmp_path), tar(TarMember("file", FILE, 0o4755)))
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o755
