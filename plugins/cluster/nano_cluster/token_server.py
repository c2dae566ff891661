"""A server of tokens: ids in, sampled ids and log-probs out, adapters by name; vLLM's routes, which ours has
too."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from nano_coder.models.endpoint.chat_completion import UNSHAPED
from nano_coder.models.endpoint.exchange import (
    Cancelled,
    EndpointError,
    Exchange,
    PassingFailure,
    RefusedRequest,
    excerpt,
)
from nano_coder.models.endpoint.model_card import ModelCard, read_cards, run_headers
from nano_shared.errors import PolicyError
from nano_shared.types import Finish, Sampling

_ABOVE_ZERO = 1e-6
"""largest log-prob that rounding may produce"""


class ServerUnavailable(PolicyError):
    """A server did not answer, or refused."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.busy = status == 429
        """True if the server asks to retry later"""
        self.refused = status in (400, 413, 422)
        """True if the server refused this request and may answer others"""


class InvalidAnswer(PolicyError):
    """A server gave an invalid answer."""


@dataclass(frozen=True, slots=True)
class ServedTokens:
    ids: tuple[int, ...]
    """[M] sampled tokens, the end-of-turn token included"""
    logprobs: tuple[float, ...]
    """[M] nats, as the server gave them"""
    finish: Finish
    fingerprint: str
    """the server's name for the weights that sampled; empty from a server without one"""


