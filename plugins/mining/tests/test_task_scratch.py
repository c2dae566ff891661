"""Where checks run: no plugins of others in an oracle's pytest, and logs in memory where there is room."""

from __future__ import annotations

from collections import namedtuple
from contextlib import closing
from pathlib import Path

import pytest

from nano_mining.task_check import log_folder, scratch_runtime
from nano_shared import files
from nano_shared.types import Limits

Usage = namedtuple("Usage", "total used free")


def test_programs_see_that_plugins_stay_out_and_what_they_are_given(tmp_path: Path) -> None:
    runtime = scratch_runtime(tmp_path)
    with runtime.store, closing(runtime.sandbox.open(None, Limits())) as jail:
        asked = ["sh", "-c", "echo $PYTEST_DISABLE_PLUGIN_AUTOLOAD $OWN"]
        assert jail.run(asked).stdout == b"1\n"
        assert jail.run(asked, env={"OWN": "x"}).stdout == b"1 x\n"
        assert jail.run(asked, env={"PYTEST_DISABLE_PLUGIN_AUTOLOAD": ""}).stdout == b"\n"


@pytest.mark.parametrize(("free", "there"), [(1 << 40, True), (1 << 20, False)])
def test_logs_lie_in_memory_where_there_is_room(
    free: int, there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_MEMORY", tmp_path)
    monkeypatch.setattr(files.shutil, "disk_usage", lambda _: Usage(free, 0, free))
    with log_folder() as folder:
        assert (Path(folder).parent == tmp_path) is there
    assert not Path(folder).exists()


def test_a_machine_without_such_a_place_uses_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_MEMORY", Path("/nowhere"))
    with log_folder() as folder:
        assert Path(folder).is_dir()
