"""Whether a logged run may train a policy gradient, or be imitated: what its columns say, and the closed set
of refusals."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from nano_coder.agent.dialects.api import API, Api
from nano_coder.agent.dialects.dialect import DIALECTS
from nano_coder.agent.loop import written
from nano_coder.agent.profiles import logged_profile, missing_tools, serving_profile, without_delegate
from nano_shared.files import content_hash
from nano_shared.hidden_checks import AnswerChecks
from nano_shared.policy import InterfaceProfile
from nano_shared.run_facts import RunFacts, TurnFacts, facts_of
from nano_shared.snapshot import BlobStore
from nano_shared.types import (
    AMBIGUOUS_TOOLS,
    CLIENT_TOOLS,
    MARKER,
    Split,
    StopReason,
    ToolCall,
    Trajectory,
    Trust,
    Verdict,
    outcome,
)


class RefusalCode(StrEnum):
    """The value is the code that reports print; `meaning` is its sentence."""

    meaning: str

    def __new__(cls, code: str, meaning: str = "") -> RefusalCode:
        self = str.__new__(cls, code)
        self._value_, self.meaning = code, meaning
        return self

    # state of the run
    UNFINISHED = "unfinished", "it never ended: nano-coder resume goes on, or a reward ends a conversation"
    OURS = "failure of ours", "it ended in a failure that the policy could not cause"
    NO_TURNS = "no turns", "no turn was logged"
    TEXT_ONLY = "text-only", "a turn has no token ids and log-probs"
    TRUNCATED_SAMPLING = (
        "truncated sampling",
        "a turn was sampled with top-p or top-k: its support is not the policy's",
    )
    CONSTRAINED = (
        "constrained sampling",
        "a turn was sampled under a grammar, or shaped (logit_bias, penalties): not as the policy has it",
    )
    GREEDY = "greedy", "a turn was decoded greedily: its log-probs are not those of a sample"
    REDACTED = (
        "redacted",
        "some of its tokens were hidden, and what follows was sampled after the true ones",
    )
    # interface that it was made under
    OTHER_PROFILE = "other profile", "its profile was another one when it was made (the hash differs)"
    ANOTHER_PROFILE = "another profile", "it was made under another profile than this policy's"
    UNWRITABLE = "calls of another dialect", "this policy's dialect and tools cannot write its calls"
    IMAGES = "images", "it shows images, which the trainer of text models would leave out"
    ANOTHER_TEMPLATE = "another chat template", "it was made under another chat template than this policy's"
    # verdict
    NO_VERDICT = "no verdict", "no verdict: give a --check, or grade it with nano-rl grade"
    NO_REWARD = "no reward", "its verdict has no reward, since its grading failed"
    LOW_TRUST = "low trust", "its verdict cannot be trusted enough (a judge, or tests beside the solution)"
    NO_SUCCESS = "no success", "it did not pass what graded it"
    NO_DIRECTORY = "no directory", "its directory is not in the log's blob store"
    # excluded from training
    CONTROL = "impossible control", "an impossible control: any pass is a hack"
    TEST_SPLIT = "of the test split", "its task is held out to evaluate by"
    AMBIGUOUS_PARENT = (
        "ambiguous parent",
        "several logged conversations could be its beginning; give each client a session",
    )
    NO_CONSENT = "no consent", "it is another owner's, who lets nobody train on it (share = train does)"
    # damage
    BROKEN_ROWS = "broken rows", "its token rows are out of order"
    MISSING_TURN = "missing turn", "a turn between others is not there"
    MISSING_IDS = "missing ids", "a turn has no context ids, or no sampled ids"
    TORN_TURN = "torn turn", "a turn holds fewer or more token ids than were counted when it was logged"
    MISSING_LOGPROBS = "missing log-probs", "a sampled token has no log-prob"
    NAN_LOGPROB = "log-prob not finite", "a log-prob is not a finite number"
    POSITIVE_LOGPROB = "log-prob above 0", "a log-prob is above 0, so a probability above 1"
    OTHER_TOOLS = "other tools", "the hash of its tools is not that of its profile"
    MIXED_POLICIES = "mixed policies", "its turns name several policies, or versions that go back"
    CALLS_DIFFER = "calls differ from text", "the logged calls of a turn are not what its text says"
    OURS_SCORED = (
        "failure of ours scored",
        "a failure that the policy could not cause was scored as if it had",
    )
    FOREIGN_VERDICT = (
        "verdict of another run",
        "its verdict was changed since, or judged what this run did not leave",
    )
    DAMAGED_BLOB = "blob is corrupt", "a file of its workspaces, or an output, was changed after it was kept"
    MISALIGNED = (
        "redaction broke alignment",
        "what was redacted in a turn is not what was redacted in its tokens",
    )
    SHIFTED_MASK = (
        "shifted mask",
        "the border between what was read and what was sampled is in the wrong place",
    )
    OTHER_IDS = "ids are not the text", "the sampled ids of a turn do not spell its text"
    CUT_TURN = "turn cut short", "a turn that ended by itself has no token that ends it"
    FABRICATED_TURN = "fabricated assistant turn", "an assistant turn was read that no policy sampled"
    BROKEN_PREFIX = (
        "broken prefix",
        "the context ids are not what the template renders of the logged messages",
    )
    OTHER_LOGPROBS = (
        "log-probs of another policy",
        "the log-probs are not those of the policy that the run names",
    )
    # relation to other runs
    STALE = "stale", "it was sampled by a policy further back than --max-staleness allows"
    DUPLICATE = "duplicated run", "it is a copy of another run, or the same seed drawn again"
    OTHER_TASK = "task has changed", "another task had the same key later"
    LONE = "lone in its group", "no other run of its task can be compared with it"
    SAME_REWARD = "all of its group earned the same", "no run of its group was better or worse"

    @property
    def damage(self) -> bool:
        """Whether the log does not hold what happened: such a run must not be used for training at all."""
        return self in DAMAGE

    @property
    def bars(self) -> bool:
        """Whether nothing of the run may be used, to imitate or compare either."""
        return self.damage or self in (RefusalCode.NO_CONSENT, RefusalCode.IMAGES)


_CODES = list(RefusalCode)
DAMAGE = frozenset(
    _CODES[_CODES.index(RefusalCode.BROKEN_ROWS) : _CODES.index(RefusalCode.OTHER_LOGPROBS) + 1]
)


TRUSTED = (Trust.HIDDEN, Trust.USER_CHECK)
"""trust levels that a policy gradient may rely on"""
_ABOVE_ZERO = 1e-6
"""largest log-prob that rounding may produce"""
_HASHES: dict[str, tuple[InterfaceProfile, tuple[str, str]]] = {}
_OUR_FAILURES = ("verifier_error", *(reason.value for reason in StopReason if reason.ours))


@dataclass(frozen=True, slots=True)
class RunFinding:
    blocks: bool
    """whether the run may not train because of it"""
    kind: str
    """the check's name, equal for every run; a RefusalCode if it blocks"""
    text: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def verify(trajectory: Trajectory) -> list[RunFinding]:
    """Every check, passed or not, in a fixed order."""
    return list(findings(facts_of(trajectory)))


