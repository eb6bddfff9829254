"""Tensors that a stateful model has beside those of its clients: controls, and the state that sequences carry on.

model-config.md section 4.4. A runtime sees them as ordinary inputs and outputs, a client not at all. Knows nothing of
requests.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...core.errors import InvalidArgument
from ...core.model import ConfigDocument, ModelConfig
from ...core.tensor import (
    MAX_CONFIG_TENSOR_BYTES,
    NUMPY_TYPES,
    Tensor,
    TensorSpec,
    is_config_tensor_size_allowed,
    zero_array,
)

_FIELD = "sequence_batching"
_FORMS = {"int32_false_true": "INT32", "fp32_false_true": "FP32", "bool_false_true": "BOOL"}
_ID_TYPES = ("UINT64", "INT64", "UINT32", "INT32", "BYTES")


class ControlKind(StrEnum):
    """What a control tells: the request is its sequence's first; the row is a request; it is the last; the id."""

    START = "CONTROL_SEQUENCE_START"
    READY = "CONTROL_SEQUENCE_READY"
    END = "CONTROL_SEQUENCE_END"
    ID = "CONTROL_SEQUENCE_CORRID"


class ControlTensor(NamedTuple):
    """One tensor of dims [1]. `values`: for false and for true; none where it tells the id."""

    name: str
    kind: ControlKind
    datatype: str
    values: tuple[Any, ...] = ()

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.name, self.datatype, (1,))


class StateTensor(NamedTuple):
    """What one request of a sequence leaves to the next: it comes out as `output` and goes in as `input`.

    `initial`: what the first request gets, the model's batch dimension of 1 in front if it has one.
    """

    input: str
    output: str
    datatype: str
    dims: tuple[int, ...]
    initial: NDArray[Any]


def read_controls(asked: ConfigDocument) -> tuple[ControlTensor, ...]:
    """Of `sequence_batching`. Raises `InvalidArgument` where one contradicts itself or another."""
    controls = tuple(_control(given["name"], each) for given in _named(asked) for each in given.get("control", ()))
    _check_distinct("control kind", [control.kind.value for control in controls])
    return controls


def _named(asked: ConfigDocument) -> Sequence[ConfigDocument]:
    given: Sequence[ConfigDocument] = asked.get("control_input", ())
    for each in given:
        if not each.get("name"):
            raise InvalidArgument("sequence batching control tensor must have a name", field=f"{_FIELD}.control_input")
        if len(each.get("control", ())) != 1:
            message = f"sequence batching control tensor '{each['name']}' must have exactly one control"
            raise InvalidArgument(message, field=f"{_FIELD}.control_input")
    return given


def _control(name: str, asked: ConfigDocument) -> ControlTensor:
    kind = ControlKind(asked.get("kind") or ControlKind.START)
    forms = [form for form in _FORMS if asked.get(form)]
    datatype = _datatype(asked)
    if kind is ControlKind.ID:
        if forms or datatype not in _ID_TYPES:
            wanted = "a data_type of UINT64, INT64, UINT32, INT32 or STRING and no values"
            raise _refuse(f"control '{name}' of kind {kind} must have {wanted}")
        return ControlTensor(name, kind, datatype)
    if len(forms) != 1 or len(asked[forms[0]]) != 2:
        wanted = "exactly one of int32_false_true, fp32_false_true and bool_false_true, with 2 values"
        raise _refuse(f"control '{name}' of kind {kind} must have {wanted}")
    if datatype:
        raise _refuse(f"control '{name}' of kind {kind} must not have a data_type: its values tell it")
    return ControlTensor(name, kind, _FORMS[forms[0]], tuple(asked[forms[0]]))


def read_states(asked: ConfigDocument, initial: Mapping[str, Tensor], batched: bool) -> tuple[StateTensor, ...]:
    """Of `sequence_batching`. `initial`: what the first request gets of a state, by its input; zeros where nothing is.

    Raises:
        InvalidArgument: one lacks something, or is there twice.
    """
    return tuple(_state(each, initial, batched) for each in asked.get("state", ()))


