"""Chat templates: render the new messages of a conversation to token ids, without touching earlier ones."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from nano_shared.errors import PolicyError
from nano_shared.files import content_hash
from nano_shared.policy import Conversation
from nano_shared.types import Message, Role

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
    """A Jinja chat template bound to a tokenizer. Stateless and thread-safe.

    The Jinja environment is that of transformers (`apply_chat_template`) without its clock: a template that
    asks for the date gets none, because a prompt must not depend on the time of its rendering.
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
        """Number of tokens in a plain text."""
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
        self._require_append_only(messages, rendered)
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
    # Jinja's own tojson escapes HTML, which chat templates do not expect
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
