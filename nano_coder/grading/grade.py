"""Grading of what an agent left, in a folder or a log, by the checks of its task; and the graders by name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

from nano_coder.grading import GRADER
from nano_coder.grading.command_check import CommandRun, grade_command, laid_over, restored, tree_hash
from nano_coder.grading.hidden_cases import CHECKS, GradingOutcome, Submission, names, run_cases, same_answer
from nano_coder.grading.protected_files import LINTERS
from nano_coder.grading.reward_file import grade_reward_file
from nano_coder.grading.submitted_folder import changed_since, read_folder
from nano_coder.sandbox.protocol import Sandbox, in_image
from nano_shared import snapshot
from nano_shared.errors import LogError, UsageError
from nano_shared.extension_points import refuse_missing
from nano_shared.files import content_hash
from nano_shared.hidden_checks import (
    AnswerChecks,
    ArtifactChecks,
    CaseChecks,
    EnvironmentChecks,
    HiddenChecks,
    MutantChecks,
    RewardFileChecks,
    StateChecks,
    SuiteChecks,
    WorkspaceChecks,
    expects_answer,
)
from nano_shared.printable import printable
from nano_shared.snapshot import BlobStore, Entry, EntryKind, MemoryBlobs, Snapshot, make_snapshot
from nano_shared.types import StopReason, Tampering, Task, Trajectory, Trust, Verdict

LARGEST_ARTIFACT = 1 << 20
_ATTEMPTS = 2
_LONGEST_DETAIL = 500
_MOST_FINDINGS = 50


def grade(
    task: Task,
    *,
    files: Mapping[str, bytes],
    answer: str | None,
    sandbox: Sandbox,
    others: Collection[str] = (),
) -> Verdict:
    """Grade a task by its hidden checks, of every kind that does not need the whole workspace.

    `files` are the artifacts that the agent left, by path; `others` are paths that are no regular files. The
    reward is 1.0 if every check passes, else 0.0; it is None, with failure kind "verifier_error" and the
    reason, if we failed and not the policy. Raises UsageError for a task without hidden checks, for one that
    a command grades, and as `refuse_ungradable`.
    """
    hidden = task.hidden
    if hidden is None:
        raise UsageError(f"task {task.key!r} has no hidden checks; grade its check with grade_command")
    if isinstance(hidden, WorkspaceChecks):
        raise UsageError(f"task {task.key!r} is graded by a command, which needs the whole workspace")
    if isinstance(hidden, EnvironmentChecks):
        raise UsageError(f"task {task.key!r} is graded by its environment, at the end of a run in it")
    refuse_ungradable(task)
    known = reference_files(task)
    start = {name: task.files.get(name, "").encode("utf-8", "surrogatepass") for name in graded_files(task)}
    return decided(
        lambda: _grade(task, hidden, files, others, answer, sandbox),
        lambda: _grade(task, hidden, known or start, (), "", sandbox),
        graded_hash=graded_hash(task, files, answer),
    )


def refuse_ungradable(task: Task) -> None:
    """Raises UsageError if a plug-in that is not installed grades the task."""
    if (kind := _brought(task.hidden)) is not None:
        refuse_missing(CHECKS.group, kind, f"what grades hidden checks of kind {kind!r}")


def _brought(hidden: HiddenChecks | None) -> str | None:
    """The name in `nano.checks` of what grades the checks; None for those that the core grades."""
    if isinstance(hidden, StateChecks | SuiteChecks | MutantChecks):
        return hidden.kind
    if isinstance(hidden, AnswerChecks):
        return None if hidden.scorer is None else "scorer"
    return "metrics" if isinstance(hidden, CaseChecks) and hidden.metrics else None


def decided(attempt: Callable[[], Verdict], control: Callable[[], Verdict], *, graded_hash: str) -> Verdict:
    """The verdict of an attempt. The only place that turns exceptions of grading into a verdict.

    If grading fails twice, but works for the `control`, what the agent left caused the failure: reward 0. If
    it fails for the control too, we or the task failed: reward None. Raises UsageError if the control does,
    and LogError, which no policy can cause.
    """
    for _ in range(_ATTEMPTS):
        found = _tried(attempt)
        if isinstance(found, Verdict):
            return shortened(found)
    kind, why = "verifier_error", printable(str(found)[:_LONGEST_DETAIL])
    without = _tried(control)
    if isinstance(without, UsageError):
        raise without
    if isinstance(without, Exception) or without.reward is None:
        return ungraded(kind, why, graded_hash)
    what = f"grading failed twice on what was left, and not without it: {type(found).__name__}: {why}"
    return without.model_copy(
        update={
            "reward": 0.0,
            "components": {name: 0.0 for name in without.components},
            "checks": dict.fromkeys(without.checks, "error"),
            "tampering": (Tampering(kind="jail", detail=what),),
            "failure_kind": "sandbox_broken",
            "graded_hash": graded_hash,
        }
    )


def shortened(verdict: Verdict) -> Verdict:
    """The verdict with at most `_MOST_FINDINGS` findings of bounded length: an agent may cause any number of
    them."""
    findings, kept = verdict.tampering, verdict.tampering[:_MOST_FINDINGS]
    if all(len(found.detail) <= _LONGEST_DETAIL for found in kept) and len(kept) == len(findings):
        return verdict
    short = [found.model_copy(update={"detail": found.detail[:_LONGEST_DETAIL]}) for found in kept]
    if left := len(findings) - len(kept):
        short.append(Tampering(kind=findings[-1].kind, detail=f"and {left} more findings"))
    return verdict.model_copy(update={"tampering": tuple(short)})


def _tried(attempt: Callable[[], Verdict]) -> Verdict | Exception:
    try:
        return attempt()
    except LogError:
        raise
    except Exception as error:  # what a policy left may raise anything; `decided` finds the cause
        return error


def ungraded(kind: str, detail: str = "", graded_hash: str = content_hash("")) -> Verdict:
    """The verdict if grading failed for reasons other than the policy."""
    return Verdict(
        reward=None,
        components={"tests": None},
        failure_kind=f"{kind}: {detail}" if detail else kind,
        trust=Trust.NONE,
        grader=GRADER,
        graded_hash=graded_hash,
    )


def graded_files(task: Task) -> tuple[str, ...]:
    """Paths of the files that a verdict depends on; empty if it depends on the whole workspace."""
    if isinstance(task.hidden, StateChecks):
        return task.hidden.files
    return task.artifacts if isinstance(task.hidden, ArtifactChecks) else ()


def graded_hash(task: Task, files: Mapping[str, bytes], answer: str | None) -> str:
    """Hash of the files and the answer that a verdict depends on."""
    if isinstance(task.hidden, AnswerChecks):
        return content_hash(["answer", answer])
    names = sorted(name for name in graded_files(task) if name in files)
    hashes = [[name, content_hash(files[name])] for name in names]
    return content_hash([answer, hashes] if isinstance(task.hidden, StateChecks) else hashes)


def _grade(
    task: Task,
    hidden: AnswerChecks | StateChecks | ArtifactChecks,
    files: Mapping[str, bytes],
    others: Collection[str],
    answer: str | None,
    sandbox: Sandbox,
) -> Verdict:
    """Grade once. Raises whatever goes wrong."""
    wanted = {name: files[name] for name in graded_files(task) if name in files}
    given = Submission(
        task=task, checks=hidden, files=wanted, others=others, answer=answer, sandbox=sandbox
    )  # fmt: skip
    if isinstance(hidden, AnswerChecks):
        return _grade_answer(hidden, given)
    if isinstance(hidden, StateChecks):
        result = CHECKS.find("state")(given)
    else:
        result = _run_artifacts(task, hidden, given)
    return Verdict(
        reward=float(result.right),
        components=_components(hidden, result),
        checks=result.checks,
        tampering=result.tampering,
        failure_kind=result.failure_kind,
        trust=result.trust,
        grader=GRADER,
        graded_hash=graded_hash(task, files, answer),
    )


def _grade_answer(hidden: AnswerChecks, given: Submission) -> Verdict:
    answer = given.answer
    if hidden.scorer is None:
        result = GradingOutcome({"answer": "pass" if same_answer(answer, hidden.answer) else "fail"})
    else:
        result = CHECKS.find("scorer")(given)
    right = result.passed == 1.0
    return Verdict(
        reward=float(right),
        components={"tests": float(right) if result.score is None else result.score},
        checks=result.checks,
        tampering=result.tampering,
        failure_kind="no_answer" if answer is None else result.failure_kind,
        trust=Trust.HIDDEN,
        grader=GRADER,
        graded_hash=content_hash(["answer", answer]),
    )


REFERENCE = "reference"
"""name of the check that the agent's tests pass on the reference"""