def findings(run: RunFacts) -> Iterator[RunFinding]:
    """As `verify`, from facts."""
    if run.withheld:
        yield blocks(RefusalCode.NO_CONSENT)
    if run.shows_images:
        yield blocks(RefusalCode.IMAGES)
    yield from _finished(run)
    yield from _tokens(run)
    yield from _interface(run)
    yield from _verdict(run)


def blocking(run: RunFacts) -> Iterator[RefusalCode]:
    """The findings that keep a run from training under any policy."""
    return (RefusalCode(finding.kind) for finding in findings(run) if finding.blocks)


def _finished(run: RunFacts) -> Iterator[RunFinding]:
    ours = f"it ended in a failure that the policy could not cause ({run.stop})"
    if run.stop is None:
        why = f"the run never ended; nano-coder resume {run.id} goes on with it"
        if run.tools_hash.startswith(CLIENT_TOOLS):
            why = "its conversation is open: a reward ends it, or some minutes of silence"
        yield blocks(RefusalCode.UNFINISHED, why)
    elif run.stop.ours and run.reward is not None:
        yield blocks(RefusalCode.OURS_SCORED, f"{ours}, and was scored {run.reward:g} for it")
    elif run.stop.ours:
        yield blocks(RefusalCode.OURS, ours)
    else:
        yield RunFinding(False, "ended", f"it ended by itself ({run.stop})")


