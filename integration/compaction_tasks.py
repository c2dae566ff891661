"""Tasks whose context fills, the profile under which a policy may summarise it, and oracles that do.

Three pages hold a word each, between lines that say nothing; the answer is the three words. A context of
`CONTEXT` tokens holds two pages and no third: without compaction the run ends there.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import EntryPoint
from typing import Any

from nano_coder.agent.profiles import COMPACT_1
from nano_coder.models.scripted import ScriptedPolicy
from nano_rl.suites.family import COLORS, THINGS
from nano_rl.tasks.oracle import oracle_policy
from nano_shared.extensions import _registered
from nano_shared.hashing import content_hash
from nano_shared.hidden_checks import AnswerChecks
from nano_shared.policy import Conversation
from nano_shared.profile import CompactionFormat, InterfaceProfile
from nano_shared.types import Completion, Limits, OracleAction, Provenance, Sampling, Split, Task

CONTEXT = 448
"""tokens that the policy reads"""
SUMMARISING = COMPACT_1.model_copy(
    update={
        "name": "compact-1-summaries",
        "compaction": CompactionFormat(request="Which words?", summary="\nWords so far: {{ summary }}"),
    }
)
_registered("nano.profiles")[SUMMARISING.name] = (
    EntryPoint(SUMMARISING.name, "compaction_tasks:SUMMARISING", "nano.profiles"),
)
PAGES = ("a.md", "b.md", "c.md")
_FILLER = ("the", "wind", "is", "cold", "and", "sea", "was", "calm", "near", "old", "stone", "house")
_LINES, _WORDS = 12, 9
_WORD = re.compile(r"(?:word:|so far:) ([a-z ]+)")


def draw(seed: int) -> Iterator[Task]:
    """Tasks, all different."""
    rng = random.Random(f"compaction {seed}")
    seen: set[tuple[str, ...]] = set()
    while True:
        words = tuple(rng.choice((*COLORS, *THINGS)) for _ in PAGES)
        if words not in seen:
            seen.add(words)
            yield _task(words, rng)


def _task(words: Sequence[str], rng: random.Random) -> Task:
    files = {page: _page(word, rng) for page, word in zip(PAGES, words, strict=True)}
    answer = " ".join(words)
    steps = [OracleAction(name="read_file", arguments={"path": page}) for page in PAGES]
    return Task(
        key=f"compaction-{answer.replace(' ', '-')}", prompt=f"Submit the words of {' '.join(PAGES)}.",
        files=files, hidden=AnswerChecks(answer=answer), tools=("read_file", "submit"),
        oracle=(*steps, OracleAction(name="submit", arguments={"answer": answer})),
        limits=Limits(max_turns=8, max_tokens=400), split=Split.TRAIN, family="compaction",
        view="three_pages", level=0, program_hash=content_hash(list(words)),
        provenance=Provenance(source="generated", generator="compaction", seed=0),
    )  # fmt: skip


def _page(word: str, rng: random.Random) -> str:
    lines = [" ".join(rng.choice(_FILLER) for _ in range(_WORDS)) for _ in range(_LINES)]
    lines.insert(rng.randrange(_LINES), f"word: {word}")
    return "\n".join(lines) + "\n"


class SummarisingOracle(ScriptedPolicy):
    """Takes the oracle's actions, and answers a request for a summary with the words that it has read."""

    def __init__(self, task: Task, profile: InterfaceProfile, count: Callable[[str], int]) -> None:
        super().__init__(oracle_policy(task, profile)._texts, context_limit=CONTEXT, id="oracle")
        self.count = count  # type: ignore[method-assign]

    def complete(self, conversation: Conversation, sampling: Sampling) -> Completion:
        if conversation.messages[-1].content != SUMMARISING.compaction.request:  # type: ignore[union-attr]
            return super().complete(conversation, sampling)
        words = [
            w for m in conversation.messages for found in _WORD.findall(m.content) for w in found.split()
        ]
        done: Any = super()._completion
        from nano_shared.types import Finish

        return done(" ".join(dict.fromkeys(words)), Finish.STOP, None, sampling)
