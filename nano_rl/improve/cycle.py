"""One cycle: look, make tasks, measure, train, measure again, decide, tell. What each step found is kept, so
that a cycle that was cut short goes on where it was."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import islice, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from nano_coder.agent.profiles import REPAIR_1, find_profile
from nano_coder.commands.options import Setup
from nano_coder.models.opening import OWN_MODELS, usual_profile
from nano_rl.checkpoints.evaluate import TaskOutcome, task_outcome
from nano_rl.checkpoints.promotion import SuccessDifference, difference, promote
from nano_rl.command_setup import oracle_runtime, policy_runtime
from nano_rl.gather.rollouts import collect
from nano_rl.improve.gate import decide
from nano_rl.improve.project import Cycle, ImprovedProject, ProjectTask, Tell, counts
from nano_rl.improve.tasks import TASKS, Gathering, checked_runs
from nano_rl.tasks.code_places import SplitPart
from nano_shared.errors import UsageError
from nano_shared.extension_points import Extensions
from nano_shared.files import checkpoints_dir, content_hash
from nano_shared.store import LogStore
from nano_shared.types import Split, Task

if TYPE_CHECKING:
    from nano_coder.config import AgentConfig

FEWEST = 8
"""training tasks below which nothing is trained"""
GENERAL = 60
"""general tasks of a gate: of the suite `functions`, test split"""
_GATHERED, _GATE = 0.25, 0.3
"""shares of a cycle's time: for making tasks, and for the gate at least"""
ROLLOUTS = 32
"""of a step of policy gradients: four tasks, eight runs each"""
_IMITATION = 0.6
"""share of the time for training after which policy gradients begin"""