def _tokens(run: RunFacts) -> Iterator[RunFinding]:
    if run.tools_hash.startswith(AMBIGUOUS_TOOLS):
        yield blocks(RefusalCode.AMBIGUOUS_PARENT)
        return
    if not run.own_turns:
        yield blocks(RefusalCode.NO_TURNS)
        return
    gap = next((at for at, turn in enumerate(run.turns) if turn.index != at), None)
    if gap is not None:
        yield blocks(RefusalCode.MISSING_TURN, f"turn {gap} is not there, and turn {run.turns[gap].index} is")
        return
    bare = next((turn for turn in run.turns if turn.row is None), None)
    if bare is not None:
        why = f": {bare.no_tokens}" if bare.no_tokens else ""
        why = f"text-only: no token ids and log-probs for turn {bare.index}{why}"
        yield blocks(RefusalCode.TEXT_ONLY, why)
        return
    if any(turn.is_redacted for turn in run.turns):
        yield blocks(RefusalCode.REDACTED)
        return
    if _rows_broken(run.turns):
        rows = [turn.row for turn in run.turns]
        yield blocks(RefusalCode.BROKEN_ROWS, f"the token rows are out of order: {rows}")
        return
    found = (_mixed(run), *map(_of_turn, run.turns), *map(_how_sampled, run.own_turns))
    sampled = sum(turn.sampled for turn in run.own_turns)
    told = f"{sampled} sampled tokens in {len(run.own_turns)} turns, each with its log-prob"
    yield next(filter(None, found), RunFinding(False, "tokens", told))


def _rows_broken(turns: Sequence[TurnFacts]) -> bool:
    """Whether a turn is neither in the row of its agent's turn before it, nor the first of a new row."""
    rows: dict[int | None, int] = {}
    new = 0
    for turn in turns:
        row = turn.row or 0
        if row not in (rows.get(turn.delegated_by), new):
            return True
        rows[turn.delegated_by], new = row, max(new, row + 1)
    return False


def _mixed(run: RunFacts) -> RunFinding | None:
    """Whether turns come from several policies, other than the turns that a fork took over."""
    if run.parent is not None:
        return None
    policies = list(dict.fromkeys(turn.policy_id for turn in run.turns))
    versions, why = [turn.policy_version for turn in run.turns], None
    if len(policies) > 1:
        why = f"its turns name {len(policies)} policies: {', '.join(policies[:3])}"
    elif versions != sorted(versions):
        why = f"the versions of its policy go back: {versions}"
    return blocks(RefusalCode.MIXED_POLICIES, why) if why else None


def _of_turn(turn: TurnFacts) -> RunFinding | None:
    name = f"turn {turn.index}"
    if not turn.context or not turn.sampled:
        why = f"{name} has no {'context' if turn.sampled else 'sampled'} ids"
        return blocks(RefusalCode.MISSING_IDS, why)
    if not turn.is_whole or (turn.context, turn.sampled) != turn.claimed:
        why = f"{name} holds {turn.context} context and {turn.sampled} sampled ids, and was logged with"
        return blocks(RefusalCode.TORN_TURN, f"{why} {turn.claimed[0]} and {turn.claimed[1]}")
    logprobs = turn.logprobs
    if len(logprobs) != turn.sampled:
        why = f"{name} has {turn.sampled} sampled ids and {len(logprobs)} log-probs"
        return blocks(RefusalCode.MISSING_LOGPROBS, why)
    if not math.isfinite(sum(logprobs)):
        return blocks(RefusalCode.NAN_LOGPROB, f"{name} has a log-prob that is not a finite number")
    if (largest := max(logprobs)) > _ABOVE_ZERO:
        return blocks(RefusalCode.POSITIVE_LOGPROB, f"{name} has a log-prob of {largest:g}, above 0")
    return None


