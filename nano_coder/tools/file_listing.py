"""The files of a workspace that .gitignore files do not leave out, listed and searched inside the jail.

By ripgrep where it is installed in the jail, else by a walk of our own, with Python's regular expressions.
"""

LISTING = r"""
import os, re, shutil, subprocess, sys

OURS = (".git", ".nano", "__pycache__")


def pattern(glob):
    # a pattern of .gitignore as a regular expression on a path below its folder
    anchored, out, at = "/" in glob.rstrip("/"), "", 0
    glob = glob.strip("/") if glob.strip("/") else glob
    while at < len(glob):
        rest = glob[at:]
        if rest.startswith("**/") and (at == 0 or glob[at - 1] == "/"):
            out, at = out + "(?:.*/)?", at + 3
        elif rest == "**" and at and glob[at - 1] == "/":
            out, at = out + ".+", at + 2
        elif rest[0] == "*":
            out, at = out + "[^/]*", at + 1
        elif rest[0] == "?":
            out, at = out + "[^/]", at + 1
        elif rest[0] == "\\" and len(rest) > 1:
            out, at = out + re.escape(rest[1]), at + 2
        elif rest[0] == "[" and (end := rest.find("]", 2 + (rest[1:2] in ("!", "^")))) > 0:
            inner = rest[1:end].replace("\\", "\\\\").replace("[", "\\[")
            inner = "^/" + inner[1:] if inner[:1] in ("!", "^") else inner
            out, at = out + f"[{inner}]", at + end + 1
        else:
            out, at = out + re.escape(rest[0]), at + 1
    return re.compile(("" if anchored else "(?:.*/)?") + out, re.DOTALL)


def alternatives(glob):
    found = re.search(r"\{([^{}]*)\}", glob)
    if not found:
        return [glob]
    before, after = glob[: found.start()], glob[found.end() :]
    return [one for part in found[1].split(",") for one in alternatives(before + part + after)]


def rules(folder):
    try:
        # git matches bytes: `?` is one of them
        with open(os.path.join(folder, ".gitignore"), encoding="latin-1", newline="") as file:
            lines = [line.removesuffix("\r") for line in file.read().split("\n")]
    except OSError:
        return []
    found = []
    for line in lines:
        line = re.sub(r"(?<!\\) +$", "", line)
        if not line or line.startswith("#"):
            continue
        back = line.startswith("!")
        line = line[back:]
        try:
            found.append((folder, pattern(line), line.endswith("/"), back))
        except re.error:
            continue
    return found


def ignored(path, is_folder, known):
    for folder, wanted, folders_only, back in reversed(known):
        below = os.fsencode(path if folder == "." else path[len(folder) + 1 :]).decode("latin-1")
        if (is_folder or not folders_only) and wanted.fullmatch(below):
            return not back
    return False


def walk(folder, known):
    known = known + rules(folder)
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        path = os.path.normpath(os.path.join(folder, entry.name))
        is_folder = entry.is_dir(follow_symlinks=False)
        if entry.name in OURS or ignored(path, is_folder, known):
            continue
        if is_folder:
            yield from walk(path, known)
        elif entry.is_file(follow_symlinks=False):
            yield path


def above(folder):
    # the rules of the workspace's folders above one
    found = []
    if os.path.isabs(folder) or folder.startswith(".."):
        return found
    parts = [] if folder == "." else folder.split("/")
    for depth in range(len(parts)):
        found += rules("/".join(parts[:depth]) or ".")
    return found


def ripgrep():
    return shutil.which("rg") if order_by == "rg" else None


def rg(*options):
    usual = ["rg", "--no-config", "--hidden", "--no-require-git", "--color=never", "--sort=path"]
    return [*usual, *(f"--glob=!{name}" for name in OURS), *options]


def files(root):
    if os.path.isfile(root):
        return [root]
    if not os.path.isdir(root):
        sys.exit(f"no such file or directory: {root}")
    root = os.path.normpath(root)
    if not ripgrep():
        return list(walk(root, above(root)))
    done = subprocess.run(rg("--files", "--", root), capture_output=True)
    return [os.path.normpath(os.fsdecode(line)) for line in done.stdout.splitlines()]


def chosen(paths, root, glob):
    if not glob:
        return paths
    wanted = [pattern(one) for one in alternatives(glob)]
    return [p for p in paths if any(w.fullmatch(os.path.relpath(p, root)) for w in wanted)]


def show(lines, most, what):
    for line in lines[:most]:
        print(os.fsencode(line).decode("utf-8", "backslashreplace"))
    if len(lines) > most:
        print(f"[the first {most} of {len(lines)} {what}]")
    if not lines:
        print(f"[no {what}]")


order_by = sys.argv.pop(1)
"""
"""functions for a program whose first argument is `rg`, to use ripgrep if it is there, or `own`"""
