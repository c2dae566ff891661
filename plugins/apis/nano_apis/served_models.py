"""The models of a server: how each reads a client's messages, answers them, and what of an answer are calls;
the one that is served now, its adapters, and the threads that step their engines.

A model of our own reads messages in its dialect. One behind another server gets messages and calls as the API
has them. Adapters stand on the base weights that they share. Each has an engine of its own, by its content:
two names of equal files are one engine, and a name whose files have changed gets another, so that no KV
outlives the weights that it was computed with.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nano_apis.request import (
    ClientCall,
    ClientMessage,
    ModelRequest,
    OnText,
    TextDelta,
    split_at_stop,
)
from nano_coder.agent.dialects.api import API
from nano_coder.agent.dialects.dialect import DIALECTS, Parsed, StreamParser
from nano_coder.agent.profiles import PROFILES, system_text
from nano_coder.models.endpoint.chat_completion import OnAnswer
from nano_coder.models.endpoint.exchange import EndpointError
from nano_coder.models.endpoint.policy import EndpointPolicy
from nano_coder.models.local.policy import LocalPolicy
from nano_coder.models.opening import at_hand, locate
from nano_coder.serve.access import BadRequest
from nano_coder.verify.trainable import hashes
from nano_shared.checkpoint import MANIFEST, checkpoint_names, folder_content, read_checkpoint
from nano_shared.errors import CheckpointError, NanoError, UsageError
from nano_shared.files import checkpoints_dir, user_path
from nano_shared.policy import Conversation, DecodeIds, InterfaceProfile, Likeliest, Policy
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
    from nano_apis.conversations import Conversations


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


# ------------------------------------------------------------------- adapters, and the model that is served


_log = logging.getLogger("nano_coder.serve")
_SENT_UNASKED = ("claude-", "gpt-")
"""how names begin that Claude Code and Codex send for small work of their own"""
MOST_OPENED = 8
"""checkpoints that requests have named and that stay opened; the one named longest ago is closed first"""
MOST_LOADED = 64
"""adapters that load_lora_adapter has named"""
_LONGEST_NAME = 200


class Adapters:
    """A server's adapters by name: checkpoints of this machine, and those that were loaded. Thread-safe."""

    def __init__(
        self, base: str, stands_on: Callable[[Path], str | None], open: Callable[[Path], ServedModel]
    ) -> None:
        """`stands_on` names the base of an adapter's folder, None for a folder of another kind; `open` opens
        one over the base `base`. It raises NanoError."""
        self.base = base
        self._stands_on = stands_on
        self._open = open
        self._lock = threading.Lock()
        self._loaded: dict[str, tuple[Path, str]] = {}
        """name -> folder and content"""
        self._opened: OrderedDict[str, ServedModel] = OrderedDict()
        """by content"""
        self._hashed: dict[Path, tuple[list[object], str]] = {}
        """content of folders, with sizes and times of the files that were read"""

    def find(self, name: str) -> ServedModel | None:
        """The adapter of that name; None if neither a loaded adapter nor a checkpoint has it.

        Raises BadRequest for a checkpoint that stands on another base or cannot be opened.
        """
        with self._lock:
            if name in self._loaded:
                return self._opened[self._loaded[name][1]]
            if name not in checkpoint_names():
                return None
            folder = checkpoints_dir() / name
            self._refuse(folder, name)
            return self._at(folder, self._content(folder))

    def load(self, name: str, path: str, *, replace: bool = False) -> None:
        """Open an adapter under a name. Raises BadRequest."""
        folder = user_path(path)
        if not 0 < len(name) <= _LONGEST_NAME:
            raise BadRequest(f"lora_name must have 1 to {_LONGEST_NAME} characters", param="lora_name")
        with self._lock:
            if name in self._loaded and not replace:
                raise BadRequest(
                    f"the adapter {name!r} is loaded; unload it first, or send load_inplace",
                    param="lora_name",
                )
            if len(self._loaded) >= MOST_LOADED and name not in self._loaded:
                raise BadRequest(f"{MOST_LOADED} adapters are loaded; unload one first", param="lora_name")
            self._refuse(folder, str(path))
            content = self._content(folder)
            self._at(folder, content)
            _, replaced = self._loaded.get(name, (folder, content))
            self._loaded[name] = (folder, content)
            self._close(replaced)
            self._close_unnamed()

    def unload(self, name: str) -> None:
        """Forget a name, and close the adapter; requests in flight finish. Raises BadRequest."""
        with self._lock:
            unloaded = self._loaded.pop(name, None)
            if unloaded is None:
                known = ", ".join(sorted(self._loaded)) or "none"
                raise BadRequest(
                    f"no adapter {name!r:.200} is loaded; loaded: {known}", status=404, param="lora_name",
                    code="model_not_found",
                )  # fmt: skip
            self._close(unloaded[1])

    def cards(self) -> Iterator[dict[str, Any]]:
        with self._lock:
            named: dict[str, tuple[Path, str | None]] = dict(self._loaded)
        for name in checkpoint_names():
            if self._stands_on(checkpoints_dir() / name) == self.base:
                named.setdefault(name, (checkpoints_dir() / name, None))
        for name, (folder, content) in named.items():
            card = {"id": name, "root": str(folder), **_manifest_card(folder, self.base)}
            yield card | ({"content": content} if content else {})

    def opened(self) -> list[ServedModel]:
        with self._lock:
            return list(self._opened.values())

    def _refuse(self, folder: Path, name: str) -> None:
        try:
            base = self._stands_on(folder)
        except NanoError as problem:
            raise BadRequest(str(problem), param="model") from None
        if base is None:
            raise BadRequest(
                f"{name!r:.200} is no adapter: its folder holds no adapter_config.json", param="model"
            )
        if base != self.base:
            raise BadRequest(
                f"{name!r:.200} stands on {base}, and this server holds {self.base}; start another server",
                param="model",
            )

    def _content(self, folder: Path) -> str:
        """Hash of an adapter's files; its manifest, which holds its name and date, does not count."""
        try:
            files = sorted(file for file in folder.iterdir() if file.is_file() and file.name != MANIFEST)
            times = [(file.name, (at := file.stat()).st_size, at.st_mtime_ns, at.st_ino) for file in files]
            if self._hashed.get(folder, ([], ""))[0] != times:
                self._hashed[folder] = ([*times], folder_content(folder))
        except OSError as problem:
            raise BadRequest(f"{folder} cannot be read: {problem.strerror}", param="model") from None
        return self._hashed[folder][1]

    def _at(self, folder: Path, content: str) -> ServedModel:
        if content not in self._opened:
            try:
                self._opened[content] = self._open(folder)
            except UsageError as problem:
                raise BadRequest(str(problem), param="model") from None
        self._opened.move_to_end(content)
        model = self._opened[content]
        self._close_unnamed()
        return model

    def _close(self, content: str) -> None:
        """Close an adapter unless a name is left for it."""
        if content not in {named for _, named in self._loaded.values()}:
            self._opened.pop(content, None)

    def _close_unnamed(self) -> None:
        named = {content for _, content in self._loaded.values()}
        surplus = [content for content in self._opened if content not in named][:-MOST_OPENED]
        for content in surplus:
            del self._opened[content]


