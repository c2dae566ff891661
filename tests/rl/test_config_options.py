"""Options made from configs: every field has one, with its bounds, its default and a sentence of help."""

from __future__ import annotations

import subprocess
import sys
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

import click
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from pydantic import Field, ValidationError

from nano_rl.commands.config_options import (
    ConfigCommand,
    Settings,
    config_options,
    parameter_type,
    settings_of,
)  # fmt: skip
from nano_rl.commands.train import HEADINGS
from nano_rl.commands.train import command as train
from nano_rl.config.toml_file import parse_toml, to_toml
from nano_rl.config.training import RewardConfig, SftConfig, TrainConfig, parse_config
from nano_rl.learn.config import Config, GuardConfig, ObjectiveConfig, OptimizerConfig
from nano_shared.errors import ConfigError, UsageError


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


def run(*arguments: str) -> Example | str:
    """What the command got, or what it said."""
    told: list[Settings[Example]] = []

    @click.command(cls=ConfigCommand)
    @click.option("--need", required=True)
    @config_options(Example, aliases={"count": ("--times",)})
    def command(need: str, settings: Settings[Example]) -> None:
        told.append(settings)
        settings.config()

    result = CliRunner().invoke(command, ["--need", "x", *arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return told[0].config() if told and not told[0].shown else result.output


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), {}),
        (("--learning-rate", "none"), {"learning_rate": None}),
        (("--times", "9"), {"count": 9}),
        (("--quiet",), {"quiet": True}),
        (("--order", "2"), {"order": 2}),
        (("--colour", "blue"), {"colour": "blue"}),
        (("--layers", "3, 4"), {"layers": [3, 4]}),
        (("--depth-learning-rate", "1"), {"depth": {"learning_rate": 1}}),
        (("--maybe-learning-rate", "1"), {"maybe": {"learning_rate": 1}}),
    ],
)
def test_a_flag_sets_its_field(arguments: tuple[str, ...], expected: dict[str, Any]) -> None:
    assert run(*arguments) == Example.model_validate(expected)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--count", "0"), "0 is not in the range 1<=x<=9"),
        (("--learning-rate", "2"), "2.0 is not in the range 0<x<2"),
        (("--order", "3"), "'3' is not one of '1', '2'"),
        (("--layers", "1,x"), "'x' is not a valid integer"),
        (("--tabel", "1"), "No such option"),
    ],
)
def test_a_wrong_flag_is_refused_in_a_sentence(arguments: tuple[str, ...], said: str) -> None:
    assert said in str(run(*arguments))


def test_several_wrong_settings_of_a_file_are_told_apart() -> None:
    settings = Settings(kind=Example, values={"count": 99, "colr": "red"}, flags=frozenset(), shown=False)
    with pytest.raises(ConfigError) as error:
        settings.config()
    assert str(error.value) == (
        "count = 99: Input should be less than 10; colr: no such setting; did you mean colour?"
    )


def test_flags_win_over_the_file_and_the_file_over_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('count = 5\nquiet = true\nlearning_rate = "none"\n[table]\na = 1.0\n')
    assert run("--config", str(file), "--count", "7", "--no-quiet") == Example(
        count=7, learning_rate=None, table={"a": 1.0}
    )


def test_a_section_keeps_the_defaults_that_its_owner_gives_it() -> None:
    config = parse_toml('[optimizer]\nschedule = "cosine"\n', TrainConfig)
    assert config.optimizer.learning_rate == TrainConfig().optimizer.learning_rate != 1e-5


def test_the_config_is_printed_without_what_the_command_needs_otherwise() -> None:
    shown = CliRunner().invoke(train, ["--print-config", "--prompts", "4", "--tis-cap", "none"])
    assert shown.exit_code == 0
    config = parse_toml(shown.output, TrainConfig)
    assert (config.prompts_per_step, config.objective.tis_cap) == (4, None)


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


@pytest.mark.parametrize("kind", [TrainConfig, SftConfig])
def test_every_setting_has_an_option_and_says_what_it_does(kind: type[Config]) -> None:
    found = settings_of(kind)
    assert len({s.option for s in found}) == len(found)
    assert [s.dotted for s in found if not s.field.description] == []
    assert [s.dotted for s in found if not parameter_type(s.field)] in ([], ["reward.parts"])


def test_the_options_of_earlier_versions_still_work() -> None:
    names = {name for option in train.params for name in option.opts}
    old = (
        "name model tasks from-logs fresh curriculum steps prompts group-size learning-rate lora-rank"
        " temperature max-tokens beta std reward normalise discount controls tis-cap shuffle-rewards seed"
        " dtype log"
    )
    assert {f"--{name}" for name in old.split()} <= names


def test_help_groups_the_options_and_answers_without_torch() -> None:
    code = (
        "import sys; from nano_rl.cli import cli;"
        "cli.main(['train', '--help'], standalone_mode=False);"
        "sys.exit(bool({'torch', 'transformers', 'sqlalchemy', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    places = [done.stdout.index(f"\n{heading}:\n") for heading in HEADINGS]
    assert places == sorted(places)
    objective = done.stdout[done.stdout.index("\nObjective:") : done.stdout.index("\nOptimizer:")]
    assert "--clip-low" in objective
    assert "0<x<=1" in objective


# --------------------------------------------------------------------------------- the round trip

NUMBER = st.floats(1e-12, 0.99, exclude_min=True)
JSON = st.recursive(
    st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(min_size=1), inner, max_size=2),
    max_leaves=4,
)


def values_of(kind: type[Config]) -> st.SearchStrategy[dict[str, Any]]:
    """Plain values for some of the fields, by their types; whether they go together, the config says."""
    fields: dict[str, st.SearchStrategy[Any]] = {}
    for setting in settings_of(kind):
        if len(setting.path) > 1:
            continue
        type_ = parameter_type(setting.field)
        fields[setting.path[0]] = _value(type_)
    return st.fixed_dictionaries({}, optional=fields)


def _value(type_: click.ParamType | None) -> st.SearchStrategy[Any]:
    inner = getattr(type_, "inner", None)
    if inner is not None:
        return st.none() | _value(inner)
    if isinstance(type_, click.Choice):
        return st.sampled_from(list(type_.choices))
    if type_ is click.BOOL:
        return st.booleans()
    return st.integers(2, 2**70) if "integer" in (type_.name if type_ else "") else NUMBER


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
