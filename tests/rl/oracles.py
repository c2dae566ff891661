"""A tiny interpreter of oracles: applies reads, edits, writes and submissions to a task's files."""

from __future__ import annotations

from nano_shared.types import Task


def follow(task: Task) -> tuple[dict[str, str], str | None]:
    """The files and the answer that the task's oracle leaves; unknown tools and bad lines fail."""
    files, answer = dict(task.files), None
    for call in task.oracle or ():
        arguments = dict(call.arguments)
        path = str(arguments.get("path"))
        match call.name:
            case "read_file":
                assert path in files
            case "edit_file" if "old" in arguments:
                assert files[path].count(str(arguments["old"])) == 1
                files[path] = files[path].replace(str(arguments["old"]), str(arguments["new"]))
            case "edit_file":
                lines = files[path].split("\n")
                line = arguments["line"]
                assert isinstance(line, int)
                lines[line - 1 : line] = str(arguments["new"]).split("\n")
                files[path] = "\n".join(lines)
            case "write_file":
                files[path] = str(arguments["content"])
            case "shell":
                assert arguments["command"] == task.check
            case "search":
                pattern = str(arguments["pattern"])
                assert any(pattern in text for text in files.values())
            case "calculate":
                assert isinstance(arguments["expression"], str)
            case "submit":
                answer = str(arguments["answer"]) if "answer" in arguments else None
            case other:
                raise AssertionError(f"no tool {other!r}")
    return files, answer
