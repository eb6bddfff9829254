"""The configuration of a stateful model: `sequence_batching` of its config, parsed.

Controls, and the state from request to request, are tensors that clients do not see; to a runtime they are ordinary
inputs and outputs. Sources:
https://github.com/triton-inference-server/server/blob/main/docs/user_guide/batcher.md and
https://github.com/triton-inference-server/server/blob/main/docs/user_guide/implicit_state_management.md. Knows nothing
of requests.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import ceil
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...core.errors import InvalidArgument, Unsupported
from ...core.model import ModelConfig, RawConfig
from ...core.tensor import (
    MAX_CONFIG_TENSOR_BYTES,
    NUMPY_TYPES,
    Tensor,
    TensorSpec,
    is_config_tensor_size_allowed,
    zero_array,
)
from ..batching.batching_config import NS_PER_US, BatchingConfig, read_preferred_sizes

_DEFAULT_IDLE_US = 1_000_000
_VALUE_TYPES = {"int32_false_true": "INT32", "fp32_false_true": "FP32", "bool_false_true": "BOOL"}
_ID_TYPES = ("UINT64", "INT64", "UINT32", "INT32", "BYTES")


class ControlKind(StrEnum):
    """The fact that a control tells the model: the request is its sequence's first; the row has a request; the request
    is the last; the sequence's id."""

    START = "CONTROL_SEQUENCE_START"
    READY = "CONTROL_SEQUENCE_READY"
    END = "CONTROL_SEQUENCE_END"
    ID = "CONTROL_SEQUENCE_CORRID"


class ControlTensor(NamedTuple):
    """An input of dims [1]. `values`: for false and for true; empty for an id."""

    name: str
    kind: ControlKind
    datatype: str
    values: tuple[Any, ...] = ()


class StateTensor(NamedTuple):
    """The `output` of a sequence's request that is the `input` of the next. `initial`: for the first request, with a
    batch dimension of 1 in front if the model has one."""

    input: str
    output: str
    datatype: str
    dims: tuple[int, ...]
    initial: NDArray[Any]


class SlotRules(NamedTuple):
    """The sequences that may be open on one instance, and how long each may be without a request."""

    slots_per_instance: int
    max_idle_ns: int = _DEFAULT_IDLE_US * NS_PER_US
    fixed_rows: bool = False
    """The "direct" strategy: an open sequence has a row of the batch to itself."""
    iterative: bool = False
    """Each request is a sequence, which ends with it."""
    ids: range = range(1 << 62, 1 << 63)
    """The ids of an iterative model's requests that bring none: such as clients do not choose."""


@dataclass(frozen=True, slots=True)
class SequenceConfig:
    """`batching` is for the next requests of the sequences on one instance."""

    slots: SlotRules
    batching: BatchingConfig
    controls: tuple[ControlTensor, ...] = ()
    states: tuple[StateTensor, ...] = ()


def read_sequence_config(
    config: ModelConfig, initial: Mapping[str, Tensor], by_request: bool = False
) -> SequenceConfig | None:
    """Parse `sequence_batching`; None without it. `initial`: the first request's state, by its input; zeros where
    absent. `by_request`: the model's runtime takes requests as they are. Raises `InvalidArgument` if values contradict
    each other, or a state is too large, which `field` names, and `Unsupported` if the config asks for what the backend
    cannot do."""
    if "sequence_batching" not in config.raw:
        return None
    raw: RawConfig = config.raw["sequence_batching"]
    if not by_request:
        _check_backend(raw, config)
    slots, batching = _read_strategy(raw, config, by_request or not config.decoupled)
    idle_ns = (int(raw.get("max_sequence_idle_microseconds", 0)) or _DEFAULT_IDLE_US) * NS_PER_US
    states = tuple(_read_state(state, initial, config.max_batch_size > 0) for state in raw.get("state", ()))
    controls = _read_controls(raw)
    ids = [_free_ids(control.datatype) for control in controls if control.kind is ControlKind.ID]
    iterative = bool(raw.get("iterative_sequence", False))
    rules = SlotRules(slots, idle_ns, "oldest" not in raw, iterative, *ids)
    return SequenceConfig(rules, batching, controls, states)


def _check_backend(raw: RawConfig, config: ModelConfig) -> None:
    """Refuse what only a runtime that takes requests as they are can do."""
    field = ""
    if raw.get("iterative_sequence"):
        field = "iterative_sequence"
        reason = f"needs a backend that reschedules requests, which '{config.backend}' cannot"
    elif config.decoupled and raw.get("state"):
        field = "state"
        reason = f"cannot be carried on by a decoupled model of '{config.backend}'"
    elif config.decoupled and config.max_batch_size > 1 and "oldest" not in raw:
        field = "direct"
        reason = f"needs max_batch_size 0 or 1 for a decoupled model of '{config.backend}'"
    if field:
        message = f"model '{config.name}': sequence batching {field} {reason}"
        raise Unsupported(message, field=f"sequence_batching.{field}")


def _free_ids(datatype: str) -> range:
    """Ids of a control's type for requests that bring none: the upper half of what it holds."""
    bits = 30 if datatype in ("INT32", "UINT32") else 62
    return range(1 << bits, 2 << bits)


