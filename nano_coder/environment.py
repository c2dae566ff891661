"""Environments: tasks of others, with their own tools, state and verdict, in this process or behind a URL.

`--env` names one: a file's (`./mine.py:Env`), an installed one, or SCHEME:TARGET, where `nano.environments`
registers the scheme. Our agent acts in it; the environment gives tasks, answers calls, and gives the reward.
"""

from __future__ import annotations

import inspect
import json
import math
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, ValidationError

from nano_coder.config import LIMITS, parse_limits
from nano_coder.grading.grade import ungraded
from nano_coder.tools.run_control import submit
from nano_coder.tools.tool import Tool, ToolFailure, ToolResult, object_schema
from nano_shared.errors import ConfigError, EnvironmentFailed, UsageError
from nano_shared.extension_points import (
    Extensions,
    absolute_reference,
    call_extension,
    described,
    is_reference,
    read_number,
    refuse_missing,
    source_hash,
)
from nano_shared.files import content_hash
from nano_shared.hidden_checks import EnvironmentChecks
from nano_shared.printable import one_line, printable
from nano_shared.types import (
    Limits,
    Provenance,
    Split,
    Task,
    ToolCall,
    ToolSpec,
    Trajectory,
    Trust,
    Verdict,
)

MOST_TASKS = 1000
"""of one environment, where its `tasks=N` says nothing: some make them without an end"""


class EnvironmentSession:
    """One task of an environment under way; a base class, whose methods under `@tool()` are the tools.

    What a method raises ends the run without a reward; a `ToolFailure` is shown to the agent.
    """

    observation: str = ""
    """shown to the agent before its first action, after the prompt"""
    done: bool = False
    """True once nothing more can be done: the run ends"""
    components: Mapping[str, float] = {}
    """parts of the reward by name, once it was given"""

    @property
    def tools(self) -> Sequence[ToolSpec]:
        return [tool.spec for tool in self._functions().values()]

    def step(self, call: ToolCall) -> ToolResult | str:
        """Answer a call of one of the tools."""
        return self._functions()[call.name](self, dict(call.arguments))  # type: ignore[arg-type]

    def grade(self, run: Trajectory) -> Verdict | float | None:
        """The reward at the end, or a whole verdict; None where there is none."""
        raise NotImplementedError

    def close(self) -> None:
        """Release what the session holds; called once."""

    def _functions(self) -> dict[str, Tool]:
        found = (value for _, value in inspect.getmembers_static(type(self)))
        return {tool.spec.name: tool for tool in found if isinstance(tool, Tool)}


class Environment(Protocol):
    """What `--env` opens. Both methods are called from several threads."""

    def tasks(self, split: Split, seed: int) -> Iterable[Mapping[str, Any]]:
        """Tasks as plain JSON: `prompt`, if need be the fields of `TaskRow`, and whatever `start` needs."""
        ...

    def start(self, row: Mapping[str, Any], limits: Limits) -> EnvironmentSession:
        """A session on a task. Runs of one group start from the same row, and so from the same state."""
        ...


class TaskRow(BaseModel):
    """The fields of a row that we read; the whole row is the environment's."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    prompt: str
    key: str | int | None = None
    """durable name; None is the row's hash"""
    files: dict[str, str] = {}
    """starting workspace, for rows that name tools of ours"""
    nano_tools: tuple[str, ...] = ()
    """tools of ours that the agent gets beside those of the environment and `submit`"""
    level: int | None = None
    family: str | None = None


def _problem(value: object) -> str | None:
    if not callable(value):
        return f"is {described(value)}, and should be a class or a function"
    lacks = [
        name for name in _METHODS if isinstance(value, type) and not callable(getattr(value, name, None))
    ]
    return f"is {described(value)}, which has no method {lacks[0]}" if lacks else None


_METHODS = ("tasks", "start")


