"""The values that cross every boundary: task, turn, trajectory, verdict.

Frozen pydantic models that refuse unknown fields. Facts are stored; whatever can be derived is a property.
`None` means "did not happen"; zero means zero.
"""

from __future__ import annotations

import math
import re
from enum import StrEnum
from itertools import islice
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    Field,
    JsonValue,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from nano_shared.files import content_hash
from nano_shared.hidden_checks import EnvironmentChecks, HiddenChecks
from nano_shared.hidden_checks import Value as Value
from nano_shared.printable import printable

# --------------------------------------------------------------------------------------------- task


class Limits(Value):
    """What one execution may use. Reaching a limit is a normal end with a result."""

    max_turns: int = Field(24, ge=1)
    max_tokens: int = Field(8192, ge=1)
    """sampled tokens over the whole trajectory"""
    max_seconds: float = Field(600.0, gt=0)
    """wall clock of the whole trajectory, without time spent waiting for others of a batch"""
    tool_seconds: float = Field(30.0, gt=0)
    """wall clock of one tool call"""
    memory_mb: int = Field(1024, ge=16)
    output_bytes: int = Field(1_000_000, ge=1024)
    """kept of each output stream, head and tail"""
    completion_tokens: int | None = Field(None, ge=1)
    """sampled tokens of one completion; None leaves it to the runtime"""
    max_cost: float | None = Field(None, gt=0)
    """dollars that the completions of the whole trajectory may cost"""
    processes: int | None = Field(None, ge=1)
    """processes and threads of one tool call; None is the sandbox's default"""
    workspace_mb: int | None = Field(None, ge=1)
    """largest workspace, MB; None is the default of snapshots and sandbox"""

    @model_serializer(mode="wrap")
    def _dump(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # a task's id is the hash of its dump: limits that are not set leave the ids of older tasks alone
        return {name: value for name, value in handler(self).items() if value is not None}


class Split(StrEnum):
    TRAIN = "train"
    TEST = "test"


CONTROL_GENERATOR = "nano-impossible 1"
CLIENT_TOOLS = "client:"
"""what the tools hash of a conversation begins with whose messages and tools a client gave"""
AMBIGUOUS_TOOLS = f"{CLIENT_TOOLS}ambiguous:"
"""of one that continues what several logged conversations hold"""
RAW_PROMPT = f"{CLIENT_TOOLS}raw:"
"""of one whose prompt no template rendered"""
"""generator of tasks that were made impossible, to measure hacking"""


class Provenance(Value):
    source: str = "user"
    licence: str | None = None
    generator: str | None = None
    """generator name and version, for generated tasks"""
    seed: int | None = None
    original: dict[str, JsonValue] | None = Field(None, repr=False)
    """the row or files it was imported from, for an export to the same format, and
    for reward functions of users, which take its columns by name"""
    checked: str | None = None
    """grader by which `nano-rl tasks check` admitted the task: its oracle was run and earned 1"""

    @model_serializer(mode="wrap")
    def _dump(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        said: dict[str, Any] = handler(self)
        if self.checked is None:  # a field that came later
            said.pop("checked", None)
        return said


class ToolCall(Value):
    """One action: the tool's name and its arguments by parameter name."""

    name: str
    arguments: dict[str, JsonValue] = {}


class ImageRef(Value):
    """An image by reference: its file's bytes are a blob, exactly as they were given."""

    blob: str = Field(pattern=r"^sha256:[0-9a-f]{64}$")
    """content hash of the bytes"""
    media_type: str = Field(pattern=r"^image/[a-z0-9.+-]+$")
    width: int = Field(ge=1)
    """pixels"""
    height: int = Field(ge=1)

    @property
    def tokens(self) -> int:
        """About as many as models make of it: one for 750 pixels, at most 1600."""
        return min(1600, self.width * self.height // 750 + 1)

    def __str__(self) -> str:
        return f"{self.media_type}, {self.width} x {self.height} pixels"


class ShowsImages(Value):
    """A value that may show images; without any, its dump is that of before there were images."""

    images: tuple[ImageRef, ...] = ()

    @model_serializer(mode="wrap")
    def _without_none(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        said: dict[str, Any] = handler(self)
        if not self.images:
            said.pop("images", None)
        return said


class OracleAction(ToolCall):
    """One action of a solution, with the text before it."""

    thought: str = ""


def stays_inside(name: str) -> bool:
    """Whether a file's name is relative and never leaves the workspace."""
    return bool(name) and not name.startswith("/") and "\0" not in name and ".." not in name.split("/")


class InstructionFile(Value):
    """A file that says how work on a project is done, such as AGENTS.md."""

    path: str
    """relative to the project's root; of the user's own, its name"""
    text: str
    trusted: bool = False
    """the user's own, or trusted by the user as it is; otherwise it is a stranger's data"""

    @property
    def mark(self) -> str:
        """Delimits the text in a prompt: the text cannot hold it."""
        return content_hash([self.path, self.text]).removeprefix("sha256:")[:8]


class Task(Value):
    """What the agent is asked to do, in which workspace, and how the result is graded."""

    key: str
    """durable name; for an ad-hoc run, the hash of prompt, snapshot and check"""
    prompt: str
    files: dict[str, str] = {}
    """starting workspace: relative path -> text"""
    snapshot: str | None = None
    """starting workspace as a snapshot id in the blob store, if `files` cannot hold it"""
    artifacts: tuple[str, ...] = ()
    """files that may leave the sandbox for grading"""
    tools: tuple[str, ...] | None = None
    """tools offered; None offers all of the profile"""
    limits: Limits = Limits()
    network: str = Field("none", pattern=r"^(none|allow=[a-z0-9.*-]+(,[a-z0-9.*-]+)*)$")
    """none, or allow=HOST,...: hosts that the agent may reach, if the user consents as well"""
    check: str | None = None
    """the user's visible check, a shell line"""
    check_trusted: bool = True
    """False for a check by a project's nano.toml that the user has not trusted: nothing trains on it"""
    hidden: HiddenChecks | None = Field(None, repr=False)
    oracle: tuple[OracleAction, ...] | None = Field(None, repr=False)
    """actions that solve the task, for warm starts and for testing the grader"""
    split: Split | None = None
    level: int | None = Field(None, ge=0)
    family: str | None = None
    """program family; a family is never in two splits"""
    view: str | None = None
    program_hash: str | None = None
    """hash of the normalised AST of the program behind the task"""
    provenance: Provenance = Provenance()
    instructions: tuple[InstructionFile, ...] = ()
    """the chain of a project's AGENTS.md, for profiles that show it"""
    earlier: tuple[Task, ...] = Field((), repr=False)
    """tasks of its project that are done before it, in order; what their runs remember, its run recalls"""
    image: str | None = Field(None, min_length=1)
    """container image that its programs run in, by a sandbox that runs images; None is the sandbox's own"""
    images: tuple[ImageRef, ...] = ()
    """shown with the prompt, to a model that sees"""
    columns: dict[str, JsonValue] = Field({}, repr=False)
    """further columns of its data set, which reward functions of users take by name; the agent sees none"""

    @model_serializer(mode="wrap")
    def _dump(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # fields that came later are left out where they are not set, so that the ids of older tasks stay
        said: dict[str, Any] = handler(self)
        for name in ("instructions", "earlier", "image", "images", "columns"):
            if not getattr(self, name):
                said.pop(name, None)
        if self.check_trusted:
            said.pop("check_trusted", None)
        return said

    @model_validator(mode="after")
    def _one_sequence(self) -> Task:
        keys = [self.key, *(one.key for one in self.earlier)]
        if len(set(keys)) < len(keys) or any(one.earlier for one in self.earlier):
            raise ValueError("earlier tasks need keys of their own, and have no earlier ones themselves")
        return self

    @field_validator("key", "prompt")
    @classmethod
    def _not_blank(cls, value: str) -> str:
        if not value.strip():
            raise ValueError("must not be blank")
        return value

    @field_validator("files")
    @classmethod
    def _inside(cls, files: dict[str, str]) -> dict[str, str]:
        for name in files:
            if not stays_inside(name):
                raise ValueError(f"file name {name!r} must be relative and stay inside the workspace")
        return files

    @property
    def id(self) -> str:
        """Content hash of the whole task, hidden checks included."""
        dump = self.model_dump(mode="json", exclude={"hidden": True, "provenance": {"checked"}})
        return content_hash(dump | {"hidden": self.hidden and self.hidden.full_dump()})

    @property
    def listed(self) -> Task:
        """The task as its environment lists it, without what a session showed; a task of ours as it is."""
        checks = self.hidden
        if not isinstance(checks, EnvironmentChecks) or checks.prompt is None:
            return self
        plain = checks.model_copy(update={"prompt": None, "tools": None})
        return self.model_copy(update={"prompt": checks.prompt, "tools": checks.tools, "hidden": plain})

    @property
    def is_control(self) -> bool:
        """Whether no honest work can pass it: its hidden checks contradict the prompt."""
        return self.provenance.generator == CONTROL_GENERATOR


# ------------------------------------------------------------------------------------- conversation


class Role(StrEnum):
    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class ApiCall(Value):
    """One tool call as an API returned it, beside the text of its answer."""

    id: str
    """names the call in the message that answers it"""
    name: str
    arguments: str
    """JSON as the model wrote it, not yet read"""


class Message(ShowsImages):
    role: Role
    content: str
    calls: tuple[ApiCall, ...] = ()
    """assistant: the calls that an API returned beside the content"""
    call_id: str | None = None
    """tool: the call of an API that it answers"""


class Shaping(Value):
    """What a client makes of the logits before temperature, top-k and top-p, in vLLM's order and meaning."""

    allowed_token_ids: tuple[int, ...] = ()
    """no others are sampled; empty: all are"""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token, what is added to its logit)"""
    min_tokens: int = Field(0, ge=0)
    """sampled before a token that ends the turn"""
    repetition_penalty: float = Field(1.0, gt=0)
    """divides positive logits of tokens in prompt or answer, and multiplies negative ones"""
    frequency_penalty: float = 0.0
    """subtracted for each time that a token was sampled"""
    presence_penalty: float = 0.0
    """subtracted if a token was sampled"""
    min_p: float = Field(0.0, ge=0, le=1)
    """share of the likeliest token's probability below which tokens are not sampled"""


class Sampling(Value):
    """Sampling parameters, always explicit: nothing is inherited from a model's generation config."""

    temperature: float = Field(1.0, ge=0)
    """0 is greedy; log-probs are then those of temperature 1"""
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    """0 is off"""
    max_tokens: int = Field(256, ge=1)
    """of one completion"""
    seed: int | None = None
    stop: tuple[str, ...] = ()
    """texts that end a completion, besides the end-of-turn token; they stay part of it"""
    grammar: str | None = None
    """llguidance's grammar that the text had to follow; log-probs are those of the policy without it"""
    shaping: Shaping | None = None
    """log-probs are those of the policy without it"""
    given: int = Field(0, ge=0)
    """number of its first tokens that the answer had to begin with; their log-probs are the policy's"""


class Finish(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    REPETITION = "repetition"
    """it repeated itself, and was ended"""
    CANCELLED = "cancelled"
    """a client went away while it was being sampled"""

    @property
    def is_cut(self) -> bool:
        """Whether the policy did not end it itself."""
        return self in (Finish.LENGTH, Finish.REPETITION)


class TurnTokens(Value):
    """The exact tokens of one call, as deltas: the context before `context_ids` is in earlier turns."""

    row: int = Field(0, ge=0)
    """a new row begins where history was rewritten; turns of one row extend each other"""
    context_ids: tuple[int, ...]
    """[N] tokens appended to the row before sampling: rendered prompt or observation, mask 0"""
    sampled_ids: tuple[int, ...]
    """[M] tokens the policy sampled, the end-of-turn token included when it was sampled, mask 1"""
    logprobs: tuple[float, ...]
    """[M] log-probability of each sampled token at the sampling temperature"""

    @model_validator(mode="after")
    def _aligned(self) -> TurnTokens:
        if len(self.sampled_ids) != len(self.logprobs):
            raise ValueError(f"{len(self.sampled_ids)} sampled ids but {len(self.logprobs)} log-probs")
        if any(not math.isfinite(x) or x > 1e-6 for x in self.logprobs):
            raise ValueError("log-probs must be finite and at most 0")
        return self


class Usage(Value):
    """What a completion of an API took, in tokens, and in dollars by the price table."""

    prompt: int = Field(0, ge=0)
    cached: int = Field(0, ge=0)
    """of the prompt, read from the server's cache"""
    completion: int = Field(0, ge=0)
    """reasoning included"""
    reasoning: int = Field(0, ge=0)
    estimated: bool = False
    """True if the server said nothing and the tokens were counted from the texts"""
    cost: float | None = None
    """dollars; None if the model has no price"""


class ApiAnswer(Value):
    """What an API returned beside the text."""

    calls: tuple[ApiCall, ...] = ()
    reasoning: str = ""
    usage: Usage = Usage()
    left_out: tuple[str, ...] = ()
    """sampling parameters that were not sent: the server's own values applied"""
    no_tokens: str | None = None
    """why there are no tokens, although the server was asked for them"""
    filtered: bool = False
    """whether the provider's filter stopped the answer"""


class Completion(Value):
    """The policy's answer: raw text, exact tokens if the backend gives them, and who sampled it."""

    text: str
    """raw text as sampled, without the end-of-turn token"""
    finish: Finish
    tokens: TurnTokens | None = None
    """None marks the run text-only: it can imitate, it cannot be used for policy gradients"""
    sampling: Sampling
    policy_id: str
    """content hash or name of the weights that sampled"""
    policy_version: int = 0
    """optimizer steps behind the weights"""
    api: ApiAnswer | None = None
    """None for a policy that is no API"""


class Denials(Value):
    """Numbers of accesses that the sandbox refused during a call."""

    network: int = 0
    secrets: int = 0
    writes_outside: int = 0


class Observation(ShowsImages):
    """A tool call's result: the text and the images that the agent saw, and the facts."""

    tool: str
    ok: bool
    text: str
    """exactly as shown to the model"""
    exit_code: int | None = None
    signal: int | None = None
    timed_out: bool = False
    bytes_total: int = 0
    """size of the full output before truncation"""
    truncated: bool = False
    blob: str | None = None
    """content hash of the full output, if it was truncated"""
    files_changed: tuple[str, ...] = ()
    denials: Denials = Denials()
    started: float
    """unix seconds"""
    ended: float

    @property
    def refused(self) -> bool:
        """Whether the tool refused the call, so that no command ran, or took its edit back."""
        nothing_ran = not self.timed_out and self.exit_code is None and self.signal is None
        return not self.ok and (nothing_ran or self.tool == EDIT_LINE)


EDIT_LINE = "edit_line"
"""tool that takes its edit back where the check fails"""
SUMMARY = "summary"
"""parser of a turn that summarises its row"""


class Turn(Value):
    """One turn: complete -> parse -> execute -> observe."""

    index: int = Field(ge=0)
    messages: tuple[Message, ...] = ()
    """what was appended to the row before it was sampled, where that is not the observations before it: of a
    client of the server, of a request for a summary, and of a row that begins with a summary"""
    completion: Completion
    thought: str = ""
    """text of the completion besides the calls"""
    calls: tuple[ToolCall, ...] = ()
    parse_error: str | None = None
    """why no call could be parsed from the completion; None if one was"""
    parser: str
    """dialect that parsed the completion; `summary` for a summary of the row, whose calls are not executed"""
    repairs: tuple[str, ...] = ()
    """liberties that the parser, and then the tools, took with the calls, by name"""
    observations: tuple[Observation, ...] = ()
    snapshot: str | None = None
    """workspace after the turn, in the blob store; None if no call was made, or no snapshot could be taken"""
    started: float
    ended: float
    delegated_by: int | None = None
    """of a sub-agent: index of the turn that delegated to it"""

    @property
    def refused(self) -> bool:
        """Whether it could not be parsed, or a tool refused its call or took its edit back; a command that
        ran and failed is no refusal."""
        return self.parse_error is not None or any(seen.refused for seen in self.observations)

    @property
    def is_summary(self) -> bool:
        """Whether it summarises its row: the turn after it begins a new one."""
        return self.parser == SUMMARY

    @property
    def is_aside(self) -> bool:
        """Whether the conversation of the run is whole without it: a summary, or a sub-agent's."""
        return self.is_summary or self.delegated_by is not None


class StopReason(StrEnum):
    FINISHED = "finished"
    GAVE_UP = "gave_up"
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    MAX_SECONDS = "max_seconds"
    MAX_COST = "max_cost"
    CONTEXT_FULL = "context_full"
    FORMAT_ERRORS = "format_errors"
    LOOP = "loop"
    REPETITION = "repetition"
    SANDBOX_ERROR = "sandbox_error"
    ENVIRONMENT_ERROR = "environment_error"
    POLICY_ERROR = "policy_error"
    INTERRUPTED = "interrupted"

    @property
    def ours(self) -> bool:
        """Whether the policy could not have caused it: the reward of such a trajectory is None."""
        return self in (
            StopReason.SANDBOX_ERROR, StopReason.ENVIRONMENT_ERROR, StopReason.POLICY_ERROR,
            StopReason.INTERRUPTED,
        )  # fmt: skip

    @property
    def budget(self) -> bool:
        return self in (
            StopReason.MAX_TURNS, StopReason.MAX_TOKENS, StopReason.MAX_SECONDS, StopReason.MAX_COST,
            StopReason.CONTEXT_FULL,
        )  # fmt: skip


class Trust(StrEnum):
    """How far a verdict can be trusted, best first."""

    HIDDEN = "hidden"
    """hidden checks in a fresh jail, compared outside it"""
    STRICT = "strict"
    """hidden tests in one hardened process with the solution; docs/security.md lists what it does not stop"""
    USER_CHECK = "user_check"
    """the user's check on original files plus the diff, in a fresh jail"""
    JUDGE = "judge"
    NONE = "none"


Label = Annotated[str, AfterValidator(lambda text: printable(text, 200))]
Sentence = Annotated[str, AfterValidator(lambda text: printable(text, 1000))]
"""text of a verdict, which may quote what was graded: made printable, with bounded length"""
_MOST_FINDINGS = 100
_MOST_CHECKS = 10_000
_LONGEST_OUTPUT = 20_000


class Tampering(Value):
    kind: Label
    detail: Sentence


class CheckRun(Value):
    """How the program of a check by command ended."""

    exit_code: int | None
    """None if a signal ended it"""
    signal: int | None = None
    timed_out: bool = False
    not_run: Sentence | None = None
    """the missing program or module, if the check could not be run here or on the original files"""
    output: Annotated[str, AfterValidator(lambda text: text[-_LONGEST_OUTPUT:])] = ""
    """the end of its output, stderr last"""
    changed: tuple[str, ...] = ()
    """files that the agent changed and the check names"""


class Verdict(Value):
    """A grader's judgement of one trajectory. Advantages are derived from rewards and never stored."""

    reward: float | None
    """None: a failure that the policy could not cause; excluded from the loss and the group's baseline"""
    components: dict[Sentence, float | None] = {}
    turn_rewards: tuple[float, ...] | None = None
    checks: dict[Sentence, Label] = {}
    """name -> pass | fail | error | timeout"""
    tampering: tuple[Tampering, ...] = ()
    failure_kind: Label | None = None
    trust: Trust
    grader: Label
    """name and version"""
    graded_hash: str
    """content hash of what was graded"""
    check_run: CheckRun | None = None
    """for a check by command"""

    @field_validator("reward")
    @classmethod
    def _finite(cls, value: float | None) -> float | None:
        if value is not None and not math.isfinite(value):
            raise ValueError(f"reward must be finite, not {value}")
        return value

    @field_validator("tampering")
    @classmethod
    def _few(cls, value: tuple[Tampering, ...]) -> tuple[Tampering, ...]:
        more = len(value) - _MOST_FINDINGS + 1
        if more <= 1:
            return value
        return (*value[: _MOST_FINDINGS - 1], Tampering(kind="more", detail=f"{more} more findings"))

    @field_validator("components", "checks")
    @classmethod
    def _no_more(cls, value: dict[str, Any]) -> dict[str, Any]:
        return dict(islice(value.items(), _MOST_CHECKS))


_JOINT = " + nano-reward "
"""between the grader of a composed verdict and the version and recipe of the composition"""


def composed_grader(grader: str, recipe: str) -> str:
    """The grader of a composed verdict: the grader's name, and the recipe of the reward."""
    return f"{base_grader(grader)}{_JOINT}1 {recipe}"


def base_grader(grader: str) -> str:
    return grader.split(_JOINT)[0]


def is_composed(verdict: Verdict) -> bool:
    return base_grader(verdict.grader) != verdict.grader


def outcome(verdict: Verdict | None) -> float | None:
    """The reward of the tests alone; None if nothing was graded, 0 with tampering. For a composed verdict
    without tests (a judge alone), its reward."""
    if verdict is None:
        return None
    value = verdict.components.get("tests", verdict.reward) if is_composed(verdict) else verdict.reward
    return 0.0 if verdict.tampering and value is not None else value


MARKER = re.compile(r"\[redacted:[a-z0-9\-]+\]")
"""what stands for a secret in a redacted text"""
REDACTED_ID = 2**32 - 1
"""placeholder of redacted token ids. Outside every vocabulary, so that using it by mistake fails"""


def group_key(task_key: str, parent: str | None, parent_step: int | None) -> str:
    """The key under which runs are compared: the task's, or for a fork the step's from which it continues."""
    return task_key if parent is None or parent_step is None else f"{task_key}@{parent}:{parent_step}"


class ToolSpec(Value):
    """A tool as a model sees it."""

    name: str
    description: str
    parameters: dict[str, Any]
    """JSON schema of an object"""
    body: str | None = None
    """string parameter that the compact dialect writes raw, after the header line"""


class Share(StrEnum):
    """Who of those that share a log may use a run, beside its owner."""

    NEVER = "never"
    """nobody: others are not shown it"""
    TEAM = "team"
    """others may look at it, and train nothing on it"""
    TRAIN = "train"


class Trajectory(Value):
    """One execution: the task, every turn, why it stopped, and what it left behind."""

    id: str
    """run id in the log"""
    task: Task
    turns: tuple[Turn, ...] = ()
    stop: StopReason | None = None
    """None while it runs, and if it was killed"""
    stop_detail: str | None = None
    answer: str | None = None
    """as given to submit"""
    diff: str = ""
    """unified diff from the starting snapshot to the workspace"""
    snapshot: str | None = None
    """workspace before the first action"""
    directory: str | None = None
    """absolute path that the workspace was copied from; None for a task that brings its files"""
    owner: str | None = None
    """whose run it is, as USER@HOST or a hash of a client's key; None in runs of older versions"""
    project: str | None = None
    """what the directory is of: `git:` and the first commit of its history, else a path; None without one"""
    share: Share | None = None
    """the owner's consent; None in runs of older versions"""
    parent: str | None = None
    """run this one was forked from"""
    parent_step: int | None = Field(None, ge=0)
    """number of leading turns taken over from the parent, with their tokens"""
    runtime_version: str
    profile: str
    """name of the interface profile"""
    profile_hash: str
    template_hash: str
    tools_hash: str
    given_tools: tuple[ToolSpec, ...] = ()
    """tools beside those of the profile, as the model saw them: of files and MCP servers; empty in runs of
    older versions"""
    policy: str
    """the policy as the user named it"""
    started: float
    ended: float | None = None
    seed: int | None = None
    verdict: Verdict | None = None
    """the newest verdict in the log"""

    @property
    def is_served(self) -> bool:
        """Whether a client of the server gave its messages and tools."""
        return self.tools_hash.startswith(CLIENT_TOOLS)

    def restates(self, turn: Turn) -> bool:
        """Whether the history was written anew before that turn, by a client, or by the program that shows
        places one after another: its messages are all that the model read, and begin a token row."""
        if turn.index == 0 or not turn.messages or turn.messages[:1] != self.turns[0].messages[:1]:
            return False
        if not self.is_served:
            return turn.delegated_by is None
        now, before = turn.completion.tokens, self.turns[turn.index - 1].completion.tokens
        return now is not None and before is not None and now.row > before.row

    @property
    def is_raw(self) -> bool:
        """Whether its prompt is a client's own, which no template rendered."""
        return self.tools_hash.startswith(RAW_PROMPT)

    @property
    def is_redacted(self) -> bool:
        """Whether ids of the run were masked: later tokens were then sampled after other ones."""
        rows = (turn.completion.tokens for turn in self.turns)
        return any(REDACTED_ID in ids for row in rows if row for ids in (row.context_ids, row.sampled_ids))

    @property
    def last_snapshot(self) -> str | None:
        """The workspace after the last logged turn."""
        return next((t.snapshot for t in reversed(self.turns) if t.snapshot), self.snapshot)

    @property
    def workspace_lost(self) -> bool:
        """Whether the policy left a workspace of which no snapshot can be taken (too large, too deep,
        ...)."""
        acted = next((turn for turn in reversed(self.turns) if turn.calls), None)
        return self.snapshot is not None and acted is not None and self._after(acted) is None

    def _after(self, turn: Turn) -> str | None:
        """The workspace after a turn; that of a client is known at the end alone."""
        return self.last_snapshot if self.is_served and self.stop is not None else turn.snapshot

    @property
    def images(self) -> tuple[ImageRef, ...]:
        """Every image that its messages show, in order."""
        shown = (one for turn in self.turns for one in (*turn.messages, *turn.observations))
        return tuple(dict.fromkeys((*self.task.images, *(image for one in shown for image in one.images))))

    @property
    def inherited(self) -> int:
        """Number of turns that are the parent's."""
        return self.parent_step or 0

    @property
    def own_turns(self) -> tuple[Turn, ...]:
        """The turns that this run's policy sampled; only their tokens are trained."""
        return self.turns[self.inherited :]

    @property
    def group_key(self) -> str:
        """The task's key, or for a fork the key of its step (`group_key`)."""
        return group_key(self.task.key, self.parent, self.parent_step)

    @property
    def num_sampled_tokens(self) -> int:
        return sum(len(t.completion.tokens.sampled_ids) for t in self.own_turns if t.completion.tokens)

    @property
    def has_summary(self) -> bool:
        """Whether its history was summarised."""
        return any(turn.is_summary and turn.delegated_by is None for turn in self.turns)

    @property
    def has_tokens(self) -> bool:
        return bool(self.turns) and all(t.completion.tokens is not None for t in self.turns)

    @property
    def reward(self) -> float | None:
        return self.verdict.reward if self.verdict else None
