"""Parses settings given by name, as config.pbtxt and the command line have them, into a dataclass. Knows no setting."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar, get_args

import msgspec

from ..core.errors import InvalidArgument
from ..core.suggestion import did_you_mean
from ..core.validation_errors import describe_validation_error

T = TypeVar("T")


def parse_settings(parameters: Mapping[str, Any], kind: type[T]) -> T:
    """An instance of the dataclass `kind`, whose fields are the settings; values may be text.

    Raises:
        InvalidArgument: an unknown name, or a value of the wrong type or out of range; it names the parameter.
    """
    types = {field.name: field.type for field in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: _value(name, text, types) for name, text in parameters.items()})


def _value(name: str, text: Any, types: Mapping[str, Any]) -> Any:
    if name not in types:
        known = ", ".join(types)
        raise InvalidArgument(f"unknown parameter '{name}'; known are {known}{did_you_mean(name, types)}", field=name)
    try:
        return msgspec.convert(text, types[name], strict=False)
    except msgspec.ValidationError as error:
        reason = _choices(types[name]) or describe_validation_error(error).reason
        raise InvalidArgument(f"parameter '{name}' {reason}, got {text!r}", field=name) from None


def _choices(expected: Any) -> str:
    choices = [choice for kind in get_args(expected) for choice in get_args(kind) if isinstance(choice, str)]
    return f"must be one of {', '.join(choices)}" if choices else ""
