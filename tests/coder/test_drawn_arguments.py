"""Whatever is typed, a command answers in a sentence and by an exit code of its own, never by a traceback."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forked
import pytest
from typer.main import get_command

import nano_coder.cli
import nano_rl.cli
from nano_shared.command_line import LazyGroup

PROGRAMS = {"nano-coder": nano_coder.cli.cli, "nano-rl": nano_rl.cli.cli}
WITHOUT = {
    "serve", "view", "chat", "doctor", "conformance", "mcp serve", "tasks serve",  # do not end, or take long
    "run", "plan", "admit", "eval", "rollout", "train", "sft", "dpo", "reward-model",  # may load a model
}  # fmt: skip
VALUES = (
    "", " ", "nope", "-1", "0", "nan", "1e999", "9" * 30, "\udcff", "a" * 5000, "\u202e", "a,b,,c", "=",
    "a=b", "{}", "--", "../../..", "/", "/proc/self/mem", "file", "binary", "cut.json", "rows.jsonl",
    "folder", "loop", "fifo", "http://127.0.0.1:9", "http://[bad",
    "file:///x", "openai:", "x:y", "shipped", "last",
    "sqlite:///nope/x.db", "postgresql://127.0.0.1:9/x",
)  # fmt: skip
CODES = {0, 1, 2, 3, 4, 5, 6}


def commands(command: Any, *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(command, LazyGroup):
        for name in command.targets:
            yield from commands(command.load(name), *path, name)
    elif " ".join(path) not in WITHOUT:
        yield path, command


KNOWN = [
    (program, path, command)
    for program, cli in PROGRAMS.items()
    for path, command in commands(get_command(cli))
]


def drawn(seed: int) -> list[str]:
    """A command with up to five options, each value one of VALUES."""
    draw = random.Random(seed)
    program, path, command = KNOWN[seed % len(KNOWN)]
    words = [program, *path]
    options = [p for p in command.params if p.param_type_name == "option" and p.name != "interactive"]
    for option in draw.sample(options, min(len(options), draw.randrange(6))):
        words += [option.opts[-1]] if option.is_flag else [option.opts[-1], draw.choice(VALUES)]
    for argument in command.params:
        if argument.param_type_name == "argument" and (argument.required or draw.random() < 0.5):
            words.append(draw.choice(VALUES))
    return words


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NANO_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    here = tmp_path / "here"
    (here / "folder").mkdir(parents=True)
    (here / "file").touch()
    (here / "binary").write_bytes(bytes(range(256)) * 40)
    (here / "cut.json").write_text('{"a": [1,')
    (here / "rows.jsonl").write_text('[1, 2]\n"x"\nnull\n')
    (here / "loop").symlink_to("loop")
    os.mkfifo(here / "fifo")
    return here


def answers(words: list[str], folder: Path) -> None:
    done = forked.run(words[0], *words[1:], env=os.environ, cwd=folder)
    said = f"{words}: {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    assert "Traceback" not in done.stdout + done.stderr, said
    # a program that `exec` runs has exit codes of its own
    assert done.returncode in CODES or words[1] == "exec", said
    assert done.returncode == 0 or done.stdout or done.stderr, said


@pytest.mark.some(6)
@pytest.mark.parametrize("seed", range(len(KNOWN)))
def test_a_command_answers(seed: int, folder: Path) -> None:
    answers(drawn(seed), folder)


@pytest.mark.slow
@pytest.mark.parametrize("hundred", range(20))
def test_many_commands_answer(hundred: int, folder: Path) -> None:
    for seed in range(1000 + 100 * hundred, 1100 + 100 * hundred):
        answers(drawn(seed), folder)


if __name__ == "__main__":  # what a seed draws
    print(drawn(int(sys.argv[1])))
