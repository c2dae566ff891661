"""Reward parts by name (entry points `nano.rewards`), functions of the user, and parsing of `--reward`.

`module:function` and `path.py:function` are functions of the user. With TRL's signature, `f(prompts,
completions, **columns) -> list[float]`, one is called once for the rollouts of one task; one with other
parameter names gets the columns that it names. None in the returned list means no score.
"""

from __future__ import annotations

import inspect
import json
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pydantic import Field, PrivateAttr

from nano_coder.run.execution import Runtime
from nano_preferences.composed import ComposedReward, Gate
from nano_rl.config import RewardConfig
from nano_rl.rewards.reward import TESTS, Part, Score
from nano_shared.errors import ConfigError, UsageError
from nano_shared.extension_points import (
    call_extension,
    described,
    extension_names,
    find_extension,
    find_in_module,
    is_reference,
    read_number,
    source_hash,
    takes,
    user_module,
)
from nano_shared.files import content_hash, new_run_id
from nano_shared.hidden_checks import AnswerChecks, EnvironmentChecks
from nano_shared.settings import parse_config
from nano_shared.types import (
    Completion,
    Finish,
    Sampling,
    StopReason,
    Task,
    Trajectory,
    Trust,
    Turn,
    TurnTokens,
    Verdict,
    outcome,
)


class UserFunction(Part):
    alone = True

    function: str
    """module:function, or path.py:function"""
    low: float = 0.0
    """smallest value of the function, which is scaled to 0"""
    high: float = 1.0
    """largest value of the function, which is scaled to 1"""
    messages: bool = False
    """prompts and completions as lists of chat messages instead of texts"""
    deadline: float | None = Field(None, gt=0)
    """seconds of one call, after which its rollouts have no score; None waits"""
    _function: Callable[..., Any] | None = PrivateAttr(None)
    _source: str | None = PrivateAttr(None)

    def prepare(self) -> None:
        if not self.low < self.high:
            raise ConfigError(f"low = {self.low:g} must be less than high = {self.high:g}")
        self._function, self._source = load_function(self.function)

    def check_tasks(self, tasks: Sequence[Task]) -> None:
        """Call it once with two made-up rollouts of the first task; every task must have its columns."""
        runs = [_made_up(tasks[0], text) for text in _MADE_UP] if tasks else []
        for task in tasks:
            self._taken(task)
        if runs:
            self._scores(runs, "a made-up completion, before the first rollout")

    def score(self, runs: Sequence[Trajectory], runtime: Runtime) -> list[Score]:
        """Raises UsageError for its errors, and unless it gives one number from `low` to `high` each."""
        try:
            return self._scores(runs, None)
        except TimeoutError:
            print(
                f"nano: {self.function} took longer than its deadline of {self.deadline:g} s; these"
                f" {len(runs)} rollouts of task {runs[0].task.key!r} have no score",
                file=sys.stderr,
            )
            return [Score(value=None, failure="function_late") for _ in runs]

    def _scores(self, runs: Sequence[Trajectory], whose: str | None) -> list[Score]:
        assert self._function is not None  # `prepare` has loaded it
        taken = self._taken(runs[0].task)
        columns = {k: v for k, v in _columns(runs, messages=self.messages).items() if k in taken}
        how: Any = {"of": _USERS, "error": UsageError, "seconds": self.deadline}
        result = call_extension(partial(self._function, **columns), name=self.function, **how)
        several = isinstance(result, Iterable) and not isinstance(result, str)
        # a generator is the user's code too
        values = call_extension(list, result, name=self.function, **how) if several else None
        if values is None or len(values) != len(runs):
            given = type(result).__name__ if values is None else f"{len(values)} values"
            raise UsageError(
                f"{self.function} returned {given} for {len(runs)} completions;"
                " it must return a list with one number for each"
            )
        pairs = zip(values, runs, strict=True)
        return [Score(value=self._scaled(value, whose or f"run {run.id}")) for value, run in pairs]

    def _scaled(self, value: object, whose: str) -> float | None:
        if value is None:
            return None
        given = read_number(value)
        if given is None or not self.low <= given <= self.high:
            shown = value if given is None else given
            raise UsageError(
                f"{self.function} gave {shown!r:.80} to {whose}; it must give a number between"
                f" {self.low:g} and {self.high:g} (low and high can be set in the file of the reward)"
            )
        return (given - self.low) / (self.high - self.low)

    def _taken(self, task: Task) -> set[str]:
        """Columns that the function takes. Raises UsageError for a required parameter that is none."""
        assert self._function is not None
        names = {*COLUMNS, *data_columns(task)}
        taken: set[str] = set()
        for parameter in inspect.signature(self._function).parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                taken |= names
            elif parameter.name in names and parameter.kind is not parameter.POSITIONAL_ONLY:
                taken.add(parameter.name)
            elif parameter.default is parameter.empty and parameter.kind is not parameter.VAR_POSITIONAL:
                raise UsageError(
                    f"{self.function} wants {parameter.name!r}, which task {task.key!r} has no column of;"
                    f" columns: {', '.join(sorted(names))}"
                )
        return taken


