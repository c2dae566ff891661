"""Functions over strings and lists of strings: chains of string operations, and reduce ∘ map ∘ filter."""

from __future__ import annotations

import random
from collections import namedtuple

from nano_suites.functions.program import Param, Program, ValueKind

TEXT_NAMES = ("text", "s", "line", "phrase", "message", "name")
WORDS_NAMES = ("words", "names", "items", "parts", "strings", "labels")


TextStep = namedtuple("TextStep", "key code order each name")
"""one change of a text `{t}`: `order` is an imperative with `{it}`, `each` follows "each\""""
STEPS = (
    TextStep("upper", "{t}.upper()", "convert {it} to upper case", "converted to upper case", "upper"),
    TextStep("lower", "{t}.lower()", "convert {it} to lower case", "converted to lower case", "lower"),
    TextStep("strip", "{t}.strip()", "strip whitespace from both ends of {it}", "stripped of outer whitespace", "strip"),
    TextStep("capitalize", "{t}.capitalize()", "capitalize {it}", "capitalized", "capitalize"),
    TextStep("swapcase", "{t}.swapcase()", "swap the case of every letter of {it}", "with its case swapped", "swapcase"),
    TextStep("title", "{t}.title()", "convert {it} to title case", "converted to title case", "title"),
    TextStep("reverse", "{t}[::-1]", "reverse {it}", "reversed", "reverse"),
    TextStep("head", "{t}[:{k}]", "keep the first {k} characters of {it}", "cut to its first {k} characters", "head"),
    TextStep("tail", "{t}[-{k}:]", "keep the last {k} characters of {it}", "cut to its last {k} characters", "tail"),
    TextStep("drop", "{t}[{k}:]", "drop the first {k} characters of {it}", "without its first {k} characters", "drop"),
    TextStep("chop", "{t}[:-{k}]", "drop the last {k} characters of {it}", "without its last {k} characters", "chop"),
    TextStep("skip", "{t}[::{k2}]", "keep the characters of {it} at positions 0, {k2}, {kk} and so on",
         "cut to its characters at positions 0, {k2}, {kk} and so on", "skip"),
    TextStep("repeat", "{t} * {k2}", "repeat {it} {k2} times", "repeated {k2} times", "repeat"),
    TextStep("replace", "{t}.replace('{c}', '{d}')", "replace every '{c}' in {it} by '{d}'",
         "with every '{c}' replaced by '{d}'", "replace"),
    TextStep("remove", "{t}.replace('{c}', '')", "remove every '{c}' from {it}", "with every '{c}' removed", "remove"),
    TextStep("suffix", "{t} + '{m}'", "append '{m}' to {it}", "followed by '{m}'", "suffix"),
    TextStep("prefix", "'{m}' + {t}", "put '{m}' in front of {it}", "preceded by '{m}'", "prefix"),
    TextStep("zfill", "{t}.zfill({k8})", "pad {it} with zeros on the left to a width of {k8}",
         "padded with zeros on the left to a width of {k8}", "pad"),
    TextStep("ljust", "{t}.ljust({k8}, '.')", "pad {it} with dots on the right to a width of {k8}",
         "padded with dots on the right to a width of {k8}", "pad_right"),
    TextStep("mirror", "{t} + {t}[::-1]", "append the reverse of {it} to {it}", "followed by its own reverse", "mirror"),
)  # fmt: skip
_OPEN = ("repeat", "suffix", "prefix", "mirror")
"""steps whose code is an operator and needs parentheses inside another step"""


def _fill(rng: random.Random) -> dict[str, str]:
    k2 = rng.choice((2, 3))
    c, d = rng.sample("aeionrst", 2)
    return {
        "k": str(rng.randint(1, 4)), "k2": str(k2), "kk": str(2 * k2), "k8": str(rng.randint(5, 9)),
        "c": c, "d": d, "m": rng.choice("!?*-#"),
    }  # fmt: skip


