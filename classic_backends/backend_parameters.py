"""Parameters of backends: strings from configs and flags, read as what they mean.

Knows the forms of values, and of no backend which parameters it has.
"""

import logging
import math
from collections.abc import Collection, Mapping

from ..core.errors import InvalidArgument

log = logging.getLogger(__name__)

_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off", ""}
_MOST = 2**31 - 1
"""What the libraries of backends take for a number."""

_MOST_THREADS = 1024
"""Libraries start all that they are told to."""


def read_thread_count(parameters: Mapping[str, str], name: str) -> int:
    """0 where nothing is said. Raises as `integer`."""
    return read_integer(parameters, name, 0, most=_MOST_THREADS)


def read_integer(parameters: Mapping[str, str], name: str, default: int, least: int = 0, most: int = _MOST) -> int:
    """Raises `InvalidArgument` for anything but a whole number from `least` to `most`; `field` names the parameter."""
    text = parameters.get(name)
    if text is None:
        return default
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if not least <= value <= most:
        bound = f"at least {least}" if value < least else f"at most {most}"
        message = f"parameter '{name}' must be a whole number of {bound}, got '{text}'"
        raise InvalidArgument(message, field=name)
    return value


def read_number(parameters: Mapping[str, str], name: str, default: float, least: float = 0) -> float:
    """Raises `InvalidArgument` for anything but a finite number of at least `least`; `field` names the parameter."""
    text = parameters.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value < math.inf:
        message = f"parameter '{name}' must be a number of at least {least:g}, got '{text}'"
        raise InvalidArgument(message, field=name)
    return value


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
    """Configs may carry parameters for whoever reads them, so those that a backend does not know are only said."""
    unknown = sorted(set(parameters) - set(known))
    if unknown:
        named = ", ".join(unknown)
        log.warning("model '%s': parameters that its backend does not know have no effect: %s", model, named)
