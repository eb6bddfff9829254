"""What --metrics-config says."""

import pytest

from charonia.core.errors import InvalidArgument
from charonia.telemetry.metric_families import (
    CHARONIA_FAMILIES,
    DURATION_FAMILIES,
    FIRST_RESPONSE_FAMILIES,
    SUMMARY_FAMILIES,
    TRITON_FAMILIES,
    MetricsConfig,
    parse_metrics_config,
)

SUMMED = {family.name for family in SUMMARY_FAMILIES}
FIRST = {family.name for family in FIRST_RESPONSE_FAMILIES}
DURATION = {family.name for family in DURATION_FAMILIES}


@pytest.mark.parametrize(
    ("words", "hidden"),
    [
        ((), SUMMED | FIRST),
        (("summary_latencies=true",), FIRST),
        (("histogram_latencies=1", "summary_latencies=TRUE"), set()),
        (("counter_latencies=false",), SUMMED | FIRST | DURATION),
        (("summary_latencies=true", "summary_latencies=false"), SUMMED | FIRST),
    ],
)
def test_what_is_shown(words: tuple[str, ...], hidden: set[str]) -> None:
    assert parse_metrics_config(words).hidden == hidden
    assert hidden <= {family.name for family in (*CHARONIA_FAMILIES, *TRITON_FAMILIES)}


def test_quantiles() -> None:
    assert MetricsConfig().quantiles == (0.5, 0.9, 0.95, 0.99, 0.999)
    assert parse_metrics_config(['summary_quantiles="0.25:0.05,1:0.001"']).quantiles == (0.25, 1.0)


@pytest.mark.parametrize(
    ("value", "left_out", "quantiles"),
    [
        ("", [""], MetricsConfig().quantiles),
        ("0.5", ["0.5"], MetricsConfig().quantiles),
        ("0.5:0.05,1.5:0.1", ["1.5:0.1"], (0.5,)),
        ("0.5:x, 0.9:0.01,,:0.1,nan:0", ["0.5:x", "", ":0.1", "nan:0"], (0.9,)),
    ],
)
def test_quantiles_that_mean_nothing_are_left_out(
    value: str, left_out: list[str], quantiles: tuple[float, ...], caplog: pytest.LogCaptureFixture
) -> None:
    assert parse_metrics_config([f"summary_quantiles={value}"]).quantiles == quantiles
    assert [record.args for record in caplog.records] == [(pair,) for pair in left_out]
    assert all("Invalid option: [" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(
    "word",
    [
        "summary_latencies",
        "summary_latencies=maybe",
        "colour=red",
        "",
    ],
)
def test_what_it_cannot_say_is_refused(word: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^--metrics-config {word}: expected"):
        parse_metrics_config([word])
