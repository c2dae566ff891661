"""Why a run may not train: a closed set of codes, and a sentence for each."""

from __future__ import annotations

from enum import StrEnum


class Refusal(StrEnum):
    """The value is the code that reports print; `meaning` says it in a sentence."""

    # what the run is
    UNFINISHED = "unfinished"
    OURS = "failure of ours"
    NO_TURNS = "no turns"
    TEXT_ONLY = "text-only"
    TRUNCATED_SAMPLING = "truncated sampling"
    GREEDY = "greedy"
    REDACTED = "redacted"
    # which interface it was made under
    OTHER_PROFILE = "other profile"
    ANOTHER_PROFILE = "another profile"
    ANOTHER_TEMPLATE = "another chat template"
    # how it was judged
    NO_VERDICT = "no verdict"
    NO_REWARD = "no reward"
    LOW_TRUST = "low trust"
    # what may not be learned from at all
    CONTROL = "impossible control"
    TEST_SPLIT = "of the test split"
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
    MISALIGNED = "redaction broke alignment"
    SHIFTED_MASK = "shifted mask"
    OTHER_IDS = "ids are not the text"
    CUT_TURN = "turn cut short"
    FABRICATED_TURN = "fabricated assistant turn"
    BROKEN_PREFIX = "broken prefix"
    OTHER_LOGPROBS = "log-probs of another policy"
    # how it stands among the others
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
        """The log does not hold what happened: the run may teach nothing at all."""
        return self in DAMAGE


DAMAGE = frozenset(
    code for code in Refusal if list(Refusal).index(Refusal.BROKEN_ROWS) <= list(Refusal).index(code)
    <= list(Refusal).index(Refusal.OTHER_LOGPROBS)
)  # fmt: skip

MEANINGS = {
    Refusal.UNFINISHED: "it never ended; nano-coder resume goes on with it",
    Refusal.OURS: "it ended in a failure that the policy could not cause",
    Refusal.NO_TURNS: "no turn was logged",
    Refusal.TEXT_ONLY: "a turn has no token ids and log-probs; it can still imitate",
    Refusal.TRUNCATED_SAMPLING: "a turn was sampled with top-p or top-k: its support is not the policy's",
    Refusal.REDACTED: "some of its tokens were hidden, and what follows was sampled after the true ones",
    Refusal.GREEDY: "a turn was decoded greedily: its log-probs are not those of a sample",
    Refusal.OTHER_PROFILE: "its profile was another one when it was made (the hash differs)",
    Refusal.ANOTHER_PROFILE: "it was made under another profile than this policy's",
    Refusal.ANOTHER_TEMPLATE: "it was made under another chat template than this policy's",
    Refusal.NO_VERDICT: "no verdict: give a --check, or grade it with nano-rl grade",
    Refusal.NO_REWARD: "its verdict has no reward, since its grading failed",
    Refusal.LOW_TRUST: "its verdict cannot be trusted enough (a judge, or tests beside the solution)",
    Refusal.CONTROL: "an impossible control: any pass is a hack",
    Refusal.TEST_SPLIT: "its task is held out to evaluate by",
    Refusal.BROKEN_ROWS: "its token rows are out of order",
    Refusal.MISSING_TURN: "a turn between others is not there",
    Refusal.MISSING_IDS: "a turn has no context ids, or no sampled ids",
    Refusal.TORN_TURN: "a turn holds fewer or more token ids than were counted when it was logged",
    Refusal.MISSING_LOGPROBS: "a sampled token has no log-prob",
    Refusal.NAN_LOGPROB: "a log-prob is not a finite number",
    Refusal.POSITIVE_LOGPROB: "a log-prob is above 0, so a probability above 1",
    Refusal.OTHER_TOOLS: "the hash of its tools is not that of its profile",
    Refusal.MIXED_POLICIES: "its turns name several policies, or versions that go back",
    Refusal.CALLS_DIFFER: "the logged calls of a turn are not what its text says",
    Refusal.OURS_SCORED: "a failure that the policy could not cause was scored as if it had",
    Refusal.FOREIGN_VERDICT: "its verdict was computed from something that this run did not leave",
    Refusal.MISALIGNED: "what was redacted in a turn is not what was redacted in its tokens",
    Refusal.SHIFTED_MASK: "the border between what was read and what was sampled is in the wrong place",
    Refusal.OTHER_IDS: "the sampled ids of a turn do not spell its text",
    Refusal.CUT_TURN: "a turn that ended by itself has no token that ends it",
    Refusal.FABRICATED_TURN: "an assistant turn was read that no policy sampled",
    Refusal.BROKEN_PREFIX: "the context ids are not what the template renders of the logged messages",
    Refusal.OTHER_LOGPROBS: "the log-probs are not those of the policy that the run names",
    Refusal.STALE: "it was sampled by a policy further back than --max-staleness allows",
    Refusal.DUPLICATE: "it is a copy of another run, or the same seed drawn again",
    Refusal.OTHER_TASK: "another task had the same key later",
    Refusal.LONE: "no other run of its task can be compared with it",
    Refusal.SAME_REWARD: "no run of its group was better or worse",
}
