"""Configurations that cannot differ, their neighbours, and their places."""

import pytest

from charonia.core.errors import InvalidArgument
from charonia.extras.optimizer.search_space import SearchSpace, TunedParameter

BATCH = TunedParameter(name="batch", values=(1, 2, 4, 8), now=1, monotone_metrics=("memory",))
PRECISION = TunedParameter(name="precision", values=("bf16", "int8", "int4"), ordered=False)


def test_all_combinations_are_there_once_and_what_holds_now_first() -> None:
    space = SearchSpace([BATCH, PRECISION])
    assert (space.size, space.combinations, len(set(space.configurations))) == (12, 12, 12)
    assert space.configurations[0] == space.start == (2, "bf16")


def test_what_cannot_differ_is_one() -> None:
    space = SearchSpace([BATCH, PRECISION], lambda settings: {**settings, "batch": min(4, int(settings["batch"]))})
    assert space.size == 9
    assert all(batch != 8 for batch, _ in space.configurations)
    assert space.stepped((4, "int8"), 0, 1) == (4, "int8")


def test_neighbours_differ_in_one_knob() -> None:
    space = SearchSpace([BATCH, PRECISION])
    assert set(space.neighbours((4, "int8"))) == {(2, "int8"), (8, "int8"), (4, "bf16"), (4, "int4")}
    assert set(space.neighbours((8, "bf16"))) == {(4, "bf16"), (8, "int8"), (8, "int4")}


def test_values_without_order_are_equally_far_apart() -> None:
    points = SearchSpace([BATCH, PRECISION]).points([(1, "bf16"), (1, "int8"), (1, "int4"), (8, "bf16")])
    far = [[float(((one - other) ** 2).sum()) for other in points] for one in points]
    assert far[0][1] == pytest.approx(far[0][2]) == pytest.approx(far[1][2]) == pytest.approx(1.0)
    assert far[0][3] == pytest.approx(1.0)


def test_only_what_raises_memory_makes_one_ask_for_more() -> None:
    space = SearchSpace([BATCH, PRECISION])
    assert space.asks_as_much((8, "int8"), (4, "int8"))
    assert not space.asks_as_much((2, "int8"), (4, "int8"))
    assert not space.asks_as_much((8, "int4"), (4, "int8"))


def test_a_space_without_knobs_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="no knob to turn"):
        SearchSpace([])
