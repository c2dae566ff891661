"""The only way out of a jail that was given one: an HTTP proxy of ours, in the agent, for named hosts.

The jail's network namespace holds nothing but its loopback. Its init opens a listening socket there and hands
it to the agent; whoever connects inside speaks to this proxy. Names are resolved here, connections go to the
address that was checked, and every call is kept. CONNECT as in RFC 9110, section 9.3.6.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import re
import select
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

from nano_shared.errors import UsageError

PORT = 3128
"""inside the jail"""
_URL = f"http://127.0.0.1:{PORT}"
VARIABLES = {name: _URL for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")}
_PORTS = frozenset({80, 443})
_HOST = re.compile(r"(\*\.)?([a-z0-9]([a-z0-9-]*[a-z0-9])?\.)*[a-z0-9]([a-z0-9-]*[a-z0-9])?")
_LONGEST_HEAD = 1 << 16
_PATIENCE_S = 30.0
_log = logging.getLogger(__name__)

Resolve = Callable[[str, int], list[str]]


@dataclass(frozen=True, slots=True)
class Call:
    """One attempt to reach a host."""

    host: str
    port: int
    refused: str | None
    """why, or None where it went through"""


class _Refused(Exception):
    """With the status line that the program inside is given."""


def parse_allowed(text: str) -> frozenset[str]:
    """The hosts of `allow=HOST,...`; `*.example.org` stands for every host below. Raises UsageError."""
    hosts = frozenset(host.strip().lower() for host in text.removeprefix("allow=").split(","))
    for host in hosts:
        if not text.startswith("allow=") or not _HOST.fullmatch(host):
            raise UsageError(
                f"--net {text!r}: say none, or allow=HOST,... with names such as api.example.org"
            )
    return hosts


def resolve(host: str, port: int) -> list[str]:
    """Addresses of a name that anybody may reach: no private, local or reserved range. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = list(dict.fromkeys(str(info[4][0]) for info in found))
    return [a for a in addresses if _public(a)]


def _public(address: str) -> bool:
    parsed = ipaddress.ip_address(address.partition("%")[0])
    mapped = getattr(parsed, "ipv4_mapped", None)
    return (mapped or parsed).is_global and not parsed.is_multicast


class Proxy:
    """Serves one listening socket of a jail until it is closed."""

    def __init__(self, listener: socket.socket, allowed: frozenset[str], resolve: Resolve = resolve) -> None:
        self._listener = listener
        self._allowed = allowed
        self._resolve = resolve
        self.calls: list[Call] = []
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), name="proxy call", daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            client.settimeout(_PATIENCE_S)
            try:
                head, rest = _head(client)
                host, port, passed_on = _target(head)
                with self._connect(host, port) as server:
                    if passed_on:
                        server.sendall(passed_on + rest)
                    else:
                        client.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
                        server.sendall(rest)
                    _relay(client, server)
            except _Refused as problem:
                client.sendall(f"HTTP/1.1 {problem}\r\nConnection: close\r\n\r\n{problem}\n".encode())

    def _connect(self, host: str, port: int) -> socket.socket:
        try:
            server = self._reach(host, port)
        except (_Refused, OSError) as problem:
            self._note(Call(host, port, str(problem)))
            raise problem if isinstance(problem, _Refused) else _Refused(f"502 {problem}") from problem
        self._note(Call(host, port, None))
        return server

    def _reach(self, host: str, port: int) -> socket.socket:
        parents = {"*." + host.split(".", n)[-1] for n in range(1, host.count(".") + 1)}
        if host not in self._allowed and not parents & self._allowed:
            raise _Refused(f"403 {host} is not among the allowed hosts")
        if port not in _PORTS:
            raise _Refused(f"403 port {port} is not allowed")
        addresses = self._resolve(host, port)
        if not addresses:
            raise _Refused(f"403 {host} has no public address")
        # to the address that was looked at: asking again might answer otherwise
        return socket.create_connection((addresses[0], port), timeout=_PATIENCE_S)

    def _note(self, call: Call) -> None:
        self.calls.append(call)
        _log.info("network call from a jail: %s:%s %s", call.host, call.port, call.refused or "allowed")

    def close(self) -> None:
        # wakes the thread that accepts
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def _head(client: socket.socket) -> tuple[bytes, bytes]:
    """Request line and headers, and what came after them."""
    data = b""
    while b"\r\n\r\n" not in data:
        if len(data) > _LONGEST_HEAD:
            raise _Refused("431 Request header fields too large")
        chunk = client.recv(4096)
        if not chunk:
            raise _Refused("400 Bad request")
        data += chunk
    head, _, rest = data.partition(b"\r\n\r\n")
    return head, rest


def _target(head: bytes) -> tuple[str, int, bytes]:
    """Host, port, and the head to pass on: empty for a tunnel."""
    line, _, headers = head.decode("latin-1").partition("\r\n")
    parts = line.split(" ")
    try:
        method, target, version = parts
        url = urlsplit(f"//{target}" if method == "CONNECT" else target)
        host, port = (url.hostname or "").lower().rstrip("."), url.port
    except ValueError:
        raise _Refused("400 Bad request") from None
    if method == "CONNECT":
        return host, port or 443, b""
    if url.scheme != "http":
        raise _Refused("400 This is a proxy: ask for http://HOST/... or CONNECT")
    path = url._replace(scheme="", netloc="").geturl() or "/"
    # one request a connection: the next might name another host
    kept = [h for h in headers.split("\r\n") if h and not re.match(r"(proxy-)?connection:", h, re.IGNORECASE)]
    text = "\r\n".join([f"{method} {path} {version}", *kept, "Connection: close", "", ""])
    return host, port or 80, text.encode("latin-1")


def _relay(client: socket.socket, server: socket.socket) -> None:
    """Copy both ways until one side ends or neither speaks."""
    other = {client: server, server: client}
    while other:
        ready, _, _ = select.select(list(other), [], [], _PATIENCE_S)
        if not ready:
            return
        for source in ready:
            data = source.recv(1 << 16)
            target = server if source is client else client
            if data:
                target.sendall(data)
            else:
                with contextlib.suppress(OSError):
                    target.shutdown(socket.SHUT_WR)
                del other[source]
