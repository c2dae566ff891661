"""`nano-rl tasks serve`: a resources server for NeMo Gym over tasks: /seed_session, /{tool}, /verify.

A session is identified by a cookie. Invalid requests get a 4xx status with a sentence; a failed tool call is
an observation with status 200.
"""

from __future__ import annotations

import secrets
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from nano_coder.commands.options import open_log
from nano_coder.serve.access import Access, Action, BadRequest, listening_socket, opened_access, root_of
from nano_formats.episode import Episode, EpisodeOver
from nano_formats.nemo_gym.rollouts import verified
from nano_rl.commands.options import Log, TaskFile
from nano_rl.tasks.task_file import read_tasks
from nano_shared.errors import Refused, UsageError
from nano_shared.strict_json import Row, parse_json
from nano_shared.types import Task, ToolSpec

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response


class TooMany(UsageError):
    """The server has reached its limit of sessions."""


class GymSessions:
    """Thread-safe. `opener` makes an episode of a task."""

    def __init__(self, opener: Callable[[Task], Episode], *, most: int, idle_seconds: float) -> None:
        self._opener = opener
        self._most = most
        self._idle = idle_seconds
        self._lock = threading.Lock()
        self._open: dict[tuple[str, str], tuple[Episode, threading.Lock]] = {}
        """by owner and id: the episode, and the lock under which it is used"""

    def open(self, task: Task, id: str | None = None, owner: str = "") -> str:
        """Open a session on a task, or return the owner's open one of that id. Raises TooMany."""
        self._sweep()
        with self._lock:
            id = id or secrets.token_urlsafe(24)
            place = (owner, id)
            if place not in self._open:
                if len(self._open) >= self._most:
                    raise TooMany(f"{self._most} sessions are open; close one, or serve with --sessions")
                self._open[place] = self._opener(task), threading.Lock()
            return id

    def use(self, id: str, owner: str = "") -> tuple[Episode, threading.Lock]:
        """The episode of a session and the lock under which it is used. Raises KeyError."""
        with self._lock:
            return self._open[owner, id]

    def close(self, id: str, owner: str = "") -> None:
        with self._lock:
            held = self._open.pop((owner, id), None)
        if held is not None:
            held[0].close()

    def close_all(self) -> None:
        for owner, id in list(self._open):
            self.close(id, owner)

    def _sweep(self) -> None:
        now = time.monotonic()
        with self._lock:
            idle = [place for place, (e, _) in self._open.items() if now - e.touched > self._idle]
        for owner, id in idle:
            self.close(id, owner)


def last_text(response: dict[str, Any]) -> str | None:
    """The text of the last message that the model wrote, as its answer."""
    for item in reversed(response.get("output") or []):
        if not isinstance(item, dict) or item.get("type") != "message":
            continue
        content = item.get("content")
        if isinstance(content, str):
            return content
        parts = [part for part in content or () if isinstance(part, dict)]
        return "".join(str(part.get("text", "")) for part in parts if part.get("type") == "output_text")
    return None


COOKIE = "nano_session"
LARGEST_BODY = 64 << 20
"""largest request body, bytes"""


