"""Refusal codes: why a run may not train, as a closed set of codes with a sentence for each."""

from __future__ import annotations

from enum import StrEnum


class RefusalCode(StrEnum):
    """The value is the code that reports print; `meaning` is its sentence."""

    # state of the run
    UNFINISHED = "unfinished"
    OURS = "failure of ours"
    NO_TURNS = "no turns"
    TEXT_ONLY = "text-only"
    TRUNCATED_SAMPLING = "truncated sampling"
    CONSTRAINED = "constrained sampling"
    GREEDY = "greedy"
    REDACTED = "redacted"
    # interface that it was made under
    OTHER_PROFILE = "other profile"
    ANOTHER_PROFILE = "another profile"
    ANOTHER_TEMPLATE = "another chat template"
    # verdict
    NO_VERDICT = "no verdict"
    NO_REWARD = "no reward"
    LOW_TRUST = "low trust"
    # excluded from training
    CONTROL = "impossible control"
    TEST_SPLIT = "of the test split"
    AMBIGUOUS_PARENT = "ambiguous parent"
    # damage
    BROKEN_ROWS = "broken rows"
    MISSING_TURN = "missing turn"
    MISSING_IDS = "missing ids"
    TORN_TURN = "torn turn"
    MISSING_LOGPROBS = "missing log-probs"
    NAN_LOGPROB = "log-prob not finite"
    POSITIVE_LOGPROB = "log-prob above 0"
    OTHER_TOOLS = "other tools"
    MIXED_POLICIES = "mixed policies"
    CALLS_DIFFER = "calls differ from text"
    OURS_SCORED = "failure of ours scored"
    FOREIGN_VERDICT = "verdict of another run"
    DAMAGED_BLOB = "blob is corrupt"
    MISALIGNED = "redaction broke alignment"
    SHIFTED_MASK = "shifted mask"
    OTHER_IDS = "ids are not the text"
    CUT_TURN = "turn cut short"
    FABRICATED_TURN = "fabricated assistant turn"
    BROKEN_PREFIX = "broken prefix"
    OTHER_LOGPROBS = "log-probs of another policy"
    # relation to other runs
    STALE = "stale"
    DUPLICATE = "duplicated run"
    OTHER_TASK = "task has changed"
    LONE = "lone in its group"
    SAME_REWARD = "all of its group earned the same"

    @property
    def meaning(self) -> str:
        return MEANINGS[self]

    @property
    def damage(self) -> bool:
        """Whether the log does not hold what happened: such a run must not be used for training at all."""
        return self in DAMAGE


_CODES = list(RefusalCode)
DAMAGE = frozenset(
    _CODES[_CODES.index(RefusalCode.BROKEN_ROWS) : _CODES.index(RefusalCode.OTHER_LOGPROBS) + 1]
)

MEANINGS = {
    RefusalCode.UNFINISHED: "it never ended: nano-coder resume goes on, or a reward ends a conversation",
    RefusalCode.OURS: "it ended in a failure that the policy could not cause",
    RefusalCode.NO_TURNS: "no turn was logged",
    RefusalCode.TEXT_ONLY: "a turn has no token ids and log-probs; it can still imitate",
    RefusalCode.TRUNCATED_SAMPLING: "a turn was sampled with top-p or top-k: its support is not the policy's",
    RefusalCode.CONSTRAINED: "a turn was sampled under a grammar: its support is not the policy's",
    RefusalCode.REDACTED: "some of its tokens were hidden, and what follows was sampled after the true ones",
    RefusalCode.GREEDY: "a turn was decoded greedily: its log-probs are not those of a sample",
    RefusalCode.OTHER_PROFILE: "its profile was another one when it was made (the hash differs)",
    RefusalCode.ANOTHER_PROFILE: "it was made under another profile than this policy's",
    RefusalCode.ANOTHER_TEMPLATE: "it was made under another chat template than this policy's",
    RefusalCode.NO_VERDICT: "no verdict: give a --check, or grade it with nano-rl grade",
    RefusalCode.NO_REWARD: "its verdict has no reward, since its grading failed",
    RefusalCode.LOW_TRUST: "its verdict cannot be trusted enough (a judge, or tests beside the solution)",
    RefusalCode.CONTROL: "an impossible control: any pass is a hack",
    RefusalCode.TEST_SPLIT: "its task is held out to evaluate by",
    RefusalCode.AMBIGUOUS_PARENT: "it continues a conversation that several logged ones could be",
    RefusalCode.BROKEN_ROWS: "its token rows are out of order",
    RefusalCode.MISSING_TURN: "a turn between others is not there",
    RefusalCode.MISSING_IDS: "a turn has no context ids, or no sampled ids",
    RefusalCode.TORN_TURN: "a turn holds fewer or more token ids than were counted when it was logged",
    RefusalCode.MISSING_LOGPROBS: "a sampled token has no log-prob",
    RefusalCode.NAN_LOGPROB: "a log-prob is not a finite number",
    RefusalCode.POSITIVE_LOGPROB: "a log-prob is above 0, so a probability above 1",
    RefusalCode.OTHER_TOOLS: "the hash of its tools is not that of its profile",
    RefusalCode.MIXED_POLICIES: "its turns name several policies, or versions that go back",
    RefusalCode.CALLS_DIFFER: "the logged calls of a turn are not what its text says",
    RefusalCode.OURS_SCORED: "a failure that the policy could not cause was scored as if it had",
    RefusalCode.FOREIGN_VERDICT: "its verdict was changed since, or judged what this run did not leave",
    RefusalCode.DAMAGED_BLOB: "a file of its workspaces, or an output, was changed after it was kept",
    RefusalCode.MISALIGNED: "what was redacted in a turn is not what was redacted in its tokens",
    RefusalCode.SHIFTED_MASK: "the border between what was read and what was sampled is in the wrong place",
    RefusalCode.OTHER_IDS: "the sampled ids of a turn do not spell its text",
    RefusalCode.CUT_TURN: "a turn that ended by itself has no token that ends it",
    RefusalCode.FABRICATED_TURN: "an assistant turn was read that no policy sampled",
    RefusalCode.BROKEN_PREFIX: "the context ids are not what the template renders of the logged messages",
    RefusalCode.OTHER_LOGPROBS: "the log-probs are not those of the policy that the run names",
    RefusalCode.STALE: "it was sampled by a policy further back than --max-staleness allows",
    RefusalCode.DUPLICATE: "it is a copy of another run, or the same seed drawn again",
    RefusalCode.OTHER_TASK: "another task had the same key later",
    RefusalCode.LONE: "no other run of its task can be compared with it",
    RefusalCode.SAME_REWARD: "no run of its group was better or worse",
}