class TokenServer:
    """One server, vLLM or `nano-coder serve`. Thread-safe.

    All calls have time-outs, and raise ServerUnavailable for no answer and InvalidAnswer for a wrong one.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        answer_seconds: float,
        sync_seconds: float,
        wanted: Callable[[], bool] | None = None,
    ) -> None:
        """`url` ends in /v1. `answer_seconds` bounds an answer, `sync_seconds` the loading of an adapter;
        answers that are no longer `wanted` are abandoned."""
        self.url = url.rstrip("/")
        self._key, self._sync, self._wanted = api_key, sync_seconds, wanted
        self._completions = Exchange(
            f"{self.url}/completions", api_key, stall_seconds=answer_seconds, answer_seconds=answer_seconds
        )

    def is_alive(self, seconds: float) -> bool:
        """Whether it answers a small request, with anything, within so many seconds."""
        try:
            httpx.get(f"{self.url}/models", timeout=seconds)
        except (httpx.HTTPError, httpx.InvalidURL):
            return False
        return True

    def cards(self) -> dict[str, ModelCard]:
        cards = {card.id: card for card in read_cards(self.url, self._key)}
        if not cards:
            raise ServerUnavailable(f"{self.url} lists no models: is it up, and is the key right?")
        return cards

    def sample(
        self,
        model: str,
        ids: Sequence[int],
        sampling: Sampling,
        *,
        eos_ids: Collection[int],
        vocab_size: int,
        deadline: float = math.inf,
        run: str | None = None,
    ) -> ServedTokens:
        """What follows these ids. `deadline` is monotonic; `run` is that which logs the answer. The request
        carries a seed where the sampling has one, which kills some builds of vLLM."""
        body = {
            "model": model, "prompt": list(ids), "max_tokens": sampling.max_tokens, "logprobs": 0,
            "return_token_ids": True, "stop_token_ids": sorted(eos_ids), "skip_special_tokens": False,
            **UNSHAPED, "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k,
        }  # fmt: skip
        if sampling.stop:
            body |= {"stop": list(sampling.stop), "include_stop_str_in_output": True}
        if sampling.seed is not None:
            body["seed"] = sampling.seed
        answer = self._complete(body, deadline, run_headers(run))
        try:
            return _checked(answer, ids, sampling, eos_ids, vocab_size)
        except InvalidAnswer as problem:
            raise InvalidAnswer(f"{self.url} {problem}") from None

    def score(self, model: str, ids: Sequence[int], *, deadline: float = math.inf) -> list[float]:
        """[L - 1] log-probs of `ids[1:]` at temperature 1, nats. `deadline` is monotonic."""
        body = {
            "model": model, "prompt": list(ids), "max_tokens": 0, "echo": True, "logprobs": 0,
            "temperature": 1.0,
        }  # fmt: skip
        answer = self._complete(body, deadline)
        try:
            found = answer["choices"][0]["logprobs"]["token_logprobs"][1 : len(ids)]
        except (LookupError, TypeError):
            raise InvalidAnswer(f"{self.url} gave no log-probs of a prompt") from None
        if len(found) != len(ids) - 1 or not all(map(_is_logprob, found)):
            raise InvalidAnswer(f"{self.url} gave {len(found)} log-probs of a prompt of {len(ids)} tokens")
        return [float(each) for each in found]

    def load(self, name: str, folder: str) -> None:
        self._administer("load_lora_adapter", {"lora_name": name, "lora_path": folder})

    def unload(self, name: str) -> None:
        self._administer("unload_lora_adapter", {"lora_name": name})

    def _administer(self, route: str, body: Mapping[str, Any]) -> None:
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        try:
            answer = httpx.post(f"{self.url}/{route}", json=body, headers=headers, timeout=self._sync)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ServerUnavailable(f"{self.url}/{route}: {error or type(error).__name__}") from None
        if answer.is_success:
            return
        helps = "; start vLLM with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, or nano-coder serve"
        helps += " with --admin-key KEY, and give the key as NANO_ENGINE_KEY"
        refused = answer.status_code in (401, 403, 404, 405)
        refusal = RefusedRequest(answer.status_code, answer.content)
        said = f"{self.url}/{route} answered {answer.status_code}: {refusal.excerpt}"
        raise ServerUnavailable(said + (helps if refused else ""))

    def _complete(
        self, body: Mapping[str, Any], deadline: float, headers: Mapping[str, str] | None = None
    ) -> Mapping[str, Any]:
        try:
            return next(iter(self._completions.events(body, deadline, headers, self._wanted)))
        except Cancelled:
            raise ServerUnavailable(f"{self.url}: the answer is not waited for any more") from None
        except PassingFailure as problem:
            raise ServerUnavailable(f"{self.url}: {problem}", problem.status) from None
        except RefusedRequest as problem:
            said = f"{self.url} answered {problem.status}: {problem.excerpt}"
            raise ServerUnavailable(said, problem.status) from None
        except EndpointError as problem:
            raise InvalidAnswer(str(problem)) from None


def _checked(
    answer: Mapping[str, Any], prompt: Sequence[int], sampling: Sampling, eos_ids: Collection[int], size: int
) -> ServedTokens:
    try:
        choice = answer["choices"][0]
        ids, logprobs = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
        read = choice.get("prompt_token_ids") or answer.get("prompt_token_ids")
        finish = choice["finish_reason"]
    except (LookupError, TypeError, AttributeError):
        raise InvalidAnswer(f"gave no completion: {excerpt(str(answer))}") from None
    if not (isinstance(ids, list) and ids and isinstance(logprobs, list)):
        raise InvalidAnswer("gave no token ids or log-probs of what it sampled; vLLM and nano-coder serve do")
    if read != list(prompt):
        raise InvalidAnswer("read other ids than it was sent: another tokenizer, or a template of its own")
    if not all(type(i) is int and 0 <= i < size for i in ids):
        raise InvalidAnswer(f"sampled ids that are not among the {size} of the model: another base model?")
    if len(ids) != len(logprobs) or not all(map(_is_logprob, logprobs)):
        raise InvalidAnswer(f"gave {len(ids)} ids and {len(logprobs)} log-probs, or some that are none")
    counted = (answer.get("usage") or {}).get("completion_tokens", len(ids))
    if counted != len(ids) or len(ids) > sampling.max_tokens:
        raise InvalidAnswer(f"gave {len(ids)} ids, counted {counted}, of at most {sampling.max_tokens}")
    if finish not in ("stop", "length") or any(i in eos_ids for i in ids[:-1]):
        raise InvalidAnswer(f"ended an answer with {finish!r}, or went on after the end of a turn")
    if finish == "stop" and not sampling.stop and ids[-1] not in eos_ids:
        raise InvalidAnswer(f"stopped at the id {ids[-1]}, which ends no turn: another tokenizer?")
    return ServedTokens(
        tuple(ids), tuple(map(float, logprobs)), Finish(finish), str(answer.get("system_fingerprint") or "")
    )


def _is_logprob(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value <= _ABOVE_ZERO
