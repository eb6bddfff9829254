"""What a rollout's new version must hold: `error_rate < 1 %, p99 < 1.2x, ttft_p95 < 800 ms`, read from a text."""

import re
from enum import StrEnum
from typing import NamedTuple

from ...core.errors import InvalidArgument

_GUARD = re.compile(r"(?P<name>\w+(?:\.\d+)?)\s*<\s*(?P<bound>\d+(?:\.\d*)?|\.\d+)\s*(?P<unit>%|[a-z]*)")
_LATENCY = re.compile(r"(?:(?P<latency>ttft|itl)_)?p(?P<percent>\d{1,2}(?:\.\d+)?)")
_MILLISECONDS = {"us": 1e-3, "ms": 1.0, "s": 1e3}

KNOWN_GUARDS = "error_rate < 1 %, p99 < 1.2x, ttft_p95 < 800ms, itl_p90 < 1.1x"


class Latency(StrEnum):
    """A time of a request: from its arrival to its end, from its arrival to its first token, and the mean from one
    token to the next."""

    REQUEST = "request"
    FIRST_TOKEN = "ttft"
    NEXT_TOKEN = "itl"


class Guard(NamedTuple):
    """A bound of the new arm: of the share of its requests that fail, or of a quantile of a `latency`, from 0 to 1.

    `bound`: a share, or milliseconds; where `relative`, a multiple of what the other arms have in the same interval.
    """

    text: str
    latency: Latency | None
    quantile: float
    bound: float
    relative: bool

    @property
    def name(self) -> str:
        return self.text.partition("<")[0].strip()

    @property
    def allowed(self) -> float:
        """The share of requests that may be beyond the bound: none may but by chance."""
        return self.bound if self.latency is None else 1 - self.quantile


def parse_guards(text: str) -> tuple[Guard, ...]:
    """The guards of a text, apart by commas. Raises `InvalidArgument` with the one that is wrong."""
    guards = tuple(_parse_guard(" ".join(guard.split())) for guard in text.split(",") if guard.strip())
    names = [guard.name for guard in guards]
    twice = next((name for at, name in enumerate(names) if name in names[:at]), None)
    if twice is not None:
        raise InvalidArgument(f"guard '{twice}' is there twice", field="guard")
    return guards


def _parse_guard(text: str) -> Guard:
    match = _GUARD.fullmatch(text)
    if match is None:
        raise InvalidArgument(f"guard '{text}' is not like one of '{KNOWN_GUARDS}'", field="guard")
    name = match["name"]
    bound = float(match["bound"])
    unit = match["unit"]
    latency = _LATENCY.fullmatch(name)
    if latency is None and name != "error_rate":
        raise InvalidArgument(f"guard '{text}': unknown measure '{name}'; like '{KNOWN_GUARDS}'", field="guard")
    if bound <= 0:
        raise InvalidArgument(f"guard '{text}': the bound must be above 0", field="guard")
    if latency is None:
        return _error_guard(text, bound, unit)
    quantile = float(latency["percent"]) / 100
    if not quantile:
        raise InvalidArgument(f"guard '{text}': the percentile must be above 0", field="guard")
    if unit != "x" and unit not in _MILLISECONDS:
        units = ", ".join(_MILLISECONDS)
        raise InvalidArgument(f"guard '{text}': a latency's bound ends with x or a unit: {units}", field="guard")
    kind = Latency(latency["latency"] or Latency.REQUEST)
    return Guard(text, kind, quantile, bound * _MILLISECONDS.get(unit, 1), unit == "x")


def _error_guard(text: str, bound: float, unit: str) -> Guard:
    if unit not in ("", "%", "x"):
        raise InvalidArgument(f"guard '{text}': a rate's bound is a share, or ends with % or x", field="guard")
    share = bound / 100 if unit == "%" else bound
    if unit != "x" and share >= 1:
        raise InvalidArgument(f"guard '{text}': the bound must be less than all requests", field="guard")
    return Guard(text, None, 0, share, unit == "x")
