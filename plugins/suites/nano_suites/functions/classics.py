"""Small classic functions with loops and early returns, which no pipeline expresses."""

from __future__ import annotations

import random
from dataclasses import dataclass

from nano_suites.functions.program import Param, Program, ValueKind


@dataclass(frozen=True, slots=True)
class Classic:
    """A function over `{p}` (and `{q}`), with a constant `{k}` of 2 to 5."""

    name: str
    params: str
    """kinds of the parameters: one letter each, see `_KINDS`"""
    returns: ValueKind
    doc: str
    body: str
    """lines, separated by newlines"""


_KINDS = {"n": (ValueKind.INT, 0, 12), "m": (ValueKind.INT, 1, 40), "d": (ValueKind.INT, 0, 9999), "i": (ValueKind.INT, -9, 12),
          "L": (ValueKind.INTS, -9, 12), "S": (ValueKind.STRS, 0, 0), "t": (ValueKind.STR, 0, 0)}  # fmt: skip
_NAMES = {
    "n": ("n", "count", "limit"), "m": ("n", "number", "value"), "d": ("n", "number", "value"),
    "i": ("target", "k", "x", "bound"), "L": ("values", "numbers", "items", "xs", "data"),
    "S": ("words", "names", "parts"), "t": ("text", "s", "line", "phrase"),
}  # fmt: skip
_SECOND = {"L": "others", "S": "more", "t": "other", "m": "m", "n": "m", "i": "y", "d": "m"}

