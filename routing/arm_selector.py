"""Which arm of a route serves a request."""

import math
from collections.abc import Callable, Sequence
from hashlib import blake2b
from math import log
from typing import NamedTuple, TypeAlias

from ..core.request_context import Headers
from .request_fields import FieldFinder, FieldPath, no_field
from .route import Route, RouteArm, RouteRule, RouteTarget

_Matcher: TypeAlias = Callable[[Headers, str, FieldFinder], bool]

_HASHES = 2.0**64
_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
"""2**64 over the golden ratio, odd."""


class WeightedTurns:
    """Chooses among weights so that the count of each is less than 1 from its share of all choices so far.

    Of those that are far enough behind their share, the one is chosen that would first be too far behind (R. Tijdeman,
    "The chairman assignment problem", Discrete Mathematics 32, 1980).
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
    """Gives each key an arm, by weights: weighted rendezvous hashing (Schindelhauer and Schomaker, SPAA 2005).

    If a weight changes, keys move to that arm or away from it, and none between others. A key is hashed once, over 64
    bits; each arm mixes that with its own hash by a product (Knuth, The Art of Computer Programming 3, section 6.4).
    """

    def __init__(self, arms: Sequence[RouteArm]) -> None:
        self._arms = []
        for index, arm in enumerate(arms):
            if arm.weight:
                label = blake2b(arm.label.encode(), digest_size=8).digest()
                self._arms.append((index, -1 / arm.weight, int.from_bytes(label)))

    def choose(self, key: bytes) -> int:
        hashed = int.from_bytes(blake2b(key, digest_size=8).digest())
        best = 0
        least = math.inf
        for index, scale, label in self._arms:
            cost = scale * log(((((hashed ^ label) * _GOLDEN) & _MASK) + 1) / _HASHES)
            if cost < least:
                best, least = index, cost
        return best


def header_value(headers: Headers, names: tuple[bytes, str]) -> bytes | None:
    """The first header of a name, which is given as `header_names` has it."""
    for name, value in headers:
        if name in names:
            return value.encode() if isinstance(value, str) else value
    return None


def header_names(name: str) -> tuple[bytes, str]:
    """The forms in which a header's name may stand in `Headers`."""
    return name.lower().encode(), name.lower()


class ArmName(NamedTuple):
    """A model, and a version of it as text, empty for the latest."""

    model: str
    version: str

    @classmethod
    def of(cls, target: RouteTarget) -> "ArmName":
        return cls(target.model, str(target.version or ""))


class ArmSelector:
    """Chooses the arms of one route, in the event loop. `reads_fields`: it asks for fields of the body; `weighted`: the
    arms that have a weight."""

    def __init__(self, route: Route) -> None:
        self._arms = [ArmName.of(arm) for arm in route.arms]
        self.weighted = [ArmName.of(arm) for arm in route.arms if arm.weight]
        self._turns = WeightedTurns([arm.weight for arm in route.arms])
        self._hash = StickyHash(route.arms)
        self._sticky = route.sticky
        self._sticky_header = header_names(route.sticky.header) if route.sticky and route.sticky.header else None
        self._sticky_field = FieldPath.parse(route.sticky.field) if route.sticky and route.sticky.field else None
        self.reads_fields = self._sticky_field is not None or any(rule.field for rule in route.rules)
        self._rules = [(_matcher(rule), ArmName.of(rule.to)) for rule in route.rules]

    def choose(self, headers: Headers, tenant: str, fields: FieldFinder = no_field) -> ArmName:
        for matches, arm in self._rules:
            if matches(headers, tenant, fields):
                return arm
        key = None if self._sticky is None else self._key(headers, tenant, fields)
        return self._arms[self._hash.choose(key) if key else self._turns.choose()]

    def _key(self, headers: Headers, tenant: str, fields: FieldFinder) -> bytes | None:
        if self._sticky_field is not None:
            return (fields(self._sticky_field) or "").encode(errors="surrogatepass")
        return header_value(headers, self._sticky_header) if self._sticky_header else tenant.encode()


def _matcher(rule: RouteRule) -> _Matcher:
    if rule.tenant:
        return lambda _, tenant, __: tenant == rule.tenant
    if rule.field:
        path, text = FieldPath.parse(rule.field), rule.equals

        def matches_field(_: Headers, __: str, fields: FieldFinder) -> bool:
            value = fields(path)
            return value is not None and text in (None, value)

        return matches_field
    names = header_names(rule.header)
    equals = None if rule.equals is None else rule.equals.encode()

    def matches_header(headers: Headers, _: str, __: FieldFinder) -> bool:
        value = header_value(headers, names)
        return value is not None and equals in (None, value)

    return matches_header