TextEnding = namedtuple("TextEnding", "key code order name returns")
"""what a chain of steps finally returns: `order` is an imperative"""
ENDINGS = (
    TextEnding("len", "len({t})", "return the length of {it}", "length", ValueKind.INT),
    TextEnding("count", "{t}.count('{c}')", "count the '{c}' characters in {it}", "count", ValueKind.INT),
    TextEnding("find", "{t}.find('{c}')", "return the position of the first '{c}' in {it} (-1 if absent)", "find", ValueKind.INT),
    TextEnding("rfind", "{t}.rfind('{c}')", "return the position of the last '{c}' in {it} (-1 if absent)", "rfind", ValueKind.INT),
    TextEnding("starts", "{t}.startswith('{c}')", "tell whether {it} starts with '{c}'", "starts", ValueKind.BOOL),
    TextEnding("ends", "{t}.endswith('{c}')", "tell whether {it} ends with '{c}'", "ends", ValueKind.BOOL),
    TextEnding("contains", "'{c}' in {t}", "tell whether {it} contains '{c}'", "contains", ValueKind.BOOL),
    TextEnding("lacks", "'{c}' not in {t}", "tell whether {it} does not contain '{c}'", "lacks", ValueKind.BOOL),
    TextEnding("palindrome", "{t} == {t}[::-1]", "tell whether {it} reads the same backwards", "palindrome", ValueKind.BOOL),
    TextEnding("longer", "len({t}) > {k8}", "tell whether {it} has more than {k8} characters", "is_longer", ValueKind.BOOL),
    TextEnding("shorter", "len({t}) < {k8}", "tell whether {it} has fewer than {k8} characters", "is_shorter", ValueKind.BOOL),
    TextEnding("words", "len({t}.split())", "count the words of {it}", "word_count", ValueKind.INT),
    TextEnding("split", "{t}.split()", "split {it} into words at whitespace", "split", ValueKind.STRS),
    TextEnding("distinct", "len(set({t}))", "count the distinct characters of {it}", "distinct_chars", ValueKind.INT),
    TextEnding("sorted", "''.join(sorted({t}))", "sort the characters of {it}", "sorted_chars", ValueKind.STR),
    TextEnding("isupper", "{t}.isupper()", "tell whether {it} is in upper case (as str.isupper does)", "is_upper", ValueKind.BOOL),
)  # fmt: skip


def _sentence(orders: list[str], subject: str) -> str:
    parts = [orders[0].replace("{it}", subject), *(o.replace("{it}", "it") for o in orders[1:])]
    text = parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + ", then " + parts[-1]
    return text[0].upper() + text[1:] + "."


def draw_chain(rng: random.Random) -> Program:
    """One to three string steps and perhaps an ending, as one expression or as one assignment a step."""
    name = rng.choice(TEXT_NAMES)
    steps = rng.sample(STEPS, rng.choice((1, 2, 2, 3)))
    ending = rng.choice(ENDINGS) if rng.random() < 0.45 else None
    if ending and rng.random() < 0.4:
        steps = steps[: rng.choice((0, 1))]
    spoken = len(steps) + (1 if ending else 0) > 1 and rng.random() < 0.4
    code, orders, lines, names, open_before = name, [], [], [], False
    for step in (*steps, *([ending] if ending else [])):
        fill = _fill(rng)
        inner = f"({code})" if open_before else code
        doubled = step.code.count("{t}") > 1 and not inner.isidentifier()
        if (spoken or doubled) and not code.isidentifier():
            lines.append(f"{name} = {code}")
            inner = name
        code = step.code.format(t=inner, **fill)
        orders.append(step.order.format(it="{it}", **fill))
        names.append(step.name)
        open_before = step.key in _OPEN
    return Program(
        name="_".join((*names, rng.choice(("text", "string"))) if len(names) == 1 else names),
        params=(Param(name=name, kind=ValueKind.STR),), returns=ending.returns if ending else ValueKind.STR,
        doc=_sentence(orders, name), body=(*lines, f"return {code}"),
        family="text." + ".".join([*(s.key for s in steps), *([ending.key] if ending else [])]),
        hints=rng.random() < 0.3,
    )  # fmt: skip


