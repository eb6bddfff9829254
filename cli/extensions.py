"""What installed packages add to the server: routes, with their flags and what they plan by them, and observers."""

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field, fields, make_dataclass
from functools import cache
from typing import Annotated, Any, TypeVar

from cyclopts import Parameter

from ..core.extension_contracts import NoOptions, ObserverExtension, RoutesExtension, RoutesPlan, ServerFacts
from ..core.extensions import installed_extensions

log = logging.getLogger(__name__)

ExtensionT = TypeVar("ExtensionT")


@cache
def route_extensions() -> Mapping[str, RoutesExtension[Any]]:
    """The extensions that can be loaded, by their names, which are those of the fields of `extension_options`."""
    return {re.sub(r"\W", "_", name): extension for name, extension in _loaded("charonia.routes", RoutesExtension)}


@cache
def observer_extensions() -> Sequence[ObserverExtension]:
    return [extension for _, extension in _loaded("charonia.request_observers", ObserverExtension)]


def observed_fields() -> frozenset[str]:
    """The fields of routes that the installed observers serve."""
    return frozenset().union(*(extension.route_fields for extension in observer_extensions()))


def _loaded(group: str, kind: type[ExtensionT]) -> Iterator[tuple[str, ExtensionT]]:
    """The extensions of a group; the log tells of those that cannot be loaded, or are something else."""
    for name, entry in installed_extensions(group).items():
        try:
            extension = entry.load()
            if not isinstance(extension, kind):
                raise TypeError(f"{entry.value} is no {kind.__name__}")
        except Exception as error:
            log.warning("the extension '%s' of %s is left out: %s", name, group, error)
        else:
            yield name, extension


def extension_options(heading: Callable[[str], Parameter]) -> Any:
    """A dataclass of the flags of all extensions: each field has those of one, under its heading."""
    extensions = [
        (name, Annotated[extension.options, heading(extension.heading)], field(default=extension.options()))
        for name, extension in route_extensions().items()
        if extension.options is not NoOptions
    ]
    here = {"__module__": __name__}  # cyclopts takes a class of the standard library for one without fields
    return make_dataclass("ExtensionOptions", extensions, namespace=here, frozen=True, slots=True, kw_only=True)


def spread(options: Any) -> Parameter:
    """The parameter whose flags are those of a dataclass. cyclopts would show one without fields as a flag."""
    return Parameter("*") if fields(options) else Parameter(parse=False)


def plan_extensions(options: Any, server: ServerFacts) -> list[RoutesPlan]:
    """What each extension will serve. `options`: of `extension_options`. Raises `CharoniaError` for flags that mean
    nothing."""
    return [
        extension.plan(getattr(options, name, NoOptions()), server) for name, extension in route_extensions().items()
    ]