GENERAL_TASKS: Extensions[Callable[..., Iterable[Task]]] = Extensions("nano.general_tasks")
"""(*, levels, views, seed, split) -> tasks of no project, without end"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    began: float
    """`time.monotonic`"""
    seconds: float

    def at(self, share: float) -> float:
        """`time.monotonic` when that share of the time is over."""
        return self.began + share * self.seconds


class TimeOver(Exception):
    """The time was over before the gate had measured everything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CycleWork:
    project: ImprovedProject
    setup: Setup
    store: LogStore
    clock: Clock
    say: Tell

    def run(self, cycle: Cycle) -> Cycle:
        """Take a cycle to its end, or as far as the time allows. Raises UsageError where the check fails on
        the project as it is, or cannot be run."""
        try:
            return self._run(cycle)
        except TimeOver:
            said = f"the time is over in cycle {cycle.number}, which goes on when improve is called again"
            return self.project.save(self.project.cycles()[-1].model_copy(update={"said": said}))

    def _run(self, cycle: Cycle) -> Cycle:
        if not cycle.tasks:
            cycle = self._gather(cycle)
        tasks = self.project.read(TASKS, ProjectTask)
        train = [one.task for one in tasks if one.part is SplitPart.TRAIN]
        if len(train) < FEWEST:
            if time.monotonic() >= self.clock.at(_GATHERED):
                self.project.save(cycle.model_copy(update={"tasks": {}}))
                raise TimeOver
            said = (
                f"{len(train)} tasks to train on, of {FEWEST} that a cycle takes: nothing was trained. Runs"
                " with a check that pass, commits that mend what tests show, and further tests make tasks"
            )
            return self._end(cycle, said)
        began, profile = time.monotonic(), taught_profile(self.setup.config, cycle.baseline, tasks)
        before = self._measure(cycle.baseline, tasks, profile)
        if cycle.candidate is None:
            # the gate has to measure as much again
            until = self.clock.at(1.0) - max(_GATE * self.clock.seconds, 1.5 * (time.monotonic() - began))
            if time.monotonic() > until:
                raise TimeOver
            validation = [one.task for one in tasks if one.part is SplitPart.VALIDATION]
            cycle = self._train(cycle, train, validation, until, profile)
            if cycle.ended is not None:
                return cycle
        after = self._measure(str(cycle.candidate), tasks, profile)
        return self._decide(cycle, before, after)

    def _gather(self, cycle: Cycle) -> Cycle:
        earlier = [one.started for one in self.project.cycles() if one.number < cycle.number]
        since = earlier[-1] if earlier else 0.0
        runs = checked_runs(self.setup, self.store, since)
        self.say(f"{len(runs)} new runs with a check, {sum(run.reward == 1 for run in runs)} of them solved")
        gathering = Gathering(
            project=self.project, cycle=cycle.number, since=since, setup=self.setup,
            runtime=oracle_runtime(self.setup.config.log, self.setup.config),
            until=self.clock.at(_GATHERED),
        )  # fmt: skip
        new = gathering.gather(self.say)
        tasks = self.project.read(TASKS, ProjectTask)
        held = {place for one in tasks if one.part is SplitPart.HELD_OUT for place in one.places}
        seen = {"runs": len(runs), "solved": sum(run.reward == 1 for run in runs), "tasks": len(new)}
        update = {"seen": seen, "tasks": counts(tasks), "places": len(held)}
        return self.project.save(cycle.model_copy(update=update))

    def _measure(
        self, model: str, tasks: Sequence[ProjectTask], profile: str
    ) -> dict[str, list[TaskOutcome]]:
        held = [one.task for one in tasks if one.part is SplitPart.HELD_OUT]
        general = self._general_tasks(profile, Split.TEST, GENERAL)
        return {"held_out": self._outcomes(model, held), "general": self._outcomes(model, general)}

    def _general_tasks(self, profile: str, split: Split, count: int) -> list[Task]:
        """Tasks of the suite that the profile can serve; the same at every call."""
        if "functions" not in GENERAL_TASKS:
            self.say("no general tasks: pip install nano-rl-coder-suites brings them")
            return []
        leads = not find_profile(profile).places
        kind = {"levels": (0, 1, 2)} if leads else {"levels": (2, 3), "views": ("repair",)}
        return list(islice(GENERAL_TASKS["functions"](**kind, seed=0, split=split), count))

    def _outcomes(self, model: str, tasks: Sequence[Task]) -> list[TaskOutcome]:
        """The outcomes of a model on tasks, decoding greedily; those that were measured before are not
        measured again. Raises TimeOver."""
        name = outcomes_file(model)
        known = {one.id: one for one in self.project.read(name, TaskOutcome) if one.mean is not None}
        rest = [task for task in tasks if task.id not in known]
        if rest:
            config, sources = self.setup.config, self.setup.sources
            runtime = policy_runtime(config, sources, model=model, temperature=0.0)
            self.say(f"measuring {Path(model).name} on {len(rest)} tasks")
            width = getattr(runtime.policy, "agents_together", 16)
            for some in (rest[at : at + width] for at in range(0, len(rest), width)):
                if time.monotonic() > self.clock.at(1.0):
                    raise TimeOver
                runs = collect(some, runtime)
                outcomes = [
                    task_outcome(task, [run for run in runs if run.task.listed.id == task.id])
                    for task in some
                ]
                self.project.append(name, outcomes)
                known |= {one.id: one for one in outcomes}
                done = [known[task.id] for task in rest if task.id in known]
                if len(done) < len(rest):
                    self.say(f"{len(done)} of {len(rest)} measured, {rate(done):.0%} solved")
        return [known[task.id] for task in tasks]

    def _train(
        self, cycle: Cycle, train: Sequence[Task], validation: Sequence[Task], until: float, profile: str
    ) -> Cycle:
        """The checkpoint of imitation or that of policy gradients after it, by the validation tasks."""
        from nano_rl.improve.training import imitate, reinforce, trained_seconds

        began = time.monotonic()
        names = [f"{self.project.name}-{self.project.id[:6]}-{cycle.number}{kind}" for kind in ("", "-rl")]
        made, parent = list[str](), cycle.baseline
        config = self.setup.config.model_copy(update={"profile": profile})
        imitation = began + _IMITATION * (until - began)
        # imitation of the project's tasks alone forgets the others
        general = self._general_tasks(profile, Split.TRAIN, min(len(train), GENERAL))
        lessons = [task for some in zip_longest(train, general) for task in some if task is not None]
        if _is_there(names[0]) or imitate(names[0], parent, lessons, config, imitation, self.say):
            made, parent = [names[0]], names[0]
        measuring = time.monotonic()
        self._outcomes(parent, validation)  # which are measured anyway; 0 where nobody knows
        step_seconds = (time.monotonic() - measuring) / max(1, len(validation)) * ROLLOUTS
        if time.monotonic() + 2 * step_seconds < until and (
            _is_there(names[1]) or reinforce(names[1], parent, train, config, until, self.say)
        ):
            made.append(names[1])
        if not made:
            said = (
                "no solution of a training task fits the policy's context, and there was no time for rollouts"
            )
            return self._end(cycle, f"{said}: nothing was trained")
        rates = {name: rate(self._outcomes(name, validation)) for name in made if len(made) > 1}
        chosen = max(made, key=lambda name: rates.get(name, 0.0))  # the first of equals
        update = {"candidate": chosen, "trained_seconds": trained_seconds(names)}
        return self.project.save(cycle.model_copy(update=update))

    def _decide(
        self, cycle: Cycle, before: dict[str, list[TaskOutcome]], after: dict[str, list[TaskOutcome]]
    ) -> Cycle:
        held = paired("held out", after["held_out"], before["held_out"])
        if held is None:
            why = "there is no held-out task that both could be graded on: nothing is promoted"
            return self._end(cycle, why)
        decision = decide(cycle.number, held, paired("general", after["general"], before["general"]))
        solved = {one.id: (one.mean or 0.0) >= 1 for one in before["held_out"]}
        update = {
            "decision": decision,
            "rates": (rate(before["held_out"]), rate(after["held_out"])),
            "gained": self._places(one for one in after["held_out"] if one.mean == 1 and not solved[one.id]),
            "lost": self._places(one for one in after["held_out"] if one.mean != 1 and solved[one.id]),
        }
        cycle = cycle.model_copy(update=update)
        if decision.promoted:
            promote(checkpoints_dir() / str(cycle.candidate), project=self.project.id)
        return self._end(cycle, told(cycle, self.project))

    def _places(self, outcomes: Iterable[TaskOutcome]) -> dict[str, str]:
        """Place -> the run of one of these outcomes that lies there."""
        tasks = {one.task.id: one.places for one in self.project.read(TASKS, ProjectTask)}
        return {place: one.runs[0] for one in outcomes for place in tasks[one.id]}

    def _end(self, cycle: Cycle, said: str) -> Cycle:
        return self.project.save(cycle.model_copy(update={"ended": time.time(), "said": said}))


