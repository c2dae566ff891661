"""Datasets of verifiers environments: one row per task with `prompt` or `question`, `answer` and `info`."""

from __future__ import annotations

from typing import Any

from nano_rl.formats import RowFormat
from nano_shared.errors import Refused
from nano_shared.files import content_hash
from nano_shared.hidden_checks import AnswerChecks
from nano_shared.strict_json import Row, parse_json, text_field
from nano_shared.types import Provenance, Task

NAME = "verifiers"


def read_row(row: Row) -> Task:
    prompt = messages_text(row["prompt"], "prompt") if "prompt" in row else text_field(row, "question")
    answer = row.get("answer")
    if answer is not None and not isinstance(answer, str):
        raise Refused("answer", f"must be text, not {answer!r:.60}")
    info = row.get("info")
    if isinstance(info, str) and info:
        info = parse_json(info)
    if not isinstance(info, dict | None) and info != "":
        raise Refused("info", "must be an object, or JSON text of one")
    return Task(
        key=_key(row),
        prompt=prompt,
        hidden=AnswerChecks(answer=answer) if answer else None,
        provenance=Provenance(source=str(row.get("task") or NAME)),
    )


def write_row(task: Task) -> Row:
    """`answer` is the expected answer where there is one; every other check is `nano_task`'s to make."""
    hidden = task.hidden
    answer = hidden.answer if isinstance(hidden, AnswerChecks) else None
    return {
        "prompt": [{"role": "user", "content": task.prompt}],
        "answer": answer if isinstance(answer, str) else "",
        "info": {"key": task.key},
        "task": task.view or task.family or "nano",
    }


def messages_text(prompt: Any, field: str) -> str:
    """The texts of a prompt: text as it is, or messages, with their roles where an assistant speaks."""
    if isinstance(prompt, str) and prompt.strip():
        return prompt
    if not isinstance(prompt, list) or not prompt:
        raise Refused(field, "must be text or a list of messages")
    said = []
    for number, message in enumerate(prompt):
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ("system", "developer", "user", "assistant"):
            raise Refused(f"{field}.{number}.role", f"{role!r} is no role of a prompt's message")
        if not isinstance(message.get("content"), str):
            raise Refused(f"{field}.{number}.content", "must be text")
        said.append((role, message["content"]))
    if any(role == "assistant" for role, _ in said):
        return "\n\n".join(f"{role}: {text}" for role, text in said)
    text = "\n\n".join(text for _, text in said)
    if not text.strip():
        raise Refused(field, "holds no text")
    return text


def _key(row: Row) -> str:
    number = row.get("example_id", row.get("id"))
    if isinstance(number, str) and number.strip():
        return number
    return f"{NAME}/{content_hash(row).removeprefix('sha256:')[:16]}"


VERIFIERS = RowFormat(
    name=NAME,
    summary="verifiers datasets: prompt or question, answer, info",
    recognises=lambda row: ("question" in row or "prompt" in row) and ("answer" in row or "info" in row),
    read_row=read_row,
    write_row=write_row,
    understood=frozenset({"prompt", "question", "answer", "info", "task"}),
)
