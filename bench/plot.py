"""Line charts as SVG text, for docs: panels side by side, one legend; and tables that a run writes into a page."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

COLOURS = "000000 1f77b4 ff7f0e 2ca02c d62728 9467bd 8c564b e377c2 17becf bcbd22 7f7f7f 0b6e4f b8860b 5b2a86"
WIDTH, HEIGHT, LEFT, TOP, BOTTOM, LEGEND = 400, 260, 56, 34, 44, 150
Points = Sequence[tuple[float, float]]


class Panel(NamedTuple):
    """series: name -> (x, y) points; xs, ys: ticks as value -> label, the first and the last bound the panel; log: y is logarithmic."""

    title: str
    under: str
    series: Mapping[str, Points]
    xs: Mapping[float, str]
    ys: Mapping[float, str]
    place: Callable[[float], float] = lambda value: value
    rise: Callable[[float], float] = lambda value: value


def chart(panels: Sequence[Panel]) -> str:
    """The SVG of all panels; a series has the same colour in each."""
    names = list(dict.fromkeys(name for panel in panels for name in panel.series))
    shades = COLOURS.split()
    colour = {name: f"#{shades[i % len(shades)]}" for i, name in enumerate(names)}
    height = max(HEIGHT, TOP + 16 * len(names)) + BOTTOM
    parts = [_panel(panel, i * (WIDTH + LEFT), colour) for i, panel in enumerate(panels)]
    at = len(panels) * (WIDTH + LEFT) + 12
    for i, name in enumerate(names):
        y = TOP + 8 + 16 * i
        parts.append(f'<path d="M{at} {y}h18" stroke="{colour[name]}" stroke-width="2.5"{_dash(i)}/>')
        parts.append(f'<text x="{at + 24}" y="{y + 4}">{escape(name)}</text>')
    size = f'width="{at + LEGEND}" height="{height}" viewBox="0 0 {at + LEGEND} {height}"'
    style = 'font-family="sans-serif" font-size="12" fill="none"'
    body = "\n".join(parts).replace("<text ", '<text fill="#222" ')
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n<rect width="100%" height="100%" fill="#fff"/>\n{body}\n</svg>\n'


def insert(page: Path, name: str, text: str) -> None:
    """Put text between the page's marks <!-- name --> and <!-- /name -->."""
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    whole, found = re.subn(f"(?s){begin}.*{end}", lambda _: f"{begin}\n{text}\n{end}", page.read_text())
    assert found == 1, f"{page} has no marks {begin} and {end}"
    page.write_text(whole)


def _dash(index: int) -> str:
    return "" if index < 7 else ' stroke-dasharray="6 3"'


def _panel(panel: Panel, left: int, colour: Mapping[str, str]) -> str:
    def scale(ticks: Mapping[float, str], through: Callable[[float], float], start: float, size: float) -> Callable[[float], float]:
        low, high = through(next(iter(ticks))), through(list(ticks)[-1])
        return lambda value: start + (through(value) - low) / (high - low) * size

    x = scale(panel.xs, panel.place, left + LEFT, WIDTH - 24)
    y = scale(panel.ys, panel.rise, HEIGHT, TOP - HEIGHT)
    parts = [f'<text x="{left + LEFT}" y="{TOP - 14}" font-weight="bold">{escape(panel.title)}</text>']
    parts += [f'<path d="M{left + LEFT} {y(v):.1f}h{WIDTH - 24}" stroke="#ddd"/>' for v in panel.ys]
    parts += [f'<text x="{left + LEFT - 6}" y="{y(v) + 4:.1f}" text-anchor="end">{label}</text>' for v, label in panel.ys.items()]
    parts += [f'<text x="{x(v):.1f}" y="{HEIGHT + 16}" text-anchor="middle">{label}</text>' for v, label in panel.xs.items()]
    middle = left + LEFT + (WIDTH - 24) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT + 34}" text-anchor="middle">{escape(panel.under)}</text>')
    order = list(colour)
    for name, points in panel.series.items():
        shown = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in points)
        parts.append(f'<polyline points="{shown}" stroke="{colour[name]}" stroke-width="2"{_dash(order.index(name))}/>')
    return "\n".join(parts)
