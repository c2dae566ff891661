"""Deep verification: whether tokens are what template and texts say, and log-probs those of the weights."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from nano_coder.agent.chat_template import ChatTemplate
from nano_coder.agent.dialects.api import Api
from nano_coder.agent.loop import observation_messages
from nano_coder.agent.profiles import first_started, logged_profile, open_conversation, without_delegate
from nano_coder.grading.command_check import laid_over, restored, tree_hash
from nano_coder.grading.grade import Delivery, graded_files, graded_hash
from nano_coder.models.opening import OpenedWeights, local_policy, open_weights
from nano_coder.verify.trainable import RefusalCode, RunFinding, blocks, by_us
from nano_coder.verify.trainable import findings as judge
from nano_shared import snapshot
from nano_shared.errors import LogError, NanoError, PolicyError, UsageError
from nano_shared.files import content_hash
from nano_shared.hidden_checks import AnswerChecks, CommandChecks, EnvironmentChecks, RewardFileChecks
from nano_shared.policy import Conversation, InterfaceProfile
from nano_shared.run_facts import RunFacts
from nano_shared.snapshot import BlobStore
from nano_shared.store import LogStore
from nano_shared.types import MARKER, Finish, Trajectory, Turn, TurnTokens

if TYPE_CHECKING:
    from nano_coder.models.local.engine import Engine


def expected_hash(run: Trajectory, blobs: BlobStore) -> str | None:
    """The hash of what the run left for grading; None if it cannot be computed from the log. That is the case
    for a task without a check, a reward file (whose tree the grader changes), an environment of others, and a
    workspace whose blobs are missing."""
    task = run.task
    hidden = task.hidden
    if isinstance(hidden, AnswerChecks):
        return content_hash(["answer", run.answer])
    after = run.last_snapshot
    if after is None or run.workspace_lost or (hidden is None and task.check is None):
        return None
    if isinstance(hidden, RewardFileChecks | EnvironmentChecks):
        return None
    try:
        trees = [snapshot.load(tree, blobs) for tree in (run.snapshot or after, after)]
        if hidden is None or isinstance(hidden, CommandChecks):
            tests = hidden.files if hidden is not None else {}
            command = hidden.command if hidden is not None else str(task.check)
            before, left = (laid_over(tree, tests, blobs) for tree in trees)
            return tree_hash(restored(command, before, left, blobs, task.artifacts).tree)
        delivery = Delivery(before=trees[0], after=trees[1], blobs=blobs, answer=run.answer)
        return graded_hash(task, delivery.files(graded_files(task)), run.answer)
    except (LogError, snapshot.SnapshotError):
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCheck:
    """Checks runs that have tokens under this template."""

    template: ChatTemplate
    eos_ids: Collection[int]
    """ids that end a turn"""
    blobs: BlobStore
    """blobs of the runs' log"""

    def findings(self, run: Trajectory) -> list[RunFinding]:
        """What is wrong, worst first; empty if everything is right."""
        of_api = any(turn.parser == Api.name for turn in run.turns)  # whose server rendered the messages
        found = (self._spelling(run), None if of_api else self._rendering(run), self._verdict(run))
        return [finding for finding in found if finding is not None]

    def refusal(self, run: Trajectory) -> RefusalCode | None:
        return next((RefusalCode(finding.kind) for finding in self.findings(run)), None)

    def _spelling(self, run: Trajectory) -> RunFinding | None:
        """Sampled ids must spell the text, and end as `finish` says."""
        for turn in run.turns:
            tokens, name = tokens_of(turn), f"turn {turn.index}"
            of_api = turn.parser == Api.name or (turn.is_summary and turn.completion.api is not None)
            spelt = self._decode(tokens)
            if of_api:  # calls are beside the text, which was trimmed
                named = (call.name for call in turn.calls)
                if not all(part in spelt for part in (turn.completion.text.strip(), *named)):
                    why = f"{name}: its ids do not spell its text and its calls"
                    return blocks(RefusalCode.OTHER_IDS, why)
            elif spelt != turn.completion.text:
                return self._misspelt(turn)
            ended = tokens.sampled_ids[-1] in self.eos_ids
            stopped = ended or any(text in turn.completion.text for text in turn.completion.sampling.stop)
            cut = of_api and turn.completion.sampling.stop  # a stop string is not shown
            if turn.completion.finish is Finish.STOP and not stopped and not cut:
                return blocks(RefusalCode.CUT_TURN, f"{name} ended by itself, and no token of it says so")
        return None

    def _misspelt(self, turn: Turn) -> RunFinding:
        tokens, text, name = tokens_of(turn), turn.completion.text, f"turn {turn.index}"
        if MARKER.search(text):
            why = f"{name}: its tokens do not spell the text that redaction left of it"
            return blocks(RefusalCode.MISALIGNED, why)
        if self._shifted(tokens, text):
            return blocks(RefusalCode.SHIFTED_MASK, f"{name}: its text begins elsewhere than its mask")
        whole = self._decode(tokens)
        if whole and text.startswith(whole) and turn.completion.finish is Finish.STOP:
            return blocks(RefusalCode.CUT_TURN, f"{name}: its ids spell only the beginning of its text")
        return blocks(RefusalCode.OTHER_IDS, f"{name}: its sampled ids do not spell its text")

    def _shifted(self, tokens: TurnTokens, text: str) -> bool:
        """Whether moving the border between context and sample would make the ids spell the text."""
        row, border = (*tokens.context_ids, *tokens.sampled_ids), len(tokens.context_ids)
        body = row[:-1] if row[-1] in self.eos_ids else row
        near = range(max(0, border - 8), min(len(row), border + 9))
        return any(
            self.template.encoder.decode(part[at:]).removesuffix("\n") == text.removesuffix("\n")
            for at in near
            if at != border
            for part in (row, body)
        )

    def _decode(self, tokens: TurnTokens) -> str:
        ids = tokens.sampled_ids
        return self.template.encoder.decode(ids[:-1] if ids[-1] in self.eos_ids else ids)

    def _rendering(self, run: Trajectory) -> RunFinding | None:
        """Context ids must be what the template renders of the logged messages."""
        if run.is_raw:  # a client's bare prompts, which the ids must spell
            for turn in run.turns:
                prompt = "".join(message.content for message in turn.messages)
                if self.template.encoder.decode(tokens_of(turn).context_ids) != prompt:
                    return self._differs(turn, tuple(self.template.encoder.prompt(prompt)))
            return None
        profile = logged_profile(run)
        if profile is None:
            return blocks(RefusalCode.OTHER_PROFILE, f"profile {run.profile} is not one of this nano")
        try:
            proof = prove_prompts(run, profile, self.template, self.blobs)
        except PolicyError as problem:
            return blocks(RefusalCode.BROKEN_PREFIX, str(problem))
        return None if proof.differing is None else self._differs(proof.differing, proof.rendered)

    def _differs(self, turn: Turn, expected: tuple[int, ...]) -> RunFinding:
        tokens, name = tokens_of(turn), f"turn {turn.index}"
        context = tokens.context_ids
        texts = [observation.text for observation in turn.observations]
        if any(MARKER.search(text) for text in texts) or MARKER.search(turn.completion.text):
            return blocks(RefusalCode.MISALIGNED, f"{name}: its context is not what redaction left of it")
        row = (*context, *tokens.sampled_ids)
        if len(context) != len(expected) and row[: len(expected)] == expected:
            return blocks(RefusalCode.SHIFTED_MASK, f"{name}: its context ends {len(expected)} tokens in")
        # how often an assistant turn begins, by the template's own markers
        begun = [self.template.encoder.decode(ids).count("assistant") for ids in (context, expected)]
        if begun[0] > begun[1]:
            why = f"{name}: its context holds an assistant turn that was not sampled"
            return blocks(RefusalCode.FABRICATED_TURN, why)
        why = f"{name}: its {len(context)} context ids are not the {len(expected)} that the template renders"
        return blocks(RefusalCode.BROKEN_PREFIX, why)

    def _verdict(self, run: Trajectory) -> RunFinding | None:
        verdict = run.verdict
        if verdict is None or verdict.reward is None or not by_us(verdict.grader):
            return None
        expected = expected_hash(run, self.blobs)
        if expected in (None, verdict.graded_hash):
            return None
        why = "the verdict was computed from other files than this run's"
        return blocks(RefusalCode.FOREIGN_VERDICT, why)


