"""OpenAI's completions of raw prompts, and vLLM's tokenize and detokenize.

Texts of tokens are cut where characters end: a token that completes a character has all of it, the ones
before it have none, so that the texts of all tokens are the whole text.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from nano_apis.api import CHAT, COUNTED, SAMPLED, ServedApi, local
from nano_apis.openai import MOST_TOP_LOGPROBS, fingerprint, finish_reason, read_chat
from nano_apis.request import (
    AnswerWriter,
    Body,
    ClientMessage,
    Event,
    ModelAnswer,
    ModelRequest,
    TextDelta,
    check_shaping,
    number,
    sampling_of,
    split_at_stop,
)
from nano_coder.models.local.policy import LocalPolicy
from nano_coder.serve.access import BadRequest
from nano_shared.errors import ContextFull
from nano_shared.policy import DecodeIds, Policy
from nano_shared.types import Role

if TYPE_CHECKING:
    from nano_apis.app import Server
    from nano_coder.models.local.engine import TokenScore

MOST_PROMPTS = 256
"""prompts of a request, times `n`"""
_OVERLAP = 8
"""tokens decoded again before a new one: some tokenizers write a token according to its neighbour"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    requests: tuple[ModelRequest, ...]
    """`n` of each prompt, which are choices in this order"""
    echo: bool
    logprobs: int | None
    """likeliest tokens to tell of each place; None: no log-probs"""
    scores: bool
    """whether the prompts are scored, and nothing is sampled"""


def read_completion(body: Body, policy: Policy) -> CompletionRequest:
    """Raises BadRequest for what is malformed, and for what this server cannot do."""
    if not isinstance(policy, LocalPolicy):
        raise BadRequest("this model reads messages only; use /v1/chat/completions", param="prompt")
    limit = policy.context_limit
    choices = number(body, "n", int, 1, MOST_PROMPTS, 1)
    if number(body, "best_of", int, 1, MOST_PROMPTS, choices) != choices:
        raise BadRequest("best_of must be n: this server samples no more than it answers", param="best_of")
    logprobs = body.get("logprobs")
    if isinstance(logprobs, bool):
        logprobs = 1 if logprobs else None
    logprobs = number({"logprobs": logprobs}, "logprobs", int, 0, MOST_TOP_LOGPROBS, None)
    scores = body.get("max_tokens") == 0 and not isinstance(body.get("max_tokens"), bool)
    if scores and not body.get("echo"):
        raise BadRequest("max_tokens = 0 scores a prompt, and needs echo", param="max_tokens")
    sampling = sampling_of({**body, "max_tokens": None} if scores else body, limit, limits=("max_tokens",))
    if body.get("max_tokens") is None and not scores:
        sampling = sampling.model_copy(update={"max_tokens": min(16, limit)})  # OpenAI's default
    check_shaping(sampling, policy)
    prompts = _prompts(body, policy)
    if len(prompts) * choices > MOST_PROMPTS:
        raise BadRequest(
            f"{len(prompts)} prompts, n = {choices} each, are more than {MOST_PROMPTS} choices",
            param="prompt",
        )
    requests = [
        ModelRequest(
            messages=(ClientMessage(role=Role.USER, text=policy.decode(ids)),), sampling=sampling,
            prompt_ids=ids, top_logprobs=logprobs or 0,
        )
        for ids in prompts
    ]  # fmt: skip
    each_choice = [each.seeded(index) for each in requests for index in range(choices)]
    return CompletionRequest(
        requests=tuple(replace(each, choice=number) for number, each in enumerate(each_choice)),
        echo=bool(body.get("echo")), logprobs=logprobs, scores=scores,
    )  # fmt: skip


def _prompts(body: Body, policy: LocalPolicy) -> list[tuple[int, ...]]:
    given = body.get("prompt")
    each: list[Any] = given if isinstance(given, list) else [given]
    if each and all(_is_id(token) for token in each):
        each = [each]
    if not each:
        raise BadRequest("prompt must be a text, token ids, or a list of either", param="prompt")
    return [prompt_ids(prompt, policy, param="prompt") for prompt in each]