def _run_artifacts(task: Task, hidden: ArtifactChecks, given: Submission) -> GradingOutcome:
    """The outcome of running the artifacts; errors if they are missing or too large."""
    files = given.files
    if not task.artifacts:
        raise UsageError(f"task {task.key!r} has tests but no artifact that could answer them")
    too_large = any(len(data) > LARGEST_ARTIFACT for data in files.values())
    if too_large or len(files) < len(set(task.artifacts)):
        kind = "artifact_too_large" if len(files) == len(set(task.artifacts)) else "no_artifact"
        return GradingOutcome(dict.fromkeys(_check_names(hidden), "error"), (), kind)
    grader = _brought(hidden)
    return run_cases(given) if grader is None else CHECKS.find(grader)(given)


def _check_names(hidden: ArtifactChecks) -> list[str]:
    if isinstance(hidden, MutantChecks):
        return [REFERENCE, *(f"killed_{name}" for name in hidden.mutants)]
    return names(hidden.cases) if isinstance(hidden, CaseChecks) else ["tests"]


def _components(hidden: StateChecks | ArtifactChecks, result: GradingOutcome) -> dict[str, float | None]:
    """Scores by name: mutants, bounds on metrics, and all other checks together."""
    if isinstance(hidden, MutantChecks):
        killed = [state == "pass" for name, state in result.checks.items() if name != REFERENCE]
        stands = result.checks[REFERENCE] == "pass"  # tests that fail on the reference kill nothing
        return {"mutants_killed": sum(killed) / len(killed) if stands else 0.0}
    bounds = {name: state for name, state in result.checks.items() if name.startswith("metric_")}
    tests = [state == "pass" for name, state in result.checks.items() if name not in bounds]
    return {"tests": sum(tests) / len(tests), **{name: float(s == "pass") for name, s in bounds.items()}}


