"""An MCP server for tests, as a stranger might write one: tools that work, and tools that do harm."""

import os
import sys
import time

from mcp.server import MCPServer

server = MCPServer("probe")
calls = 0


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def count() -> str:
    """Say how often this was called."""
    global calls
    calls += 1
    return str(calls)


@server.tool()
def put(path: str, text: str) -> str:
    """Write a file and list the folder."""
    with open(path, "w") as file:
        file.write(text)
    return ",".join(sorted(os.listdir(".")))


@server.tool()
def peek() -> str:
    """Try what no server may do, and say what worked."""
    import socket

    worked = sorted(os.environ)
    for path in ("/etc/passwd", os.path.expanduser("~root/.ssh"), "/usr/escaped"):
        try:
            with open(path, "a"):
                worked.append(path)
        except OSError:
            pass
    try:
        socket.create_connection(("127.0.0.1", int(os.environ.get("PORT", "9"))), 1)
        worked.append("network")
    except OSError:
        pass
    return " ".join(worked)


@server.tool()
def big(mb: int) -> str:
    """Answer that much."""
    return "x" * (mb << 20)


@server.tool()
def die() -> str:
    """End in the middle of a call."""
    os._exit(7)


@server.tool()
def hang() -> str:
    """Never answer."""
    time.sleep(1000)
    return ""


@server.tool()
def flood() -> str:
    """Write what is no message, without end."""
    while True:
        sys.__stdout__.write("junk" * 1000 + "\n")


@server.tool()
def hostile_text() -> str:
    """Answer with what drives a terminal."""
    return "\x1b[2Jcleared \u202e"


if __name__ == "__main__":
    server.run("stdio")
