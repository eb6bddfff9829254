"""The report of an analysis: one HTML file with tables and plots, which needs no network and no script."""

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from ...core.errors import InvalidArgument
from .conclusion import Conclusion, describe_settings
from .ranking import RankedConfiguration
from .search_goal import LevelFigures, format_metric
from .svg_plots import PlotAxis, PlotPoint, draw_points

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:76rem;margin:2rem auto;padding:0 1rem;color:#222}
h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:2rem}
table{border-collapse:collapse;font-size:13px}.wide{overflow-x:auto}
th,td{padding:.2rem .6rem;text-align:right;border-bottom:1px solid #ddd}td:last-child{text-align:left;color:#666}
tr.best{background:#e8f4ea}tr.missed{color:#999}
.plots{display:flex;flex-wrap:wrap;gap:1rem}figure{margin:0;flex:1 1 24rem;max-width:34rem}
.origin,.legend{font-size:13px;color:#555}.legend span{margin-right:1.2rem}
.legend span::before{content:"";display:inline-block;width:.7em;height:.7em;border-radius:50%;margin-right:.4em}
.legend .best::before{background:#1a8a3a}.legend .plain::before{background:#4a6fa5}
.legend .missed::before{background:#bbb}
svg .title{font-weight:600;font-size:12px}
svg text{font:11px system-ui,sans-serif;fill:#333}svg .axis{fill:none;stroke:#555}svg .grid{stroke:#e4e4e8}
svg circle{fill:#4a6fa5;fill-opacity:.75}svg .missed{fill:#bbb}svg .best{fill:#1a8a3a;fill-opacity:1}
svg .line{fill:none;stroke:#4a6fa5;stroke-opacity:.6}svg .line.best{stroke:#1a8a3a}
pre{background:#f5f5f7;padding:.8rem;overflow-x:auto}
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_CURVES = 5


_LEGEND = (
    '<p class="legend"><span class="best">the best</span><span class="plain">keeps the constraints</span>'
    '<span class="missed">misses one, or has no figures</span></p>'
)


class ReportOrigin(NamedTuple):
    """What a report is of. `command`: without its secrets; `ended`: when the last measurement had."""

    command: str
    ended: str
    machine: str


def write_report(path: Path, conclusion: Conclusion, levels: Sequence[str], origin: ReportOrigin) -> None:
    """Raises `InvalidArgument` if the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(render_report(conclusion, levels, origin), encoding="utf-8")
    except OSError as error:
        raise InvalidArgument(f"cannot write the report to {path}: {error.strerror}") from None


def render_report(conclusion: Conclusion, levels: Sequence[str], origin: ReportOrigin) -> str:
    title = f"{conclusion.title}: {conclusion.goal.objective} under {', '.join(levels)}"
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>",
        f'<p class="origin">{escape(origin.ended)}, on {escape(origin.machine)}:',
        f"<code>{escape(origin.command)}</code></p>",
        _list("ul", conclusion.sentences),
        *(f"<h2>{escape(paste.title)}</h2><pre>{escape(paste.text)}</pre>" for paste in conclusion.texts),
        f'<h2>Plots</h2>{_LEGEND}<div class="plots">',
        *_plots(conclusion),
        '</div><h2>What was measured</h2><div class="wide">',
        _table(conclusion),
        "</div></body></html>\n",
    ]
    return "\n".join(parts)


def _list(tag: str, texts: Iterable[str]) -> str:
    return f"<{tag}>{''.join(f'<li>{escape(text)}</li>' for text in texts)}</{tag}>"


def _table(conclusion: Conclusion) -> str:
    heads = [*(parameter.name for parameter in conclusion.space.parameters), *conclusion.columns, "turns", ""]
    rows = [f"<tr>{''.join(f'<th>{escape(head)}</th>' for head in heads)}</tr>"]
    for candidate in conclusion.ranked:
        values = [str(value) for value in candidate.configuration]
        cells = [
            *values,
            *conclusion.cells(candidate, conclusion.columns),
            str(len(candidate.scores)),
            conclusion.remark(candidate),
        ]
        kind = _kind(conclusion, candidate)
        rows.append(f'<tr class="{kind}">{"".join(f"<td>{escape(cell)}</td>" for cell in cells)}</tr>')
    return f"<table>{''.join(rows)}</table>"


def _kind(conclusion: Conclusion, ranked: RankedConfiguration) -> str:
    if ranked.feasible and ranked is conclusion.best:
        return "best"
    return "plain" if ranked.feasible else "missed"


def _plots(conclusion: Conclusion) -> Iterator[str]:
    known = [candidate for candidate in conclusion.ranked if candidate.scores]
    if not known:
        return
    # The best is drawn last, above the others.
    drawn = known[::-1]
    objective = conclusion.goal.objective
    for metric in [name for name in conclusion.columns[1:] if name != "failed"]:
        points = [point for point in (_against(conclusion, ranked, metric) for ranked in drawn) if point is not None]
        if points and metric in ("memory", "e2e_p99", "ttft_p99", "itl_p99", "throughput"):
            yield _figure(
                f"{objective} against {metric}, a point for each configuration", points, _axis(metric), _axis(objective)
            )
    for index, parameter in enumerate(conclusion.space.parameters):
        axis = PlotAxis(parameter.name, tuple(map(str, parameter.values)))
        positions = {value: number + 0.5 for number, value in enumerate(parameter.values)}
        points = [_point(conclusion, candidate, positions[candidate.configuration[index]]) for candidate in drawn]
        yield _figure(f"{objective} by {parameter.name}", points, axis, _axis(objective))
    yield from _level_curves(conclusion, known[:_CURVES])
    turns = [candidate for candidate in known if len(candidate.scores) > 1]
    if turns:
        axis = PlotAxis("finalists", tuple(str(number) for number in range(1, len(turns) + 1)))
        points = [
            PlotPoint(
                number + 0.5,
                _scaled(objective, score.value),
                _title(conclusion, candidate),
                _kind(conclusion, candidate),
            )
            for number, candidate in enumerate(turns)
            for score in candidate.scores
        ]
        yield _figure("the turns of the finalists, in the order of the table", points, axis, _axis(objective))


def _level_curves(conclusion: Conclusion, known: Sequence[RankedConfiguration]) -> Iterator[str]:
    """Throughput and latency from level to level, where there are several."""
    longest = [max(candidate.trials, key=lambda trial: (len(trial.levels), trial.seconds)) for candidate in known]
    curves = []
    for ranked, trial in zip(known, longest, strict=True):
        level_points = [_level_point(conclusion, ranked, level) for level in trial.levels]
        curves.append([point for point in level_points if point is not None])
    if any(len(curve) > 1 for curve in curves):
        points = [point for curve in curves for point in curve]
        lines = [curve for curve in curves if curve]
        title = f"the best {len(curves)} from level to level"
        yield _figure(title, points, _axis("throughput"), _axis("e2e_p99"), lines)


def _level_point(conclusion: Conclusion, ranked: RankedConfiguration, level: LevelFigures) -> PlotPoint | None:
    latency = level.metric("e2e_p99")
    if latency is None:
        return None
    title = f"{level.level}: {_title(conclusion, ranked)}"
    return PlotPoint(level.throughput, _scaled("e2e_p99", latency), title, _kind(conclusion, ranked))


def _against(conclusion: Conclusion, ranked: RankedConfiguration, metric: str) -> PlotPoint | None:
    value = ranked.middle.level.metric(metric) if ranked.middle is not None else None
    return None if value is None else _point(conclusion, ranked, _scaled(metric, value))


def _point(conclusion: Conclusion, ranked: RankedConfiguration, x: float) -> PlotPoint:
    y = _scaled(conclusion.goal.objective, ranked.value)
    return PlotPoint(x, y, _title(conclusion, ranked), _kind(conclusion, ranked))


def _title(conclusion: Conclusion, ranked: RankedConfiguration) -> str:
    settings = describe_settings(conclusion.space.settings(ranked.configuration))
    value = format_metric(conclusion.goal.objective, ranked.value)
    return f"{settings}: {value}"


def _axis(metric: str) -> PlotAxis:
    unit = {"throughput": "per second", "memory": "MiB"}.get(metric, "ms")
    return PlotAxis(f"{metric}, {unit}")


def _scaled(metric: str, value: float) -> float:
    """A value in the unit of the metric's axis."""
    return value if metric == "throughput" else value / 2**20 if metric == "memory" else value * 1e3


def _figure(
    title: str, points: Sequence[PlotPoint], across: PlotAxis, up: PlotAxis, lines: Sequence[Sequence[PlotPoint]] = ()
) -> str:
    return f"<figure>{draw_points(title, points, across, up, lines)}</figure>"