def reference_files(task: Task) -> dict[str, bytes] | None:
    """The artifacts that the task's oracle writes, if it writes all of them whole; else None."""
    texts = {str(a.arguments.get("path")): a.arguments.get("content") for a in task.oracle or ()}
    written = {path: text.encode() for path, text in texts.items() if isinstance(text, str)}
    return {path: written[path] for path in task.artifacts} if written.keys() >= set(task.artifacts) else None


RESULTS = ("reward.txt", "reward.json", "verdict.json", "junit*.xml", ".nano-*")
PROGRAMS = (
    "python",
    "python3",
    "pytest",
    "py.test",
    "pip",
    "git",
    "bash",
    "sh",
    "env",
    "node",
    "make",
    "curl",
)
_EXECUTABLE = 0o111


def planted(task: Task, delivery: Delivery, graded: Collection[str]) -> tuple[Tampering, ...]:
    """Findings: changed tests, and added configuration, modules, programs and result files."""
    before, after = delivery.before, delivery.after
    if before.entries == after.entries:
        return ()
    left = {*graded, *(e.path for e in after.entries if PurePosixPath(e.path).name in LINTERS)}
    kept = Snapshot(tuple(entry for entry in after.entries if entry.path not in left))
    original = Snapshot(tuple(entry for entry in before.entries if entry.path not in left))
    found = restored("", original, kept, delivery.blobs).found
    new = [entry for entry in kept.entries if entry.path not in before.by_path]
    return (*found, *(finding for entry in new for finding in _of(entry, task)))


