"""The environment class that TRL is given: tools as typed methods, reset by row, a reward at the end."""

import inspect
from pathlib import Path

import pytest

from nano_coder.sandbox.protocol import open_sandbox
from nano_formats.trl import TRL, environment_class
from nano_shared.errors import ConfigError, UsageError
from nano_shared.hidden_checks import Case, CaseChecks
from nano_shared.store import LogStore
from nano_shared.types import Task

CODE = Task(
    key="inc",
    prompt="Write inc in s.py.",
    artifacts=("s.py",),
    hidden=CaseChecks(entry_point="inc", cases=(Case(args=[1], expected=2),)),
)


@pytest.fixture
def environment(tmp_path: Path) -> type:
    return environment_class(
        ["write_file", "read_file"], sandbox=open_sandbox(), store=LogStore.open(tmp_path / "log.db")
    )


def test_the_public_methods_are_the_tools(environment: type) -> None:
    """As GRPOTrainer finds them: the functions of the class, without reset, get_reward and private ones."""
    found = {name for name, _ in inspect.getmembers(environment, predicate=inspect.isfunction)}
    assert {name for name in found if not name.startswith("_")} == {
        "reset", "get_reward", "write_file", "read_file",
    }  # fmt: skip


def test_transformers_makes_a_schema_of_every_method(environment: type) -> None:
    from transformers.utils import get_json_schema

    function = get_json_schema(environment().write_file)["function"]
    assert function["name"] == "write_file"
    assert function["parameters"]["properties"]["path"]["type"] == "string"
    assert function["parameters"]["required"] == ["path", "content"]


@pytest.mark.parametrize(("result", "reward"), [("n + 1", 1.0), ("n", 0.0)])
def test_a_rollout_is_rewarded(environment: type, result: str, reward: float) -> None:
    instance = environment()
    (row,) = TRL.to_rows(CODE)
    for _ in range(2):  # one instance serves one rollout after another
        assert instance.reset(**row) is None
        instance.write_file(path="s.py", content=f"def inc(n):\n    return {result}\n")
        assert instance.get_reward() == reward
        assert instance.read_file(path="s.py").startswith("error: the episode has ended")


def test_a_row_without_a_task_is_refused(environment: type) -> None:
    with pytest.raises(UsageError, match="nano_task"):
        environment().reset(prompt="Hello")
    with pytest.raises(ConfigError, match="has no 'fly'"):
        environment_class(["fly"])
