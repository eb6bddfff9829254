"""Which arm of a route serves a request."""

import math
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import TypeAlias

from ..core.request_context import Headers
from .route import Route, RouteArm, RouteRule

_Matcher: TypeAlias = Callable[[Headers, str], bool]

_HASHES = 2.0**64


class WeightedTurns:
    """Chooses among weights so that after every choice the count of each is less than 1 from its share of all so far.

    R. Tijdeman, "The chairman assignment problem", Discrete Mathematics 32 (1980): of those that are far enough behind
    their share, the one that would first be too far behind.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        total = math.fsum(weights)
        self._shares = [weight / total for weight in weights]
        self._counts = [0] * len(weights)
        self._chosen = 0
        competing = sum(weight > 0 for weight in weights)
        self._slack = 1 / (2 * competing - 2) if competing > 1 else 0.0

    def choose(self) -> int:
        """The index of the weight whose turn it is."""
        self._chosen += 1
        best, deadline = 0, math.inf
        for index, share in enumerate(self._shares):
            if share:
                behind = share * self._chosen - self._counts[index]
                due = (1 - self._slack - behind) / share
                if due < deadline and behind >= self._slack - 1e-9:
                    best, deadline = index, due
        self._counts[best] += 1
        return best


class StickyHash:
    """Gives each key an arm, by weights: weighted rendezvous hashing (Schindelhauer and Schomaker, SPAA 2005). If a
    weight changes, keys move to that arm or away from it, and between others none does."""

    def __init__(self, arms: Sequence[RouteArm]) -> None:
        self._arms = [
            (index, arm.weight, blake2b(arm.label.encode(), digest_size=16).digest())
            for index, arm in enumerate(arms)
            if arm.weight
        ]

    def choose(self, key: bytes) -> int:
        """The index of the arm that has the key."""
        best, least = 0, math.inf
        for index, weight, label in self._arms:
            hashed = int.from_bytes(blake2b(key, digest_size=8, key=label).digest())
            cost = -math.log((hashed + 1) / _HASHES) / weight
            if cost < least:
                best, least = index, cost
        return best


def header_value(headers: Headers, names: tuple[bytes, str]) -> bytes | None:
    """The first header of a name, which is given as `header_names` has it."""
    for given, value in headers:
        if given in names:
            return value.encode() if isinstance(value, str) else value
    return None


def header_names(name: str) -> tuple[bytes, str]:
    """How a header's name may stand in `Headers`."""
    return name.lower().encode(), name.lower()


class ArmSelector:
    """Chooses the arms of one route, in the event loop."""

    def __init__(self, route: Route) -> None:
        self._arms = route.arms
        self._turns = WeightedTurns([arm.weight for arm in route.arms])
        self._hash = StickyHash(route.arms)
        self._sticky = route.sticky
        self._sticky_header = header_names(route.sticky.header) if route.sticky and route.sticky.header else None
        targets = {(arm.model, arm.version): arm for arm in route.arms}
        self._rules = [(_matcher(rule), targets[rule.to.model, rule.to.version]) for rule in route.rules]

    def choose(self, headers: Headers, tenant: str) -> RouteArm:
        for matches, arm in self._rules:
            if matches(headers, tenant):
                return arm
        key = None if self._sticky is None else self._key(headers, tenant)
        return self._arms[self._hash.choose(key) if key else self._turns.choose()]

    def _key(self, headers: Headers, tenant: str) -> bytes | None:
        return header_value(headers, self._sticky_header) if self._sticky_header else tenant.encode()


def _matcher(rule: RouteRule) -> _Matcher:
    if rule.tenant:
        return lambda _, tenant: tenant == rule.tenant
    names, equals = header_names(rule.header), None if rule.equals is None else rule.equals.encode()

    def matches(headers: Headers, _: str) -> bool:
        value = header_value(headers, names)
        return value is not None and equals in (None, value)

    return matches