_USERS: Any = SimpleNamespace(__module__="users")
"""owner of a function that was named as the user's, wherever it comes from"""
_MADE_UP = ("I do not know.", "The answer is 4.")


def load_function(path: str) -> tuple[Callable[..., Any], str | None]:
    """The function of `module:name` or `path.py:name`, and its file's hash. Raises ConfigError."""
    found, source = find_in_module(path, _no_function)
    if not callable(found):
        raise ConfigError(f"{source} is {described(found)}, and no function")
    return found, source_hash(user_module(path.rpartition(":")[0]))


def _no_function(value: object) -> str | None:
    """Why a value is not offered as a reward function: it takes nothing that a rollout has."""
    if not callable(value) or isinstance(value, type):
        return f"is {described(value)}, and no function"
    parameters = inspect.signature(value).parameters.values()
    known = any(p.name in COLUMNS or p.kind is p.VAR_KEYWORD for p in parameters)
    return None if known else "takes no column"


COLUMNS = (
    "prompts", "completions", "completion_ids", "trajectories", "submitted", "diff", "tests", "key", "level",
    "family", "view",
)  # fmt: skip
"""columns of every rollout that a function may take, each with one value per rollout"""
_OF_A_RUN = {*COLUMNS[:7], "prompt", "completion"}
"""names that no column of a data set takes"""


def data_columns(task: Task) -> dict[str, Any]:
    """Columns of the data set that a task is from: of its own `columns`, of the row that was imported, or of
    its environment; `answer` is also what a check by answer expects."""
    checks, original = task.hidden, task.provenance.original or {}
    rows: Any = original.get("rows")
    row = rows[0] if isinstance(rows, list) and len(rows) == 1 and isinstance(rows[0], dict) else {}
    if isinstance(checks, EnvironmentChecks):
        row = checks.row
    answer = {"answer": checks.answer} if isinstance(checks, AnswerChecks) else {}
    found = {**answer, **row, **task.columns}
    return {name: value for name, value in found.items() if name not in _OF_A_RUN}


def _columns(runs: Sequence[Trajectory], *, messages: bool) -> dict[str, list[Any]]:
    """Column -> [G]; those of the data set replace `key`, `level`, `family` and `view`."""
    texts = [[turn.completion.text for turn in run.turns] for run in runs]
    if messages:
        prompts: list[Any] = [[{"role": "user", "content": run.task.prompt}] for run in runs]
        completions: list[Any] = [_conversation(run) for run in runs]
    else:
        prompts, completions = [run.task.prompt for run in runs], ["\n".join(parts) for parts in texts]
    tokens = [[t.completion.tokens for t in run.turns if t.completion.tokens] for run in runs]
    columns: dict[str, list[Any]] = {
        "prompts": prompts, "completions": completions, "trajectories": list(runs),
        "completion_ids": [[i for one in of for i in one.sampled_ids] for of in tokens],
        "tests": [outcome(run.verdict) for run in runs], "submitted": [run.answer for run in runs],
        "diff": [run.diff for run in runs],
    }  # fmt: skip
    columns |= {name: [getattr(r.task, name) for r in runs] for name in ("key", "level", "family", "view")}
    # one value for each rollout, which a function may change
    return columns | {n: [deepcopy(v) for _ in runs] for n, v in data_columns(runs[0].task).items()}


