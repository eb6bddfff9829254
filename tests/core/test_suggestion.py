"""Names that nobody knows, and what they may have been meant to be."""

import pytest

from charonia.core.suggestion import did_you_mean

KNOWN = ("max_tokens", "temperature", "top_k", "top_p", "stop", "n")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("max_tokenss", "max_tokens"),
        ("MAX_TOKENS", "max_tokens"),
        ("temprature", "temperature"),
        ("topk", "top_k"),
        ("stream", ""),
        ("", ""),
        ("max_tokens" * 1_000_000, ""),
    ],
)
def test_what_is_alike_is_told_and_nothing_else(name: str, meant: str) -> None:
    assert did_you_mean(name, KNOWN) == (f"; did you mean '{meant}'?" if meant else "")
