"""Charts as SVG text: lines or stacked areas, with axes, units and a legend. Pure; every text is escaped."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape as _escape
from itertools import groupby

Point = tuple[float, float]
_CONTROL = re.compile("[^\\t\\n\\x20-\\x7e\\xa0-\\ud7ff\\ue000-\\ufffd\\U00010000-\\U0010ffff]")

WIDTH, HEIGHT = 920, 300
LEFT, RIGHT, TOP, BOTTOM = 76, 16, 34, 46
POINTS_MAX = 600
"""Most points of a line: the least and the greatest of each bucket are kept, so that no peak is lost."""


@dataclass(frozen=True, slots=True)
class Series:
    """One line, or one layer of a stack: points in the order of x. One without a name is not in the legend.

    A line is broken where y is not finite.
    """

    name: str
    colour: str
    points: tuple[Point, ...]
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Marker:
    """A point of its own; `note` appears when the pointer rests on it. Markers of one `name` share a line of the legend."""

    name: str
    colour: str
    x: float
    y: float
    note: str
    filled: bool = True


@dataclass(frozen=True, slots=True)
class Chart:
    """What is drawn. `rules` are vertical lines, with a text each; `stacked` adds the series up (they have the same x)."""

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    markers: tuple[Marker, ...] = ()
    rules: tuple[tuple[float, str], ...] = ()
    stacked: bool = False
    y_names: tuple[str, ...] = ()
    """Names of the levels 0, 1, … of y, instead of numbers."""


@dataclass(frozen=True, slots=True)
class Axis:
    """Maps values to pixels."""

    low: float
    high: float
    start: float
    stop: float

    def at(self, value: float) -> float:
        """Where a value is."""
        return self.start + (value - self.low) / (self.high - self.low) * (self.stop - self.start)


def escape(text: str) -> str:
    """Text for HTML and SVG; what no document may hold is replaced."""
    return _escape(_CONTROL.sub("\ufffd", text))


def thinned(points: Sequence[Point], most: int = POINTS_MAX) -> tuple[Point, ...]:
    """At most so many points (and two more): of each bucket the one with the least y and the one with the greatest, first and last."""
    if len(points) <= most:
        return tuple(points)
    size = -(-2 * len(points) // max(most, 2))
    kept = {0, len(points) - 1}
    for start in range(0, len(points), size):
        bucket = range(start, min(start + size, len(points)))
        kept.update((min(bucket, key=lambda at: points[at][1]), max(bucket, key=lambda at: points[at][1])))
    return tuple(points[at] for at in sorted(kept))


def ticks(low: float, high: float, most: int = 7) -> list[float]:
    """Round numbers from `low` to `high`: multiples of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(at * step, 10) for at in range(first, math.floor(high / step + 1e-9) + 1)]


def number(value: float) -> str:
    """A number for people: no more digits than it needs."""
    if not math.isfinite(value):
        return "unknown"
    return f"{value:,.0f}" if value == round(value) or abs(value) >= 1000 else f"{value:.4g}"


def draw(chart: Chart) -> str:
    """The chart as one `<svg>` element; without any point, a line that says so."""
    markers = [marker for marker in chart.markers if _finite([(marker.x, marker.y)])]
    layers = _stacked(chart.series) if chart.stacked else list(chart.series)
    points = _finite([point for layer in layers for point in layer.points]) + [(marker.x, marker.y) for marker in markers]
    parts = [f'<text class="title" x="{LEFT}" y="18">{escape(chart.title)}</text>']
    if not points:
        parts.append(f'<text class="label" x="{LEFT}" y="60">nothing recorded</text>')
        return _svg(chart.title, parts, 80)
    x, y = _axes(chart, points)
    parts += _grid(chart, x, y)
    for at, text in chart.rules:
        if x.low <= at <= x.high:
            parts.append(_rule(x.at(at), text))
    if chart.stacked:
        parts += [_area(layer, below, x, y) for layer, below in _layers(layers)]
    else:
        parts += [line for layer in layers for line in _lines(layer, x, y, 7.0 if chart.y_names else 1.4)]
    parts += [_marker(marker, x.at(marker.x), y.at(marker.y)) for marker in markers]
    parts += _legend([*(s for s in chart.series if s.name), *{marker.name: marker for marker in markers}.values()])
    return _svg(chart.title, parts, HEIGHT)


def _svg(title: str, parts: Iterable[str], height: int) -> str:
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">'
    return "\n".join([opening, *parts, "</svg>"])


def _finite(points: Iterable[Point]) -> list[Point]:
    return [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]


def _axes(chart: Chart, points: Sequence[Point]) -> tuple[Axis, Axis]:
    xs, ys = [x for x, _ in points], [y for _, y in points]
    low, high = min(xs), max(xs)
    if low == high:
        margin = max(0.5, abs(low) * 1e-6)
        low, high = low - margin, high + margin
    bottom, top = min(0.0, *ys), max(ys)
    if chart.y_names:
        bottom, top = -0.5, len(chart.y_names) - 0.5
    elif top <= bottom:
        top = bottom + 1.0
    else:
        top += (top - bottom) * 0.05
    return Axis(low, high, LEFT, WIDTH - RIGHT), Axis(bottom, top, HEIGHT - BOTTOM, TOP)


