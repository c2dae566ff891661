"""A model folder is a stranger's: only tensors are read from it, and it runs no code of its own."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import pytest

from nano_coder.models.weights import load_policy
from nano_shared.errors import UsageError


class _Bomb:
    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> object:
        return (open, (str(self.canary), "w"))


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_folder, tmp_path / "model"))


def planted(path: Path, canary: Path) -> None:
    path.write_bytes(pickle.dumps(_Bomb(canary)))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.ckpt"])
def test_pickled_weights_are_refused_unread(folder: Path, tmp_path: Path, name: str) -> None:
    for file in folder.glob("*.safetensors"):
        file.unlink()
    planted(folder / name, tmp_path / "canary")
    with pytest.raises(UsageError, match=f"pickles .{name}.*save_pretrained") as raised:
        load_policy(str(folder))
    assert raised.value.exit_code == 2
    assert not (tmp_path / "canary").exists()


def test_pickles_beside_tensors_are_not_read(folder: Path, tmp_path: Path) -> None:
    planted(folder / "pytorch_model.bin", tmp_path / "canary")
    planted(folder / "training_args.bin", tmp_path / "canary")
    load_policy(str(folder))
    assert not (tmp_path / "canary").exists()


def test_an_adapters_pickles_are_refused(folder: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    settings = {"peft_type": "LORA", "base_model_name_or_path": str(folder), "r": 4}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    planted(adapter / "adapter_model.bin", tmp_path / "canary")
    with pytest.raises(UsageError, match="pickles"):
        load_policy(str(adapter))
    (adapter / "adapter_model.bin").unlink()
    (adapter / "adapter_config.json").write_text("[" * 10_000)
    with pytest.raises(UsageError, match="no JSON"):
        load_policy(str(adapter))
    (adapter / "adapter_config.json").write_text(json.dumps(settings | {"megatron_config": {"a": 1}}))
    with pytest.raises(UsageError, match="Megatron"):
        load_policy(str(adapter))
    assert not (tmp_path / "canary").exists()


def test_code_beside_a_model_does_not_run(folder: Path, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    for name in ("modeling_theirs", "tokenization_theirs", "configuration_theirs"):
        (folder / f"{name}.py").write_text(f"open({str(canary)!r}, 'w')\n")
    config = json.loads((folder / "config.json").read_text())
    theirs = {
        "AutoConfig": "configuration_theirs.Config",
        "AutoModelForCausalLM": "modeling_theirs.Model",
        "AutoTokenizer": ["tokenization_theirs.T", "tokenization_theirs.T"],
    }
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": theirs, "model_type": "theirs"}))
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps(tokenizer | {"auto_map": theirs, "tokenizer_class": "T"})
    )
    with pytest.raises(UsageError, match="cannot be loaded"):
        load_policy(str(folder))
    assert not canary.exists()


def test_damaged_tensors_are_named(folder: Path) -> None:
    (file,) = folder.glob("*.safetensors")
    file.write_bytes(b"\x08\0\0\0\0\0\0\0notjson!")
    with pytest.raises(UsageError, match="cannot be loaded"):
        load_policy(str(folder))


@pytest.mark.slow
def test_weights_are_loaded_by_name_of_what_is_safe() -> None:
    """Wherever transformers loads anything, both are said; torch.load takes nothing but tensors."""
    import ast

    root = Path(__file__).parents[2]
    missing = []
    for path in [p for d in ("nano_coder", "nano_rl") for p in (root / d).rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            said = {k.arg for k in node.keywords}
            place = f"{path.name}:{node.lineno}"
            owner = ast.unparse(node.func.value)
            if node.func.attr == "from_pretrained" and owner.startswith("Auto"):
                needed = {"trust_remote_code"} | ({"use_safetensors"} if "Model" in owner else set())
                if None not in said and not needed <= said:
                    missing.append(place)
            if ast.unparse(node.func) == "torch.load" and "weights_only" not in said:
                missing.append(place)
    assert missing == []
