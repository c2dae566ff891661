"""Refusal codes: why a run may not train, as a closed set of codes with a sentence for each."""

from __future__ import annotations

from enum import StrEnum


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
    TEXT_ONLY = "text-only", "a turn has no token ids and log-probs; it can still imitate"
    TRUNCATED_SAMPLING = (
        "truncated sampling",
        "a turn was sampled with top-p or top-k: its support is not the policy's",
    )
    CONSTRAINED = (
        "constrained sampling",
        "a turn was sampled under a grammar: its support is not the policy's",
    )
    GREEDY = "greedy", "a turn was decoded greedily: its log-probs are not those of a sample"
    REDACTED = "redacted", "some of its tokens were hidden, and what follows was sampled after the true ones"
    # interface that it was made under
    OTHER_PROFILE = "other profile", "its profile was another one when it was made (the hash differs)"
    ANOTHER_PROFILE = "another profile", "it was made under another profile than this policy's"
    ANOTHER_TEMPLATE = "another chat template", "it was made under another chat template than this policy's"
    # verdict
    NO_VERDICT = "no verdict", "no verdict: give a --check, or grade it with nano-rl grade"
    NO_REWARD = "no reward", "its verdict has no reward, since its grading failed"
    LOW_TRUST = "low trust", "its verdict cannot be trusted enough (a judge, or tests beside the solution)"
    # excluded from training
    CONTROL = "impossible control", "an impossible control: any pass is a hack"
    TEST_SPLIT = "of the test split", "its task is held out to evaluate by"
    AMBIGUOUS_PARENT = "ambiguous parent", "it continues a conversation that several logged ones could be"
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


_CODES = list(RefusalCode)
DAMAGE = frozenset(
    _CODES[_CODES.index(RefusalCode.BROKEN_ROWS) : _CODES.index(RefusalCode.OTHER_LOGPROBS) + 1]
)
