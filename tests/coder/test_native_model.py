"""A model in its own tongue goes the whole way: run, verify, admit, imitate, train, promote, export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tongues
import torch
from typer.testing import CliRunner

from nano_coder.agent.dialects.dialect import DIALECTS
from nano_coder.agent.profiles import find_profile, system_text
from nano_coder.cli import cli as coder
from nano_coder.models.opening import default_model, open_weights, own_profile
from nano_coder.models.weights import quiet_transformers
from nano_rl.cli import cli as rl
from nano_shared.errors import NanoError
from nano_shared.store import LogStore
from nano_shared.types import Split
from nano_suites.drawing import make_tasks

PROFILES = {"qwen-3": "native-1-hermes-json", "llama-3": "native-1-llama-3", "gemma-3": "prompted-1-gemma"}
MODEL_TYPES = {"qwen-3": "qwen2", "llama-3": "llama", "gemma-3": "llama"}


def build(folder: Path, family: str) -> Path:
    """A random model of the family's kind, as its makers publish it: weights, tokenizer, chat template."""
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = tongues.tokenizer(family)
    config = AutoConfig.for_model(
        MODEL_TYPES[family], vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=6000,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(config)
    with quiet_transformers():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder


def test_a_family_that_ignores_its_template_is_shown_the_form_that_it_keeps(tmp_path: Path) -> None:
    folder = build(tmp_path / "Qwen2.5-Coder-0.1B-Instruct", "qwen-3")
    assert own_profile(str(folder)) == "prompted-1-tools-json"
    profile = find_profile("prompted-1-tools-json")
    system = system_text(profile, profile.tools)
    calls = (
        DIALECTS["tools-json"]
        .parse(system.partition("of calls:")[2].partition("\n\n")[0], profile.tools)
        .calls
    )
    assert [call.name for call in calls[:3]] == ["shell", "read_file", "submit"]
    other = build(tmp_path / "qwen2.5-0.1b-instruct", "qwen-3")
    assert own_profile(str(other)) == PROFILES["qwen-3"]


@pytest.fixture(
    params=[name if name == "qwen-3" else pytest.param(name, marks=pytest.mark.slow) for name in PROFILES]
)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def home(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    torch.set_num_threads(1)
    monkeypatch.setenv("NANO_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    build(tmp_path / "model", family)
    (tmp_path / "repo").mkdir()
    (tmp_path / "repo" / "a.py").write_text("x = 1\n")
    return tmp_path


def invoke(program: Any, *arguments: object, code: int | None = 0) -> str:
    result = CliRunner().invoke(program, [str(a) for a in arguments], catch_exceptions=False)
    assert code is None or result.exit_code == code, result.output
    return result.stdout


@pytest.mark.slow
def test_the_whole_way(home: Path, family: str) -> None:
    model, small = home / "model", ("--limit", "max_turns=2", "--limit", "max_completion_tokens=6")
    invoke(
        coder, "run", "Say hello.", "-C", home / "repo", "--model", model, "--check", "true",
        "--temperature", "1", *small, code=None,
    )  # fmt: skip
    with LogStore.open() as store:
        (run,) = store.trajectories()
    assert run.profile == PROFILES[family]
    assert {turn.parser for turn in run.turns} == {PROFILES[family].partition("-1-")[2]}
    opened = open_weights(str(model))
    first = run.turns[0].completion.tokens
    assert first is not None
    bos = opened.loaded.tokenizer.bos_token_id
    assert bos is None or (first.context_ids[0], first.context_ids.count(bos)) == (bos, 1)
    text = opened.loaded.tokenizer.decode(first.context_ids)
    assert "Say hello." in text
    assert '"read_file"' in text
    told = invoke(coder, "log", "verify", run.id, code=None)
    assert "may train a policy gradient" in told, told

    tasks = home / "tasks.jsonl"
    made = make_tasks(levels=[0], n=2, seed=1, split=Split.TRAIN, views=["copy"])
    tasks.write_text("".join(task.model_dump_json() + "\n" for task in made))
    chats = home / "chats.jsonl"
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    chats.write_text(json.dumps({"messages": talk * 2}) + "\n")
    invoke(rl, "sft", "--messages", chats, "--model", model, "--name", "imitated", "--epochs", "1")
    invoke(
        rl, "train", "--model", "imitated", "--tasks", tasks, "--name", "trained", "--steps", "1",
        "--prompts", "1", "--group-size", "2", "--set", "guards.patience=9", *small,
    )  # fmt: skip
    trained = open_weights("trained")
    assert trained.profile.name == PROFILES[family]
    assert trained.loaded.chat_template == tongues.source(family)
    judged = json.loads(invoke(rl, "admit", "--model", "trained", "--json"))
    assert judged["policy"]["profile"] == PROFILES[family]
    invoke(rl, "eval", "--model", "trained", "--tasks", tasks, "--json", *small)
    invoke(rl, "checkpoints", "promote", "trained", "--against", "imitated", "--force")
    assert default_model() == str(home / "home" / "checkpoints" / "trained")
    invoke(rl, "checkpoints", "export", "trained", "--to", home / "exported")

    from transformers import AutoModelForCausalLM, AutoTokenizer

    with quiet_transformers():
        plain = AutoModelForCausalLM.from_pretrained(home / "exported", local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(home / "exported", local_files_only=True)
    ids = torch.tensor([first.context_ids])
    with torch.no_grad():
        assert torch.allclose(plain(ids).logits, trained.loaded.model(ids).logits, atol=1e-5)
    assert tokenizer.chat_template == tongues.source(family)


BROKEN = "{{ raise_exception('no messages today') }}"


@pytest.mark.parametrize(
    ("files", "arguments", "said"),
    [
        ({"chat_template.jinja": ""}, (), "has no chat template; put one into its folder as chat_template"),
        ({"chat_template.jinja": BROKEN}, (), "no messages today; NANO_PROFILE=compact-1 brings a template"),
        ({"chat_template.jinja": "{% for %}"}, (), "refuses messages of roles [user]: Expected an exp"),
        ({}, ("--set", "profile=native-1-klingon"), "unknown dialect 'klingon' of the interface profile"),
    ],
)  # fmt: skip
def test_a_model_that_cannot_talk_is_refused_in_a_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    files: dict[str, str],
    arguments: tuple[str, ...],
    said: str,
) -> None:
    monkeypatch.setenv("NANO_HOME", str(tmp_path / "home"))
    folder = build(tmp_path / "model", "qwen-3")
    for name, text in files.items():
        (folder / name).write_text(text)
    refused(tmp_path, folder, said, *arguments)


def test_a_model_without_an_end_of_turn_is_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NANO_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("nano_coder.models.weights.LoadedModel.eos_ids", frozenset())
    refused(tmp_path, build(tmp_path / "model", "qwen-3"), "no end-of-turn token: set eos_token in its")


def refused(tmp_path: Path, model: object, said: str, *arguments: str) -> None:
    with pytest.raises(NanoError) as caught:
        invoke(coder, "run", "Hi.", "-C", tmp_path, "--model", model, *arguments)
    assert caught.value.exit_code == 2
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def gguf_file(path: Path, architecture: str) -> Path:
    from gguf import GGUFWriter

    writer = GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_that_transformers_cannot_read_is_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NANO_HOME", str(tmp_path / "home"))
    (tmp_path / "g").mkdir()
    file = gguf_file(tmp_path / "g" / "a.gguf", "klingon")
    for name in (file, tmp_path / "g"):
        refused(tmp_path, name, "a.gguf' cannot be loaded: GGUF model with architecture klingon is not")
    (tmp_path / "g" / "b.gguf").write_bytes(b"no model")
    refused(tmp_path, tmp_path / "g" / "b.gguf", "b.gguf' cannot be loaded")
    refused(tmp_path, tmp_path / "g", "holds 2 GGUF files; name one, such as")
    assert list((tmp_path / "home" / "models").glob("*/*")) == []


def test_a_hub_id_without_a_network_is_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NANO_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    refused(tmp_path, "nobody/nothing", "unknown model 'nobody/nothing': not a folder, and the hub says")
