"""Tokenizers of open families, with their control tokens and reductions of their chat templates."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "templates"

CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
CONTROLS: dict[str, tuple[str, ...]] = {
    "llama-3": ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
                "<|eot_id|>", "<|eom_id|>", "<|python_tag|>"),
    "qwen-2.5": CHATML,
    "qwen-3": CHATML,
    "mistral": ("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]",
                "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    "gemma-3": ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
    "gemma-2": ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
    "phi-3": ("<s>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
    "glm-4": ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>",
              "<|observation|>"),
    "gpt-oss": ("<|startoftext|>", "<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>",
                "<|constrain|>", "<|call|>"),
    "smollm2": CHATML,
    "smollm3": CHATML,
}  # fmt: skip
PLAIN: dict[str, tuple[str, ...]] = {
    "qwen-2.5": ("<tool_call>", "</tool_call>"),
    "qwen-3": ("<tool_call>", "</tool_call>", "<think>", "</think>", "<tool_response>", "</tool_response>"),
    "smollm3": ("<think>", "</think>"),
}
"""added tokens that are not special"""
BOS_EOS = {
    "llama-3": ("<|begin_of_text|>", "<|eot_id|>"),
    "mistral": ("<s>", "</s>"),
    "gemma-3": ("<bos>", "<end_of_turn>"),
    "gemma-2": ("<bos>", "<end_of_turn>"),
    "phi-3": ("<s>", "<|end|>"),
    "glm-4": (None, "<|observation|>"),
    "gpt-oss": ("<|startoftext|>", "<|return|>"),
}
ENDS = {"gpt-oss": ("<|return|>", "<|call|>"), "glm-4": ("<|user|>", "<|observation|>", "<|endoftext|>")}
"""tokens that end a turn, where EOS is not the only one"""
DIALECTS = {
    "llama-3": "llama-3", "qwen-2.5": "hermes-json", "qwen-3": "hermes-json", "mistral": "mistral",
    "gemma-3": "gemma", "gemma-2": "gemma", "phi-3": "hermes-json", "glm-4": "glm-4", "gpt-oss": "harmony",
    "smollm2": "hermes-json", "smollm3": "hermes-json",
}  # fmt: skip
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""the pattern of words that Llama 3, Qwen and gpt-oss share in the main: newlines do not join what follows"""
FAMILIES = tuple(CONTROLS)


def source(family: str) -> str:
    return (FOLDER / f"{family}.jinja").read_text(encoding="utf-8")


@cache
def tokenizer(family: str) -> Any:
    """A byte-level tokenizer with the family's added tokens; one that wants BOS adds it to plain text."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [
        ("Ġ", "t"),
        ("h", "e"),
        ("Ċ", "Ċ"),
        ("i", "n"),
        ("Ġt", "he"),
        ("e", "r"),
        ("Ġ", "Ġ"),
        (":", "Ġ"),
    ]
    vocabulary = {piece: i for i, piece in enumerate([*pieces, *("".join(pair) for pair in merges)])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    right = family == "phi-3"  # the newline after a tag belongs to it
    backend.add_special_tokens(
        [AddedToken(text, rstrip=right, normalized=False) for text in CONTROLS[family]]
    )
    backend.add_tokens([AddedToken(text, normalized=False) for text in PLAIN.get(family, ())])
    bos, eos = BOS_EOS.get(family, (None, "<|im_end|>"))
    if bos:
        single = f"{bos} $A"
        ids = [(bos, backend.token_to_id(bos))]
        backend.post_processor = processors.TemplateProcessing(
            single=single, pair=single + " $B", special_tokens=ids
        )
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=bos, eos_token=eos, clean_up_tokenization_spaces=False
    )
    made.chat_template = source(family)
    return made


def end_ids(family: str) -> frozenset[int]:
    made = tokenizer(family)
    return frozenset(made.convert_tokens_to_ids(text) for text in ENDS.get(family, (made.eos_token,)))