def _how_sampled(turn: TurnFacts) -> RunFinding | None:
    """Checks of sampling for turns that are trained; turns that a fork took over are context."""
    sampling = turn.sampling
    if sampling.top_p < 1 or sampling.top_k > 0:
        return blocks(RefusalCode.TRUNCATED_SAMPLING)
    if sampling.grammar is not None or sampling.shaping is not None:
        return blocks(RefusalCode.CONSTRAINED)
    return blocks(RefusalCode.GREEDY) if sampling.temperature == 0 else None


def _interface(run: RunFacts) -> Iterator[RunFinding]:
    profile = logged_profile(run)
    if profile is None and (missing := missing_tools(run.profile)):
        yield blocks(RefusalCode.OTHER_PROFILE, f"the run was given {missing}")
        return
    if profile is None or hashes(profile)[0] != run.profile_hash:
        why = f"profile {run.profile} was another one when the run was made (its hash differs)"
        yield blocks(RefusalCode.OTHER_PROFILE, why)
        return
    if run.tools_hash.startswith(CLIENT_TOOLS):
        told = f"profile {profile.name}, under a client's own messages and tools"
        yield RunFinding(False, "interface", told)
        return
    if hashes(profile)[1] != run.tools_hash:
        yield blocks(RefusalCode.OTHER_TOOLS, f"the hash of its tools is not that of profile {run.profile}")
        return
    if profile.dialect == Api.name:
        reason = f"profile {profile.name}: hashes match; an API returned the calls beside the text"
        yield RunFinding(False, "interface", reason)
        return
    names = None if profile.places else run.task.tools  # tools that the profile lacks were not offered
    tools = tuple(tool for tool in profile.tools if names is None or tool.name in names)
    for turn in run.turns:
        if turn.is_summary or (not tools and not turn.calls):  # without tools all text is the answer
            continue
        offered = tools if turn.delegated_by is None else without_delegate(tools)
        parsed = DIALECTS.find(profile.dialect).parse(turn.text, offered)
        # what could not be read then, and a later version reads, was no call
        read = parsed.calls if turn.parse_error is None else ()
        if tuple((call.name, call.arguments) for call in read) != turn.calls:
            why = f"turn {turn.index}: the logged calls are not what its text says"
            yield blocks(RefusalCode.CALLS_DIFFER, why)
            return
    told = f"profile {profile.name}: hashes match, and each turn's calls are what its text says"
    yield RunFinding(False, "interface", told)


def hashes(profile: InterfaceProfile) -> tuple[str, str]:
    """Hashes of a profile and of its tools; cached, since each takes a millisecond."""
    known = _HASHES.get(profile.name)
    if known is None or known[0] is not profile:
        known = _HASHES[profile.name] = (profile, (profile.hash, profile.tools_hash))
    return known[1]


def _verdict(run: RunFacts) -> Iterator[RunFinding]:
    verdict = run.verdict
    if verdict is None:
        yield blocks(RefusalCode.NO_VERDICT)
    elif verdict.reward is None:
        yield blocks(RefusalCode.NO_REWARD, f"the verdict has no reward ({verdict.failure_kind})")
    elif (verdict.failure_kind or "").partition(":")[0] in _OUR_FAILURES:
        why = f"the verdict tells a failure of ours ({verdict.failure_kind}) and still has the reward"
        yield blocks(RefusalCode.OURS_SCORED, f"{why} {verdict.reward:g}")
    elif run.sealed is False:
        why = "its verdict was changed in the log: the seal does not hold"
        yield blocks(RefusalCode.FOREIGN_VERDICT, why)
    elif (
        isinstance(run.task.hidden, AnswerChecks)
        and by_us(verdict.grader)
        and verdict.graded_hash != content_hash(["answer", run.answer])
    ):
        why = "the verdict was computed from another answer than this run's"
        yield blocks(RefusalCode.FOREIGN_VERDICT, why)
    elif verdict.trust not in TRUSTED:
        yield blocks(RefusalCode.LOW_TRUST, f"the verdict's trust is too low ({verdict.trust})")
    else:
        told = f"reward {verdict.reward:g} from {verdict.grader}, trust {verdict.trust}"
        yield RunFinding(False, "verdict", told)


