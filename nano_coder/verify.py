"""Whether a logged run may train a policy gradient, and each reason why not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from nano_coder.dialects import DIALECTS
from nano_coder.profiles import PROFILES
from nano_coder.prompt import offered_tools
from nano_shared.redact import is_redacted
from nano_shared.types import Trajectory, Trust


@dataclass(frozen=True, slots=True)
class Finding:
    blocks: bool
    """the run may not train because of it"""
    kind: str
    """the check in a few words, the same for every run"""
    text: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def verify(trajectory: Trajectory) -> list[Finding]:
    """Every check, passed or not, in the order a reader would ask."""
    return [*_finished(trajectory), *_tokens(trajectory), *_interface(trajectory), *_verdict(trajectory)]


def _finished(trajectory: Trajectory) -> Iterator[Finding]:
    if trajectory.stop is None:
        yield Finding(
            True, "unfinished", f"the run never ended; nano-coder resume {trajectory.id} goes on with it"
        )
    elif trajectory.stop.ours:
        yield Finding(
            True,
            "failure of ours",
            f"it ended in a failure that the policy could not cause ({trajectory.stop})",
        )
    else:
        yield Finding(False, "ended", f"it ended by itself ({trajectory.stop})")


def _tokens(trajectory: Trajectory) -> Iterator[Finding]:
    if not trajectory.own_turns:
        yield Finding(True, "no turns", "no turn was logged")
        return
    bare = [turn.index for turn in trajectory.turns if turn.completion.tokens is None]
    if bare:
        yield Finding(
            True,
            "text-only",
            f"text-only: no token ids and log-probs for turn {bare[0]} (it can still imitate)",
        )
        return
    if is_redacted(trajectory):
        yield Finding(
            True,
            "redacted",
            "redacted: some of its tokens were hidden, and what follows them was sampled after the true ones"
            " (its text can still imitate)",
        )
        return
    rows = [turn.completion.tokens.row for turn in trajectory.turns if turn.completion.tokens]
    if any(after < before or after > before + 1 for before, after in pairwise(rows)):
        yield Finding(True, "broken rows", f"the token rows are out of order: {rows}")
        return
    for turn in trajectory.turns:
        tokens = turn.completion.tokens
        assert tokens is not None
        if not tokens.context_ids or not tokens.sampled_ids:
            yield Finding(
                True,
                "missing ids",
                f"turn {turn.index} has no {'context' if tokens.sampled_ids else 'sampled'} ids",
            )
            return
        if turn.index < trajectory.inherited:  # context, however it was sampled
            continue
        if turn.completion.sampling.top_p < 1 or turn.completion.sampling.top_k:
            yield Finding(
                True,
                "truncated sampling",
                f"turn {turn.index} was sampled with top-p or top-k: its support is not the policy's",
            )
            return
        if turn.completion.sampling.temperature == 0:
            yield Finding(
                True,
                "greedy",
                f"turn {turn.index} was decoded greedily: its log-probs are not those of a sample",
            )
            return
    sampled = trajectory.num_sampled_tokens
    yield Finding(
        False, "tokens", f"{sampled} sampled tokens in {len(trajectory.turns)} turns, each with its log-prob"
    )


def _interface(trajectory: Trajectory) -> Iterator[Finding]:
    profile = PROFILES.get(trajectory.profile)
    if profile is None or (profile.hash, profile.tools_hash) != (
        trajectory.profile_hash,
        trajectory.tools_hash,
    ):
        yield Finding(
            True,
            "other profile",
            f"profile {trajectory.profile} was another one when the run was made (its hash differs)",
        )
        return
    tools = offered_tools(profile, trajectory.task)
    for turn in trajectory.turns:
        parsed = DIALECTS[profile.dialect].parse(turn.completion.text, tools)
        if parsed.calls != turn.calls:
            yield Finding(
                True,
                "calls differ from text",
                f"turn {turn.index}: the logged calls are not what its text says",
            )
            return
    yield Finding(
        False,
        "interface",
        f"profile {profile.name}: hashes match, and each turn's calls are what its text says",
    )


def _verdict(trajectory: Trajectory) -> Iterator[Finding]:
    verdict = trajectory.verdict
    if verdict is None:
        yield Finding(True, "no verdict", "no verdict: give a --check, or grade it with nano-rl")
    elif verdict.reward is None:
        yield Finding(True, "no reward", f"the verdict has no reward ({verdict.failure_kind})")
    elif verdict.trust not in (Trust.HIDDEN, Trust.USER_CHECK):
        yield Finding(True, "low trust", f"the verdict's trust is too low ({verdict.trust})")
    else:
        yield Finding(
            False, "verdict", f"reward {verdict.reward:g} from {verdict.grader}, trust {verdict.trust}"
        )