TextFilter = namedtuple("TextFilter", "key code words name")
"""a filter of texts `{t}`"""
CHOICES = (
    TextFilter("longer", "len({t}) > {k}", "longer than {k} characters", "long"),
    TextFilter("shorter", "len({t}) < {k}", "shorter than {k} characters", "short"),
    TextFilter("exactly", "len({t}) == {k}", "of exactly {k} characters", "sized"),
    TextFilter("at_least", "len({t}) >= {k}", "of at least {k} characters", "at_least"),
    TextFilter("at_most", "len({t}) <= {k}", "of at most {k} characters", "at_most"),
    TextFilter("starts", "{t}.startswith('{c}')", "that start with '{c}'", "starting"),
    TextFilter("ends", "{t}.endswith('{c}')", "that end with '{c}'", "ending"),
    TextFilter("contains", "'{c}' in {t}", "that contain '{c}'", "containing"),
    TextFilter("lacks", "'{c}' not in {t}", "that do not contain '{c}'", "without"),
    TextFilter("palindrome", "{t} == {t}[::-1]", "that read the same backwards", "palindromic"),
    TextFilter("even", "len({t}) % 2 == 0", "whose length is even", "even_length"),
    TextFilter("isupper", "{t}.isupper()", "that are in upper case (as str.isupper tells)", "upper"),
)


Gather = namedtuple("Gather", "key code words name returns")
"""a reduction of texts over `{g}` (a clause or an iterable) or `{l}` (a list)"""
GATHERS = (
    Gather("list", "[{g}]", "Return a list of {m}.", "list", ValueKind.STRS),
    Gather("sorted", "sorted({g})", "Return a list of {m}; sorted.", "sorted", ValueKind.STRS),
    Gather("descending", "sorted({l}, reverse=True)", "Return a list of {m}; sorted in descending order.",
           "reverse_sorted", ValueKind.STRS),
    Gather("by_length", "sorted({l}, key=len)", "Return a list of {m}; sorted by length, ties in the original order.",
           "by_length", ValueKind.STRS),
    Gather("join", "'{sep}'.join({g})", "Join {m}; put '{sep}' between them.", "join", ValueKind.STR),
    Gather("join_sorted", "'{sep}'.join(sorted({g}))", "Sort {m}; then join them with '{sep}' between.",
           "join_sorted", ValueKind.STR),
    Gather("count", "len({l})", "Count {m}.", "count", ValueKind.INT),
    Gather("longest", "max({l}, key=len, default='')",
           "Return the longest of {m}; the first one on a tie, '' if there are none.", "longest", ValueKind.STR),
    Gather("shortest", "min({l}, key=len, default='')",
           "Return the shortest of {m}; the first one on a tie, '' if there are none.", "shortest", ValueKind.STR),
    Gather("first_sorted", "min({l}, default='')",
           "Return the alphabetically first of {m}; '' if there are none.", "first_by_name", ValueKind.STR),
    Gather("distinct", "len(set({g}))", "Count the distinct texts among {m}.", "count_distinct", ValueKind.INT),
    Gather("unique", "sorted(set({g}))", "Return a sorted list of {m} without repetition.", "unique", ValueKind.STRS),
    Gather("lengths", "[len({e}) {f}]", "List the lengths of {m}.", "lengths", ValueKind.INTS),
    Gather("total", "sum(len({e}) {f})", "Add up the lengths of {m}.", "total_length", ValueKind.INT),
    Gather("initials", "''.join(({e})[:1] {f})", "Join the first characters of {m}.", "initials", ValueKind.STR),
    Gather("reverse", "{l}[::-1]", "Return a list of {m}; in reverse order.", "reverse", ValueKind.STRS),
    Gather("last", "({l} or [''])[-1]", "Return the last of {m}; '' if there are none.", "last", ValueKind.STR),
    Gather("first", "({l} or [''])[0]", "Return the first of {m}; '' if there are none.", "first", ValueKind.STR),
)  # fmt: skip


