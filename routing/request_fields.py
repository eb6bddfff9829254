"""The fields of a request that routes may go by, as text.

A field is a path into the JSON of a body, as in `user` or `metadata.tenant`. In v2 it is a parameter, with
`parameters.` in front or without, or an input of one element.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

from ..core.request import InferRequest

_PARAMETERS = "parameters."


class FieldPath(NamedTuple):
    """A path by its `keys`, from the outermost; `parameter`: what it is called among v2's parameters and inputs."""

    keys: tuple[str, ...]
    parameter: str

    @classmethod
    def parse(cls, text: str) -> "FieldPath":
        """Raises `ValueError` for a path with an empty key."""
        keys = tuple(text.split("."))
        if not all(keys):
            raise ValueError(f"field must be keys with dots between them, got '{text}'")
        return cls(keys, text.removeprefix(_PARAMETERS))


FieldFinder: TypeAlias = Callable[[FieldPath], str | None]
"""The text of a request's field; None if it is not there, or no text, number or boolean."""


def no_field(path: FieldPath) -> None:
    """The `FieldFinder` of requests without fields."""
    return


def body_fields(body: Mapping[str, Any]) -> FieldFinder:
    def find(path: FieldPath) -> str | None:
        value: Any = body
        for key in path.keys:
            value = value.get(key) if isinstance(value, dict) else None
        return _as_text(value)

    return find


def infer_fields(request: InferRequest) -> FieldFinder:
    def find(path: FieldPath) -> str | None:
        name = path.parameter
        if name in request.parameters:
            return _as_text(request.parameters[name])
        tensor = request.inputs.get(name)
        return None if tensor is None or tensor.data.size != 1 else _as_text(tensor.scalar)

    return find


def _as_text(value: Any) -> str | None:
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return str(value) if isinstance(value, int | float) else None
