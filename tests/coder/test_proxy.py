"""The way out of a jail: named hosts only, public addresses only, every call kept, and nothing beside it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from nano_coder.sandbox.namespaces import NsJail, NsSandbox
from nano_coder.sandbox.protocol import allowed_hosts, open_sandbox
from nano_coder.sandbox.proxy import Proxy, resolve
from nano_shared.errors import UsageError
from nano_shared.types import Limits

ASK = "import urllib.request as u; print(u.urlopen({url!r}, timeout=100).read().decode())"
SEEN: list[str] = []
"""what servers outside were asked, last"""
SAY = """
import socket, sys
s = socket.create_connection(("127.0.0.1", 3128))
s.settimeout(20)
s.sendall({0!r})
data = b""
while chunk := s.recv(65536):
    data += chunk
print(data.decode())
"""
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

    def do_POST(self) -> None:
        if self.headers["Transfer-Encoding"] == "chunked":
            data = b""
            while size := int(self.rfile.readline(), 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            data = self.rfile.read(int(self.headers["Content-Length"]))
        SEEN.append(f"{self.headers['Host']} {self.path} {data.decode()} {sorted(self.headers.keys())}")
        self.send_response(200)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A real server outside, whose port the proxy lets through for the test."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Api)
    for ports in ("_PLAIN_PORTS", "_TUNNEL_PORTS"):
        monkeypatch.setattr(f"nano_coder.sandbox.proxy.{ports}", frozenset({server.server_port}))
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


def said(jail: NsJail, raw: bytes) -> str:
    result = jail.run_python(SAY.format(raw))
    return (result.stdout or result.stderr).decode()


def test_the_host_header_is_that_of_the_host_that_was_checked(jail: NsJail, api: int) -> None:
    """A server of many names, as those of content networks, must not answer for another."""
    target = f"GET http://api.test:{api}/x HTTP/1.1\r\n".encode()
    answer = said(jail, target + b"Host: private.test\r\nConnection: close\r\n\r\n")
    assert f"api.test:{api} /x" in answer
    assert "private.test" not in answer


@pytest.mark.parametrize("gap", [b"", b"\r\n"])
def test_a_second_request_does_not_ride_along(jail: NsJail, api: int, gap: bytes) -> None:
    SEEN.clear()
    first = f"POST http://api.test:{api}/1 HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc".encode()
    second = f"POST http://api.test:{api}/2 HTTP/1.1\r\nHost: b\r\nContent-Length: 3\r\n\r\ndef".encode()
    assert said(jail, first + gap + second).endswith("abc\n")
    assert [line.split()[1:3] for line in SEEN] == [["/1", "abc"]]
    assert len(jail.calls) == 1


def test_a_body_in_chunks_is_read_and_written_anew(jail: NsJail, api: int) -> None:
    SEEN.clear()
    head = f"POST http://api.test:{api}/c HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n".encode()
    hidden = b"GET http://private.test/ HTTP/1.1\r\nHost: private.test\r\n\r\n"
    said(jail, head + b"\r\n3;x=y\r\nabc\r\n2\r\nde\r\n0\r\n\r\n" + hidden)
    assert [line.split()[1:3] for line in SEEN] == [["/c", "abcde"]]


def test_what_is_said_of_the_connection_ends_here(jail: NsJail, api: int) -> None:
    SEEN.clear()
    head = (
        f"POST http://u:p@api.test:{api}/h HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nX-Kept: 1\r\n".encode()
    )
    head += b"Proxy-Authorization: x\r\n"
    said(jail, head + b"Connection: upgrade, x-named, Content-Length\r\nX-Named: 1\r\n"
         b"Upgrade: websocket\r\nExpect: 100-continue\r\n\r\n1")  # fmt: skip
    assert SEEN[0].endswith("['Connection', 'Host', 'content-length', 'x-kept']")


SMUGGLED = {
    "two lengths": b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "lengths that differ": b"Content-Length: 3\r\nContent-Length: 5\r\n\r\nabc",
    "a length that is none": b"Content-Length: +3\r\n\r\nabc",
    "an unknown coding": b"Transfer-Encoding: xchunked\r\n\r\n",
    "two hosts": b"Host: b\r\n\r\n",
    "a space before the colon": b"Content-Length : 3\r\n\r\nabc",
    "a header without end": b"X: " + b"y" * 100_000,
    "thousands of headers": b"X: y\r\n" * 20_000,
    "a NUL": b"X: \0\r\n\r\n",
}


@pytest.mark.parametrize("rest", SMUGGLED.values(), ids=SMUGGLED)
def test_a_request_that_can_be_read_in_two_ways_is_refused(jail: NsJail, api: int, rest: bytes) -> None:
    SEEN.clear()
    answer = said(jail, f"POST http://api.test:{api}/ HTTP/1.1\r\nHost: a\r\n".encode() + rest)
    assert answer.split()[1] in ("400", "431", "501")
    assert SEEN == []


@pytest.mark.parametrize(
    "target",
    ["http://api.test@private.test/", "http://private.test/?http://api.test/", "http://*.wide.test/",
     "http://" + "a." * 200 + "wide.test/", "http://" + "a" * 64 + ".wide.test/", "http:///x", "ftp://api.test/"],
)  # fmt: skip
def test_a_name_is_read_in_one_way(jail: NsJail, api: int, target: str) -> None:
    answer = said(jail, f"GET {target} HTTP/1.1\r\nHost: api.test\r\n\r\n".encode())
    assert answer.split()[1] in ("400", "403")
    assert all(call.refused and len(call.host) <= 253 for call in jail.calls)


def test_a_tunnel_carries_no_plain_requests(jail: NsJail) -> None:
    assert "port 80 is not allowed" in said(jail, b"CONNECT api.test:80 HTTP/1.1\r\nHost: a\r\n\r\n")


@pytest.mark.slow
def test_idle_connections_take_no_more_than_some_threads(jail: NsJail, api: int) -> None:
    program = """
