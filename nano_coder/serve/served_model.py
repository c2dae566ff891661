"""A served model: how it reads a client's messages, answers them, and what of an answer are calls.

A model of our own reads them in its dialect. One behind another server gets messages and calls as the API has
them.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nano_coder.agent.dialects.api import API
from nano_coder.agent.dialects.dialect import DIALECTS, Parsed, StreamParser
from nano_coder.agent.profiles import PROFILES, system_text
from nano_coder.models.endpoint.chat_completion import OnAnswer
from nano_coder.models.endpoint.exchange import EndpointError
from nano_coder.models.endpoint.policy import EndpointPolicy
from nano_coder.models.local.policy import LocalPolicy
from nano_coder.serve.request import (
    ClientCall,
    ClientMessage,
    ModelRequest,
    OnText,
    TextDelta,
    split_at_stop,
)
from nano_shared.policy import Conversation, DecodeIds, InterfaceProfile, Policy
from nano_shared.store import LogStore
from nano_shared.types import (
    ApiAnswer,
    ApiCall,
    Completion,
    Message,
    Role,
    ToolCall,
    ToolSpec,
    Trajectory,
)

if TYPE_CHECKING:
    from nano_coder.models.local.sampler import Likeliest


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A policy that is served, and the log of what it answers."""

    policy: Policy
    profile: InterfaceProfile
    store: LogStore
    name: str
    """the policy as the user named it"""

    @property
    def upstream(self) -> EndpointPolicy | None:
        """The server behind, to which calls and tools go as the API has them."""
        found = self.policy
        return found if isinstance(found, EndpointPolicy) and self.profile.dialect == API.name else None

    def reads(self, other: ServedModel) -> bool:
        """Whether it reads the tokens that another was shown: same template and profile."""
        mine, theirs = self.policy.template_hash, other.policy.template_hash
        return self is other or (mine == theirs and self.profile.hash == other.profile.hash)

    def conversation(
        self, run: Trajectory, new: Sequence[ClientMessage], request: ModelRequest
    ) -> tuple[Conversation, tuple[Message, ...]]:
        """The run's conversation with its new messages, and these."""
        anew = bool(run.turns) and len(new) == len(request.messages)
        if self.upstream:
            messages = passed_messages(new, run.turns[-1].completion.api if run.turns else None)
        else:
            tools = () if request.prompt_ids else request.tools
            messages = self.rendered(new, tools, opening=anew or not run.turns)
        conversation = Conversation(tools=request.tools if self.upstream else (), started=run.started)
        for turn in run.turns:
            _read_on(conversation, turn.messages, anew=run.restates(turn))
            conversation.record(turn.completion)
        _read_on(conversation, messages, anew=anew)
        return conversation, messages

    def rendered(
        self, messages: Sequence[ClientMessage], tools: Sequence[ToolSpec], *, opening: bool
    ) -> tuple[Message, ...]:
        """The messages as the policy reads them: calls in its dialect, tools in the system message."""
        shown = [Message(role=m.role, content=_content(m, tools, self.profile)) for m in messages]
        if opening and tools:
            told = self.profile.describing
            system = system_text(PROFILES.find(told) if told else self.profile, tools)
            if shown and shown[0].role is Role.SYSTEM:
                system = f"{system}\n\n{shown.pop(0).content}"
            shown.insert(0, Message(role=Role.SYSTEM, content=system))
        return tuple(shown)

    def complete(
        self, conversation: Conversation, request: ModelRequest, on_text: OnText | None, *,
        owner: int, slot: int | None = None, session: str | None = None,
    ) -> tuple[Completion, tuple[Likeliest, ...]]:  # fmt: skip
        """The completion, and the likeliest tokens of each of its places if the request asks for them.

        `owner` is whose KV is kept, `slot` the policy's slot of a rollout; `session` is named to a server
        behind, which is None for one that gets no more than a conversation.
        """
        policy, sampling = self.policy, request.sampling
        if self.upstream and session is not None:
            relay = _relay(on_text or _read, may_call=bool(request.tools))
            options: dict[str, Any] = {"more": request.more, "session": session, "on_answer": relay}
            return self.upstream.answer(conversation, sampling, **options), ()
        if on_text and request.tools and not self.upstream:
            on_text = _besides_calls(on_text, request, self.profile)
        if not isinstance(policy, LocalPolicy):
            completion = policy.complete(conversation, sampling)
            if on_text:
                tokens = completion.tokens
                sampled = (tokens.sampled_ids, tokens.logprobs) if tokens else ()
                on_text(TextDelta(split_at_stop(completion)[0], *sampled))
            return completion, ()
        stream = TextStream(policy.decode, policy.engine.eos_ids, sampling.stop, on_text or _read)
        told: dict[str, Any] = {"on_token": stream.take, "top_logprobs": request.top_logprobs}
        with policy.using_slot(slot):
            if request.prompt_ids:
                completion = policy.complete_ids(request.prompt_ids, sampling, **told)
            else:
                completion = policy.complete(conversation, sampling, owner=owner, **told)
        stream.finish()
        return completion, tuple(stream.top)

    def read(self, completion: Completion, request: ModelRequest) -> tuple[Parsed, tuple[ClientCall, ...]]:
        """The calls of a completion as values, and as the client gets them."""
        if self.upstream:
            parsed = _passed_calls(completion, request.tools)
            given = completion.api.calls if completion.api else ()  # beside the text, as they came
            passed = tuple(ClientCall(id=c.id, name=c.name, arguments=c.arguments) for c in given)
            return parsed, passed or tuple(map(_call, parsed.calls))
        parsed = _parsed(completion, request, self.profile)
        return parsed, tuple(map(_call, parsed.calls))

    def sizes(self, conversation: Conversation, completion: Completion) -> tuple[int, int]:
        """Tokens of prompt and answer of a completion that has none itself."""
        if completion.api:
            return completion.api.usage.prompt, completion.api.usage.completion
        count = self.policy.count
        return sum(count(m.content) for m in conversation.messages), count(completion.text)


