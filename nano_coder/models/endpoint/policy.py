"""The endpoint policy: completes through a server with OpenAI's chat completions API."""

from __future__ import annotations

import re
import sys
import time
import tomllib
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from threading import Event
from typing import Any
from weakref import WeakKeyDictionary

import tenacity

from nano_coder.agent.dialects.native import KEEPS_TOOLS_JSON, TOOLS_JSON
from nano_coder.agent.profiles import API_1
from nano_coder.config import Price, load_config
from nano_coder.models.endpoint.chat_completion import (
    CANCELLED,
    CUT,
    FILTERED,
    IMAGES,
    AnswerParts,
    OnAnswer,
    accepted_by,
    add_parameters,
    read_answer,
    request_body,
    shaping,
    shows_images,
    turn_tokens,
)
from nano_coder.models.endpoint.exchange import (
    Cancelled,
    EndpointError,
    Exchange,
    PassingFailure,
    RefusedRequest,
)
from nano_coder.models.endpoint.model_card import ModelCard, card_of, read_cards, run_headers
from nano_coder.models.opening import ModelOptions
from nano_coder.models.repetition import Repetition
from nano_shared.errors import ConfigError, ImagesRefused
from nano_shared.files import content_hash
from nano_shared.policy import Conversation
from nano_shared.printable import printable
from nano_shared.types import ApiAnswer, Completion, Finish, Role, Sampling, TurnTokens, Usage

OPENAI = "https://api.openai.com/v1"
_KEYS = "NANO_API_KEY or OPENAI_API_KEY in the environment, or api_key in your configuration"
_MOST_CHARS_PER_TOKEN = 100
"""an answer with more characters for each requested token is cut"""
_CHARS_PER_TOKEN = 4
"""typical for English and code; only the server has the tokenizer"""
_CONTEXT = 131_072
"""tokens, where the server's card does not say"""
_LONGEST_WAIT_S = 60.0
_SMALL = re.compile(r"(?<![\d.])(0\.5|1\.5|3|7)b(?![a-z])", re.IGNORECASE)
"""sizes that copy the list of tools where a server shows it to them"""
_NO_TOOLS = re.compile(
    r"support(s|ing)?\b.{0,40}\btools?\b|\btools?\b.{0,40}\b(not|un)\s?support", re.IGNORECASE
)
"""how servers say that a model calls no tools"""
_LEARNT_FROM = (400, 404, 413, 415, 422, 500)
"""statuses of refusals that another request may avoid"""
_FIRST_CONTACT_S = 5.0
"""seconds for which a server that has never answered is retried"""
_GARBLED_ATTEMPTS = 3


