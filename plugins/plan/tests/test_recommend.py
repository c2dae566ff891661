"""A training for a GPU that is not here, and the command line that is recommended."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from integration.tiny_model import build_tiny
from nano_coder.models.weights import build_empty
from nano_plan import fit
from nano_plan.fit import plan_of
from nano_plan.memory import MemoryPlan, Workload
from nano_plan.recommend import Recommendation, recommend
from nano_rl.cli import cli
from nano_rl.config import TrainConfig
from nano_shared.errors import UsageError

GIB = 2**30
SEVEN: dict[str, Any] = {
    "model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064,
    "max_position_embeddings": 32768, "tie_word_embeddings": False,
}  # fmt: skip
"""the shape of Qwen2.5-Coder-7B"""
CARD = ("--device", "cuda", "--row-tokens", "8192")
WORK = Workload(rows=64, row_tokens=1000, kv_bytes=GIB, prompt_tokens=200, group_size=8)


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        cli([*arguments])
    assert ended.value.code in (0, None)
    return capsys.readouterr().out


def folder(path: Path, **changed: Any) -> str:
    (path / "config.json").write_text(json.dumps(SEVEN | changed))
    return str(path)


def test_prompts_are_counted_once_a_group_and_everything_twice() -> None:
    assert WORK.kv_tokens(8) == 2 * (8 * 800 + 200)
    assert WORK.kv_tokens(9) == 2 * (9 * 800 + 2 * 200)
    assert replace(WORK, prompt_tokens=0).kv_tokens(9) == 2 * 9 * 1000
    held = replace(WORK, kv_bytes=WORK.kv_tokens(9) * 10)
    assert held.rows_held(10) == 9
    assert replace(held, kv_bytes=held.kv_bytes - 1).rows_held(10) == 8
    assert replace(held, kv_bytes=10 * GIB).rows_held(10) == 64


def counted(config: TrainConfig, work: Workload) -> MemoryPlan:
    """A model of 10 GiB, 2.5 in 4 bits; a row of 1,000 tokens takes 4 GiB, and 1 if it is computed again."""
    assert config.dtype == "bfloat16"
    parts = {
        "weights": round((2.5 if config.quantise else 10) * GIB),
        "optimizer": 0 if config.lora_rank else 60 * GIB,
        "activations": (1 if config.gradient_checkpointing else 4) * GIB * config.max_tokens // 1000,
        "logits": 0,
        "KV cache": work.kv_bytes,
        "sampler's copy": 0 if config.quantise or not config.lora_rank else 8 * GIB,
    }
    shared = min(parts["activations"], parts["KV cache"] + parts["sampler's copy"])
    return MemoryPlan(parameters=1, trained=1, parts={**parts, "used in turn": -shared})


def found(gib: float, *, given: tuple[str, ...] = (), **settings: Any) -> Recommendation | None:
    token_bytes = GIB // 100_000  # 64 rows take 1.06 GiB
    config = TrainConfig(**settings)
    return recommend(counted, config, WORK, round(1.15 * gib * GIB), token_bytes=token_bytes, given=given)


def test_the_weights_that_cost_least_are_taken_first() -> None:
    shown = [
        (one.config.lora_rank, one.config.quantise, one.config.gradient_checkpointing)
        for gib in (75, 71.5, 22, 18.5, 7, 4)
        if (one := found(gib))
    ]
    assert shown == [
        (0, None, False), (0, None, True), (16, None, False), (16, None, False), (16, "4bit", False),
        (16, "4bit", True),
    ]  # fmt: skip
    assert found(2.6) is None


def test_micro_batches_and_rows_take_what_is_left() -> None:
    small, large = found(7), found(36.5)
    assert small is not None
    assert large is not None
    assert small.config.max_tokens == 1000
    assert (large.config.max_tokens, large.config.quantise) == (4096, None)
    assert (small.rows, large.rows) == (64, 64)
    for one, gib in ((small, 7), (large, 36.5)):
        exact = counted(
            one.config, replace(one.work, kv_bytes=min(one.work.kv_bytes, one.work.kv_tokens(64) * 10737))
        )
        assert one.total == pytest.approx(exact.total, rel=0.001)
        assert one.total <= gib * GIB
    tight = found(3.6)
    assert tight is not None
    assert tight.sets_kv
    assert 8 <= tight.rows < 64
    assert tight.work.kv_bytes <= 1.1 * GIB


def test_what_was_given_stays() -> None:
    assert found(7, given=("lora_rank",)) is None
    kept = found(75, given=("max_tokens", "lora_rank"), max_tokens=3000, lora_rank=4)
    assert kept is not None
    assert (kept.config.max_tokens, kept.config.lora_rank) == (3000, 4)
    bound = found(75, given=("kv_gib",))
    assert bound is not None
    assert (bound.sets_kv, bound.work.kv_bytes) == (False, GIB)
    assert "NANO_KV_GIB" not in bound.command("m", "cuda")


def test_a_folder_with_a_configuration_alone_is_planned_for_a_card_that_is_not_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = folder(tmp_path, num_hidden_layers=2)
    report = json.loads(printed(capsys, "plan", "--model", name, "--memory", "12", *CARD, "--json"))
    assert report["device"] == "cuda"
    assert report["available"] == 12 * GIB
    assert "training_tokens_per_second" not in report
    line = report["recommended"]["command"]
    assert report["recommended"]["total"] <= 12 * GIB / 1.15
    words = shlex.split(line.rpartition("nano-rl ")[2])
    settings = printed(capsys, *words, "--print-config").replace('"', "")
    chosen = [after for word, after in pairwise(words) if word == "--set"]
    assert {one.partition("=")[0] for one in chosen} >= {"dtype", "gradient_checkpointing", "max_tokens"}
    for one in [*chosen, f"lora_rank={words[words.index('--lora-rank') + 1]}"]:
        assert one.replace("=", " = ") in settings


@pytest.mark.slow
def test_seven_billion_weights_train_on_24_gib(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = folder(tmp_path)
    report = json.loads(printed(capsys, "plan", "--model", name, "--memory", "24", *CARD, "--json"))
    assert report["parameters"] == 7_615_616_512
    assert not report["fits"]
    best = report["recommended"]
    assert "--lora-rank 16 --set dtype=bfloat16 --set quantise=4bit" in best["command"]
    config = TrainConfig(
        lora_rank=16, dtype="bfloat16", quantise="4bit",
        gradient_checkpointing="gradient_checkpointing=true" in best["command"],
        max_tokens=int(best["command"].partition("max_tokens=")[2].split()[0]),
    )  # fmt: skip
    exact = plan_of(name, config, torch.device("cuda"), 8192, prompt_tokens=2048, memory=24 * GIB)
    work = replace(exact.work, rows=64, kv_bytes=round(best["kv_gib"] * GIB))
    again = exact.count(config, work)
    assert again.total <= 24 * GIB / 1.15
    assert again.total == pytest.approx(best["total"], rel=0.03)
    assert best["rows_together"] == work.rows_held(57_344) >= 8


SIZES = {
    "Qwen/Qwen2.5-0.5B": 494_032_768, "Qwen/Qwen2.5-Coder-1.5B-Instruct": 1_543_714_304,
    "qwen/qwen2.5-coder-3b": 3_085_938_688, "Qwen/Qwen2.5-Coder-7B-Instruct-GGUF": 7_615_616_512,
    "Qwen/Qwen2.5-14B-Instruct": 14_770_033_664, "Qwen/Qwen2.5-Coder-32B": 32_763_876_352,
}  # fmt: skip


@pytest.mark.parametrize("name", SIZES)
def test_shapes_have_the_published_numbers_of_parameters(name: str) -> None:
    shape = fit.known_shape(name)
    hidden, layers, inside = shape.hidden_size, shape.num_hidden_layers, shape.intermediate_size
    kept = hidden // shape.num_attention_heads * shape.num_key_value_heads
    attention = hidden * (2 * hidden + 2 * kept) + hidden + 2 * kept
    embeddings = shape.vocab_size * hidden * (1 if shape.tie_word_embeddings else 2)
    assert layers * (attention + 3 * hidden * inside + 2 * hidden) + hidden + embeddings == SIZES[name]


def test_a_model_of_the_catalogue_is_planned_before_it_is_fetched(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fit.known_shape("shipped") is None
    assert fit.known_shape("Qwen/Qwen2.5-Coder-9B") is None
    monkeypatch.setitem(fit._QWEN_SHAPES, "1.5B", (1536, 2, 12, 2, 8960))
    shown = printed(capsys, "plan", "--model", "coder-1.5b", "--memory", "24", *CARD)
    with torch.device("meta"):
        built = build_empty(fit.known_shape("coder-1.5b"))
    assert f"coder-1.5b on cuda: {sum(p.numel() for p in built.parameters()):,} parameters" in shown
    assert "nano-rl train --name NAME --tasks tasks.jsonl --model coder-1.5b --device cuda" in shown


def test_an_adapter_is_trained_on_at_its_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = build_tiny(tmp_path / "base", ["def f(x):\n    return x\n"] * 9, hidden=64, layers=1)
    tuned: Any = AutoModelForCausalLM.from_pretrained(base)
    get_peft_model(tuned, LoraConfig(r=3, target_modules="all-linear")).save_pretrained(tmp_path / "own")
    report = json.loads(
        printed(
            capsys, "plan", "--model", str(tmp_path / "own"), "--memory", "1", "--device", "cuda", "--json"
        )
    )
    assert (
        "--lora-rank 3 --set dtype=bfloat16 --set gradient_checkpointing=false"
        in (report["recommended"]["command"])
    )
    assert "quantise" not in report["recommended"]["command"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--memory", "0", "--device", "cuda"), r"--memory 0 is no number of GiB: .*--memory 24"),
        (("--memory", "-3", "--device", "cuda"), r"--memory -3 is no number of GiB"),
        (("--memory", "much"), r"--memory much is no number of GiB"),
        (("--memory", "nan"), r"--memory nan is no number of GiB"),
        (("--memory", "1e400"), r"--memory 1e400 is no number of GiB"),
        (("--memory", "900000", "--device", "cpu"), r"more than the .* GiB of this machine; .*--device cuda"),
        (("--device", "cuda"), r"sees no CUDA device here; .*--device cuda --memory 24"),
        (("--prompt-tokens", "2048"), r"leaves nothing to sample of a row of 2048: give --row-tokens"),
    ],
)
def test_what_cannot_be_is_a_sentence_that_says_what_to_type(
    arguments: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match=said) as refused:
        cli(["plan", "--model", folder(tmp_path), *arguments])
    assert refused.value.exit_code == 2
