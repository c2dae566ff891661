"""The line-edit dialect: the whole answer is an edit of lines that the prompt shows, `NUMBER|TEXT` for each.

A number may occur several times: the lines take the place of the one. Models that were not trained on it also
write "NUMBER: `TEXT`". Other lines, and the fence of a block, are the thought.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from nano_coder.agent.dialects.dialect import Parsed
from nano_shared.types import ToolCall, ToolSpec

_EDIT = re.compile(r"[ \t]*(`?)[ \t]*(\d{1,7}) ?\|(.*?)[ \t\r]*")
_QUOTED = re.compile(r"[ \t]*(\d{1,7}):[ \t]*`([^`]*)`[ \t\r]*")
_FENCE = re.compile(r"\s*(```|~~~)")
_FORM = (
    "reply with the number of the wrong line, `|`, and the whole corrected line, such as 12|    return a + b"
)


class LineEdits:
    name = "line-edit"

    def parse(self, text: str, tools: Sequence[ToolSpec]) -> Parsed:
        edits, thought, fenced, quoted = list[dict[str, object]](), list[str](), False, False
        for line in text.split("\n"):
            if found := _EDIT.fullmatch(line):
                written = found[3].removesuffix("`") if found[1] else found[3]
                edits.append({"line": int(found[2]), "text": written})
            elif found := _QUOTED.fullmatch(line):
                edits.append({"line": int(found[1]), "text": found[2]})
                quoted = True
            elif _FENCE.match(line):
                fenced = True
            elif line.strip():
                thought.append(line)
        if not edits:
            return Parsed(thought=text, error=f"no edit found; {_FORM}")
        said = "\n".join(thought)
        made = (("fence", fenced), ("quoted", quoted), ("text beside the edit", bool(said)))
        repairs = tuple(name for name, needed in made if needed)
        call = ToolCall(name="edit_line", arguments={"edits": edits})
        return Parsed(thought=said, calls=(call,), repairs=repairs)

    def render(self, thought: str, calls: Sequence[ToolCall], tools: Sequence[ToolSpec]) -> str:
        """Raises ValueError for what is no edit of lines, or would be read otherwise."""
        if len(calls) != 1 or calls[0].name != "edit_line":
            raise ValueError("the line-edit dialect writes one call of edit_line")
        edits = calls[0].arguments.get("edits")
        try:
            lines = [f"{edit['line']}|{edit['text']}" for edit in edits]  # type: ignore[union-attr, index, call-overload]
        except (TypeError, KeyError):
            raise ValueError("edits is a list of {line, text}") from None
        text = "\n".join([*([thought] if thought else []), *lines])
        again = self.parse(text, tools)
        if (again.thought, again.calls) != (thought, tuple(calls)):
            raise ValueError("the line-edit dialect cannot write these lines")
        return text

    def describe(self, tools: Sequence[ToolSpec]) -> str:
        return ""


LINE_EDIT = LineEdits()