def _made_up(task: Task, text: str) -> Trajectory:
    """A run of one turn that nobody sampled, graded as failed if the task has a check."""
    tokens = TurnTokens(context_ids=(0,), sampled_ids=(0,), logprobs=(0.0,))
    said: Any = {"text": text, "finish": Finish.STOP, "tokens": tokens, "policy_id": "made-up"}
    completion = Completion(sampling=Sampling(), **said)
    turn = Turn(index=0, completion=completion, thought=text, parser="made-up", started=0.0, ended=0.0)
    graded_by: Any = {"trust": Trust.NONE, "grader": "made-up", "graded_hash": ""}
    failed = Verdict(reward=0.0, components={"tests": 0.0}, **graded_by)
    names = ("runtime_version", "profile", "profile_hash", "template_hash", "tools_hash")
    same = dict.fromkeys(names, "made-up")
    graded = task.hidden is not None or task.check is not None
    return Trajectory(
        id=new_run_id(), task=task, turns=(turn,), stop=StopReason.FINISHED, answer=text, policy="made-up",
        started=0.0, ended=0.0, verdict=failed if graded else None, **same,
    )  # fmt: skip


def _conversation(run: Trajectory) -> list[dict[str, str]]:
    said = [
        (("assistant", t.completion.text), *(("tool", o.text) for o in t.observations)) for t in run.turns
    ]
    return [{"role": role, "content": text} for of_turn in said for role, text in of_turn]


GROUP = "nano.rewards"


def code_of(part: Part) -> str | None:
    """Hash of the user's file that a part is from; None for ours."""
    return part._source if isinstance(part, UserFunction) else source_hash(type(part))


def open_part(name: str, settings: Mapping[str, Any]) -> Part:
    """The part of that name with its settings. Raises UsageError for unknown names and invalid settings."""
    kind = part_kind(name)
    try:
        return parse_config(kind, {"function": name, **settings} if kind is UserFunction else settings)
    except ConfigError as problem:
        raise UsageError(f"reward part {name}: {problem}") from None


def part_kind(name: str) -> type[Part]:
    """The class of a part of that name, or `path.py:name`, functions too. Raises UsageError for a name that
    is none, ConfigError for one that cannot be used."""
    if not is_reference(name):
        if name not in extension_names(GROUP):
            raise UsageError(
                f"unknown reward part {name!r}; parts: {', '.join(extension_names(GROUP))}, path.py:NAME, or"
                " module:NAME of your own"
            )
        kind: type[Part] = find_extension(GROUP, name, check=_no_part)
        return kind
    try:
        value, _ = find_in_module(name, lambda it: _no_function(it) and _no_part(it))
        if callable(value) and not isinstance(value, type):
            return UserFunction
        kind = find_extension(GROUP, name, check=_no_part)
    except ConfigError as problem:
        raise UsageError(f"reward part {problem}") from None
    return kind


def _no_part(value: object) -> str | None:
    if not (isinstance(value, type) and issubclass(value, Part)):
        return "is no subclass of nano_rl.rewards.reward.Part, and no function"
    if value.score is Part.score and value.score_run is Part.score_run:
        return "scores nothing: it has neither score_run(self, run, runtime) nor score(self, runs, runtime)"
    wrong = takes(value.score_run, "self", "run", "runtime") or takes(value.score, "self", "runs", "runtime")
    return f"has a method that {wrong}" if wrong else None


SUFFIXES = (".toml", ".json", ".yaml", ".yml")


def parse_reward(text: str) -> RewardConfig:
    """The reward config of `part=weight,part:argument=weight,...`, or of a .toml, .json or .yaml file. Raises
    UsageError for any other text, ConfigError for invalid settings of a file."""
    if text.endswith(SUFFIXES) and "=" not in text:
        return parse_config(RewardConfig, read_data(Path(text)))
    parts: dict[str, dict[str, Any]] = {}
    for item in text.split(","):
        name, equals, weight = item.strip().rpartition("=")
        try:
            number = float(weight)
        except ValueError:
            equals = ""
        if not equals or not name:
            raise UsageError(
                f"--reward {item.strip()!r} is no part=weight; write for instance tests=1,process=0.2,"
                " or name a .toml, .json or .yaml file of settings"
            )
        name, settings = _argument(name)
        if name in parts:
            raise UsageError(f"--reward names {name} twice; give it one weight")
        parts[name] = {"weight": number, **settings}
    try:
        return parse_config(RewardConfig, {"parts": parts})
    except ConfigError as problem:
        raise UsageError(f"--reward: {problem}") from None


