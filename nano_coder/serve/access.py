"""Access to a server of this machine: who may do what, its socket, and connections that may not idle.

For `nano-coder serve`, `nano-coder view` and `nano-rl tasks serve`. Callers are distinguished by their keys.
Without keys only programs of the user who started the server are answered, and root's: the kernel says whose
a connection is. A session belongs to the key that began it; for another key it does not exist.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import resource
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from nano_shared.errors import UsageError

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import ASGIApp

LOOPBACK = frozenset({"127.0.0.1", "localhost", "[::1]", "::1"})
SHORTEST = 16
"""characters of a key where other machines may try keys"""
_LONGEST = 512
ADMIN_OWNER = "admin"
"""owner of sessions under an admin key"""
_HASHES = 50_000
"""rounds by which the log's name of a key's owner says nothing of the key"""


class BadRequest(Exception):
    """A request that cannot be served: HTTP status, sentence, and parameter and code of OpenAI's errors."""

    def __init__(
        self, text: str, *, status: int = 400, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(text)
        self.status, self.param, self.code = status, param, code


class Caller(StrEnum):
    STRANGER = "no key, where one is needed"
    CLIENT = "a client's key"
    OPEN = "no key, where clients need none but there is an admin key"
    LOCAL = "no key, where there are none"
    ADMIN = "the admin key"


class Action(StrEnum):
    HEALTH = "health"
    INFER = "ask the model, count tokens, list models; continue, read and reward its own sessions"
    REPLACE = "replace a reward"
    ANY_SESSION = "read and reward sessions of others"
    METRICS = "read /metrics, whose counters tell of the prompts of others"
    VIEW = "read the log"
    LOAD = "load adapters"
    TASKS = "open sessions on tasks, call their tools, ask for verdicts"


_KNOWN = frozenset(Caller) - {Caller.STRANGER}
RIGHTS: Mapping[Action, frozenset[Caller]] = {
    Action.HEALTH: frozenset(Caller),
    Action.INFER: _KNOWN,
    Action.TASKS: _KNOWN,
    Action.REPLACE: frozenset({Caller.LOCAL, Caller.ADMIN}),
    Action.ANY_SESSION: frozenset({Caller.ADMIN}),
    Action.METRICS: frozenset({Caller.LOCAL, Caller.ADMIN}),
    Action.VIEW: frozenset({Caller.LOCAL, Caller.ADMIN}),
    Action.LOAD: frozenset({Caller.ADMIN}),
}


@dataclass(frozen=True)
class Access:
    keys: Sequence[str] = ()
    admin_keys: Sequence[str] = ()
    user: int | None = None
    """whose programs are answered without a key, beside root's; None: everybody's"""
    _owners: dict[str, str] = field(default_factory=dict, repr=False, compare=False)

    def caller(self, request: Request, given: str | None = None) -> Caller:
        """Who asks. `given` is a key that came by another way than the headers."""
        key = _key_of(request) if given is None else given
        if _is_one_of(key, self.admin_keys):
            return Caller.ADMIN
        if self.keys:
            return Caller.CLIENT if _is_one_of(key, self.keys) else Caller.STRANGER
        return Caller.OPEN if self.admin_keys else Caller.LOCAL

    def check(self, request: Request, action: Action, given: str | None = None) -> Caller:
        """Who asks. Raises BadRequest where that caller may not: 401 without a key that is known, 403 with
        one; and, where no key was asked for, 403 for a host or a page that is not of this machine and for
        another user's program."""
        caller = self.caller(request, given)
        if caller in RIGHTS[action]:
            if caller in (Caller.OPEN, Caller.LOCAL) and action is not Action.HEALTH:
                _check_place(request)
                self._check_user(request)
            return caller
        if caller is Caller.STRANGER:
            raise BadRequest("wrong or missing API key", status=401, code="invalid_api_key")
        if not self.admin_keys:
            raise BadRequest(f"nobody may {action} here: start it with --admin-key", status=403)
        if caller is Caller.CLIENT:
            raise BadRequest(f"this key may not {action}; the admin key may", status=403)
        raise BadRequest("wrong or missing admin key", status=401, code="invalid_api_key")

    def _check_user(self, request: Request) -> None:
        if self.user is None or user_of(request.scope["client"], request.scope["server"]) in (0, self.user):
            return
        raise BadRequest("another user started this server, without a key for others: --key", status=403)

    def owner(self, request: Request) -> str:
        caller = self.caller(request)
        if caller is Caller.ADMIN:
            return ADMIN_OWNER
        if caller is not Caller.CLIENT:
            return ""
        key = _key_of(request)
        if key not in self._owners:
            told = hashlib.pbkdf2_hmac("sha256", key.encode(), b"nano: owner of a session", _HASHES)
            self._owners[key] = told.hex()[:16]
        return self._owners[key]


def opened_access(
    host: str, keys: Sequence[str] | None, admin_keys: Sequence[str] | None = None, *,
    variables: Sequence[str] = (),
) -> Access:  # fmt: skip
    """The keys of a server that is to listen on `host`, each option's list as it was given.

    `variables` are the environment variables of the options.

    Raises UsageError for a key that is empty, blank or unfit for a header, for a short one or none at an
    address that other machines reach, and for a client's key that is the admin's too.
    """
    if empty := [name for name in variables if name in os.environ and not os.environ[name].strip()]:
        raise UsageError(f"{empty[0]} is set, and empty: unset it, or set it to a key")
    for option, given in (("--key", keys or ()), ("--admin-key", admin_keys or ())):
        for key in given:
            _refuse_unfit(option, key, host)
    if set(keys or ()) & set(admin_keys or ()):
        raise UsageError("--key and --admin-key are the same, so clients would be admins; give two keys")
    if host not in LOOPBACK and not keys:
        raise UsageError(f"--host {host} is reached from other machines: give clients a --key")
    return Access(tuple(keys or ()), tuple(admin_keys or ()), user=os.getuid())


def user_of(client: tuple[str, int], server: tuple[str, int]) -> int | None:
    """The uid whose program holds the client's end of a connection on this machine; None if nobody does."""
    for file, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        wanted = f" {_written(client, family)} {_written(server, family)} ".encode()
        try:
            table = Path("/proc/net", file).read_bytes()
        except OSError:
            continue
        if (at := table.find(wanted)) >= 0:
            fields = table[at : table.find(b"\n", at)].split()
            uid, inode = int(fields[6]), int(fields[8])
            return uid if inode else None  # a socket that its program has closed is written as root's
    return None


def _written(address: tuple[str, int], family: socket.AddressFamily) -> str:
    """An address as /proc/net/tcp writes it: words of 32 bits in the machine's order, and the port."""
    host = address[0]
    if family == socket.AF_INET6 and ":" not in host:
        host = f"::ffff:{host}"
    try:
        packed = socket.inet_pton(family, host)
    except OSError:  # of the other family
        return "-"
    words = (packed[i : i + 4] for i in range(0, len(packed), 4))
    return "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in words) + f":{address[1]:04X}"


def _refuse_unfit(option: str, key: str, host: str) -> None:
    if not key.strip():
        raise UsageError(f"{option} is empty, which is no secret (is its variable set?); give a key")
    if not (key.isascii() and key.isprintable()) or key != key.strip() or len(key) > _LONGEST:
        raise UsageError(
            f"{option} cannot be sent in a header: a key is at most {_LONGEST} ASCII characters without"
            " spaces around it"
        )
    if host not in LOOPBACK and len(key) < SHORTEST:
        raise UsageError(
            f"{option} has {len(key)} characters, and --host {host} is reached from other machines: give"
            f" {SHORTEST} or more"
        )


def _key_of(request: Request) -> str:
    scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
    return request.headers.get("x-api-key") or (bearer.strip() if scheme.lower() == "bearer" else scheme)


def _is_one_of(given: str, keys: Sequence[str]) -> bool:
    return any([hmac.compare_digest(given.encode(), key.encode()) for key in keys])


def _check_place(request: Request) -> None:
    """Raises BadRequest for a host name that is not this machine's, and for a page of another site."""
    host = request.headers.get("host", "")
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    if name not in LOOPBACK:  # a page of the web whose name resolves to this machine
        raise BadRequest(f"this server does not answer to the host {name!r:.100}", status=403)
    origin = request.headers.get("origin")
    if origin and _site(origin) not in LOOPBACK:
        raise BadRequest(f"this server does not answer to pages of {origin!r:.100}", status=403)


def _site(origin: str) -> str | None:
    try:
        return urlsplit(origin).hostname
    except ValueError:  # no URL
        return None


def root_of(host: str, listening: socket.socket) -> str:
    """The URL at which a server on this socket is reached."""
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{listening.getsockname()[1]}"


def listening_socket(host: str, port: int) -> socket.socket:
    """A listening socket. Raises UsageError for an address that is in use or not ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(2048)
    except OSError as problem:
        listening.close()
        where = f"{host}:{port}: {problem.strerror}"
        raise UsageError(f"cannot listen on {where}; name another --host or --port") from None
    return listening


HEAD_SECONDS = 20.0
"""from the connection, or the answer before, to the end of a request's headers"""


class BoundedConnection(H11Protocol):
    """uvicorn bounds only the idle time between requests: dripping bytes would hold a connection for ever.

    Where most of the files that this process may open are connections, the one that is idle longest goes.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_request()
        if len(self.connections) > resource.getrlimit(resource.RLIMIT_NOFILE)[0] * 3 // 4:
            idle = [each for each in self.connections if isinstance(each, BoundedConnection) and each.is_idle]
            min(idle, key=lambda each: each.idle_since).transport.close()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._await_request()

    @property
    def is_idle(self) -> bool:
        return self.cycle is None or bool(self.cycle.response_complete)

    def _await_request(self) -> None:
        self.idle_since = self.loop.time()
        self.loop.call_later(HEAD_SECONDS, self._close_unless_after, self.cycle)

    def _close_unless_after(self, before: object) -> None:
        if self.cycle is before:
            self.transport.close()


def run_server(app: ASGIApp, listening: socket.socket) -> None:
    """Answer until a signal ends it."""
    config = uvicorn.Config(
        app, log_level="warning", http=BoundedConnection, h11_max_incomplete_event_size=64 << 10
    )
    uvicorn.Server(config).run(sockets=[listening])
