"""Which of Triton's latency metrics are shown: what --metrics-config says.

metrics.md section 3 of the reference; `tritonserver`'s words. Knows nothing of what is measured.
"""

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from ..core.errors import InvalidArgument
from .metric_families import DURATION_FAMILIES, FIRST_RESPONSE_FAMILIES, SUMMARY_FAMILIES

_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
_SWITCHES = {"counter_latencies": "counters", "summary_latencies": "summaries", "histogram_latencies": "histograms"}
_QUANTILE = re.compile(r"(?:0(?:\.\d+)?|1(?:\.0+)?):(?:0(?:\.\d+)?|1(?:\.0+)?)")


class MetricsConfig(NamedTuple):
    """`quantiles` of summaries. Triton's allowed errors are read and not needed: all are right to a hundredth."""

    counters: bool = True
    summaries: bool = False
    histograms: bool = False
    quantiles: tuple[float, ...] = (0.5, 0.9, 0.95, 0.99, 0.999)

    @property
    def hidden(self) -> frozenset[str]:
        """Families that are not shown."""
        shown = (
            (self.counters, DURATION_FAMILIES),
            (self.summaries, SUMMARY_FAMILIES),
            (self.histograms, FIRST_RESPONSE_FAMILIES),
        )
        return frozenset(family.name for on, families in shown if not on for family in families)


def parse_metrics_config(words: Iterable[str]) -> MetricsConfig:
    """What the flag says, each time it is given: `<setting>=<value>`.

    Raises:
        InvalidArgument: it says what it cannot; the message names the flag.
    """
    config = MetricsConfig()
    for word in words:
        name, _, value = word.partition("=")
        if name in _SWITCHES and value.lower() in _BOOLEANS:
            switched: dict[str, Any] = {_SWITCHES[name]: _BOOLEANS[value.lower()]}
            config = config._replace(**switched)
        elif name == "summary_quantiles":
            config = config._replace(quantiles=_quantiles(word, value))
        else:
            known = ", ".join((*(f"{switch}=true|false" for switch in _SWITCHES), "summary_quantiles=0.5:0.05,..."))
            raise InvalidArgument(f"--metrics-config {word}: expected one of {known}")
    return config


def _quantiles(word: str, value: str) -> tuple[float, ...]:
    pairs = value.strip('"').split(",")
    if not all(_QUANTILE.fullmatch(pair) for pair in pairs):
        raise InvalidArgument(f"--metrics-config {word}: expected <quantile>:<error>, each from 0 to 1, and commas")
    return tuple(float(pair.partition(":")[0]) for pair in pairs)
