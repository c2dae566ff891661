"""Tasksets of verifiers 0.4: `--env 'verifiers:NAME num_tasks=64'`, NAME being an installed taskset package.

Its tasks, tools and rewards run here, as their package has them; its harnesses and runtimes do not: the agent
is ours. So a taskset that scores what its own runtime holds, or that leads a conversation itself, is refused.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack
from importlib import metadata
from typing import Any

from pydantic import ValidationError

from nano_coder.environment import EnvironmentSession, call_environment
from nano_coder.tools.tool import ToolFailure, ToolResult
from nano_formats.row_format import RowFormat
from nano_shared.errors import EnvironmentFailed, Refused, UsageError
from nano_shared.files import content_hash
from nano_shared.hidden_checks import AnswerChecks
from nano_shared.strict_json import Row, parse_json, text_field
from nano_shared.types import Limits, Provenance, Split, Task, ToolCall, ToolSpec, Trajectory

VERSION = "0.4."
_INSTALL = "pip install 'verifiers>=0.4,<0.5', and the taskset's package"


class Verifiers:
    """One taskset, and its settings."""

    def __init__(self, name: str, **settings: Any) -> None:
        """Raises UsageError for a package that is missing, of another version, or beyond what runs here."""
        try:
            import verifiers.v1 as vf
            from verifiers.v1.utils.loaders import environment_class, taskset_class
        except ImportError as problem:
            raise UsageError(
                f"verifiers:{name} needs the package verifiers ({problem}); {_INSTALL}"
            ) from None
        if not metadata.version("verifiers").startswith(VERSION):
            raise UsageError(f"verifiers {metadata.version('verifiers')} speaks another protocol; {_INSTALL}")
        try:
            kind = taskset_class(name)
        except (ImportError, AttributeError, TypeError, ValueError) as problem:
            raise UsageError(f"verifiers:{name}: {problem}") from None
        if environment_class(name) is not vf.SingleAgentEnv:
            raise UsageError(
                f"verifiers:{name} has an Env with agents of its own; tasksets for a single agent run here"
            )
        try:
            self._taskset = kind(_config_type(kind).model_validate({"id": name, **settings}))
        except ValidationError as problem:
            error = problem.errors()[0]
            where = ".".join(map(str, error["loc"]))
            raise UsageError(f"verifiers:{name}: {where}: {error['msg'].lower()}") from None
        self._name = f"verifiers:{name}"

    def tasks(self, split: Split, seed: int) -> Iterator[dict[str, Any]]:
        """The taskset's tasks in its order: it has no splits, but settings of its own that choose."""
        for task in call_environment(self._taskset, self._name, lambda: iter(self._taskset)):
            data = task.data
            if task.NEEDS_CONTAINER or _of_a_runtime(task):
                raise UsageError(
                    f"{self._name}: its tasks need a runtime of verifiers, and the agent is in ours"
                )
            if not data.prompt_text:
                raise UsageError(
                    f"{self._name}: a user of its own opens the conversation, which needs its Env"
                )
            prompt = "\n\n".join(filter(None, (data.system_prompt, data.prompt_text)))
            yield {"prompt": prompt, "key": task.key[:16], "data": json.loads(data.model_dump_json())}

    def start(self, row: Mapping[str, Any], limits: Limits) -> VerifiersSession:
        kind = type(self._taskset).task_type()
        task = kind(kind.data_type().model_validate(row["data"]), self._taskset.config.task)
        return VerifiersSession(self._name, self._taskset, task, limits.tool_seconds)


