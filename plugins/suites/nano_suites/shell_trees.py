"""Level 3 of the suite `shell`: reorganising a tree of files, of which every file is checked."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

from nano_rl.tasks.suite import Made
from nano_shared.hidden_checks import StateCheck
from nano_suites.family import COLORS, WORDS, act, left

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
