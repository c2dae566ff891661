"""Resources servers of NeMo Gym: `--env 'nemo-gym:URL rows=FILE.jsonl'`, the rows being those of the server.

A session is a cookie: /seed_session, /{tool} for each call, /verify with the whole response for the reward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nano_coder.environment import EnvironmentSession
from nano_coder.tools.tool import ToolFailure, ToolResult
from nano_formats.remote import HttpConnection, checked_url, object_of, specs_of
from nano_rl.tasks.task_file import read_rows
from nano_shared.errors import EnvironmentFailed, Refusal, UsageError
from nano_shared.logged_run import LoggedRun
from nano_shared.printable import one_line
from nano_shared.types import Limits, Split, ToolCall, ToolSpec, Trajectory

_PARAMS = "responses_create_params"


class NemoGym:
    """One resources server, and the files of rows that it was made for."""

    def __init__(
        self, url: str, rows: str, test: str | None = None, *, token_env_var: str | None = None
    ) -> None:
        """`rows` and `test`: input rows (JSONL) to train and to evaluate on. Raises UsageError."""
        self._url, self._headers = checked_url(url, token_env_var)
        self._files = {Split.TRAIN: Path(rows), Split.TEST: Path(test or rows)}
        connection = HttpConnection(self._url, self._headers, 10.0)
        status, _ = connection.get("/verify")
        connection.close()
        if status != 405:  # it is there, and wants a POST
            raise UsageError(
                f"{url} is no resources server of NeMo Gym: GET /verify answered {status}, not 405"
            )

    def tasks(self, split: Split, seed: int) -> Iterator[dict[str, Any]]:
        for place, row in read_rows(self._files[split]):
            if isinstance(row, Refusal):
                raise UsageError(str(row))
            prompt = _prompt(row)
            if not prompt:
                raise UsageError(f"{place}: {_PARAMS}.input is missing: that is no input row of NeMo Gym")
            yield {"prompt": prompt, "request": row}

    def start(self, row: Mapping[str, Any], limits: Limits) -> GymSession:
        return GymSession(HttpConnection(self._url, self._headers, limits.tool_seconds), row["request"])


class GymSession(EnvironmentSession):
    """A seeded session. Raises EnvironmentFailed where the server does not answer."""

    tools: Sequence[ToolSpec] = ()

    def __init__(self, connection: HttpConnection, request: dict[str, Any]) -> None:
        self._connection, self._request = connection, request
        self._verified = False
        self.tools = specs_of(request[_PARAMS].get("tools"), "parameters")
        # one that was seeded twice is one that nobody uses
        object_of(f"{connection.url}/seed_session", *connection.post("/seed_session", request, again=True))

    def step(self, call: ToolCall) -> ToolResult:
        status, text = self._connection.post(f"/{call.name}", call.arguments)
        if status in (400, 409, 422):  # what is wrong is the call
            raise ToolFailure(one_line(text, 1000))
        if status >= 400:
            where = f"{self._connection.url}/{call.name}"
            raise EnvironmentFailed(f"{where} answered {status}: {one_line(text, 300)}")
        return ToolResult(text=text)

    def grade(self, run: Trajectory) -> float:
        self._verified = True
        status, text = self._connection.post("/verify", self._request | {"response": _response(run)})
        verdict = object_of(f"{self._connection.url}/verify", status, text)
        if verdict.get("mask_sample") or not isinstance(verdict.get("reward"), int | float):
            why = one_line(str(verdict.get("failure_reason") or verdict.get("failure_kind")), 300)
            raise EnvironmentFailed(f"{self._connection.url}/verify gave no valid reward ({why})")
        return float(verdict["reward"])

    def close(self) -> None:
        try:
            if not self._verified:  # of older servers, which have no such path, sessions end by themselves
                self._connection.post("/close_session", {})
        finally:
            self._connection.close()


def _prompt(row: Mapping[str, Any]) -> str:
    """The messages of a row as text; each under its role where there are several turns."""
    params = row.get(_PARAMS)
    given = params.get("input") if isinstance(params, dict) else None
    if not isinstance(given, list):
        return given if isinstance(given, str) else ""
    parts = [(item.get("role", ""), _text(item.get("content"))) for item in given if isinstance(item, dict)]
    several = sum(role in ("user", "assistant") for role, _ in parts) > 1
    return "\n\n".join(f"{role}: {text}" if several else text for role, text in parts if text)


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = [part for part in content or () if isinstance(part, dict)]
    return "".join(str(part.get("text", "")) for part in parts)


def _response(run: Trajectory) -> dict[str, Any]:
    """The run as a response of the Responses API, whose last message is the answer."""
    from nano_formats.nemo_gym.rollouts import write

    response: dict[str, Any] = write(LoggedRun(trajectory=run))["response"]
    ours = {item["call_id"] for item in response["output"] if item.get("name") == "submit"}
    output = [item for item in response["output"] if item.get("call_id") not in ours]
    if run.answer is not None:
        part = {"type": "output_text", "text": run.answer, "annotations": []}
        message = {"type": "message", "id": "msg_answer", "role": "assistant", "status": "completed"}
        output.append(message | {"content": [part]})
    return response | {"output": output}
