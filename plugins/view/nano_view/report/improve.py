"""What the viewer shows of a project of `nano-rl improve`: success by cycle, and what was learned."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from nano_rl.improve.project import Cycle, ImprovedProject, improved_projects
from nano_shared.checkpoint import promoted_for_projects
from nano_shared.errors import UsageError
from nano_view.report.figures import held_out_plot

Shown = dict[str, Any]


class Projects:
    """The improved projects in NANO_HOME, for `nano-coder view`; read anew at every call."""

    def rows(self) -> list[Shown]:
        promoted = promoted_for_projects()
        rows = []
        for name, project in self._all().items():
            rates = [cycle.rates for cycle in project.cycles() if cycle.rates]
            cells = {
                "model": promoted.get(project.id, "the usual policy"),
                "steps": f"{len(project.cycles())} cycles", "reward": "-", "success": "-",
                "held-out success": f"{rates[0][0]:.0%} to {rates[-1][1]:.0%}" if rates else "-",
            }  # fmt: skip
            rows.append({"name": name, "cells": cells})
        return rows

    def read(self, name: str) -> Shown:
        if name not in (known := self._all()):
            raise UsageError(f"no improved project {name!r:.100}")
        return project_page(known[name])

    def compare(self, names: Sequence[str]) -> Shown:
        raise UsageError("projects are shown one at a time")

    def _all(self) -> dict[str, ImprovedProject]:
        return {f"improve {one.name} {one.id[:6]}": one for one in improved_projects()}


PROJECTS = Projects()


def project_page(project: ImprovedProject) -> Shown:
    cycles = project.cycles()
    last = cycles[-1] if cycles else None
    tasks = last.tasks if last else {}
    minutes = sum(cycle.trained_seconds for cycle in cycles) / 60
    promoted = promoted_for_projects().get(project.id, "the usual policy")
    sources = ", ".join(f"{tasks[of]} of {of}s" for of in ("run", "commit", "mutant") if of in tasks)
    tiles = [
        ("runs with", promoted, ""),
        ("tasks to learn from", str(tasks.get("train", 0)), sources),
        ("held out", str(tasks.get("held_out", 0)), f"{last.places if last else 0} places"),
        ("training", f"{minutes:.0f} min", ""),
    ]  # fmt: skip
    head = ["cycle", "began", "before", "after", "change, 95 %", "general tasks", "what became of it"]
    table = {"caption": "Cycles", "head": head, "rows": [_row(cycle) for cycle in cycles], "numeric": False}
    decided = [cycle for cycle in cycles if cycle.decision]
    sections: list[Shown] = [
        {"title": "Held-out success", "plots": held_out_plot([_point(cycle) for cycle in decided])},
        {"title": "Cycles", "tables": [table]},
    ]
    if decided:
        sections.append(_changes(decided[-1]))
    return {"about": f"{project.directory}: nano-rl improve", "tiles": tiles, "sections": sections}


def _row(cycle: Cycle) -> list[Any]:
    began = time.strftime("%Y-%m-%d %H:%M", time.localtime(cycle.started))
    if cycle.decision is None or cycle.rates is None:
        return [
            str(cycle.number), began, "-", "-", "-", "-", cycle.said or "cut short; the next call goes on",
        ]  # fmt: skip
    held, general = cycle.decision.held_out, cycle.decision.general
    return [
        str(cycle.number), began, f"{cycle.rates[0]:.0%}", f"{cycle.rates[1]:.0%}",
        f"{held.mean:+.0%} ({held.low:+.0%} to {held.high:+.0%})", f"{general.mean:+.0%}" if general else "-",
        f"promoted {cycle.candidate}" if cycle.decision.promoted else cycle.decision.objections[0],
    ]  # fmt: skip


def _point(cycle: Cycle) -> dict[str, float | None]:
    """Success after a cycle; its interval is that of the paired change, around the success before."""
    assert cycle.decision is not None
    assert cycle.rates is not None
    held, before = cycle.decision.held_out, cycle.rates[0]
    return {
        "step": float(cycle.number), "success": cycle.rates[1], "low": max(0.0, before + held.low),
        "high": min(1.0, before + held.high),
    }  # fmt: skip


def _changes(cycle: Cycle) -> Shown:
    rows = [
        [sign, place, {"run": run, "text": "the run and its diff"}]
        for sign, places in (("solved now", cycle.gained), ("not any more", cycle.lost))
        for place, run in sorted(places.items())
    ]
    caption = f"Held-out places of cycle {cycle.number}, against the policy before"
    table = {"caption": caption, "head": ["", "place", "run"], "rows": rows, "numeric": False}
    told: Shown = {"tables": [table]} if rows else {"note": "Both solve the same held-out tasks."}
    return {"title": "What changed", **told}