ENVIRONMENTS = Extensions[Any]("nano.environments", check=_problem)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedEnvironment:
    """An environment under the name that its tasks carry, and the limits of its runs."""

    name: str
    reference: str
    """what opens it again, in whichever folder"""
    environment: Environment
    limits: Mapping[str, Any]
    most_tasks: int | None = None
    sessions: int | None = None
    """that may be open at a time; None for any number"""

    def tasks(self, split: Split, seed: int) -> list[Task]:
        """Its tasks, equal ones once. Raises UsageError for a row that is none, and EnvironmentFailed."""
        most = self.most_tasks or MOST_TASKS
        found = call_environment(
            self.environment, self.name, lambda: list(islice(self.environment.tasks(split, seed), most + 1))
        )
        if len(found) > most and self.most_tasks is None:
            print(f"{self.name}: the first {most} tasks; tasks=N takes others", file=sys.stderr)
        if not found:
            raise UsageError(f"{self.name} has no tasks of the split {split}; another --env, or its settings")
        tasks: dict[str, Task] = {}
        for number, row in enumerate(found[:most], start=1):
            task = self._task(number, row, split)
            if tasks.setdefault(task.key, task) != task:
                raise UsageError(
                    f"{self.name}: its task {number} has the key of an earlier one, {task.key!r}"
                )
        return list(tasks.values())

    def _task(self, number: int, row: Any, split: Split) -> Task:
        try:
            row = json.loads(json.dumps(dict(row), default=_plain_number))
            read = TaskRow.model_validate(row)
            key = content_hash(row).removeprefix("sha256:")[:16] if read.key is None else read.key
            return Task(
                key=f"{self.name}:{key}", prompt=read.prompt, files=read.files, split=split,
                tools=tuple(dict.fromkeys((*read.nano_tools, submit.spec.name))),
                limits=Limits(**self.limits), level=read.level, family=read.family,
                hidden=EnvironmentChecks(environment=self.name, row=row),
                provenance=Provenance(source=self.name),
            )  # fmt: skip
        except (ValidationError, TypeError, ValueError) as problem:
            reason = str(problem) if not isinstance(problem, ValidationError) else _first(problem)
            raise UsageError(f"{self.name}: its task {number} cannot be read: {reason}") from None


def _plain_number(value: object) -> int | float:
    """For JSON: a number of numpy and the like. Raises TypeError for what is none."""
    found = read_number(value)
    if found is None:
        raise TypeError(f"{value!r:.80} is no JSON")
    return int(found) if found.is_integer() and not hasattr(value, "is_integer") else found


def _first(problem: ValidationError) -> str:
    error = problem.errors()[0]
    return f"{'.'.join(map(str, error['loc'])) or 'it'}: {error['msg'].lower()}"


def open_environment(text: str) -> OpenedEnvironment:
    """Open what one `--env` says: a name, and NAME=VALUE for limits, `tasks`, `sessions` and itself.

    Raises UsageError or ConfigError where it cannot be opened, EnvironmentFailed where it cannot be reached.
    """
    reference, *words = shlex.split(text) or [""]
    values = [(name, value) for name, _, value in (word.partition("=") for word in words)]
    if bad := [word for word in words if "=" not in word]:
        raise UsageError(f"--env {text!r}: {bad[0]!r} is no NAME=VALUE; they follow the name, after a space")
    given = {name: _plain(value) for name, value in values if name not in LIMITS}
    counts = {name: _count(name, given.pop(name)) for name in ("tasks", "sessions") if name in given}
    limits = parse_limits([f"{name}={value}" for name, value in values if name in LIMITS])
    name, opener, target = _found(reference)
    try:
        inspect.signature(opener).bind(*target, **given)
    except TypeError as problem:
        known = ", ".join(inspect.signature(opener).parameters)
        raise UsageError(f"--env {text!r}: {problem}; it takes {known or 'nothing'}") from None
    environment = call_environment(opener, name, lambda: opener(*target, **given))
    if missing := [name for name in _METHODS if not callable(getattr(environment, name, None))]:
        raise UsageError(f"--env {reference} is {described(environment)}, which has no method {missing[0]}")
    return OpenedEnvironment(
        name=name,
        reference=shlex.join([absolute_reference(reference), *words]),
        environment=environment,
        limits={LIMITS[setting]: value for setting, value in limits.items()},
        most_tasks=counts.get("tasks"),
        sessions=counts.get("sessions"),
    )


