"""Small files in the formats of other agents, true to what those write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def write_lines(path: Path, rows: list[Row]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _claude(kind: str, uuid: str, parent: str | None, message: Row, **more: Any) -> Row:
    return {
        "parentUuid": parent, "isSidechain": False, "userType": "external", "cwd": "/home/ann/shop",
        "sessionId": "0b6cb7c1-0000-4000-8000-000000000001", "version": "2.1.12", "gitBranch": "main",
        "type": kind, "message": message, "uuid": uuid, "timestamp": f"2026-03-01T10:00:{len(uuid):02}.000Z",
    } | more  # fmt: skip


def _spoke(uuid: str, parent: str, block: Row, *, message: str = "msg_1", stop: str | None = None) -> Row:
    body = {
        "id": message, "type": "message", "role": "assistant", "model": "claude-sonnet-4-5",
        "content": [block], "stop_reason": stop, "stop_sequence": None,
        "usage": {"input_tokens": 9, "output_tokens": 5},
    }  # fmt: skip
    return _claude("assistant", uuid, parent, body, requestId="req_1")


def _result(uuid: str, parent: str, call: str, text: Any, **more: Any) -> Row:
    block = {"tool_use_id": call, "type": "tool_result", "content": text} | more
    return _claude("user", uuid, parent, {"role": "user", "content": [block]}, toolUseResult={"stdout": "x"})


def claude_session() -> list[Row]:
    """A message in parts, two calls at once, a side chain, a rewound question, an error of the server."""
    ask = {"role": "user", "content": "Why does total() fail?"}
    return [
        {"type": "summary", "summary": "Shop totals", "leafUuid": "u1"},
        {"type": "file-history-snapshot", "messageId": "u1", "snapshot": {}, "isSnapshotUpdate": False},
        _claude("user", "u0", None, {"role": "user", "content": "A question that was taken back"}),
        _claude("user", "u1", None, ask),
        _spoke("a1", "u1", {"type": "thinking", "thinking": "Look first.", "signature": "c2ln"}),
        _spoke("a1b", "a1", {"type": "text", "text": "I read both files."}),
        _spoke("a1c", "a1b", {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"file_path": "a.py"}}),
        _spoke("a1d", "a1c", {"type": "tool_use", "id": "toolu_2", "name": "Read", "input": {"file_path": "b.py"}}),
        _result("r1", "a1c", "toolu_1", "1\timport b"),
        _result("r2", "a1d", "toolu_2", [{"type": "text", "text": "File does not exist."}], is_error=True),
        _claude("user", "s1", "r2", {"role": "user", "content": "explore"}, isSidechain=True),
        _spoke("a2", "r2", {"type": "text", "text": "b.py is missing."}, message="msg_2", stop="end_turn"),
        _claude("user", "u2", "a2", {"role": "user", "content": [{"type": "text", "text": "Make it then."}]}),
        _claude(
            "assistant", "e1", "u2",
            {"id": "e", "role": "assistant", "model": "<synthetic>", "content": [{"type": "text", "text": "API Error"}]},
            isApiErrorMessage=True,
        ),
        _spoke("a3", "e1", {"type": "text", "text": "Done."}, message="msg_3", stop="end_turn"),
    ]  # fmt: skip


def _codex(kind: str, payload: Row, second: int) -> Row:
    return {"timestamp": f"2026-03-01T10:00:{second:02}.000Z", "type": kind, "payload": payload}


def codex_rollout() -> list[Row]:
    """One task: a command that fails, a patch, and the last word."""

    def said(role: str, kind: str, text: str) -> Row:
        return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}

    command = {"cmd": "pytest -q", "workdir": "/home/ann/shop"}
    return [
        _codex("session_meta", {
            "id": "019c-1", "timestamp": "2026-03-01T10:00:00.000Z", "cwd": "/home/ann/shop",
            "originator": "codex_exec", "cli_version": "0.98.0", "source": "exec", "model_provider": "openai",
            "base_instructions": {"text": "You are a coding agent."},
        }, 0),
        _codex("response_item", said("developer", "input_text", "Sandbox: workspace-write."), 0),
        _codex("response_item", said("user", "input_text", "Make the tests pass."), 1),
        _codex("event_msg", {"type": "task_started", "turn_id": "t1"}, 1),
        _codex("turn_context", {"cwd": "/home/ann/shop", "approval_policy": "never", "model": "gpt-5-codex"}, 1),
        _codex("response_item", {
            "type": "reasoning", "summary": [{"type": "summary_text", "text": "Run the tests."}],
            "content": None, "encrypted_content": "gAAA",
        }, 2),
        _codex("response_item", {
            "type": "function_call", "name": "exec_command", "arguments": json.dumps(command), "call_id": "call_a",
        }, 3),
        _codex("response_item", {
            "type": "function_call_output", "call_id": "call_a", "output": "Process exited with code 1\n1 failed",
        }, 4),
        _codex("event_msg", {"type": "token_count", "info": None}, 4),
        _codex("response_item", {
            "type": "custom_tool_call", "status": "completed", "call_id": "call_b", "name": "apply_patch",
            "input": "*** Begin Patch\n*** End Patch",
        }, 5),
        _codex("response_item", {"type": "custom_tool_call_output", "call_id": "call_b", "output": "Success."}, 6),
        _codex("response_item", said("assistant", "output_text", "The tests pass."), 7),
        _codex("event_msg", {"type": "task_complete", "last_agent_message": "The tests pass."}, 7),
    ]  # fmt: skip


def gym_rollout(**changes: Any) -> Row:
    """A rollout of two calls of the model, with the triple on the last item of each."""
    first = {"prompt_token_ids": [1, 2], "generation_token_ids": [3, 4], "generation_log_probs": [-0.1, -0.2]}
    second = {
        "prompt_token_ids": [1, 2, 3, 4, 5], "generation_token_ids": [6], "generation_log_probs": [-0.3],
    }  # fmt: skip
    output = [
        {"id": "rs", "type": "reasoning", "summary": [{"type": "summary_text", "text": "add"}]},
        {
            "id": "f", "call_id": "f", "type": "function_call", "name": "add", "arguments": '{"a": 1}',
            "status": "completed", **first,
        },
        {"type": "function_call_output", "call_id": "f", "output": "3"},
        {
            "id": "m", "type": "message", "role": "assistant", "status": "completed",
            "content": [{"type": "output_text", "text": "It is 3.", "annotations": []}], **second,
        },
    ]  # fmt: skip
    return {
        "responses_create_params": {
            "input": [{"role": "developer", "content": "Use the tools."}, {"role": "user", "content": "1+2?"}],
            "tools": [{"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True}],
            "temperature": 0.7,
        },
        "response": {
            "id": "resp_1", "created_at": 1772359200, "model": "qwen", "object": "response", "output": output,
            "parallel_tool_calls": True, "tool_choice": "auto", "tools": [],
        },
        "reward": 1.0, "_ng_task_index": 0, "_ng_rollout_index": 1, "agent_ref": {"name": "simple_agent"},
    } | changes  # fmt: skip


def atif_document(**changes: Any) -> Row:
    """A trajectory of another agent, with copied context, a step of the harness, and one with tokens."""
    return {
        "schema_version": "ATIF-v1.7",
        "session_id": "s-1",
        "agent": {"name": "openhands", "version": "1.2", "model_name": "m"},
        "steps": [
            {"step_id": 1, "source": "user", "message": "Count the files.", "timestamp": "2026-03-01T10:00:00Z"},
            {"step_id": 2, "source": "agent", "message": "Said before.", "is_copied_context": True},
            {
                "step_id": 3, "source": "agent", "message": "Counting.", "reasoning_content": "ls | wc",
                "tool_calls": [{"tool_call_id": "t", "function_name": "bash", "arguments": {"command": "ls"}}],
                "observation": {"results": [{"source_call_id": "t", "content": "a\nb"}]},
                "metrics": {
                    "prompt_token_ids": [1, 2], "completion_token_ids": [3], "logprobs": [-0.5],
                },
            },
            {"step_id": 4, "source": "agent", "message": "Nudge.", "llm_call_count": 0},
            {"step_id": 5, "source": "agent", "message": "Two."},
        ],
    } | changes  # fmt: skip
