"""The tiny model is the same bytes for the same seed, and loads like any other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from integration.tiny_model import SPECIAL_TOKENS, build_tiny
from nano_coder.models.weights import load_policy

TEXTS = ["def add(a, b):\n    return a + b\n", "print(add(12, 345))\n", "naïve 日本\n"] * 5


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


@pytest.mark.slow
def test_the_same_seed_writes_the_same_bytes_in_any_process(tmp_path: Path) -> None:
    here = build_tiny(tmp_path / "here", TEXTS, seed=3, hidden=64, layers=1)
    code = (
        "import sys; from integration.tiny_model import build_tiny;"
        f"build_tiny(sys.argv[1], {TEXTS!r}, seed=3, hidden=64, layers=1)"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "there")], check=True, env=environment)
    assert contents(here) == contents(tmp_path / "there")


def test_another_seed_is_another_model_with_the_same_tokenizer(tmp_path: Path) -> None:
    first = contents(build_tiny(tmp_path / "a", TEXTS, seed=0, hidden=64, layers=1))
    second = contents(build_tiny(tmp_path / "b", TEXTS, seed=1, hidden=64, layers=1))
    assert [name for name in first if first[name] != second[name]] == ["model.safetensors"]


def test_it_does_not_touch_the_global_seed(tmp_path: Path) -> None:
    import torch

    before = torch.get_rng_state()
    build_tiny(tmp_path, TEXTS, hidden=64, layers=1)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.slow
def test_the_default_is_about_a_million_parameters(tmp_path: Path) -> None:
    texts = [file.read_text() for file in sorted(Path(__file__).parents[2].rglob("*/nano_*/*.py"))]
    loaded = load_policy(str(build_tiny(tmp_path, texts)))
    parameters = sum(p.numel() for p in loaded.model.parameters())
    assert 0.7e6 < parameters < 1.5e6
    assert loaded.context_limit == 1024
    assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> object:
    return load_policy(str(build_tiny(tmp_path_factory.mktemp("t"), TEXTS, hidden=64, layers=1))).tokenizer


@pytest.mark.parametrize("text", ["", "return a", "  \t\r\n x", "\x00\x7f é 日本 🦊", "x" * 300])
def test_any_text_comes_back(tokenizer: object, text: str) -> None:
    from transformers import PreTrainedTokenizerFast

    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_digits_stand_alone(tokenizer: object) -> None:
    from transformers import PreTrainedTokenizerFast

    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    assert tokenizer.tokenize("12345") == list("12345")


def test_special_tokens_are_the_first_ids(tokenizer: object) -> None:
    from transformers import PreTrainedTokenizerFast

    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == [0, 1, 2]
    assert tokenizer.all_special_ids == [1, 2, 0]
