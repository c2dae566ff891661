"""NeMo Gym JSON lines: input rows, and rollouts, which are imported as their task and kept with it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, JsonValue, field_validator, model_validator

from nano_formats.row_format import OpenModel, RowFormat
from nano_shared.errors import Refused
from nano_shared.files import content_hash
from nano_shared.hidden_checks import AnswerChecks
from nano_shared.strict_json import Row, validated
from nano_shared.types import Message, Provenance, Role, Task

NAME = "nemo-gym"
ROLLOUT_FIELDS = frozenset({"response", "reward"})
_PROMPTS = ("problem_statement", "question", "problem", "instruction", "prompt")
"""field with the prompt, in rows whose server writes the first message"""


class TextPart(OpenModel):
    type: Literal["input_text", "output_text", "text"]
    text: str


class InputItem(OpenModel):
    """One item of the conversation before the task starts: a message, or an earlier call and its output."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["user", "assistant", "developer", "system"] | None = None
    content: list[TextPart] | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _parts(cls, content: Any) -> Any:
        return [{"type": "input_text", "text": content}] if isinstance(content, str) else content

    @model_validator(mode="after")
    def _whole(self) -> InputItem:
        if self.type == "message" and (self.role is None or self.content is None):
            raise ValueError("a message needs `role` and `content`")
        return self

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content or ())


class FunctionTool(OpenModel):
    type: Literal["function"]
    name: str = Field(min_length=1)


class CreateParams(OpenModel):
    input: list[InputItem]
    tools: list[FunctionTool] = Field([])
    metadata: dict[str, Any] | None = None

    @field_validator("input", mode="before")
    @classmethod
    def _items(cls, value: Any) -> Any:
        return [{"role": "user", "content": value}] if isinstance(value, str) else value


class InputRow(OpenModel):
    responses_create_params: CreateParams


def read_row(row: Row) -> Task:
    params = validated(InputRow, row).responses_create_params
    prompt = _prompt(params).strip() and _prompt(params)
    places = (row, params.metadata or {})
    prompt = prompt or next((x for at in places for name in _PROMPTS if (x := _text(at.get(name)))), "")
    if not prompt:
        raise Refused("responses_create_params.input", "holds no text to give to the agent")
    return Task(
        key=_key(row), prompt=prompt,
        tools=tuple(tool.name for tool in params.tools) if params.tools else None, hidden=_hidden(row),
        provenance=Provenance(source=_text(row.get("dataset")) or _text(row.get("source")) or NAME),
    )  # fmt: skip


def write_row(task: Task) -> Row:
    """Native fields for NeMo Gym's agents: the prompt and the tools. Verified by `nano-rl tasks serve`."""
    from nano_coder.agent.profiles import COMPACT_1, first_messages, offered_tools, serving_profile

    known = task.model_copy(update={"tools": known_tools(task)})
    *_, user = first_messages(COMPACT_1, task.model_copy(update={"tools": ()}), sorted(task.files))
    shown = [message(Message(role=Role.SYSTEM, content=_SYSTEM)), message(user)]
    tools = [
        {"type": "function", "name": tool.name, "description": tool.description,
         "parameters": tool.parameters, "strict": False}
        for tool in offered_tools(serving_profile(COMPACT_1, task), known)
    ]  # fmt: skip
    params = {"input": shown, "tools": tools}
    return {"responses_create_params": params, "verifier_metadata": {"nano_key": task.key}}


_SYSTEM = (
    "You are a coding agent. You work in the current directory through the tools, and submit at the end."
)


def known_tools(task: Task) -> tuple[str, ...] | None:
    """Raises Refused for tools that only the server of their origin has."""
    from nano_coder.agent.profiles import COMPACT_1, serving_profile

    known = {tool.name for tool in serving_profile(COMPACT_1, task).tools}
    if foreign := [name for name in task.tools or () if name not in known]:
        has = ", ".join(sorted(known))
        raise Refused("tools", f"{foreign[0]!r} is no tool of this runtime; it has {has}")
    return task.tools


def message(value: Message) -> dict[str, str]:
    return {"role": value.role.value, "content": value.content}


def _prompt(params: CreateParams) -> str:
    """The texts of the messages, each after its speaker's name if there are answers among them."""
    messages = [item for item in params.input if item.type == "message"]
    if all(item.role != "assistant" for item in messages) and len(messages) == len(params.input):
        return "\n\n".join(item.text for item in messages)
    return "\n\n".join(f"{item.role or item.type}: {_item_text(item)}" for item in params.input)


def _item_text(item: InputItem) -> str:
    if item.type == "message":
        return item.text
    extra: dict[str, Any] = item.model_extra or {}
    named = (extra.get(name) for name in ("name", "arguments", "output"))
    return " ".join(str(part) for part in named if part is not None)


def _key(row: Row) -> str:
    for name in ("id", "task_id", "instance_id", "hash_id", "uuid"):
        if (value := _text(row.get(name))) and isinstance(row[name], str):
            return value
    parts = {k: v for k, v in row.items() if not k.startswith("_ng_")}
    question = parts["responses_create_params"] if row.keys() & ROLLOUT_FIELDS else parts
    return f"{NAME}/{content_hash(question).removeprefix('sha256:')[:16]}"


def _hidden(row: Row) -> AnswerChecks | None:
    """An expected answer; checks by other servers are not supported."""
    expected: JsonValue = row.get("expected_answer")
    return None if expected is None or expected == "" else AnswerChecks(answer=expected)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value.strip() else None


NEMO_GYM = RowFormat(
    name=NAME, summary="NeMo Gym: input rows and rollouts",
    recognises=lambda row: "responses_create_params" in row, read_row=read_row, write_row=write_row,
    understood=frozenset({"responses_create_params", "expected_answer", "verifier_metadata"}), repeats=True,
)  # fmt: skip
