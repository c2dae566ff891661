"""The endpoint policy: completes through a server with OpenAI's chat completions API; text only."""

from __future__ import annotations

import json
import queue
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import tenacity

from nano_coder.config import load_config
from nano_coder.models.opener import ModelOptions
from nano_shared import Completion, Conversation, Finish, Message, PolicyError, Role, Sampling, content_hash
from nano_shared.errors import ConfigError

_RETRIED_STATUS = frozenset({408, 429, 500, 502, 503, 504})
_KEYS = "NANO_API_KEY or OPENAI_API_KEY in the environment, or api_key in your configuration"
_MOST_BYTES = 16 << 20
"""largest response, bytes"""
_MOST_CHARS_PER_TOKEN = 100
"""an answer with more characters for each requested token is cut"""
_CHARS_PER_TOKEN = 4
"""typical for English and code; only the server has the tokenizer"""


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    body: bytes

    @property
    def retried(self) -> bool:
        return self.status in _RETRIED_STATUS

    @property
    def excerpt(self) -> str:
        return _excerpt(self.body.decode("utf-8", "replace"))


def open_endpoint(name: str, options: ModelOptions) -> EndpointPolicy:
    """`openai:NAME`. Raises ConfigError where no layer of the configuration names its URL."""
    config, _ = load_config({"base_url": options.base_url, "api_key": options.api_key}, Path())
    if not config.base_url:
        raise ConfigError(
            f"openai:{name} needs the URL of its endpoint: --base-url http://localhost:8000/v1, or"
            " NANO_BASE_URL, or base_url in your configuration"
        )
    return EndpointPolicy(name, config.base_url, config.api_key)


class EndpointPolicy:
    """Completes through `POST {base_url}/chat/completions`. Thread-safe.

    Completions carry no tokens: such runs can be used for imitation, not for policy gradients. Connection
    failures and statuses 408, 429 and 5xx are retried, nothing else.
    """

    version = 0

    def __init__(
        self,
        model: str,
        base_url: str,
        api_key: str | None = None,
        *,
        context_limit: int = 131_072,
        timeout: float = 300.0,
        attempts: int = 4,
        retry_seconds: float = 0.5,
    ) -> None:
        """`timeout`: seconds for a whole answer; `retry_seconds`: first wait, doubled each time."""
        self.id = f"openai:{model}"
        self.model = model
        self.context_limit = context_limit
        self.template_hash = content_hash(f"endpoint: {model}")
        self.url = f"{base_url.rstrip('/')}/chat/completions"
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout = timeout
        self._client = httpx.Client(headers=headers, timeout=httpx.Timeout(timeout, connect=10.0))
        self._retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception(_is_transient)
            | tenacity.retry_if_result(lambda answer: answer.retried),
            retry_error_callback=lambda state: state.outcome.result() if state.outcome else None,
            stop=tenacity.stop_after_attempt(attempts),
            wait=tenacity.wait_exponential(multiplier=retry_seconds, max=30.0),
            reraise=True,
        )

    def complete(self, conversation: Conversation, sampling: Sampling) -> Completion:
        """The server's answer to all messages. Raises PolicyError if there is none or it is invalid."""
        body = self._body(conversation.messages, sampling)
        try:
            answer: _Answer = self._retrying.copy()(self._post, body)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise PolicyError(
                f"no answer from {self.url}: {error or type(error).__name__}; is the server running, and is"
                " --base-url right?"
            ) from error
        if not 200 <= answer.status < 300:
            raise self._refused(answer)
        text, finish = self._read(answer, sampling.max_tokens)
        return Completion(text=text, finish=finish, sampling=sampling, policy_id=self.id)

    def count(self, text: str) -> int:
        """An estimate, rounded up: one token for each four characters."""
        return -(-len(text) // _CHARS_PER_TOKEN)

    def close(self) -> None:
        """Close the connections. The policy cannot be used afterwards."""
        self._client.close()

    def _body(self, messages: tuple[Message, ...], sampling: Sampling) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": _wire_role(m.role), "content": m.content} for m in messages],
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_tokens,
        }
        if sampling.seed is not None:
            body["seed"] = sampling.seed
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        if sampling.top_k:
            body["top_k"] = sampling.top_k
        return body

    def _post(self, body: dict[str, Any]) -> _Answer:
        """The whole answer, within the timeout. httpx only bounds single reads, so a thread that is abandoned
        when time is up bounds the sum."""
        answers: queue.SimpleQueue[_Answer | Exception | None] = queue.SimpleQueue()
        threading.Thread(target=self._exchange, args=(body, answers), daemon=True).start()
        try:
            answer = answers.get(timeout=self._timeout)
        except queue.Empty:
            raise httpx.ReadTimeout(f"no whole answer within {self._timeout:g} s") from None
        if isinstance(answer, Exception):
            raise answer
        assert answer is not None, "the thread puts an answer or an exception before None"
        return answer

    def _exchange(self, body: dict[str, Any], answers: queue.SimpleQueue[_Answer | Exception | None]) -> None:
        began = time.monotonic()
        try:
            with self._client.stream("POST", self.url, json=body) as response:
                data = bytearray()
                for chunk in response.iter_bytes():
                    data += chunk
                    if len(data) > _MOST_BYTES:
                        raise PolicyError(
                            f"{self.url} answered more than {_MOST_BYTES >> 20} MB, of which the rest was not"
                            f" read: {_excerpt(data[:400].decode('utf-8', 'replace'))}; see the server's log"
                        )
                    if time.monotonic() - began > self._timeout:
                        return  # the caller has given up
                answers.put(_Answer(response.status_code, bytes(data)))
        except (httpx.HTTPError, httpx.InvalidURL, PolicyError) as error:
            answers.put(error)
        finally:
            answers.put(None)

    def _read(self, answer: _Answer, max_tokens: int) -> tuple[str, Finish]:
        try:
            choice = json.loads(answer.body)["choices"][0]
            text = choice["message"]["content"]
            reason = choice.get("finish_reason")
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise PolicyError(
                f"{self.url} answered something else than a chat completion: {answer.excerpt};"
                " --base-url must end where /chat/completions begins, usually in /v1"
            ) from error
        if not isinstance(text, str):
            raise PolicyError(
                f"{self.url} answered without text (finish_reason {str(reason)[:40]!r}): {answer.excerpt};"
                f" serve {self.model!r} without a tool parser"
            )
        longest = max_tokens * _MOST_CHARS_PER_TOKEN
        finish = Finish.LENGTH if reason == "length" or len(text) > longest else Finish.STOP
        # JSON can spell half a surrogate pair, which cannot be sent back
        return text[:longest].encode("utf-8", "backslashreplace").decode(), finish

    def _refused(self, answer: _Answer) -> PolicyError:
        ways_out = {
            401: f"give the server's API key: {_KEYS}",
            403: f"give an API key that may use this model: {_KEYS}",
            404: f"check --base-url, and that the server has the model {self.model!r}",
        }
        way_out = ways_out.get(answer.status, "see the server's log")
        return PolicyError(f"{self.url} answered {answer.status}: {answer.excerpt}; {way_out}")


def _wire_role(role: Role) -> str:
    # many servers reject the role `tool` without the id of a call that they parsed themselves
    return Role.USER.value if role is Role.TOOL else role.value


def _is_transient(error: BaseException) -> bool:
    return isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.RemoteProtocolError)


def _excerpt(text: str, length: int = 200) -> str:
    return repr(text if len(text) <= length else text[:length] + "...")
