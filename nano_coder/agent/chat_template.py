"""Chat templates: a conversation becomes token ids. `ChatTemplate` only appends to what it rendered;
`NativeTemplate` is a model's own, rendered by transformers as `apply_chat_template` does."""

from __future__ import annotations

import json
import os
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from nano_coder.agent.dialects.dialect import Dialect, Parsed, function_schema
from nano_shared.errors import PolicyError
from nano_shared.files import content_hash
from nano_shared.policy import Conversation
from nano_shared.types import Message, Role, ToolCall, ToolSpec

if TYPE_CHECKING:
    from tokenizers import Tokenizer


_PIECE = 1 << 14
"""characters that are encoded at a time to count them, and without letting other threads run"""


class Encoder:
    """Encodes text with private copies of a tokenizer, so that settings of other users have no effect.

    Control tokens are the added tokens marked special. Text is escaped before it reaches a template: a mark
    is inserted into every spelling of a control token, and removed only after the template's own control
    tokens were parsed.
    """

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer` is a `tokenizers.Tokenizer` or a fast tokenizer of transformers."""
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # or forks warn
        backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
        eos = getattr(tokenizer, "eos_token", None)
        self._parsing = _copy(backend)
        self._plain = _copy(backend)
        self._plain.encode_special_tokens = True
        added = self._parsing.get_added_tokens_decoder()
        self.control_tokens: dict[int, str] = {i: t.content for i, t in added.items() if t.special}
        self.added_tokens: dict[str, int] = {t.content: i for i, t in added.items()}
        """special or not: those that text is not split into"""
        first = self._parsing.encode("", add_special_tokens=True).ids[:1]
        self.bos: list[int] = first if "".join(self.control_tokens.get(i, "") for i in first) != eos else []
        """the token with which the tokenizer begins a text, if any"""
        self._control_ids = {text: i for i, text in self.control_tokens.items()}
        self._control = _alternatives(self._control_ids)
        self._spelling = _spelling(self._control_ids)

    @property
    def serialised(self) -> str:
        """The tokenizer as the content of a tokenizer.json."""
        return str(self._parsing.to_str())

    def prompt(self, text: str, *, control: bool = True) -> list[int]:
        """Ids of a prompt as the model's tokenizer writes them; `control`: with the tokens that it adds."""
        return _ids(self._parsing, text, control=control)

    def text(self, text: str) -> list[int]:
        """Ids of plain text; spellings of control tokens become ordinary tokens."""
        return _ids(self._plain, text)

    @cached_property
    def longest(self) -> int:
        """Characters of the longest token: no text has fewer tokens than its length divided by this."""
        return max(map(len, self._plain.get_vocab(with_added_tokens=True)))

    def surely_more(self, texts: Sequence[str], limit: int) -> bool:
        """Whether the texts have more tokens than `limit`; False where that is not sure. A text of any length
        is read no further than it takes to know."""
        left = limit * self.longest - sum(map(len, texts))
        if left < 0 or sum(map(len, texts)) <= limit:
            return left < 0
        count = 0
        for text in texts:
            for start in range(0, len(text), _PIECE):  # cut in two, a text has a few tokens more
                count += max(0, len(self.text(text[start : start + _PIECE])) - _PIECE // 64)
                if count > limit:
                    return True
        return False

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, control tokens included; invalid UTF-8 becomes U+FFFD."""
        return str(self._parsing.decode(list(ids), skip_special_tokens=False))

    def defuser(self, texts: Sequence[str]) -> tuple[str, Callable[[str], str]]:
        """A mark that occurs in none of the texts, and the function that escapes a text with it."""
        everything = "".join(texts)
        # Supplementary private use area: no template writes it, and hardly any text contains it.
        mark = next(c for c in map(chr, range(0xF0000, 0x10FFFE)) if c not in everything)
        return mark, lambda text: self._spelling.sub(lambda m: m[0][0] + mark + m[0][1:], text)

    def rendered(self, text: str, mark: str) -> list[int]:
        """Ids of a rendered template: its control tokens are parsed, marked spellings stay text."""
        if mark not in text:
            ids = _ids(self._parsing, text)
            if [i for i in ids if i in self.control_tokens] == [
                self._control_ids[found] for found in self._control.findall(text)
            ]:
                return ids
        ids = []
        start = 0
        for match in self._control.finditer(text):
            ids += [*self.text(text[start : match.start()].replace(mark, "")), self._control_ids[match[0]]]
            start = match.end()
        return ids + self.text(text[start:].replace(mark, ""))


def _ids(tokenizer: Tokenizer, text: str, *, control: bool = False) -> list[int]:
    """Long texts are encoded as a batch of one, which lets other threads run and keeps no offsets."""
    if len(text) < _PIECE:
        return list(tokenizer.encode(text, add_special_tokens=control).ids)
    return list(tokenizer.encode_batch_fast([text], add_special_tokens=control)[0].ids)


def _copy(backend: Tokenizer) -> Tokenizer:
    copy: Tokenizer = type(backend).from_str(backend.to_str())
    copy.no_truncation()
    copy.no_padding()
    return copy


def _alternatives(texts: Sequence[str] | dict[str, int]) -> re.Pattern[str]:
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _spelling(controls: dict[str, int]) -> re.Pattern[str]:
    """Matches a control token anywhere, or the beginning of one at the end, which a template might
    complete."""
    beginnings = {text[:n] for text in controls for n in range(1, len(text))}
    whole, partial = _alternatives(controls).pattern, _alternatives(dict.fromkeys(beginnings, 0)).pattern
    return re.compile(f"(?:{whole})|(?:{partial})\\Z")


CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""every message as `<|im_start|>{role}, a newline, {content}<|im_end|> and a newline`; no default system
message"""


class ChatTemplate:
    """A Jinja chat template bound to a tokenizer. Stateless and thread-safe. The Jinja environment is that of
    transformers (`apply_chat_template`) without its clock: a template that asks for the date gets none,
    because a prompt must not depend on the time of its rendering."""

    def __init__(self, source: str, tokenizer: Any) -> None:
        """Raises PolicyError if the source is not a Jinja template."""
        self.source = source
        self.encoder = Encoder(tokenizer)
        names = ("bos_token", "eos_token", "pad_token")
        self._special = {name: str(getattr(tokenizer, name, None) or "") for name in names}
        try:
            self._template = _environment().from_string(source)
        except TemplateError as error:
            raise PolicyError(f"{self.name}: not a Jinja chat template: {error}") from error

    @property
    def template_hash(self) -> str:
        return content_hash(self.source)

    @property
    def name(self) -> str:
        """A short name of this template for messages: the beginning of its hash."""
        return f"chat template {self.template_hash[:19]}"

    def delta(self, conversation: Conversation) -> tuple[int, ...]:
        """[N] ids to append to `conversation.tokens` before the next turn is sampled.

        The first call renders every message. Later calls render the end of the last sampled turn (completely
        if it was cut by length; without the end-of-turn token if that was sampled), the new messages, and the
        generation prompt.

        Raises PolicyError if the template rejects the messages, or changes earlier output when a message is
        added.
        """
        mark, defuse = self.encoder.defuser([m.content for m in conversation.messages])
        messages = [Message(role=m.role, content=defuse(m.content)) for m in conversation.messages]
        if not conversation.tokens:
            ids, bos = self.encoder.rendered(self.render(messages), mark), self.encoder.bos
            return tuple(ids if ids[:1] == bos else [*bos, *ids])
        suffix = self._suffix(messages, conversation.rendered)
        last = self.encoder.control_tokens.get(conversation.tokens[-1])
        if last is not None:
            suffix = suffix.removeprefix(last)
        return tuple(self.encoder.rendered(suffix, mark))

    def next_row(self, conversation: Conversation) -> tuple[int, tuple[int, ...]]:
        """The row of the next turn, and `delta`. Raises as `delta`."""
        return conversation.row, self.delta(conversation)

    def written(self, context: Sequence[int], text: str, eos_id: int) -> tuple[int, ...]:
        """The ids of an assistant's text after `context`, and its end-of-turn token."""
        return (*self.encoder.text(text), eos_id)

    def count(self, text: str) -> int:
        return len(self.encoder.text(text))

    def render(self, messages: Sequence[Message], *, generation_prompt: bool = True) -> str:
        """The text of the messages, as the template writes it."""
        try:
            return self._template.render(
                messages=[{"role": m.role.value, "content": m.content} for m in messages],
                add_generation_prompt=generation_prompt,
                tools=None,
                **self._special,
            )
        except TemplateError as error:
            roles = ", ".join(m.role.value for m in messages)
            raise PolicyError(f"{self.name} refuses messages of roles [{roles}]: {error}") from error

    def _suffix(self, messages: list[Message], rendered: int) -> str:
        """The template's output after the content of `messages[rendered - 1]`, the last sampled message."""
        shown = self.render(messages[:rendered], generation_prompt=False)
        if not self.render(messages).startswith(shown):
            self._rewrites(messages[-1])
        dummy = "nano: a sampled turn"
        while any(dummy in m.content for m in messages):
            dummy += "."
        stand_in = Message(role=Role.ASSISTANT, content=dummy)
        with_dummy = [*messages[: rendered - 1], stand_in, *messages[rendered:]]
        # the sampled text itself cannot mark the place: templates trim it, and it may occur elsewhere
        before, found, _ = self.render(with_dummy[:rendered], generation_prompt=False).rpartition(dummy)
        prefix = before + found
        text = self.render(with_dummy)
        if not found or not text.startswith(prefix):
            self._rewrites(messages[-1])
        return text[len(prefix) :]

    def _rewrites(self, last: Message) -> NoReturn:
        raise PolicyError(
            f"{self.name} rewrites history: appending a {last.role.value} message changes what it wrote"
            " before, so the tokens the model read would no longer be those in the log; use a template that"
            " only appends, such as ChatML"
        )


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols], autoescape=False
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    return environment


def _to_json(value: Any, indent: int | None = None) -> str:
    # Jinja's own tojson escapes HTML, which chat templates do not expect
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


TemplateMessage = dict[str, Any]
"""a message as chat templates take it: role, content, tool_calls, name, tool_call_id"""
TEMPLATE_FAILURES = (TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError)
"""what an expression of a template can raise"""
_REASONING_KEYS = ("reasoning_content", "thinking")
PROBE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "probe",
        "parameters": {"type": "object", "properties": {"x": {"type": "string", "description": "x"}}},
    },
}


class NativeTemplate(ChatTemplate):
    """The chat template of a model, with the dialect in which the model writes its calls.

    Each prompt is the whole conversation as the template writes it. Where it continues the recorded tokens,
    the row goes on; where the template rewrites history, a new row begins. A sampled turn is given to the
    template as content and calls if the template writes these as the model did, else as text; in a new row
    always as content and calls.

    Roles that the template cannot express are folded: a system message begins the first user message, results
    of tools are user messages, calls are shown as the text that was sampled.
    """

    def __init__(self, source: str, tokenizer: Any, dialect: Dialect, end_id: int | None = None) -> None:
        """`end_id` is the token that ends a demonstrated turn, if it is not the tokenizer's EOS. Raises
        PolicyError if the template cannot render a user message."""
        self.source = source
        self.encoder = Encoder(tokenizer)
        self._tokenizer, self._dialect, self._end_id = tokenizer, dialect, end_id
        self._written: dict[str, str | None] = {}
        self._reasoning_key = next((key for key in _REASONING_KEYS if key in source), None)
        self._text([_user("probe")])
        self._system_role = self._shows({"role": "system", "content": "nano-probe"}, _user("x"))
        self._repeats = self._shows(_user("x"), _user("nano-probe"))
        call = self._calls((ToolCall(name="probe_tool", arguments={"x": "nano-probe"}),), 0)
        call_message: TemplateMessage = {"role": "assistant", "content": "", "tool_calls": call}
        answered = _answered("y", call[0])
        self._call_field = self._shows(_user("x"), call_message, answered)
        said = call_message if self._call_field else {"role": "assistant", "content": "x"}
        self._tool_role = self._shows(_user("x"), said, _answered("nano-probe", call[0]))

    def next_row(self, conversation: Conversation) -> tuple[int, tuple[int, ...]]:
        """The row of the next turn, and the ids to append to it before sampling. Raises PolicyError if the
        template rejects the messages."""
        everything = len(conversation.messages)
        if not conversation.tokens:
            return conversation.row, tuple(self._whole(conversation, everything))
        with suppress(PolicyError):  # it may refuse the texts of turns, and take their content and calls
            whole = self._whole(conversation, conversation.row_start)
            kept = self._kept(conversation.tokens, whole)
            if kept is not None:
                return conversation.row, tuple(whole[kept:])
        return conversation.last_row + 1, tuple(self._whole(conversation, everything))

    def delta(self, conversation: Conversation) -> tuple[int, ...]:
        return self.next_row(conversation)[1]

    def written(self, context: Sequence[int], text: str, eos_id: int) -> tuple[int, ...]:
        """The ids of an assistant's text after `context`, control tokens parsed, and its end of turn."""
        controls = self.encoder.control_tokens
        anchor = next((i for i in range(len(context) - 1, -1, -1) if context[i] in controls), 0)
        tail = list(context[anchor:])
        ids = self.encoder.rendered(self.encoder.decode(tail) + text, "\0")
        if ids[: len(tail)] != tail:  # the text merges with the end of the prompt
            ids, tail = self.encoder.rendered(text, "\0"), []
        return (*ids[len(tail) :], eos_id if self._end_id is None else self._end_id)

    def render(self, messages: Sequence[Message], *, generation_prompt: bool = True) -> str:
        given = self._messages(messages, (), 0)
        return self._text(given, generation_prompt=generation_prompt)

    def messages(self, conversation: Conversation, *, row: int) -> list[TemplateMessage]:
        """The messages as the template gets them for a prompt of that row, its own or the next."""
        structured = conversation.row_start if row == conversation.row else len(conversation.messages)
        return self._messages(conversation.messages, conversation.tools, structured)

    def _kept(self, tokens: Sequence[int], whole: list[int]) -> int | None:
        """How many ids of the whole prompt the recorded tokens are; None if their texts differ."""
        if whole[: len(tokens)] == list(tokens):
            return len(tokens)
        # the same text in other tokens than the tokenizer's
        text = self.encoder.decode(tokens)
        place = bisect_left(range(len(whole)), len(text), key=lambda n: len(self.encoder.decode(whole[:n])))
        return place if self.encoder.decode(whole[:place]) == text else None

    def _whole(self, conversation: Conversation, structured: int) -> list[int]:
        given = self._messages(conversation.messages, conversation.tools, structured)
        tools = [function_schema(tool) for tool in conversation.tools]
        mark, defuse = self.encoder.defuser([json.dumps([given, tools], ensure_ascii=False)])
        defused, described = _mapped(given, defuse), _mapped(tools, defuse)
        return self.encoder.rendered(self._text(defused, described, conversation.started), mark)

    def _messages(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], structured: int
    ) -> list[TemplateMessage]:
        """The messages in the roles that the template has; assistant messages before `structured` as content
        and calls, those after it where the template writes that as the text."""
        given: list[TemplateMessage] = []
        answers: list[list[TemplateMessage]] = []
        system, number = "", 0
        for place, message in enumerate(messages):
            match message.role:
                case Role.SYSTEM if not self._system_role:
                    system = f"{message.content}\n\n"
                case Role.SYSTEM:
                    given.append({"role": "system", "content": message.content})
                case Role.ASSISTANT:
                    parsed = self._dialect.parse(message.content, tools)
                    calls = self._calls(parsed.calls, number)
                    number += len(calls)
                    said = self._assistant_messages(message.content, parsed, calls, always=place < structured)
                    given.append(said[0])
                    # a template that takes one call a message gets each with its result
                    answers = [[call, *(said[n : n + 1] if n else [])] for n, call in enumerate(calls)]
                case Role.TOOL if answers and self._tool_role:
                    call, *before = answers.pop(0)
                    given += [*before, _answered(message.content, call)]
                case _:
                    content, system = system + message.content, ""
                    if given and given[-1]["role"] == "user" and not self._repeats:
                        given[-1] = _user(f"{given[-1]['content']}\n{content}")
                    else:
                        given.append(_user(content))
        return given

    def _assistant_messages(
        self, text: str, parsed: Parsed, calls: list[TemplateMessage], *, always: bool
    ) -> list[TemplateMessage]:
        """A sampled turn as content and calls if the template writes these as the text, or `always` where it
        accepts them; else the text. One message, or one for each call."""
        content = parsed.thought
        if calls and not self._call_field:
            content = self._dialect.render(content, parsed.calls, ())
        message: TemplateMessage = {"role": "assistant", "content": content}
        if calls and self._call_field:
            message["tool_calls"] = calls
        forms = [[message]]
        if parsed.reasoning and self._reasoning_key:
            forms.insert(0, [{**message, self._reasoning_key: parsed.reasoning}])
        elif parsed.reasoning:
            message["content"] = f"<think>\n{parsed.reasoning}\n</think>\n\n{content}"
        if len(calls) > 1 and self._call_field:
            forms.append([{**message, "content": content if call is calls[0] else "", "tool_calls": [call]}
                          for call in calls])  # fmt: skip
        for form in forms:
            alone = [self._alone(m) for m in form]
            if None not in alone and (always or text in str(alone[0])):
                return form
        return [{"role": "assistant", "content": text}]

    def _calls(self, calls: Sequence[ToolCall], number: int) -> list[TemplateMessage]:
        name = getattr(self._dialect, "call_id", lambda _, n: f"call{n:05d}")
        return [
            {
                "type": "function",
                "id": name(c.name, n),
                "function": {"name": c.name, "arguments": c.arguments},
            }
            for n, c in enumerate(calls, number)
        ]

    def _alone(self, message: TemplateMessage) -> str | None:
        """The message as the template writes it after a user message; None if it refuses it."""
        key = json.dumps(message, ensure_ascii=False)
        if key not in self._written:
            try:
                self._written[key] = self._text([_user("x"), message], generation_prompt=False)
            except PolicyError:
                self._written[key] = None
        return self._written[key]

    def _shows(self, *messages: TemplateMessage) -> bool:
        try:
            return "nano-probe" in self._text(messages)
        except PolicyError:
            return False

    def _text(
        self, messages: Sequence[TemplateMessage], tools: Sequence[Mapping[str, Any]] = (),
        started: float | None = None, generation_prompt: bool = True,
    ) -> str:  # fmt: skip
        clock = {} if started is None else {"strftime_now": datetime.fromtimestamp(started, UTC).strftime}
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), tools=list(tools) or None, chat_template=self.source, tokenize=False,
                add_generation_prompt=generation_prompt, **clock,
            )  # fmt: skip
        except TEMPLATE_FAILURES as error:
            roles = ", ".join(str(message["role"]) for message in messages)
            raise PolicyError(f"{self.name} refuses messages of roles [{roles}]: {error}") from error
        return str(text)


def shows_tools(tokenizer: Any, source: str) -> bool:
    """Whether a chat template writes the tools that it is given."""
    try:
        text = tokenizer.apply_chat_template(
            [_user("x")], tools=[PROBE_TOOL], chat_template=source, tokenize=False, add_generation_prompt=True
        )
    except TEMPLATE_FAILURES:
        return False
    return "probe_tool" in text


DIALECT_MARKS = (
    ("harmony", "<|channel|>"),
    ("kimi", "<|tool_call_argument_begin|>"),
    ("deepseek-3", "<｜tool▁call▁begin｜>", "```json"),
    ("deepseek", "<｜tool▁call▁begin｜>"),
    ("mistral-args", "[ARGS]"),
    ("mistral", "[TOOL_CALLS]"),
    ("glm", "<arg_key>"),
    ("glm-4", "<|observation|>"),
    ("qwen-coder", "<function="),
    ("phi", "<|tool_call|>"),
    ("hermes-json", "<tool_call>"),
    ("pythonic", "<|tool_call_start|>"),
    ("pythonic", "func_name1("),
    ("llama-3", "<|python_tag|>"),
    ("llama-3", '"parameters":'),
    ("gemma", "<start_of_turn>"),
)
"""dialects, each with the texts that its templates hold; the first that fits is a template's dialect"""


def dialect_of(source: str) -> str | None:
    """The dialect whose marks a chat template writes; None if it writes none that is known."""
    return next((name for name, *marks in DIALECT_MARKS if all(mark in source for mark in marks)), None)


def _user(content: str) -> TemplateMessage:
    return {"role": "user", "content": content}


def _answered(content: str, call: TemplateMessage) -> TemplateMessage:
    return {"role": "tool", "content": content, "tool_call_id": call["id"], "name": call["function"]["name"]}


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    match value:
        case str():
            return change(value)
        case list():
            return [_mapped(item, change) for item in value]
        case dict():
            return {key: _mapped(item, change) for key, item in value.items()}
    return value
