"""SVG without a library: the same bytes everywhere, and colours for a light and a dark page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

STYLE = """
  text { font: 14px system-ui, sans-serif; fill: #1f2328; }
  .small { font-size: 12px; fill: #59636e; }
  .bold { font-weight: 600; }
  .box { fill: #ddf4ff; stroke: #0969da; stroke-width: 1.5; }
  .line { fill: none; stroke: #59636e; stroke-width: 1.5; }
  .grid { stroke: #d1d9e0; stroke-width: 1; }
  .a { stroke: #0969da; fill: #0969da; } .b { stroke: #bc4c00; fill: #bc4c00; }
  .head { fill: #59636e; }
  .curve { fill: none; stroke-width: 2.5; } .constant { fill: none; stroke-dasharray: 5 4; }
  text.a, text.b { stroke: none; }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f6fc; }
    .small { fill: #9198a1; }
    .box { fill: #121d2f; stroke: #4493f8; }
    .line { stroke: #9198a1; } .head { fill: #9198a1; }
    .grid { stroke: #3d444d; }
    .a { stroke: #4493f8; fill: #4493f8; } .b { stroke: #db6d28; fill: #db6d28; }
    .curve, .constant { fill: none; }
    text.a, text.b { stroke: none; }
  }
"""


class Svg:
    """A picture that is written from front to back."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>{STYLE}</style>",
            '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
            'orient="auto-start-reverse"><path class="head" d="M 0 0 L 10 5 L 0 10 z"/></marker></defs>',
        ]

    def text(
        self,
        x: float,
        y: float,
        lines: Iterable[str],
        *,
        kind: str = "",
        bold: bool = False,
        small: bool = False,
        anchor: str = "middle",
    ) -> None:
        names = " ".join(filter(None, [kind, "bold" if bold else "", "small" if small else ""]))
        for index, line in enumerate(lines):
            place = f'x="{x:g}" y="{y + index * 18:g}" text-anchor="{anchor}"'
            self.parts.append(f'<text class="{names}" {place}>{escape(line)}</text>')

    def box(self, x: float, y: float, width: float, height: float, name: str, lines: Sequence[str]) -> None:
        self.parts.append(f'<rect class="box" x="{x}" y="{y}" width="{width}" height="{height}" rx="8"/>')
        self.text(x + width / 2, y + 28, [name], bold=True)
        self.text(x + width / 2, y + 50, lines, small=True)

    def arrow(self, path: str) -> None:
        self.parts.append(f'<path class="line" d="{path}" marker-end="url(#head)"/>')

    def line(self, points: Sequence[tuple[float, float]], kind: str) -> None:
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.parts.append(f'<polyline class="{kind}" points="{path}"/>')

    def dot(self, x: float, y: float, radius: float, kind: str) -> None:
        self.parts.append(f'<circle class="{kind}" cx="{x:g}" cy="{y:g}" r="{radius:g}"/>')

    def end(self) -> str:
        return "\n".join([*self.parts, "</svg>"]) + "\n"
