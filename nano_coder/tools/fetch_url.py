"""The tool `fetch_url`: reads a page of a host that the user allowed, from inside the jail."""

from __future__ import annotations

from nano_coder.tools.tool import ToolContext, ToolFailure, ToolResult, tool
from nano_shared.printable import one_line, printable

# the jail's only way out is the proxy, which checks the host of every request and redirection
_PROGRAM = r"""
import html.parser, sys, urllib.error, urllib.request

MOST_BYTES = 5_000_000
SKIPPED = {"script", "style", "noscript", "template", "svg", "head"}
BREAKS = set("p div br li tr h1 h2 h3 h4 h5 h6 pre section article table".split())


class Text(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.parts, self.skipped, self.title = [], 0, None

    def handle_starttag(self, tag, attributes):
        self.skipped += tag in SKIPPED
        if tag in BREAKS:
            self.parts.append("\n")
        href = dict(attributes).get("href")
        if tag == "a" and href and href.startswith("http"):
            self.parts.append(f"[{href}] ")

    def handle_endtag(self, tag):
        if tag in SKIPPED and self.skipped:
            self.skipped -= 1
        if tag in BREAKS:
            self.parts.append("\n")

    def handle_data(self, data):
        if not self.skipped:
            self.parts.append(" ".join(data.split()) + (" " if data[-1:].isspace() else ""))


def shown(data, kind, charset):
    text = data.decode(charset, "replace")
    if "html" not in kind:
        return text
    parser = Text()
    parser.feed(text)
    lines = (line.strip() for line in "".join(parser.parts).split("\n"))
    return "\n".join(line for line in lines if line)


url = sys.argv[1]
headers = {"User-Agent": "nano-coder", "Accept": "text/*, application/json"}
request = urllib.request.Request(url, headers=headers)
try:
    with urllib.request.urlopen(request, timeout=30) as answer:
        kind, charset = answer.headers.get_content_type(), answer.headers.get_content_charset() or "utf-8"
        data = answer.read(MOST_BYTES + 1)
        place = answer.geturl()
except urllib.error.HTTPError as problem:
    sys.exit(f"{url} answered {problem.code} {problem.reason}")
except (OSError, ValueError) as problem:
    sys.exit(f"{url} cannot be read: {getattr(problem, 'reason', problem)}")
if not (kind.startswith("text/") or kind.endswith(("json", "xml", "javascript", "yaml"))):
    sys.exit(f"{url} is {kind}, {len(data)} bytes, and no text")
try:
    text = shown(data[:MOST_BYTES], kind, charset)
except LookupError:
    text = shown(data[:MOST_BYTES], kind, "utf-8")
if place != url:
    print(f"[redirected to {place}]")
sys.stdout.buffer.write(text.encode("utf-8", "replace"))
if len(data) > MOST_BYTES:
    print(f"\n[only the first {MOST_BYTES} bytes]")
"""


@tool(recorded="forks")
def fetch_url(context: ToolContext, url: str) -> ToolResult:
    """Read a web page or file as text. Only hosts that the user allowed can be reached."""
    if not url.startswith(("http://", "https://")):
        raise ToolFailure(f"{one_line(url, 100)!r} is no address; it begins with http:// or https://")
    if context.network == "none":
        raise ToolFailure("no host can be reached: the user has not allowed any (--net allow=HOST)")
    done = context.run_python(_PROGRAM, [url], isolated=True)
    text = printable(done.stdout.decode("utf-8", "replace"), None)
    if not done.ok:
        said = "it took too long" if done.timed_out else one_line(done.stderr.decode("utf-8", "replace"), 300)
        hosts = context.network.removeprefix("allow=")
        return ToolResult(text=f"error: {said} (allowed: {hosts})", ok=False, execution=done)
    return ToolResult(text=text or "[no text]", execution=done)