@runtime_checkable
class PromptRenderer(Protocol):
    """Renders a conversation to token ids: a chat template with its tokenizer."""

    @property
    def template_hash(self) -> str: ...

    def next_row(self, conversation: Conversation) -> tuple[int, tuple[int, ...]]:
        """The row of the next turn, and the [N] ids that its prompt appends to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptProof:
    """The logged prompts of a run against what is rendered of its logged messages."""

    equal: int
    """prompts that are rendered again token for token"""
    differing: Turn | None = None
    """the first turn whose prompt is rendered otherwise"""
    rendered: tuple[int, ...] = ()
    """[N] ids that are rendered for it"""


def prove_prompts(
    run: Trajectory, profile: InterfaceProfile, renderer: PromptRenderer, blobs: BlobStore
) -> PromptProof:
    """Rebuild the prompts of a run token for token. Not compared: turns without tokens, a first prompt whose
    list of files the log does not have, and the prompt that begins a row with a compacted history. Raises
    PolicyError where the template refuses the messages."""
    files, served, equal = _files(run, blobs), run.is_served, 0
    main = Conversation(started=first_started(run))
    if not served:
        main = open_conversation(profile, run.task, files or (), first_started(run))
    conversations: dict[int | None, Conversation] = {None: main}
    new_row = 0
    for turn in run.turns:
        if (conversation := conversations.get(turn.delegated_by)) is None:
            # of a sub-agent, whose first turn logs its messages
            conversation = Conversation(tools=without_delegate(main.tools), started=main.started)
            conversation.row = new_row
            conversations[turn.delegated_by] = conversation
        conversation.last_row = max(new_row - 1, 0)
        if run.restates(turn):
            conversation.begin_row(turn.messages)
        elif turn.messages:
            conversation.replace_new(turn.messages)
        tokens = turn.completion.tokens
        if tokens is not None:
            new_row = max(new_row, tokens.row + 1)
            if served or turn.index > 0 or files is not None:
                try:
                    row, rendered = renderer.next_row(conversation)
                except PolicyError as problem:
                    raise PolicyError(f"turn {turn.index}: {problem}") from None
                # a row that the template did not begin holds a compacted history
                if tokens.row in (row, conversation.row):
                    if rendered != tokens.context_ids:
                        return PromptProof(equal=equal, differing=turn, rendered=rendered)
                    equal += 1
        conversation.record(turn.completion)
        if turn.is_summary:
            conversation.begin_row(())
        for message in observation_messages(turn):
            conversation.append(message)
    return PromptProof(equal=equal)


def _files(run: Trajectory, blobs: BlobStore) -> list[str] | None:
    """The files that the first message listed; None if the log cannot tell."""
    if run.snapshot is not None:
        with suppress(LogError, snapshot.SnapshotError):
            return snapshot.load(run.snapshot, blobs).shown_files
    return None if run.task.snapshot else sorted(run.task.files)


def tokens_of(turn: Turn) -> TurnTokens:
    tokens = turn.completion.tokens
    if tokens is None:
        raise ValueError(f"turn {turn.index} is text-only, and only tokens can be checked")
    return tokens


MAX_GAP = 1e-4
"""nats; bound for any token, if the policy sampled in float32"""
MEAN_GAP = 0.05
"""bound for the mean relative gap of a run, if the policy sampled in bfloat16: over 384 runs of the shipped
policy the mean is 0.002 and the largest 0.036, over 20 chats that it finds unlikely 0.02 and 0.033"""
TURN_GAP = 0.1
"""bound for the mean relative gap of one turn, for any dtype: a turn that another policy wrote is nats away,
which a long run must not hide"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """|recomputed - recorded| over the sampled tokens of a run, nats."""

    tokens: int
    mean: float
    max: float
    relative_mean: float
    """where a recorded log-prob is below -1, its gap divided by it: rounding grows with what is rounded"""
    worst_turn: int
    """the turn with the largest relative mean"""
    worst_turn_mean: float
    """relative"""

    @property
    def exact(self) -> bool:
        """Whether the gap is within the bound for float32."""
        return self.max <= MAX_GAP

    @property
    def close(self) -> bool:
        """Whether the gap is within the bounds for bfloat16; False for NaN."""
        return self.relative_mean <= MEAN_GAP and self.worst_turn_mean <= TURN_GAP


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A sampled token: its turn, and its log-prob as recorded and as recomputed, nats."""

    turn: int
    recorded: float
    recomputed: float
    entropy: float | None = None
    """of the distribution that it was drawn from, nats; None if it was not asked for"""

    @property
    def gap(self) -> float:
        return abs(self.recomputed - self.recorded)

    @property
    def relative_gap(self) -> float:
        return self.gap / max(1.0, -self.recorded)


