"""`charonia explain`: what limits each model of a server, from two looks at its metrics."""

import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from ..core.errors import InvalidArgument, NotFound
from ..telemetry.bottlenecks import ModelReport, explain
from ..telemetry.scrape import Interval, parse_scrape
from .server_client import check_url, fetch, parse_header


def read_saved(files: Sequence[Path]) -> Interval:
    """The interval between saved scrapes, or since the start of the server if there is one file. Raises
    `InvalidArgument` for a file that cannot be read or is no scrape, and for two in the wrong order."""
    texts = []
    for file in files:
        try:
            texts.append(file.read_text())
        except (OSError, ValueError) as error:
            raise InvalidArgument(f"{file}: {error}") from None
    scrapes = [parse_scrape(text, str(file)) for text, file in zip(texts, files, strict=True)]
    return Interval(scrapes[0] if len(scrapes) > 1 else None, scrapes[-1])


def watch_server(url: str, header: str, seconds: float) -> Interval:
    """Two scrapes of a server, so many seconds apart; one where they are 0. `url`: of its metrics port or of its HTTP
    port, or of the metrics themselves.

    Raises:
        InvalidArgument: `url` or `header` has another form, or what is there is no metrics.
        Unavailable: the server does not answer, or refuses.
    """
    headers = parse_header(header)
    check_url(url)
    source = url if urlsplit(url).path.strip("/") else url.rstrip("/") + "/metrics"
    before = None
    if seconds:
        before = parse_scrape(fetch(source, headers).decode(errors="replace"), source)
        time.sleep(seconds)
    return Interval(before, parse_scrape(fetch(source, headers).decode(errors="replace"), source))


def print_reports(interval: Interval, model: str, as_json: bool) -> None:
    """Print what limits each model, or one. Raises `NotFound` if there is no such model."""
    reports = explain(interval)
    if model:
        names = ", ".join(sorted({each.model for each in reports})) or "none"
        reports = [each for each in reports if each.model == model]
        if not reports:
            raise NotFound(f"there is no model '{model}' to explain, only {names}")
    if as_json:
        print(msgspec.json.encode(reports).decode())
        return
    for report in reports:
        print("\n".join(_lines(report)))


def _lines(report: ModelReport) -> list[str]:
    over = "since the server's start" if report.since_start else "between the scrapes"
    lines = [f"{report.model} {report.version}, {report.seconds:.1f} s {over}:"]
    for place, each in enumerate(report.bottlenecks, 1):
        lines.append(f"  {place}. {each.cause.value.replace('_', ' ')}: {each.text}")
        if each.turn:
            lines.append(f"     turn: {each.turn}")
    return lines