def outcomes_file(model: str) -> str:
    """Name of the file of a project that holds the outcomes of a model on its tasks."""
    return f"measured/{Path(model).name}-{content_hash(model)[7:13]}.jsonl"


def taught_profile(config: AgentConfig, baseline: str, tasks: Sequence[ProjectTask]) -> str:
    """The profile of a candidate. The small models that come with nano do not lead in a project that they
    never saw: they are taught to repair, unless none of its tasks is in Python."""
    files = {place.partition("::")[0] for one in tasks for place in one.places}
    python = not files or any(file.endswith(".py") for file in files)
    usual = REPAIR_1.name if python and baseline in OWN_MODELS else None
    return config.profile or usual or usual_profile(baseline)


def paired(
    name: str, after: Sequence[TaskOutcome], before: Sequence[TaskOutcome]
) -> SuccessDifference | None:
    """The difference on the tasks that both were graded on; None without any."""
    was = {one.id: one.mean for one in before if one.mean is not None}
    both = ((one, one.mean) for one in after if one.mean is not None and one.id in was)
    values = [(one.cluster or one.id, mean - was[one.id]) for one, mean in both]
    return difference(name, values) if values else None


def rate(outcomes: Sequence[TaskOutcome]) -> float:
    """The mean success of the tasks that could be graded."""
    means = [one.mean for one in outcomes if one.mean is not None]
    return sum(means) / len(means) if means else 0.0


