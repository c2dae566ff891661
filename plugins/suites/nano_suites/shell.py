"""The suite `shell`: finding, counting and transforming files with the tool `shell`."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from functools import partial

from nano_rl.tasks.suite import Made, TaskSuite
from nano_shared.hidden_checks import StateCheck
from nano_suites.family import COLORS, WORDS, Family, act, answered, left, view
from nano_suites.shell_trees import EXTENSIONS, TIDY, FileTree, draw_lines, text_of, tidy, tree

TOOLS = ("shell", "submit")


# -------------------------------------------------------------------------------- level 0: ask of a file

ShellQuestion = tuple[str, str, int | str]
"""phrase, command, answer"""


def _ask(of: Callable[[random.Random, list[str], str], ShellQuestion], rng: random.Random) -> Made:
    lines = draw_lines(rng, rng.randint(6, 24))
    path = f"{rng.choice(WORDS)}.{rng.choice(EXTENSIONS[:4])}"
    phrase, command, answer = of(rng, lines, path)
    prompt = rng.choice(("{} Submit it.", "{}", "Look into {path}. {}")).format(phrase, path=path)
    return answered(prompt, {path: text_of(lines)}, answer, act("shell", command=command))


def _nth(rng: random.Random, lines: list[str], path: str) -> ShellQuestion:
    n = rng.randint(2, len(lines) - 1)
    return f"What is line {n} of {path}?", f"sed -n {n}p {path}", lines[n - 1]


def _having(rng: random.Random, lines: list[str], path: str) -> ShellQuestion:
    color = rng.choice(lines).split()[2]
    count = sum(line.split()[2] == color for line in lines)
    return f"How many lines of {path} contain the word {color}?", f"grep -cw {color} {path}", count


def _starting(rng: random.Random, lines: list[str], path: str) -> ShellQuestion:
    letter = rng.choice(lines)[0]
    count = sum(line.startswith(letter) for line in lines)
    return f"How many lines of {path} begin with the letter {letter}?", f"grep -c ^{letter} {path}", count


def _largest(rng: random.Random, lines: list[str], path: str) -> ShellQuestion:
    answer = max(int(line.split()[1]) for line in lines)
    return f"What is the largest number in {path}?", f"cut -d' ' -f2 {path} | sort -n | tail -n 1", answer


def _smallest(rng: random.Random, lines: list[str], path: str) -> ShellQuestion:
    answer = min(int(line.split()[1]) for line in lines)
    return f"What is the smallest number in {path}?", f"cut -d' ' -f2 {path} | sort -n | head -n 1", answer


def _colors(rng: random.Random, lines: list[str], path: str) -> ShellQuestion:
    answer = len({line.split()[2] for line in lines})
    phrase = f"How many different words stand last on the lines of {path}?"
    return phrase, f"cut -d' ' -f3 {path} | sort -u | wc -l", answer


ASK = {
    "lines": lambda rng, lines, path: (f"How many lines does {path} have?", f"wc -l < {path}", len(lines)),
    "words": lambda rng, lines, path: (f"How many words are in {path}?", f"wc -w < {path}", 3 * len(lines)),
    "bytes": lambda rng, lines, path: (f"How many bytes is {path} long?", f"wc -c < {path}", len(text_of(lines))),
    "first": lambda rng, lines, path: (f"What is the first line of {path}?", f"head -n 1 {path}", lines[0]),
    "last": lambda rng, lines, path: (f"What is the last line of {path}?", f"tail -n 1 {path}", lines[-1]),
    "longest": lambda rng, lines, path: (
        f"How many characters has the longest line of {path}?", f"wc -L < {path}", max(map(len, lines))
    ),
    "nth": _nth, "having": _having, "starting": _starting, "largest": _largest, "smallest": _smallest,
    "colors": _colors,
}  # fmt: skip

# --------------------------------------------------------------------------------- level 1: ask of a tree


def _ask_tree(of: Callable[[random.Random, FileTree], ShellQuestion | None], rng: random.Random) -> Made:
    """Draws until the question has one answer."""
    while True:
        files = tree(rng)
        if (asked := of(rng, files)) is not None:
            phrase, command, answer = asked
            return answered(phrase, files, answer, act("shell", command=command))


def _extension(rng: random.Random, files: FileTree) -> str:
    return rng.choice(sorted(files)).rsplit(".", 1)[1]


def _with(files: FileTree, extension: str) -> list[str]:
    return sorted(path for path in files if path.endswith(f".{extension}"))


def _count_extension(rng: random.Random, files: FileTree) -> ShellQuestion:
    ext = _extension(rng, files)
    command = f"find . -name '*.{ext}' | wc -l"
    return f"How many .{ext} files are there, in all folders together?", command, len(_with(files, ext))


def _count_folder(rng: random.Random, files: FileTree) -> ShellQuestion:
    folder = rng.choice(sorted(files)).split("/")[0]
    answer = sum(path.startswith(f"{folder}/") for path in files)
    return f"How many files are in the folder {folder}?", f"ls {folder} | wc -l", answer


def _count_empty(rng: random.Random, files: FileTree) -> ShellQuestion:
    answer = sum(not text for text in files.values())
    return "How many of the files are empty?", "find . -type f -empty | wc -l", answer


def _where(rng: random.Random, files: FileTree) -> ShellQuestion | None:
    lines = [line for text in files.values() for line in text.splitlines()]
    if not lines:
        return None
    number = rng.choice(lines).split()[1]
    holding = [p for p, text in files.items() if f" {number} " in text]
    phrase = f"Which file contains the number {number}? Submit its path, as in folder/name.txt."
    return (phrase, f"grep -rlw {number} *", holding[0]) if len(holding) == 1 else None


def _lines_of(rng: random.Random, files: FileTree) -> ShellQuestion:
    ext = _extension(rng, files)
    answer = sum(files[path].count("\n") for path in _with(files, ext))
    command = f"find . -name '*.{ext}' -exec cat {{}} + | wc -l"
    return f"How many lines do all .{ext} files have together?", command, answer


def _most_lines(rng: random.Random, files: FileTree) -> ShellQuestion | None:
    ranked = sorted(files, key=lambda path: -files[path].count("\n"))
    if files[ranked[0]].count("\n") == files[ranked[1]].count("\n"):
        return None
    command = "wc -l */* | grep -v total$ | sort -n | tail -n 1"
    return "Which file has the most lines? Submit its path, as in folder/name.txt.", command, ranked[0]


def _fullest(rng: random.Random, files: FileTree) -> ShellQuestion | None:
    counts: dict[str, int] = {}
    for path in files:
        counts[path.split("/")[0]] = counts.get(path.split("/")[0], 0) + 1
    best = [folder for folder, n in counts.items() if n == max(counts.values())]
    command = "ls -d */* | cut -d/ -f1 | sort | uniq -c | sort -n | tail -n 1"
    return ("Which folder holds the most files?", command, best[0]) if len(best) == 1 else None


def _files_with(rng: random.Random, files: FileTree) -> ShellQuestion:
    color = rng.choice(COLORS[:5])
    answer = sum(color in text.split() for text in files.values())
    return f"How many files contain the word {color}?", f"grep -rlw {color} . | wc -l", answer


def _lines_with(rng: random.Random, files: FileTree) -> ShellQuestion:
    color = rng.choice(COLORS[:5])
    answer = sum(text.split().count(color) for text in files.values())
    return f"In all files together, how many lines end in {color}?", f"cat */* | grep -c {color}$", answer


def _largest_anywhere(rng: random.Random, files: FileTree) -> ShellQuestion | None:
    numbers = [int(word) for text in files.values() for word in text.split() if word.isdigit()]
    command = "cat */* | cut -d' ' -f2 | sort -n | tail -n 1"
    return ("What is the largest number in any of the files?", command, max(numbers)) if numbers else None


ASK_TREE: dict[str, Callable[[random.Random, FileTree], ShellQuestion | None]] = {
    "count_extension": _count_extension, "count_folder": _count_folder, "count_empty": _count_empty,
    "where": _where, "lines_of": _lines_of, "most_lines": _most_lines, "fullest": _fullest,
    "files_with": _files_with, "lines_with": _lines_with, "largest_anywhere": _largest_anywhere,
}  # fmt: skip

# ----------------------------------------------------------------------------- level 2: transform a file

PipelineStep = Callable[[random.Random, list[str]], tuple[str, str, list[str]]]
"""phrase, command of a pipe, the lines after it"""


def _keep(rng: random.Random, lines: list[str]) -> tuple[str, str, list[str]]:
    color = rng.choice(lines).split()[2]
    return (
        f"keep only lines with the word {color}",
        f"grep -w {color}",
        [x for x in lines if color in x.split()],
    )


def _drop(rng: random.Random, lines: list[str]) -> tuple[str, str, list[str]]:
    color = rng.choice(lines).split()[2]
    return (
        f"drop lines with the word {color}",
        f"grep -vw {color}",
        [x for x in lines if color not in x.split()],
    )


def _replace(rng: random.Random, lines: list[str]) -> tuple[str, str, list[str]]:
    old, new = rng.choice(lines).split()[2], rng.choice(COLORS[5:])
    changed = [" ".join(new if word == old else word for word in line.split()) for line in lines]
    return f"replace the word {old} by {new}", f"sed 's/ {old}$/ {new}/'", changed


def _head(rng: random.Random, lines: list[str]) -> tuple[str, str, list[str]]:
    n = rng.randint(2, 4)
    return f"keep the first {n} lines", f"head -n {n}", lines[:n]


def _tail(rng: random.Random, lines: list[str]) -> tuple[str, str, list[str]]:
    n = rng.randint(2, 4)
    return f"keep the last {n} lines", f"tail -n {n}", lines[-n:]


FIRST: dict[str, PipelineStep] = {
    "keep": _keep, "drop": _drop, "replace": _replace, "head": _head, "tail": _tail,
    "sort": lambda rng, lines: ("sort the lines alphabetically", "LC_ALL=C sort", sorted(lines)),
    "rank": lambda rng, lines: (
        "sort the lines by their number", "sort -k2,2n", sorted(lines, key=lambda line: int(line.split()[1]))
    ),
    "reverse": lambda rng, lines: ("reverse the order of the lines", "tac", lines[::-1]),
}  # fmt: skip
LAST: dict[str, PipelineStep] = {
    "upper": lambda rng, lines: ("turn all letters into capitals", "tr a-z A-Z", [x.upper() for x in lines]),
    "words": lambda rng, lines: (
        "keep only the first word of each line", "cut -d' ' -f1", [x.split()[0] for x in lines]
    ),
    "numbers": lambda rng, lines: (
        "keep only the number of each line", "cut -d' ' -f2", [x.split()[1] for x in lines]
    ),
}  # fmt: skip


def _transform(steps: tuple[PipelineStep, ...], rng: random.Random) -> Made:
    while True:
        start = lines = draw_lines(rng, rng.randint(6, 12))
        phrases, commands = [], []
        for step in steps:
            phrase, command, lines = step(rng, lines)
            phrases.append(phrase)
            commands.append(command)
            if not lines:
                break
        if lines and lines != start:
            break
    source, target = (f"{word}.txt" for word in rng.sample(WORDS, 2))
    prompt = (
        f"Take {source}: {', then '.join(phrases)}. Write the result to {target}; leave {source} as it is."
    )
    line = f"cat {source} | {' | '.join(commands)} > {target}"
    checks = [
        StateCheck(kind="text", path=target, expected=text_of(lines)),
        StateCheck(kind="text", path=source, expected=text_of(start)),
    ]
    return left(prompt, {source: text_of(start)}, checks, act("shell", command=line))


def _chains() -> Iterable[Family]:
    for one, first in FIRST.items():
        for other, second in {**FIRST, **LAST}.items():
            # of lines that all have one word, none is left when those with it are dropped
            if other != one and (one, other) != ("keep", "drop"):
                yield Family(f"{one}+{other}", partial(_transform, (first, second)))


SUITE = TaskSuite(
    name="shell",
    version="1",
    about="find, count and transform files with shell commands",
    views=(
        view("shell", "ask", 0, TOOLS, (Family(name, partial(_ask, of)) for name, of in ASK.items())),
        view("shell", "tree", 1, TOOLS, (Family(n, partial(_ask_tree, of)) for n, of in ASK_TREE.items())),
        view("shell", "transform", 2, TOOLS, _chains()),
        view("shell", "tidy", 3, TOOLS, (Family(name, partial(tidy, of)) for name, of in TIDY.items())),
    ),
)