def _of(entry: Entry, task: Task) -> Iterator[Tampering]:
    name = PurePosixPath(entry.path).name
    hidden = task.hidden.suite.files if isinstance(task.hidden, SuiteChecks) else {}
    if entry.kind is EntryKind.DIRECTORY:
        return
    if any(fnmatch(name, pattern) for pattern in RESULTS):
        yield Tampering(kind="reward_written", detail=f"{entry.path!r} was planted; no grader reads it")
    if name in {PurePosixPath(test).name for test in hidden}:
        yield Tampering(kind="tests", detail=f"{entry.path!r} has the name of a hidden test; it was not run")
    if name in PROGRAMS and entry.mode & _EXECUTABLE:
        yield Tampering(kind="shadowing", detail=f"{entry.path!r} stands in for a program; it was not run")


_ANSWERS = ("answer", "answer.txt")
"""files whose text is the answer if none was submitted"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """A submission: the trees before and after, the bytes of their files, and the answer."""

    before: Snapshot
    """the workspace before the first action"""
    after: Snapshot
    """the workspace as the agent left it"""
    blobs: BlobStore
    answer: str | None = None
    """as given to `submit`"""

    def files(self, names: Iterable[str]) -> dict[str, bytes]:
        """The regular files among `names`."""
        found = ((name, self.after.by_path.get(name)) for name in names)
        return {
            name: self.blobs.get(str(entry.content))
            for name, entry in found
            if entry is not None and entry.kind is EntryKind.FILE
        }

    @property
    def others(self) -> frozenset[str]:
        """Those of `names` that exist and are no regular files."""
        return frozenset(entry.path for entry in self.after.entries if entry.kind is not EntryKind.FILE)


def grade_delivery(
    task: Task, delivery: Delivery, sandbox: Sandbox, *, timeout: float | None = None
) -> Verdict | None:
    """The verdict of the task's check, of whatever kind; None if it has none.

    A failure of ours has reward None: it says nothing about the policy. `timeout` is of a check by command,
    in seconds, in place of its usual one.
    """
    hidden = task.hidden
    if hidden is None and task.check is None:
        return None
    sandbox = in_image(sandbox, task.image)
    if hidden is not None and not isinstance(hidden, WorkspaceChecks):
        wanted = graded_files(task)
        verdict = grade(
            task,
            files=delivery.files(wanted),
            others=delivery.others,
            answer=delivery.answer,
            sandbox=sandbox,
        )
        return flagged(verdict, planted(task, delivery, wanted))
    start = replace(delivery, after=delivery.before)
    return decided(
        lambda: _grade_tree(task, hidden, delivery, sandbox, timeout),
        lambda: _grade_tree(task, hidden, start, sandbox, timeout),
        graded_hash=tree_hash(delivery.after),
    )


def _grade_tree(
    task: Task, hidden: WorkspaceChecks | None, delivery: Delivery, sandbox: Sandbox, timeout: float | None
) -> Verdict:
    """The verdict of a command on the whole workspace. Raises whatever goes wrong."""
    tests = hidden.files if hidden is not None else {}
    before = laid_over(delivery.before, tests, delivery.blobs)
    after = laid_over(delivery.after, tests, delivery.blobs)
    check = CommandRun(
        command=hidden.command if hidden is not None else str(task.check),
        blobs=delivery.blobs, sandbox=sandbox, limits=task.limits,
        seconds=None if isinstance(hidden, RewardFileChecks) else timeout,
    )  # fmt: skip
    if isinstance(hidden, RewardFileChecks):
        return grade_reward_file(hidden, check, before, after, editable=task.artifacts)
    return grade_command(
        check, before, after,
        trust=Trust.USER_CHECK if hidden is not None or task.check_trusted else Trust.NONE,
        hidden=tests if hidden is not None else None, editable=task.artifacts,
    )  # fmt: skip


def grade_folder(task: Task, directory: Path, answer: str | None, sandbox: Sandbox) -> Verdict:
    """Grade a folder of this machine, which is read once and not trusted.

    Without `answer`, a file called "answer" is the answer. Raises UsageError for a task without a check, for
    one whose starting workspace is in a log, and for a path that is no folder.
    """
    blobs = MemoryBlobs()
    if task.snapshot is not None:
        raise UsageError(
            f"task {task.key!r} starts from a logged workspace; grade its run with nano-rl grade RUN"
        )
    texts = {name: text.encode("utf-8", "surrogatepass") for name, text in task.files.items()}
    before = make_snapshot(
        Entry(name, EntryKind.FILE, 0o644, blobs.put(data)) for name, data in texts.items()
    )
    wanted = graded_files(task) or (_ANSWERS if isinstance(task.hidden, AnswerChecks) else ())
    left = read_folder(directory, blobs, wanted)
    delivery = Delivery(before=before, after=left.tree, blobs=blobs, answer=answer)
    if answer is None and expects_answer(task.hidden):
        found = delivery.files(_ANSWERS)
        text = next((found[name] for name in _ANSWERS if name in found), None)
        answer = None if text is None else text.decode("utf-8", "replace")
        delivery = Delivery(before=before, after=left.tree, blobs=blobs, answer=answer)
    verdict = grade_delivery(task, delivery, sandbox)
    if verdict is None:
        raise UsageError(f"task {task.key!r} has no check; give it hidden checks or a `check`")
    changed = changed_since(directory, left)
    return flagged(verdict, [*left.findings, *changed], worthless=bool(changed))


def flagged(verdict: Verdict, findings: Iterable[Tampering], *, worthless: bool = False) -> Verdict:
    """The verdict with further findings; `worthless`: the reward becomes 0, unless the failure was ours."""
    known = verdict.tampering
    more = tuple(found for found in findings if found not in known)
    update: dict[str, object] = {"tampering": (*known, *more)}
    if worthless and verdict.reward is not None:
        update["reward"] = 0.0
    return shortened(verdict.model_copy(update=update))


def grade_trajectory(trajectory: Trajectory, sandbox: Sandbox, blobs: BlobStore) -> Verdict | None:
    """The verdict of the run's task; None if the task has no check. Executes nothing of the run again.

    A failure of ours, in the run or in the grading, has reward None: it says nothing about the policy.
    """
    if trajectory.task.hidden is None and trajectory.task.check is None:
        return None
    after = trajectory.last_snapshot
    if trajectory.stop is None or trajectory.stop.ours or after is None:
        return ungraded(str(trajectory.stop or StopReason.INTERRUPTED))
    hidden = trajectory.task.hidden
    if trajectory.workspace_lost and not isinstance(hidden, AnswerChecks):
        return Verdict(
            reward=0.0,
            components={"tests": 0.0},
            checks={"workspace": "error"},
            failure_kind="workspace_lost",
            trust=Trust.HIDDEN,
            grader=GRADER,
            graded_hash=content_hash(""),
        )
    delivery = Delivery(
        before=snapshot.load(trajectory.snapshot or after, blobs),
        after=snapshot.load(after, blobs),
        blobs=blobs,
        answer=trajectory.answer,
    )
    return grade_delivery(trajectory.task, delivery, sandbox)


def _outcome(verdict: Verdict) -> Verdict:
    return verdict


def _fraction(verdict: Verdict) -> Verdict:
    score = next(
        (v for v in (verdict.components.get(n) for n in ("tests", "mutants_killed")) if v is not None), None
    )
    if verdict.reward is None or score is None:
        return verdict
    return verdict.model_copy(update={"reward": 0.0 if verdict.tampering else score})


def _gate(verdict: Verdict) -> Verdict:
    spoilt = verdict.tampering and verdict.reward is not None
    return verdict.model_copy(update={"reward": 0.0}) if spoilt else verdict


GRADERS: dict[str, tuple[Callable[[Verdict], Verdict], str]] = {
    GRADER: (_outcome, "1 where every check passes, else 0"),
    f"{GRADER} fraction": (_fraction, "the fraction of checks that pass, 0 with any tampering"),
    f"{GRADER} gate": (_gate, "as the first, but any tampering found earns 0"),
}


def find_grader(name: str | None) -> str:
    """The full name of a grader, from it or from its last word; None: the default. Raises UsageError."""
    if name is None:
        return GRADER
    found = [known for known in GRADERS if name in (known, known.removeprefix(GRADER).strip())]
    if not name or not found:
        raise UsageError(f"unknown grader {name!r}; known: {', '.join(map(repr, GRADERS))}")
    return found[0]


def by_grader(name: str, verdict: Verdict) -> Verdict:
    """The verdict with the reward of the grader of that name."""
    return GRADERS[name][0](verdict).model_copy(update={"grader": name})
