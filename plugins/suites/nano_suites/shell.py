"""The suite `shell`: finding, counting and transforming files with the tool `shell`."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from nano_rl.tasks.suite import Made, TaskSuite
from nano_shared.hidden_checks import StateCheck
from nano_suites.family import (
    COLORS,
    WORDS,
    Draw,
    Family,
    act,
    answered,
    draw_gaps,
    filled,
    left,
    view,
)

EXTENSIONS = ("txt", "log", "md", "csv", "tmp")
TOOLS = ("shell", "submit")
FileTree = dict[str, str]
Order = tuple[Sequence[Draw], str, str, Callable[..., Any]]
"""how the values of `{x}` and `{y}` are drawn, phrase, command, and what comes of it: a function of the lines
or files and those values; None where that is not one thing"""


def draw_lines(rng: random.Random, n: int) -> list[str]:
    """`word number color`, numbers distinct, so that sorting by them leaves nothing open."""
    numbers = rng.sample(range(10, 1000), n)
    return [f"{rng.choice(WORDS)} {number} {rng.choice(COLORS[:5])}" for number in numbers]


def text_of(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def tree(rng: random.Random) -> FileTree:
    """Files in a few folders: 7 to 12, some empty, some to throw away."""
    folders, names = rng.sample(WORDS, 3), rng.sample(WORDS, rng.randint(7, 12))
    return {
        f"{rng.choice(folders)}/{name}.{rng.choice(EXTENSIONS)}": text_of(
            draw_lines(rng, rng.choice((0, 2, 3, 4, 5, 6)))
        )
        for name in names
    }


def _drawn(order: Order, rng: random.Random, given: Any, **more: str) -> tuple[str, str, Any]:
    """Phrase, command and result of an order about `given`."""
    draws, phrase, command, result = order
    gaps = draw_gaps(draws, rng, given)
    names = gaps | more
    return filled(phrase, names), filled(command, names), result(given, *gaps.values())


def _one_of(*choices: str) -> Draw:
    return lambda rng, given: rng.choice(choices)


_TEXT = _one_of(*EXTENSIONS[:4])
_COLOR, _OTHER_COLOR = _one_of(*COLORS[:5]), _one_of(*COLORS[5:])
_EXTENSION: Draw = lambda rng, files: rng.choice(sorted(files)).rsplit(".", 1)[1]  # noqa: E731
_FOLDER: Draw = lambda rng, files: rng.choice(sorted(files)).split("/")[0]  # noqa: E731
_WORD_OF: Draw = lambda rng, lines: rng.choice(lines).split()[2]  # noqa: E731


def _with(files: Iterable[str], extension: str) -> list[str]:
    return sorted(path for path in files if path.endswith(f".{extension}"))


def _changed(files: FileTree, wanted: Iterable[str], change: Callable[[str], str]) -> FileTree:
    """The files, those of `wanted` under another path."""
    chosen = set(wanted)
    return {(change(path) if path in chosen else path): text for path, text in files.items()}


TIDY: dict[str, Order] = {
    "delete_extension": ([_one_of("tmp", "log", "md")], "Delete every .{x} file, in whatever folder.", "find . -name '*.{x}' -delete",
                         lambda files, x: {p: files[p] for p in files if p not in _with(files, x)}),
    "delete_empty": ([], "Delete every empty file.", "find . -type f -empty -delete",
                     lambda files: {p: text for p, text in files.items() if text}),
    "rename": ([_TEXT, _one_of("old", "bak", "note")], "Rename every .{x} file so that it ends in .{y} instead.",
               'for f in */*.{x}; do [ -e "$f" ] && mv "$f" "${f%.{x}}.{y}"; done; true',
               lambda files, x, y: _changed(files, _with(files, x), lambda p: p[: -len(x)] + y)),
    "delete_containing": ([_COLOR], "Delete every file that contains the word {x}.", "grep -rlw {x} * | xargs rm -f",
                          lambda files, x: {p: text for p, text in files.items() if x not in text.split()}),
    "concatenate": ([_EXTENSION], "Write the contents of all .{x} files, in alphabetical order of their paths, one after the other, to all.out.",
                    "find . -name '*.{x}' | LC_ALL=C sort | xargs cat > all.out",
                    lambda files, x: {**files, "all.out": "".join(files[p] for p in _with(files, x))}),
    "list": ([_EXTENSION], "Write the paths of all .{x} files, as in folder/name.{x}, in alphabetical order, one a line, to list.out.",
             "ls */*.{x} | LC_ALL=C sort > list.out", lambda files, x: {**files, "list.out": text_of(_with(files, x))}),
    "lengths": ([_FOLDER], "For each file in the folder {x}, in alphabetical order, write its path and its number of lines, as in {x}/name.txt 3, to lengths.out.",
                'for f in {x}/*; do echo "$f $(wc -l < "$f")"; done | LC_ALL=C sort > lengths.out',
                lambda files, x: {**files, "lengths.out": text_of(f"{p} {files[p].count(chr(10))}" for p in sorted(files) if p.startswith(f"{x}/"))}),
    "move": ([_TEXT, lambda rng, files: f"all-{rng.choice(WORDS)}"], "Make a folder {y} and move every .{x} file into it.",
             "mkdir {y}; find . -name '*.{x}' -exec mv {} {y} \\;",
             lambda files, x, y: _changed(files, _with(files, x), lambda p: f"{y}/{p.split('/')[1]}")),
    "copy": ([_TEXT, lambda rng, files: f"copy-{rng.choice(WORDS)}"], "Make a folder {y} and copy every .{x} file into it.",
             "mkdir {y}; find . -path ./{y} -prune -o -name '*.{x}' -exec cp {} {y} \\;",
             lambda files, x, y: {**files, **{f"{y}/{p.split('/')[1]}": files[p] for p in files if p.endswith(f".{x}")}}),
    "replace": ([_COLOR, _OTHER_COLOR], "In every file, replace the word {x} by {y} wherever it stands last on a line.", "sed -i 's/ {x}$/ {y}/' */*",
                lambda files, x, y: {p: text.replace(f" {x}\n", f" {y}\n") for p, text in files.items()}),
    "append": ([_TEXT, lambda rng, files: f"{rng.choice(WORDS)} {rng.choice(WORDS)}"], 'Add the line "{y}" at the end of every .{x} file.',
               'for f in */*.{x}; do [ -e "$f" ] && echo "{y}" >> "$f"; done; true',
               lambda files, x, y: {p: text + f"{y}\n" * p.endswith(f".{x}") for p, text in files.items()}),
    "total": ([_EXTENSION], "Add up the numbers in all .{x} files and write the total, alone, to total.out.",
              "t=0; for n in $(cat */*.{x} | cut -d' ' -f2); do t=$((t+n)); done; echo $t > total.out",
              lambda files, x: {**files, "total.out": f"{sum(_numbers(files[p] for p in _with(files, x)))}\n"}),
}  # fmt: skip
"""results: the files after it"""


def _numbers(texts: Iterable[str]) -> list[int]:
    return [int(word) for text in texts for word in text.split() if word.isdigit()]


def tidy(order: Order, rng: random.Random) -> Made:
    """Draws until the order is one that changes something."""
    while True:
        files = tree(rng)
        phrase, command, after = _drawn(order, rng, files)
        if after != files:
            break
    checks = [StateCheck(kind="text", path=path, expected=text) for path, text in sorted(after.items())]
    checks += [StateCheck(kind="absent", path=path) for path in sorted(set(files) - set(after))]
    return left(f"{phrase} Leave everything else as it is.", files, checks, act("shell", command=command))


ASK: dict[str, Order] = {
    "lines": ([], "How many lines does {path} have?", "wc -l < {path}", len),
    "words": ([], "How many words are in {path}?", "wc -w < {path}", lambda lines: 3 * len(lines)),
    "bytes": ([], "How many bytes is {path} long?", "wc -c < {path}", lambda lines: len(text_of(lines))),
    "first": ([], "What is the first line of {path}?", "head -n 1 {path}", lambda lines: lines[0]),
    "last": ([], "What is the last line of {path}?", "tail -n 1 {path}", lambda lines: lines[-1]),
    "longest": ([], "How many characters has the longest line of {path}?", "wc -L < {path}", lambda lines: max(map(len, lines))),
    "nth": ([lambda rng, lines: rng.randint(2, len(lines) - 1)], "What is line {x} of {path}?", "sed -n {x}p {path}", lambda lines, x: lines[x - 1]),
    "having": ([_WORD_OF], "How many lines of {path} contain the word {x}?", "grep -cw {x} {path}",
               lambda lines, x: sum(line.split()[2] == x for line in lines)),
    "starting": ([lambda rng, lines: rng.choice(lines)[0]], "How many lines of {path} begin with the letter {x}?", "grep -c ^{x} {path}",
                 lambda lines, x: sum(line.startswith(x) for line in lines)),
    "largest": ([], "What is the largest number in {path}?", "cut -d' ' -f2 {path} | sort -n | tail -n 1", lambda lines: max(_numbers(lines))),
    "smallest": ([], "What is the smallest number in {path}?", "cut -d' ' -f2 {path} | sort -n | head -n 1", lambda lines: min(_numbers(lines))),
    "colors": ([], "How many different words stand last on the lines of {path}?", "cut -d' ' -f3 {path} | sort -u | wc -l",
               lambda lines: len({line.split()[2] for line in lines})),
}  # fmt: skip
"""of the lines of one file"""


def _ask(order: Order, rng: random.Random) -> Made:
    lines = draw_lines(rng, rng.randint(6, 24))
    path = f"{rng.choice(WORDS)}.{rng.choice(EXTENSIONS[:4])}"
    phrase, command, answer = _drawn(order, rng, lines, path=path)
    prompt = rng.choice(("{} Submit it.", "{}", "Look into {path}. {}")).format(phrase, path=path)
    return answered(prompt, {path: text_of(lines)}, answer, act("shell", command=command))


def _number_in(rng: random.Random, files: FileTree) -> str | None:
    lines = [line for text in files.values() for line in text.splitlines()]
    return rng.choice(lines).split()[1] if lines else None


def _best(counts: Mapping[str, int]) -> str | None:
    """The one name with the largest count."""
    best = [name for name, count in counts.items() if count == max(counts.values())]
    return best[0] if len(best) == 1 else None


ASK_TREE: dict[str, Order] = {
    "count_extension": ([_EXTENSION], "How many .{x} files are there, in all folders together?", "find . -name '*.{x}' | wc -l",
                        lambda files, x: len(_with(files, x))),
    "count_folder": ([_FOLDER], "How many files are in the folder {x}?", "ls {x} | wc -l",
                     lambda files, x: sum(path.startswith(f"{x}/") for path in files)),
    "count_empty": ([], "How many of the files are empty?", "find . -type f -empty | wc -l",
                    lambda files: sum(not text for text in files.values())),
    "where": ([_number_in], "Which file contains the number {x}? Submit its path, as in folder/name.txt.", "grep -rlw {x} *",
              lambda files, x: _best({path: 1 for path, text in files.items() if f" {x} " in text})),
    "lines_of": ([_EXTENSION], "How many lines do all .{x} files have together?", "find . -name '*.{x}' -exec cat {} + | wc -l",
                 lambda files, x: sum(files[path].count("\n") for path in _with(files, x))),
    "most_lines": ([], "Which file has the most lines? Submit its path, as in folder/name.txt.", "wc -l */* | grep -v total$ | sort -n | tail -n 1",
                   lambda files: _best({path: text.count("\n") for path, text in files.items()})),
    "fullest": ([], "Which folder holds the most files?", "ls -d */* | cut -d/ -f1 | sort | uniq -c | sort -n | tail -n 1",
                lambda files: _best(Counter(path.split("/")[0] for path in files))),
    "files_with": ([_COLOR], "How many files contain the word {x}?", "grep -rlw {x} . | wc -l",
                   lambda files, x: sum(x in text.split() for text in files.values())),
    "lines_with": ([_COLOR], "In all files together, how many lines end in {x}?", "cat */* | grep -c {x}$",
                   lambda files, x: sum(text.split().count(x) for text in files.values())),
    "largest_anywhere": ([], "What is the largest number in any of the files?", "cat */* | cut -d' ' -f2 | sort -n | tail -n 1",
                         lambda files: max(_numbers(files.values()), default=None)),
}  # fmt: skip
"""of the files of a tree"""


def _ask_tree(order: Order, rng: random.Random) -> Made:
    """Draws until the question has one answer."""
    while True:
        files = tree(rng)
        phrase, command, answer = _drawn(order, rng, files)
        if answer is not None:
            return answered(phrase, files, answer, act("shell", command=command))


_FEW: Draw = lambda rng, lines: rng.randint(2, 4)  # noqa: E731
FIRST: dict[str, Order] = {
    "keep": ([_WORD_OF], "keep only lines with the word {x}", "grep -w {x}", lambda lines, x: [line for line in lines if x in line.split()]),
    "drop": ([_WORD_OF], "drop lines with the word {x}", "grep -vw {x}", lambda lines, x: [line for line in lines if x not in line.split()]),
    "replace": ([_WORD_OF, _OTHER_COLOR], "replace the word {x} by {y}", "sed 's/ {x}$/ {y}/'",
                lambda lines, x, y: [" ".join(y if word == x else word for word in line.split()) for line in lines]),
    "head": ([_FEW], "keep the first {x} lines", "head -n {x}", lambda lines, x: lines[:x]),
    "tail": ([_FEW], "keep the last {x} lines", "tail -n {x}", lambda lines, x: lines[-x:]),
    "sort": ([], "sort the lines alphabetically", "LC_ALL=C sort", sorted),
    "rank": ([], "sort the lines by their number", "sort -k2,2n", lambda lines: sorted(lines, key=lambda line: int(line.split()[1]))),
    "reverse": ([], "reverse the order of the lines", "tac", lambda lines: lines[::-1]),
}  # fmt: skip
LAST: dict[str, Order] = {
    "upper": ([], "turn all letters into capitals", "tr a-z A-Z", lambda lines: [line.upper() for line in lines]),
    "words": ([], "keep only the first word of each line", "cut -d' ' -f1", lambda lines: [line.split()[0] for line in lines]),
    "numbers": ([], "keep only the number of each line", "cut -d' ' -f2", lambda lines: [line.split()[1] for line in lines]),
}  # fmt: skip
"""steps of a pipe; results: the lines after it"""


def _transform(steps: tuple[Order, ...], rng: random.Random) -> Made:
    while True:
        start = lines = draw_lines(rng, rng.randint(6, 12))
        phrases, commands = [], []
        for step in steps:
            phrase, command, lines = _drawn(step, rng, lines)
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
    wanted = {target: text_of(lines), source: text_of(start)}
    checks = [StateCheck(kind="text", path=path, expected=text) for path, text in wanted.items()]
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
