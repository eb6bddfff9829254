"""Plots as SVG within HTML: no script, no font, nothing from elsewhere. A point tells what it is on hovering."""

import math
from collections.abc import Sequence
from html import escape
from itertools import chain
from typing import NamedTuple

_WIDTH, _HEIGHT = 460.0, 280.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 64.0, 16.0, 30.0, 44.0


class PlotPoint(NamedTuple):
    """A point. `kind`: its class in the style, such as "best"; `title`: what it tells."""

    x: float
    y: float
    title: str
    kind: str = "plain"


class PlotAxis(NamedTuple):
    """An axis: from 0, or if `categories` are given, with one place for each of them."""

    label: str
    categories: tuple[str, ...] = ()

    def top(self, values: Sequence[float]) -> float:
        return float(len(self.categories)) if self.categories else 1.06 * max(values, default=1.0) or 1.0

    def ticks(self, top: float) -> list[tuple[float, str]]:
        """The places that are labelled."""
        if self.categories:
            return [(place + 0.5, text) for place, text in enumerate(self.categories)]
        step = _round_step(top / 4)
        return [(step * count, f"{step * count:g}") for count in range(int(top / step) + 1)]


def _round_step(least: float) -> float:
    """1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * 0.999)


def draw_points(
    title: str,
    points: Sequence[PlotPoint],
    x_axis: PlotAxis,
    y_axis: PlotAxis,
    lines: Sequence[Sequence[PlotPoint]] = (),
) -> str:
    """Points, and lines through others, under a title. What has no place on paper is left out."""
    drawn = [point for point in chain(points, *lines) if _is_finite(point)]
    x_top = x_axis.top([point.x for point in drawn])
    y_top = y_axis.top([point.y for point in drawn])

    def place(x: float, y: float) -> tuple[float, float]:
        across = _LEFT + x / x_top * (_WIDTH - _LEFT - _RIGHT)
        return across, _HEIGHT - _BOTTOM - y / y_top * (_HEIGHT - _TOP - _BOTTOM)

    parts = [f'<svg viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" role="img" aria-label="{escape(title)}">']
    parts.append(f'<text class="title" x="{_WIDTH / 2:g}" y="14" text-anchor="middle">{escape(title)}</text>')
    (left, bottom) = place(0, 0)
    (right, top) = place(x_top, y_top)
    parts.append(f'<path class="axis" d="M{left:.1f} {top:.1f}V{bottom:.1f}H{right:.1f}"/>')
    for value, text in x_axis.ticks(x_top):
        x, _ = place(value, 0)
        parts.append(f'<text x="{x:.1f}" y="{bottom + 15:.1f}" text-anchor="middle">{escape(text)}</text>')
    for value, text in y_axis.ticks(y_top):
        _, y = place(0, value)
        parts.append(f'<path class="grid" d="M{left:.1f} {y:.1f}H{right:.1f}"/>')
        parts.append(f'<text x="{left - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{escape(text)}</text>')
    middle = (left + right) / 2
    parts.append(f'<text x="{middle:.1f}" y="{_HEIGHT - 8:g}" text-anchor="middle">{escape(x_axis.label)}</text>')
    upright = f'transform="translate(12 {(top + bottom) / 2:.1f}) rotate(-90)"'
    parts.append(f'<text {upright} text-anchor="middle">{escape(y_axis.label)}</text>')
    for line in lines:
        path = "L".join("{:.1f} {:.1f}".format(*place(point.x, point.y)) for point in line if _is_finite(point))
        if path:
            parts.append(f'<path class="line {escape(line[0].kind)}" d="M{path}"/>')
    for point in drawn:
        x, y = place(point.x, point.y)
        circle = f'<circle class="{escape(point.kind)}" cx="{x:.1f}" cy="{y:.1f}" r="4">'
        parts.append(f"{circle}<title>{escape(point.title)}</title></circle>")
    return "".join([*parts, "</svg>"])


def _is_finite(point: PlotPoint) -> bool:
    return math.isfinite(point.x) and math.isfinite(point.y)
