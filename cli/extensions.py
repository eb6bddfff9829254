"""What installed packages add to the server's routes: their flags, and what they plan by them."""

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import field, make_dataclass
from functools import cache
from typing import Annotated, Any

from cyclopts import Parameter

from ..core.extension_contracts import NoOptions, RoutesExtension, RoutesPlan, ServerFacts
from ..core.extensions import installed_extensions

log = logging.getLogger(__name__)

_GROUP = "charonia.routes"


@cache
def route_extensions() -> Mapping[str, RoutesExtension[Any]]:
    """Those that can be loaded, by their names, which are those of the fields of `extension_options`."""
    extensions = {}
    for name, entry in installed_extensions(_GROUP).items():
        try:
            extension = entry.load()
            if not isinstance(extension, RoutesExtension):
                raise TypeError(f"{entry.value} is no RoutesExtension")
        except Exception as error:
            log.warning("the extension '%s' of the server's routes is left out: %s", name, error)
            continue
        extensions[re.sub(r"\W", "_", name)] = extension
    return extensions


def extension_options(heading: Callable[[str], Parameter]) -> Any:
    """A dataclass of the flags of all extensions: each field has those of one, under its heading."""
    fields = [
        (name, Annotated[extension.options, heading(extension.heading)], field(default=extension.options()))
        for name, extension in route_extensions().items()
        if extension.options is not NoOptions
    ]
    here = {"__module__": __name__}  # cyclopts takes a class of the standard library for one without fields
    return make_dataclass("ExtensionOptions", fields, namespace=here, frozen=True, slots=True, kw_only=True)


def plan_extensions(options: Any, server: ServerFacts) -> list[RoutesPlan]:
    """What each extension will serve. `options`: of `extension_options`. Raises `CharoniaError` for flags that mean
    nothing."""
    return [
        extension.plan(getattr(options, name, NoOptions()), server) for name, extension in route_extensions().items()
    ]
