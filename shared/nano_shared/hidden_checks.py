"""What a verdict is computed from: one model for each kind of check. None of it enters the workspace."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

EMPTY_FIELDS: dict[str, JsonValue] = {
    "entry_point": None, "cases": [], "metrics": [], "answer": None, "scorer": None, "command": None,
    "suite": None, "state": [], "mutants": {}, "reference": None, "module": None, "files": {},
    "reward_path": None,
}  # fmt: skip
"""every field of every kind, empty: one model once had them all, and content hashes still cover them"""


class Value(BaseModel):
    """A frozen value that refuses fields it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class ChecksOfAKind(Value):
    """Base class. Reads rows that have the fields of other kinds as well, if those are empty."""

    kind: str

    @model_validator(mode="before")
    @classmethod
    def _without_other_kinds(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        others = EMPTY_FIELDS.keys() & data.keys() - cls.model_fields.keys()
        if given := sorted(name for name in others if data[name] not in (None, [], (), {})):
            kind = cls.model_fields["kind"].default
            raise ValueError(
                f"checks of kind {kind!r} have no field `{given[0]}`; remove it, or change `kind`"
            )
        return {name: value for name, value in data.items() if name not in others}

    @model_serializer(mode="wrap")
    def _with_kind(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """`kind` first, where `exclude_defaults` would drop it."""
        return {"kind": self.kind, **dump(self)}

    def full_dump(self) -> dict[str, JsonValue]:
        """The fields of every kind as JSON, for content hashes."""
        return EMPTY_FIELDS | self.model_dump(mode="json")


class Case(Value):
    """One call of the entry point and the value expected of it, as plain JSON."""

    args: list[JsonValue] = []
    kwargs: dict[str, JsonValue] = {}
    expected: JsonValue = None


class Metric(Value):
    """A bound on the solution's source, measured on its syntax tree."""

    name: Literal["statements", "branches", "nesting", "lines"]
    at_most: int = Field(ge=0)


class CaseChecks(ChecksOfAKind):
    kind: Literal["cases"] = "cases"
    entry_point: str = Field(min_length=1)
    """the function that is called"""
    cases: tuple[Case, ...] = Field(min_length=1)
    metrics: tuple[Metric, ...] = ()
    """bounds that the source must meet as well"""


class Scorer(Value):
    """A question by its generator's arguments, so that the generating library can score answers by its own
    rule."""

    library: Literal["reasoning-gym"] = "reasoning-gym"
    version: str
    """of the library that made the question; another version may make another question"""
    dataset: str
    seed: int
    config: dict[str, JsonValue] = {}
    question: str
    """content hash; answers are scored only if the same question is made again"""


class AnswerChecks(ChecksOfAKind):
    kind: Literal["answer"] = "answer"
    answer: JsonValue = None
    """the value to submit"""
    scorer: Scorer | None = None
    """scorer for answers that differ from `answer`"""


class WorkspaceChecks(ChecksOfAKind):
    """A command that runs on the whole workspace."""

    command: str = Field(min_length=1)
    """a shell line run in a fresh jail on the original files plus the diff"""
    files: dict[str, str] = {}
    """test files, added to the workspace when it is graded and never before"""


class CommandChecks(WorkspaceChecks):
    kind: Literal["command"] = "command"


class Suite(Value):
    """Test files that call the solution. They run in a jail of their own and reach the solution by a
    proxy."""

    framework: Literal["script", "doctest", "unittest", "pytest"]
    files: dict[str, str] = Field(min_length=1)
    """test file -> text; none of them enters the workspace"""
    names: tuple[str, ...] = ()
    """names of the solution that the tests use; empty: found in the tests"""
    strict: bool = False
    """run in one hardened process with the solution, for tests that need live objects; trusted less"""


class SuiteChecks(ChecksOfAKind):
    kind: Literal["suite"] = "suite"
    entry_point: str | None = None
    """the function that the prompt names; not used in grading"""
    suite: Suite


class StateCheck(Value):
    """One property of what the agent left, computed by the grader from the files themselves."""

    kind: Literal["text", "absent", "json", "csv", "sql", "answer"]
    path: str | None = None
    """file in the workspace; every kind but `answer` needs one"""
    query: str | None = None
    """sql: the SELECT that is run on the SQLite database at `path`"""
    ordered: bool = True
    """csv, sql: whether the order of rows counts"""
    expected: JsonValue = None
    """text: the file's text; json: its value; csv, sql: rows; answer: the value to submit"""

    @model_validator(mode="after")
    def _complete(self) -> StateCheck:
        if self.kind != "answer" and not self.path:
            raise ValueError(f"a state check of kind {self.kind!r} needs `path`")
        if (self.kind == "sql") != (self.query is not None):
            raise ValueError("`query` belongs to state checks of kind 'sql', and each of those needs one")
        return self


SQLITE_SIBLINGS = ("", "-wal", "-journal")
"""files that a database may leave beside it when its program was killed"""


class StateChecks(ChecksOfAKind):
    kind: Literal["state"] = "state"
    state: tuple[StateCheck, ...] = Field(min_length=1)

    @property
    def files(self) -> tuple[str, ...]:
        """Every file that the checks read."""
        names = {
            f"{check.path}{end}": None
            for check in self.state
            if check.path is not None
            for end in (SQLITE_SIBLINGS if check.kind == "sql" else ("",))
        }
        return tuple(names)


class MutantChecks(ChecksOfAKind):
    """The agent's tests, which must pass on `reference` and fail on every mutant."""

    kind: Literal["mutants"] = "mutants"
    mutants: dict[str, str] = Field(min_length=1)
    """name -> wrong source"""
    reference: str
    """the right source"""
    module: str = Field(min_length=1)
    """file that the tests import; reference and mutants are put there"""


class RewardFileChecks(WorkspaceChecks):
    kind: Literal["reward_file"] = "reward_file"
    reward_path: str = Field(min_length=1)
    """file in which the command leaves its reward, a number or a JSON object of numbers"""


class EnvironmentChecks(ChecksOfAKind):
    """The environment that the task is of gives its verdict, at the end of the run and at no other time."""

    kind: Literal["environment"] = "environment"
    environment: str = Field(min_length=1)
    """its name, as `nano_coder.environment` opens it"""
    row: dict[str, JsonValue]
    """the task as the environment knows it"""
    prompt: str | None = None
    """of a run: the task's prompt without what the environment showed first"""
    tools: tuple[str, ...] | None = None
    """of a run: the task's tools without those of the environment"""


ArtifactChecks = CaseChecks | SuiteChecks | MutantChecks
"""checks of the task's artifacts"""
HiddenChecks = Annotated[
    ArtifactChecks | AnswerChecks | StateChecks | CommandChecks | RewardFileChecks | EnvironmentChecks,
    Field(discriminator="kind"),
]


def expects_answer(hidden: HiddenChecks | None) -> bool:
    """Whether the verdict depends on the submitted answer."""
    return isinstance(hidden, AnswerChecks) or (
        isinstance(hidden, StateChecks) and any(check.kind == "answer" for check in hidden.state)
    )
