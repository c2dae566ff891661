"""Three tasks of a day in real packages, done by a scripted model behind a strict mock of OpenAI's API.

    python integration/day_tasks.py --out FOLDER

A bug across two modules (tinydb), a feature with stub, tests, documentation and changelog (cachetools), and a
rename in twelve files (mistune). Source distributions come by pip, by name. For each: `nano-coder run` with a
check and native tools, as a user types it; then `diff`, `apply`, `undo --to` and `undo`, compared with what
is right, byte by byte. FOLDER/figures.json tells turns, tokens and seconds. The model knows what to write;
each observation that its next step rests on is compared with what it expects. The mock counts four bytes as a
token. The exit code is 1 where anything is not as it should be.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "coder")]

from smoke import TOY, parse, toy_package  # noqa: E402
from strict_api import KEY, Call, Handler, Say, call, stream_bytes, strict_api  # noqa: E402

from nano_mining.releases import source_archive  # noqa: E402

Texts = dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Step:
    """One call of the model, and a text that its observation must contain."""

    call: Call
    sees: str
    says: str | None = None


@dataclass(frozen=True, kw_only=True)
class Day:
    """A task in a package."""

    package: str
    prompt: str
    check: str
    before: Callable[[Texts], Texts]
    """the files that are changed before the agent comes, by path"""
    after: Callable[[Texts], Texts]
    """the files that the model changes"""
    looks: Sequence[Step]
    fails: str
    """what the check shows at first"""
    apart: bool = False
    """whether each file is patched and checked by itself, and the check fails until the last"""

    def steps(self, texts: Texts) -> list[Step]:
        """Look, run the check, change, run it again, submit."""
        changed = self.after(texts)
        parts = [{path: changed[path]} for path in changed] if self.apart else [changed]
        patches = [patch_of(texts, part) for part in parts]
        wrong = patches[0].replace("\n-", "\n-# not there: ", 1)
        changes = [
            step
            for patch in patches
            for step in (
                Step(call=call("apply_patch", patch=patch), sees=""),
                Step(
                    call=call("bash", command=self.check),
                    sees=" passed" if patch == patches[-1] else self.fails,
                ),
            )
        ]
        plan = [{"step": step, "status": "pending"} for step in ("look", "change", "check")]
        return [
            Step(call=call("plan", steps=plan), sees="", says="I look before I change anything."),
            Step(call=call("bash", command=self.check), sees=self.fails),
            *self.looks,
            Step(call=call("apply_patch", patch=wrong), sees="not there"),
            *changes,
            Step(call=call("submit", answer="It is done, and the tests pass."), sees=""),
        ]


def patch_of(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """The change as a patch for the tool `apply_patch`."""
    lines = ["*** Begin Patch"]
    for path, text in after.items():
        lines.append(f"*** Update File: {path}")
        old, new = before[path].split("\n"), text.split("\n")
        for group in difflib.SequenceMatcher(None, old, new, autojunk=False).get_grouped_opcodes(3):
            lines.append("@@")
            for kind, a, b, c, d in group:
                same = kind == "equal"
                lines += [f"{' ' if same else '-'}{line}" for line in old[a:b]]
                lines += [] if same else [f"+{line}" for line in new[c:d]]
    return "\n".join([*lines, "*** End Patch"])


def replaced(texts: Texts, changes: Mapping[str, Sequence[tuple[str, str]]]) -> Texts:
    """The texts with passages replaced, each of which must be there."""
    found = {}
    for path, pairs in changes.items():
        found[path] = texts[path]
        for old, new in pairs:
            assert old in found[path], (path, old)
            found[path] = found[path].replace(old, new)
    return found


def swapped(changes: Mapping[str, Sequence[tuple[str, str]]]) -> dict[str, list[tuple[str, str]]]:
    return {path: [(new, old) for old, new in pairs] for path, pairs in changes.items()}


WRITTEN = "        # Write the newly updated data back to the storage\n        self._storage.write(tables)\n"
CLEARED = "        # Clear the query cache, as the table contents have changed\n        self.clear_cache()\n"
CACHE = {
    "tinydb/utils.py": [("self.cache.popitem(last=False)", "self.cache.popitem(last=True)")],
    "tinydb/table.py": [(f"{WRITTEN}\n{CLEARED}", WRITTEN)],
}
FOLDED = {
    "src/cachetools/keys.py": [
        ('__all__ = ("hashkey",', '__all__ = ("foldedkey", "hashkey",'),
        (
            "\n\ndef methodkey(",
            "\n\ndef foldedkey(*args, **kwargs):\n"
            '    """Return a cache key that ignores the case of strings."""\n\n'
            "    fold = lambda v: v.casefold() if isinstance(v, str) else v  # noqa: E731\n"
            "    folded = {name: fold(value) for name, value in kwargs.items()}\n"
            "    return hashkey(*map(fold, args), **folded)\n\n\ndef methodkey(",
        ),
    ],
    "src/cachetools/keys.pyi": [
        ('__all__: Final = ("hashkey",', '__all__: Final = ("foldedkey", "hashkey",'),
        (
            "def methodkey(",
            "def foldedkey(*args: Hashable, **kwargs: Hashable) -> tuple[Hashable, ...]: ...\ndef methodkey(",
        ),
    ],
    "tests/test_keys.py": [
        (
            "    def test_addkeys(",
            "    def test_foldedkey(self, key=cachetools.keys.foldedkey):\n"
            '        self.assertEqual(key("Ab", 1, q="C"), key("aB", 1, q="c"))\n'
            '        self.assertEqual(hash(key("STRASSE")), hash(key("stra\\u00dfe")))\n'
            '        self.assertNotEqual(key("a"), key("b"))\n'
            "        self.assertEqual(key(1, (2,)), cachetools.keys.hashkey(1, (2,)))\n\n"
            "    def test_addkeys(",
        )
    ],
    "docs/index.rst": [
        (
            ".. autofunction:: methodkey\n",
            ".. autofunction:: foldedkey\n\n   This function is similar to :func:`hashkey`, but strings that"
            "\n   differ in case alone give the same key.\n\n.. autofunction:: methodkey\n",
        )
    ],
    "CHANGELOG.rst": [
        (
            "v8.0.1 (2026-11-17)\n",
            "Unreleased\n==========\n\n- Add ``cachetools.keys.foldedkey()``.\n\n\nv8.0.1 (2026-11-17)\n",
        )
    ],
}  # fmt: skip
RENAMES = (("escape_url", "quote_url"), ("unikey", "normalize_key"))
SOURCES = (".py", ".rst")


def renamed(texts: Texts) -> Texts:
    found = {}
    for path, text in texts.items():
        new = text
        for old, name in RENAMES:
            new = new.replace(old, name)
        if new != text and path.endswith(SOURCES):
            found[path] = new
    return found


def read(path: str, sees: str) -> Step:
    return Step(call=call("read", path=path), sees=sees)


BROKEN_TOY = {"toy.py": [("value < low", "value > low")]}
PYTEST = "python -m pytest -q -p no:cacheprovider"
DAYS = {
    "bug": Day(
        package="tinydb==4.9.0",
        prompt="Queries give wrong results once they come from the cache. Find out why and fix it.",
        check=f"{PYTEST} tests/test_utils.py tests/test_tables.py",
        before=lambda texts: replaced(texts, CACHE),
        after=lambda texts: replaced(texts, swapped(CACHE)),
        fails=" failed",
        apart=True,
        looks=(
            Step(call=call("grep", pattern="_query_cache|popitem", path="tinydb"), sees="popitem(last=True)"),
            read("tinydb/utils.py", "the least-recently accessed"),
            Step(call=call("read", path="tinydb/table.py", offset=800), sees="_storage.write(tables)"),
        ),
    ),
    "feature": Day(
        package="cachetools==8.0.1",
        prompt="Add `cachetools.keys.foldedkey`: as `hashkey`, but strings that differ in case alone give one"
        " key. With stub, tests, documentation and changelog.",
        check=f"PYTHONPATH=src {PYTEST} tests/test_keys.py -k 'folded or hash'",
        before=lambda texts: {},
        after=lambda texts: replaced(texts, FOLDED),
        fails="1 passed",
        looks=(
            Step(call=call("glob", pattern="**/*key*"), sees="src/cachetools/keys.pyi"),
            read("src/cachetools/keys.py", "def typedmethodkey"),
            read("src/cachetools/keys.pyi", "_typeshed"),
            read("tests/test_keys.py", "def test_addkeys"),
            Step(call=call("grep", pattern="autofunction", path="docs"), sees="typedkey"),
            Step(call=call("bash", command="head -5 CHANGELOG.rst"), sees="v8.0.1 (2026-11-17)"),
        ),
    ),
    "refactoring": Day(
        package="mistune==3.4.0",
        prompt="Rename `escape_url` to `quote_url` and `unikey` to `normalize_key`, everywhere.",
        check=f"! grep -rnE 'escape_url|unikey' src docs && PYTHONPATH=src {PYTEST} tests/test_misc.py"
        " tests/test_plugins.py tests/test_directives.py -k 'not quadratic'",  # that one measures time
        before=lambda texts: {},
        after=renamed,
        fails="src/mistune/util.py",
        looks=(
            Step(call=call("grep", pattern="escape_url|unikey"), sees="src/mistune/plugins/ruby.py"),
            read("src/mistune/util.py", "def unikey"),
        ),
    ),
}  # fmt: skip


def unpacked(archive: Path, folder: Path) -> None:
    """Replace a folder by the contents of an archive without its one top folder."""
    shutil.rmtree(folder, ignore_errors=True)
    parts = folder.with_name(f"{folder.name}.parts")
    with tarfile.open(archive) as opened:
        opened.extractall(parts, filter="data")
    next(parts.iterdir()).rename(folder)
    parts.rmdir()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def texts_of(files: Mapping[str, bytes]) -> Texts:
    return {path: data.decode() for path, data in files.items() if path.endswith((*SOURCES, ".pyi"))}


def answering(step: Step, number: int) -> Callable[[Handler], None]:
    """The step as a streamed answer, with tokens by the size of the request."""

    def act(handler: Handler) -> None:
        body = handler.server.script.seen[-1]
        function = {"name": step.call.name, "arguments": step.call.arguments}
        calls = [{"id": f"call_{number}", "type": "function", "function": function}]
        size = len(json.dumps([body["messages"], body.get("tools")])) // 4
        said = len(step.call.arguments + (step.says or "")) // 4
        usage = {"prompt_tokens": size, "completion_tokens": said, "total_tokens": size + said}
        handler.stream(stream_bytes(Say(step.says), calls, "tool_calls", usage))

    return act


class Failed(Exception):
    """Something is not as it should be."""


def expect(right: bool, what: object) -> None:
    if not right:
        raise Failed(what)


def nano(home: Path, *words: object) -> str:
    env = {**os.environ, "NANO_HOME": str(home), "XDG_CONFIG_HOME": str(home), "OPENAI_API_KEY": KEY}
    argv = [sys.executable, "-c", "from nano_coder.cli import main; main()", *map(str, words)]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    expect(
        done.returncode == 0, f"{words[:2]} exit {done.returncode}: {done.stderr[-2000:]}{done.stdout[-500:]}"
    )
    return done.stdout


def do(name: str, day: Day, out: Path) -> dict[str, Any]:
    """Run one task; what it took. Raises Failed."""
    folder, home = out / name, out / f"home-{name}"
    shutil.rmtree(home, ignore_errors=True)
    (out / "sdists").mkdir(parents=True, exist_ok=True)
    unpacked(source_archive(day.package, out / "sdists"), folder)
    for path, text in day.before(texts_of(contents(folder))).items():
        (folder / path).write_bytes(text.encode())
    start = contents(folder)
    texts = texts_of(start)
    changed = day.after(texts)
    right = start | {path: text.encode() for path, text in changed.items()}
    steps = day.steps(texts)
    began = time.monotonic()
    with strict_api(*(answering(step, n) for n, step in enumerate(steps))) as (server, script):
        at = ("--model", "openai:strong", "--base-url", server.base_url, "--check", day.check, "--json")
        result = json.loads(nano(home, "run", day.prompt, "-C", folder, *at, "--limit", "tool_seconds=300"))
    seconds = time.monotonic() - began
    seen = {m["tool_call_id"]: m["content"] for m in script.seen[-1]["messages"] if m["role"] == "tool"}
    for n, step in enumerate(steps[:-1]):
        expect(step.sees in seen[f"call_{n}"], f"step {n} {step.call.name} saw: {seen[f'call_{n}'][-1500:]}")
    expect(result["stop"] == "finished" and result["verdict"]["reward"] == 1, result)
    expect(contents(folder) == start, "the folder was touched before anything was applied")
    run = result["run"]
    named = {line[6:] for line in nano(home, "diff", run).splitlines() if line.startswith("+++ b/")}
    expect(named == set(changed), f"diff names {sorted(named)}")
    nano(home, "apply", run, "-C", folder)
    expect(contents(folder) == right, "what was applied is not the right change")
    _, *others = changed
    partly = right | {path: start[path] for path in others} if day.apart else start
    nano(home, "undo", run, "--to", len(steps) - 4, "-C", folder)
    expect(contents(folder) == partly, "undo --to does not give what was there after that step")
    nano(home, "undo", run, "-C", folder)
    expect(contents(folder) == start, "undo does not give the folder back as it was")
    lines = result["diff"].splitlines()
    return {
        "task": name, "package": day.package, "files": len(changed),
        "added": sum(x.startswith("+") and not x.startswith("+++") for x in lines),
        "removed": sum(x.startswith("-") and not x.startswith("---") for x in lines),
        "turns": result["turns"], "tokens_read": result["usage"]["prompt"],
        "tokens_written": result["usage"]["completion"], "seconds": round(seconds, 1),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description="Three tasks of a day, by a scripted model.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=DAYS, default=list(DAYS))
    options = parse(parser, only=["bug"])
    if options.smoke:
        toy_package(options.out / "sdists")
        DAYS["bug"] = replace(
            DAYS["bug"], package=TOY, check=f"{PYTEST} tests",
            before=lambda texts: replaced(texts, BROKEN_TOY),
            after=lambda texts: replaced(texts, swapped(BROKEN_TOY)), looks=(), apart=False,
        )  # fmt: skip
    rows, bad = [], 0
    for name in options.only:
        try:
            rows.append(do(name, DAYS[name], options.out))
            print(json.dumps(rows[-1]), flush=True)
        except Failed as problem:
            bad += 1
            print(f"{name}: {problem}", file=sys.stderr)
    (options.out / "figures.json").write_text(json.dumps(rows, indent=1) + "\n")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