def read_data(path: Path) -> dict[str, Any]:
    """The values of a TOML, JSON or YAML file. Raises UsageError if it cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
        data = _decode(path, text)
    except FileNotFoundError:
        raise UsageError(f"no such file: {path}") from None
    except (OSError, ValueError) as problem:  # of JSON, TOML and Unicode alike
        raise UsageError(f"cannot read {path}: {problem}") from None
    if not isinstance(data, dict):
        raise UsageError(f"{path} holds no table of settings")
    return data


def _decode(path: Path, text: str) -> Any:
    if path.suffix == ".toml":
        return tomllib.loads(text)
    if path.suffix == ".json":
        return json.loads(text)
    if path.suffix not in (".yaml", ".yml"):
        raise UsageError(f"{path} is neither .toml nor .json nor .yaml")
    try:
        import yaml
    except ModuleNotFoundError:
        raise ConfigError(f"{path} needs PyYAML (pip install pyyaml); or write it as TOML or JSON") from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as problem:
        raise ValueError(" ".join(str(problem).split())) from None


def _split(name: str) -> tuple[str, str, str]:
    """Part, colon and argument; a part in a file is `path.py:CLASS`, perhaps with an argument behind it."""
    file, suffix, rest = name.partition(".py:")
    if not suffix:
        return name.partition(":")
    kind, colon, value = rest.partition(":")
    return f"{file}{suffix}{kind}", colon, value


def _argument(name: str) -> tuple[str, dict[str, str]]:
    """Split `judge:http://host/v1` into the part and the setting given by its argument."""
    part, colon, value = (name, "", "") if is_reference(name) else _split(name)
    setting = part_kind(part).argument
    if not colon and setting is not None and (meant := part_kind(part).unnamed()) is not None:
        return part, {setting: meant}
    if colon and setting is None:
        raise UsageError(f"--reward {name}: {part} takes no argument; write {part}=WEIGHT")
    return part, {setting: value} if colon and setting else {}


def open_reward(config: RewardConfig) -> ComposedReward:
    """The reward of a config. Raises UsageError, also for shaping parts without `tests`, and ConfigError for
    a part that cannot be used here, as without its key."""
    parts = {name: open_part(name, settings) for name, settings in config.parts.items()}
    for name, part in parts.items():
        try:
            part.prepare()
        except (UsageError, ConfigError) as problem:
            raise ConfigError(f"reward part {name}: {problem}") from None
    lonely = [name for name, part in parts.items() if name != TESTS and not part.alone]
    if TESTS not in parts and lonely:
        raise UsageError(f"{lonely[0]} only shapes an outcome, and this reward has none: add tests=1 to it")
    weights = {name: part.weight for name, part in parts.items()}
    if parts.get(TESTS) is not None and weights[TESTS] == 0:
        raise UsageError("tests = 0 leaves shaping without an outcome: give tests a weight above 0")
    try:
        gate = Gate.of(weights, threshold=config.gate, tie_break=config.tie_break)
    except ValueError as problem:
        raise UsageError(f"reward: {problem}") from None
    settings = [config.model_dump(mode="json"), {n: _settings(p) for n, p in parts.items()}]
    settings += [code] if (code := {n: code_of(p) for n, p in parts.items() if code_of(p)}) else []
    named = ",".join(f"{name}={weight:g}" for name, weight in weights.items())
    recipe = f"{named} [{content_hash(settings).removeprefix('sha256:')[:8]}]"
    return ComposedReward(parts=parts, gate=gate, recipe=recipe)


def _settings(part: Part) -> dict[str, Any]:
    """As JSON; a setting that came later is left out where it is not set, so that older verdicts stay."""
    said = part.model_dump(mode="json")
    return said if said.get("deadline", 0) is not None else {n: v for n, v in said.items() if n != "deadline"}
