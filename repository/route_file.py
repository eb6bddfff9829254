"""`routes.yaml` at the root of a model repository."""

from collections.abc import Container
from pathlib import Path

import msgspec

from ..core.errors import InvalidArgument
from ..core.extensions import describe_absent
from ..core.regular_files import read_text
from ..routing.route import OBSERVED_FIELDS, Route
from .config_io import parse_yaml

ROUTES_FILE = "routes.yaml"

_MAX_NAME_LENGTH = 256
"""Characters of a route's name, which stands in metrics and logs."""


class _RouteFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    routes: dict[str, Route]


def read_route_file(file: Path, place: str) -> dict[str, Route]:
    """The routes of a file by their names; none if there is no file. `place`: what messages call it. Raises
    `InvalidArgument`, with that and where in it."""
    try:
        text = read_text(file)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, InvalidArgument) as error:
        raise InvalidArgument(f"cannot read {place}: {error}") from None
    try:
        routes = msgspec.convert(parse_yaml(text, place), _RouteFile).routes
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"{place}: {error}") from None
    return routes


def check_route(name: str, route: Route, routes: Container[str], models: Container[str]) -> None:
    """Raises `InvalidArgument` for a name that a model has, or that is none, and for arms or a shadow that
    are no models."""
    if not 0 < len(name) <= _MAX_NAME_LENGTH or not name.isprintable():
        message = f"a route's name must be 1 to {_MAX_NAME_LENGTH} printable characters, got {name[:64]!r}"
        raise InvalidArgument(message, field="name")
    if name in models:
        raise InvalidArgument(f"route '{name}': a model has that name", field="name")
    shadow = [] if route.shadow is None else [("shadow", route.shadow)]
    for kind, target in (*(("arms", arm) for arm in route.arms), *shadow):
        what = f"its {kind.removesuffix('s')} '{target.label}'"
        if target.model == name or target.model in routes:
            raise InvalidArgument(f"route '{name}': {what} is a route", field=kind)
        if target.model not in models:
            raise InvalidArgument(f"route '{name}': no model repository has a model '{target.model}'", field=kind)


def check_observed(name: str, route: Route, served_fields: Container[str]) -> None:
    """Raises `InvalidArgument` for a field that observers alone serve, and that is none of those that some serve."""
    for field in OBSERVED_FIELDS:
        if getattr(route, field) is not None and field not in served_fields:
            absent = describe_absent("charonia.request_observers")
            raise InvalidArgument(f"route '{name}': no extension serves its '{field}'{absent}", field=field)
