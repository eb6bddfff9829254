"""`routes.yaml` at the root of a model repository."""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from ..core.errors import InvalidArgument
from ..routing.route import Route
from .config_io import parse_yaml

ROUTES_FILE = "routes.yaml"


class _RouteFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    routes: dict[str, Route]


def read_route_file(file: Path) -> dict[str, Route]:
    """The routes of a file by their names; none if there is no file. Raises `InvalidArgument`, with file and place."""
    try:
        text = file.read_text()
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"cannot read {file}: {error}") from None
    try:
        routes = msgspec.convert(parse_yaml(text, str(file)), _RouteFile).routes
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"{file}: {error}") from None
    if "" in routes:
        raise InvalidArgument(f"{file}: a route must have a name")
    return routes


def check_names(routes: Mapping[str, Route], models: frozenset[str]) -> None:
    """Raises `InvalidArgument` for a route that has a model's name, or names a model that there is not."""
    for name, route in routes.items():
        if name in models:
            raise InvalidArgument(f"route '{name}': a model has that name")
        for arm in route.arms:
            if arm.model in routes:
                raise InvalidArgument(f"route '{name}': its arm '{arm.label}' is a route")
            if arm.model not in models:
                raise InvalidArgument(f"route '{name}': no model repository has a model '{arm.model}'")
