"""The endpoint policy: any server that speaks OpenAI's chat completions; text only."""

from __future__ import annotations

import json
from typing import Any

import httpx
import tenacity

from nano_shared import Completion, Conversation, Finish, Message, PolicyError, Role, Sampling, content_hash

_RETRIED_STATUS = frozenset({408, 429, 500, 502, 503, 504})
_KEYS = "NANO_API_KEY or OPENAI_API_KEY in the environment, or api_key in your configuration"
_CHARS_PER_TOKEN = 4
"""usual of English and code; the server has the tokenizer, we do not"""


class EndpointPolicy:
    """Completes through `POST {base_url}/chat/completions`. Thread-safe.

    Completions carry no tokens: such a run can imitate and be imitated, but not be used for policy
    gradients. Connection failures and statuses 408, 429 and 5xx are retried, nothing else.
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
        """`timeout`: seconds one answer may take; `retry_seconds`: first wait, doubled each time."""
        self.id = f"openai:{model}"
        self.model = model
        self.context_limit = context_limit
        self.template_hash = content_hash(f"endpoint: {model}")
        self.url = f"{base_url.rstrip('/')}/chat/completions"
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = httpx.Client(headers=headers, timeout=httpx.Timeout(timeout, connect=10.0))
        self._retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception(_is_transient),
            stop=tenacity.stop_after_attempt(attempts),
            wait=tenacity.wait_exponential(multiplier=retry_seconds, max=30.0),
            reraise=True,
        )

    def complete(self, conversation: Conversation, sampling: Sampling) -> Completion:
        """The server's answer to all messages. Raises PolicyError if it cannot be had or makes no sense."""
        body = self._body(conversation.messages, sampling)
        try:
            answer = self._retrying.copy()(self._post, body)
        except httpx.HTTPStatusError as error:
            raise self._refused(error.response) from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise PolicyError(
                f"no answer from {self.url}: {error or type(error).__name__}; is the server running, and is"
                " --base-url right?"
            ) from error
        text, finish = self._read(answer)
        return Completion(text=text, finish=finish, sampling=sampling, policy_id=self.id)

    def count(self, text: str) -> int:
        """An estimate, rounded up: one token for four characters."""
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

    def _post(self, body: dict[str, Any]) -> str:
        response = self._client.post(self.url, json=body)
        response.raise_for_status()
        return response.text

    def _read(self, answer: str) -> tuple[str, Finish]:
        try:
            choice = json.loads(answer)["choices"][0]
            text = choice["message"]["content"]
            reason = choice.get("finish_reason")
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise PolicyError(
                f"{self.url} answered something else than a chat completion: {_excerpt(answer)};"
                " --base-url must end where /chat/completions begins, usually in /v1"
            ) from error
        if not isinstance(text, str):
            raise PolicyError(
                f"{self.url} answered without text (finish_reason {reason!r}): {_excerpt(answer)};"
                f" serve {self.model!r} without a tool parser"
            )
        return text, Finish.LENGTH if reason == "length" else Finish.STOP

    def _refused(self, response: httpx.Response) -> PolicyError:
        ways_out = {
            401: f"give the server's API key: {_KEYS}",
            403: f"give an API key that may use this model: {_KEYS}",
            404: f"check --base-url, and that the server has the model {self.model!r}",
        }
        way_out = ways_out.get(response.status_code, "see the server's log")
        return PolicyError(
            f"{self.url} answered {response.status_code}: {_excerpt(response.text)}; {way_out}"
        )


def _wire_role(role: Role) -> str:
    # Plain servers refuse the role tool without the id of a call that they parsed themselves.
    return Role.USER.value if role is Role.TOOL else role.value


def _is_transient(error: BaseException) -> bool:
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code in _RETRIED_STATUS
    return isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.RemoteProtocolError)


def _excerpt(text: str, length: int = 200) -> str:
    return repr(text if len(text) <= length else text[:length] + "...")
