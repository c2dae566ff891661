"""The policy of a local vision-language model: decodes one row at a time, logs exact ids and log-probs."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import torch

from nano_coder.agent.chat_template import dialect_of, shows_tools
from nano_coder.agent.dialects.dialect import DIALECTS
from nano_coder.agent.profiles import find_profile
from nano_coder.models.local.sampler import (
    DecodingRow,
    GenerationRequest,
    Sampled,
    StopConditions,
    draw_rows,
)
from nano_coder.models.opening import ModelOptions
from nano_coder.models.repetition import Repetition
from nano_shared.errors import ContextFull, PolicyError, UsageError
from nano_shared.policy import Conversation
from nano_shared.types import Completion, Finish, Sampling, TurnTokens
from nano_vision.model import Pixels, VisionModel, load_vision
from nano_vision.template import VisionTemplate


def open_vision(name: str, options: ModelOptions) -> VisionPolicy:
    """`vision:FOLDER`, `vision:ADAPTER` or `vision:OWNER/NAME`. Raises as `load_vision`."""
    loaded = load_vision(name, dtype=options.dtype, device=options.device)
    return VisionPolicy(loaded, profile=options.profile)


class VisionPolicy:
    """Completes with transformers' forward pass. Thread-safe: calls wait for each other."""

    sees = True
    version = 0
    agents_together = 4
    """that keep it busy: while one is decoded, others run tools"""

    def __init__(self, loaded: VisionModel, *, profile: str | None = None) -> None:
        """`profile` None: as its chat template tells, under its own template in any case."""
        self.loaded = loaded
        self.id = loaded.id
        self.profile = profile or own_profile(loaded)
        """of runs that name none"""
        dialect = DIALECTS.find(find_profile(self.profile).dialect)
        self.template = VisionTemplate(
            loaded.template, loaded.tokenizer, dialect, loaded.end_id,
            image_token=loaded.processor.image_token,
        )  # fmt: skip
        self._stopping = StopConditions(loaded.eos_ids, loaded.context_limit, self.decode)
        self._lock = threading.Lock()

    @property
    def context_limit(self) -> int:
        return self.loaded.context_limit

    @property
    def template_hash(self) -> str:
        return self.template.template_hash

    def count(self, text: str) -> int:
        return self.template.count(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self.template.encoder.decode(ids)

    def complete(self, conversation: Conversation, sampling: Sampling) -> Completion:
        """The next turn of a row with all its images. Raises ContextFull if no token would fit, PolicyError
        for a template that does not show the images and where the forward pass fails, UsageError for a
        grammar."""
        if sampling.grammar is not None:
            raise UsageError("a grammar constrains no vision-language model here; leave response_format out")
        began = time.monotonic()
        with self._lock:
            conversation.waited += time.monotonic() - began  # for rows of others
            images = [image for message in conversation.messages for image in message.images]
            pixels = self.loaded.look(images, conversation.get_blob)
            with self.template.showing(pixels.texts):
                number, delta = self.template.next_row(conversation)
            ids = (*conversation.tokens, *delta) if number == conversation.row else delta
            if len(ids) >= self.context_limit:
                raise ContextFull(
                    f"the row has {len(ids)} tokens, of the {self.context_limit} that {self.id} reads; show"
                    " smaller images, shorten the task or end the run"
                )
            repetition = Repetition() if conversation.ends_repetition else None
            request = GenerationRequest(
                ids, sampling, sampling.seed, repetition=repetition, stop=conversation.stop
            )
            try:
                sampled = self._decode(request, pixels)
            except (RuntimeError, ValueError, IndexError, TypeError, MemoryError) as problem:
                raise PolicyError(
                    f"{self.id} failed on a row of {len(ids)} tokens and {len(images)} images: {problem}"
                ) from problem
        ends = sampled.ids[-1:] and sampled.ids[-1] in self._stopping.eos_ids
        return Completion(
            text=self.decode(sampled.ids[:-1] if ends else sampled.ids),
            finish=sampled.finish,
            tokens=TurnTokens(
                row=number, context_ids=delta, sampled_ids=sampled.ids, logprobs=sampled.logprobs
            ),
            sampling=sampling, policy_id=self.id, policy_version=self.version,
        )  # fmt: skip

    @torch.inference_mode()
    def _decode(self, request: GenerationRequest, pixels: Pixels) -> Sampled:
        row = DecodingRow(request, self._stopping)
        model, given = self.loaded.model, self.loaded.arguments(request.ids, pixels)
        out = model(**given, use_cache=True, logits_to_keep=1)
        while True:
            ((token, logprob, likeliest),) = draw_rows([(row, 0)], out.logits[:, -1])
            row.take(token, logprob, likeliest)
            if row.finish is None and request.stop is not None and request.stop.is_set():
                row.finish = Finish.CANCELLED
            if row.finish is not None:
                return row.sampled()
            # without a mask: Qwen's positions are those of all its tokens, not of the new one
            next_11 = given["input_ids"].new_tensor([[token]])
            out = model(input_ids=next_11, past_key_values=out.past_key_values, use_cache=True)


def own_profile(loaded: VisionModel) -> str:
    """The profile of a model that no user names one for: that of its template's tools and dialect."""
    dialect = dialect_of(loaded.template)
    shown = dialect is not None and shows_tools(loaded.tokenizer, loaded.template)
    return f"{'native' if shown else 'prompted'}-1-{dialect or 'hermes-json'}"