def _found(reference: str) -> tuple[str, Any, tuple[str, ...]]:
    """The name of an environment, what opens it, and what is given to that."""
    scheme, colon, target = reference.partition(":")
    refuse_missing(ENVIRONMENTS.group, scheme)
    if is_reference(reference):
        file, _, attribute = reference.rpartition(":")
        return f"{Path(file).name}:{attribute}", ENVIRONMENTS.find(reference), ()
    name = re.sub("//[^/@]*@", "//", reference)  # a password is nobody's name
    try:
        return name, ENVIRONMENTS.find(scheme), (target,) if colon else ()
    except ConfigError as problem:
        raise UsageError(f"--env {reference}: {problem}") from None


def _plain(value: str) -> Any:
    """A value of the command line: JSON where it is some, else text."""
    try:
        return json.loads(value)
    except ValueError:
        return value


def _count(name: str, value: Any) -> int:
    if not isinstance(value, int) or value < 1:
        raise UsageError(f"{name}={value}: a whole number above 0 is expected")
    return value


def call_environment(
    owner: object, name: str, function: Any, *args: Any, passing: tuple[type[Exception], ...] = ()
) -> Any:
    """Call a function of an environment, whose code `owner` is.

    Its exceptions become EnvironmentFailed, except UsageError, ToolFailure and those of `passing`."""
    try:
        return call_extension(function, *args, name=name, of=owner, passing=(ToolFailure, *passing))
    except ConfigError as problem:
        raise EnvironmentFailed(str(problem)) from problem.__cause__