def _parsed(completion: Completion, request: ModelRequest, profile: InterfaceProfile) -> Parsed:
    tools = request.tools
    if not tools:
        return Parsed(thought=completion.text)
    parsed = DIALECTS.find(profile.dialect).parse(completion.text, tools)
    known = {tool.name for tool in tools}
    if parsed.error or any(call.name not in known for call in parsed.calls):
        return Parsed(thought=completion.text)  # prose, or a call of a tool that was not offered
    return parsed


def _read_on(conversation: Conversation, messages: Sequence[Message], *, anew: bool) -> None:
    """Append the messages, or begin a row with them."""
    if anew:
        conversation.begin_row(messages)
    for message in () if anew else messages:
        conversation.append(message)


def _content(message: ClientMessage, tools: Sequence[ToolSpec], profile: InterfaceProfile) -> str:
    if not message.calls:
        return message.text
    calls = [ToolCall(name=call.name, arguments=call.values) for call in message.calls]
    try:
        return DIALECTS.find(profile.dialect).render(message.text, calls, tools)
    except ValueError:  # what this dialect cannot write
        return "\n".join([message.text, *(f"{call.name}({call.arguments})" for call in message.calls)])


def _besides_calls(on_text: OnText, request: ModelRequest, profile: InterfaceProfile) -> OnText:
    """`on_text` for what is no call: text that may become one is held back."""
    parser = StreamParser(DIALECTS.find(profile.dialect), request.tools)
    return lambda delta: on_text(delta._replace(text=parser.feed(delta.text).thought))


def _read(delta: TextDelta) -> bool:
    return True


def _call(call: ToolCall) -> ClientCall:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return ClientCall(id=f"call_{uuid.uuid4().hex[:24]}", name=call.name, arguments=arguments)


# ------------------------------------------------------------------------------ a server behind


_OURS = frozenset({
    "model", "messages", "tools", "stream", "stream_options", "temperature", "top_p", "top_k", "seed", "stop",
    "stop_sequences", "max_tokens", "max_completion_tokens", "n", "logprobs", "top_logprobs",
    "return_token_ids",
})  # fmt: skip
"""parameters of a chat completion that the request holds elsewhere"""


