"""The egress proxy: an HTTP proxy in the agent's process, a jail's only way to named hosts.

The jail's network namespace has only loopback. Its init opens a listening socket there and hands it to the
agent; programs inside connect to this proxy. The proxy reads one request of each connection, writes it anew
for the host that it checked (RFC 9112), and returns the answer. A CONNECT tunnel (RFC 9110, section 9.3.6)
carries TLS, which is not inspected. Names are resolved here, connections go to the checked address, and calls
are recorded.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import selectors
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

import h11

from nano_coder.sandbox.protocol import HOST, LONGEST_HOST

PORT = 3128
"""port inside the jail"""
_URL = f"http://127.0.0.1:{PORT}"
VARIABLES = {name: _URL for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")}
_PLAIN_PORTS = frozenset({80, 443})
_TUNNEL_PORTS = frozenset({443})
_LONGEST_HEAD = 1 << 16
_CHUNK = 1 << 16
_MOST_CONNECTIONS = 32
_MOST_CALLS = 1000
_LONGEST_REASON = 300
_PATIENCE_S = 30.0
_LINGER_S, _LINGER_CHUNKS = 1.0, 32
_OF_THE_CONNECTION = frozenset({
    b"connection", b"host", b"keep-alive", b"proxy-connection", b"proxy-authenticate",
    b"proxy-authorization", b"te", b"trailer", b"upgrade", b"expect",
})  # fmt: skip
"""hop-by-hop headers, and `host`, which is written anew"""
_LENGTHS = frozenset({b"content-length", b"transfer-encoding"})
_log = logging.getLogger(__name__)

Resolve = Callable[[str, int], list[str]]


@dataclass(frozen=True, slots=True)
class ProxyCall:
    """One attempt to reach a host."""

    host: str
    port: int
    refused: str | None
    """reason of the refusal; None if it went through"""


class _Refused(Exception):
    """A refusal, with the status line that the program inside gets."""


# ---------------------------------------------------------------------------------- addresses


def resolve(host: str, port: int) -> list[str]:
    """Public addresses of a name: no private, local or reserved range. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = list(dict.fromkeys(str(info[4][0]) for info in found))
    return [a for a in addresses if _public(ipaddress.ip_address(a.partition("%")[0]))]


