"""A tiny model for the tests that need one, built once a process."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from integration.tiny_model import build_tiny

    root = pathlib.Path(__file__).parents[2]
    texts = [file.read_text() for file in sorted(root.glob("shared/nano_shared/*.py"))]
    return build_tiny(tmp_path_factory.mktemp("tiny"), texts, vocab_size=1024, hidden=64, layers=2)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch on one thread, so that parallel tests do not fight for cores."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model(tiny_folder: Path) -> Any:
    """A policy that is sure of itself: random weights of the usual size give a nearly flat distribution,
    which would hide mistakes."""
    import torch

    from nano_coder.models.weights import load_policy

    model: Any = load_policy(str(tiny_folder)).model
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3 if parameter.ndim == 2 else 1)
    return model