def logprob_gap(run: Trajectory, engine: Engine) -> Gap:
    """The gap between the recorded log-probs and those of the engine's weights. Raises ValueError for a run
    without tokens."""
    return gap_of(rescored(run, engine))


def gap_of(tokens: Sequence[Scored]) -> Gap:
    """The gap of tokens that have been scored. Raises ValueError if there are none."""
    if not tokens:
        raise ValueError("no token was sampled, so no log-prob can differ")
    turns = groupby(tokens, key=lambda token: token.turn)
    means = {turn: _mean([token.relative_gap for token in group]) for turn, group in turns}
    every = [token.gap for token in tokens]
    worst = max(means, key=lambda turn: math.inf if math.isnan(means[turn]) else means[turn])
    return Gap(
        tokens=len(every), mean=_mean(every), max=math.nan if any(map(math.isnan, every)) else max(every),
        relative_mean=_mean([token.relative_gap for token in tokens]),
        worst_turn=worst, worst_turn_mean=means[worst],
    )  # fmt: skip


def rescored(run: Trajectory, engine: Engine, *, entropy: bool = False) -> list[Scored]:
    """Every sampled token of a run, row by row, scored by the engine's weights at its turn's temperature."""
    scored: list[Scored] = []
    by_row = sorted(run.turns, key=lambda turn: tokens_of(turn).row)
    for _, turns in groupby(by_row, key=lambda turn: tokens_of(turn).row):
        row: list[int] = []
        begins: list[tuple[Turn, int]] = []
        for turn in turns:
            tokens = tokens_of(turn)
            row += tokens.context_ids
            begins.append((turn, len(row)))
            row += tokens.sampled_ids
        temperatures = {turn.completion.sampling.temperature for turn, _ in begins}
        first = begins[0][1]
        scores = {t: engine.score_tokens(row, t, first=first, entropy=entropy) for t in temperatures}
        for turn, start in begins:
            of_turn = scores[turn.completion.sampling.temperature]
            scored += [
                Scored(
                    turn=turn.index, recorded=recorded, recomputed=of_turn[at - first].logprob,
                    entropy=of_turn[at - first].entropy,
                )
                for at, recorded in enumerate(tokens_of(turn).logprobs, start)
            ]  # fmt: skip
    return scored


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


