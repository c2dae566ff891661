"""The way out of a jail: named hosts only, public addresses only, every call kept, and nothing beside it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from nano_coder.sandbox import open_sandbox
from nano_coder.sandbox.ns import NsJail, NsSandbox
from nano_coder.sandbox.proxy import Proxy, parse_allowed, resolve
from nano_shared.errors import UsageError
from nano_shared.types import Limits

ASK = "import urllib.request as u; print(u.urlopen({url!r}, timeout=100).read().decode())"
STATUS = """
import urllib.error, urllib.request
try:
    print(urllib.request.urlopen({url!r}, timeout=100).status)
except urllib.error.HTTPError as error:
    print(error.code, error.reason)
except OSError as error:
    print(error)
"""


class _Api(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = f"{self.headers['Host']} {self.path} {self.headers.get('Proxy-Connection')}".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A real server outside, whose port the proxy lets through for the test."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Api)
    monkeypatch.setattr("nano_coder.sandbox.proxy._PORTS", frozenset({server.server_port}))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def jail() -> Iterator[NsJail]:
    sandbox = open_sandbox("ns")
    assert isinstance(sandbox, NsSandbox)
    hosts = frozenset({"api.test", "*.wide.test", "private.test"})

    def local(host: str, port: int) -> list[str]:
        return [] if host == "private.test" else ["127.0.0.1"]

    with closing(sandbox.open_connected(None, Limits(), hosts, local)) as opened:
        yield opened


def told(jail: NsJail, program: str, url: str) -> str:
    result = jail.run_python(program.format(url=url))
    return (result.stdout or result.stderr).decode().strip()


def test_an_allowed_host_is_reached_by_name(jail: NsJail, api: int) -> None:
    assert told(jail, ASK, f"http://api.test:{api}/v1?x=1") == f"api.test:{api} /v1?x=1 None"
    assert [(c.host, c.port, c.refused) for c in jail.calls] == [("api.test", api, None)]


def test_a_tunnel_carries_bytes_both_ways(jail: NsJail, api: int) -> None:
    program = f"""
import os, socket
proxy = os.environ["https_proxy"].removeprefix("http://").split(":")
s = socket.create_connection((proxy[0], int(proxy[1])))
s.sendall(b"CONNECT api.test:{api} HTTP/1.1\\r\\nHost: api.test\\r\\n\\r\\n")
print(s.recv(100).split()[1])
s.sendall(b"GET /in HTTP/1.0\\r\\nHost: inner\\r\\n\\r\\n")
data = b""
while chunk := s.recv(1000):
    data += chunk
print(data.split()[-3:])
"""
    assert jail.run_python(program).stdout == b"b'200'\n[b'inner', b'/in', b'None']\n"


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        ("other.test", "not among the allowed"),
        ("test", "not among the allowed"),
        ("evil-api.test", "not among the allowed"),
        ("wide.test", "not among the allowed"),
        ("127.0.0.1", "not among the allowed"),
        ("private.test", "no public address"),
    ],
)
def test_any_other_host_is_refused_and_counted(jail: NsJail, api: int, host: str, reason: str) -> None:
    result = jail.run_python(STATUS.format(url=f"http://{host}:{api}/"))
    assert result.stdout.startswith(b"403")
    assert reason in result.stdout.decode()
    assert result.denials.network == 1
    assert jail.calls[-1].host == host


def test_hosts_below_a_star_are_allowed(jail: NsJail, api: int) -> None:
    assert told(jail, STATUS, f"http://a.b.wide.test:{api}/") == "200"


def test_other_ports_are_refused(jail: NsJail, api: int) -> None:
    assert "port 22 is not allowed" in told(jail, STATUS, "http://api.test:22/")


def test_nothing_is_reached_beside_the_proxy(jail: NsJail, api: int) -> None:
    program = f"import socket; socket.create_connection(('127.0.0.1', {api}), 2)"
    assert b"refused" in jail.run_python(program).stderr
    assert jail.calls == []


def test_nonsense_is_answered_and_ends(jail: NsJail) -> None:
    program = """
import socket
s = socket.create_connection(('127.0.0.1', 3128))
s.sendall({0!r})
print(s.recv(99).split()[1])
"""
    broken = (b"hello\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"CONNECT [:: HTTP/1.1\r\n\r\n", b"x" * 200_000)
    for nonsense in broken:
        assert jail.run_python(program.format(nonsense)).stdout in (b"b'400'\n", b"b'431'\n")


def test_a_jail_without_a_way_out_has_no_proxy() -> None:
    with closing(open_sandbox("ns").open(None, Limits())) as jail:
        look = "import os, socket; print('http_proxy' in os.environ)"
        result = jail.run_python(f"{look}; socket.create_connection(('127.0.0.1', 3128))")
        assert (result.stdout, result.exit_code) == (b"False\n", 1)


PRIVATE = """
127.0.0.1 10.1.2.3 192.168.0.1 172.16.0.1 169.254.169.254 100.64.0.1 0.0.0.0 224.0.0.1
::1 fe80::1 fd00::1 ::ffff:127.0.0.1
"""


@pytest.mark.parametrize("address", PRIVATE.split())
def test_private_addresses_are_never_public(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    found = [(family, socket.SOCK_STREAM, 6, "", (address, 80))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: found)
    assert resolve("host.example", 80) == []


def test_public_addresses_are(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("93.184.216.34", 80))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: found)
    assert resolve("host.example", 80) == ["93.184.216.34"]


@pytest.mark.parametrize(
    "text", ["allow=", "allow=a b", "host", "allow=-x.org", "allow=http://x.org", "allow=a,,b"]
)
def test_hosts_that_are_none_are_named(text: str) -> None:
    with pytest.raises(UsageError, match="allow=HOST"):
        parse_allowed(text)


def test_hosts_are_names_in_lower_case() -> None:
    assert parse_allowed("allow=API.example.org, *.b.c") == {"api.example.org", "*.b.c"}


def test_a_closed_proxy_accepts_no_more() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        Proxy(listener, frozenset()).close()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port), 2)
