"""The suite `shell`: finding, counting and transforming files with the tool `shell`."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from functools import partial

from nano_rl.tasks.suite import Made, TaskSuite
from nano_shared.hidden_checks import StateCheck
from nano_suites.family import COLORS, WORDS, Family, act, answered, left, view

EXTENSIONS = ("txt", "log", "md", "csv", "tmp")
FileTree = dict[str, str]


def draw_lines(rng: random.Random, n: int) -> list[str]:
    """`word number color`, numbers distinct, so that sorting by them leaves nothing open."""
    numbers = rng.sample(range(10, 1000), n)
    return [f"{rng.choice(WORDS)} {number} {rng.choice(COLORS[:5])}" for number in numbers]


def text_of(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def tree(rng: random.Random) -> FileTree:
    """Files in a few folders: 7 to 12, some empty, some to throw away."""
    folders = rng.sample(WORDS, 3)
    names = rng.sample(WORDS, rng.randint(7, 12))
    return {
        f"{rng.choice(folders)}/{name}.{rng.choice(EXTENSIONS)}": text_of(
            draw_lines(rng, rng.choice((0, 2, 3, 4, 5, 6)))
        )
        for name in names
    }


Tidied = tuple[str, str, FileTree]
"""phrase, command, the files after it"""


def tidy(of: Callable[[random.Random, FileTree], Tidied], rng: random.Random) -> Made:
    """Draws until the order is one that changes something."""
    while True:
        files = tree(rng)
        phrase, command, after = of(rng, files)
        if after != files:
            break
    checks = [StateCheck(kind="text", path=path, expected=text) for path, text in sorted(after.items())]
    checks += [StateCheck(kind="absent", path=path) for path in sorted(set(files) - set(after))]
    return left(f"{phrase} Leave everything else as it is.", files, checks, act("shell", command=command))


def _ends(path: str, ext: str) -> bool:
    return path.endswith(f".{ext}")


def _delete_extension(rng: random.Random, files: FileTree) -> Tidied:
    ext = rng.choice(("tmp", "log", "md"))
    kept = {path: text for path, text in files.items() if not _ends(path, ext)}
    return f"Delete every .{ext} file, in whatever folder.", f"find . -name '*.{ext}' -delete", kept


def _delete_empty(rng: random.Random, files: FileTree) -> Tidied:
    kept = {path: text for path, text in files.items() if text}
    return "Delete every empty file.", "find . -type f -empty -delete", kept


def _delete_containing(rng: random.Random, files: FileTree) -> Tidied:
    color = rng.choice(COLORS[:5])
    kept = {path: text for path, text in files.items() if color not in text.split()}
    return f"Delete every file that contains the word {color}.", f"grep -rlw {color} * | xargs rm -f", kept


def _rename(rng: random.Random, files: FileTree) -> Tidied:
    old, new = rng.choice(("txt", "log", "md", "csv")), rng.choice(("old", "bak", "note"))
    after = {(p[: -len(old)] + new if _ends(p, old) else p): text for p, text in files.items()}
    command = f'for f in */*.{old}; do [ -e "$f" ] && mv "$f" "${{f%.{old}}}.{new}"; done; true'
    return f"Rename every .{old} file so that it ends in .{new} instead.", command, after


def _concatenate(rng: random.Random, files: FileTree) -> Tidied:
    ext = rng.choice(sorted(files)).rsplit(".", 1)[1]
    joined = "".join(files[path] for path in sorted(files) if _ends(path, ext))
    phrase = f"Write the contents of all .{ext} files, in alphabetical order of their paths, one after the other, to all.out."
    command = f"find . -name '*.{ext}' | LC_ALL=C sort | xargs cat > all.out"
    return phrase, command, {**files, "all.out": joined}


def _list(rng: random.Random, files: FileTree) -> Tidied:
    ext = rng.choice(sorted(files)).rsplit(".", 1)[1]
    listed = "".join(f"{path}\n" for path in sorted(files) if _ends(path, ext))
    phrase = f"Write the paths of all .{ext} files, as in folder/name.{ext}, in alphabetical order, one a line, to list.out."
    return phrase, f"ls */*.{ext} | LC_ALL=C sort > list.out", {**files, "list.out": listed}


def _lengths(rng: random.Random, files: FileTree) -> Tidied:
    folder = rng.choice(sorted(files)).split("/")[0]
    mine = sorted(path for path in files if path.startswith(f"{folder}/"))
    counted = "".join(f"{path} {files[path].count(chr(10))}\n" for path in mine)
    phrase = (
        f"For each file in the folder {folder}, in alphabetical order, write its path and its number of "
        f"lines, as in {folder}/name.txt 3, to lengths.out."
    )
    command = f'for f in {folder}/*; do echo "$f $(wc -l < "$f")"; done | LC_ALL=C sort > lengths.out'
    return phrase, command, {**files, "lengths.out": counted}


def _move(rng: random.Random, files: FileTree) -> Tidied:
    ext, folder = rng.choice(("txt", "log", "md", "csv")), f"all-{rng.choice(WORDS)}"
    after = {(f"{folder}/{p.split('/')[1]}" if _ends(p, ext) else p): text for p, text in files.items()}
    command = f"mkdir {folder}; find . -name '*.{ext}' -exec mv {{}} {folder} \\;"
    return f"Make a folder {folder} and move every .{ext} file into it.", command, after


def _copy(rng: random.Random, files: FileTree) -> Tidied:
    ext, folder = rng.choice(("txt", "log", "md", "csv")), f"copy-{rng.choice(WORDS)}"
    copies = {f"{folder}/{p.split('/')[1]}": text for p, text in files.items() if _ends(p, ext)}
    command = f"mkdir {folder}; find . -path ./{folder} -prune -o -name '*.{ext}' -exec cp {{}} {folder} \\;"
    return f"Make a folder {folder} and copy every .{ext} file into it.", command, {**files, **copies}


def _replace(rng: random.Random, files: FileTree) -> Tidied:
    old, new = rng.choice(COLORS[:5]), rng.choice(COLORS[5:])
    after = {path: text.replace(f" {old}\n", f" {new}\n") for path, text in files.items()}
    phrase = f"In every file, replace the word {old} by {new} wherever it stands last on a line."
    return phrase, f"sed -i 's/ {old}$/ {new}/' */*", after


def _append(rng: random.Random, files: FileTree) -> Tidied:
    ext, line = rng.choice(("txt", "log", "md", "csv")), f"{rng.choice(WORDS)} {rng.choice(WORDS)}"
    after = {path: text + f"{line}\n" * _ends(path, ext) for path, text in files.items()}
    command = f'for f in */*.{ext}; do [ -e "$f" ] && echo "{line}" >> "$f"; done; true'
    return f'Add the line "{line}" at the end of every .{ext} file.', command, after


def _total(rng: random.Random, files: FileTree) -> Tidied:
    ext = rng.choice(sorted(files)).rsplit(".", 1)[1]
    total = sum(int(w) for path in files if _ends(path, ext) for w in files[path].split() if w.isdigit())
    phrase = f"Add up the numbers in all .{ext} files and write the total, alone, to total.out."
    command = f"t=0; for n in $(cat */*.{ext} | cut -d' ' -f2); do t=$((t+n)); done; echo $t > total.out"
    return phrase, command, {**files, "total.out": f"{total}\n"}


TIDY: dict[str, Callable[[random.Random, FileTree], Tidied]] = {
    "delete_extension": _delete_extension, "delete_empty": _delete_empty, "rename": _rename,
    "delete_containing": _delete_containing, "concatenate": _concatenate, "list": _list,
    "lengths": _lengths, "move": _move, "copy": _copy, "replace": _replace, "append": _append, "total": _total,
}  # fmt: skip


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
