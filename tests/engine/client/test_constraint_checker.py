"""Constraints are checked in processes that end when they take too much, and leave nothing behind."""

import asyncio
import gc
import json
import os
from collections.abc import AsyncIterator

import pytest

from charonia.core.errors import InvalidArgument, QueueFull, Unavailable
from charonia.core.request import GuidedDecoding
from charonia.engine.client import constraint_checker
from charonia.engine.client.constraint_checker import CheckLimits, ConstraintChecker, VerdictCache
from charonia.engine.grammars.constraint_check import CheckedConstraint
from charonia.processes.limited_process import LimitedProcess

# A copy's template begins with the first of them, which takes longer than these may take where much else runs.
pytestmark = pytest.mark.usefixtures("started_children")

SLOW = GuidedDecoding("json_schema", '{"type":"integer","multipleOf":1000003}', "response_format")
"""The library takes many seconds for it."""


def schema(text: str, strict: bool = False) -> GuidedDecoding:
    return GuidedDecoding("json_schema", text, "guided_json", strict=strict)


@pytest.fixture
async def checker() -> AsyncIterator[ConstraintChecker]:
    checker = ConstraintChecker({"<|im_end|>": 9})
    yield checker
    await checker.close()
    assert checker.processes == 0


async def test_a_process_starts_with_the_first_constraint_and_ends_when_idle(checker: ConstraintChecker) -> None:
    assert checker.processes == 0
    enforced = await checker.check(schema('{"not": {}, "type": "string"}'))
    assert enforced.left_out == ("not (#/not)",)
    assert enforced.constraint == schema('{"type":"string"}')
    assert (await checker.check(GuidedDecoding("lark", 'start: "a" <|im_end|>'))).left_out == ()
    assert checker.processes == 1
    checker.end_idle()
    assert checker.processes == 0


class _TakenMeanwhile(list[LimitedProcess]):
    """Seems to have an element, which another thread takes before one can."""

    def __bool__(self) -> bool:
        return True


async def test_the_last_idle_process_may_be_taken_by_another_thread(checker: ConstraintChecker) -> None:
    checker._idle = _TakenMeanwhile()
    assert (await checker.check(schema('{"type": "string"}'))).left_out == ()
    assert checker.processes == 1
    checker.end_idle()
    assert checker.processes == 0


@pytest.fixture
def asked(checker: ConstraintChecker, monkeypatch: pytest.MonkeyPatch) -> list[GuidedDecoding]:
    """The constraints that the checker asks of its processes, in whose place none answers."""
    seen: list[GuidedDecoding] = []

    def answer(constraint: GuidedDecoding, deadline: float) -> tuple[CheckedConstraint, bool]:
        seen.append(constraint)
        return CheckedConstraint(error="it is wrong") if constraint.strict else CheckedConstraint(
            constraint.text.upper(), ("a",)
        ), True

    monkeypatch.setattr(checker, "_check_in_process", answer)
    return seen


async def test_each_content_is_checked_once(checker: ConstraintChecker, asked: list[GuidedDecoding]) -> None:
    constraint = schema("a")
    await asyncio.gather(*(checker.check(constraint._replace(parameter=str(number))) for number in range(5)))
    assert await checker.check(constraint) == (schema("A"), ("a",))
    for _ in range(3):
        with pytest.raises(InvalidArgument, match=r"^guided_json: it is wrong$") as refusal:
            await checker.check(constraint._replace(strict=True))
        assert refusal.value.field == "guided_json"
    assert len(asked) == 2


async def test_too_many_that_wait_are_refused(
    checker: ConstraintChecker, asked: list[GuidedDecoding], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constraint_checker, "_MAX_WAITING", 2)
    waiting = [asyncio.create_task(checker.check(schema(str(number)))) for number in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull, match="2 constraints wait"):
        await checker.check(schema("3"))
    await asyncio.gather(*waiting)
    assert (await checker.check(schema("3"))).constraint.text == "3"


async def test_a_tenant_pauses_after_a_refusal_and_others_do_not(
    checker: ConstraintChecker, asked: list[GuidedDecoding], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constraint_checker, "_SHORTEST_PAUSE", 0.1)
    monkeypatch.setattr(constraint_checker, "_MAX_PAUSING", 2)
    assert (await checker.check(schema("good"), "hostile")).constraint.text == "GOOD"
    with pytest.raises(InvalidArgument, match="it is wrong"):
        await checker.check(schema("bad", strict=True), "hostile")
    waiting = [asyncio.create_task(checker.check(schema(str(number)), "hostile")) for number in range(2)]
    await asyncio.sleep(0.01)
    with pytest.raises(QueueFull, match="2 constraints wait already, after one that was refused"):
        await checker.check(schema("c"), "hostile")
    assert (await checker.check(schema("good"), "hostile")).constraint.text == "GOOD"  # known
    assert (await checker.check(schema("other"), "friend")).constraint.text == "OTHER"
    assert [each.text for each in asked] == ["good", "bad", "other"]
    assert [each.constraint.text for each in await asyncio.gather(*waiting)] == ["0", "1"]
    assert (await checker.check(schema("d"), "hostile")).constraint.text == "D"  # the last one was good


