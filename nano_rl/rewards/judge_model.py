"""A judge that can be asked: an OpenAI-compatible endpoint, or a policy in this process.

A failure has a kind and never becomes a score. The deadline bounds the whole answer, connecting and every
read together: a server that drips one byte a second is late like one that says nothing.
"""

from __future__ import annotations

import json
import os
import queue
import threading
import time
from typing import Any

import httpx
from pydantic import Field, PrivateAttr

from nano_coder.models.opening import open_policy
from nano_rl.rewards.part import Part
from nano_shared.errors import BudgetExhausted, ConfigError, NanoError, PolicyError
from nano_shared.policy import Conversation, Policy
from nano_shared.types import Message, Role, Sampling

KEY = "NANO_JUDGE_API_KEY"
"""environment variable with the key that is sent to the endpoint"""
_LARGEST = 1 << 20
_BUSY = frozenset({429, 502, 503, 504})


class JudgeFailure(NanoError):
    """The judge gave no answer that can be read. `kind` is a failure kind for the verdict."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind


class JudgePart(Part):
    """Settings of a part that asks a judge. Shared by `judge` and `constitution`."""

    url: str | None = None
    """base URL of the endpoint, up to /v1"""
    model: str | None = None
    """the endpoint's model; without a URL, a checkpoint or folder that is loaded here"""
    deadline: float = Field(60.0, gt=0)
    """seconds for one whole answer of an endpoint"""
    max_tokens: int = Field(512, ge=1)
    """of one answer"""
    concurrency: int = Field(8, ge=1)
    """questions at once"""
    _policy: Policy | None = PrivateAttr(None)

    def open_judge(self) -> None:
        """Raises ConfigError where no judge is named, UsageError where the local one cannot be loaded."""
        if self.url is None and self.model is None:
            raise ConfigError("name a judge: url = http://HOST/v1 of an endpoint, or model = a checkpoint")
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"url = {self.url!r} is no http:// or https:// address")
        if self.url is None:
            self._policy = open_policy(self.model).policy

    def ask(self, system: str, question: str) -> str:
        """The judge's answer. Raises JudgeFailure with one of the kinds judge_unreachable, judge_late,
        judge_refused, judge_unparseable, judge_failed."""
        if self._policy is not None:
            return self._ask_policy(self._policy, system, question)
        answers: queue.SimpleQueue[str | JudgeFailure] = queue.SimpleQueue()
        body = {
            "model": self.model or "default",
            "messages": [{"role": "system", "content": system}, {"role": "user", "content": question}],
            "temperature": 0,
            "max_tokens": self.max_tokens,
        }
        # a thread that is left behind is how a name server that hangs is bounded too
        threading.Thread(target=_worker, args=(self.url, body, self.deadline, answers), daemon=True).start()
        try:
            answer = answers.get(timeout=self.deadline)
        except queue.Empty:
            raise JudgeFailure("judge_late", f"no whole answer within {self.deadline:g} s") from None
        if isinstance(answer, JudgeFailure):
            raise answer
        return answer

    def _ask_policy(self, policy: Policy, system: str, question: str) -> str:
        messages = (Message(role=Role.SYSTEM, content=system), Message(role=Role.USER, content=question))
        sampling = Sampling(temperature=0.0, max_tokens=self.max_tokens)
        try:
            return policy.complete(Conversation(messages), sampling).text
        except (PolicyError, BudgetExhausted) as problem:
            raise JudgeFailure("judge_failed", str(problem)) from None


def _worker(
    url: str, body: dict[str, Any], seconds: float, answers: queue.SimpleQueue[str | JudgeFailure]
) -> None:
    try:
        answers.put(_text(_post(url, body, time.monotonic() + seconds)))
    except JudgeFailure as failure:
        answers.put(failure)
    except httpx.TimeoutException:
        answers.put(JudgeFailure("judge_late", f"no answer within {seconds:g} s"))
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as problem:
        answers.put(JudgeFailure("judge_unreachable", str(problem) or type(problem).__name__))


def _post(url: str, body: dict[str, Any], deadline: float) -> bytes:
    """The body of the answer; a server that is busy is asked again while there is time."""
    key = os.environ.get(KEY)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    pause = 0.25
    while True:
        left = max(0.01, deadline - time.monotonic())
        with httpx.Client(timeout=left, headers=headers) as client:
            with client.stream("POST", f"{url.rstrip('/')}/chat/completions", json=body) as response:
                if response.status_code == 200:
                    return _read(response, deadline)
                status = response.status_code
        if status not in _BUSY:
            raise JudgeFailure("judge_refused", f"the endpoint answered {status}")
        if time.monotonic() + pause > deadline:
            raise JudgeFailure("judge_unreachable", f"the endpoint still answers {status}")
        time.sleep(pause)
        pause *= 2


def _read(response: httpx.Response, deadline: float) -> bytes:
    data = b""
    for chunk in response.iter_bytes():
        data += chunk
        if time.monotonic() > deadline:
            raise JudgeFailure("judge_late", "the answer came too slowly")
        if len(data) > _LARGEST:
            raise JudgeFailure("judge_unparseable", f"the answer is longer than {_LARGEST} bytes")
    return data


def _text(data: bytes) -> str:
    try:
        text = json.loads(data)["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError, RecursionError):
        text = None
    if not isinstance(text, str):
        raise JudgeFailure("judge_unparseable", "the endpoint answered something else than a completion")
    return text