class VerifiersSession(EnvironmentSession):
    """One task, with tool servers and an event loop of its own. Used by one thread."""

    tools: Sequence[ToolSpec] = ()

    def __init__(self, name: str, taskset: Any, task: Any, seconds: float) -> None:
        self._name, self._task, self._seconds = name, task, seconds
        self._loop = asyncio.Runner()
        self._tools: dict[str, tuple[Any, str]] = {}
        with ExitStack() as failing:
            failing.callback(self._loop.close)
            self._trace = _new_trace(task)
            self._run(task.setup(self._trace, None))
            for toolset in (*type(taskset).toolsets(taskset.config), *type(task).toolsets(task.config)):
                self._run(self._serve(toolset))
            failing.pop_all()

    def step(self, call: ToolCall) -> ToolResult:
        server, name = self._tools[call.name]
        from mcp.server.mcpserver.exceptions import ToolError

        try:
            answer = self._run(server.call_tool(name, call.arguments), ToolError)
        except ToolError as refused:  # wrong arguments, or what the tool raised
            if isinstance(refused.__cause__, ValidationError):
                raise ToolFailure(str(refused)) from None
            raise EnvironmentFailed(f"{self._name}: {refused}") from refused
        content = getattr(answer, "content", answer)
        text = "\n".join(str(getattr(block, "text", block)) for block in content)
        return ToolResult(text=text, ok=not getattr(answer, "is_error", False))

    def grade(self, run: Trajectory) -> float:
        """The weighted sum of the task's rewards."""
        _fill(self._trace, run)
        self._run(self._task.finalize(self._trace, None))
        self._run(self._task.score(self._trace))
        unscored = [name for name, reward in self._trace.rewards.items() if reward is None]
        if unscored or not self._trace.rewards:
            raise EnvironmentFailed(
                f"{self._name}: {unscored[0] if unscored else 'no reward'} was not scored"
            )
        self.components = {name: float(reward.score) for name, reward in self._trace.rewards.items()}
        return float(self._trace.reward)

    def close(self) -> None:
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, Any], *passing: type[Exception]) -> Any:
        """Wait for their code, within the time of one call."""

        async def bounded() -> Any:
            return await asyncio.wait_for(work, self._seconds)

        try:
            return call_environment(self._task, self._name, self._loop.run, bounded(), passing=passing)
        except EnvironmentFailed as problem:
            if isinstance(problem.__cause__, TimeoutError):
                raise EnvironmentFailed(f"{self._name}: no answer within {self._seconds:g} s") from None
            raise

    async def _serve(self, toolset: Any) -> None:
        """Register the tools of a toolset on a server in this process; its state is the trace's."""
        from mcp.server.mcpserver import MCPServer

        if toolset.config.url:
            raise UsageError(
                f"{self._name}: its tools are behind {toolset.config.url}, which needs its harness"
            )
        trace = self._trace

        async def state() -> Any:
            return trace.state

        toolset._pull_state = state
        await toolset.setup()
        await toolset.setup_task(self._task.data)
        server = MCPServer(toolset.server_name or type(toolset).__name__)
        toolset.register(server)
        for tool in await server.list_tools():
            full = f"{toolset.server_name}_{tool.name}" if toolset.server_name else tool.name
            self._tools[full] = (server, tool.name)
            schema = getattr(tool, "input_schema", None) or getattr(tool, "inputSchema", {})
            spec = ToolSpec(name=full, description=tool.description or "", parameters=schema)
            self.tools = (*self.tools, spec)


def _config_type(kind: type) -> Any:
    from verifiers.v1 import TasksetConfig
    from verifiers.v1.utils.generic import concrete_type

    return concrete_type(kind, TasksetConfig) or TasksetConfig


def _of_a_runtime(task: Any) -> bool:
    """Whether a reward looks into the runtime of verifiers' agent."""
    wanted = (inspect.signature(hook).parameters.get("runtime") for hook in task.hooks("reward"))
    return any(parameter is not None and parameter.default is parameter.empty for parameter in wanted)


def _new_trace(task: Any) -> Any:
    import verifiers.v1 as vf
    from verifiers.v1.state import state_cls

    return vf.Trace(
        task=vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
        state=state_cls(type(task))(),
        agent=vf.AgentInfo(config=vf.AgentConfig()),
    )


def _fill(trace: Any, run: Trajectory) -> None:
    """The run as verifiers' graph of messages, with the answer as the last reply."""
    import verifiers.v1 as vf
    from verifiers.v1.types import AssistantMessage, SystemMessage, ToolMessage, UserMessage
    from verifiers.v1.types import ToolCall as Called

    data = trace.task.data
    prompt = [UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else data.prompt
    system = [SystemMessage(content=data.system_prompt)] if data.system_prompt else []
    messages: list[tuple[Any, bool]] = [(message, False) for message in (*system, *prompt)]
    for turn in run.turns:
        numbered = ((f"call_{turn.index}_{i}", call) for i, call in enumerate(turn.calls))
        acted = [(id, call) for id, call in numbered if call.name != "submit"]
        calls = [Called(id=id, name=call.name, arguments=json.dumps(call.arguments)) for id, call in acted]
        if calls:
            messages.append((AssistantMessage(content=turn.thought, tool_calls=calls), True))
        pairs = zip(turn.calls, turn.observations, strict=False)
        seen = [observation.text for call, observation in pairs if call.name != "submit"]
        for (id, call), text in zip(acted, seen, strict=False):
            messages.append((ToolMessage(tool_call_id=id, name=call.name, content=text), False))
    messages.append((AssistantMessage(content=run.answer or ""), True))
    for number, (message, sampled) in enumerate(messages):
        parent = number - 1 if number else None
        trace.nodes.append(vf.MessageNode(parent=parent, message=message, sampled=sampled))
    trace.is_completed, trace.ok, trace.stop_condition = True, True, str(run.stop)


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
        key=_key(row), prompt=prompt, hidden=AnswerChecks(answer=answer) if answer else None,
        provenance=Provenance(source=str(row.get("task") or NAME)),
    )  # fmt: skip


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
    name=NAME, summary="verifiers datasets: prompt or question, answer, info",
    recognises=lambda row: ("question" in row or "prompt" in row) and ("answer" in row or "info" in row),
    read_row=read_row, write_row=write_row,
    understood=frozenset({"prompt", "question", "answer", "info", "task"}),
)  # fmt: skip
