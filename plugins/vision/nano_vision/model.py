"""A vision-language model of transformers: its weights, and its processor, which turns images into pixels and
into the tokens that stand for them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageOps
from torch import Tensor

from nano_coder.models import weights
from nano_shared.errors import ConfigError, UsageError
from nano_shared.files import user_path
from nano_shared.types import ImageRef
from nano_vision.image_file import FORMATS


@dataclass(frozen=True, slots=True, kw_only=True)
class Pixels:
    """The images of one row as the model takes them."""

    tensors: dict[str, Tensor]
    """arguments of the model's forward pass, such as `pixel_values`; none for a row without images"""
    texts: tuple[str, ...]
    """for each image, what stands in the prompt in place of the template's image token"""


@dataclass(frozen=True, kw_only=True)
class VisionModel:
    model: Any
    """in eval mode; of an adapter, PEFT's model over the base"""
    processor: Any
    tokenizer: Any
    template: str
    """Jinja source of the chat template"""
    id: str
    """content hash of the weights; of a hub model, its name"""
    name: str
    """folder or hub id that the weights were loaded from"""

    def with_model(self, model: Any) -> VisionModel:
        return replace(self, model=model)

    @property
    def device(self) -> torch.device:
        device: torch.device = next(self.model.parameters()).device
        return device

    @cached_property
    def end_id(self) -> int | None:
        """The token that the chat template writes behind an assistant message, if any."""
        written = [[{"role": r, "content": [{"type": "text", "text": "x"}]} for r in ("user", "assistant")]]
        text = str(self.tokenizer.apply_chat_template(*written, chat_template=self.template, tokenize=False))
        after = self.tokenizer(text.rpartition("x")[2], add_special_tokens=False)["input_ids"]
        added = self.tokenizer.added_tokens_decoder
        return after[0] if after and after[0] in added and added[after[0]].special else None

    @property
    def eos_ids(self) -> frozenset[int]:
        """Ids of tokens that end a turn."""
        configured = getattr(self.model.generation_config, "eos_token_id", None)
        ids = configured if isinstance(configured, list) else [configured]
        return frozenset(i for i in (*ids, self.tokenizer.eos_token_id, self.end_id) if i is not None)

    @property
    def context_limit(self) -> int:
        return int(self.model.config.get_text_config().max_position_embeddings)

    @cached_property
    def _taken(self) -> frozenset[str]:
        """Arguments of the model's own forward pass."""
        own = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        return frozenset(inspect.signature(own.forward).parameters)

    def look(self, images: Sequence[ImageRef], get_blob: Callable[[str], bytes] | None) -> Pixels:
        """The pixels of the images of a row, in order. Raises LogError for a blob that is missing."""
        if not images:
            return Pixels(tensors={}, texts=())
        assert get_blob is not None  # whoever shows images gives it
        opened = [_opened(get_blob(image.blob)) for image in images]
        shown = self.processor.prepare_inputs_layout(
            images=opened, text=[self.processor.image_token * len(opened)]
        )[0]  # nested as the processor of images takes them
        usual = self.processor.valid_processor_kwargs._defaults.get("images_kwargs", {})
        made, texts = self.processor._process_images(shown, **usual, return_tensors="pt")
        tensors = {name: value for name, value in made.items() if name in self._taken}
        return Pixels(tensors=tensors, texts=tuple(texts))

    def arguments(self, ids: Sequence[int], pixels: Pixels) -> dict[str, Any]:
        """What the forward pass over a whole row of ids takes, on the model's device: ids and mask are
        [1, L]."""
        for module in self.model.modules():  # of another row: it would shift the positions of this one
            if getattr(module, "rope_deltas", None) is not None:
                module.rope_deltas = None
        ids_1L = torch.tensor([list(ids)])
        given = {"input_ids": ids_1L, "attention_mask": torch.ones_like(ids_1L), **pixels.tensors}
        if pixels.tensors and "mm_token_type_ids" in self._taken:
            kinds = self.processor.create_mm_token_type_ids([list(ids)])
            given["mm_token_type_ids"] = torch.as_tensor(kinds)
        return {name: self._placed(value) for name, value in given.items()}

    def _placed(self, value: Tensor) -> Tensor:
        dtype = self.model.dtype if value.is_floating_point() else value.dtype
        return value.to(self.device, dtype)


