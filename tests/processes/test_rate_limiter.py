"""Turns at resources: nothing is overcommitted, nobody waits forever, and what ends holds nothing."""

import threading
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from charonia.core.errors import InvalidArgument
from charonia.core.runtime import InstanceRate, Resource
from charonia.processes.rate_limiter import InstanceClaim, RateLimiter, parse_resource_limits, read_rate

R, S = Resource("r", 0), Resource("s", None)


def rate(priority: int = 1, **counts: int) -> InstanceRate:
    return InstanceRate(tuple(({"r": R, "s": S}[name], count) for name, count in counts.items()), priority)


def run(limiter: RateLimiter, claims: list[InstanceClaim], steps: int) -> Counter[int]:
    """How often each ran, of claims that always have work; an execution takes one step."""
    ran = Counter[int]()
    for claim in claims:
        limiter.ask(claim)
    for _ in range(steps):
        running = [at for at, claim in enumerate(claims) if claim.held]
        ran.update(running)
        limiter.check_integrity()
        for at in running:
            limiter.ask(claims[at])
    return ran


def test_priorities_are_shares() -> None:
    limiter = RateLimiter({})
    ran = run(limiter, [limiter.claim(rate(1, r=1)), limiter.claim(rate(2, r=1)), limiter.claim(rate(4, r=1))], 700)
    assert [round(ran[at] / 100) for at in range(3)] == [4, 2, 1]


def test_who_asks_much_is_not_passed_forever() -> None:
    limiter = RateLimiter({Resource("r", None): 4})
    claims = [limiter.claim(rate(r=1)) for _ in range(6)] + [limiter.claim(rate(r=4))]
    ran = run(limiter, claims, 300)
    assert min(ran.values()) > 30


def test_other_resources_do_not_wait() -> None:
    limiter = RateLimiter({})
    first, second, other = limiter.claim(rate(r=1)), limiter.claim(rate(r=1)), limiter.claim(rate(s=1))
    for claim in (first, second, other):
        limiter.ask(claim)
    assert (first.held, second.held, other.held) == (True, False, True)


def test_who_had_no_work_saves_nothing_up() -> None:
    limiter = RateLimiter({})
    busy, late = limiter.claim(rate(r=1)), limiter.claim(rate(r=1))
    run(limiter, [busy], 1000)
    busy.release()
    ran = run(limiter, [late, busy], 100)
    assert abs(ran[0] - ran[1]) <= 2


def test_limits_by_device_and_of_the_server() -> None:
    limits = parse_resource_limits(["R:2", "r:5:1", "S:3:7"])
    limiter = RateLimiter(limits)
    limiter.claim(InstanceRate(((Resource("r", 1), 5), (S, 3))))
    with pytest.raises(InvalidArgument, match=r'"r" is limited to 2 which .* minimum required count is 3'):
        limiter.claim(rate(r=3))
    with pytest.raises(InvalidArgument, match='"s" is present as both global and device-specific'):
        limiter.claim(InstanceRate(((Resource("s", 0), 1),)))
    [first, second] = limiter.measure()
    assert {reading.family: reading.value for reading in first.readings} == {
        "charonia_resource_limit": 5,
        "charonia_resource_used": 0,
        "charonia_resource_waiting": 0,
    }
    assert second.labels == {"resource": "s", "device": "global"}


def test_of_what_flags_give_to_other_devices_there_is_none_here() -> None:
    limiter = RateLimiter(parse_resource_limits(["r:10:10"]))
    limiter.claim(InstanceRate(((Resource("r", 10), 10),)))
    with pytest.raises(InvalidArgument, match=r'"r" is limited to 0 which .* minimum required count is 4'):
        limiter.claim(rate(r=4))


@pytest.mark.parametrize("flag", ["", "R", ":3", "R:x", "R:-1", "R:1:2:3", "R:1:x", "R:"])
def test_flags_that_mean_nothing_are_refused(flag: str) -> None:
    with pytest.raises(InvalidArgument, match="--rate-limit-resource must be <name>:<count>"):
        parse_resource_limits([flag])


def test_a_config_says_what_an_instance_asks() -> None:
    group = {"rate_limiter": {"resources": [{"name": "R", "count": 3}, {"name": "S", "global": True}], "priority": 2}}
    assert read_rate(group, 0) == rate(2, r=3, s=1)
    assert read_rate({}, 0) is None


def test_what_waits_ends_when_it_is_closed() -> None:
    limiter = RateLimiter({})
    holder, waiting = limiter.claim(rate(r=1)), limiter.claim(rate(r=1))
    assert holder.acquire()
    got: list[bool] = []
    thread = threading.Thread(target=lambda: got.append(waiting.acquire()))
    thread.start()
    waiting.close()
    thread.join(30)
    assert got == [False]
    assert not waiting.acquire()
    holder.release()
    holder.close()
    limiter.check_integrity()
    assert [*limiter.measure()] == []


def test_what_executes_holds_its_resources_until_it_ends_also_when_it_is_closed() -> None:
    limiter = RateLimiter({})
    executing, next_one = limiter.claim(rate(r=1)), limiter.claim(rate(r=1))
    assert executing.acquire()
    limiter.ask(next_one)
    executing.close()
    limiter.check_integrity()
    assert not next_one.held
    assert not executing.acquire()  # the end of its execution
    limiter.check_integrity()
    assert next_one.held


def test_what_one_asked_at_most_is_there_until_it_is_given_back() -> None:
    limiter = RateLimiter({})
    large, *small = (limiter.claim(rate(r=count)) for count in (2, 1, 1))
    for claim in small:
        limiter.ask(claim)
    large.close()
    limiter.check_integrity()
    small[0].release()
    assert next(limiter.measure()).readings[0].value == 1


counts = st.dictionaries(st.sampled_from("rs"), st.integers(1, 4), min_size=1)


@given(
    st.dictionaries(st.sampled_from([Resource("r", None), Resource("r", 0), Resource("s", None)]), st.integers(4, 6)),
    st.lists(st.tuples(counts, st.integers(1, 5)), min_size=1, max_size=8),
    st.lists(st.tuples(st.integers(0, 7), st.sampled_from(["ask", "release", "close"])), max_size=60),
)
def test_no_resource_is_ever_overcommitted(
    limits: dict[Resource, int], asked: list[tuple[dict[str, int], int]], calls: list[tuple[int, str]]
) -> None:
    limiter = RateLimiter(limits)
    claims = [limiter.claim(rate(priority, **needs)) for needs, priority in asked]
    waiting: set[int] = set()
    for number, call in calls:
        at = number % len(claims)
        claim = claims[at]
        if call == "ask" and at not in waiting:
            limiter.ask(claim)
        elif call == "release":
            claim.release()
        elif call == "close":
            claim.close()
        waiting = {at for at, claim in enumerate(claims) if not claim.granted.is_set() and claim in limiter._waiting}
        limiter.check_integrity()
    for _ in range(len(claims) + len(waiting)):  # all who wait get their turn when the others end
        for claim in claims:
            if claim.held:
                claim.release()
        limiter.check_integrity()
    assert not limiter._waiting
