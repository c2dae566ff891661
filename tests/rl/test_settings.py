"""Settings: every one is reached by --config and --set, some by a flag, and each says what it does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import pytest
import typer
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field, ValidationError
from pydantic.fields import FieldInfo
from typer.main import get_command
from typer.testing import CliRunner

from nano_coder import cli as coder
from nano_coder.config import AgentConfig
from nano_preferences.config import DpoConfig, RewardModelConfig
from nano_rl.cli import cli
from nano_rl.config import RewardConfig, SftConfig, TrainConfig
from nano_rl.learn.config import GuardConfig, OptimizerConfig
from nano_rl.learn.objectives import ObjectiveConfig
from nano_shared.command_line import COMMON_PANEL, LazyGroup, lazy_app, run_command
from nano_shared.errors import ConfigError, UsageError
from nano_shared.settings import (
    Config,
    Settings,
    alternatives,
    parse_config,
    parse_toml,
    section_of,
    setting_fields,
    settings_options,
    to_toml,
)


class Depth(Config):
    learning_rate: float = Field(0.5, gt=0)
    """of the inner one"""


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


class Example(Config):
    """A field of every kind that an option can set."""

    learning_rate: float | None = Field(0.1, gt=0, lt=2)
    """how fast"""
    count: int = Field(3, gt=0, lt=10)
    """how often"""
    quiet: bool = False
    """say nothing"""
    order: Literal[1, 2] = 1
    """a choice of numbers"""
    colour: Colour = Colour.RED
    """a choice of names"""
    layers: tuple[int, ...] = (1, 2)
    """which ones"""
    table: dict[str, float] = {}  # noqa: RUF012 (pydantic copies it)
    """only a file can say it"""
    depth: Depth = Depth(learning_rate=0.25)
    maybe: Depth | None = None


TOLD: list[Settings[Example]] = []
FLAGS = {"Panel": ("learning_rate", "count", "quiet", "order", "layers", "depth.learning_rate")}


@settings_options(Example, FLAGS, names={"count": "--times", "depth.learning_rate": "--depth"})
def command(settings: Settings[Example], need: str = typer.Option(...)) -> None:
    """What the tests call."""
    TOLD.append(settings)
    settings.config()


app = lazy_app("program", {"try": (f"{__name__}:command", "Try.")}, help="A program.")


def run(*arguments: str) -> Example | str:
    """What the command got, or what it printed. Raises what a user would be told."""
    TOLD.clear()
    result = CliRunner().invoke(app, ["try", "--need", "x", *arguments], standalone_mode=False)
    if result.exception:
        raise result.exception
    return TOLD[0].config() if not TOLD[0].print_only else result.output


@pytest.mark.some(6)
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", {}),
        ("--learning-rate none", {"learning_rate": None}),
        ("--times 9", {"count": 9}),
        ("--quiet", {"quiet": True}),
        ("--set quiet=yes", {"quiet": True}),
        ("--order 2", {"order": 2}),
        ("--set colour=blue", {"colour": "blue"}),
        ("--layers 3 --layers 4", {"layers": [3, 4]}),
        ("--set layers=3,4", {"layers": [3, 4]}),
        ("--set layers=[3,4]", {"layers": [3, 4]}),
        ("--set layers=3", {"layers": [3]}),
        ("--depth 1", {"depth": {"learning_rate": 1}}),
        ("--set depth.learning_rate=1e-2", {"depth": {"learning_rate": 0.01}}),
        ("--set maybe.learning_rate=1", {"maybe": {"learning_rate": 1}}),
        ("--set table.a=1 --set table.b=2.5", {"table": {"a": 1.0, "b": 2.5}}),
        ("--set count=4 --set count=5", {"count": 5}),
    ],
)
def test_a_flag_and_an_assignment_set_their_field(arguments: str, expected: dict[str, Any]) -> None:
    assert run(*arguments.split()) == Example.model_validate(expected)


@pytest.mark.some(5)
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--times 0", "--times: count = 0: Input should be greater than 0"),
        ("--set count=0", "--set: count = 0: Input should be greater than 0"),
        ("--learning-rate 2", "--learning-rate: learning_rate = 2: Input should be less than 2"),
        ("--order 3", "--order: order = 3: Input should be 1 or 2"),
        ("--set layers=1,x", "layers.1 = 'x': Input should be a valid integer"),
        ("--set colr=red", "--set: colr: no such setting; did you mean colour?"),
        ("--set depth.colour=red", "--set: depth.colour: no such setting; did you mean colour?"),
        ("--set zzz=1", "--set: zzz: no such setting"),
        ("--set colour", "--set colour: write NAME=VALUE"),
        ("--colour blue", "no such option: --colour; did you mean --set colour=...?"),
        ("--maybe-learning-rate 1", "did you mean --set maybe.learning_rate=...?"),
        ("--tims 3", "no such option: --tims; did you mean --times?"),
        ("--colr blue", "no such option: --colr; did you mean --set colour=..."),
    ],
)
def test_what_is_wrong_on_the_command_line_is_said_in_a_sentence(arguments: str, said: str) -> None:
    with pytest.raises(UsageError) as error:
        run(*arguments.split())
    assert said in str(error.value)
    assert error.value.exit_code == 2


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("count = 99", "{file}: count = 99: Input should be less than 10"),
        ("colr = 'red'", "{file}: colr: no such setting; did you mean colour?"),
        ("[depth]\nrate = 1", "{file}: depth.rate: no such setting"),
        (
            "count = 99\ncolr = 'red'",
            "{file}: count = 99: Input should be less than 10; {file}: colr: no such setting; did you mean"
            " colour?",
        ),
    ],
)
def test_what_is_wrong_in_a_file_is_said_with_its_name(tmp_path: Path, content: str, said: str) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(content)
    with pytest.raises(ConfigError) as error:
        run("--config", str(file))
    assert str(error.value).startswith(said.format(file=file))
    assert error.value.exit_code == 3


def test_flags_win_over_assignments_they_over_the_file_and_it_over_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('count = 5\nquiet = true\nlearning_rate = "none"\n[table]\na = 1.0\n[depth]\n')
    given = ("--config", str(file), "--set", "count=6", "--set", "order=2", "--times", "7", "--no-quiet")
    assert run(*given) == Example(count=7, order=2, learning_rate=None, table={"a": 1.0})


def test_the_help_says_what_a_setting_does_its_bounds_and_its_default() -> None:
    shown = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["try", "--help"]).output
    line = next(line for line in shown.splitlines() if "--times" in line)
    assert "How often. (> 0 < 10, default: 3)" in line
    assert "Panel" in shown
    assert "1|2" in shown


def test_a_section_keeps_the_defaults_that_its_owner_gives_it() -> None:
    config = parse_toml('[optimizer]\nschedule = "cosine"\n', TrainConfig)
    assert config.optimizer.learning_rate == TrainConfig().optimizer.learning_rate != 1e-5


def test_the_config_is_printed_without_what_the_command_needs_otherwise() -> None:
    given = ["train", "--print-config", "--prompts", "4", "--set", "objective.max_staleness=3"]
    shown = CliRunner().invoke(cli, given)
    assert shown.exit_code == 0, shown.output
    config = parse_toml(shown.output, TrainConfig)
    assert (config.prompts_per_step, config.objective.max_staleness) == (4, 3)


@pytest.mark.parametrize("command", ["sft", "dpo", "reward-model"])
def test_every_training_prints_its_config(command: str) -> None:
    shown = CliRunner().invoke(cli, [command, "--print-config", "--set", "optimizer.warmup_steps=3"])
    assert (shown.exit_code, "warmup_steps = 3" in shown.output) == (0, True), shown.output


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[objective]\nclip_hihg = 0.1", "clip_hihg: no such setting; did you mean objective.clip_high?"),
        ("learning_rate = 0.1", "learning_rate: no such setting; did you mean optimizer.learning_rate?"),
        ("groupsize = 2", "did you mean group_size?"),
        ("zzz = 2", "zzz: no such setting"),
        ("steps = 'x'", "steps = 'x': Input should be a valid integer"),
    ],
)  # fmt: skip
def test_an_unknown_setting_is_refused_with_the_nearest(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_toml(text, TrainConfig)
    assert said in str(error.value)


@pytest.mark.parametrize("kind", [AgentConfig, TrainConfig, SftConfig, DpoConfig, RewardModelConfig])
def test_every_setting_says_what_it_does(kind: type[BaseModel]) -> None:
    sections = {name for name, field in setting_fields(kind) if section_of(field)}
    silent = [name for name, field in setting_fields(kind) if not field.description]
    assert [name for name in silent if name not in sections] == []


@pytest.mark.parametrize(
    ("option", "to"),
    [
        ("--clip-high", "--set objective.clip_high=..."),
        ("--no-gradient-checkpointing", "--set gradient_checkpointing=false"),
        ("--logs-uses", "--set logs.uses=..."),
        ("--lambda-sft", "--set lambda_sft=..."),
        ("--dtype", "--set dtype=..."),
    ],
)
def test_an_option_that_is_a_setting_is_told_with_its_set(
    option: str, to: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run_command(cli, ["train", "--name", "x", option, "1"])
    assert (ended.value.code, capsys.readouterr().err) == (
        2,
        f"error: no such option: {option}; did you mean {to}?\n",
    )


# --------------------------------------------------------------------------------------- the help


def shown_options(command: Any, *path: str) -> Iterator[tuple[str, list[str]]]:
    """Each command with the options of its own, --help aside."""
    if isinstance(command, LazyGroup):
        for name in command.targets:
            yield from shown_options(command.load(name), *path, name)
        return
    options = [p for p in command.params if p.param_type_name == "option" and not p.hidden]
    yield " ".join(path), [p.opts[-1] for p in options if p.rich_help_panel != COMMON_PANEL]


def test_a_command_shows_what_people_turn() -> None:
    shown = dict(shown_options(get_command(coder.cli), "nano-coder"))
    shown |= shown_options(get_command(cli), "nano-rl")
    counts = {name: len(options) for name, options in shown.items()}
    assert max(counts.values()) <= 22, counts
    # plug-ins' too; 12 more than before for escalation, owners, deletion and improve, 4 for images
    assert sum(counts.values()) <= 177, counts


def test_what_many_commands_share_stands_last_in_a_panel_of_its_own() -> None:
    shown = CliRunner(env={"COLUMNS": "200"}).invoke(coder.cli, ["log", "list", "--help"]).output
    own, common = shown.split("Common options")
    assert ("-n" in own, "--log" in own, "--log" in common, "--json" in common) == (True, False, True, True)


@pytest.mark.parametrize("program", ["nano_coder", "nano_rl"])
def test_help_answers_at_once(program: str) -> None:
    before = os.times()
    assert loaded(program, "--help") == []
    after = os.times()
    # of the processor, whatever else it does; 0.25 s where it is idle
    assert after.children_user + after.children_system - before.children_user - before.children_system < 2.0


@pytest.mark.slow
def test_help_of_a_training_loads_no_torch() -> None:
    assert loaded("nano_rl", "train", "--help") == []
    assert loaded("nano_coder", "run", "--help") == []


def loaded(program: str, *arguments: str) -> list[str]:
    """Which heavy libraries a command line has loaded when it ends."""
    heavy = (
        "{'torch', 'transformers', 'sqlalchemy'}" if arguments == ("--help",) else "{'torch', 'transformers'}"
    )
    code = (
        f"import sys, typer.main; from {program}.cli import cli;"
        f"typer.main.get_command(cli).main({list(arguments)!r}, standalone_mode=False);"
        f"print(sorted({heavy} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return list(eval(done.stderr))


@pytest.mark.some(1)
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_offered_and_completes(shell: str) -> None:
    variables = {"_NANO_RL_COMPLETE": f"source_{shell}"}
    code = "import nano_rl.cli as it; it.main()"
    done = subprocess.run(
        [sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=False
    )
    assert "_NANO_RL_COMPLETE" in done.stdout
    if shell == "bash":
        asked = {"_NANO_RL_COMPLETE": "complete_bash", "COMP_WORDS": "nano-rl train --st", "COMP_CWORD": "2"}
        done = subprocess.run(
            [sys.executable, "-c", code], env=asked, capture_output=True, text=True, check=False
        )
        assert done.stdout.split() == ["--steps"], done


# --------------------------------------------------------------------------------- the round trip

NUMBER = st.floats(1e-12, 0.99, exclude_min=True)
JSON = st.recursive(
    st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(min_size=1), inner, max_size=2),
    max_leaves=4,
)


def values_of(kind: type[Config]) -> st.SearchStrategy[dict[str, Any]]:
    """Plain values for some of the fields, by their types; whether they go together, the config says."""
    fields = {name: _value(field) for name, field in kind.model_fields.items() if not section_of(field)}
    return st.fixed_dictionaries({}, optional=fields)


def _value(field: FieldInfo) -> st.SearchStrategy[Any]:
    kinds = alternatives(field.annotation)
    inner = next(kind for kind in kinds if kind is not NoneType)
    if get_origin(inner) is Literal:
        values: st.SearchStrategy[Any] = st.sampled_from(get_args(inner))
    elif inner is bool:
        values = st.booleans()
    elif inner is str:
        values = st.sampled_from(["recipe", "grpo", "gspo"])
    else:
        values = st.integers(2, 2**70) if inner is int else NUMBER
    return st.none() | values if NoneType in kinds else values


SECTIONS = {"objective": ObjectiveConfig, "optimizer": OptimizerConfig, "guards": GuardConfig}
REWARD = st.none() | st.fixed_dictionaries(
    {
        "parts": st.dictionaries(
            st.text(min_size=1), st.floats(-2, 2) | st.dictionaries(st.text(min_size=1), JSON), min_size=1
        )
    },
    optional={"gate": NUMBER, "tie_break": NUMBER},
)
TRAIN = st.tuples(
    values_of(TrainConfig),
    st.fixed_dictionaries({}, optional={n: values_of(k) for n, k in SECTIONS.items()}),
    st.fixed_dictionaries({}, optional={"reward": REWARD}),
).map(lambda parts: {**parts[0], **parts[1], **parts[2]})  # fmt: skip


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(TRAIN)
def test_a_config_written_and_read_is_the_same_config(values: dict[str, Any]) -> None:
    try:
        config = TrainConfig.model_validate(values)
    except ValidationError:
        reject()  # settings that contradict each other have tests of their own
    assert parse_toml(to_toml(config), TrainConfig) == config


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "no such file"), (b"steps 3", "cannot read .*it is no TOML"), (b"\xff", "cannot read")],
)
def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, content: bytes | None, said: str) -> None:
    file = tmp_path / "settings.toml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UsageError, match=said):
        run("--config", str(file))


def test_a_null_within_a_table_is_refused_because_toml_has_none() -> None:
    config = TrainConfig(reward=RewardConfig(parts={"judge": {"weight": 1.0, "model": None}}))
    with pytest.raises(ConfigError, match=r"reward.parts.judge.model: TOML cannot write null"):
        to_toml(config)


def test_parse_config_reads_what_the_flags_left_plain() -> None:
    assert parse_config(Example, {"layers": [3]}).layers == (3,)
