"""Memory that models hold: refused naming the largest holders, given back at unload; promises count."""

from pathlib import Path

import pytest

from charonia.core.errors import Unavailable
from charonia.core.holding import Holding
from charonia.repository.budget import Budget
from charonia.repository.builder import Builder
from charonia.repository.gateway import Hub

from .conftest import Toy, World

MIB = 2**20


class Growing:
    """A model that takes its memory bit by bit."""

    def __init__(self, promised: int, resident: int) -> None:
        self.promised = promised
        self.resident = resident

    def holding(self) -> Holding:
        return Holding(self.promised, self.resident)


def test_what_does_not_fit_is_refused_naming_the_largest() -> None:
    free = 100 * MIB
    budget = Budget(lambda: free)
    for version, size in (("1", 30), ("2", 60), ("3", 10), ("4", 5)):
        last = budget.take("m", version, size * MIB)
    free = 3 * MIB
    with pytest.raises(Unavailable) as caught:
        budget.take("n", "1", 4 * MIB)
    assert caught.value.message == (
        "model 'n' version 1 needs at least 4.0 MiB of memory and 3.0 MiB is free; most is held by "
        "'m' version 2 (60.0 MiB), 'm' version 1 (30.0 MiB), 'm' version 3 (10.0 MiB)"
    )
    last.release()
    last.release()
    assert budget.held == 100 * MIB


def test_a_limit_is_for_all_of_them_together() -> None:
    budget = Budget(lambda: 100 * MIB, limit=10 * MIB)
    first = budget.take("m", "1", 7 * MIB)
    assert budget.left == 3 * MIB
    with pytest.raises(Unavailable, match=r"4.0 MiB of memory and 3.0 MiB of 10.0 MiB is free; .* 'm' version 1 \(7.0"):
        budget.take("n", "1", 4 * MIB)
    first.release()
    assert budget.left == 10 * MIB


def test_what_was_promised_is_not_free_until_it_is_taken_and_counted_by_the_kernel() -> None:
    free = 100
    budget = Budget(lambda: free)
    hold = budget.take("llm", "1", 20)
    free = 80
    assert budget.left == 80
    model = Growing(promised=60, resident=20)
    hold.loaded(model)
    assert (budget.held, budget.left) == (60, 40)
    model.resident, free = 50, 50
    assert budget.left == 40
    model.resident, free = 70, 30
    assert budget.left == 30
    hold.release()
    assert (budget.held, budget.left) == (0, 30)


def test_a_model_holds_no_less_than_it_stated() -> None:
    budget = Budget(lambda: 100)
    hold = budget.take("m", "1", 20)
    hold.loaded(object())
    assert budget.held == 20
    hold.loaded(Growing(promised=10, resident=0))
    assert budget.held == 20


async def test_models_hold_and_give_back(tmp_path: Path, toys: list[Toy]) -> None:
    world, budget = World(tmp_path), Budget(lambda: 100, limit=105)
    world.hub = Hub(builder=Builder(budget=budget))
    world.explicit()
    for name, size in (("a", 60), ("b", 40), ("c", 101)):
        (world.write(name, {"1": 1}) / "1" / "needs").write_bytes(bytes(size))
    (tmp_path / "b" / "1" / "fails").write_text("no weights")
    await world.hub.load_model("a")
    with pytest.raises(Exception, match="no weights"):
        await world.hub.load_model("b")
    assert budget.held == 60
    with pytest.raises(Exception, match=r"version 1 needs at least .* of memory .* most is held by 'a' version 1"):
        await world.hub.load_model("c")
    await world.hub.unload()
    assert budget.held == 0
    assert [toy.unloaded for toy in toys] == [True]