def _grid(chart: Chart, x: Axis, y: Axis) -> list[str]:
    parts = []
    levels = [(float(at), name) for at, name in enumerate(chart.y_names)] or [(at, number(at)) for at in ticks(y.low, y.high, 5)]
    for level, name in levels:
        at = y.at(level)
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{at:.1f}" x2="{WIDTH - RIGHT}" y2="{at:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{escape(name)}</text>')
    for tick in ticks(x.low, x.high):
        at = x.at(tick)
        parts.append(f'<line class="axis" x1="{at:.1f}" y1="{HEIGHT - BOTTOM}" x2="{at:.1f}" y2="{HEIGHT - BOTTOM + 4}"/>')
        parts.append(f'<text class="tick" x="{at:.1f}" y="{HEIGHT - BOTTOM + 17}" text-anchor="middle">{number(tick)}</text>')
    parts.append(f'<line class="axis" x1="{LEFT}" y1="{HEIGHT - BOTTOM}" x2="{WIDTH - RIGHT}" y2="{HEIGHT - BOTTOM}"/>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text class="label" x="{middle:.0f}" y="{HEIGHT - 8}" text-anchor="middle">{escape(chart.x_label)}</text>')
    centre = (TOP + HEIGHT - BOTTOM) / 2
    turn = f'transform="rotate(-90 14 {centre:.0f})" text-anchor="middle"'
    parts.append(f'<text class="label" x="14" y="{centre:.0f}" {turn}>{escape(chart.y_label)}</text>')
    return parts


def _rule(at: float, text: str) -> str:
    line = f'<line class="rule" x1="{at:.1f}" y1="{TOP}" x2="{at:.1f}" y2="{HEIGHT - BOTTOM}"/>'
    return f"<g>{line}<title>{escape(text)}</title></g>"


def _lines(layer: Series, x: Axis, y: Axis, width: float) -> Iterator[str]:
    """The line of a series, in as many pieces as it is broken into."""
    dash = ' stroke-dasharray="5 4"' if layer.dashed else ""
    for whole, run in groupby(layer.points, lambda point: bool(_finite([point]))):
        piece = list(run)
        if not whole:
            continue
        points = thinned(piece, POINTS_MAX * len(piece) // len(layer.points))
        if len(points) == 1:
            yield f'<circle cx="{x.at(points[0][0]):.1f}" cy="{y.at(points[0][1]):.1f}" r="{width + 1:g}" fill="{layer.colour}"/>'
        else:
            path = " ".join(f"{x.at(a):.1f},{y.at(b):.1f}" for a, b in points)
            yield f'<polyline fill="none" stroke="{layer.colour}" stroke-width="{width:g}"{dash} points="{path}"/>'


def _stacked(series: Sequence[Series]) -> list[Series]:
    """Each layer's upper edge: the sum of it and of those below. Thinned by the total, so that the layers stay above each other."""
    if not series:
        return []
    totals = [sum(y for _, y in at_one_x) for at_one_x in zip(*(layer.points for layer in series), strict=True)]
    kept = [int(at) for at, _ in thinned(list(enumerate(totals)))]
    edges, below = [], [0.0] * len(kept)
    for layer in series:
        below = [low + layer.points[at][1] for low, at in zip(below, kept, strict=True)]
        edges.append(Series(layer.name, layer.colour, tuple((layer.points[at][0], y) for at, y in zip(kept, below, strict=True))))
    return edges


def _layers(edges: Sequence[Series]) -> list[tuple[Series, tuple[Point, ...]]]:
    floors = [tuple((a, 0.0) for a, _ in edges[0].points), *(edge.points for edge in edges[:-1])]
    return list(zip(edges, floors, strict=True))


def _area(layer: Series, below: Sequence[Point], x: Axis, y: Axis) -> str:
    upper = [(x.at(a), y.at(b)) for a, b in layer.points]
    lower = [(x.at(a), y.at(b)) for a, b in below]
    if len(upper) == 1:  # one step is as wide as the chart
        upper = [(x.start, upper[0][1]), (x.stop, upper[0][1])]
        lower = [(x.start, lower[0][1]), (x.stop, lower[0][1])]
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in [*upper, *reversed(lower)])
    return f'<polygon fill="{layer.colour}" points="{path}"/>'


def _marker(marker: Marker, at_x: float, at_y: float) -> str:
    fill = marker.colour if marker.filled else "#fff"
    dot = f'<circle cx="{at_x:.1f}" cy="{at_y:.1f}" r="5" fill="{fill}" stroke="{marker.colour}" stroke-width="2">'
    return f"{dot}<title>{escape(marker.note)}</title></circle>"


def _legend(entries: Sequence[Series | Marker]) -> list[str]:
    parts, at = [], WIDTH - RIGHT
    for entry in reversed(entries):
        at -= 8 * len(entry.name) + 24
        if isinstance(entry, Marker):
            fill = entry.colour if entry.filled else "#fff"
            parts.append(f'<circle cx="{at + 5}" cy="14" r="4.5" fill="{fill}" stroke="{entry.colour}" stroke-width="2"/>')
        else:
            parts.append(f'<rect x="{at}" y="9" width="11" height="11" fill="{entry.colour}"/>')
        parts.append(f'<text class="legend" x="{at + 15}" y="18">{escape(entry.name)}</text>')
    return parts
