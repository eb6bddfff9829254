"""A time to measure in, as command lines say it."""

import re
from math import inf

from ..core.errors import InvalidArgument

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def parse_budget(text: str) -> float:
    """Seconds as in 90, 90s, 10m or 2h. Raises `InvalidArgument` for another form."""
    match = re.fullmatch(r"(\d*\.?\d+)([smh]?)", text)
    seconds = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if not 0 < seconds < inf:
        raise InvalidArgument(f"--budget must be a time as in 90s, 10m or 2h, got '{text}'", field="budget")
    return seconds
