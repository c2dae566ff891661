"""Views: one program, many tasks. Each returns a task whose oracle earns 1 and whose starter earns 0."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

from nano_rl.tasks.cases import hidden_cases, passes, visible_cases
from nano_rl.tasks.mutate import Mutant, mutants
from nano_rl.tasks.program import VERSION, Program, make_program
from nano_shared.hashing import content_hash
from nano_shared.types import Case, HiddenChecks, Limits, Provenance, Split, Task, ToolCall

_TEST_SHARE = 5  # one family in five is held out
_LIMITS = Limits(max_turns=8, max_tokens=768, max_seconds=120, tool_seconds=15, memory_mb=512)
_FILES = [
    "main.py",
    "code.py",
    "tools.py",
    "work.py",
    "lib.py",
    "task.py",
    "util.py",
    "solution.py",
    "calc.py",
]
_OPERATORS = frozenset({"+", "-", "*", "%", "//", "<", ">", "<=", ">=", "==", "!="})
_OPERATOR_KINDS = ("arithmetic", "statistic", "conditional")
_MODULES = [
    "stats",
    "report",
    "metrics",
    "score",
    "prices",
    "words",
    "listing",
    "numbers_tool",
    "summary",
    "table",
]


def split_of(family: str) -> Split:
    """The split of a family, by its hash: never by row."""
    return Split.TEST if int(content_hash(family)[7:15], 16) % _TEST_SHARE == 0 else Split.TRAIN


def program_in(
    split: Split, random: Random, kinds: tuple[str, ...] | None = None
) -> tuple[Program, list[Case]]:
    """A program of that split, with hidden cases that kill its mutants."""
    while True:
        program = make_program(random, kinds) if kinds else make_program(random)
        if split_of(program.family) is split and (cases := hidden_cases(program, random)):
            return program, cases


# ---------------------------------------------------------------------------------------- L0 and L1


def copy(split: Split, random: Random) -> Task | None:
    names = random.sample(
        ["a", "b", "c", "x", "y", "z", "total", "count", "name", "size", "limit"], random.randint(1, 4)
    )
    values = [str(random.randint(-99, 999)) for _ in names]
    index = random.randrange(len(names))
    lines = "\n".join(f"{name} = {value}" for name, value in zip(names, values, strict=True))
    ask = random.choice(["Submit the value of {}.", "What is {}? Submit it.", "Submit {}."]).format(
        names[index]
    )
    family = f"copy:{'-'.join(sorted(names))}"
    return _answer_task("copy", 0, f"{lines}\n{ask}", values[index], family, split)


def emit(split: Split, random: Random) -> Task | None:
    word = "".join(
        random.choice("abcdefghijklmnopqrstuvwxyz0123456789_") for _ in range(random.randint(2, 7))
    )
    ask = random.choice(["Submit {}", "Answer with {}", "The answer is {}. Submit it.", "Submit the text {}"])
    return _answer_task("emit", 0, ask.format(word), word, f"emit:{word}", split)


def calculate(split: Split, random: Random) -> Task | None:
    operators = [random.choice("+-*") for _ in range(random.randint(1, 3))]
    brackets = len(operators) > 1 and random.random() < 0.5
    numbers = [random.randint(2, 99) for _ in range(len(operators) + 1)]
    text = str(numbers[0])
    for place, (operator, number) in enumerate(zip(operators, numbers[1:], strict=True)):
        text = f"{text} {operator} {number}"
        if brackets and place == 0:
            text = f"({text})"
    ask = random.choice(["What is {}?", "Calculate {} and submit the result.", "Submit the value of {}."])
    oracle = (ToolCall(name="calculate", arguments={"expression": text}), _submit(str(eval(text))))
    family = f"calculate:{''.join(operators)}:{brackets}:{len(text)}"
    return _answer_task(
        "calculate",
        1,
        ask.format(text),
        str(eval(text)),
        family,
        split,
        oracle=oracle,
        tools=("calculate", "submit"),
    )


def complete(split: Split, random: Random) -> Task | None:
    program, hidden = program_in(split, random, _OPERATOR_KINDS)
    spot = _blanked(program, random)
    if spot is None:
        return None
    name, number = random.choice(_FILES), spot.line + 2
    blank = spot.body[spot.line]
    examples = "\n".join(_example(program, case) for case in visible_cases(program, random, 2))
    ask = random.choice(
        ["Replace ? in line {n} of {f}:", "Complete line {n} of {f}:", "Fill in ? in {f}, line {n}:"]
    )
    prompt = f"{ask.format(n=number, f=name)}\n    {blank}\n{program.doc}\n{examples}"
    oracle = (_edit(name, number, "    " + program.body[spot.line]), _submit())
    files, tools = {name: _bare_source(program, spot.body)}, ("edit_file", "submit")
    return _case_task("complete", 1, prompt, files, name, program, hidden, split, oracle, tools)


def operator(split: Split, random: Random) -> Task | None:
    """Replace the ? of a file by an operator: the shortest edit there is, for the smallest models."""
    program, hidden = program_in(split, random, _OPERATOR_KINDS)
    spot = _blanked(program, random, only=True)
    if spot is None:
        return None
    prompt = f"{program.doc}\n{spot.body[spot.line].strip()}\nReplace ? in f.py."
    edit = ToolCall(name="edit_file", arguments={"path": "f.py", "old": "?", "new": spot.old})
    files, tools = {"f.py": _bare_source(program, spot.body)}, ("edit_file", "submit")
    return _case_task("operator", 1, prompt, files, "f.py", program, hidden, split, (edit, _submit()), tools)


def choose(split: Split, random: Random) -> Task | None:
    """Submit the operator that a ? stands for."""
    program, _ = program_in(split, random, _OPERATOR_KINDS)
    spot = _blanked(program, random, only=True)
    if spot is None:
        return None
    prompt = f"{program.doc}\n{spot.body[spot.line].strip()}\nSubmit what ? is."
    return _answer_task("choose", 1, prompt, spot.old, program.family, split, program=program)


def _blanked(program: Program, random: Random, *, only: bool = False) -> Mutant | None:
    """The program with one operator hidden behind a ?; with `only`, one that has no other."""
    found = [m for m in mutants(program) if m.old in _OPERATORS]
    if not found or (only and len({(m.line, m.column) for m in found}) > 1):
        return None
    spot = random.choice(found)
    line = program.body[spot.line]
    blank = f"{line[: spot.column]}?{line[spot.column + len(spot.old) :]}"
    body = (*program.body[: spot.line], blank, *program.body[spot.line + 1 :])
    return replace(spot, body=body, new="?")


def _bare_source(program: Program, body: tuple[str, ...]) -> str:
    return "\n".join([program.header, *(f"    {line}" for line in body)]) + "\n"


# ---------------------------------------------------------------------------------------- L2 and L3


def fix(split: Split, random: Random) -> Task | None:
    program, hidden = program_in(split, random)
    bug = _bug(program, hidden, random)
    if bug is None:
        return None
    name = random.choice(_FILES)
    number = bug.line + 3
    ask = random.choice([
        "{f} has a bug: the code does not do what its docstring says. Fix it.",
        "Fix the bug in {f}.",
        "One line of {f} is wrong. Correct it.",
        "{g} in {f} gives wrong results. Fix it.",
        "Make {g} in {f} do what its docstring says.",
    ])  # fmt: skip
    prompt = ask.format(f=name, g=program.name)
    if random.random() < 0.3:
        prompt += f"\nExpected: {_example(program, visible_cases(program, random, 1)[0])}"
    oracle = (_read(name), _edit(name, number, "    " + program.body[bug.line]), _submit())
    tools = ("read_file", "edit_file", "submit")
    return _case_task(
        "fix", 2, prompt, {name: program.source(bug.body)}, name, program, hidden, split, oracle, tools
    )


def repair(split: Split, random: Random) -> Task | None:
    """A module of one to three functions, one of them wrong, and tests that say so."""
    programs = _distinct_programs(split, random, random.randint(1, 3))
    which = random.randrange(len(programs))
    program, hidden = programs[which]
    bug = _bug(program, hidden, random)
    if bug is None:
        return None
    module = random.choice(_MODULES)
    name, test_name = f"{module}.py", f"test_{module}.py"
    tests, shown = _test_file(module, [p for p, _ in programs], random)
    if passes(program.source(bug.body), program.name, shown[which]):
        return None  # the visible tests do not see this bug
    sources = [p.source(bug.body) if p is program else p.source() for p, _ in programs]
    number = sum(source.count("\n") + 2 for source in sources[:which]) + bug.line + 3
    ask = random.choice([
        "The tests fail. Find the bug in {f} and fix it.",
        "The tests fail. Fix {f}.",
        "Fix the bug in {f}.",
        "Find the bug in {f} and fix it.",
        "A test fails because of a bug in {f}. Fix the code.",
        "Make the tests pass.",
        "{g} in {f} is wrong. Fix it so that the tests pass.",
        "Fix the failing test.",
        "Something in {f} is broken; repair it.",
    ])  # fmt: skip
    checked = random.random() < 0.7
    rerun = checked and random.random() < 0.25
    oracle = [_read(name), _edit(name, number, "    " + program.body[bug.line])]
    if rerun:
        oracle.append(ToolCall(name="shell", arguments={"command": "python -m pytest -q"}))
    return _case_task(
        "repair", 2 if len(programs) < 3 else 3, ask.format(f=name, g=program.name),
        {name: "\n\n".join(sources), test_name: tests}, name, program, hidden, split,
        (*oracle, _submit()), None, check="python -m pytest -q" if checked else None,
    )  # fmt: skip


def body(split: Split, random: Random) -> Task | None:
    program, hidden = program_in(split, random, ("comprehension", "arithmetic", "text", "statistic"))
    name = random.choice(_FILES)
    blank = random.choice(["...", "pass", "raise NotImplementedError"])
    ask = random.choice([
        "Write the body of {g} in {f}.",
        "Implement {g} in {f} as its docstring says.",
        "{f} lacks the body of {g}. Write it.",
        "Complete the function in {f}.",
    ])  # fmt: skip
    oracle = (_read(name), _edit(name, 3, "    " + program.body[0]), _submit())
    prompt = ask.format(f=name, g=program.name)
    files = {name: program.source((blank,))}
    tools = ("read_file", "edit_file", "submit")
    return _case_task("body", 3, prompt, files, name, program, hidden, split, oracle, tools)


VIEWS: dict[str, Callable[[Split, Random], Task | None]] = {
    view.__name__: view for view in (copy, emit, calculate, complete, fix, repair, body, operator, choose)
}
LEVELS: dict[int, tuple[str, ...]] = {
    0: ("copy", "emit"),
    1: ("complete", "calculate"),
    2: ("fix", "repair"),
    3: ("body", "repair"),
}
"""the views of a level that are made unless others are asked for"""
EXTRA: dict[int, tuple[str, ...]] = {1: ("operator", "choose")}
"""views made only when they are asked for: for models of a million parameters"""

# --------------------------------------------------------------------------------------------- parts


def _distinct_programs(split: Split, random: Random, n: int) -> list[tuple[Program, list[Case]]]:
    chosen: dict[str, tuple[Program, list[Case]]] = {}
    while len(chosen) < n:
        program, hidden = program_in(split, random)
        chosen.setdefault(program.name, (program, hidden))
    return list(chosen.values())


def _bug(program: Program, hidden: Sequence[Case], random: Random) -> Mutant | None:
    """A mutant that the hidden cases see."""
    found = [m for m in mutants(program) if not passes(program.source(m.body), program.name, hidden)]
    return random.choice(found) if found else None


def _test_file(module: str, programs: Sequence[Program], random: Random) -> tuple[str, list[list[Case]]]:
    shown = [visible_cases(program, random, 3) for program in programs]
    lines = [f"from {module} import {', '.join(p.name for p in programs)}"]
    for program, cases in zip(programs, shown, strict=True):
        lines += [
            "",
            "",
            f"def test_{program.name}():",
            *(f"    assert {_example(program, c)}" for c in cases),
        ]
    return "\n".join(lines) + "\n", shown


def _example(program: Program, case: Case) -> str:
    return f"{program.name}({', '.join(map(repr, case.args))}) == {case.expected!r}"


def _read(path: str) -> ToolCall:
    return ToolCall(name="read_file", arguments={"path": path})


def _edit(path: str, line: int, new: str) -> ToolCall:
    return ToolCall(name="edit_file", arguments={"path": path, "line": line, "new": new})


def _submit(answer: str | None = None) -> ToolCall:
    return ToolCall(name="submit", arguments={} if answer is None else {"answer": answer})


def _answer_task(
    view: str, level: int, prompt: str, answer: str, family: str, split: Split, *,
    oracle: tuple[ToolCall, ...] | None = None, tools: tuple[str, ...] = ("submit",),
    program: Program | None = None,
) -> Task | None:  # fmt: skip
    if split_of(family) is not split:
        return None
    return Task(
        key=f"{VERSION}/{view}/{content_hash(prompt)[7:23]}",
        prompt=prompt,
        tools=tools,
        limits=_LIMITS,
        hidden=HiddenChecks(kind="answer", answer=answer),
        oracle=oracle or (_submit(answer),),
        split=split,
        level=level,
        family=family,
        view=view,
        program_hash=program.hash if program else content_hash(prompt),
        provenance=Provenance(source="procedural", licence="Apache-2.0", generator=VERSION),
    )


def _case_task(
    view: str, level: int, prompt: str, files: dict[str, str], artifact: str, program: Program,
    hidden: Sequence[Case], split: Split, oracle: tuple[ToolCall, ...], tools: tuple[str, ...] | None,
    check: str | None = None,
) -> Task:  # fmt: skip
    return Task(
        key=f"{VERSION}/{view}/{content_hash([prompt, files])[7:23]}",
        prompt=prompt,
        files=files,
        artifacts=(artifact,),
        tools=tools,
        limits=_LIMITS,
        check=check,
        hidden=HiddenChecks(kind="cases", entry_point=program.name, cases=tuple(hidden)),
        oracle=oracle,
        split=split,
        level=level,
        family=program.family,
        view=view,
        program_hash=program.hash,
        provenance=Provenance(source="procedural", licence="Apache-2.0", generator=VERSION),
    )
