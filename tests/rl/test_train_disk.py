"""A disk that fills while a training saves: one sentence, and what was saved before is whole."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from looping import CONFIG, TASKS, Loop, logged_groups, same, tiny_model

from nano_coder.models.opening import open_weights
from nano_rl.checkpoints.checkpoint import Learned, save_checkpoint
from nano_rl.gather.step_groups import Sources
from nano_rl.resume import States
from nano_shared.errors import CheckpointError


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@contextmanager
def largest_file(size: int | None) -> Iterator[None]:
    """Files may not grow beyond `size` bytes: to whoever writes, a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if size is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.slow
def test_a_state_that_does_not_fit_leaves_the_one_before_it(tiny: Path, tmp_path: Path) -> None:
    sources = Sources(logged=logged_groups(tiny, tmp_path / "log.db"))
    expected = Loop(tiny, tmp_path / "whole").go(sources=sources, score=None, group_size=0)
    loop = Loop(tiny, tmp_path / "full")

    def fill(done: int, *_: object) -> None:
        if done == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    with (
        largest_file(None),
        pytest.raises(CheckpointError, match=r"no space left while writing .*states") as e,
    ):
        # the state of step 2 is being written when the limit falls, that of step 3 meets it
        loop.go(sources=sources, score=None, group_size=0, on_step=fill)
    assert e.value.exit_code == 2
    states = States(loop.folder / "states")
    newest = states.steps()[-1]
    assert newest in (1, 2)
    assert states.read(newest)[0].step == newest
    assert not list((loop.folder / "states").glob(".*.tmp-*"))
    assert same(loop.go(sources=sources, score=None, group_size=0), expected)


def test_a_checkpoint_that_does_not_fit_is_not_there(tiny: Path, tmp_path: Path) -> None:
    opened = open_weights(str(tiny))
    target = tmp_path / "checkpoints" / "one"
    with largest_file(20_000), pytest.raises(CheckpointError, match=r"no space left while writing .*one"):
        save_checkpoint(
            target, opened.loaded.model, opened, parent="tiny", config=CONFIG,
            learned=Learned(steps=1, tasks=TASKS),
        )  # fmt: skip
    assert [path.name for path in target.parent.iterdir()] == [".one.lock"]
