"""The shape of a route: its arms with their weights, what keeps a client on one arm, and rules that name an arm."""

import math
from typing import Literal

import msgspec

from .request_fields import FieldPath

_MAX_ARMS, _MAX_RULES = 32, 64
"""Each is looked at for a request, in the event loop."""

_LEAST_WEIGHT, _MOST_WEIGHT = 1e-9, 1e9
"""Sums and quotients of weights between are numbers."""


OBSERVED_FIELDS = ("shadow",)
"""The fields of a route that arms have no part in: an observer of its requests serves each, where one is installed."""


class RouteTarget(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A model and a version of it; version 0 is the latest at the time of a request."""

    model: str
    version: int = 0

    def __post_init__(self) -> None:
        if not self.model:
            raise ValueError("model must not be empty")
        if self.version < 0:
            raise ValueError(f"version must be 0 (the latest) or more, got {self.version}")

    @property
    def label(self) -> str:
        return f"{self.model}:{self.version}" if self.version else self.model


class RouteArm(RouteTarget, frozen=True, forbid_unknown_fields=True, omit_defaults=False):
    """A target with its share of the requests: its weight over the sum of all."""

    weight: float = 0.0

    def __post_init__(self) -> None:
        RouteTarget.__post_init__(self)
        if self.weight and not _LEAST_WEIGHT <= self.weight <= _MOST_WEIGHT:
            raise ValueError(
                f"weight must be a finite number of at least 0, got {self.weight}: 0, or from {_LEAST_WEIGHT:g} to "
                f"{_MOST_WEIGHT:g}"
            )


class StickyKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The key that keeps a client on one arm: a header, a field of the body (`FieldPath`), or the API key's tenant."""

    header: str = ""
    tenant: bool = False
    field: str = ""

    def __post_init__(self) -> None:
        if bool(self.header) + self.tenant + bool(self.field) != 1:
            raise ValueError("sticky needs one of header, field, or tenant: true")
        if self.field:
            FieldPath.parse(self.field)

    def __str__(self) -> str:
        return "tenant" if self.tenant else f"field {self.field}" if self.field else f"header {self.header}"


class RouteRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """Requests that go to one arm whatever the weights: those of a tenant, or with a header or a field of the body
    (`FieldPath`), of one value if `equals` is given."""

    to: RouteTarget
    header: str = ""
    field: str = ""
    equals: str | None = None
    tenant: str = ""

    def __post_init__(self) -> None:
        if bool(self.header) + bool(self.tenant) + bool(self.field) != 1:
            raise ValueError("a rule needs one of header, field, or tenant")
        if self.equals is not None and self.tenant:
            raise ValueError("equals is the value of a header or a field, and the rule has none")
        if self.field:
            FieldPath.parse(self.field)

    def __str__(self) -> str:
        kinds = ("tenant", self.tenant), ("header", self.header), ("field", self.field)
        what = next(f"{kind} {name}" for kind, name in kinds if name)
        return f"{what}{'' if self.equals is None else f' {self.equals}'} to {self.to.label}"


class RouteShadow(RouteTarget, frozen=True, forbid_unknown_fields=True):
    """A model that gets copies of a share of the requests, above 0 and up to 1, and whose answers nobody gets.

    `compare`: what must be as in the arm's answer, the tokens of a text or tensors, floating ones within `tolerance` of
    their value or of 1; empty for nothing. `also`: what else is copied, or copied to.
    """

    share: float = 1.0
    compare: Literal["", "tokens", "tensors"] = ""
    tolerance: float = 0.0
    also: frozenset[Literal["sequences", "shared_memory", "python", "pipelines"]] = frozenset()

    def __post_init__(self) -> None:
        RouteTarget.__post_init__(self)
        if not 0 < self.share <= 1:
            raise ValueError(f"share must be above 0 and at most 1, got {self.share}")
        if not 0 <= self.tolerance < math.inf:
            raise ValueError(f"tolerance must be a finite number of at least 0, got {self.tolerance}")
        if self.tolerance and self.compare != "tensors":
            raise ValueError("tolerance is for compare: tensors")


class Route(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The requests for one name, divided among `arms`. The first of `rules` that holds decides; then `sticky`, for
    requests that have such a key; then weights alone. `shadow` gets copies."""

    arms: tuple[RouteArm, ...]
    sticky: StickyKey | None = None
    rules: tuple[RouteRule, ...] = ()
    shadow: RouteShadow | None = None

    def __post_init__(self) -> None:
        for what, items, most in (("arms", self.arms, _MAX_ARMS), ("rules", self.rules, _MAX_RULES)):
            if len(items) > most:
                raise ValueError(f"a route has at most {most} {what}, got {len(items)}")
        targets = [(arm.model, arm.version) for arm in self.arms]
        twice = next((arm for at, arm in enumerate(self.arms) if targets.index(targets[at]) < at), None)
        if twice is not None:
            raise ValueError(f"arm '{twice.label}' is there twice")
        if not any(arm.weight for arm in self.arms):
            raise ValueError("no arm has a weight above 0")
        for rule in self.rules:
            if (rule.to.model, rule.to.version) not in targets:
                raise ValueError(f"a rule names '{rule.to.label}', which is no arm: give it one of weight 0")

    @property
    def targets(self) -> tuple[RouteTarget, ...]:
        """The models that it names."""
        return self.arms if self.shadow is None else (*self.arms, self.shadow)

    def __str__(self) -> str:
        """The route in a line of a log."""
        arms = ", ".join(f"{arm.label} {arm.weight:g}" for arm in self.arms)
        sticky = "" if self.sticky is None else f"; sticky by {self.sticky}"
        shadow = "" if self.shadow is None else f"; shadow {self.shadow.label} {self.shadow.share:g}"
        return arms + sticky + "".join(f"; {rule}" for rule in self.rules) + shadow