def draw_words(rng: random.Random) -> Program:
    """reduce ∘ map ∘ filter over a list of strings or over the words of a text."""
    split = rng.random() < 0.4
    if split:
        param = Param(name=rng.choice(TEXT_NAMES), kind=ValueKind.STR)
        iterable, key = f"{param.name}.split()", "split"
        words = f"the words of {param.name}"
    else:
        param = Param(name=rng.choice(WORDS_NAMES), kind=ValueKind.STRS)
        iterable, key = param.name, "list"
        words = f"the strings in {param.name}"
    gather = rng.choice(GATHERS)
    element, condition, name = "w", "", ""
    must = gather.key == "count"
    if must or rng.random() < 0.55:
        choice = rng.choice(CHOICES)
        fill = {"k": str(rng.randint(2, 5)), "c": rng.choice("aeilnorstb")}
        condition = f" if {choice.code.format(t='w', **fill)}"
        words += f" {choice.words.format(**fill)}"
        key, name = f"{key}.{choice.key}", f"_{choice.name}"
    if not must and (rng.random() < 0.5 or (gather.key == "list" and not condition)):
        step = rng.choice([s for s in STEPS if s.key not in ("strip", "title")])
        fill = _fill(rng)
        element = step.code.format(t="w", **fill)
        words += f", each {step.each.format(**fill)}"
        key, name = f"{key}.{step.key}", f"{name}_{step.name}"
    plain = element == "w" and not condition
    clause = f"{element} for w in {iterable}{condition}"
    code = gather.code.format(
        g=iterable if plain and gather.key != "list" else clause,
        l=iterable if plain else f"[{clause}]", e=element, f=f"for w in {iterable}{condition}", sep=rng.choice(", -/+"),
    )  # fmt: skip
    if gather.key == "initials" and element == "w":
        code = code.replace("(w)", "w")
    sep = code[1] if code.startswith("'") and gather.key.startswith("join") else ""
    return Program(
        name=f"{gather.name}{name}" if name else f"{gather.name}_{rng.choice(('words', 'strings'))}",
        params=(param,), returns=gather.returns, doc=gather.words.format(m=words, sep=sep),
        body=_styled(code, clause, gather, rng), family=f"words.{gather.key}({key})", hints=rng.random() < 0.3,
    )  # fmt: skip


def _styled(code: str, clause: str, gather: Gather, rng: random.Random) -> tuple[str, ...]:
    """One expression, or the list first and the reduction on the next line."""
    listed = f"[{clause}]"
    if gather.key == "list" or listed not in code or rng.random() < 0.5:
        return (f"return {code}",)
    name = rng.choice(("kept", "found", "chosen"))
    return (f"{name} = {listed}", f"return {code.replace(listed, name)}")