class Problem(Exception):
    """A request that cannot be served: the HTTP status and the sentence."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status


def gym_app(tasks: Sequence[Task], sessions: GymSessions, access: Access | None = None) -> Starlette:
    """The application. Every session is closed when it shuts down."""
    from starlette.applications import Starlette
    from starlette.routing import Route

    server = _Server({task.key: task for task in tasks}, sessions)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> Any:
        yield
        sessions.close_all()

    posts = {
        "/seed_session": server.seed, "/verify": server.verify, "/close_session": server.close,
        "/aggregate_metrics": server.aggregate, "/{tool}": server.call,
    }  # fmt: skip
    allowed = access or Access()
    health = [
        Route("/health", _answering(server.health, allowed, Action.HEALTH)),
        Route("/reverify_mode", _answering(server.mode, allowed)),
    ]
    routes = [Route(path, _answering(handler, allowed), methods=["POST"]) for path, handler in posts.items()]
    return Starlette(routes=[*health, *routes], lifespan=lifespan)


class _Server:
    def __init__(self, tasks: Mapping[str, Task], sessions: GymSessions) -> None:
        self._tasks = tasks
        self._sessions = sessions

    def health(self, request: Request, body: Row) -> Response:
        return _json({"status": "ok", "tasks": len(self._tasks)})

    def mode(self, request: Request, body: Row) -> Response:
        """A verdict needs the workspace of the session."""
        return _json("unsupported")

    def seed(self, request: Request, body: Row) -> Response:
        """A session on the task that the row names, in the cookie or under the caller's own id."""
        row = body.get("task_data", body)
        task = self._task(row if isinstance(row, dict) else {})
        wanted = body.get("resources_session_id")
        if wanted is not None and not (isinstance(wanted, str) and 0 < len(wanted) <= 200):
            raise Problem(422, "resources_session_id must be a text of at most 200 characters")
        id = self._sessions.open(task, wanted, request.state.owner)
        response = _json({"resources_session_id": id} if wanted else {})
        response.set_cookie(COOKIE, id, httponly=True, samesite="lax")
        return response

    def call(self, request: Request, body: Row) -> Response:
        from starlette.responses import PlainTextResponse

        name = request.path_params["tool"]
        episode, busy = self._session(request)
        _check_call(name, body, episode.tools)
        with busy:
            return PlainTextResponse(episode.act(name, body).text)

    def verify(self, request: Request, body: Row) -> Response:
        """The request with the verdict added as NeMo Gym's fields."""
        if not isinstance(body.get("response"), dict):
            raise Problem(422, "response: is missing, so there is nothing to verify")
        owner = request.state.owner
        if COOKIE not in request.cookies:  # nothing was done in a workspace; an answer is still an answer
            id = self._sessions.open(self._task(body), owner=owner)
        else:
            id = request.cookies[COOKIE]
        episode, busy = self._used(id, owner)
        try:
            with busy:
                verdict = episode.finish(last_text(body["response"]))
        finally:
            self._sessions.close(id, owner)
        if verdict is None:
            raise Problem(422, f"task {episode.task.key!r} has no check, so there is no reward")
        return _json(body | verified(verdict))

    def close(self, request: Request, body: Row) -> Response:
        id = body.get("resources_session_id") or request.cookies.get(COOKIE)
        if not isinstance(id, str):
            raise Problem(422, "resources_session_id: is missing, and there is no session cookie")
        self._sessions.close(id, request.state.owner)
        return _json({"resources_session_id": id})

    def aggregate(self, request: Request, body: Row) -> Response:
        """Mean reward over the samples that are valid measurements."""
        rows = body.get("verify_responses")
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise Problem(422, "verify_responses: must be a list of objects")
        rewards = [row.get("reward") for row in rows if not row.get("mask_sample")]
        if not all(isinstance(r, int | float) and abs(r) <= sys.float_info.max for r in rewards):
            raise Problem(422, "verify_responses: every reward must be a finite number")
        mean = sum(rewards) / len(rewards) if rewards else None
        metrics = {"mean/reward": mean, "samples": len(rows), "masked": len(rows) - len(rewards)}
        return _json({"group_level_metrics": [], "agent_metrics": metrics, "key_metrics": metrics})

    def _task(self, row: Row) -> Task:
        metadata = row.get("verifier_metadata")
        key = metadata.get("nano_key") if isinstance(metadata, dict) else row.get("task_key")
        if not isinstance(key, str):
            raise Problem(422, "verifier_metadata.nano_key: is missing; export the tasks with --to nemo-gym")
        if key not in self._tasks:
            raise Problem(404, f"no task {key!r:.100} in the file that is served")
        return self._tasks[key]

    def _session(self, request: Request) -> tuple[Episode, Any]:
        if COOKIE not in request.cookies:
            raise Problem(400, "no session; POST /seed_session first and send its cookie")
        return self._used(request.cookies[COOKIE], request.state.owner)

    def _used(self, id: str, owner: str) -> tuple[Episode, Any]:
        try:
            return self._sessions.use(id, owner)
        except KeyError:
            raise Problem(410, "the session is closed or unknown; POST /seed_session for another") from None