_V4, _V6 = ipaddress.IPv4Network, ipaddress.IPv6Network
_LOW_32_BITS = tuple(_V6(text) for text in ("::/96", "::ffff:0:0/96", "::ffff:0:0:0/96", "64:ff9b::/96"))
"""networks whose addresses embed an IPv4 address: compatible, mapped, translated, NAT64"""
_GLOBAL = _V6("2000::/3")
_NOT_PUBLIC_4 = tuple(_V4(text) for text in ("192.0.0.0/24", "192.88.99.0/24"))
_NOT_PUBLIC_6 = tuple(_V6(text) for text in ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20"))
"""Teredo and other special assignments, documentation, 6to4: some reach any IPv4 address"""


def _public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    if isinstance(address, ipaddress.IPv4Address):
        special = any(address in network for network in _NOT_PUBLIC_4)
        return address.is_global and not special and not address.is_multicast and not address.is_reserved
    if any(address in network for network in _LOW_32_BITS):
        return _public(_low(int(address)))
    special = address not in _GLOBAL or any(address in network for network in _NOT_PUBLIC_6)
    # ISATAP, RFC 5214: embeds an IPv4 address as well
    leads_on = int(address) >> 32 & 0xFCFF_FFFF == 0x0000_5EFE
    return address.is_global and not special and (not leads_on or _public(_low(int(address))))


def _low(bits: int) -> ipaddress.IPv4Address:
    return ipaddress.IPv4Address(bits & 0xFFFF_FFFF)


# -------------------------------------------------------------------------------- connections


class Proxy:
    """Serves a jail's listening socket until it is closed; the number of connections at once is bounded."""

    def __init__(self, listener: socket.socket, allowed: frozenset[str], resolve: Resolve = resolve) -> None:
        self._listener = listener
        self._allowed = allowed
        self._resolve = resolve
        self._room = threading.Semaphore(_MOST_CONNECTIONS)
        self._lock = threading.Lock()
        self._clients: set[socket.socket] = set()
        self._calls: list[ProxyCall] = []
        self._unrecorded = 0
        self.refused = 0
        """number of refused calls so far"""
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()

    @property
    def calls(self) -> list[ProxyCall]:
        """The first attempts to reach a host; the last entry counts the further ones."""
        with self._lock:
            more = [ProxyCall("", 0, f"{self._unrecorded} more, not recorded")] if self._unrecorded else []
            return [*self._calls, *more]

    def _accept(self) -> None:
        while True:
            # before accepting the next: surplus connections wait in the kernel's queue
            self._room.acquire()
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                self._clients.add(client)
            threading.Thread(target=self._serve, args=(client,), name="proxy call", daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            with client, contextlib.suppress(OSError):
                client.settimeout(_PATIENCE_S)
                try:
                    self._pass_on(client)
                except _Refused as problem:
                    _refuse(client, str(problem))
                except h11.ProtocolError as problem:
                    _refuse(client, f"{problem.error_status_hint} {problem}")
        finally:
            with self._lock:
                self._clients.discard(client)
            self._room.release()

    def _pass_on(self, client: socket.socket) -> None:
        request = _ClientRequest(client)
        with self._connect(
            request.host, request.port, _TUNNEL_PORTS if request.tunnel else _PLAIN_PORTS
        ) as server:
            if request.tunnel:
                client.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
                server.sendall(request.rest())
                _relay({client: server, server: client})
            else:
                request.send(server)
                _relay({server: client})

    def _connect(self, host: str, port: int, ports: frozenset[int]) -> socket.socket:
        try:
            server = self._reach(host, port, ports)
        except (_Refused, OSError) as problem:
            self._note(ProxyCall(host, port, str(problem)[:_LONGEST_REASON]))
            raise problem if isinstance(problem, _Refused) else _Refused(f"502 {problem}") from problem
        self._note(ProxyCall(host, port, None))
        return server

    def _reach(self, host: str, port: int, ports: frozenset[int]) -> socket.socket:
        parents = {"*." + host.split(".", n)[-1] for n in range(1, host.count(".") + 1)}
        if host not in self._allowed and not parents & self._allowed:
            raise _Refused(f"403 {host} is not among the allowed hosts")
        if port not in ports:
            raise _Refused(f"403 port {port} is not allowed")
        addresses = self._resolve(host, port)
        if not addresses:
            raise _Refused(f"403 {host} has no public address")
        # to the address that was checked: a second lookup could answer differently
        return socket.create_connection((addresses[0], port), timeout=_PATIENCE_S)

    def _note(self, call: ProxyCall) -> None:
        with self._lock:
            self.refused += call.refused is not None
            if len(self._calls) < _MOST_CALLS:
                self._calls.append(call)
            else:
                self._unrecorded += 1
        _log.info("network call from a jail: %s:%s %s", call.host, call.port, call.refused or "allowed")

    def close(self) -> None:
        """Close the socket and every open connection."""
        with self._lock:
            sockets = [self._listener, *self._clients]
        for one in sockets:
            # wakes the thread that waits for it
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        self._listener.close()


class _ClientRequest:
    """The one request that is read from a connection. Bytes after it are not read."""

    def __init__(self, client: socket.socket) -> None:
        """Raises _Refused and h11.RemoteProtocolError for anything but a request to a proxy."""
        self._client = client
        self._parser = h11.Connection(h11.SERVER, max_incomplete_event_size=_LONGEST_HEAD)
        request = self._next()
        if not isinstance(request, h11.Request):
            raise _Refused("400 Bad request")
        self._request = request
        self.tunnel = request.method == b"CONNECT"
        target = request.target.decode("ascii")
        try:
            url = urlsplit(f"//{target}" if self.tunnel else target)
            self.host, port = (url.hostname or "").lower().removesuffix("."), url.port
        except ValueError:
            raise _Refused("400 Bad request") from None
        if not self.tunnel and url.scheme != "http":
            raise _Refused("400 This is a proxy: ask for http://HOST/... or CONNECT")
        if len(self.host) > LONGEST_HOST or self.host.startswith("*") or not HOST.fullmatch(self.host):
            raise _Refused("400 No name of a host")
        self.port = port or (443 if self.tunnel else 80)
        self._path = url._replace(scheme="", netloc="", fragment="").geturl() or "/"

    def _next(self) -> h11.Event | None:
        """The next event of the request; None after its end."""
        while (event := self._parser.next_event()) is h11.NEED_DATA:
            if self._parser.they_are_waiting_for_100_continue:
                answer = h11.InformationalResponse(status_code=100, headers=[])
                self._client.sendall(self._parser.send(answer) or b"")
            self._parser.receive_data(self._client.recv(_CHUNK))
        return event if isinstance(event, h11.Event) else None

    def rest(self) -> bytes:
        """Bytes that came after a CONNECT request."""
        return self._parser.trailing_data[0]

    def send(self, server: socket.socket) -> None:
        """Write the request anew, to the checked host, with a body of the length that was read."""
        options = [value for name, value in self._request.headers if name == b"connection"]
        named = {token.strip().lower() for value in options for token in value.split(b",")}
        dropped = _OF_THE_CONNECTION | named - _LENGTHS
        kept = [(bytes(name), bytes(value)) for name, value in self._request.headers if name not in dropped]
        if {name for name, _ in kept} >= _LENGTHS:
            raise _Refused("400 A body has one length")
        host = self.host if self.port == 80 else f"{self.host}:{self.port}"
        writer = h11.Connection(h11.CLIENT)
        headers = [(b"Host", host.encode()), *kept, (b"Connection", b"close")]
        event: h11.Event | None
        event = h11.Request(method=self._request.method, target=self._path, headers=headers)
        while event is not None:
            server.sendall(writer.send(event) or b"")
            if isinstance(event, h11.EndOfMessage):
                return
            event = self._next()
        raise _Refused("400 Bad request")


def _refuse(client: socket.socket, status: str) -> None:
    client.sendall(f"HTTP/1.1 {status}\r\nConnection: close\r\n\r\n{status}\n".encode())
    # unread bytes would make the kernel reset the connection and lose the answer
    client.shutdown(socket.SHUT_WR)
    client.settimeout(_LINGER_S)
    for _ in range(_LINGER_CHUNKS):
        if not client.recv(_CHUNK):
            return


def _relay(ways: dict[socket.socket, socket.socket]) -> None:
    """Copy each socket's bytes to the other until both have ended or neither sends."""
    while ways:
        with selectors.DefaultSelector() as selector:
            for way in ways:
                selector.register(way, selectors.EVENT_READ)
            ready = [key.fileobj for key, _ in selector.select(_PATIENCE_S)]
        if not ready:
            return
        for source in (way for way in list(ways) if way in ready):
            data = source.recv(_CHUNK)
            if data:
                ways[source].sendall(data)
            else:
                with contextlib.suppress(OSError):
                    ways[source].shutdown(socket.SHUT_WR)
                del ways[source]