def told(cycle: Cycle, project: ImprovedProject) -> str:
    decision, (before, after) = cycle.decision, cycle.rates or (0.0, 0.0)
    assert decision is not None
    seen, tasks = cycle.seen, sum(cycle.tasks.get(part, 0) for part in SplitPart)
    found = f"{seen.get('runs', 0)} runs, {tasks} tasks ({cycle.tasks.get(SplitPart.HELD_OUT, 0)} held out)"
    gain = f"{decision.held_out.low:+.0%} to {decision.held_out.high:+.0%}"
    measured = f"held-out {before:.0%} -> {after:.0%} ({gain})"
    ending = (
        f"promoted for {project.name}; undo: nano-rl improve --undo -C {project.directory}"
        if decision.promoted
        else f"not promoted: {decision.objections[0]}"
    )
    return f"{found} -> trained {cycle.trained_seconds / 60:.0f} min -> {measured}; {ending}"


def _is_there(name: str) -> bool:
    return (checkpoints_dir() / name).is_dir()


_UNITS = {"m": 60, "h": 3600, "d": 86400}
_LONGEST_PAUSE = 365 * 86400
BUSY = 0.5
"""share of the cores that other processes use, above which a cycle waits"""
_LOOK = 60.0
"""seconds between two looks"""
Window = tuple[int, int]
"""minutes of the day, from and to; where from is later, it goes over midnight"""


def parse_pause(text: str) -> float:
    """Seconds of `90m`, `24h` or `1d`. Raises UsageError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([mhd])", text.strip())
    seconds = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if not 0 < seconds <= _LONGEST_PAUSE:
        raise UsageError(f"--every {text!r} is no time of up to a year: write 90m, 24h or 1d")
    return seconds


def parse_window(text: str) -> Window:
    """Minutes of the day of `22:00-07:00`. Raises UsageError."""
    match = re.fullmatch(r"(\d{1,2}):(\d\d)-(\d{1,2}):(\d\d)", text.strip())
    hours = [int(match[n]) for n in (1, 3)] if match else []
    minutes = [int(match[n]) for n in (2, 4)] if match else []
    if not match or max(hours) > 23 or max(minutes) > 59 or (hours[0], minutes[0]) == (hours[1], minutes[1]):
        raise UsageError(f"--between {text!r} is no time of the day: write 22:00-07:00")
    return hours[0] * 60 + minutes[0], hours[1] * 60 + minutes[1]


def minutes_until(window: Window, now: datetime) -> int:
    """Minutes until a window opens; 0 within it."""
    opens, closes = window
    minute = now.hour * 60 + now.minute
    inside = opens <= minute < closes if opens < closes else not closes <= minute < opens
    return 0 if inside else (opens - minute) % (24 * 60)


def obstacle(window: Window | None, now: datetime) -> str | None:
    """Why no cycle begins now; None: nothing is in its way. Looks at the processors for a second."""
    if window is not None and (wait := minutes_until(window, now)):
        return f"waits until {(now + timedelta(minutes=wait)):%H:%M}"
    battery = getattr(psutil, "sensors_battery", lambda: None)()  # macOS and Windows have no sensors in jails
    if battery is not None and not battery.power_plugged:
        return "waits for the mains: the machine runs on its battery"
    used = psutil.cpu_percent(interval=1.0) / 100
    return f"waits for an idle machine: {used:.0%} of its cores are used" if used > BUSY else None


def wait_until_quiet(window: Window | None, say: Callable[[str], None]) -> None:
    """Wait until nothing is in the way of a cycle; what is, is said once."""
    said = None
    while (why := obstacle(window, datetime.now())) is not None:
        if why.partition(":")[0] != (said or "").partition(":")[0]:
            say(said := why)
        time.sleep(_LOOK)