def passed_on(body: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of a chat completion that the server behind gets as they are; None leaves one out."""
    more = {name: value for name, value in body.items() if name not in _OURS}
    unsaid = {"temperature": None} if body.get("temperature") is None else {}
    lengths = ("max_tokens", "max_completion_tokens")
    if all(body.get(name) is None for name in lengths):
        unsaid |= dict.fromkeys(lengths)
    return more | unsaid


def passed_messages(new: Sequence[ClientMessage], before: ApiAnswer | None) -> tuple[Message, ...]:
    """The messages with the ids of calls that the server behind gave: clients may have their own.

    `before` is the answer that they follow.
    """
    ids = [call.id for call in before.calls] if before else []
    shown, place = [], 0
    for message in new:
        if message.calls:
            ids, place = [call.id for call in message.calls], 0
        call_id = None
        if message.role is Role.TOOL:
            given = message.call_id
            call_id = given if given in ids else ids[place] if place < len(ids) else None
            place += 1
        if message.role is Role.TOOL and call_id is None:  # it answers a call that stood in the text
            shown.append(Message(role=Role.USER, content=message.text))
            continue
        calls = tuple(ApiCall(id=c.id, name=c.name, arguments=c.arguments) for c in message.calls)
        shown.append(Message(role=message.role, content=message.text, calls=calls, call_id=call_id))
    return tuple(shown)


def _passed_calls(completion: Completion, tools: Sequence[ToolSpec]) -> Parsed:
    """The calls that came beside the text, as values, or that a server without a parser left in it; the text
    alone where there are none."""
    given = completion.api
    if given is not None and given.calls:
        return API.parse_api(completion.text, given, tools)
    found = API.parse(completion.text, tools) if tools else Parsed()
    known = {tool.name for tool in tools}
    if found.calls and all(call.name in known for call in found.calls):
        return found
    return Parsed(thought=completion.text)


def _relay(on_text: OnText, *, may_call: bool) -> OnAnswer:
    """Hands on the parts of an answer. With `may_call`, text that may become a call is held back."""
    text, shown = "", 0

    def relay(new: str, ids: Sequence[int], logprobs: Sequence[float]) -> bool:
        nonlocal text, shown
        text += new
        end = max(shown, API.settled(text) if may_call else len(text))
        delta = TextDelta(text[shown:end], tuple(ids), tuple(logprobs))
        shown = end
        return on_text(delta)

    return relay


_GATEWAY = {"unreachable": 502, "late": 504, "busy": 503, "garbled": 502, "refused": 502}


def status_behind(problem: EndpointError) -> int:
    """The HTTP status for a client of a server whose server behind failed so: its own where it gave one."""
    return problem.status or _GATEWAY[problem.kind]


# -------------------------------------------------------------------------------- text of tokens


_WINDOW = 32
"""tokens after which those already shown are decoded no more"""
_OVERLAP = 8
"""tokens decoded again before the new ones: some tokenizers write a token according to its neighbour"""


class TextStream:
    """Calls `on_text` with the tokens that `take` gets, and their text as far as it is certain."""

    def __init__(
        self, decode: DecodeIds, eos_ids: Collection[int], stop: Sequence[str], on_text: OnText
    ) -> None:
        self._decode, self._eos_ids, self._stop, self._on_text = decode, eos_ids, stop, on_text
        self._window: list[int] = []
        self._shown = ""
        """text of the window that was handed on or is held back"""
        self._held = ""
        """text that may be the beginning of a stop string"""
        self._stopped = False
        self.top: list[Likeliest] = []
        """of each token so far, if they come with their likeliest"""

    def take(self, token: int, logprob: float, likeliest: Likeliest = ()) -> bool:
        """A sampled token. Returns whether the reader is still there."""
        top = (likeliest,) if likeliest else ()
        self.top += top
        text = "" if token in self._eos_ids or self._stopped else self._text(token)
        return self._on_text(TextDelta(text, (token,), (logprob,), top))

    def finish(self) -> None:
        if not self._stopped:
            text = self._held + self._decode(self._window)[len(self._shown) :]
            self._on_text(TextDelta(text))

    def _text(self, token: int) -> str:
        """What a token adds to the text, up to a stop string or what may become one."""
        self._window.append(token)
        text = self._decode(self._window)
        if text.endswith("\N{REPLACEMENT CHARACTER}"):  # the next token may complete the character
            return ""
        new, self._shown = self._held + text[len(self._shown) :], text
        if len(self._window) > _WINDOW:
            self._window = self._window[-_OVERLAP:]
            self._shown = self._decode(self._window)
        if ends := [at for stop in self._stop if (at := new.find(stop)) >= 0]:
            self._stopped = True
            return new[: min(ends)]
        begun = (n for stop in self._stop for n in range(1, len(stop)) if new.endswith(stop[:n]))
        end = len(new) - max(begun, default=0)
        self._held = new[end:]
        return new[:end]
