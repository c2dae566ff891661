"""The exceptions of nano, and the exit code each one ends a command with.

NanoError                 1
├── UsageError            2   bad input: unknown model, missing directory, malformed row
│   ├── LogError          2   a log that is foreign, newer than this program, or lacks the run
│   ├── CheckpointError   2   a checkpoint that is missing, corrupt or of another kind
│   ├── ImagesRefused     2   a model that does not see the images of its messages
│   └── Refused           2   a row, folder or task of a format that cannot be imported or exported
├── ConfigError           3   configuration or credentials
├── PolicyError           4   the model backend is unreachable or failed
├── EnvironmentFailed     4   an environment of others is unreachable or failed
├── GuardTripped          1   a training that would silently go wrong was stopped
├── RolloutsFailed        1   a step's rollouts cannot be had; carries the exit code of what failed
├── GivenUp               1   the program that leads a run has nothing left to try
├── Interrupted         130   a signal ended a command; the message says what is kept
├── BudgetExhausted       5   a limit was reached where the caller wanted a result
│   └── ContextFull       5   the next call would not fit the policy's context
└── SandboxError          6   the sandbox is unavailable or refused

Every message names the thing, the value and the way out. Exceptions are values: they log nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from nano_shared.printable import printable


class NanoError(Exception):
    exit_code = 1


class Interrupted(NanoError):
    exit_code = 130


class UsageError(NanoError):
    exit_code = 2


class LogError(UsageError):
    pass


class CheckpointError(UsageError):
    pass


class ImagesRefused(UsageError):
    pass


class ConfigError(NanoError):
    exit_code = 3


class PolicyError(NanoError):
    exit_code = 4


class EnvironmentFailed(NanoError):
    exit_code = 4


class GuardTripped(NanoError):
    """A training that would silently go wrong was stopped; the message names the guard and the way out."""


class RolloutsFailed(NanoError):
    """A step's rollouts cannot be had from their process; the exit code is that of what failed there."""

    def __init__(self, message: str, exit_code: int = NanoError.exit_code) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class GivenUp(NanoError):
    """The program that leads a run has nothing left to try."""


class BudgetExhausted(NanoError):
    exit_code = 5


class ContextFull(BudgetExhausted):
    pass


class SandboxError(NanoError):
    exit_code = 6


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
