"""Line charts as SVG text, for docs: panels side by side, lines named at the last one's right end; and tables written into a page."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

COLOURS = ["000000", "1f77b4", "ff7f0e", "2ca02c", "d62728", "9467bd", "8c564b", "17becf"]
WIDTH, HEIGHT, LEFT, TOP, BOTTOM, NAMES = 400, 330, 56, 34, 44, 190
LINE, APART = 17, 2.5  # pixels between names, and between lines at points that would coincide
Points = Sequence[tuple[float, float]]


class Panel(NamedTuple):
    """series: name -> (x, y) points; xs, ys: ticks as value -> label, the first and the last bound the panel; place, rise: what is
    linear in x and y (math.log: a logarithmic axis)."""

    title: str
    under: str
    series: Mapping[str, Points]
    xs: Mapping[float, str]
    ys: Mapping[float, str]
    place: Callable[[float], float] = lambda value: value
    rise: Callable[[float], float] = lambda value: value


def chart(panels: Sequence[Panel]) -> str:
    """The SVG of all panels; a series looks the same in each."""
    names = list(dict.fromkeys(name for panel in panels for name in panel.series))
    look = {name: (f"#{COLOURS[i % len(COLOURS)]}", i >= len(COLOURS)) for i, name in enumerate(names)}
    parts, ends = [], {}
    for i, panel in enumerate(panels):
        left = i * (WIDTH + LEFT)
        lines = placed(panel, left)
        parts += [_frame(panel, left), *(_line(points, *look[name]) for name, points in lines.items())]
        ends = {name: points[-1] for name, points in lines.items()}
    heights = spread({name: y for name, (_, y) in ends.items()})
    for name, (x, y) in ends.items():
        (colour, _), at = look[name], heights[name]
        parts.append(f'<path d="M{x + 6:.1f} {y:.1f}L{x + 30:.1f} {at:.1f}" stroke="{colour}" stroke-width=".8"/>')
        parts.append(_mark(x + 34, at, *look[name]))
        parts.append(f'<text x="{x + 42:.1f}" y="{at + 4:.1f}" style="fill:{colour}">{escape(name)}</text>')
    width, height = len(panels) * (WIDTH + LEFT) + NAMES, max([HEIGHT, *heights.values()]) + BOTTOM
    style = 'font-family="sans-serif" font-size="12" fill="none"'
    size = f'width="{width}" height="{height:.0f}" viewBox="0 0 {width} {height:.0f}"'
    body = "\n".join(parts).replace("<text ", '<text fill="#222" ')
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n<rect width="100%" height="100%" fill="#fff"/>\n{body}\n</svg>\n'


def spread(wanted: Mapping[str, float]) -> dict[str, float]:
    """Heights near the wanted ones, in their order, LINE or more apart; pixels from the panels' top downwards."""
    order = sorted(wanted, key=lambda name: wanted[name])
    found: dict[str, float] = {}
    for i, name in enumerate(order):  # as low as wanted, but high enough for those below
        lowest = max(HEIGHT, TOP + LINE * (len(order) - 1)) - LINE * (len(order) - 1 - i)
        found[name] = max(min(wanted[name], lowest), found[order[i - 1]] + LINE if i else TOP)
    return found


def placed(panel: Panel, left: float) -> dict[str, list[tuple[float, float]]]:
    """Each line's points in pixels; points that coincide are put APART, towards the panel's middle."""
    x, y = _scales(panel, left)
    found: dict[str, list[tuple[float, float]]] = {}
    taken: Counter[tuple[float, float]] = Counter()
    for name, points in panel.series.items():
        found[name] = []
        for point in ((round(x(a), 1), round(y(b), 1)) for a, b in points):
            inwards = 1 if point[1] < (TOP + HEIGHT) / 2 else -1
            found[name].append((point[0], point[1] + inwards * APART * taken[point]))
            taken[point] += 1
    return found


def insert(page: Path, name: str, text: str) -> None:
    """Put text between the page's marks <!-- name --> and <!-- /name -->."""
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    whole, found = re.subn(f"(?s){begin}.*{end}", lambda _: f"{begin}\n{text}\n{end}", page.read_text())
    assert found == 1, f"{page} has no marks {begin} and {end}"
    page.write_text(whole)


def _scales(panel: Panel, left: float) -> tuple[Callable[[float], float], Callable[[float], float]]:
    def scale(ticks: Mapping[float, str], through: Callable[[float], float], start: float, size: float) -> Callable[[float], float]:
        low, high = through(next(iter(ticks))), through(list(ticks)[-1])
        return lambda value: start + (through(value) - low) / (high - low) * size

    return scale(panel.xs, panel.place, left + LEFT, WIDTH - 24), scale(panel.ys, panel.rise, HEIGHT, TOP - HEIGHT)


def _mark(x: float, y: float, colour: str, second: bool) -> str:
    if second:
        return f'<path d="M{x:.1f} {y:.1f}m-3.5 -3.5h7v7h-7z" fill="#fff" stroke="{colour}"/>'
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>'


def _line(points: Points, colour: str, second: bool) -> str:
    """A line with its marks: full discs, or dashes and squares."""
    shown, dash = " ".join(f"{x:.1f},{y:.1f}" for x, y in points), ' stroke-dasharray="6 3"' if second else ""
    marks = [_mark(x, y, colour, second) for x, y in points]
    return "\n".join([f'<polyline points="{shown}" stroke="{colour}" stroke-width="1.5"{dash}/>', *marks])


def _frame(panel: Panel, left: float) -> str:
    x, y = _scales(panel, left)
    parts = [f'<text x="{left + LEFT}" y="{TOP - 14}" font-weight="bold">{escape(panel.title)}</text>']
    parts += [f'<path d="M{left + LEFT} {y(v):.1f}h{WIDTH - 24}" stroke="#ddd"/>' for v in panel.ys]
    parts += [f'<text x="{left + LEFT - 10}" y="{y(v) + 4:.1f}" text-anchor="end">{label}</text>' for v, label in panel.ys.items()]
    parts += [f'<text x="{x(v):.1f}" y="{HEIGHT + 18}" text-anchor="middle">{label}</text>' for v, label in panel.xs.items()]
    middle = left + LEFT + (WIDTH - 24) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT + 36}" text-anchor="middle">{escape(panel.under)}</text>')
    return "\n".join(parts)
