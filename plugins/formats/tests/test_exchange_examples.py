"""Small files in each format as its own tools write it: read, understood, and given back as they were."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nano_formats.harbor.tasks import read_tree
from nano_formats.row_format import guess_format
from nano_rl.cli import cli
from nano_rl.task_formats import FORMATS, ReadOptions
from nano_rl.tasks.task_file import read_tasks
from nano_shared.errors import NanoError, Refusal
from nano_shared.hidden_checks import AnswerChecks
from nano_shared.types import Task

DATA = Path(__file__).parent / "data"
FILES = {
    "humaneval.jsonl": ("humaneval", ["HumanEval/900"]),
    "mbpp.jsonl": ("mbpp", ["mbpp/901"]),
    "nemo_input.jsonl": ("nemo-gym", ["sum-1"]),
    "rows.jsonl": ("rows", ["inc"]),
    "harbor_words": ("harbor", ["nano/words"]),
}


def tasks_of(path: Path) -> list[Task]:
    found = list(guess_format(path).read(path, ReadOptions()))
    assert not [item for item in found if isinstance(item, Refusal)]
    return [item for item in found if isinstance(item, Task)]


@pytest.mark.parametrize("name", FILES)
def test_the_format_is_known_by_what_is_there(name: str) -> None:
    format, keys = FILES[name]
    assert guess_format(DATA / name).name == format
    assert [task.key for task in tasks_of(DATA / name)] == keys


@pytest.mark.parametrize("name", [*FILES, "nemo_rollouts.jsonl", "verifiers.jsonl", "trl.jsonl"])
def test_what_was_read_is_given_back(name: str, tmp_path: Path) -> None:
    source, out = DATA / name, tmp_path / "out"
    format = FORMATS[guess_format(source).name]
    format.write(tasks_of(source), out)
    if source.is_dir():
        (folder,) = out.iterdir()
        assert read_tree(folder).files == read_tree(source).files
    elif source.suffix == ".jsonl":
        lines = [json.loads(line) for line in source.read_text().splitlines()]
        assert [json.loads(line) for line in out.read_text().splitlines()] == lines


def test_the_rollouts_of_a_task_are_one_task() -> None:
    (task,) = tasks_of(DATA / "nemo_rollouts.jsonl")
    assert task.prompt == "What is 3 + 3?"
    assert isinstance(task.hidden, AnswerChecks)
    assert task.hidden.answer == "6"


def test_a_changed_task_is_written_anew_and_keeps_what_is_unknown() -> None:
    (task,) = tasks_of(DATA / "nemo_input.jsonl")
    (row,) = FORMATS["nemo-gym"].to_rows(task.model_copy(update={"prompt": "What is 1 + 1?"}))
    assert row["agent_ref"] == {"name": "simple_agent"}
    assert row["responses_create_params"]["input"][1]["content"].startswith("What is 1 + 1?")
    assert "expected_answer" not in row  # the old row's; the task as it is now lies in nano_task


def test_a_row_whose_fields_and_whole_task_disagree_is_refused(tmp_path: Path) -> None:
    format = FORMATS["verifiers"]
    (task,) = tasks_of(DATA / "rows.jsonl")
    format.write([task], tmp_path / "rows.jsonl")
    row = json.loads((tmp_path / "rows.jsonl").read_text())
    row["prompt"][0]["content"] = "Something else."
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    (refusal,) = format.read(tmp_path / "rows.jsonl", ReadOptions())
    assert isinstance(refusal, Refusal)
    assert refusal.field == "prompt"


GOOD = '{"responses_create_params": {"input": "Why?"}}'
BAD = {
    "no JSON": ("{", "row: is not JSON"),
    "a key twice": ('{"responses_create_params": {"input": "a", "input": "b"}}', "input: is given twice"),
    "NaN": ('{"responses_create_params": {"input": "a"}, "x": NaN}', "row: holds NaN"),
    "infinite": ('{"responses_create_params": {"input": "a"}, "x": 1e999}', "row: holds 1e999"),
    "no object": ("[1]\n", "row: must be a JSON object"),
    "role": ('{"responses_create_params": {"input": [{"role": "king", "content": "a"}]}}', "input.0.role"),
    "image": (
        '{"responses_create_params": {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}}',
        "input.0.content.0.type",
    ),
    "no text": ('{"responses_create_params": {"input": []}}', "holds no text"),
}


@pytest.mark.parametrize("what", [what for what in BAD if what != "no object"])
def test_a_malformed_row_is_refused_by_line_and_field(what: str, tmp_path: Path) -> None:
    line, said = BAD[what]
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{GOOD}\n{line}\n")
    task, refusal = sorted(
        FORMATS["nemo-gym"].read(path, ReadOptions()), key=lambda x: isinstance(x, Refusal)
    )
    assert isinstance(task, Task)
    assert str(refusal).startswith(f"{path}:2: ")
    assert said in str(refusal)


def test_import_writes_nothing_after_a_refusal_unless_it_keeps_going(tmp_path: Path) -> None:
    source, out = tmp_path / "rows.jsonl", tmp_path / "tasks.jsonl"
    source.write_text(f"{GOOD}\n{{\n")
    command = ["tasks", "import", str(source), "--from", "nemo-gym", "--out", str(out)]
    first = CliRunner().invoke(cli, command)
    assert isinstance(first.exception, NanoError)
    assert f"{source}:2: row" in str(first.exception)
    assert not out.exists()
    CliRunner().invoke(cli, [*command, "--keep-going"])
    assert len(read_tasks(out)) == 1


def test_export_refuses_by_name_what_a_format_cannot_carry(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    command = ["tasks", "import", str(DATA / "trl.jsonl"), "--out", str(tasks)]
    assert CliRunner().invoke(cli, command).exception is None
    out = ["tasks", "export", str(tasks), "--to", "rows", "--out", str(tmp_path / "rows.jsonl")]
    refused = CliRunner().invoke(cli, out)
    assert "hidden.kind: None is no check of these rows" in str(refused.exception)
    assert not (tmp_path / "rows.jsonl").exists()
