"""Which arm a request gets: shares that are counted, keys that stay, rules that decide."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from charonia.core.request import InferRequest
from charonia.core.tensor import Tensor
from charonia.routing.arm_selector import ArmSelector, StickyHash, WeightedTurns
from charonia.routing.request_fields import FieldPath, body_fields, infer_fields
from charonia.routing.route import Route, RouteArm, RouteRule, RouteTarget, StickyKey

KEYS = [f"user-{number}".encode() for number in range(10_000)]


def arms(*weights: float) -> tuple[RouteArm, ...]:
    return tuple(RouteArm("m", number, weight) for number, weight in enumerate(weights, 1))


@given(st.lists(st.floats(0.01, 100) | st.just(0.0), min_size=1, max_size=8).filter(any), st.integers(1, 2000))
def test_after_every_choice_each_count_is_within_one_of_its_share(weights: list[float], choices: int) -> None:
    turns, counts, total = WeightedTurns(weights), [0] * len(weights), sum(weights)
    for chosen in range(1, choices + 1):
        counts[turns.choose()] += 1
        off = [abs(count - weight / total * chosen) for count, weight in zip(counts, weights, strict=True)]
        assert max(off) < 1 + 1e-6
        assert all(weight or not count for weight, count in zip(weights, counts, strict=True))


@pytest.mark.parametrize("weights", [(95, 5), (99, 1), (1, 1, 1), (70, 20, 9, 1), (50.5, 49.5)])
def test_weights_hold_over_ten_thousand_requests(weights: tuple[float, ...]) -> None:
    turns = WeightedTurns(weights)
    counts = Counter(turns.choose() for _ in range(10_000))
    for index, weight in enumerate(weights):
        assert abs(counts[index] - 10_000 * weight / sum(weights)) <= 2


@pytest.mark.parametrize("weights", [(95, 5), (50, 50), (70, 20, 10)])
def test_keys_are_shared_by_weight(weights: tuple[float, ...]) -> None:
    counts = Counter(map(StickyHash(arms(*weights)).choose, KEYS))
    for index, weight in enumerate(weights):
        assert abs(counts[index] / 100 - 100 * weight / sum(weights)) <= 2


def test_a_changed_weight_moves_only_keys_to_or_from_its_arm() -> None:
    before, after = StickyHash(arms(90, 5, 5)), StickyHash(arms(90, 5, 25))
    moved = [(before.choose(key), after.choose(key)) for key in KEYS if before.choose(key) != after.choose(key)]
    assert moved
    assert {to for _, to in moved} == {2}
    # From 5 of 100 to 25 of 120: no more keys than that makes necessary, but for chance.
    assert abs(len(moved) / 10_000 - (25 / 120 - 5 / 100)) < 0.02


def test_an_arm_that_goes_gives_away_its_own_keys_alone() -> None:
    before, after = StickyHash(arms(60, 30, 10)), StickyHash(arms(60, 30, 0))
    assert all(after.choose(key) == before.choose(key) for key in KEYS if before.choose(key) != 2)


def test_a_rule_decides_before_the_sticky_key_and_that_before_the_weights() -> None:
    to = RouteTarget("m", 2)
    rules = (
        RouteRule(to=to, header="X-Beta", equals="yes"),
        RouteRule(to=to, header="x-any"),
        RouteRule(to=to, tenant="acme"),
    )
    selector = ArmSelector(Route(arms(1, 0), StickyKey(header="X-User"), rules))
    assert selector.choose([(b"x-beta", b"yes")], "").version == "2"
    assert selector.choose([(b"x-beta", b"no"), (b"x-user", b"u")], "").version == "1"
    assert selector.choose([("x-any", "")], "").version == "2"
    assert selector.choose([], "acme").version == "2"
    assert selector.choose([], "other").version == "1"


def test_a_key_stays_whichever_requests_come_between() -> None:
    selector = ArmSelector(Route(arms(50, 50), StickyKey(header="x-user")))
    headers = {user: [(b"x-user", user.encode())] for user in ("ann", "bob", "cid", "dot")}
    first = {user: selector.choose(given, "") for user, given in headers.items()}
    for _ in range(5):
        selector.choose([], "")
        assert {user: selector.choose(given, "") for user, given in headers.items()} == first
    assert len(Counter(selector.choose([], "").version for _ in range(4))) == 2  # those without a key take turns
    by_tenant = ArmSelector(Route(arms(50, 50), StickyKey(tenant=True)))
    assert len({by_tenant.choose([], "acme") for _ in range(9)}) == 1


BODY = {"user": "a", "metadata": {"x": 3, "y": None, "z": {"deep": True}}, "stop": ["a"], "share": 0.5}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("user", "a"),
        ("metadata.x", "3"),
        ("metadata.z.deep", "true"),
        ("share", "0.5"),
        ("metadata.y", None),
        ("metadata.z", None),
        ("stop", None),
        ("user.a", None),
        ("metadata.x.y", None),
        ("none", None),
    ],
)
def test_a_field_of_a_body_is_found_by_its_path(path: str, value: str | None) -> None:
    assert body_fields(BODY)(FieldPath.parse(path)) == value


def test_a_field_of_v2_is_a_parameter_or_an_input_of_one_element() -> None:
    inputs = {"text": Tensor.from_values("text", "BYTES", [b"hi"]), "many": Tensor.from_values("many", "INT32", [1, 2])}
    fields = infer_fields(InferRequest(inputs=inputs, parameters={"user": "a", "b.c": False, "n": 7}))
    expected = {"user": "a", "parameters.user": "a", "b.c": "false", "n": "7", "text": "hi", "many": None, "x": None}
    assert {path: fields(FieldPath.parse(path)) for path in expected} == expected


def test_rules_and_keys_go_by_fields() -> None:
    to = RouteTarget("m", 2)
    rules = RouteRule(to=to, field="tier", equals="gold"), RouteRule(to=to, field="beta")
    selector = ArmSelector(Route(arms(1, 0), StickyKey(field="user"), rules))
    for body, version in (({"tier": "gold"}, "2"), ({"tier": "iron"}, "1"), ({"beta": False}, "2"), ({}, "1")):
        assert selector.choose((), "", body_fields(body)).version == version
    sticky = ArmSelector(Route(arms(1, 1), StickyKey(field="user")))
    keys = StickyHash(arms(1, 1))
    for user in ("a", "b", "c", "d"):
        expected = str(1 + keys.choose(user.encode()))
        assert {sticky.choose((), "", body_fields({"user": user})).version for _ in range(4)} == {expected}
    assert [sticky.choose((), "", body_fields({"user": "\ud800"})).version for _ in range(2)]
    assert {sticky.choose((), "", body_fields({})).version for _ in range(2)} == {"1", "2"}


@pytest.mark.parametrize("field", [".", "a.", ".a", "a..b"])
def test_a_path_with_an_empty_key_is_refused(field: str) -> None:
    with pytest.raises(ValueError, match="field must be keys with dots between them"):
        StickyKey(field=field)
    with pytest.raises(ValueError, match="field must be keys with dots between them"):
        RouteRule(to=RouteTarget("m", 2), field=field)
