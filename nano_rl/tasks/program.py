"""Seeded generator of small typed Python functions whose docstring pins what they compute.

A program is a composition of parts (a reduction of a filter of a map, say); its *family* is that
composition without the constants, and splits never share one.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import Any

from nano_shared.hashing import content_hash

VERSION = "functions-1"


@dataclass(frozen=True, slots=False, kw_only=True)
class Program:
    """One function: source, meaning, and how to sample its inputs."""

    name: str
    parameters: tuple[tuple[str, str], ...]
    """name and type, a type being int, str or list[int]"""
    returns: str
    doc: str
    body: tuple[str, ...]
    """lines of the body, unindented relative to it"""
    family: str

    @property
    def header(self) -> str:
        arguments = ", ".join(f"{name}: {kind}" for name, kind in self.parameters)
        return f"def {self.name}({arguments}) -> {self.returns}:"

    def source(self, body: tuple[str, ...] | None = None) -> str:
        lines = [self.header, f'    """{self.doc}"""', *(f"    {line}" for line in body or self.body)]
        return "\n".join(lines) + "\n"

    @cached_property
    def hash(self) -> str:
        """Hash of the normalised AST: names numbered in order of appearance, docstring dropped."""
        return content_hash(normalised(self.source()))

    def sample_arguments(self, random: Random, *, wide: bool = False) -> list[Any]:
        return [_SAMPLERS[kind](random, 3 if wide else 1) for _, kind in self.parameters]


def compiled(source: str, name: str) -> Callable[..., Any]:
    """The function that a program's source defines. For programs of our own grammar alone."""
    namespace: dict[str, Any] = {}
    exec(compile(source, "<program>", "exec"), namespace)
    function: Callable[..., Any] = namespace[name]
    return function