def _state(asked: ConfigDocument, initial: Mapping[str, Tensor], batched: bool) -> StateTensor:
    name, output, datatype = asked.get("input_name", ""), asked.get("output_name", ""), _datatype(asked)
    dims = tuple(int(dim) for dim in asked.get("dims", ()))
    if not name or not output:
        raise _refuse("state must have an input_name and an output_name", "state")
    if not datatype or not dims or any(dim < 1 and dim != -1 for dim in dims):
        message = f"state '{name}' must have a data_type, and dims that are at least 1, or -1, got {list(dims)}"
        raise _refuse(message, "state")
    if not is_config_tensor_size_allowed(datatype, tuple(map(abs, dims))):
        raise _refuse(
            f"state '{name}' must have at most 64 dims and {MAX_CONFIG_TENSOR_BYTES} bytes, got {list(dims)}", "state"
        )
    begin = _beginning(datatype, dims, initial.get(name))
    return StateTensor(name, output, datatype, dims, begin[np.newaxis] if batched else begin)


def _beginning(datatype: str, dims: tuple[int, ...], given: Tensor | None) -> NDArray[Any]:
    if given is not None:
        return given.data
    return zero_array(tuple(1 if dim == -1 else dim for dim in dims), np.dtype(NUMPY_TYPES[datatype]))


def _datatype(asked: ConfigDocument) -> str:
    """v2's name; empty where a config says nothing."""
    name = str(asked.get("data_type") or "").removeprefix("TYPE_")
    return {"STRING": "BYTES", "INVALID": ""}.get(name, name)


def with_sequence_tensors(
    config: ModelConfig, controls: Sequence[ControlTensor], states: Sequence[StateTensor]
) -> ModelConfig:
    """The config as a runtime sees it, with the tensors of its sequences.

    Raises:
        InvalidArgument: two inputs share a name, or two states an output.
    """
    inputs = (
        *config.inputs,
        *(control.spec for control in controls),
        *(TensorSpec(state.input, state.datatype, state.dims) for state in states),
    )
    _check_distinct("input", [spec.name for spec in inputs])
    _check_distinct("output of a state", [state.output for state in states])
    return replace(config, inputs=inputs, outputs=(*config.outputs, *_made(config, states)))


def _made(config: ModelConfig, states: Iterable[StateTensor]) -> list[TensorSpec]:
    """Outputs of states that clients do not see; those that they do must be of the state's type."""
    declared = {spec.name: spec.datatype for spec in config.outputs}
    for state in states:
        if declared.get(state.output, state.datatype) != state.datatype:
            types = f"{declared[state.output]} as an output and {state.datatype} as a state"
            raise _refuse(f"state output '{state.output}' has data type {types}", "state")
    return [TensorSpec(each.output, each.datatype, each.dims) for each in states if each.output not in declared]


def _check_distinct(what: str, names: Sequence[str]) -> None:
    twice = [name for index, name in enumerate(names) if name in names[:index]]
    if twice:
        raise _refuse(f"{what} '{twice[0]}' is there more than once", "control_input")


def sequence_tensor_names(document: ConfigDocument) -> tuple[set[str], set[str]]:
    """Names of inputs and of outputs of the model that a config need not declare as clients' tensors."""
    asked: ConfigDocument = document.get("sequence_batching") or {}
    states: Sequence[ConfigDocument] = asked.get("state", ())
    inputs = chain((each.get("name", "") for each in asked.get("control_input", ())), _each(states, "input_name"))
    return set(inputs), set(_each(states, "output_name"))


def _each(messages: Iterable[ConfigDocument], field: str) -> Iterable[str]:
    return (str(each.get(field, "")) for each in messages)


def _refuse(message: str, field: str = "control_input") -> InvalidArgument:
    return InvalidArgument(f"sequence batching {message}", field=f"{_FIELD}.{field}")
