"""A time to measure in."""

import pytest

from charonia.core.errors import InvalidArgument
from charonia.extras.optimizer.options import parse_budget


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("3m", 180), ("1.5h", 5400), ("20", 20)])
def test_a_budget_is_read_with_its_unit(text: str, seconds: float) -> None:
    assert parse_budget(text) == seconds


@pytest.mark.parametrize("text", ["m", "0s", "0", "-3m", "tens", "10d", "infs", "nanm", "", "9" * 400 + "h"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="budget must be a time as in 90s, 10m or 2h"):
        parse_budget(text)