CLASSICS = (
    Classic("factorial", "n", ValueKind.INT, "Return the product of the whole numbers from 1 to {p} (1 for 0).",
            "result = 1\nfor i in range(2, {p} + 1):\n    result *= i\nreturn result"),
    Classic("fibonacci", "n", ValueKind.INT, "Return the Fibonacci number at position {p}, counting 0, 1, 1, 2, 3.",
            "a, b = 0, 1\nfor _ in range({p}):\n    a, b = b, a + b\nreturn a"),
    Classic("triangle", "n", ValueKind.INT, "Return {k} times the sum of the whole numbers below {p}.",
            "total = 0\nfor i in range({p}):\n    total += {k} * i\nreturn total"),
    Classic("gcd", "mm", ValueKind.INT, "Return the greatest common divisor of {p} and {q}.",
            "while {q} != 0:\n    {p}, {q} = {q}, {p} % {q}\nreturn {p}"),
    Classic("lcm", "mm", ValueKind.INT, "Return the least positive number that both {p} and {q} divide.",
            "result = {p}\nwhile result % {q} != 0:\n    result += {p}\nreturn result"),
    Classic("is_prime", "m", ValueKind.BOOL, "Tell whether {p} is a prime number.",
            "if {p} < 2:\n    return False\nfor i in range(2, {p}):\n    if {p} % i == 0:\n        return False\nreturn True"),
    Classic("count_divisors", "m", ValueKind.INT, "Count the whole numbers from 1 to {p} that divide {p}.",
            "count = 0\nfor i in range(1, {p} + 1):\n    if {p} % i == 0:\n        count += 1\nreturn count"),
    Classic("sum_of_divisors", "m", ValueKind.INT, "Add up the divisors of {p} that are less than {p}.",
            "total = 0\nfor i in range(1, {p}):\n    if {p} % i == 0:\n        total += i\nreturn total"),
    Classic("digit_sum", "d", ValueKind.INT, "Add up the decimal digits of {p}.",
            "total = 0\nwhile {p} > 0:\n    total += {p} % 10\n    {p} //= 10\nreturn total"),
    Classic("reverse_digits", "d", ValueKind.INT, "Return {p} with its decimal digits in reverse order.",
            "result = 0\nwhile {p} > 0:\n    result = result * 10 + {p} % 10\n    {p} //= 10\nreturn result"),
    Classic("count_halvings", "d", ValueKind.INT,
            "Count how often {p} can be divided by {k}, rounding down, until it is 0.",
            "steps = 0\nwhile {p} > 0:\n    {p} //= {k}\n    steps += 1\nreturn steps"),
    Classic("collatz_steps", "m", ValueKind.INT,
            "Count the steps from {p} to 1, where an even number is halved and an odd n becomes 3 * n + 1.",
            "steps = 0\nwhile {p} != 1:\n    if {p} % 2 == 0:\n        {p} //= 2\n    else:\n        {p} = 3 * {p} + 1\n"
            "    steps += 1\nreturn steps"),
    Classic("power", "ni", ValueKind.INT, "Return {q} multiplied by itself so that it occurs {p} times as a factor.",
            "result = 1\nfor _ in range({p}):\n    result *= {q}\nreturn result"),
    Classic("horner", "L", ValueKind.INT, "Start from 0; for each of {p} in order, multiply by {k} and add the number.",
            "result = 0\nfor x in {p}:\n    result = result * {k} + x\nreturn result"),
    Classic("running_max", "L", ValueKind.INTS, "For each position of {p}, list the largest number up to there.",
            "best = []\nfor x in {p}:\n    best.append(max(best[-1], x) if best else x)\nreturn best"),
    Classic("running_min", "L", ValueKind.INTS, "For each position of {p}, list the smallest number up to there.",
            "best = []\nfor x in {p}:\n    best.append(min(best[-1], x) if best else x)\nreturn best"),
    Classic("longest_run", "L", ValueKind.INT, "Return the length of the longest run of equal neighbours in {p}.",
            "best = run = 0\nfor i, x in enumerate({p}):\n    run = run + 1 if i > 0 and {p}[i - 1] == x else 1\n"
            "    best = max(best, run)\nreturn best"),
    Classic("longest_rise", "L", ValueKind.INT, "Return the length of the longest strictly rising run in {p}.",
            "best = run = 0\nfor i, x in enumerate({p}):\n    run = run + 1 if i > 0 and {p}[i - 1] < x else 1\n"
            "    best = max(best, run)\nreturn best"),
    Classic("count_rises", "L", ValueKind.INT, "Count the numbers in {p} that are greater than the one before them.",
            "count = 0\nfor i in range(1, len({p})):\n    if {p}[i] > {p}[i - 1]:\n        count += 1\nreturn count"),
    Classic("count_peaks", "L", ValueKind.INT, "Count the numbers in {p} that are greater than both neighbours.",
            "count = 0\nfor i in range(1, len({p}) - 1):\n    if {p}[i] > {p}[i - 1] and {p}[i] > {p}[i + 1]:\n"
            "        count += 1\nreturn count"),
    Classic("is_sorted", "L", ValueKind.BOOL, "Tell whether no number in {p} is less than the one before it.",
            "for i in range(1, len({p})):\n    if {p}[i] < {p}[i - 1]:\n        return False\nreturn True"),
    Classic("second_largest", "L", ValueKind.INT,
            "Return the second largest of the distinct numbers in {p}; 0 if there are fewer than two.",
            "distinct = sorted(set({p}))\nif len(distinct) < 2:\n    return 0\nreturn distinct[-2]"),
    Classic("middle", "L", ValueKind.INT,
            "Return the number in the middle of the sorted {p}, the right one of two; 0 if {p} is empty.",
            "if not {p}:\n    return 0\nreturn sorted({p})[len({p}) // 2]"),
    Classic("unique", "L", ValueKind.INTS, "List the numbers in {p} without repetition, in order of first appearance.",
            "seen = []\nfor x in {p}:\n    if x not in seen:\n        seen.append(x)\nreturn seen"),
    Classic("duplicates", "L", ValueKind.INTS, "List the numbers in {p} that occurred before, each time they occur again.",
            "seen = []\nagain = []\nfor x in {p}:\n    if x in seen:\n        again.append(x)\n    seen.append(x)\nreturn again"),
    Classic("rotate", "Ln", ValueKind.INTS, "Return {p} with its first {q} numbers moved to the end (all if fewer).",
            "return {p}[{q}:] + {p}[:{q}]"),
    Classic("common", "LL", ValueKind.INTS, "List the numbers in {p} that are also in {q}, in the order of {p}.",
            "return [x for x in {p} if x in {q}]"),
    Classic("missing", "LL", ValueKind.INTS, "List the numbers in {p} that are not in {q}, in the order of {p}.",
            "return [x for x in {p} if x not in {q}]"),
    Classic("interleave", "LL", ValueKind.INTS,
            "Alternate the numbers of {p} and {q}, starting with {p}, up to the end of the shorter one.",
            "result = []\nfor a, b in zip({p}, {q}):\n    result.append(a)\n    result.append(b)\nreturn result"),
    Classic("pairwise_max", "LL", ValueKind.INTS, "List the larger of the numbers at equal positions in {p} and {q}.",
            "return [max(a, b) for a, b in zip({p}, {q})]"),
    Classic("pairwise_min", "LL", ValueKind.INTS, "List the smaller of the numbers at equal positions in {p} and {q}.",
            "return [min(a, b) for a, b in zip({p}, {q})]"),
    Classic("count_less", "LL", ValueKind.INT, "Count the positions at which {p} holds a smaller number than {q}.",
            "return sum(1 for a, b in zip({p}, {q}) if a < b)"),
    Classic("positions", "Li", ValueKind.INTS, "List the positions at which {p} holds {q}.",
            "return [i for i, x in enumerate({p}) if x == {q}]"),
    Classic("first_position", "Li", ValueKind.INT,
            "Return the first position of a number in {p} that is greater than {q}; -1 if there is none.",
            "for i, x in enumerate({p}):\n    if x > {q}:\n        return i\nreturn -1"),
    Classic("last_position", "Li", ValueKind.INT,
            "Return the last position of a number in {p} that is less than {q}; -1 if there is none.",
            "found = -1\nfor i, x in enumerate({p}):\n    if x < {q}:\n        found = i\nreturn found"),
    Classic("take_until", "Li", ValueKind.INTS, "List the numbers of {p} that come before the first one equal to {q}.",
            "taken = []\nfor x in {p}:\n    if x == {q}:\n        break\n    taken.append(x)\nreturn taken"),
    Classic("reach", "Li", ValueKind.INT,
            "Return how many numbers of {p} must be added up from the left for a total above {q}; -1 if it never is.",
            "total = 0\nfor i, x in enumerate({p}):\n    total += x\n    if total > {q}:\n        return i + 1\nreturn -1"),
    Classic("closest", "Li", ValueKind.INT,
            "Return the number in {p} closest to {q}, the first one on a tie; 0 if {p} is empty.",
            "if not {p}:\n    return 0\nreturn min({p}, key=lambda x: abs(x - {q}))"),
    Classic("position_weighted", "L", ValueKind.INT, "Add up the numbers in {p}, each multiplied by its position plus {k}.",
            "return sum((i + {k}) * x for i, x in enumerate({p}))"),
    Classic("balance", "L", ValueKind.INT, "Return how many more positive than negative numbers there are in {p}.",
            "score = 0\nfor x in {p}:\n    if x > 0:\n        score += 1\n    elif x < 0:\n        score -= 1\nreturn score"),
    Classic("chunk_sums", "L", ValueKind.INTS, "List the sums of {p} taken {k} numbers at a time, the rest last.",
            "return [sum({p}[i:i + {k}]) for i in range(0, len({p}), {k})]"),
    Classic("count_pairs", "Li", ValueKind.INT, "Count the pairs of different positions in {p} whose numbers add up to {q}.",
            "count = 0\nfor i in range(len({p})):\n    for j in range(i + 1, len({p})):\n"
            "        if {p}[i] + {p}[j] == {q}:\n            count += 1\nreturn count"),
    Classic("clamp_all", "Li", ValueKind.INTS, "List the numbers in {p}, each raised to at least {q}.",
            "result = []\nfor x in {p}:\n    if x < {q}:\n        x = {q}\n    result.append(x)\nreturn result"),
    Classic("collapse", "t", ValueKind.STR, "Return {p} with every run of equal characters cut to one.",
            "out = ''\nfor c in {p}:\n    if not out or out[-1] != c:\n        out += c\nreturn out"),
    Classic("alternate_case", "t", ValueKind.STR,
            "Return {p} with the characters at even positions in upper case and the others in lower case.",
            "out = ''\nfor i, c in enumerate({p}):\n    out += c.upper() if i % 2 == 0 else c.lower()\nreturn out"),
    Classic("longest_char_run", "t", ValueKind.INT, "Return the length of the longest run of equal characters in {p}.",
            "best = run = 0\nfor i, c in enumerate({p}):\n    run = run + 1 if i > 0 and {p}[i - 1] == c else 1\n"
            "    best = max(best, run)\nreturn best"),
    Classic("shift_letters", "t", ValueKind.STR,
            "Move every small letter of {p} (a to z) {k} places on in the alphabet, after z from a again.",
            "out = ''\nfor c in {p}:\n    if 'a' <= c <= 'z':\n        c = chr((ord(c) - 97 + {k}) % 26 + 97)\n    out += c\nreturn out"),
    Classic("count_double", "t", ValueKind.INT, "Count the characters of {p} that equal the one before them.",
            "count = 0\nfor i in range(1, len({p})):\n    if {p}[i] == {p}[i - 1]:\n        count += 1\nreturn count"),
    Classic("shared_letters", "tt", ValueKind.STR, "Join the characters of {p} that also occur in {q}, in the order of {p}.",
            "return ''.join(c for c in {p} if c in {q})"),
    Classic("acronym", "t", ValueKind.STR, "Join the first characters of the words of {p}, in upper case.",
            "out = ''\nfor word in {p}.split():\n    out += word[0].upper()\nreturn out"),
    Classic("number_lines", "S", ValueKind.STRS, "List the strings in {p}, each preceded by its position plus {k} and a colon.",
            "result = []\nfor i, w in enumerate({p}):\n    result.append(str(i + {k}) + ':' + w)\nreturn result"),
    Classic("spell", "S", ValueKind.STR, "Join the strings in {p} with ', ', but put ' and ' before the last of several.",
            "if len({p}) < 2:\n    return ''.join({p})\nreturn ', '.join({p}[:-1]) + ' and ' + {p}[-1]"),
    Classic("ends", "S", ValueKind.STRS, "List the first and the last string in {p}; nothing if {p} is empty.",
            "if not {p}:\n    return []\nreturn [{p}[0], {p}[-1]]"),
)  # fmt: skip


def draw_classic(rng: random.Random) -> Program:
    """One of CLASSICS, with drawn names and constant."""
    classic = rng.choice(CLASSICS)
    names: list[str] = []
    for letter in classic.params:
        free = [n for n in _NAMES[letter] if n not in names]
        names.append(_SECOND[letter] if names and classic.params[0] == letter else rng.choice(free))
    params = tuple(
        Param(name=name, kind=_KINDS[letter][0], low=_KINDS[letter][1], high=_KINDS[letter][2])
        for name, letter in zip(names, classic.params, strict=True)
    )
    fill = {"p": names[0], "q": names[-1], "k": str(rng.randint(2, 5))}
    name = classic.name if rng.random() < 0.6 else f"{rng.choice(('get', 'find', 'compute'))}_{classic.name}"
    return Program(
        name=name, params=params, returns=classic.returns, doc=classic.doc.format(**fill),
        body=tuple(classic.body.format(**fill).split("\n")), family=f"classic.{classic.name}",
        hints=rng.random() < 0.3,
    )  # fmt: skip