def prompt_ids(
    prompt: Any, policy: LocalPolicy, *, control: bool = True, param: str, contexts: int = 1
) -> tuple[int, ...]:
    """The ids of a text, or given ids. Raises BadRequest, and ContextFull for more than so many contexts."""
    most = contexts * policy.context_limit
    if isinstance(prompt, str):
        policy.refuse_long([prompt], most)
        ids = policy.template.encoder.prompt(prompt, control=control)
    elif isinstance(prompt, list) and len(prompt) > most and _is_id(prompt[0]):
        raise ContextFull(f"{param} holds {len(prompt)} tokens; {most} are the most")
    elif isinstance(prompt, list) and all(_is_id(token) for token in prompt):
        ids = prompt
    else:
        raise BadRequest(f"{param} must be a text, token ids, or a list of either", param=param)
    size = policy.vocab_size
    if outside := next((token for token in ids if not 0 <= token < size), None):
        raise BadRequest(f"{param} holds the id {outside}; this model has {size} tokens", param=param)
    if not ids:
        raise BadRequest(f"{param} must not be empty", param=param)
    return tuple(ids)


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def token_texts(ids: Sequence[int], decode: DecodeIds) -> list[str]:
    """[len(ids)] what each token adds to the text of those before it."""
    texts: list[str] = []
    start = shown = 0  # the window from `start`, of whose text `shown` characters are told
    for end in range(1, len(ids) + 1):
        text = decode(ids[start:end])
        whole = not text.endswith("\N{REPLACEMENT CHARACTER}") or end == len(ids)
        texts.append(text[shown:] if whole else "")
        if whole:
            start = max(start, end - _OVERLAP)
            shown = len(decode(ids[start:end]))
    return texts


class CompletionWriter(AnswerWriter):
    prefix = "cmpl-"

    def __init__(self, body: Body, asked: CompletionRequest, model: str, decode: DecodeIds) -> None:
        super().__init__(body, model, decode)
        self._asked, self._text_of = asked, decode
        self._head = {
            "id": self._id, "object": "text_completion", "created": int(time.time()), "model": self._model,
        }  # fmt: skip
        self._as_ids = bool(body.get("return_tokens_as_token_ids"))
        self._usage = [0, 0]
        self._offsets = [0] * len(asked.requests)
        self.scores: Sequence[Sequence[TokenScore]] = ()
        """of the prompts that are echoed"""

    def scored(self, scores: Sequence[Sequence[TokenScore]]) -> dict[str, Any]:
        choices = []
        for index, (request, found) in enumerate(zip(self._asked.requests, scores, strict=True)):
            choice = self._choice(index, self._prompt_text(request)) | {"finish_reason": "length"}
            if self._asked.logprobs is not None:
                choice["logprobs"] = self._logprobs(request.prompt_ids, *_columns(found))
            choices.append(choice | self._ids(request.prompt_ids, ()))
            self._usage[0] += len(request.prompt_ids)
        return {**self._head, "choices": choices, "usage": self.usage()}

    def whole(self, answers: Sequence[ModelAnswer]) -> dict[str, Any]:
        choices = []
        for index, (answer, request) in enumerate(zip(answers, self._asked.requests, strict=True)):
            tokens = answer.completion.tokens
            assert tokens is not None
            text = (self._prompt_text(request) if self._asked.echo else "") + answer.text
            choice = self._choice(index, text, answer)
            if self._asked.logprobs is not None:
                ids, top = tokens.sampled_ids, list[Any](answer.top)
                logprobs: list[float | None] = list(tokens.logprobs)
                if self._asked.echo:
                    before, of_before = _columns(self.scores[index])
                    ids, logprobs = (*request.prompt_ids, *ids), [*before, *logprobs]
                    top = [*of_before, *top] if top else []
                choice["logprobs"] = self._logprobs(ids, logprobs, top)
            choices.append(choice | self._ids(request.prompt_ids, tokens.sampled_ids))
            self._count(answer)
        head = {**self._head, "system_fingerprint": fingerprint(answers[0])}
        return {**head, "choices": choices, "usage": self.usage()}

    def first(self, at: int) -> Iterator[Event]:
        if self._asked.echo:
            text = self._prompt_text(self._asked.requests[at])
            self._offsets[at] = len(text)
            yield "", {**self._head, "choices": [self._choice(at, text)]}

    def text(self, at: int, delta: TextDelta, answer: ModelAnswer | None = None) -> Iterator[Event]:
        """A chunk; `answer` if it is the last one."""
        choice = self._choice(at, delta.text, answer)
        if delta.ids and self._asked.logprobs is not None:
            offset = self._offsets[at]
            choice["logprobs"] = self._logprobs(delta.ids, delta.logprobs, delta.top, offset=offset)
        first = self._asked.requests[at].prompt_ids if not self._told[at] else ()
        self._offsets[at] += len(delta.text)
        self._told[at] += len(delta.ids)
        yield "", {**self._head, "choices": [choice | self._ids(first, delta.ids)]}

    def end(self, at: int, answer: ModelAnswer) -> Iterator[Event]:
        self._count(answer)
        return self.text(at, answer.tokens_after(self._told[at]), answer)

    def close(self) -> Iterator[Event]:
        if self._tells_usage:
            yield "", {**self._head, "choices": [], "usage": self.usage()}
        yield "", None

    def usage(self) -> dict[str, int]:
        prompt, sampled = self._usage
        return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}

    def _count(self, answer: ModelAnswer) -> None:
        self._usage[0] += answer.prompt_tokens
        self._usage[1] += answer.sampled_tokens

    def _prompt_text(self, request: ModelRequest) -> str:
        return request.messages[0].text

    def _choice(self, index: int, text: str, answer: ModelAnswer | None = None) -> dict[str, Any]:
        ended: dict[str, str | None] = {"finish_reason": None, "stop_reason": None}
        if answer is not None:
            stop = split_at_stop(answer.completion)[1]
            ended = {"finish_reason": finish_reason(answer), "stop_reason": stop}
        return {"index": index, "text": text, "logprobs": None, **ended}

    def _logprobs(
        self, ids: Sequence[int], logprobs: Sequence[float | None], top: Sequence[Any], offset: int = 0
    ) -> dict[str, Any]:
        """OpenAI's `logprobs`. `offset`: of the first token in the text; `top` may be empty."""

        def key(token: int) -> str:
            text = self._text_of([token])
            return f"token_id:{token}" if self._as_ids or "\N{REPLACEMENT CHARACTER}" in text else text

        texts = token_texts(ids, self._text_of)
        tokens = [f"token_id:{token}" for token in ids] if self._as_ids else texts
        best: list[dict[str, float] | None] = []
        for place, logprob in enumerate(logprobs):
            if logprob is None:
                best.append(None)
                continue
            others = {key(each): value for each, value in (top[place] if top else ()) if each != ids[place]}
            ranked = sorted({**others, tokens[place]: logprob}.items(), key=lambda pair: -pair[1])
            best.append(dict(ranked))
        return {
            "tokens": tokens, "token_logprobs": list(logprobs), "top_logprobs": best,
            "text_offset": list(accumulate(map(len, texts[:-1]), initial=offset)),
        }  # fmt: skip

    def _ids(self, prompt: Sequence[int], sampled: Sequence[int]) -> dict[str, Any]:
        if not self._body.get("return_token_ids"):
            return {}
        return ({"prompt_token_ids": list(prompt)} if prompt else {}) | {"token_ids": list(sampled)}


