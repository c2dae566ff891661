"""Reading files that a stranger may control leaves nothing open."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nano_shared.files import NotReadable, read_regular


def test_what_is_no_file_is_refused_and_leaves_no_descriptor_open(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "long").write_bytes(b"x" * 10)
    before = os.listdir("/proc/self/fd")
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "long"):
        with pytest.raises(NotReadable):
            read_regular(path, 9)
    assert read_regular(tmp_path / "long", 10) == b"x" * 10
    assert os.listdir("/proc/self/fd") == before
