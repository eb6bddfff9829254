"""Lines in a picture: SVG as text, which needs no library and no network, alone or in a page of HTML."""

from collections.abc import Iterator, Sequence
from html import escape
from math import ceil, floor, log10
from typing import NamedTuple

_WIDTH, _HEIGHT = 760, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 200, 40, 50
_COLOURS = ("#1f6feb", "#d9480f", "#2b8a3e", "#862e9c", "#c2255c", "#5f3dc4", "#0b7285", "#495057")
_TICKS = 6
_TEXT_LINE, _TEXT_LEFT = 13, 24
_PAGE = """<!doctype html>
<meta charset="utf-8">
<title>{title}</title>
<style>body {{ font-family: sans-serif; margin: 2em }} pre {{ background: #f4f4f4; padding: 1em }}</style>
{picture}
<pre>{text}</pre>
"""


class ChartLine(NamedTuple):
    """A line through `points`, ascending; `dashed`: a bound. `dots`: every point is marked."""

    name: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False
    dots: bool = False


class LineChart(NamedTuple):
    """`log_x`, `log_y`: the axis is logarithmic, and all its values are above 0."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[ChartLine]
    log_x: bool = False
    log_y: bool = False


def draw_chart(chart: LineChart, text: str = "") -> str:
    """The picture as SVG, with the lines of `text` below it."""
    xs = [x for line in chart.lines for x, _ in line.points]
    ys = [y for line in chart.lines for _, y in line.points]
    across = _Axis(min(xs), max(xs), _LEFT, _WIDTH - _RIGHT, chart.log_x)
    up = _Axis(min(ys) if chart.log_y else min(0.0, *ys), max(ys), _HEIGHT - _BOTTOM, _TOP, chart.log_y)
    height = _HEIGHT + _TEXT_LINE * (len(text.splitlines()) + 1 if text else 0)
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    centre = (_TOP + _HEIGHT - _BOTTOM) / 2
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}"'
        f' font-family="sans-serif" font-size="12">',
        f"<title>{escape(chart.title)}</title>",
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        _text(middle, 22, chart.title, "middle", 'font-size="15"'),
        _text(middle, _HEIGHT - 10, chart.x_label, "middle"),
        _text(18, centre, chart.y_label, "middle", f'transform="rotate(-90 18 {centre:g})"'),
        *_grid(across, up),
    ]
    for number, line in enumerate(chart.lines):
        parts += _line(line, across, up, _COLOURS[number % len(_COLOURS)], _TOP + 18 * number + 8)
    font = 'font-family="monospace" font-size="10" xml:space="preserve"'
    for number, row in enumerate(text.splitlines(), 1):
        parts.append(_text(_TEXT_LEFT, _HEIGHT + _TEXT_LINE * number, row, "start", font))
    return "\n".join([*parts, "</svg>"]) + "\n"


def write_page(chart: LineChart, text: str) -> str:
    """A page of HTML with the picture, and a text below it."""
    return _PAGE.format(title=escape(chart.title), picture=draw_chart(chart), text=escape(text))


class _Axis:
    """Values on a stretch of pixels, with ticks at round values."""

    def __init__(self, low: float, high: float, begin: float, end: float, logarithmic: bool) -> None:
        self._log = logarithmic and low > 0
        if high <= low:
            high = low * 1.1 if low > 0 else low + 1.0
        self.begin = begin
        self.end = end
        self._low, self._high = (log10(low), log10(high)) if self._log else (low, high)

    def place(self, value: float) -> float:
        at = log10(value) if self._log else value
        return self.begin + (at - self._low) / (self._high - self._low) * (self.end - self.begin)

    def ticks(self) -> Iterator[float]:
        if self._log:
            for power in range(floor(self._low), ceil(self._high) + 1):
                for digit in (1, 2, 5):
                    if self._low <= log10(digit * 10**power) <= self._high:
                        yield digit * 10.0**power
            return
        rough = (self._high - self._low) / _TICKS
        unit: float = 10.0 ** floor(log10(rough))
        step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
        for number in range(ceil(self._low / step), floor(self._high / step + 1e-9) + 1):
            yield number * step


def _grid(across: _Axis, up: _Axis) -> Iterator[str]:
    for x in across.ticks():
        at = across.place(x)
        yield f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{up.begin}" y2="{up.end}" stroke="#e5e5e5"/>'
        yield _text(at, up.begin + 18, f"{x:g}", "middle")
    for y in up.ticks():
        at = up.place(y)
        yield f'<line x1="{across.begin}" x2="{across.end}" y1="{at:.1f}" y2="{at:.1f}" stroke="#e5e5e5"/>'
        yield _text(across.begin - 8, at + 4, f"{y:g}", "end")


def _line(line: ChartLine, across: _Axis, up: _Axis, colour: str, legend: float) -> Iterator[str]:
    places = [(across.place(x), up.place(y)) for x, y in line.points]
    dash = ' stroke-dasharray="6 4"' if line.dashed else ""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>'
    for x, y in places if line.dots else ():
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>'
    left = _WIDTH - _RIGHT + 14
    yield f'<line x1="{left}" x2="{left + 22}" y1="{legend}" y2="{legend}" stroke="{colour}" stroke-width="2"{dash}/>'
    yield _text(left + 28, legend + 4, line.name, "start")


def _text(x: float, y: float, text: str, anchor: str, attributes: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="#222" {attributes}>{escape(text)}</text>'