def _columns(
    scores: Sequence[TokenScore],
) -> tuple[list[float | None], list[tuple[tuple[int, float], ...]]]:
    """Log-probs and likeliest tokens of a prompt; nothing predicts its first token."""
    return [None, *(score.logprob for score in scores)], [(), *(score.top for score in scores)]


async def completions(server: Server, request: Request) -> Response:
    body = await server.body(request, API.fields["v1/completions"])
    model = await server.model_of(body)
    asked = await asyncio.to_thread(read_completion, body, model.policy)
    writer = CompletionWriter(body, asked, model.name, local(model.policy).decode)
    if asked.scores:
        return JSONResponse(
            writer.scored(await server.scores(request, asked.requests, asked.logprobs, model))
        )
    if asked.echo and asked.logprobs is not None and not body.get("stream"):
        writer.scores = await server.scores(request, asked.requests, asked.logprobs, model, log=False)
    return await server.answered(request, asked.requests, model, writer)


async def tokenize(server: Server, request: Request) -> Response:
    body = await server.body(request, API.fields["tokenize"])
    policy = local((await server.model_of(body)).policy)
    if body.get("messages") is not None:
        asked = await asyncio.to_thread(read_chat, body, policy.context_limit)
        ids = await asyncio.to_thread(server.conversations.rendered_ids, asked, policy, COUNTED)
    else:
        control = body.get("add_special_tokens", True) is not False
        encode = partial(prompt_ids, control=control, param="prompt", contexts=COUNTED)
        ids = await asyncio.to_thread(encode, body.get("prompt"), policy)
    counted = {"count": len(ids), "max_model_len": policy.context_limit, "tokens": list(ids)}
    texts = None
    if body.get("return_token_strs"):
        texts = await asyncio.to_thread(lambda: [policy.decode([token]) for token in ids])
    return JSONResponse({**counted, "token_strs": texts})


async def detokenize(server: Server, request: Request) -> Response:
    body = await server.body(request, API.fields["detokenize"])
    policy = local((await server.model_of(body)).policy)
    tokens = body.get("tokens")
    given = tokens if isinstance(tokens, list) else None
    ids = prompt_ids(given, policy, param="tokens", contexts=COUNTED)
    return JSONResponse({"prompt": await asyncio.to_thread(policy.decode, ids)})


API = ServedApi(
    handlers={"v1/completions": completions, "tokenize": tokenize, "detokenize": detokenize},
    fields={
        "v1/completions": {
            *SAMPLED, "prompt", "max_tokens", "echo", "logprobs", "return_tokens_as_token_ids", "n",
            "best_of", "stream_options",
        },
        "tokenize": {*CHAT, "model", "prompt", "add_special_tokens", "return_token_strs"},
        "detokenize": {"model", "tokens"},
    },
)  # fmt: skip
