"""Tasks of a project: its own runs, the bug-fix commits of its history, and mutants of what its check covers.

Each is admitted by running: its check fails before the change and passes after it.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from nano_coder.agent.profiles import COMPACT_1
from nano_coder.commands.options import Setup
from nano_coder.commands.run import make_task, take_snapshot
from nano_coder.grading.command_check import by_pytest
from nano_coder.run.execution import Runtime, grade_run, run_task
from nano_coder.verify.trainable import may_teach
from nano_rl.gather.rollouts import ORACLE, oracle_policy
from nano_rl.improve.project import ImprovedProject, ProjectTask, Tell
from nano_rl.tasks.code_places import (
    SplitPart,
    changed_places,
    codes_of,
    edit_actions,
    hunks_between,
    part_of,
)
from nano_rl.tasks.from_log import MutantSearch, mutant_tasks, task_from_run
from nano_shared import snapshot
from nano_shared.errors import UsageError
from nano_shared.extension_points import Extensions
from nano_shared.files import content_hash
from nano_shared.printable import one_line
from nano_shared.run_facts import RunFacts, RunFilter
from nano_shared.snapshot import Snapshot, changed_paths
from nano_shared.store import LogStore
from nano_shared.types import OracleAction, Split, Task, Trajectory, Trust

TaskSource = Literal["run", "commit", "mutant"]
TASKS = "tasks.jsonl"
"""name of the file that holds the tasks of a project"""
MUTANTS = 160
"""mutants of a cycle at most"""
TURNS = 12
"""of a run on a mutant at most, which is read, edited and checked in four"""
_TOOLS = frozenset(tool.name for tool in COMPACT_1.tools)
HELD_OUT_FIRST = 40
"""held-out places that mutants begin with, a quarter of which may give none: a promotion takes 30"""
A_PLACE = 4
"""tasks of one held-out place at most, so that none weighs much more than another"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    task: Task
    source: TaskSource
    solved: Snapshot


class SolvedTask(Protocol):
    task: Task
    solved: Snapshot


