"""Hypothesis strategy for directory trees, and the functions that write and read them plainly."""

from __future__ import annotations

import os
from pathlib import Path

from hypothesis import strategies as st

Node = tuple[str, object, int]
"""kind, content, mode; a directory's content is a dict of names to nodes"""

# Few names, so that two trees often share some; one is not UTF-8, one has a space, one a quote.
_names = st.sampled_from([b"a", b"b", b"a-b", b"sub", b"n\xff", b"with space", b'q"\n', "é".encode()])
_contents = st.binary(max_size=20) | st.sampled_from([b"", b"1\n2\n3\n", b"1\nzwei\n3", b"\0bin"])
_files = st.tuples(st.just("file"), _contents, st.sampled_from([0o644, 0o755, 0o600, 0o444]))
_targets = st.sampled_from([b"a", b"../out", b"/etc/passwd", b"\xff"])
_links = st.tuples(st.just("symlink"), _targets, st.just(0))
_nodes = st.recursive(
    _files | _links,
    lambda inner: st.tuples(
        st.just("dir"), st.dictionaries(_names, inner, max_size=3), st.sampled_from([0o755, 0o700])
    ),
    max_leaves=6,
)
trees = st.dictionaries(_names, _nodes, max_size=4)


def write_tree(directory: Path | bytes, tree: dict[bytes, Node]) -> None:
    for name, (kind, content, mode) in tree.items():
        path = os.path.join(os.fsencode(directory), name)
        if kind == "symlink":
            os.symlink(content, path)
        elif kind == "dir":
            os.mkdir(path)
            write_tree(path, content)
            os.chmod(path, mode)
        else:
            with open(path, "wb") as file:
                file.write(content)
            os.chmod(path, mode)


def read_tree(directory: Path | bytes) -> dict[bytes, Node]:
    """What is there, byte for byte: the inverse of write_tree."""
    tree: dict[bytes, Node] = {}
    with os.scandir(os.fsencode(directory)) as listing:
        for item in listing:
            mode = item.stat(follow_symlinks=False).st_mode & 0o777
            if item.is_symlink():
                tree[item.name] = ("symlink", os.readlink(item.path), 0)
            elif item.is_dir():
                tree[item.name] = ("dir", read_tree(item.path), mode)
            else:
                with open(item.path, "rb") as file:
                    tree[item.name] = ("file", file.read(), mode)
    return tree