def _read_strategy(raw: RawConfig, config: ModelConfig, combines: bool) -> tuple[int, BatchingConfig]:
    """The slots of an instance, and its batching, by the strategy: "oldest", or else "direct"."""
    size = max(config.max_batch_size, 1)
    combine = config.max_batch_size > 0 and combines
    rules: RawConfig = raw.get("oldest", raw.get("direct", {}))
    delay = int(rules.get("max_queue_delay_microseconds", 0)) * NS_PER_US
    if "oldest" in raw:
        slots = int(rules.get("max_candidate_sequences", 0)) or size
        if slots < 1:
            name = "max_candidate_sequences"
            raise _refuse(f"{name} must be at least 0 for {config.name}, got {slots}", f"oldest.{name}")
        preferred = read_preferred_sizes(rules, config.max_batch_size, "sequence_batching.oldest")
        return slots, BatchingConfig(combine, size, preferred, delay, bool(rules.get("preserve_ordering", False)))
    utilization = float(rules.get("minimum_slot_utilization", 0))
    if not 0 <= utilization <= 1:
        name = "minimum_slot_utilization"
        raise _refuse(f"{name} must be in range [0.0, 1.0] for {config.name}, got {utilization}", f"direct.{name}")
    if not utilization:  # as in Triton, the delay has no effect then
        return size, BatchingConfig(combine, size)
    enough = max(1, ceil(round(utilization * size, 4)))
    return size, BatchingConfig(combine, size, range(enough, size + 1), delay)


def _read_controls(sequence_batching: RawConfig) -> tuple[ControlTensor, ...]:
    controls = []
    for entry in sequence_batching.get("control_input", ()):
        name = entry.get("name")
        kinds = entry.get("control", ())
        if not name:
            raise _refuse("control tensor must have a name")
        if len(kinds) != 1:
            raise _refuse(f"control tensor '{name}' must have exactly one control")
        raw: RawConfig = kinds[0]
        kind = ControlKind(raw.get("kind") or ControlKind.START)
        datatype = _read_datatype(raw)
        value_types = [value_type for value_type in _VALUE_TYPES if raw.get(value_type)]
        control = f"control '{name}' of kind {kind}"
        if kind is ControlKind.ID:
            if value_types or datatype not in _ID_TYPES:
                needs = "a data_type of UINT64, INT64, UINT32, INT32 or STRING and no values"
                raise _refuse(f"{control} must have {needs}")
            controls.append(ControlTensor(name, kind, datatype))
            continue
        if len(value_types) != 1 or len(raw[value_types[0]]) != 2:
            needs = "exactly one of int32_false_true, fp32_false_true and bool_false_true, with 2 values"
            raise _refuse(f"{control} must have {needs}")
        if datatype:
            raise _refuse(f"{control} must not have a data_type: its values tell it")
        [value_type] = value_types
        controls.append(ControlTensor(name, kind, _VALUE_TYPES[value_type], tuple(raw[value_type])))
    _check_distinct("control kind", [control.kind.value for control in controls])
    return tuple(controls)


def _read_state(raw: RawConfig, initial: Mapping[str, Tensor], batched: bool) -> StateTensor:
    name = raw.get("input_name", "")
    output = raw.get("output_name", "")
    datatype = _read_datatype(raw)
    dims = tuple(int(dim) for dim in raw.get("dims", ()))
    message = ""
    if not name or not output:
        message = "must have an input_name and an output_name"
    elif not datatype or not dims or any(dim < 1 and dim != -1 for dim in dims):
        message = f"'{name}' must have a data_type, and dims that are at least 1, or -1, got {list(dims)}"
    elif not is_config_tensor_size_allowed(datatype, tuple(map(abs, dims))):
        message = f"'{name}' must have at most 64 dims and {MAX_CONFIG_TENSOR_BYTES} bytes, got {list(dims)}"
    if message:
        raise _refuse(f"state {message}", "state")
    if name in initial:
        first = initial[name].data
    else:
        first = zero_array(tuple(map(abs, dims)), np.dtype(NUMPY_TYPES[datatype]))
    return StateTensor(name, output, datatype, dims, first[np.newaxis] if batched else first)


def _read_datatype(raw: RawConfig) -> str:
    """The v2 name of `data_type`; empty without it."""
    name = str(raw.get("data_type") or "").removeprefix("TYPE_")
    return {"STRING": "BYTES", "INVALID": ""}.get(name, name)


def with_sequence_tensors(
    config: ModelConfig, controls: Sequence[ControlTensor], states: Sequence[StateTensor]
) -> ModelConfig:
    """The config as a runtime sees it. Raises `InvalidArgument` if two inputs share a name, two states an output, or a
    state has another type than its output."""
    inputs = [
        *config.inputs,
        *(TensorSpec(control.name, control.datatype, (1,)) for control in controls),
        *(TensorSpec(state.input, state.datatype, state.dims) for state in states),
    ]
    _check_distinct("input", [spec.name for spec in inputs])
    _check_distinct("output of a state", [state.output for state in states])
    outputs = list(config.outputs)
    declared = {spec.name: spec.datatype for spec in config.outputs}
    for state in states:
        if state.output not in declared:
            outputs.append(TensorSpec(state.output, state.datatype, state.dims))
        elif declared[state.output] != state.datatype:
            types = f"{declared[state.output]} as an output and {state.datatype} as a state"
            raise _refuse(f"state output '{state.output}' has data type {types}", "state")
    return replace(config, inputs=tuple(inputs), outputs=tuple(outputs))


def _check_distinct(kind: str, names: Sequence[str]) -> None:
    twice = [name for index, name in enumerate(names) if name in names[:index]]
    if twice:
        raise _refuse(f"{kind} '{twice[0]}' is there more than once")


def _refuse(message: str, field: str = "control_input") -> InvalidArgument:
    return InvalidArgument(f"sequence batching {message}", field=f"sequence_batching.{field}")