def _check_call(name: str, arguments: Row, tools: Sequence[ToolSpec]) -> None:
    """Raises Problem for a tool that is not offered, and for arguments that it does not have."""
    tool = next((tool for tool in tools if tool.name == name), None)
    if tool is None:
        raise Problem(404, f"no tool {name!r:.60}; the tools are {', '.join(t.name for t in tools)}")
    known = tool.parameters.get("properties", {})
    if unknown := [key for key in arguments if key not in known]:
        raise Problem(422, f"{name} has no argument {unknown[0]!r:.60}; it takes {', '.join(known)}")
    if missing := [key for key in tool.parameters.get("required", []) if key not in arguments]:
        raise Problem(422, f"{name} needs the argument {missing[0]!r}")


def _answering(handler: Any, access: Access, action: Action = Action.TASKS) -> Any:
    """An endpoint: checks the caller, reads a bounded body, answers off the event loop."""
    from starlette.concurrency import run_in_threadpool

    async def endpoint(request: Request) -> Response:
        try:
            access.check(request, action)
            request.state.owner = access.owner(request)
            body = await _body(request) if request.method == "POST" else {}
            response: Response = await run_in_threadpool(handler, request, body)
        except (Problem, BadRequest) as problem:
            return _json({"detail": str(problem)}, problem.status)
        except UsageError as problem:
            status = {TooMany: 429, EpisodeOver: 409}.get(type(problem), 422)
            return _json({"detail": str(problem)}, status)
        return response

    return endpoint


async def _body(request: Request) -> Row:
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > LARGEST_BODY:
            raise Problem(413, f"the body is larger than {LARGEST_BODY >> 20} MB")
    try:
        value = parse_json(data.decode()) if data.strip() else {}
    except (Refused, UnicodeDecodeError) as problem:
        raise Problem(400, f"the body {problem}") from None
    if not isinstance(value, dict):
        raise Problem(400, f"the body must be a JSON object, not {type(value).__name__}")
    return value


def _json(value: Any, status: int = 200) -> Response:
    from starlette.responses import JSONResponse

    return JSONResponse(value, status)


def command(
    file: TaskFile,
    host: Annotated[
        str,
        Option(help="Address to listen on; one that others reach needs --key. Callers run code in jails."),
    ] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="0 takes a free one.")] = 8010,
    key: Annotated[
        list[str] | None,
        Option(metavar="KEY", help="API key that callers must send; repeatable.", envvar="NANO_TASKS_KEY"),
    ] = None,
    sessions: Annotated[int, Option(min=1, help="Open at once.")] = 64,
    idle: Annotated[float, Option(min=1, help="Seconds after which a session ends.")] = 1800.0,
    log: Log = None,
) -> int:
    """Serve /seed_session, /TOOL and /verify over the tasks of FILE; every session is logged as a run."""
    access = opened_access(host, key, variables=("NANO_TASKS_KEY",))
    tasks = read_tasks(file)
    if behind := next((task.key for task in tasks if task.earlier), None):
        raise UsageError(f"{file}: task {behind!r} comes behind others, and sessions have one task each")
    from nano_coder.config import redacting_store
    from nano_coder.serve.access import run_server
    from nano_rl.command_setup import sandbox_opener

    sandbox, store = sandbox_opener()(), redacting_store(open_log(log, create=True))
    held = GymSessions(lambda task: Episode(task, sandbox, store), most=sessions, idle_seconds=idle)
    with listening_socket(host, port) as listening:
        root = root_of(host, listening)
        print(f"{len(tasks)} tasks on {root}", file=sys.stderr, flush=True)
        run_server(gym_app(tasks, held, access), listening)
    return 0
