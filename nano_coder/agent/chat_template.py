"""The chat template: renders only the new messages of a conversation, append-only, to token ids."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from nano_shared import Conversation, Message, PolicyError, Role, content_hash

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class Encoder:
    """Encodes with private copies of a tokenizer, so that nobody else's settings can leak in.

    Control tokens are the added tokens marked special. Text is defused before it meets a template: a mark
    is put inside every spelling of a control token, and taken out again only after the control tokens of
    the template itself were found.
    """

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer` is a `tokenizers.Tokenizer` or a fast tokenizer of transformers."""
        backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
        self._parsing = _copy(backend)
        self._plain = _copy(backend)
        self._plain.encode_special_tokens = True
        added = self._parsing.get_added_tokens_decoder()
        self.control_tokens: dict[int, str] = {i: t.content for i, t in added.items() if t.special}
        self._control_ids = {text: i for i, text in self.control_tokens.items()}
        self._control = _alternatives(self._control_ids)
        self._spelling = _spelling(self._control_ids)

    def text(self, text: str) -> list[int]:
        """Ids of plain text: no control token, whatever the text spells."""
        return list(self._plain.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, control tokens included; bytes that are not UTF-8 become U+FFFD."""
        return str(self._parsing.decode(list(ids), skip_special_tokens=False))

    def defuser(self, texts: Sequence[str]) -> tuple[str, Callable[[str], str]]:
        """A mark that occurs in none of the texts, and the function that defuses a text with it."""
        everything = "".join(texts)
        # Supplementary private use: no template writes it and hardly any text holds it.
        mark = next(c for c in map(chr, range(0xF0000, 0x10FFFE)) if c not in everything)
        return mark, lambda text: self._spelling.sub(lambda m: m[0][0] + mark + m[0][1:], text)

    def rendered(self, text: str, mark: str) -> list[int]:
        """Ids of a rendered template: its control tokens parsed, those under the mark kept as text."""
        if mark not in text:
            ids = list(self._parsing.encode(text, add_special_tokens=False).ids)
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


def _copy(backend: Tokenizer) -> Tokenizer:
    copy: Tokenizer = type(backend).from_str(backend.to_str())
    copy.no_truncation()
    copy.no_padding()
    return copy


def _alternatives(texts: Sequence[str] | dict[str, int]) -> re.Pattern[str]:
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _spelling(controls: dict[str, int]) -> re.Pattern[str]:
    """A control token anywhere, or the beginning of one at the end, where a template might complete it."""
    beginnings = {text[:n] for text in controls for n in range(1, len(text))}
    whole, partial = _alternatives(controls).pattern, _alternatives(dict.fromkeys(beginnings, 0)).pattern
    return re.compile(f"(?:{whole})|(?:{partial})\\Z")


CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""Every message as `<|im_start|>{role}\\n{content}<|im_end|>\\n`; no system message of its own."""


class ChatTemplate:
    """A Jinja chat template bound to a tokenizer. Holds no state of any conversation; thread-safe.

    The environment is the one of transformers (`apply_chat_template`) but for the clock: a template that
    asks for the date gets none, because what a model sees must not depend on when it runs.
    """

    def __init__(self, source: str, tokenizer: Any) -> None:
        """Raises PolicyError if the source is not a Jinja template."""
        self.source = source
        self.encoder = Encoder(tokenizer)
        self._special = {
            name: str(getattr(tokenizer, name, None) or "")
            for name in ("bos_token", "eos_token", "pad_token")
        }
        try:
            self._template = _environment().from_string(source)
        except TemplateError as error:
            raise PolicyError(f"{self.name}: not a Jinja chat template: {error}") from error

    @property
    def template_hash(self) -> str:
        return content_hash(self.source)

    @property
    def name(self) -> str:
        """How messages refer to this template: the beginning of its hash."""
        return f"chat template {self.template_hash[:19]}"

    def delta(self, conversation: Conversation) -> tuple[int, ...]:
        """[N] ids to append to `conversation.tokens` before the next turn is sampled.

        The first call renders every message. Later calls render what follows the last sampled turn: what
        closes it (all of it if the turn was cut by length; without the end-of-turn token if that was
        sampled), the new messages, and the generation prompt.

        Raises PolicyError if the template refuses the messages, or rewrites history when one is appended.
        """
        mark, defuse = self.encoder.defuser([m.content for m in conversation.messages])
        messages = [Message(role=m.role, content=defuse(m.content)) for m in conversation.messages]
        if not conversation.tokens:
            return tuple(self.encoder.rendered(self.render(messages), mark))
        suffix = self._suffix(messages, conversation.rendered)
        last = self.encoder.control_tokens.get(conversation.tokens[-1])
        if last is not None:
            suffix = suffix.removeprefix(last)
        return tuple(self.encoder.rendered(suffix, mark))

    def count(self, text: str) -> int:
        """Number of tokens in a plain text."""
        return len(self.encoder.text(text))

    def render(self, messages: Sequence[Message], *, generation_prompt: bool = True) -> str:
        """The text of the messages, exactly as the template writes it."""
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
        """What the template writes after the content of `messages[rendered - 1]`, the last sampled one."""
        self._require_append_only(messages, rendered)
        dummy = "nano: a sampled turn"
        while any(dummy in m.content for m in messages):
            dummy += "."
        stand_in = Message(role=Role.ASSISTANT, content=dummy)
        with_dummy = [*messages[: rendered - 1], stand_in, *messages[rendered:]]
        # The sampled text itself cannot mark the place: templates trim it, and it may occur elsewhere.
        before, found, _ = self.render(with_dummy[:rendered], generation_prompt=False).rpartition(dummy)
        prefix = before + found
        text = self.render(with_dummy)
        if not found or not text.startswith(prefix):
            self._rewrites(messages[-1])
        return text[len(prefix) :]

    def _require_append_only(self, messages: list[Message], rendered: int) -> None:
        before = self.render(messages[:rendered], generation_prompt=False)
        if not self.render(messages).startswith(before):
            self._rewrites(messages[-1])

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
    # Jinja's own filter escapes HTML, which no chat template was written for.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
