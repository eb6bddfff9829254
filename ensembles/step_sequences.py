"""The sequences of an ensemble's steps: the client's, until a step's response says another for what it has sent.

Source: the handling of a composing model's response parameters in
https://github.com/triton-inference-server/core/blob/main/src/ensemble_scheduler/ensemble_scheduler.cc.
"""

from collections.abc import Mapping
from typing import TypeAlias

from ..core.errors import InvalidArgument
from ..core.request import ParameterValue

SequenceParameters: TypeAlias = Mapping[str, ParameterValue]
"""`sequence_id`, `sequence_start` and `sequence_end`."""

_NAMES = frozenset({"sequence_id", "sequence_start", "sequence_end"})


def read_sequence(
    model: str, told: Mapping[str, ParameterValue], before: Mapping[str, ParameterValue]
) -> SequenceParameters | None:
    """The sequence that the parameters of a model's response say: the id `before` it where they name none, and a flag
    that they do not name is not set. None if they say nothing of it. Raises `InvalidArgument` for values of another
    type."""
    if _NAMES.isdisjoint(told):
        return None
    sequence_id = told.get("sequence_id", before.get("sequence_id", 0))
    start = told.get("sequence_start", False)
    end = told.get("sequence_end", False)
    for name, value, types, kind in (
        ("sequence_id", sequence_id, (int, str), "an integer or a string"),
        ("sequence_start", start, (bool,), "true or false"),
        ("sequence_end", end, (bool,), "true or false"),
    ):
        if type(value) not in types:
            raise InvalidArgument(f"expected parameter '{name}' of model '{model}' to be {kind}, got {value!r}")
    return {"sequence_id": sequence_id, "sequence_start": start, "sequence_end": end}


def with_sequence(parameters: Mapping[str, ParameterValue], sequence: SequenceParameters) -> dict[str, ParameterValue]:
    """The parameters of a request, of this sequence alone."""
    others = {name: value for name, value in parameters.items() if name not in _NAMES}
    return others | {name: value for name, value in sequence.items() if value}