def open_endpoint(name: str, options: ModelOptions) -> EndpointPolicy:
    """`openai:NAME`. The model's card is read from a server other than OpenAI's.

    Raises ConfigError for OpenAI's own API without a key.
    """
    config, _ = load_config({"base_url": options.base_url, "api_key": options.api_key}, Path())
    if not (config.base_url or config.api_key):
        raise ConfigError(
            f"openai:{name} needs an API key, {_KEYS}; or --base-url http://localhost:8000/v1 for a server of"
            " your own"
        )
    if config.api_key and not (config.api_key.isascii() and config.api_key.isprintable()):
        raise ConfigError(f"the API key holds what no HTTP header takes, such as a line's end: {_KEYS}")
    return EndpointPolicy(
        name,
        config.base_url or OPENAI,
        config.api_key,
        patience=Patience(stall=config.stall_seconds, retry=config.retry_seconds),
        price=find_price(name, config.prices),
        own_temperature=options.own_temperature,
        card=card_of(name, read_cards(config.base_url, config.api_key)) if config.base_url else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Seconds: of silence before a call is repeated, of one answer, over which a failing call is repeated,
    and before the first repetition, doubled each time."""

    stall: float = 300.0
    answer: float = 3600.0
    retry: float = 600.0
    first_wait: float = 1.0


class EndpointPolicy:
    """Completes through `POST {base_url}/chat/completions`. Thread-safe.

    Completions carry tokens where the server's card says that it gives them; others can be imitated, and
    cannot be used for policy gradients. Retried: no connection, incomplete and garbled answers, silence, and
    statuses 408, 409, 425, 429 and 5xx."""

    def __init__(
        self,
        model: str,
        base_url: str,
        api_key: str | None = None,
        *,
        patience: Patience = Patience(),  # frozen
        price: Price | None = None,
        own_temperature: bool = False,
        card: ModelCard | None = None,
    ) -> None:
        """`own_temperature`: the server's own, instead of the sampling's; `card`: what the server says of
        the model."""
        self.card = card or ModelCard()
        self.id = f"openai:{model}"
        self.version = self.card.version
        small = KEEPS_TOOLS_JSON.search(model) and _SMALL.search(model)
        self.profile = self.card.profile or (f"prompted-1-{TOOLS_JSON.name}" if small else API_1.name)
        """profile of runs that name none"""
        self.model = model
        self._context_limit = self.card.context_limit or _CONTEXT
        self.template_hash = self.card.template_hash or content_hash(f"endpoint: {model}")
        self._sessions: WeakKeyDictionary[Conversation, str] = WeakKeyDictionary()
        self.price = price
        self.url = f"{base_url.rstrip('/')}/chat/completions"
        self._exchange = Exchange(
            self.url, api_key, stall_seconds=patience.stall, answer_seconds=patience.answer
        )
        self._accepted = accepted_by(self.url, model)
        self._retry_seconds = patience.retry
        self._own_temperature = own_temperature
        self._usual_wait = tenacity.wait_random_exponential(
            multiplier=patience.first_wait, max=_LONGEST_WAIT_S
        )

    @property
    def sees(self) -> bool:
        """Whether images may be sent: until a server refuses them, since none says; our own takes none."""
        return IMAGES not in self._accepted.refused and not self.card.ours

    @property
    def context_limit(self) -> int:
        """Of the server's card, or what it named when it refused a longer prompt; tokens."""
        return min(self._context_limit, self._accepted.context or self._context_limit)

    def complete(self, conversation: Conversation, sampling: Sampling) -> Completion:
        """The server's answer to all messages.

        Raises PolicyError if there is none or it is invalid, ConfigError for a refused key, ContextFull where
        the messages do not fit, BudgetExhausted where the conversation's deadline cut an answer.
        """
        deadline, stop = conversation.deadline or float("inf"), conversation.stop
        tell = conversation.on_text or _silent
        wanted = (lambda *_: not stop.is_set()) if stop else None
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(PassingFailure),
            stop=lambda state: self._gives_up(state, min(deadline, began + self._retry_seconds)),
            wait=self._wait,
            before_sleep=lambda state: tell(_waiting(state)),
            sleep=partial(_pause, stop) if stop else tenacity.sleep,
            reraise=True,
        )
        began = time.monotonic()
        with self._failing():
            answer, body = retrying(self._ask, conversation, sampling, deadline, tell, None, wanted)
        return self._completion(answer, body, conversation, sampling)

    def answer(
        self,
        conversation: Conversation,
        sampling: Sampling,
        *,
        more: Mapping[str, Any],
        session: str,
        on_answer: OnAnswer,
    ) -> Completion:
        """As `complete` without retries: for a server in front of this one, whose clients retry.

        `more` are further parameters of the request, where None leaves one out; `session` is the client's.
        `on_answer` is called with each part, and cancels the answer by returning False.
        """
        self._sessions[conversation] = session
        with self._failing():
            answer, body = self._ask(conversation, sampling, float("inf"), _silent, more, on_answer)
        return self._completion(answer, body, conversation, sampling)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except PassingFailure as problem:
            lost = problem.kind == "unreachable"
            way_out = "; is the server running, and is --base-url right?" if lost else ""
            message = f"no answer from {self.url}: {problem}{way_out}"
            raise EndpointError(message, problem.kind, status=problem.status, after=problem.after) from None
        except RefusedRequest as refusal:
            raise self._refused(refusal) from None

    def count(self, text: str) -> int:
        """An estimate, rounded up: one token for each four characters."""
        return -(-len(text) // _CHARS_PER_TOKEN)

    def close(self) -> None:
        """Close the connections. The policy cannot be used afterwards."""
        self._exchange.close()

    def _ask(
        self,
        conversation: Conversation,
        sampling: Sampling,
        deadline: float,
        tell: Callable[[str], None],
        more: Mapping[str, Any] | None = None,
        on_answer: OnAnswer | None = None,
    ) -> tuple[AnswerParts, dict[str, Any]]:
        """One answer, and the request that it answers, which leaves out what the server refuses."""
        temperature = not self._own_temperature
        body = request_body(
            self.model, conversation, sampling, self._accepted, temperature=temperature, card=self.card
        )
        add_parameters(body, more or {}, self.card)
        wanted = partial(on_answer, "", (), ()) if on_answer else None
        headers = self._headers(conversation)
        while True:
            try:
                events = self._exchange.events(body, deadline, headers, wanted)
                repetition = Repetition()
                told = partial(_watched, tell, repetition) if conversation.ends_repetition else tell
                answer = read_answer(events, self.url, told, on_answer)
                answer.finish = Finish.REPETITION if repetition.found else answer.finish
                return answer, body
            except RefusedRequest as refusal:
                learnt = self._accepted.learn(refusal, body) if refusal.status in _LEARNT_FROM else None
                if learnt is None:
                    raise
                if not self.sees and shows_images(body):
                    body = self._without_images(body, conversation, refusal.excerpt)
                if learnt:
                    why = f"asked again {learnt}, since {refusal.message[:200]}"
                    print(printable(f"{self.id}: {why}"), file=sys.stderr)

    def _without_images(self, body: dict[str, Any], conversation: Conversation, said: str) -> dict[str, Any]:
        """The request for a model that sees none. Raises ImagesRefused for those that the user showed."""
        if any(m.images and m.role is Role.USER for m in conversation.messages):
            raise ImagesRefused(
                f"{self.id} sees no images ({said}); name a model that does, or leave them out"
            )
        again = request_body(
            self.model, conversation, Sampling(), self._accepted, temperature=False, card=self.card
        )
        return body | {"messages": again["messages"]}

    def _headers(self, conversation: Conversation) -> dict[str, str]:
        """Its own session with our server for each conversation: equal texts of two are not taken for one;
        and the run that logs it."""
        session = self._sessions.setdefault(conversation, f"client-{uuid.uuid4().hex[:16]}")
        named = {"X-Session-Id": session} if session else {}
        return named | run_headers(conversation.run) if self.card.ours else {}

    def _wait(self, state: tenacity.RetryCallState) -> float:
        failure = state.outcome.exception() if state.outcome else None
        after = failure.after if isinstance(failure, PassingFailure) else None
        return after if after is not None else self._usual_wait(state)

    def _gives_up(self, state: tenacity.RetryCallState, until: float) -> bool:
        failure = state.outcome.exception() if state.outcome else None
        assert isinstance(failure, PassingFailure)
        if failure.kind == "garbled" and state.attempt_number >= _GARBLED_ATTEMPTS:
            return True
        if failure.kind == "unreachable" and not self._exchange.reached and state.start_time is not None:
            until = min(until, state.start_time + _FIRST_CONTACT_S)
        return time.monotonic() + state.upcoming_sleep > until

    def _completion(
        self, answer: AnswerParts, body: dict[str, Any], conversation: Conversation, sampling: Sampling
    ) -> Completion:
        longest = sampling.max_tokens * _MOST_CHARS_PER_TOKEN
        cut = answer.finish in CUT or len(answer.text) > longest
        finish = Finish.LENGTH if cut else Finish.STOP
        if answer.finish in (CANCELLED, Finish.REPETITION):
            finish = Finish(answer.finish)
        optional = ("temperature", "top_p", "top_k", "seed", "stop")
        set_ = {"temperature": True, "top_p": sampling.top_p < 1, "top_k": sampling.top_k > 0,
                "seed": sampling.seed is not None, "stop": bool(sampling.stop)}  # fmt: skip
        left_out = tuple(name for name in optional if set_[name] and name not in body)
        sampled = sampling.model_copy(update={"temperature": body.get("temperature", 1.0)})
        tokens = turn_tokens(answer, conversation) if "return_token_ids" in body else None
        if tokens and (shaped := shaping(body)):
            tokens = f"{', '.join(shaped)} shaped the distribution, which its log-probs may not show"
        if tokens and not self.card.ours and sampled.temperature not in (0.0, 1.0):
            tokens = "its log-probs may be those of temperature 1, and it sampled at another"
        if tokens and len(answer.text) > longest:
            tokens = "its text was cut: it is too long for the tokens that were asked for"
        weights, _, version = answer.fingerprint.rpartition("@") if self.card.ours else ("", "", "")
        known = bool(weights) and version.isdecimal()
        return Completion(
            text=answer.text[:longest],
            finish=finish,
            tokens=tokens if isinstance(tokens, TurnTokens) else None,
            sampling=sampled,
            policy_id=weights if known else self.card.policy_id or self.id,
            policy_version=int(version) if known else self.card.version,
            api=ApiAnswer(
                calls=answer.api_calls(len(conversation.messages)),
                reasoning=answer.reasoning,
                usage=self._usage(answer, conversation),
                left_out=left_out,
                no_tokens=tokens if isinstance(tokens, str) else None,
                filtered=answer.finish in FILTERED,
            ),
        )

    def _usage(self, answer: AnswerParts, conversation: Conversation) -> Usage:
        usage = answer.usage
        if usage is None:
            written = answer.text + answer.reasoning + "".join(c.arguments for c in answer.calls)
            read = sum(
                self.count(m.content) + sum(image.tokens for image in m.images) for m in conversation.messages
            )
            usage = Usage(prompt=read, completion=self.count(written), estimated=True)
        return usage.model_copy(update={"cost": self.price.cost(usage) if self.price else None})

    def _refused(self, refusal: RefusedRequest) -> EndpointError | ConfigError | ImagesRefused:
        ways_out = {
            401: f"give the server's API key: {_KEYS}",
            403: f"give an API key that may use this model: {_KEYS}",
            404: f"check --base-url, and that the server has the model {self.model!r}",
            429: "the account's quota is used up: see its billing page",
        }
        moved = "the server moved: give its new address by --base-url"
        way_out = ways_out.get(refusal.status, moved if refusal.status < 400 else "see the server's log")
        if _NO_TOOLS.search(refusal.message):
            way_out = f"the model {self.model!r} cannot call tools, which this run needs: name another one"
        message = f"{self.url} answered {refusal.status}: {refusal.excerpt}; {way_out}"
        if refusal.status in (401, 403):
            return ConfigError(message)
        if re.search(r"\bimage\b|image_url", refusal.message) and refusal.status in _LEARNT_FROM:
            return ImagesRefused(
                f"{self.url} answered {refusal.status}: {refusal.excerpt}; show other images"
            )
        return EndpointError(message, "refused", status=refusal.status)


def _watched(tell: Callable[[str], None], repetition: Repetition, text: str) -> None:
    tell(text)
    if repetition.take_text(text):
        raise Cancelled


def _pause(stop: Event, seconds: float) -> None:
    stop.wait(seconds)


def _silent(text: str) -> None:
    pass


def _waiting(state: tenacity.RetryCallState) -> str:
    failure = state.outcome.exception() if state.outcome else None
    return f"\n[{failure}; asking again in {state.upcoming_sleep:.0f} s]\n"


_DATED = re.compile(r"-20\d\d-?\d\d-?\d\d$")


def find_price(model: str, own: Mapping[str, Price]) -> Price | None:
    """The price of a model, also where its name ends with the date of a version; None for an unknown one."""
    for name in dict.fromkeys((model, _DATED.sub("", model))):
        for table in (own, _shipped()):
            if name in table:
                return table[name]
    return None


@cache
def _shipped() -> Mapping[str, Price]:
    text = (files("nano_coder.models.endpoint") / "prices.toml").read_text(encoding="utf-8")
    return {name: Price.model_validate(price) for name, price in tomllib.loads(text).items()}
