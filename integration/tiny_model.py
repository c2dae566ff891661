"""A tiny model for tests and demos: a small tokenizer and a random Llama of about 1M weights."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nano_coder.agent.chat_template import CHATML
from nano_coder.models.weights import quiet_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""ids 0, 1 and 2, as in SmolLM2"""


def build_tiny(
    directory: Path | str,
    texts: Iterable[str],
    *,
    seed: int = 0,
    vocab_size: int = 2048,
    hidden: int = 128,
    layers: int = 4,
    max_positions: int = 1024,
) -> Path:
    """Write tokenizer and weights in Hugging Face format. Deterministic to the byte. Returns the directory.

    `vocab_size` is an upper bound, which few texts do not reach. `hidden` must be a multiple of 32, the size
    of an attention head.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer(texts, vocab_size, max_positions)
    heads = hidden // 32
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        max_position_embeddings=max_positions,
        tie_word_embeddings=True,
        # the usual 0.02 is for widths of thousands; at 128 attention would stay uniform for hundreds of steps
        initializer_range=hidden**-0.5,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    with quiet_transformers():
        model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def _tokenizer(texts: Iterable[str], vocab_size: int, max_positions: int) -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe: Any = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        model_max_length=max_positions,
    )
    tokenizer.chat_template = CHATML
    return tokenizer