async def test_a_reader_that_leaves_takes_nothing_along(
    checker: ConstraintChecker, asked: list[GuidedDecoding]
) -> None:
    leaving, staying = (asyncio.create_task(checker.check(schema("a"))) for _ in range(2))
    await asyncio.sleep(0)
    leaving.cancel()
    assert (await staying).constraint.text == "A"
    assert leaving.cancelled()
    assert len(asked) == 1


async def test_any_json_object_needs_no_check(checker: ConstraintChecker) -> None:
    enforced = await checker.check(GuidedDecoding("json", parameter="response_format"))
    assert json.loads(enforced.constraint.text) == {"type": "object"}
    assert checker.processes == 0


async def test_a_constraint_that_takes_too_long_costs_its_process_and_others_go_on() -> None:
    checker = ConstraintChecker({}, CheckLimits(seconds=0.3))
    slow = asyncio.create_task(checker.check(SLOW))
    await asyncio.sleep(0)
    assert (await checker.check(schema("{}"))).constraint.text == "{}"
    with pytest.raises(InvalidArgument, match=r"response_format: compiling it takes more than 0.3 s"):
        await slow
    with pytest.raises(InvalidArgument, match="more than"):  # remembered
        await checker.check(SLOW)
    assert (await checker.check(schema('{"a": 1}'))).constraint.text == '{"a":1}'
    await checker.close()


async def test_who_comes_behind_such_constraints_is_answered_in_time_too() -> None:
    """What waited for its turn, or for a process that starts, is told to come again, and not that it is to blame."""
    checker = ConstraintChecker({}, CheckLimits(seconds=60.0, total=0.4))
    asked = [checker.check(SLOW._replace(text=SLOW.text.replace("1000003", f"1000{number}03"))) for number in range(4)]
    for late in await asyncio.gather(*asked, return_exceptions=True):
        assert isinstance(late, QueueFull)
        assert "no time to compile a constraint within 0.4 s" in late.message
    checker._limits = CheckLimits()
    for process in checker._processes:
        process._limits = checker._limits
    assert (await checker.check(schema('{"a": 1}'))).constraint.text == '{"a":1}'
    await checker.close()


async def test_a_pause_ends_in_time_too(checker: ConstraintChecker, asked: list[GuidedDecoding]) -> None:
    with pytest.raises(InvalidArgument, match="it is wrong"):
        await checker.check(schema("bad", strict=True), "hostile")
    checker._limits = CheckLimits(total=0.01)
    with pytest.raises(QueueFull, match="no time"):
        await checker.check(schema("next"), "hostile")


async def test_a_constraint_that_takes_too_much_memory_is_refused() -> None:
    checker = ConstraintChecker({}, CheckLimits(memory=8 << 20))
    many = json.dumps({"enum": [f"value {number}" for number in range(10_000)]})
    with pytest.raises(InvalidArgument, match="too much memory"):
        await checker.check(schema(many))
    assert checker.processes == 0
    await checker.close()


async def test_closing_ends_what_is_being_checked_and_leaves_no_descriptor() -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    checker = ConstraintChecker({})
    await checker.check(schema("{}"))
    slow = asyncio.create_task(checker.check(SLOW))
    await asyncio.sleep(0.05)
    await checker.close()
    for waiting in (slow, checker.check(schema('{"a": 2}'))):
        with pytest.raises(Unavailable, match="unloaded"):
            await waiting
    assert checker.processes == 0
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize(("text", "words"), [("x" * 300_000, "300000 characters"), ("\ud800", "not valid Unicode")])
async def test_what_is_wrong_at_first_sight_needs_no_process(checker: ConstraintChecker, text: str, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        await checker.check(schema(text))
    assert checker.processes == 0


def test_the_cache_is_bounded_by_bytes_and_forgets_the_oldest() -> None:
    cache = VerdictCache(10_000)
    for number in range(20):
        cache.put(b"%d" % number, CheckedConstraint("x" * 500))
        assert cache.get(b"0") is not None or number > 9
        cache.check_integrity()
    assert cache.get(b"1") is None
    assert cache.get(b"19") is not None
    cache.put(b"soon", CheckedConstraint(error="e"), 0.0)
    assert cache.get(b"soon") is None
    cache.put(b"huge", CheckedConstraint("x" * 20_000))
    assert cache.get(b"huge") is None
    cache.check_integrity()
