"""The diff of two snapshots: readable, and taken by git itself."""

import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from workspaces import read_tree, trees, write_tree

from nano_shared import snapshot, snapshot_change
from nano_shared.snapshot import BlobStore


@pytest.fixture
def blobs(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "blobs")


def difference(blobs: BlobStore, before: dict, after: dict, **how: bool) -> str:
    taken = []
    for tree in (before, after):
        with tempfile.TemporaryDirectory() as name:
            write_tree(Path(name), tree)
            taken.append(snapshot.snapshot_directory(Path(name), blobs))
    return snapshot_change.diff(*taken, blobs, **how)


def text(content: str, mode: int = 0o644) -> tuple[str, bytes, int]:
    return ("file", content.encode(), mode)


def test_equal_snapshots_have_no_diff(blobs):
    tree = {b"a": text("x"), b"d": ("dir", {}, 0o755)}
    assert difference(blobs, tree, tree) == ""


def test_an_edit_reads_as_git_writes_it(blobs):
    before, after = {b"a.py": text("1\n2\n3\n")}, {b"a.py": text("1\nzwei\n3")}
    assert difference(blobs, before, after) == (
        "diff --git a/a.py b/a.py\n"
        "index 01e79c3..85fd90d 100644\n"
        "--- a/a.py\n"
        "+++ b/a.py\n"
        "@@ -1,3 +1,3 @@\n"
        " 1\n"
        "-2\n"
        "-3\n"
        "+zwei\n"
        "+3\n"
        "\\ No newline at end of file\n"
    )


def test_modes_links_and_binary_files_are_named(blobs):
    before = {b"run": text("x"), b"l": ("symlink", b"old", 0), b"img": ("file", b"\0", 0o644)}
    after = {b"run": text("x", 0o755), b"l": ("symlink", b"new", 0), b"img": ("file", b"\0\0", 0o644)}
    shown = difference(blobs, before, after)
    assert "old mode 100644\nnew mode 100755\n" in shown
    assert "Binary files a/img and b/img differ\n" in shown
    assert "120000\n--- a/l\n+++ b/l\n@@ -1 +1 @@\n-old\n\\ No newline at end of file\n+new\n" in shown


def test_files_have_one_of_gits_two_modes_and_other_permissions_are_notes(blobs):
    before = {b"gone": text("", 0o600), b"run": text("x", 0o755), b"t": text("x"), b"u": text("x\n")}
    after = {b"new": text("", 0o600), b"run": text("x", 0o700), b"t": text("x", 0o400)}
    after[b"u"] = text("y\n", 0o400)
    shown = difference(blobs, before, after)
    notes = "# file mode 755 -> 700: run\n# file mode 644 -> 400: t\n# file mode 644 -> 400: u\n"
    assert shown.startswith(notes)
    assert "deleted file mode 100644" in shown
    assert "new file mode 100644" in shown
    assert " 100644\n--- a/u\n" in shown
    assert not {"a/run", "a/t", "old", "100600", "100400"} & set(shown.split())


def test_directories_are_notes(blobs):
    before = {b"empty": ("dir", {}, 0o755), b"d": ("dir", {b"f": text("x")}, 0o755)}
    after = {b"fresh": ("dir", {}, 0o755), b"d": ("dir", {b"f": text("x")}, 0o700)}
    assert difference(blobs, before, after) == (
        "# directory mode 755 -> 700: d\n# directory removed: empty\n# directory created: fresh\n"
    )


def test_names_that_could_be_misread_are_quoted(blobs):
    shown = difference(blobs, {}, {b"n\xff": text("x\n"), b"a b": text("x\n"), "é".encode(): text("x\n")})
    assert 'diff --git "a/n\\377" "b/n\\377"\n' in shown
    assert "+++ b/a b\t\n" in shown
    assert "+++ b/é\n" in shown
    shown.encode()  # a diff is always valid UTF-8


def test_large_files_are_named_not_shown(blobs):
    shown = difference(blobs, {}, {b"big": text("x\n" * 600_000)})
    assert "Large files /dev/null and b/big differ (0 and 1200000 bytes)\n" in shown


def test_repetitive_text_is_replaced_whole_between_its_common_ends(blobs):
    lines = [f"{number % 150}\n" for number in range(20_000)]
    before = {b"a": text("".join(["head\n", *lines, "tail\n"]))}
    after = {b"a": text("".join(["head\n", *reversed(lines), "tail\n"]))}
    shown = difference(blobs, before, after)
    assert shown.count("@@ -") == 1
    assert shown.count("\n-") + shown.count("\n+") == 2 * len(lines) + 2  # and the two names


@pytest.mark.some(6)
@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
@example(
    before={
        b"big": text("x" * 3_000_000),
        b"l": ("file", b"caf\xe9\nend", 0o644),
        b"gone": ("file", bytes(200), 0o755),
    },
    after={b"big": text("y" * 2_000_000), b"l": ("file", b"caf\xe9s\r\nend", 0o755), b"empty": text("")},
)
@example(
    before={b"a": ("symlink", b"a", 0)},
    after={b"a": ("dir", {b"a": ("symlink", b"a", 0)}, 0o755)},
)
@given(before=trees, after=trees)
@settings(max_examples=25, deadline=None)
def test_git_applies_it(before, after):
    before, after = _plain(before), _plain(after)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        patch = difference(BlobStore(folder / "blobs"), before, after, whole=True)
        if "diff --git" not in patch:
            assert _files(before) == _files(after)
            return
        work = folder / "work"
        work.mkdir()
        write_tree(work, before)
        result = subprocess.run(
            ["git", "apply", "--unsafe-paths", "--whitespace=nowarn", "-"],
            cwd=work,
            input=patch.encode(),
            capture_output=True,
            env={"GIT_CEILING_DIRECTORIES": str(folder), "PATH": "/usr/bin:/bin", "HOME": name},
        )
        assert result.returncode == 0, result.stderr.decode() + patch
        assert _files(read_tree(work)) == _files(after)


def _plain(tree: dict) -> dict:
    """The modes that a patch can carry; no empty directories, which git does not keep, and no
    link that leads to itself, which git cannot replace by a directory."""
    plain = {}
    for name, (kind, content, mode) in tree.items():
        if kind == "dir":
            inner = _plain(content)
            if inner:
                plain[name] = (kind, inner, 0o755)
        else:
            shown = (b"../" if kind == "symlink" else b"") + content
            plain[name] = (kind, shown, 0o755 if mode == 0o755 else 0o644 if kind == "file" else 0)
    return plain


def _files(tree: dict, folder: bytes = b"") -> dict:
    found = {}
    for name, (kind, content, mode) in tree.items():
        path = folder + name
        if kind == "dir":
            found |= _files(content, path + b"/")
        else:
            found[path] = (kind, content, mode)
    return found
