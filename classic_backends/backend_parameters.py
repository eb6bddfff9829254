"""Parameters of backends: strings from configs and flags, parsed. Knows no backend's parameters."""

import logging
from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

from ..core.errors import InvalidArgument

log = logging.getLogger(__name__)

T = TypeVar("T", int, float)

_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off", ""}
_MAX_INTEGER = 2**31 - 1
"""The largest number that the libraries of backends take."""

_MAX_THREADS = 1024
"""Libraries start as many threads as they are told to."""


def read_thread_count(parameters: Mapping[str, str], name: str) -> int:
    """0 if absent. Raises as `read_integer`."""
    return read_integer(parameters, name, 0, most=_MAX_THREADS)


def read_integer(
    parameters: Mapping[str, str], name: str, default: int, least: int = 0, most: int = _MAX_INTEGER
) -> int:
    """Raises `InvalidArgument` for anything but a whole number from `least` to `most`; `field` names the parameter."""
    value = _parse(parameters, name, default, int)
    if value is None or not least <= value <= most:
        bound = f"at most {most}" if value is not None and value > most else f"at least {least}"
        message = f"parameter '{name}' must be a whole number of {bound}, got '{parameters[name]}'"
        raise InvalidArgument(message, field=name)
    return value


def read_number(parameters: Mapping[str, str], name: str, default: float = 0.0) -> float:
    """Raises `InvalidArgument` for anything but a finite number of at least 0; `field` names it."""
    value = _parse(parameters, name, default, float)
    if value is None or not 0 <= value < float("inf"):
        message = f"parameter '{name}' must be a number of at least 0, got '{parameters[name]}'"
        raise InvalidArgument(message, field=name)
    return value


def _parse(parameters: Mapping[str, str], name: str, default: T, parse: Callable[[str], T]) -> T | None:
    """None for a text that is no such number."""
    try:
        return parse(parameters[name]) if name in parameters else default
    except ValueError:
        return None


def read_flag(parameters: Mapping[str, str], name: str, default: bool) -> bool:
    """Raises `InvalidArgument` for anything but 0, 1, true or false; `field` names the parameter."""
    text = parameters.get(name)
    if text is None:
        return default
    if text.lower() not in _TRUE | _FALSE:
        raise InvalidArgument(f"parameter '{name}' must be 0, 1, true or false, got '{text}'", field=name)
    return text.lower() in _TRUE


def read_choice(parameters: Mapping[str, str], name: str, choices: Collection[str], default: str) -> str:
    """Raises `InvalidArgument` for none of the `choices`; `field` names the parameter."""
    text = parameters.get(name, default)
    if text not in choices:
        known = ", ".join(f"'{each}'" for each in choices)
        raise InvalidArgument(f"parameter '{name}' must be one of {known}, got '{text}'", field=name)
    return text


def warn_unknown_parameters(model: str, parameters: Mapping[str, str], known: Collection[str]) -> None:
    """Log the parameters that a backend does not know: a config may carry them for other programs."""
    unknown = sorted(set(parameters) - set(known))
    if unknown:
        named = ", ".join(unknown)
        log.warning("model '%s': parameters that its backend does not know have no effect: %s", model, named)