class NotAtHand(UsageError):
    """The weights that sampled a run are not available here, or differ from those under its policy's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    run: str
    policy: str
    policy_id: str
    dtype: str | None
    """of the weights that `gap` was computed with; None if it was not computed"""
    gap: Gap | None
    findings: tuple[RunFinding, ...]
    """what is wrong; empty for a certified run"""

    @property
    def certified(self) -> bool:
        return not self.findings

    def as_dict(self) -> dict[str, Any]:
        rounded = {"relative_mean": MEAN_GAP, "worst_turn_mean": TURN_GAP}
        return {
            **{name: getattr(self, name) for name in ("certified", "policy", "policy_id", "dtype")},
            "difference": asdict(self.gap) if self.gap else None,
            "bounds": {"max": MAX_GAP} if self.dtype == "float32" else rounded,
            "damage": [finding.as_dict() for finding in self.findings],
        }


def deep_verify(facts: RunFacts, store: LogStore, *, model: str | None = None) -> Certificate:
    """Certify a run, or say why not. `model` names its policy's weights, if not by the recorded name. Raises
    NotAtHand if the weights are not available, or other weights have that name."""
    name = model or facts.policy
    damage = tuple(f for f in judge(facts) if f.blocks and RefusalCode(f.kind) in _UNCERTIFIABLE)
    if damage:
        named = facts.turns[0].policy_id if facts.turns else ""
        return Certificate(run=facts.id, policy=name, policy_id=named, dtype=None, gap=None, findings=damage)
    run = store.get(facts.id)
    opened = _opened(name, run, "float32")
    policy = local_policy(opened.loaded, opened.profile, version=opened.version)
    check = TokenCheck(template=policy.template, eos_ids=opened.loaded.eos_ids, blobs=store.blobs)
    findings = check.findings(run)
    if policy.template_hash != run.template_hash:
        findings = [blocks(RefusalCode.ANOTHER_TEMPLATE), *findings]
    dtype = "float32"
    gap = logprob_gap(run, policy.engine)
    if not gap.exact:  # the log does not record the dtype of sampling, which is bfloat16 for larger models
        rounded = _opened(name, run, "bfloat16")
        dtype, gap = "bfloat16", logprob_gap(run, local_policy(rounded.loaded, rounded.profile).engine)
        if not gap.close:
            far = (
                f"its log-probs are {gap.mean:.2g} nats from the policy's in the mean and {gap.max:.2g} at"
                f" most; turn {gap.worst_turn} is the farthest"
            )
            findings.append(blocks(RefusalCode.OTHER_LOGPROBS, far))
    return Certificate(
        run=run.id, policy=name, policy_id=opened.loaded.id, dtype=dtype, gap=gap, findings=tuple(findings)
    )


_UNCERTIFIABLE = frozenset(
    {code for code in RefusalCode if code.damage}
    - {RefusalCode.OURS_SCORED, RefusalCode.FOREIGN_VERDICT, RefusalCode.OTHER_TOOLS}
) | {RefusalCode.TEXT_ONLY, RefusalCode.NO_TURNS, RefusalCode.REDACTED}
"""findings after which nothing can be recomputed"""


@lru_cache(maxsize=2)
def _weights(name: str, dtype: Literal["float32", "bfloat16"]) -> OpenedWeights:
    """Cached, since many runs name the same policy."""
    return open_weights(name, dtype=dtype)


def _opened(name: str, run: Trajectory, dtype: Literal["float32", "bfloat16"]) -> OpenedWeights:
    """The weights that sampled the run. Raises NotAtHand."""
    way_out = "name where they lie with --model"
    try:
        opened = _weights(name, dtype)
    except NanoError as problem:
        raise NotAtHand(f"the policy of run {run.id} is not at hand ({problem}); {way_out}") from problem
    last = run.turns[-1].completion
    if opened.loaded.id != last.policy_id:
        raise NotAtHand(
            f"the policy of run {run.id} is not at hand: {name} holds the weights {opened.loaded.id[:19]},"
            f" and {last.policy_id[:19]} sampled it; {way_out}"
        )
    if opened.version != last.policy_version:
        raise NotAtHand(
            f"the policy of run {run.id} is not at hand: it was sampled {last.policy_version} optimizer"
            f" steps in, and {name} has {opened.version}; the weights of a training's middle are not kept"
        )
    return opened