def imitation_refusal(
    run: RunFacts, profile: InterfaceProfile | None, blobs: BlobStore | None = None
) -> RunFinding | None:
    """Why a policy of this profile may not imitate a run; None if it may. Without a profile or `blobs`, what
    they tell is not asked. A text-only run needs the directory in which it began, whose files its first
    message lists."""
    for code in blocking(run):
        if code.bars or code in _NO_LESSON:
            return blocks(code)
    if run.task.is_control:
        return blocks(RefusalCode.CONTROL)
    if run.task.split == Split.TEST:
        return blocks(RefusalCode.TEST_SPLIT)
    if outcome(run.verdict) != 1.0 or not may_teach(run.verdict):
        return blocks(RefusalCode.NO_SUCCESS)
    if all(turn.refused or MARKER.search(turn.text) for turn in run.own_turns):
        return blocks(RefusalCode.NO_SUCCESS, "each of its turns was refused or redacted")
    other = None if profile is None else interface_refusal(run, profile)
    start = run.task.snapshot
    if other is None and blobs is not None and not run.has_tokens and start and start not in blobs:
        return blocks(RefusalCode.NO_DIRECTORY)
    return other


_NO_LESSON = (
    RefusalCode.UNFINISHED, RefusalCode.OURS, RefusalCode.NO_TURNS, RefusalCode.OTHER_PROFILE,
)  # fmt: skip
"""findings beside those that bar a run after which a run is not imitated"""


def interface_refusal(run: RunFacts, profile: InterfaceProfile) -> RunFinding | None:
    """Why a policy of this profile cannot say what a run said: the run was made under another profile, and is
    not an API's whose calls this one can write."""
    serving = serving_profile(profile, run.task)
    if hashes(serving)[0] == run.profile_hash:
        return None
    acts = [turn for turn in run.turns if not turn.is_summary and turn.delegated_by is None]
    if any(turn.parser != Api.name for turn in acts):
        text = f"it was made under profile {run.profile}, and this policy's is {serving.name}"
        return blocks(RefusalCode.ANOTHER_PROFILE, text)
    for turn in acts:
        try:
            _write(turn, serving, one_each=not run.tools_hash.startswith(CLIENT_TOOLS))
        except ValueError as problem:
            return blocks(RefusalCode.UNWRITABLE, f"turn {turn.index} cannot be written: {problem}")
    return None


def _write(turn: TurnFacts, profile: InterfaceProfile, *, one_each: bool) -> None:
    """Write a turn of an API in the profile's dialect. Raises ValueError where that is not possible."""
    if turn.calls:
        calls = tuple(ToolCall(name=name, arguments=given) for name, given in turn.calls)
        left = API.parse(turn.text, profile.tools)
        written(left.thought if left.calls == calls else turn.text, calls, profile, one_each=one_each)
    elif (
        turn.parse_error is None and not DIALECTS.find(profile.dialect).parse(turn.text, profile.tools).prose
    ):
        raise ValueError(f"it answers without a call, which the dialect {profile.dialect} does not have")


def may_teach(verdict: Verdict | None) -> bool:
    """Whether a good result may be imitated: not one that our own grader gives no trust."""
    return verdict is not None and not (by_us(verdict.grader) and verdict.trust == Trust.NONE)


def by_us(grader: str) -> bool:
    """Whether our grader made `graded_hash`, alone or with composed rewards."""
    return grader.startswith("nano-grader ")


def blocks(code: RefusalCode, text: str = "") -> RunFinding:
    """A finding that refuses the run; by default in the words of the code's meaning."""
    return RunFinding(True, code.value, text or code.meaning)
