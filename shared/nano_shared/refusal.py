"""Refusals of formats: what cannot be imported or exported, by place, field and reason."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from nano_shared.errors import UsageError
from nano_shared.printable import printable


class Refused(UsageError):
    """One row, folder or task cannot be imported or exported because of `field`; `why` is the reason."""

    def __init__(self, field: str, why: str) -> None:
        super().__init__(f"{field}: {why}")
        self.field = field
        self.why = why


@dataclass(frozen=True, slots=True)
class Refusal:
    """A refusal and its place: `file:line`, a folder, or a task's key."""

    where: str
    field: str
    why: str

    def __str__(self) -> str:
        return printable(f"{self.where}: {self.field}: {self.why}".replace("\n", " "))

    @classmethod
    def of(cls, where: str, problem: Refused) -> Refusal:
        return cls(where, problem.field, problem.why)


def first_problem(refusals: Iterable[Refusal]) -> None:
    """Raises UsageError with the first refusal and the number of others; does nothing if there are none."""
    listed = list(refusals)
    if listed:
        more = f" (and {len(listed) - 1} more; --keep-going lists them)" if len(listed) > 1 else ""
        raise UsageError(f"{listed[0]}{more}")
