"""A stop string cuts the text at the same place however it came, and no part of it ever shows."""

from hypothesis import given
from hypothesis import strategies as st

from charonia.tokenization.detokenizer import StopStrings

# Two letters and two of more bytes: matches, half matches and overlaps are everywhere.
TEXTS = st.text(alphabet="ab\u00e9\U0001f98a", max_size=40)
STOPS = st.lists(st.text(alphabet="ab\u00e9\U0001f98a", min_size=1, max_size=5), max_size=4)
CUTS = st.lists(st.integers(0, 4), max_size=60)


def cut(text: str, sizes: list[int]) -> list[str]:
    """The text in pieces of these sizes; what remains is the last."""
    pieces = []
    for size in sizes:
        pieces.append(text[:size])
        text = text[size:]
    return [*pieces, text]


def shown(stops: StopStrings, pieces: list[str]) -> list[str]:
    """What shows after each piece, and at the end if nothing stopped it."""
    return [*(stops.push(piece) for piece in pieces), stops.finish()]


def first(text: str, stops: list[str]) -> tuple[int, int] | None:
    """(begin, end) of the occurrence that is complete first, the longest of those."""
    ends = [(end, end - len(stop)) for stop in stops for end in range(len(text) + 1) if text[:end].endswith(stop)]
    if not ends:
        return None
    end, begin = min(ends)
    return begin, end


@given(text=TEXTS, stops=STOPS, sizes=CUTS)
def test_cut_at_the_first_occurrence_however_it_came(text: str, stops: list[str], sizes: list[int]) -> None:
    found = first(text, stops)
    assert "".join(shown(StopStrings(stops), cut(text, sizes))) == text[: found[0] if found else None]
    assert "".join(shown(StopStrings(stops, include=True), cut(text, sizes))) == text[: found[1] if found else None]


@given(text=TEXTS, stops=STOPS, sizes=CUTS)
def test_no_part_of_a_stop_string_shows_before_it_is_complete(text: str, stops: list[str], sizes: list[int]) -> None:
    begin, end = first(text, stops) or (len(text), len(text) + 1)
    watched, so_far, arrived = StopStrings(stops), "", 0
    for piece in cut(text, sizes):
        so_far, arrived = so_far + watched.push(piece), arrived + len(piece)
        assert text[:begin].startswith(so_far)
        assert watched.matched == (text[begin:end] if arrived >= end else None)


@given(text=TEXTS, stops=STOPS, sizes=CUTS)
def test_no_more_is_held_back_than_could_become_one(text: str, stops: list[str], sizes: list[int]) -> None:
    watched, so_far, arrived = StopStrings(stops), "", ""
    for piece in cut(text, sizes):
        so_far, arrived = so_far + watched.push(piece), arrived + piece
        if watched.matched is not None:
            return
        held = arrived.removeprefix(so_far)
        assert not held or any(stop.startswith(held) for stop in stops)


def test_nothing_follows_a_stop_string() -> None:
    watched = StopStrings(["ab", "b"])
    assert watched.push("xab") == "x"
    assert watched.matched == "ab"
    assert watched.push("more") + watched.finish() == ""
    assert not StopStrings([])
