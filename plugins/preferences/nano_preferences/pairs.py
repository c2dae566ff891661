"""Preference pairs as JSON lines: the texts of both sides, and the exact tokens if they were logged.

A row needs `prompt`, `chosen` and `rejected`: text, or lists of `{"role", "content"}` messages, as preference
data is commonly published. Rows written by nano also name both runs and contain the token rows of both sides
with the hash of their chat template, so that training uses the sampled tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, takewhile
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator, model_validator

from nano_rl.imitation import RunEncoder, all_that_fit, imitated_sample
from nano_rl.learn.groups import TrainSample
from nano_rl.tasks.task_file import read_models, write_lines
from nano_shared.errors import PolicyError, UsageError
from nano_shared.types import Message, Role, Split, Value


class TokenRow(Value):
    """One token row of a run."""

    ids: tuple[int, ...]
    mask: tuple[int, ...]
    """1 exactly on tokens that the policy sampled"""

    @model_validator(mode="after")
    def _aligned(self) -> TokenRow:
        if len(self.ids) != len(self.mask) or set(self.mask) - {0, 1}:
            raise ValueError("ids and mask must be of one length, and the mask of 0 and 1")
        if 1 not in self.mask or self.mask[0] == 1:
            raise ValueError("a row needs a sampled token, and one before it")
        if min(self.ids) < 0:
            raise ValueError("token ids are not negative")
        return self


class Exact(Value):
    """The token rows of both sides, and the template that they were made under."""

    template_hash: str
    chosen: tuple[TokenRow, ...] = Field(min_length=1)
    rejected: tuple[TokenRow, ...] = Field(min_length=1)


class PreferencePair(Value):
    prompt: tuple[Message, ...] = Field(min_length=1)
    chosen: tuple[Message, ...] = Field(min_length=1)
    """what followed the prompt: assistant messages, and observations between them"""
    rejected: tuple[Message, ...] = Field(min_length=1)
    source: str = "file"
    """source of the preference: graded, feedback, edit, judge, constitution, or as given in a file"""
    task: str | None = None
    """key of the task that both tried"""
    task_id: str | None = None
    """content id of that task, which checkpoints list as trained on"""
    split: Split | None = None
    chosen_run: str | None = None
    rejected_run: str | None = None
    exact: Exact | None = None
    """None: texts alone, which are encoded for training"""

    @field_validator("prompt", mode="before")
    @classmethod
    def _prompt(cls, value: Any) -> Any:
        return [{"role": "user", "content": value}] if isinstance(value, str) else value

    @field_validator("chosen", "rejected", mode="before")
    @classmethod
    def _answer(cls, value: Any) -> Any:
        return [{"role": "assistant", "content": value}] if isinstance(value, str) else value

    @model_validator(mode="before")
    @classmethod
    def _shared_prompt(cls, row: Any) -> Any:
        """Without a prompt it is the messages with which both sides begin, as TRL reads it."""
        if not isinstance(row, dict) or "prompt" in row:
            return row
        sides = [row.get("chosen"), row.get("rejected")]
        if not all(isinstance(side, list) for side in sides):
            return row
        shared = len(list(takewhile(lambda both: both[0] == both[1], zip(*sides, strict=False))))
        shared = max(0, min(shared, len(sides[0]) - 1, len(sides[1]) - 1))
        return {
            **row,
            "prompt": sides[0][:shared],
            "chosen": sides[0][shared:],
            "rejected": sides[1][shared:],
        }

    @model_validator(mode="after")
    def _differ(self) -> PreferencePair:
        for name in ("chosen", "rejected"):
            if all(m.role is not Role.ASSISTANT for m in getattr(self, name)):
                raise ValueError(f"{name} holds no assistant message")
        alike = self.chosen == self.rejected
        if alike if self.exact is None else self.exact.chosen == self.exact.rejected:
            raise ValueError("chosen and rejected are the same: nothing is preferred; leave the row out")
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class PairTask:
    """Id and split of the task of a pair."""

    id: str
    split: Split | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRows:
    """A pair as token rows of one policy, with all written tokens trained."""

    chosen: tuple[TrainSample, ...]
    rejected: tuple[TrainSample, ...]
    prompt_key: str
    """equal for pairs on one task or prompt"""
    encoded: bool
    """True if the tokens were encoded from text"""
    task: PairTask | None = None

    @property
    def run_ids(self) -> list[str]:
        return [self.chosen[0].run_id, self.rejected[0].run_id]


def read_pairs(path: Path) -> list[PreferencePair]:
    """The pairs of a JSON lines file, at least one. Raises UsageError with line and field."""
    pairs = [pair for _, pair in read_models(path, PreferencePair)]
    if not pairs:
        raise UsageError(f"{path} holds no preference pair; nano-rl preferences build writes some from a log")
    return pairs


def write_pairs(path: Path, pairs: Iterable[PreferencePair]) -> None:
    write_lines(path, (pair.model_dump_json(exclude_none=True) for pair in pairs))


def pair_rows(pairs: Sequence[PreferencePair], reader: RunEncoder, source: str = "") -> list[PairRows]:
    """The pairs as token rows of one policy: logged tokens as they are, texts by its template; without those
    that are longer than its context, which are said on stderr. Raises UsageError for logged tokens of another
    template, profile or vocabulary, naming `source` and pair."""

    def encode(numbered: tuple[int, PreferencePair]) -> PairRows:
        return _rows(f"{source}pair {numbered[0]}", numbered[1], reader)

    return all_that_fit(enumerate(pairs, start=1), encode)


def _rows(name: str, pair: PreferencePair, reader: RunEncoder) -> PairRows:
    key = pair.task or "\n".join(m.content for m in pair.prompt)
    names = (pair.chosen_run or f"{name} chosen", pair.rejected_run or f"{name} rejected")
    if pair.exact is None:
        answers = zip(("chosen", "rejected"), (pair.chosen, pair.rejected), names, strict=True)
        sides = [_encoded(f"{name} {side}", pair.prompt, said, reader, run) for side, said, run in answers]
    else:
        _refuse_foreign(name, pair, reader)
        exact = (pair.exact.chosen, pair.exact.rejected)
        sides = [
            tuple(reader.fitting(name, [imitated_sample(run, row.ids, row.mask) for row in rows]))
            for run, rows in zip(names, exact, strict=True)
        ]
    return PairRows(
        chosen=sides[0], rejected=sides[1], prompt_key=key, encoded=pair.exact is None,
        task=PairTask(id=pair.task_id, split=pair.split) if pair.task_id else None,
    )  # fmt: skip


def _encoded(
    name: str, prompt: Sequence[Message], answer: Sequence[Message], reader: RunEncoder, run: str
) -> tuple[TrainSample, ...]:
    # assistant messages in the prompt are context
    trained = [False] * len(prompt) + [m.role is Role.ASSISTANT for m in answer]
    try:
        rows = reader.messages(name, (*prompt, *answer), trained)
        return tuple(replace(row, run_id=run) for row in rows)
    except PolicyError as problem:
        raise UsageError(f"{name}: {problem}") from None


def _refuse_foreign(name: str, pair: PreferencePair, reader: RunEncoder) -> None:
    assert pair.exact is not None
    cure = "name the --model that sampled it, or take `exact` out of the row, and its text is encoded"
    if pair.exact.template_hash != reader.template.template_hash:
        raise UsageError(f"{name} holds tokens of another chat template than this policy's; {cure}")
    rows = (*pair.exact.chosen, *pair.exact.rejected)
    texts = [m.content for m in (*pair.chosen, *pair.rejected) if m.role is Role.ASSISTANT]
    turns = [turn for row in rows for turn in _written(row, reader)]
    known = max(max(row.ids) for row in rows) < (reader.vocabulary or math.inf)
    if not known or not all(any(turn.startswith(text) for turn in turns) for text in texts):
        raise UsageError(f"{name} holds tokens of another vocabulary than this policy's; {cure}")


def _written(row: TokenRow, reader: RunEncoder) -> list[str]:
    """The text of each run of consecutive sampled tokens."""
    stretches = groupby(zip(row.ids, row.mask, strict=True), key=lambda pair: pair[1])
    return [reader.template.encoder.decode([i for i, _ in part]) for m, part in stretches if m]
