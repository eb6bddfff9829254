"""What the headers of a gateway in front say of a request: the names of the Gateway API's endpoint picker and of llm-d.

Each is believed only where a flag names it: whoever reaches the server can send any.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from ..core.errors import InvalidArgument
from ..core.request_context import GatewayHints, RequestContext
from .api_keys import Tenant

FAIRNESS_ID = "x-gateway-inference-fairness-id"
OBJECTIVE = "x-gateway-inference-objective"
TTFT_TARGET = "x-slo-ttft-ms"
ITL_TARGET = "x-slo-tpot-ms"
SESSION = "x-session-id"
GATEWAY_HEADERS = (FAIRNESS_ID, OBJECTIVE, TTFT_TARGET, ITL_TARGET, SESSION)

TRUST_FLAG = "--trust-gateway-headers"
OBJECTIVES_FLAG = "--gateway-objectives"

_LONGEST_NAME = 256
_LONGEST_TARGET = 3_600_000.0
"""Milliseconds."""

_MOST_TENANTS = 1024
"""That headers bring: each has series and a place in the queue for the server's life."""

OTHER_TENANTS = "others"
"""The tenant of all that are named when there are so many."""


@dataclass(frozen=True, slots=True)
class GatewayHeaders:
    """The headers that are `believed`, and the priority class of each objective."""

    believed: frozenset[str] = frozenset()
    objectives: Mapping[str, int] = field(default_factory=dict)
    _tenants: set[str] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.believed)

    def note_in(self, context: RequestContext, headers: Iterable[tuple[str, str]], has_key: bool) -> None:
        """Note in a request's context what its headers say, whose names are in lower case. With `has_key` its tenant is
        the key's. Raises `InvalidArgument` for a value that means nothing."""
        values: dict[str, str] = {}
        for name, value in headers:
            if name in self.believed:
                if name in values:
                    raise InvalidArgument(f"several headers {name}: send one", field=name)
                values[name] = value.strip()
        if not values:
            return
        if FAIRNESS_ID in values:
            name = _name_of(values, FAIRNESS_ID)
            if not has_key:  # else the name would take one of the places that there are for tenants
                context.tenant, context.tenant_weight = self._tenant(name)
        context.hints = GatewayHints(
            self._priority(values[OBJECTIVE]) if OBJECTIVE in values else None,
            _target(values, TTFT_TARGET),
            _target(values, ITL_TARGET),
            _name_of(values, SESSION) if SESSION in values else "",
        )

    def _tenant(self, name: str) -> Tenant:
        if name not in self._tenants:
            if len(self._tenants) >= _MOST_TENANTS:
                return Tenant(OTHER_TENANTS)
            self._tenants.add(name)
        return Tenant(name)

    def _priority(self, objective: str) -> int:
        if objective not in self.objectives:
            known = ", ".join(self.objectives)
            raise InvalidArgument(f"{OBJECTIVE}: unknown objective {objective!r}; known are {known}", field=OBJECTIVE)
        return self.objectives[objective]


def _name_of(values: Mapping[str, str], header: str) -> str:
    name = values[header]
    if not 0 < len(name) <= _LONGEST_NAME or not (name.isascii() and name.isprintable()):
        message = f"{header} must have 1 to {_LONGEST_NAME} printable ASCII characters"
        raise InvalidArgument(message, field=header)
    return name


def _target(values: Mapping[str, str], header: str) -> float:
    """Milliseconds; 0 where the header is not there."""
    if header not in values:
        return 0.0
    try:
        target = float(values[header])
    except ValueError:
        target = inf
    if not 0 < target <= _LONGEST_TARGET:
        message = f"{header} must be a number of milliseconds above 0 and at most {_LONGEST_TARGET:.0f}"
        raise InvalidArgument(f"{message}, got {values[header][:_LONGEST_NAME]!r}", field=header)
    return target


def parse_gateway_headers(trusted: Sequence[str], objectives: Sequence[str]) -> GatewayHeaders:
    """What the two flags ask for, each word of which may hold several with commas between.

    Raises:
        InvalidArgument: a header is none of a gateway's, an objective has no class, or one flag lacks the other.
    """
    names = [name.lower() for name in _words(trusted)]
    classes = dict(_objective(word) for word in _words(objectives))
    every = {name for name in GATEWAY_HEADERS if name != OBJECTIVE or classes}
    believed = every if "all" in names else {*names}
    for name in names:
        if name not in (*GATEWAY_HEADERS, "all"):
            known = ", ".join(GATEWAY_HEADERS)
            raise InvalidArgument(f"{TRUST_FLAG}: unknown header '{name}'; known are {known}, and all")
    if OBJECTIVE in believed and not classes:
        raise InvalidArgument(f"{TRUST_FLAG} {OBJECTIVE} needs {OBJECTIVES_FLAG}, as in interactive=0,batch=5")
    if classes and OBJECTIVE not in believed:
        raise InvalidArgument(f"{OBJECTIVES_FLAG} needs {TRUST_FLAG} {OBJECTIVE}")
    return GatewayHeaders(frozenset(believed), classes)


def _words(flags: Sequence[str]) -> list[str]:
    return [word.strip() for text in flags for word in text.split(",") if word.strip()]


def _objective(word: str) -> tuple[str, int]:
    name, equals, number = word.rpartition("=")
    if not (name and equals and number.isdecimal() and len(number) < 6):
        raise InvalidArgument(f"{OBJECTIVES_FLAG} must be NAME=CLASS, of which 0 is the most urgent, got '{word}'")
    return name, int(number)
