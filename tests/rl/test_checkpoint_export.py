"""An exported checkpoint loads in plain transformers and PEFT, in a process that cannot import nano."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from integration.tiny_model import build_tiny
from nano_coder.models.opening import open_weights
from nano_rl.cli import cli
from nano_shared.checkpoint import Manifest, read_checkpoint, write_manifest
from nano_shared.command_line import run_command
from nano_shared.files import content_hash

IDS = [5, 9, 40, 7]

LOAD = """
import importlib.util, json, sys
sys.path.append(sys.argv[1])
assert importlib.util.find_spec("nano_coder") is None and importlib.util.find_spec("nano_shared") is None
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, how = sys.argv[2:4]
if how == "merged":
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert type(model).__name__ == "LlamaForCausalLM"
else:
    from peft import AutoPeftModelForCausalLM, PeftModel
    model = AutoPeftModelForCausalLM.from_pretrained(folder)
    base = json.load(open(folder + "/adapter_config.json"))["base_model_name_or_path"]
    over = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
    own, other = model.state_dict(), over.state_dict()
    assert own.keys() == other.keys() and all(torch.equal(own[name], other[name]) for name in own)
tokenizer = AutoTokenizer.from_pretrained(folder)
assert "im_start" in tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
with torch.no_grad():
    print(json.dumps(model.eval()(torch.tensor([json.loads(sys.argv[4])])).logits[0, -1].tolist()))