class OpenSession:
    """A session as the agent's loop uses it: bounded, printable answers, and failures of one type."""

    def __init__(self, name: str, session: EnvironmentSession) -> None:
        self._name, self._session = name, session
        specs: Sequence[ToolSpec] = call_environment(session, name, lambda: session.tools)
        self._names = {re.sub("[^A-Za-z0-9_-]", "_", spec.name): spec.name for spec in specs}
        self.tools = tuple(
            ToolSpec(
                name=safe, description=printable(spec.description, 2000), body=spec.body,
                parameters=object_schema(spec.parameters),
            )
            for safe, spec in zip(self._names, specs, strict=True)
        )  # fmt: skip
        """as the model sees them"""

    @property
    def done(self) -> bool:
        return bool(call_environment(self._session, self._name, lambda: self._session.done))

    def offers(self, name: str) -> bool:
        return name in self._names

    def joined(self, task: Task) -> Task:
        """The task as its run is logged: with the tools of the environment, and what it shows first."""
        checks = task.hidden
        assert isinstance(checks, EnvironmentChecks)
        own = tuple(name for name in task.tools or () if not self.offers(name))
        if not self._names and not checks.row.get("nano_tools"):
            own = ()  # the text of its answer is what it grades
        shown = printable(self._session.observation, None).strip()
        update: dict[str, Any] = {"tools": (*sorted(self._names), *own)}
        if shown:
            update["prompt"] = f"{task.prompt}\n\n{shown}"
        kept = {"prompt": task.prompt, "tools": task.tools}
        return task.model_copy(update={**update, "hidden": checks.model_copy(update=kept)})

    def step(self, call: ToolCall) -> ToolResult:
        """Raises EnvironmentFailed, and ToolFailure for what the environment refuses."""
        translated = ToolCall(name=self._names[call.name], arguments=call.arguments)
        try:
            result = call_environment(self._session, self._name, self._session.step, translated)
        except ToolFailure as refused:
            if refused.__cause__ is None:
                raise
            raise EnvironmentFailed(f"{self._name}: {refused}") from refused.__cause__
        if isinstance(result, str):
            result = ToolResult(text=result)
        if not isinstance(result, ToolResult):
            raise EnvironmentFailed(f"{self._name}: {call.name} gave {described(result)}, which is no text")
        return ToolResult(text=printable(result.text, None) or "[no output]", ok=result.ok)

    def end(self, run: Trajectory) -> Verdict:
        """The verdict of the run, after which the session is closed."""
        try:
            if run.stop is None or run.stop.ours:
                return ungraded(str(run.stop), run.stop_detail or "")
            return self._verdict(run, call_environment(self._session, self._name, self._session.grade, run))
        except EnvironmentFailed as problem:
            return ungraded("environment_error", str(problem))
        finally:
            self.close()

    def close(self) -> None:
        try:
            call_environment(self._session, self._name, self._session.close)
        except EnvironmentFailed as problem:  # the run has its verdict, or fails for another reason
            print(one_line(f"{problem}", 300), file=sys.stderr)

    def _verdict(self, run: Trajectory, given: object) -> Verdict:
        if isinstance(given, Verdict):
            return given
        reward = self._finite(given, "reward")
        parts = {
            str(name): self._finite(value, f"component {name}")
            for name, value in self._session.components.items()
        }
        return Verdict(
            reward=reward,
            components={"environment": reward, **parts},
            trust=Trust.HIDDEN,
            grader=f"environment {self._name}{self._code()}",
            graded_hash=content_hash(
                [run.answer, [turn.model_dump(mode="json")["calls"] for turn in run.turns]]
            ),
        )

    def _code(self) -> str:
        """A mark of the user's file that the session is from, as " [0123abcd]"; empty for ours."""
        code = source_hash(self._session)
        return f" [{code.removeprefix('sha256:')[:8]}]" if code else ""

    def _finite(self, given: object, what: str) -> float:
        value = read_number(given)
        if value is None or not math.isfinite(value):
            raise EnvironmentFailed(f"{self._name}: grade gave no {what} but {given!r:.80}")
        return value


@dataclass(frozen=True, slots=True)
class Environments:
    opened: tuple[OpenedEnvironment, ...] = ()

    @classmethod
    def open(cls, texts: Iterable[str]) -> Environments:
        """Of what each `--env` says. Raises as `open_environment`, and UsageError for one given twice."""
        opened = tuple(map(open_environment, texts))
        for number, one in enumerate(opened):
            if one.name in [other.name for other in opened[:number]]:
                raise UsageError(
                    f"--env {one.name} is given twice; leave one out, or name its file otherwise"
                )
        return cls(opened)

    @property
    def references(self) -> tuple[str, ...]:
        return tuple(one.reference for one in self.opened)

    @property
    def sessions(self) -> int | None:
        """That may be open at a time, over all of them."""
        return min((one.sessions for one in self.opened if one.sessions), default=None)

    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        for one in self.opened:
            yield from one.tasks(split, seed)

    def start(self, task: Task) -> OpenSession:
        """A session on a task as it was listed. Raises EnvironmentFailed, and UsageError for a task of
        another environment."""
        checks = task.hidden
        assert isinstance(checks, EnvironmentChecks)
        name = checks.environment
        found = next((one for one in self.opened if one.name == name), None)
        if found is None:
            raise UsageError(f"task {task.key!r} is of the environment {name}; give --env {name}")
        try:
            session = call_environment(
                found.environment, name, found.environment.start, checks.row, task.limits
            )
        except ToolFailure as refused:
            raise EnvironmentFailed(f"{name}: {refused}") from refused
        if not isinstance(session, EnvironmentSession):
            raise UsageError(f"{name}: start gave {described(session)}, and no EnvironmentSession")
        return OpenSession(name, session)
