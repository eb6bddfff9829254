"""The one rule for members of a JSON body that this server does not know, whichever protocol of `/v1` or vLLM it is of.

A member is served, known to change nothing, or refused by its name. Any other is ignored, and the header
`x-charonia-warning` names it. A misspelled name is refused: ignoring it would change what was asked for. An unknown
member that is null asks for nothing.
"""

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from ...core.errors import InvalidArgument, did_you_mean

_MAX_NAMES = 64
"""Different names that a body may have beyond those known: each is compared with all that are."""
_MAX_PLACES = 24
"""Places that a warning tells of."""

_OTHERS = frozenset(
    (
        "asr_options",
        "mirostat_lr",
        "models",
        "parse_tool_calls",
        "reasoning_format",
        "search_options",
        "thinking_budget",
        "thinking_budget_tokens",
    )
)
"""Names of other services' own fields: where they are not served they are ignored, though they look like ours."""

_NOTHING: Mapping[str, Any] = MappingProxyType({})


class Shape(NamedTuple):
    """The members that an object may have. `known`: whatever the endpoint itself looks at, to serve or to refuse it.
    `inner`: of members that are objects, or lists of some, what these may have. `notes`: what is told of a member that
    is served otherwise than its name promises."""

    known: frozenset[str]
    inner: Mapping[str, "Shape | ShapeByType"] = _NOTHING
    notes: Mapping[str, str] = _NOTHING


class ShapeByType(NamedTuple):
    """The shape of an object by its `type`. Without one it is of the first type of those `implied` that is the name of
    a member, or of the `default` one. The endpoint refuses other types."""

    shapes: Mapping[str, Shape]
    default: str = ""
    implied: tuple[str, ...] = ()

    def type_of(self, members: Mapping[str, Any]) -> Any:
        kind = members.get("type")
        if kind is not None:
            return kind
        return next((name for name in self.implied if members.get(name) is not None), self.default)

    def of(self, members: Mapping[str, Any]) -> Shape | None:
        kind = self.type_of(members)
        return self.shapes.get(kind) if isinstance(kind, str) else None


def shape_of(kind: type[msgspec.Struct], inner: Mapping[str, "Shape | ShapeByType"] = _NOTHING) -> Shape:
    """The shape of an object that becomes a struct."""
    return Shape(frozenset(("type", *kind.__struct_fields__)), inner)


class KnownMembers(NamedTuple):
    """A body without what nobody knows; `warning`: what that was, empty if there was nothing."""

    members: dict[str, Any]
    warning: str


def known_members(body: dict[str, Any], shape: Shape) -> KnownMembers:
    """Leaves `body` as it is. Raises `InvalidArgument` if it has too many unknown names."""
    if _is_known(body, shape):
        return KnownMembers(body, "")
    search = _Search()
    known = search.known(body, shape, "")
    return KnownMembers(known, search.warning)


def _is_known(members: dict[str, Any], shape: Shape) -> bool:
    """Whether nothing in it is unknown, nor to be noted: so it is nearly always, and that is to cost little."""
    if not shape.known.issuperset(members) or not shape.notes.keys().isdisjoint(members):
        return False
    for key, inner in shape.inner.items():
        value = members.get(key)
        if value.__class__ is list:
            for item in value:
                if item.__class__ is dict and not _is_known_by_type(item, inner):
                    return False
        elif value.__class__ is dict and not _is_known_by_type(value, inner):
            return False
    return True


def _is_known_by_type(members: dict[str, Any], shape: Shape | ShapeByType) -> bool:
    if isinstance(shape, ShapeByType):
        chosen = shape.of(members)
        return chosen is None or _is_known(members, chosen)
    return _is_known(members, shape)


class _Search:
    """One walk through a body: `places` of what was taken out, `notes` on what was found."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._places: list[str] = []
        self._notes: list[str] = []

    @property
    def warning(self) -> str:
        places = self._places[:_MAX_PLACES]
        more = len(self._places) - len(places)
        ignored = [f"ignored: {', '.join(places)}{f' and {more} more' if more else ''}"] if places else []
        return "; ".join((*ignored, *self._notes))

    def known(self, members: dict[str, Any], shape: Shape, where: str) -> dict[str, Any]:
        kept = members
        if unknown := members.keys() - shape.known:
            nothing = {key for key in unknown if members[key] is None}
            ignored = nothing | {key for key in unknown - nothing if not self._misspelled(key, shape.known)}
            self._places += [f"{where}{key}" for key in members if key in ignored - nothing]
            kept = {key: value for key, value in members.items() if key not in ignored}
        for key, note in shape.notes.items():
            if members.get(key) is not None:
                self._notes.append(f"{where}{key}: {note}")
        for key, inner in shape.inner.items():
            value = members.get(key)
            if isinstance(value, dict | list) and (known := self._inside(value, inner, f"{where}{key}")) is not value:
                kept = {**kept, key: known}
        return kept

    def _inside(self, value: Any, shape: Shape | ShapeByType, where: str) -> Any:
        """The value without what is unknown in it; the same object where there is nothing."""
        if isinstance(value, dict):
            chosen = shape.of(value) if isinstance(shape, ShapeByType) else shape
            return value if chosen is None else self.known(value, chosen, f"{where}.")
        if not isinstance(value, list):
            return value
        inside = [
            self._inside(item, shape, f"{where}[{index}]") if isinstance(item, dict) else item
            for index, item in enumerate(value)
        ]
        return value if all(new is old for new, old in zip(inside, value, strict=True)) else inside

    def _misspelled(self, name: str, known: frozenset[str]) -> bool:
        if name in _OTHERS:
            return False
        self._names.add(name)
        if len(self._names) > _MAX_NAMES:
            raise InvalidArgument(f"the body has more than {_MAX_NAMES} different fields that are not known")
        return _resembles(name, known)


@lru_cache(1024)
def _resembles(name: str, known: frozenset[str]) -> bool:
    return bool(did_you_mean(name, known))