CHAR_CHOICES = (
    TextFilter("vowel", "{t} in 'aeiou'", "that are vowels (one of aeiou)", "vowels"),
    TextFilter("not_vowel", "{t} not in 'aeiou'", "that are not vowels (one of aeiou)", "non_vowels"),
    TextFilter("digit", "{t}.isdigit()", "that are digits", "digits"),
    TextFilter("not_digit", "not {t}.isdigit()", "that are not digits", "non_digits"),
    TextFilter("letter", "{t}.isalpha()", "that are letters", "letters"),
    TextFilter("upper", "{t}.isupper()", "that are upper case letters", "capitals"),
    TextFilter("lower", "{t}.islower()", "that are lower case letters", "small_letters"),
    TextFilter("not_space", "{t} != ' '", "that are not spaces", "non_spaces"),
    TextFilter("after", "{t} > '{c}'", "that come after '{c}'", "after"),
    TextFilter("before", "{t} < '{c}'", "that come before '{c}'", "before"),
    TextFilter("repeated", "{p}.count({t}) > 1", "that occur more than once in {p}", "repeated"),
    TextFilter("single", "{p}.count({t}) == 1", "that occur exactly once in {p}", "single"),
)
CHAR_MAPS = (
    ("", "{t}", "", ""), ("", "{t}", "", ""), ("upper", "{t}.upper()", ", each in upper case", "_upper"),
    ("double", "{t} * 2", ", each doubled", "_doubled"),
    ("dash", "{t} + '-'", ", each followed by '-'", "_dashed"),
    ("swap", "{t}.swapcase()", ", each with its case swapped", "_swapped"),
)  # fmt: skip
CHAR_GATHERS = (
    ("join", "''.join({g})", "Join {m}.", "keep", ValueKind.STR),
    ("list", "[{g}]", "Return a list of {m}.", "list", ValueKind.STRS),
    ("count", "len([{g}])", "Count {m}.", "count", ValueKind.INT),
    ("count", "sum(1 {f})", "Count {m}.", "count", ValueKind.INT),
    ("sorted", "''.join(sorted({g}))", "Sort {m}; then join them.", "sort", ValueKind.STR),
    ("distinct", "len(set({g}))", "Count the distinct texts among {m}.", "distinct", ValueKind.INT),
    ("last", "([{g}] or [''])[-1]", "Return the last of {m}; '' if there are none.", "last", ValueKind.STR),
    ("first", "next(({g}), '')", "Return the first of {m}; '' if there are none.", "first", ValueKind.STR),
    ("reverse", "''.join([{g}][::-1])", "Join, from last to first, {m}.", "reverse", ValueKind.STR),
    ("positions", "[i for i, {t} in enumerate({p}){c}]", "List the positions of {m}.", "positions", ValueKind.INTS),
    ("replace", "''.join('{h}'{c} else {t} for {t} in {p})", "Replace {m} by '{h}'.", "mask", ValueKind.STR),
    ("drop_count", "len({p}) - len([{g}])", "Count the characters of {p} other than {m}.", "count_other", ValueKind.INT),
)  # fmt: skip


def draw_chars(rng: random.Random) -> Program:
    """reduce ∘ map ∘ filter over the characters of a text."""
    p, t = rng.choice(TEXT_NAMES), rng.choice(("c", "ch", "letter"))
    choice = rng.choice(CHAR_CHOICES)
    key, code, words, name, returns = rng.choice(CHAR_GATHERS)
    fill = {"t": t, "p": p, "c": rng.choice("gmnrst")}
    maps = key in ("join", "list", "sorted", "first", "last", "reverse", "distinct")
    mapped = rng.choice(CHAR_MAPS) if maps else CHAR_MAPS[0]
    condition = f" if {choice.code.format(**fill)}"
    element, source = mapped[1].format(t=t), f"for {t} in {p}{condition}"
    told = f"the characters of {p} {choice.words.format(**fill)}{mapped[2]}"
    h = rng.choice("*#_")
    code = code.format(g=f"{element} {source}", f=source, t=t, p=p, c=condition, h=h)
    return Program(
        name=f"{name}_{choice.name}{mapped[3]}", params=(Param(name=p, kind=ValueKind.STR),), returns=returns,
        doc=words.format(m=told, p=p, h=h), body=(f"return {code}",),
        family=f"chars.{key}({choice.key}{'.' if mapped[0] else ''}{mapped[0]})", hints=rng.random() < 0.3,
    )  # fmt: skip


def draw_texts(rng: random.Random) -> Program:
    """Any function over texts."""
    return rng.choice((draw_chain, draw_words, draw_words, draw_chars))(rng)