"""


def logits_elsewhere(folder: Path, how: str) -> torch.Tensor:
    """The last logits of a model as a process without our packages loads it: -S reads no .pth file."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    packages = sysconfig.get_paths()["purelib"]
    done = subprocess.run(
        [sys.executable, "-S", "-W", "ignore", "-c", LOAD, packages, str(folder), how, json.dumps(IDS)],
        capture_output=True, text=True, check=False, cwd=folder.parent, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return torch.tensor(json.loads(done.stdout.splitlines()[-1]))


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter that changes what its base says."""
    from peft import LoraConfig, get_peft_model

    folder = tmp_path_factory.mktemp("models")
    base = build_tiny(folder / "tiny", ["def f(a): return a + 1"] * 20)
    model: Any = get_peft_model(
        open_weights(str(base)).loaded.model,
        LoraConfig(r=2, target_modules=["q_proj"], base_model_name_or_path=str(base)),
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.05)
    model.save_pretrained(folder / "adapter")
    return folder / "adapter"


def nano_rl(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        run_command(cli, [str(a) for a in arguments])
    return int(ended.value.code or 0)


def our_logits(name: Path) -> torch.Tensor:
    with torch.no_grad():
        return open_weights(str(name)).loaded.model(torch.tensor([IDS])).logits[0, -1]


@pytest.mark.slow
def test_a_merged_export_is_one_model_for_plain_transformers(adapter: Path, tmp_path: Path) -> None:
    assert nano_rl("checkpoints", "export", adapter, "--to", tmp_path / "deep/out") == 0
    assert torch.allclose(logits_elsewhere(tmp_path / "deep/out", "merged"), our_logits(adapter), atol=1e-5)


def test_an_adapter_export_loads_in_plain_peft_by_its_name_and_over_its_base(
    adapter: Path, tmp_path: Path
) -> None:
    assert nano_rl("checkpoints", "export", adapter, "--to", tmp_path / "out", "--adapter") == 0
    found = logits_elsewhere(tmp_path / "out/adapter", "adapter")
    assert torch.allclose(found, our_logits(adapter), atol=1e-4)
    assert not torch.allclose(found, our_logits(tmp_path / "out/base"), atol=1e-3)


def test_an_export_names_the_checkpoint_that_it_is(adapter: Path, tmp_path: Path) -> None:
    """A server that names the folder, as vLLM does, is known by it, and its runs may train."""
    mine = shutil.copytree(adapter, tmp_path / "mine")
    opened = open_weights(str(adapter))
    template = opened.profile.chat_template or ""
    written = write_manifest(mine, Manifest(
        name="mine", kind="adapter", base_model="tiny", profile=opened.profile.name, policy_version=7,
        profile_hash=opened.profile.hash, template_hash=content_hash(template),
        tools_hash=opened.profile.tools_hash, code_version="0", created=0.0,
    ))  # fmt: skip
    for out, more, kind in (("merged", (), "full"), ("apart", ("--adapter",), "adapter")):
        assert nano_rl("checkpoints", "export", mine, "--to", tmp_path / out, *more) == 0
        folder = tmp_path / out / "adapter" if more else tmp_path / out
        manifest = read_checkpoint(folder)
        assert manifest.model_copy(update={"kind": "adapter", "files": written.files}) == written
        assert manifest.kind == kind
        assert (folder / "chat_template.jinja").read_text() == template
        assert open_weights(str(folder)).version == 7


def dtypes(folder: Path) -> set[str]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {file.get_slice(name).get_dtype() for name in file.offset_keys()}


def test_an_export_keeps_the_dtype_and_says_what_rounding_leaves_of_an_adapter(
    adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert nano_rl("checkpoints", "export", adapter, "--to", tmp_path / "wide") == 0
    assert dtypes(tmp_path / "wide") == {"F32"}
    assert (
        "100.0% of the adapter's change of the weights is in the merged float32 ones\n"
        in capsys.readouterr().err
    )
    base = adapter.parent / "tiny"
    assert nano_rl("checkpoints", "export", base, "--to", tmp_path / "narrow", "--dtype", "bfloat16") == 0
    assert "adapter" not in capsys.readouterr().err
    assert nano_rl("checkpoints", "export", tmp_path / "narrow", "--to", tmp_path / "again") == 0
    assert dtypes(tmp_path / "again") == {"BF16"}
    # a thousandth of what was trained, over weights of bfloat16
    young = shutil.copytree(adapter, tmp_path / "young")
    weights = {name: value * 1e-3 for name, value in load_file(young / "adapter_model.safetensors").items()}
    save_file(weights, young / "adapter_model.safetensors", metadata={"format": "pt"})
    config = json.loads((young / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = str(tmp_path / "narrow")
    (young / "adapter_config.json").write_text(json.dumps(config))
    capsys.readouterr()
    assert nano_rl("checkpoints", "export", young, "--to", tmp_path / "merged") == 0
    assert dtypes(tmp_path / "merged") == {"BF16"}
    pattern = (
        r"([0-9.]+)% of the adapter's change .* merged bfloat16 ones; --dtype float32 or --adapter keeps"
    )
    said = re.search(pattern, capsys.readouterr().err)
    assert said is not None
    assert float(said[1]) < 50


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_files_of_an_export_have_the_mode_that_the_umask_gives(
    adapter: Path, tmp_path: Path, umask: int, mode: int
) -> None:
    before = os.umask(umask)
    try:
        assert nano_rl("checkpoints", "export", adapter, "--to", tmp_path / "out", "--adapter") == 0
    finally:
        os.umask(before)
    files = [file for file in (tmp_path / "out").rglob("*") if file.is_file()]
    assert {file.name for file in files} >= {"model.safetensors", "adapter_model.safetensors"}
    assert {file.stat().st_mode & 0o777 for file in files} == {mode}


def test_what_cannot_be_exported_is_refused(
    adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert nano_rl("checkpoints", "export", adapter, "--to", tmp_path) == 2
    assert "exists; name a new folder" in capsys.readouterr().err
    full = adapter.parent / "tiny"
    assert nano_rl("checkpoints", "export", full, "--to", tmp_path / "out", "--adapter") == 2
    assert "is a full model, not an adapter" in capsys.readouterr().err
    assert nano_rl("checkpoints", "export", "no-such", "--to", tmp_path / "out") == 2
    assert list(tmp_path.glob("*out*")) == []