def _opened(data: bytes) -> Image.Image:
    """Upright, as browsers show it, and RGB."""
    with Image.open(BytesIO(data), formats=FORMATS) as image:
        return ImageOps.exif_transpose(image).convert("RGB")


def load_vision(name: str, *, dtype: str = "auto", device: str = "auto") -> VisionModel:
    """Load a folder in Hugging Face format, an adapter of PEFT over one, or a hub id. `dtype` auto is
    bfloat16 on a GPU, else float32.

    Raises UsageError for what is no vision-language model that transformers knows, ConfigError for a package
    that its processor needs.
    """
    from transformers import AutoConfig, AutoModelForImageTextToText

    folder = user_path(name)
    if (folder / "adapter_config.json").is_file():
        return _with_adapter(folder, dtype, device)
    source = str(folder.resolve()) if folder.is_dir() else name
    if not folder.is_dir() and (folder.exists() or name.count("/") != 1):
        raise UsageError(f"vision:{name}: no such folder; name one in Hugging Face format, or a hub id")
    placed = weights.place(device)
    chosen = dtype if dtype != "auto" else "bfloat16" if placed.type == "cuda" else "float32"
    try:
        with weights.quiet_transformers():
            config = AutoConfig.from_pretrained(source)
            tokenizer, template = weights.load_tokenizer(source)
            processor = _processor(config, source, tokenizer)
            model = AutoModelForImageTextToText.from_pretrained(source, dtype=getattr(torch, chosen))
    except (OSError, ValueError, KeyError) as problem:
        raise UsageError(f"vision:{name} is no vision-language model: {problem}") from None
    except ImportError as problem:
        raise ConfigError(f"vision:{name}: {problem}") from None
    if not template:
        raise UsageError(f"vision:{name} has no chat template: put chat_template.jinja into its folder")
    return VisionModel(
        model=model.to(placed).eval(), processor=processor, tokenizer=tokenizer, template=template,
        id=weights.policy_id(source) or f"vision:{name}", name=source,
    )  # fmt: skip


def _with_adapter(folder: Path, dtype: str, device: str) -> VisionModel:
    from peft import PeftModel

    base = load_vision(weights.adapter_base(folder), dtype=dtype, device=device)
    model = PeftModel.from_pretrained(base.model, str(folder)).eval()
    return VisionModel(
        model=model, processor=base.processor, tokenizer=base.tokenizer, template=base.template,
        id=str(weights.policy_id(str(folder))), name=base.name,
    )  # fmt: skip


def _processor(config: Any, source: str, tokenizer: Any) -> Any:
    """The model's processor, with images alone: that of videos needs torchvision. Raises UsageError for a
    model that has none, or none that says what stands for an image."""
    import transformers
    from transformers import AutoImageProcessor
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    name = PROCESSOR_MAPPING_NAMES.get(config.model_type)
    kind = getattr(transformers, str(name), None)
    if kind is None or not hasattr(kind, "replace_image_token"):
        raise UsageError(
            f"vision:{source}: transformers has no processor of images for {config.model_type!r}"
        )
    images = AutoImageProcessor.from_pretrained(source, backend="pil")
    known = inspect.signature(kind.__init__).parameters
    settings, _ = kind.get_processor_dict(source)
    parts = {"image_processor": images, "tokenizer": tokenizer}
    if "video_processor" in known:
        kind, parts["video_processor"] = _without_videos(kind), None
    own = {key: value for key, value in settings.items() if key in known and key not in parts}
    return kind(**{**own, **parts})


def _without_videos(kind: Any) -> Any:
    class Stills(kind):  # type: ignore[misc]  # known when it runs
        @classmethod
        def get_attributes(cls) -> list[str]:
            return [name for name in kind.get_attributes() if "video" not in name]

        @property
        def video_token_ids(self) -> list[int]:
            return []

    return Stills