def _manifest_card(folder: Path, base: str | None) -> dict[str, Any]:
    """The card's fields that a manifest knows: parent, version and times."""
    try:
        manifest = read_checkpoint(folder, verify=False) if (folder / MANIFEST).is_file() else None
    except (CheckpointError, OSError):
        manifest = None
    if manifest is None:
        return {"parent": base}
    return {
        "parent": manifest.parent or manifest.base_model, "weight_version": manifest.policy_version,
        "created": int(manifest.created), "profile": manifest.profile,
    }  # fmt: skip


Promoted = Callable[[], ServedModel | None]
"""the model that was promoted since the last call; None if none was"""


class ServedModels:
    """The models of one server. Thread-safe."""

    def __init__(
        self, conversations: Conversations, adapters: Adapters | None = None, promoted: Promoted | None = None
    ) -> None:
        self._conversations, self._adapters, self._promoted = conversations, adapters, promoted
        self._started = int(time.time())
        self._starting = threading.Lock()
        self._engines: dict[LocalPolicy, Future[None]] = {}
        """policies with a thread that steps their engine, until the future is done"""

    @property
    def current(self) -> ServedModel:
        return self._conversations.model

    def opened(self) -> list[ServedModel]:
        return [self.current, *(self._adapters.opened() if self._adapters else ())]

    def find(self, name: object) -> ServedModel:
        """The model that a request names: the current one, also without a name, or an adapter. To the agent
        of a rollout every name is the current one. Raises BadRequest for a name that is not here.
        """
        current = self.current.name
        if name is None or self._conversations.is_rollout:
            return self.current
        if not isinstance(name, str):
            raise BadRequest("model must be a text", param="model")
        own = {current, Path(current).name, current.partition(":")[2], "nano"}
        if name in own or (at_hand(name) or name) == current or name.startswith(_SENT_UNASKED):
            return self.current
        found = self._adapters.find(name) if self._adapters else None
        if found is None:
            raise BadRequest(
                f"no model {name!r:.100} here; this server answers as {current} or nano, and GET /v1/models"
                " lists its adapters",
                status=404, param="model", code="model_not_found",
            )  # fmt: skip
        self.start_engine(found.policy)
        return found

    def cards(self) -> list[dict[str, Any]]:
        model = self.current
        policy: Any = model.policy
        base = self._adapters.base if self._adapters else None
        usual = {
            "object": "model", "created": self._started, "owned_by": "nano",
            "max_model_len": policy.context_limit, "meta": {"context_length": policy.context_limit},
        }  # fmt: skip
        card = {"id": model.name, **usual}
        if base is not None:
            card |= _manifest_card(Path(locate(model.name)), base if base != model.name else None)
        card |= {
            "root": policy.id, "weight_version": policy.version,
            "profile": model.profile.name, "profile_hash": hashes(model.profile)[0],
            "template_hash": policy.template_hash,
            "gives_tokens": not isinstance(policy, EndpointPolicy) or policy.card.gives_tokens,
        }  # fmt: skip
        return [card, *({**usual, **card} for card in (self._adapters.cards() if self._adapters else ()))]

    def load_adapter(self, body: Mapping[str, Any]) -> str:
        """Load the adapter of a request of vLLM's form; its name. Raises BadRequest."""
        name, path = (body.get(key) for key in ("lora_name", "lora_path"))
        if not isinstance(name, str) or not isinstance(path, str) or name == self.current.name:
            raise BadRequest("lora_name and lora_path must be texts, the name not that of the served model")
        self._loadable().load(name, path, replace=bool(body.get("load_inplace")))
        return name

    def unload_adapter(self, body: Mapping[str, Any]) -> str:
        name = body.get("lora_name")
        if not isinstance(name, str):
            raise BadRequest("lora_name must be a text", param="lora_name")
        self._loadable().unload(name)
        return name

    def _loadable(self) -> Adapters:
        if self._adapters is None:
            raise BadRequest("only local weights take adapters, and this server has none")
        return self._adapters

    def start_engine(self, policy: Any) -> None:
        """Start the thread that steps this policy's engine, where there is none."""
        with self._starting:
            if isinstance(policy, LocalPolicy) and policy not in self._engines:
                stopping: Future[None] = Future()
                self._engines[policy] = stopping
                threading.Thread(target=_lead, args=(policy, stopping), name="engine", daemon=True).start()

    def follow(self) -> None:
        """Answer by the model that was promoted since; what is in flight ends with the one it began with."""
        try:
            model = self._promoted() if self._promoted is not None else None
        except NanoError as problem:
            _log.warning("the promoted model is not served: %s", problem)
            model = None
        if model is not None:
            self._conversations.model = model
            self.start_engine(model.policy)
            _log.warning("serving %s from now on", model.name)
        kept = [model.policy for model in self._adapters.opened()] if self._adapters else []
        for policy in self._conversations.unused(tuple(self._engines), kept):
            self._engines.pop(policy).set_result(None)
            policy.rest()
            self._conversations.leave(policy)

    def stop(self) -> None:
        for stopping in self._engines.values():
            stopping.set_result(None)


def _lead(policy: LocalPolicy, stopping: Future[None]) -> None:
    with policy.hosted() as lead:
        lead(stopping)