import socket
held = []
for _ in range(200):
    s = socket.socket()
    s.setblocking(False)
    try:
        s.connect(("127.0.0.1", 3128))
    except BlockingIOError:
        pass
    held.append(s)
import time
time.sleep(1)
print(len(held))
"""
    before = threading.active_count()
    most = [0]
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.02):
            most[0] = max(most[0], sum(t.name == "proxy call" for t in threading.enumerate()))

    watcher = threading.Thread(target=watch)
    watcher.start()
    assert jail.run_python(program).stdout == b"200\n"
    over.set()
    watcher.join()
    assert 1 <= most[0] <= 32
    # whose program has ended gives them back
    assert told(jail, STATUS, f"http://api.test:{api}/") == "200"
    assert threading.active_count() <= before + 33


def test_only_the_first_calls_are_recorded_and_all_refusals_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("nano_coder.sandbox.proxy._MOST_CALLS", 3)
    sandbox = open_sandbox("ns")
    assert isinstance(sandbox, NsSandbox)
    with closing(sandbox.open_connected(None, Limits(), frozenset({"a.test"}))) as jail:
        ask = STATUS.format(url="http://b.test/")
        result = jail.run_python("for _ in range(9):\n" + "".join(f"    {x}\n" for x in ask.splitlines()))
        assert result.denials.network == 9
        assert [call.host for call in jail.calls] == ["b.test"] * 3 + [""]
        assert jail.calls[-1].refused == "6 more, not recorded"


def test_closing_a_jail_ends_its_connections() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        proxy = Proxy(listener, frozenset())
        with socket.create_connection(listener.getsockname()) as idle:
            idle.settimeout(20)
            while not proxy._clients:
                threading.Event().wait(0.01)
            proxy.close()
            assert idle.recv(1) in (b"", b"H")


def test_a_jail_without_a_way_out_has_no_proxy() -> None:
    with closing(open_sandbox("ns").open(None, Limits())) as jail:
        look = "import os, socket; print('http_proxy' in os.environ)"
        result = jail.run_python(f"{look}; socket.create_connection(('127.0.0.1', 3128))")
        assert (result.stdout, result.exit_code) == (b"False\n", 1)


PRIVATE = """
127.0.0.1 10.1.2.3 192.168.0.1 172.16.0.1 169.254.169.254 100.64.0.1 0.0.0.0 224.0.0.1
::1 fe80::1 fd00::1 ::ffff:127.0.0.1 :: ff02::1 fec0::1 fe80::1%eth0
192.0.0.1 192.0.0.8 192.0.0.170 192.88.99.1 198.18.0.1 203.0.113.1 240.0.0.1 255.255.255.255
64:ff9b::10.0.0.1 64:ff9b::127.0.0.1 64:ff9b::169.254.169.254 64:ff9b:1::10.0.0.1 64:ff9b:1::8.8.8.8
2002:7f00:1:: 2002:808:808::1 2002:a00:1::1 2002:c0a8:101::
::127.0.0.1 ::10.0.0.1 ::ffff:10.1.1.1 ::ffff:0:127.0.0.1
2001:0:5ef5:79fb:0:0:80ff:fffe 2001:0:7f00:1:: 2001:db8::1 2001:20::1 3fff::1 100::1 5f00::1
2606:4700::5efe:10.0.0.1 2606:4700:0:0:200:5efe:127.0.0.1 1234::1 fc00::1
"""


@pytest.mark.parametrize("address", PRIVATE.split())
def test_private_addresses_are_never_public(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    found = [(family, socket.SOCK_STREAM, 6, "", (address, 80))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: found)
    assert resolve("host.example", 80) == []


@pytest.mark.parametrize(
    "address",
    ["93.184.216.34", "8.8.8.8", "2606:4700::1111", "2a00:1450:4001::1", "64:ff9b::8.8.8.8",
     "::ffff:8.8.8.8"],
)  # fmt: skip
def test_public_addresses_are(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 80))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: found)
    assert resolve("host.example", 80) == [address]


@pytest.mark.parametrize(
    "text",
    [
        "allow=",
        "allow=a b",
        "host",
        "allow=-x.org",
        "allow=http://x.org",
        "allow=a,,b",
        "allow=" + "a." * 200 + "org",
        "allow=" + "a" * 64 + ".org",
    ],
)
def test_hosts_that_are_none_are_named(text: str) -> None:
    with pytest.raises(UsageError, match="allow=HOST"):
        allowed_hosts(text)


def test_hosts_are_names_in_lower_case() -> None:
    assert allowed_hosts("allow=API.example.org, *.b.c") == {"api.example.org", "*.b.c"}


def test_a_closed_proxy_accepts_no_more() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        Proxy(listener, frozenset()).close()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port), 2)
