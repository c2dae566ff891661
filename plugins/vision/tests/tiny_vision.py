"""Tiny random vision-language models of two families, written from their configurations in Hugging Face
format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

QWEN = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif 'text' in part %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""as Qwen2.5-VL's, without videos"""
IDEFICS = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
"""SmolVLM's and Idefics3's"""
_TEXT: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 4096, "initializer_range": 0.3,
    "tie_word_embeddings": False,
}  # fmt: skip


def build_tiny_vision(folder: Path, family: str) -> Path:
    """`family` is qwen2_5_vl or idefics3."""
    import torch

    torch.manual_seed(0)
    {"qwen2_5_vl": _qwen, "idefics3": _idefics}[family](folder)
    return folder


def _tokenizer(folder: Path, template: str, end: str, special: list[str]) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bare = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bare, eos_token=end, pad_token="<|endoftext|>")
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return tokenizer


def _save(model: Any, folder: Path) -> None:
    from nano_coder.models.weights import quiet_transformers

    model.generation_config.eos_token_id = model.config.get_text_config().eos_token_id
    with quiet_transformers():
        model.save_pretrained(folder)


def _qwen(folder: Path) -> None:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    special = ["<|im_start|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tokenizer = _tokenizer(folder, QWEN, "<|im_end|>", special)
    named = dict(zip(special, tokenizer.convert_tokens_to_ids(special), strict=True))
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}
    ends = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    config = Qwen2_5_VLConfig(
        text_config=_TEXT | {"vocab_size": len(tokenizer), "rope_parameters": rope} | ends,
        vision_config={
            "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32,
            "patch_size": 14, "spatial_merge_size": 2, "window_size": 56, "fullatt_block_indexes": [1],
            "initializer_range": 0.3,
        },
        image_token_id=named["<|image_pad|>"], video_token_id=named["<|video_pad|>"],
        vision_start_token_id=named["<|vision_start|>"], vision_end_token_id=named["<|vision_end|>"],
    )  # fmt: skip
    _save(Qwen2_5_VLForConditionalGeneration(config), folder)
    Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=16 * 28 * 28).save_pretrained(folder)


def _idefics(folder: Path) -> None:
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
    from transformers.models.idefics3.processing_idefics3 import Idefics3Processor

    places = [f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)]
    special = ["<|im_start|>", "<image>", "<fake_token_around_image>", "<global-img>", *places]
    tokenizer = _tokenizer(folder, IDEFICS, "<end_of_utterance>", special)
    text = _TEXT | {"model_type": "llama", "vocab_size": len(tokenizer), "pad_token_id": 0}
    config = Idefics3Config(
        text_config=text | {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": None},
        vision_config={
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
            "patch_size": 7, "image_size": 28, "initializer_range": 0.3,
        },
        scale_factor=2, image_token_id=tokenizer.convert_tokens_to_ids("<image>"), pad_token_id=0,
    )  # fmt: skip
    _save(Idefics3ForConditionalGeneration(config), folder)
    images = Idefics3ImageProcessorPil(size={"longest_edge": 56}, max_image_size={"longest_edge": 28})
    Idefics3Processor(images, tokenizer, image_seq_len=4).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
