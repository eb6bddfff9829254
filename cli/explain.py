"""`charonia explain`: what limits each model of a server, from two looks at its metrics."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from ..api.server_client import check_url, fetch, parse_header
from ..core.errors import InvalidArgument, NotFound
from ..telemetry.bottlenecks import ModelReport, explain, is_language_model
from ..telemetry.roofline import StepRoofline, read_roofline
from ..telemetry.scrape import Interval, ModelInterval, Scrape, parse_scrape, require_in_order


def choose_rooflines(interval: Interval, model: str, machine: Path | None) -> Mapping[str, StepRoofline]:
    """The roofline of a file for the model that is named, or for the only language model that is there. Raises
    `InvalidArgument` as `read_roofline` does, and if it is not clear whose it is."""
    if machine is None:
        return {}
    names = {version.name for version in interval.models() if is_language_model(ModelInterval(interval, version))}
    if model in {version.name for version in interval.models()} - names:
        raise InvalidArgument(f"--machine is of a language model, and '{model}' is none")
    if not model and len(names) != 1:
        known = ", ".join(sorted(names)) or "none"
        raise InvalidArgument(f"--machine is of one language model, and there are {known}: name it by --model")
    return {model or names.pop(): read_roofline(machine)}


def read_saved(files: Sequence[Path]) -> Interval:
    """The interval between saved scrapes, or since the start of the server if there is one file. Raises
    `InvalidArgument` for a file that cannot be read or is no scrape, and for two that do not belong together."""
    texts = []
    for file in files:
        try:
            texts.append(file.read_text())
        except OSError as error:
            raise InvalidArgument(f"cannot read {file}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise InvalidArgument(f"{file}: this is no text of metrics") from None
    *before, after = [parse_scrape(text, str(file)) for text, file in zip(texts, files, strict=True)]
    return _interval(before[0] if before else None, after)


def _interval(before: Scrape | None, after: Scrape) -> Interval:
    if before is not None:
        require_in_order(before, after)
    return Interval(before, after)


def watch_server(url: str, header: str, seconds: float) -> Interval:
    """Two scrapes of a server, so many seconds apart; one where they are 0. `url`: of its metrics port or of its HTTP
    port, or of the metrics themselves.

    Raises:
        InvalidArgument: `url` or `header` has another form, or what is there is no metrics, or of two servers.
        Unavailable: the server does not answer, or refuses.
    """
    headers = parse_header(header)
    check_url(url)
    source = url if urlsplit(url).path.strip("/") else url.rstrip("/") + "/metrics"
    before = None
    if seconds:
        before = parse_scrape(fetch(source, headers).decode(errors="replace"), source)
        time.sleep(seconds)
    return _interval(before, parse_scrape(fetch(source, headers).decode(errors="replace"), source))


def print_reports(interval: Interval, model: str, machine: Path | None, as_json: bool) -> None:
    """Print what limits each model, or one. `machine`: calibrate's file. Raises `NotFound` if there is no such model,
    and as `choose_rooflines` does."""
    reports = explain(interval, choose_rooflines(interval, model, machine))
    if model:
        names = ", ".join(sorted({report.model for report in reports})) or "none"
        reports = [report for report in reports if report.model == model]
        if not reports:
            raise NotFound(f"there is no model '{model}' to explain, only {names}")
    if not reports and not as_json:
        print("the server has no models")
    if as_json:
        print(msgspec.json.encode(reports).decode())
        return
    for report in reports:
        print("\n".join(_lines(report)))


def _lines(report: ModelReport) -> list[str]:
    over = "since the server's start" if report.since_start else "between the scrapes"
    lines = [f"{report.model} {report.version}, {report.seconds:.1f} s {over}:"]
    for place, bottleneck in enumerate(report.bottlenecks, 1):
        lines.append(f"  {place}. {bottleneck.cause.value.replace('_', ' ')}: {bottleneck.text}")
        if bottleneck.turn:
            lines.append(f"     turn: {bottleneck.turn}")
    return lines + [f"  {account.subject}: {account.text}" for account in report.cache]
