"""`mend`: one slot of a short function contradicts its docstring; which one, and what is right, is spread.

The slot is an operator, a comparison, a constant, an end of a range or a name, each in one task of five, and
what is right is drawn evenly: who knew the place and always wrote the same would seldom be right.
"""

from __future__ import annotations

import random

from nano_rl.tasks.suite import Made, split_of
from nano_shared.hidden_checks import Case, CaseChecks
from nano_shared.types import Limits, Split
from nano_suites.functions.admitted_program import REPAIR_TOOLS, call, made_of
from nano_suites.functions.literal_views import SOLUTION
from nano_suites.functions.program import Param, Program, ValueKind, compile_function, outcome, sample_args

WORDS = {
    "gather": {"sum": "Add up", "list": "List", "sorted": "Sort"},
    "operator": {"+": "plus", "-": "minus", "*": "times", "//": "over", "%": "modulo"},
    "comparison": {
        "<": "below", "<=": "at most", ">": "above", ">=": "at least", "==": "equal to", "!=": "not",
    },
    "start": {"": "from", " + 1": "after"},
    "end": {"": "before", " + 1": "to"},
}  # fmt: skip
"""slot -> its code, and what the docstring says for it"""
KINDS = {"operator": ("operator",), "comparison": ("comparison",), "constant": ("k",),
         "bound": ("start", "end"), "name": ("a", "b", "c")}  # fmt: skip
"""kind of mistake -> the slots that may hold it"""
_CODE = "return {gather}(i {operator} {k} for i in range({a}{start}, {b}{end}) if i {comparison} {c}"
_DOC = "{gather} i {operator} {k} for i {start} {a} {end} {b} where i is {comparison} {c}"
_HARDER = " and i % {k2} > 0", " and {k2} does not divide it"
_DOMAIN = {"a": (-3, 4), "b": (6, 14), "c": (0, 7)}
CHECK, TEST = "python test.py", "test.py"
_TEST = """import sys
from solution import work
for args, right in {cases}:
    if work(*args) != right:
        sys.exit(f"wrong for {{args}}")
print("passed")
"""
SHOWN, CASES = 3, 12


def _code(slots: dict[str, str], level: int) -> str:
    return (_CODE + (_HARDER[0] if level > 2 else "") + ")").format(**slots)


def _program(slots: dict[str, str], level: int) -> Program:
    said = {name: WORDS.get(name, {}).get(slot, slot) for name, slot in slots.items()}
    return Program(
        name="work",
        params=tuple(
            Param(name=slots[one], kind=ValueKind.INT, low=low, high=high)
            for one, (low, high) in _DOMAIN.items()
        ),
        returns=ValueKind.INT if slots["gather"] == "sum" else ValueKind.INTS,
        doc=(_DOC + (_HARDER[1] if level > 2 else "") + ".").format(**said),
        body=(_code(slots, level),),
        family="mend." + " ".join(slots[name] for name in WORDS),
    )


def _mistake(kind: str, slots: dict[str, str], rng: random.Random) -> dict[str, str]:
    slot = rng.choice(KINDS[kind])
    others = {
        "constant": [str(k) for k in range(2, 10)], "name": [slots[one] for one in KINDS["name"]],
    }.get(kind) or list(WORDS[slot])  # fmt: skip
    return slots | {slot: rng.choice([one for one in others if one != slots[slot]])}


def make_mend(rng: random.Random, split: Split, level: int) -> Made:
    """Read the file, mend its one wrong line, run the check, submit."""
    kind = rng.choice(list(KINDS))
    while True:
        slots = {name: rng.choice(list(words)) for name, words in WORDS.items()}
        slots |= dict(zip(_DOMAIN, rng.sample("abc", 3), strict=True))
        slots |= {"k": str(rng.randint(2, 9)), "k2": str(rng.randint(2, 4))}
        program = _program(slots, level)
        if split_of(program.family) is not split:
            continue
        text, right = program.source(), program.body_lines[0]
        wrong = "    " + _code(_mistake(kind, slots, rng), level)
        cases = _cases(program, rng)
        broken = text.replace(right, wrong)
        mistaken = compile_function(broken, program.name)
        fails = [outcome(mistaken, one.args) != ("value", one.expected) for one in cases]
        # and a result that is empty throughout would let other mistakes pass
        if any(fails[:SHOWN]) and any(fails[SHOWN:]) and sum(bool(one.expected) for one in cases) > 5:
            break
    shown = [(one.args, one.expected) for one in cases[:SHOWN]]
    return made_of(
        program,
        prompt=f"Mend {SOLUTION}.",
        files={SOLUTION: broken, TEST: _TEST.format(cases=shown)},
        artifacts=(SOLUTION,),
        tools=REPAIR_TOOLS,
        check=CHECK,
        hidden=CaseChecks(entry_point=program.name, cases=cases[SHOWN:]),
        limits=Limits(max_turns=6, max_tokens=320),
        oracle=(
            call("read_file", path=SOLUTION),
            call("edit_file", path=SOLUTION, line=3, new=right),
            call("shell", command=CHECK),
            call("submit"),
        ),
    )


def _cases(program: Program, rng: random.Random) -> tuple[Case, ...]:
    function, drawn = compile_function(program.source(), program.name), dict[tuple[int, ...], list[int]]()
    while len(drawn) < SHOWN + CASES:
        args = sample_args(program, rng)
        drawn[tuple(args)] = args
    return tuple(Case(args=args, expected=outcome(function, args)[1]) for args in drawn.values())