COMMIT_TASKS: Extensions[Callable[..., Iterable[SolvedTask]]] = Extensions("nano.project_tasks")
"""(repository, blobs, sandbox, *, check, seconds, refused, known, on_commit) -> tasks of bug-fix commits"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathering:
    project: ImprovedProject
    cycle: int
    since: float
    """unix seconds: runs that began before were looked at by earlier cycles"""
    setup: Setup
    runtime: Runtime
    until: float
    """`time.monotonic` after which nothing new is tried"""

    def gather(self, say: Tell) -> list[ProjectTask]:
        """Find new tasks. Each is kept as it is found, so that nothing is lost if the process ends. Raises
        UsageError where the check fails on the project as it is, cannot fail, or cannot be run."""
        base = self._passing_run()
        known = self.project.read(TASKS, ProjectTask)
        before = len(known)
        for one in self._runs():
            self._keep(one, known)
        for one in self._commits(say):
            self._keep(one, known)
        solved = snapshot.load(str(base.last_snapshot), self.runtime.store.blobs)
        seconds = self.until - time.monotonic()
        if seconds > 0:
            seed = int(self.project.id[:8], 16) + 1000 * self.cycle + before
            held = {place for one in known if one.part is SplitPart.HELD_OUT for place in one.places}
            turn = by_turns(HELD_OUT_FIRST - len(held))
            search = MutantSearch(count=MUTANTS, seed=seed, seconds=seconds, turn=turn)
            _, report = mutant_tasks(
                [base], search, self.runtime.store.blobs, self.runtime.sandbox,
                on_task=lambda task: self._keep(Candidate(task=task, source="mutant", solved=solved), known),
            )  # fmt: skip
            say(report)
        return known[before:]

    def _passing_run(self) -> Trajectory:
        """A logged run that changes nothing in the project as it is, and passes the check."""
        start = take_snapshot(self.setup, self.runtime.store)
        task = make_task("The check fails. Fix it.", start, self.setup, self.runtime)
        limits = task.limits.model_copy(update={"max_turns": min(task.limits.max_turns, TURNS)})
        task = task.model_copy(update={"oracle": (OracleAction(name="submit"),), "limits": limits})
        runtime = replace(self.runtime, policy=oracle_policy(task, self.runtime.profile), policy_name=ORACLE)
        run = grade_run(run_task(task, runtime), runtime)
        check, directory = self.setup.config.check, self.project.directory
        if run.reward is None:
            why = run.stop_detail or (run.verdict.failure_kind if run.verdict else None) or run.stop
            raise UsageError(f"`{check}` cannot be run in {directory}: {why}")
        if run.reward < 1:
            ran = run.verdict.check_run if run.verdict else None
            last = one_line((ran.output if ran else "").strip().rpartition("\n")[2], 100)
            raise UsageError(
                f"`{check}` fails on {directory} as it is ({last or 'it prints nothing'}), and tasks are made"
                " of a project whose check passes: mend it first (nano-coder run), or name another check with"
                " --check"
            )
        return run

    def _keep(self, one: Candidate, known: list[ProjectTask]) -> None:
        if (placed := self.placed(one, known)) is not None:
            self.project.append(TASKS, [placed])
            known.append(placed)

    def placed(self, one: Candidate, known: Sequence[ProjectTask]) -> ProjectTask | None:
        """The task with its part; None for one that is known, that lies in several parts, or whose code is on
        the other side of the split."""
        blobs = self.runtime.store.blobs
        start = one.task.snapshot or snapshot.snapshot_texts(one.task.files, blobs)
        before = snapshot.load(start, blobs)
        places = changed_places(before, one.solved, blobs)
        parts = {part_of(place) for place in places}
        if len(parts) != 1 or any(one.task.key == other.task.key for other in known):
            return None
        (part,) = parts
        held = part is SplitPart.HELD_OUT
        codes = codes_of(one.solved, places, blobs) | codes_of(before, places, blobs)
        if any(
            held is not (other.part is SplitPart.HELD_OUT) and codes & set(other.codes) for other in known
        ):
            return None
        if held and sum(set(other.places) == set(places) for other in known) >= A_PLACE:
            return None
        oracle, split = one.task.oracle, Split.TEST if held else Split.TRAIN
        if oracle is None or any(action.name not in _TOOLS for action in oracle):  # of another profile
            hunks = hunks_between(before, one.solved, changed_paths(before, one.solved), blobs)
            oracle = (*edit_actions(before, hunks, blobs), OracleAction(name="submit"))
        update = {"split": split, "program_hash": content_hash(places), "oracle": oracle}
        return ProjectTask(
            task=one.task.model_copy(update=update), source=one.source, places=tuple(places), part=part,
            codes=tuple(sorted(codes)), cycle=self.cycle,
        )  # fmt: skip

    def _runs(self) -> Iterator[Candidate]:
        """The new successes among the runs of this project that may teach."""
        store = self.runtime.store
        for about in checked_runs(self.setup, store, self.since):
            if about.reward != 1 or not may_teach((run := store.get(about.id)).verdict) or not run.diff:
                continue
            try:
                made = task_from_run(run, store.blobs, self.runtime.sandbox)
            except UsageError:  # its blobs were deleted
                continue
            if made.reward == 1 and made.trust is not Trust.NONE:
                solved = snapshot.load(str(run.last_snapshot), store.blobs)
                yield Candidate(task=made.task, source="run", solved=solved)

    def _commits(self, say: Tell) -> Iterator[Candidate]:
        """The bug-fix commits that no cycle has looked at. A project without a git history has none."""
        if "commits" not in COMMIT_TASKS:
            say("no tasks of commits: pip install nano-rl-coder-mining brings them")
            return
        path, refused = self.project.folder / "commits", Counter[str]()
        known = frozenset(path.read_text().split()) if path.exists() else frozenset[str]()
        check = None if by_pytest(str(self.setup.config.check)) else self.setup.config.check
        seconds, count = max(0.0, self.until - time.monotonic()) / 2, 0

        def note_commit(commit: str) -> None:
            with path.open("a") as file:
                file.write(f"{commit}\n")

        try:
            for one in COMMIT_TASKS["commits"](
                self.project.directory, self.runtime.store.blobs, self.runtime.sandbox, check=check,
                seconds=seconds, refused=refused, known=known, on_commit=note_commit,
            ):  # fmt: skip
                count += 1
                yield Candidate(task=one.task, source="commit", solved=one.solved)
        except UsageError as problem:
            say(str(problem).removesuffix(": its commits are what tasks are made of (-C FOLDER)"))
            return
        if count or refused:
            others = "".join(f", {number} {why}" for why, number in refused.most_common())
            say(f"new commits: {count} are tasks{others}")


def by_turns(first: int) -> Callable[[str], int]:
    """Numbers places as they come, so that every second one is held out until there are `first` of those."""
    held, others = itertools.count(), itertools.count()

    def turn(place: str) -> int:
        if part_of(place) is SplitPart.HELD_OUT and (number := next(held)) < first:
            return 2 * number
        return 2 * next(others) + 1

    return turn


def checked_runs(setup: Setup, store: LogStore, since: float = 0.0) -> list[RunFacts]:
    """The checked runs of the project that began after `since`, oldest first: the user's own, and those of
    others who gave their consent."""
    here = RunFilter(since=since, directory=str(setup.directory.resolve()))
    found = [
        run
        for run in store.facts(here)
        if run.policy != ORACLE and run.task.check is not None and not run.withheld
    ]
    return sorted(found, key=lambda run: (run.started, run.id))
