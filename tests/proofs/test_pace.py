"""The proof of the pace, with few requests, and the promises that it holds it to."""

import pytest

from charonia.extras.optimizer.simulated_machine import SimulatedMachine
from charonia.scheduler.prefill_budget import PrefillBudget

from . import pace
from .pace import FormerBudget
from .scheduler_latency import INT8, INT8_TILES, INT8_VNNI


@pytest.mark.parametrize("machine", [INT8, INT8_VNNI, INT8_TILES])
def test_a_long_prompt_beside_streams_neither_waits_nor_holds_up_for_long(machine: SimulatedMachine) -> None:
    delay, stall = pace.beside_streams(machine)
    assert delay <= pace.MOST_DELAY
    assert stall <= pace.MOST_STALL


def test_the_policy_before_let_it_wait() -> None:
    assert pace.beside_streams(INT8_VNNI, FormerBudget).delay > pace.MOST_DELAY


def test_first_tokens_come_sooner_than_with_the_policy_before() -> None:
    asked = pace.sped_up(pace.load_requests("conversation", None, 30, 2048), 0.05)
    before, now = (pace.run(INT8_VNNI, asked, policy) for policy in (FormerBudget, PrefillBudget))
    assert now.ttft[1] <= 0.6 * before.ttft[1]
    assert now.itl[2] <= 2 * before.itl[2]


def test_drawn_requests_are_no_longer_than_asked_and_much_like_the_traces() -> None:
    for name in pace.TRACES:
        asked = pace.load_requests(name, None, 200, 2048)
        assert all(each.prompt + each.new <= 2048 and each.prompt > 0 < each.new for each in asked)
        assert [each.at for each in asked] == sorted(each.at for each in asked)