def normalised(source: str) -> str:
    """The AST as text with every name of the program replaced by its order of appearance."""
    tree = ast.parse(source)
    function = tree.body[0]
    assert isinstance(function, ast.FunctionDef)
    bound = {function.name} | {a.arg for a in function.args.args}
    bound |= {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    order: dict[str, str] = {}

    class Rename(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.Name:
            if node.id in bound:
                node.id = order.setdefault(node.id, f"v{len(order)}")
            return node

        def visit_arg(self, node: ast.arg) -> ast.arg:
            node.arg, node.annotation = order.setdefault(node.arg, f"v{len(order)}"), None
            return node

    function.name, function.returns = "f", None
    if isinstance(function.body[0], ast.Expr) and isinstance(function.body[0].value, ast.Constant):
        function.body.pop(0)
    return ast.dump(Rename().visit(tree))


# ------------------------------------------------------------------------------------------- inputs

_WORDS = [
    "apple",
    "river",
    "stone",
    "cloud",
    "green",
    "tiger",
    "paper",
    "light",
    "music",
    "ocean",
    "bread",
    "chair",
    "plant",
    "sugar",
    "train",
]


def _sample_int(random: Random, scale: int) -> int:
    return random.randint(-9 * scale, 12 * scale)


def _sample_list(random: Random, scale: int) -> list[int]:
    return [random.randint(-6 * scale, 12 * scale) for _ in range(random.randint(2, 4 + 2 * scale))]


def _sample_text(random: Random, scale: int) -> str:
    words = random.sample(_WORDS, random.randint(1, 1 + scale))
    return random.choice([" ".join, "-".join, "".join])(
        [random.choice([w, w.upper(), w.title()]) for w in words]
    )


_SAMPLERS: dict[str, Callable[[Random, int], Any]] = {
    "int": _sample_int,
    "list[int]": _sample_list,
    "str": _sample_text,
}


# ------------------------------------------------------------------------------------------ grammar
# Each part is (key, code, phrase, name): code has {x} for the value it works on and {k} for a constant.

Part = tuple[str, str, str, str]

_LISTS = ["values", "numbers", "items", "xs", "data", "scores"]
_ELEMENTS = {
    "values": "value",
    "numbers": "number",
    "items": "item",
    "xs": "x",
    "data": "point",
    "scores": "score",
}

_MAPS = [
    ("id", "{x}", "{e}", ""),
    ("mul", "{x} * {k}", "{e} times {k}", "times_{k}"),
    ("add", "{x} + {k}", "{e} plus {k}", "plus_{k}"),
    ("sub", "{x} - {k}", "{e} minus {k}", "minus_{k}"),
    ("square", "{x} * {x}", "{e} squared", "squares"),
    ("abs", "abs({x})", "the absolute value of {e}", "absolutes"),
    ("mod", "{x} % {k}", "the remainder of {e} divided by {k}", "mod_{k}"),
    ("neg", "-{x}", "the negative of {e}", "negatives"),
    ("half", "{x} // {k}", "{e} divided by {k}, rounded down", "over_{k}"),
]
_FILTERS = [
    ("all", "", "", ""),
    ("gt", "{x} > {k}", "greater than {k}", "above_{k}"),
    ("lt", "{x} < {k}", "less than {k}", "below_{k}"),
    ("ge", "{x} >= {k}", "at least {k}", "from_{k}"),
    ("le", "{x} <= {k}", "at most {k}", "up_to_{k}"),
    ("div", "{x} % {k} == 0", "divisible by {k}", "multiples_of_{k}"),
    ("notdiv", "{x} % {k} != 0", "not divisible by {k}", "non_multiples_of_{k}"),
    ("ne", "{x} != {k}", "not equal to {k}", "without_{k}"),
]
_REDUCERS = [
    ("sum", "sum({g})", "sum", "int"),
    ("max", "max(({g}), default=0)", "largest", "int"),
    ("min", "min(({g}), default=0)", "smallest", "int"),
    ("list", "[{g}]", "list", "list[int]"),
    ("sorted", "sorted({g})", "sorted list", "list[int]"),
    ("desc", "sorted(({g}), reverse=True)", "list, sorted from high to low,", "list[int]"),
    ("distinct", "len(set({g}))", "number of distinct values", "int"),
]


def _each(mapped: Part, kept: Part, element: str, k: int, bound: int) -> str:
    condition = f" {kept[2].format(k=bound)}" if kept[2] else ""
    if mapped[0] == "id":
        return f"each {element}{condition}"
    return f"{mapped[2].format(e=element, k=k)} for each {element}{condition}"


def _comprehension(random: Random) -> Program:
    mapped, kept, reduced = random.choice(_MAPS), random.choice(_FILTERS), random.choice(_REDUCERS)
    xs = random.choice(_LISTS)
    x = random.choice(["x", "n", "v"]) if xs != "xs" else "x"
    k, m = random.randint(2, 9), random.randint(1, 6)
    generator = f"{mapped[1].format(x=x, k=k)} for {x} in {xs}"
    if kept[1]:
        generator += f" if {kept[1].format(x=x, k=m + 1)}"
    element = _ELEMENTS[xs]
    end = "" if reduced[0] not in ("max", "min") else ", or 0 if there is none"
    verb = random.choice(["Return", "Compute", "Give"])
    doc = f"{verb} the {reduced[2]} of {_each(mapped, kept, element, k, m + 1)}{end}."
    name = "_".join(filter(None, [reduced[0], mapped[3].format(k=k), kept[3].format(k=m + 1)]))
    return Program(
        name=name if "_" in name else f"{name}_of_{xs}",
        parameters=((xs, "list[int]"),),
        returns=reduced[3],
        doc=doc,
        body=(f"return {reduced[1].format(g=generator)}",),
        family=f"comprehension:{reduced[0]}:{kept[0]}:{mapped[0]}",
    )


_ACCUMULATE = [
    ("sum", "total = 0", "total += {m}", "total", "sum"),
    ("product", "result = 1", "result *= {m}", "result", "product"),
    ("count", "count = 0", "count += 1", "count", "number"),
    ("collect", "found = []", "found.append({m})", "found", "list"),
]


def _loop(random: Random) -> Program:
    grown, mapped = random.choice(_ACCUMULATE), random.choice(_MAPS)
    kept = random.choice(_FILTERS[1:])
    xs = random.choice(_LISTS)
    x = _ELEMENTS[xs]
    k, m = random.randint(2, 5), random.randint(1, 7)
    step = grown[2].format(m=mapped[1].format(x=x, k=k))
    verb = random.choice(["Return", "Compute", "Give"])
    if grown[0] == "count":
        doc = f"{verb} the number of {xs} that are {kept[2].format(k=m + 1)}."
    else:
        doc = f"{verb} the {grown[4]} of {_each(mapped, kept, x, k, m + 1)}."
    mapped_key = mapped[0] if grown[0] != "count" else "-"
    mapped_name = mapped[3].format(k=k) if grown[0] != "count" else ""
    name = "_".join(filter(None, [grown[0], mapped_name, kept[3].format(k=m + 1)]))
    return Program(
        name=name,
        parameters=((xs, "list[int]"),),
        returns="list[int]" if grown[0] == "collect" else "int",
        doc=doc,
        body=(
            grown[1],
            f"for {x} in {xs}:",
            f"    if {kept[1].format(x=x, k=m + 1)}:",
            f"        {step}",
            f"return {grown[3]}",
        ),
        family=f"loop:{grown[0]}:{kept[0]}:{mapped_key}",
    )


_BINARY = [
    ("add", "{a} + {b}", "{a} plus {b}", "plus"),
    ("sub", "{a} - {b}", "{a} minus {b}", "minus"),
    ("mul", "{a} * {b}", "{a} times {b}", "times"),
    ("max", "max({a}, {b})", "the larger of {a} and {b}", "max"),
    ("min", "min({a}, {b})", "the smaller of {a} and {b}", "min"),
    ("absdiff", "abs({a} - {b})", "the distance between {a} and {b}", "distance"),
]
_AFTER = [
    ("none", "{v}", "{p}", ""),
    ("add", "{v} + {k}", "{p}, plus {k}", "plus_{k}"),
    ("sub", "{v} - {k}", "{p}, minus {k}", "minus_{k}"),
    ("mul", "{v} * {k}", "{k} times the result of {p}", "times_{k}"),
    ("mod", "{v} % {k}", "the remainder of {p}, divided by {k}", "mod_{k}"),
    ("addc", "{v} + {c}", "{p}, plus {c}", "plus_third"),
    ("subc", "{v} - {c}", "{p}, minus {c}", "minus_third"),
    ("mulc", "{v} * {c}", "{c} times the result of {p}", "times_third"),
    ("abs", "abs({v})", "the absolute value of {p}", "absolute"),
]
_TRIPLES = [("a", "b", "c"), ("x", "y", "z"), ("left", "right", "extra"), ("first", "second", "third"),
            ("width", "height", "margin"), ("price", "cost", "fee"), ("start", "stop", "step")]  # fmt: skip


def _follow(step: Part, value: str, k: int, c: str) -> str:
    """Apply one more step to an expression, in brackets where the operator binds tighter."""
    tight = step[0] in ("mul", "mod", "mulc")
    return step[1].format(v=_atom(value) if tight else value, k=k, c=c)


def _arithmetic(random: Random) -> Program:
    inner, after, last = random.choice(_BINARY), random.choice(_AFTER), random.choice(_AFTER[:5])
    a, b, c = random.choice(_TRIPLES)
    k, j = random.randint(2, 9), random.randint(2, 9)
    value, phrase = inner[1].format(a=a, b=b), inner[2].format(a=a, b=b)
    value, phrase = _follow(after, value, k, c), after[2].format(p=phrase, k=k, c=c)
    if last[0] != "none" and last[0] != after[0]:
        value, phrase = _follow(last, value, j, c), last[2].format(p=phrase, k=j)
    else:
        last = _AFTER[0]
    names = [a, b, c] if "{c}" in after[1] else [a, b]
    name = "_".join(filter(None, [inner[3], after[3].format(k=k), last[3].format(k=j)]))
    return Program(
        name=name if "_" in name else f"{a}_{name}_{b}",
        parameters=tuple((n, "int") for n in names),
        returns="int",
        doc=f"{random.choice(['Return', 'Compute', 'Give'])} {phrase}.",
        body=(f"return {value}",),
        family=f"arithmetic:{inner[0]}:{after[0]}:{last[0]}",
    )


_COMPARE = [("gt", ">", "is greater than"), ("lt", "<", "is less than"), ("ge", ">=", "is at least"),
            ("le", "<=", "is at most"), ("eq", "==", "equals")]  # fmt: skip
_BRANCH = [
    ("id", "{a}", "{a}"),
    ("add", "{a} + {k}", "{a} plus {k}"),
    ("sub", "{a} - {k}", "{a} minus {k}"),
    ("mul", "{a} * {k}", "{a} times {k}"),
    ("const", "{k}", "{k}"),
    ("neg", "-{a}", "the negative of {a}"),
    ("sumab", "{a} + {b}", "{a} plus {b}"),
    ("diffab", "{a} - {b}", "{a} minus {b}"),
]


def _conditional(random: Random) -> Program:
    compare, yes, no = random.choice(_COMPARE), random.choice(_BRANCH), random.choice(_BRANCH)
    while no[0] == yes[0]:
        no = random.choice(_BRANCH)
    a, b, _ = random.choice(_TRIPLES)
    against_b = random.random() < 0.5
    k, j, m = random.randint(2, 9), random.randint(2, 9), random.randint(0, 8)
    other = b if against_b else str(m)
    two = against_b or "{b}" in yes[1] + no[1]
    return Program(
        name=random.choice(["adjust", "choose", "convert", "rate", "limit", "pick"]) + f"_{a}",
        parameters=((a, "int"), (b, "int")) if two else ((a, "int"),),
        returns="int",
        doc=(
            f"Return {yes[2].format(a=a, b=b, k=k)} if {a} {compare[2]} {other}, "
            f"otherwise {no[2].format(a=a, b=b, k=j)}."
        ),
        body=(
            f"if {a} {compare[1]} {other}:",
            f"    return {yes[1].format(a=a, b=b, k=k)}",
            f"return {no[1].format(a=a, b=b, k=j)}",
        ),
        family=f"conditional:{compare[0]}:{'b' if against_b else 'k'}:{yes[0]}:{no[0]}",
    )


_TEXT_STEPS = [
    ("upper", "{t}.upper()", "in upper case", "upper"),
    ("lower", "{t}.lower()", "in lower case", "lower"),
    ("reverse", "{t}[::-1]", "reversed", "reversed"),
    ("head", "{t}[:{k}]", "cut to its first {k} characters", "first_{k}"),
    ("tail", "{t}[-{k}:]", "cut to its last {k} characters", "last_{k}"),
    ("skip", "{t}[{k}:]", "without its first {k} characters", "skip_{k}"),
    ("drop", "{t}[:-{k}]", "without its last {k} characters", "drop_{k}"),
    ("every", "{t}[::{k}]", "keeping every character number {k} from the first", "every_{k}"),
    ("replace", '{t}.replace("{p}", "{q}")', 'with every "{p}" replaced by "{q}"', "swap_{p}_{q}"),
    ("prefix", '"{w}" + {t}', 'with "{w}" put in front', "with_prefix"),
    ("suffix", '{t} + "{w}"', 'with "{w}" put at the end', "with_suffix"),
    ("repeat", "{t} * {k}", "repeated {k} times", "repeat_{k}"),
]
_TEXT_ENDS = [
    ("text", "{t}", "Return {n} {s}.", "str", ""),
    ("length", "len({t})", "Return the length of {n} {s}.", "int", "length"),
    ("count", '{t}.count("{p}")', 'Return how often "{p}" occurs in {n} {s}.', "int", "count_{p}"),
]


def _textual(random: Random) -> Program:
    first, second = random.choice(_TEXT_STEPS), random.choice(_TEXT_STEPS)
    end = random.choice([_TEXT_ENDS[0], _TEXT_ENDS[0], *_TEXT_ENDS[1:]])
    text = random.choice(["text", "word", "name", "line", "label"])
    value, said, names, keys = text, [], [], []
    for step in [first, second] if first[0] != second[0] else [first]:
        values = {
            "k": random.randint(2, 4), "p": random.choice("aeiour"), "q": random.choice("xyz_"),
            "w": random.choice(["no", "re", "id-", "my ", "!"]),
        }  # fmt: skip
        value = step[1].format(t=_atom(value), **values)
        said.append(step[2].format(**values))
        names.append(step[3].format(**values).replace("_ ", "_"))
        keys.append(step[0])
    letter = random.choice("aeiour")
    inner = _atom(value) if end[0] == "count" else value
    return Program(
        name="_".join(filter(None, [end[4].format(p=letter), *names[:2]])).replace("__", "_") or "same",
        parameters=((text, "str"),),
        returns=end[3],
        doc=end[2].format(n=text, s=", then ".join(said), p=letter),
        body=(f"return {end[1].format(t=inner, p=letter)}",),
        family=f"text:{end[0]}:{':'.join(keys)}",
    )


def _atom(expression: str) -> str:
    """The expression in brackets where an operator beside it would tear it apart."""
    return f"({expression})" if isinstance(ast.parse(expression, mode="eval").body, ast.BinOp) else expression


_LIST_VALUES = [
    ("sum", "sum({xs})", "the sum of {xs}", "sum"),
    ("max", "max({xs})", "the largest of {xs}", "largest"),
    ("min", "min({xs})", "the smallest of {xs}", "smallest"),
    ("len", "len({xs})", "the number of {xs}", "size"),
    ("first", "{xs}[0]", "the first of {xs}", "first"),
    ("last", "{xs}[-1]", "the last of {xs}", "last"),
    ("second", "{xs}[1]", "the second of {xs}", "second"),
    ("median", "sorted({xs})[len({xs}) // 2]", "the middle of {xs} when sorted", "middle"),
]
_COMBINE = [
    ("add", "{a} + {b}", "{p} plus {q}", "plus"),
    ("sub", "{a} - {b}", "{p} minus {q}", "minus"),
    ("mul", "{a} * {b}", "{p} times {q}", "times"),
]


def _statistic(random: Random) -> Program:
    left, right, combine = random.choice(_LIST_VALUES), random.choice(_LIST_VALUES), random.choice(_COMBINE)
    while right[0] == left[0]:
        right = random.choice(_LIST_VALUES)
    after = random.choice([_AFTER[0], _AFTER[0], _AFTER[1], _AFTER[2]])
    xs, k = random.choice(_LISTS), random.randint(2, 9)
    value = combine[1].format(a=left[1].format(xs=xs), b=right[1].format(xs=xs))
    phrase = combine[2].format(p=left[2].format(xs=xs), q=right[2].format(xs=xs))
    value, phrase = after[1].format(v=value, k=k), after[2].format(p=phrase, k=k)
    return Program(
        name="_".join(filter(None, [left[3], combine[3], right[3], after[3].format(k=k)])),
        parameters=((xs, "list[int]"),),
        returns="int",
        doc=f"{random.choice(['Return', 'Compute', 'Give'])} {phrase}.",
        body=(f"return {value}",),
        family=f"statistic:{left[0]}:{combine[0]}:{right[0]}:{after[0]}",
    )


KINDS: dict[str, Callable[[Random], Program]] = {
    "comprehension": _comprehension,
    "loop": _loop,
    "arithmetic": _arithmetic,
    "conditional": _conditional,
    "text": _textual,
    "statistic": _statistic,
}


def make_program(random: Random, kinds: tuple[str, ...] = tuple(KINDS)) -> Program:
    """A program that is neither constant nor the identity on sampled inputs."""
    while True:
        program = KINDS[random.choice(kinds)](random)
        if _worth_a_task(program, random):
            return program


def _worth_a_task(program: Program, random: Random) -> bool:
    function = compiled(program.source(), program.name)
    inputs = [program.sample_arguments(random) for _ in range(12)]
    outputs = [function(*arguments) for arguments in inputs]
    distinct = {repr(output) for output in outputs}
    return len(distinct) >= 3 and any(
        output != arguments[0] for arguments, output in zip(inputs, outputs, strict=True)
    )
