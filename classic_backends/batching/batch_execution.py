"""One execution: the tensors of a batch's requests become one set of arrays, the runtime's outputs become responses.

Requests of different shapes may share a ragged batch as one flat tensor; see
https://github.com/triton-inference-server/server/blob/main/docs/user_guide/ragged_batching.md. Runs in the thread of an
instance, with requests that have passed the gateway's validation. Knows nothing of queues and event loops.
"""

import logging
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from contextlib import closing
from time import perf_counter_ns
from typing import Any, NamedTuple, Protocol, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...core.errors import CharoniaError, Internal, InvalidArgument
from ...core.model import ModelConfig, RawConfig
from ...core.request import InferRequest, InferResponse
from ...core.runtime import Arrays, Runtime, only_response
from ...core.tensor import NUMPY_TYPES, Tensor, TensorSpec
from ...telemetry.model_metrics import ExecutionTiming
from .inference_job import InferenceJob

log = logging.getLogger(__name__)

Shape = tuple[int, ...]


class TensorBinding(NamedTuple):
    """One input or output. `reshape`: its dims as the model has them, where they differ; `ragged`: requests with
    different shapes share a batch, as one flat tensor; `optional`: requests may lack the input."""

    name: str
    datatype: str
    dims: Shape
    reshape: Shape | None = None
    ragged: bool = False
    optional: bool = False


_RELAYED = {np.dtype(kind): name for name, kind in NUMPY_TYPES.items() if name not in ("BF16", "UINT16")}
"""Datatypes of outputs by numpy's; uint16 may be either of two."""


class ModelSignature:
    """The tensors of a model. `relays`: clients get an output in the type that the model has made it in, whatever its
    config says, as of Triton's Python backend."""

    def __init__(self, config: ModelConfig, relays: bool = False) -> None:
        self.model_name = config.name
        self.batched = config.max_batch_size > 0
        """Tensors have a batch dimension in front."""
        self.inputs = _bindings(config.inputs, config.raw.get("input", ()))
        self._outputs = {binding.name: binding for binding in _bindings(config.outputs, config.raw.get("output", ()))}
        self.outputs = tuple(self._outputs)
        """All names, in order."""
        self._relays = relays
        self._unlike_config = set[str]()
        """Outputs that the model has made in another type, and that the log names."""
        self._reshaped_inputs = {binding.name: binding for binding in self.inputs if binding.reshape is not None}
        self._has_optional = any(binding.optional for binding in self.inputs)
        self._same_shape = tuple(binding.name for binding in self.inputs if -1 in binding.dims and not binding.ragged)
        # BF16 arrays are uint16: its bits.
        self._dtypes = {
            name: np.dtype(NUMPY_TYPES.get(binding.datatype, np.uint16)) for name, binding in self._outputs.items()
        }

    def to_arrays(self, request: InferRequest) -> dict[str, NDArray[Any]]:
        """The request's inputs in the model's shapes; ragged ones are not flattened."""
        arrays = {}
        for name, tensor in request.inputs.items():
            shape = tensor.shape
            if name in self._reshaped_inputs:
                binding = self._reshaped_inputs[name]
                shape = self._reshaped(shape, binding.dims, binding.reshape or ())
            arrays[name] = tensor.data if tensor.data.shape == shape else tensor.data.reshape(shape)
        return arrays

    def batch_size(self, request: InferRequest) -> int:
        """The request's items in a batch, at least 1."""
        if not self.batched or not request.inputs:
            return 1
        return max(1, next(iter(request.inputs.values())).shape[0])

    def batch_key(self, request: InferRequest) -> Hashable:
        """Equal for requests that fit in one batch: the shapes that must agree, and the optional inputs given."""
        inputs = request.inputs
        shapes = tuple([(name, inputs[name].shape[1:]) for name in self._same_shape if name in inputs])
        return (shapes, frozenset(inputs)) if self._has_optional else shapes

    def to_tensors(self, outputs: Arrays, requested: Sequence[str] | None) -> tuple[Tensor, ...]:
        """The `requested` outputs (None: all) of one request, in the model's order and in the shapes of clients. Raises
        `Internal` if an output is not as the config declares it."""
        bindings = self._outputs
        return tuple(
            [
                self._to_tensor(bindings[name], array)
                for name, array in outputs.items()
                if name in bindings and (requested is None or name in requested)
            ]
        )

    def _to_tensor(self, binding: TensorBinding, array: NDArray[Any]) -> Tensor:
        name = binding.name
        datatype = binding.datatype
        dtype = self._dtypes[name]
        if array.dtype is not dtype and array.dtype != dtype:  # most are numpy's own, of which there is one each
            mismatch = f"model '{self.model_name}' made output '{name}' of type {array.dtype}, not {datatype}"
            if not self._relays or array.dtype not in _RELAYED:
                raise Internal(mismatch)
            if name not in self._unlike_config:
                self._unlike_config.add(name)
                log.warning("%s, as its config says: clients get what it made", mismatch)
            datatype = _RELAYED[array.dtype]
        if binding.reshape is None:
            return Tensor(name, datatype, array.shape, array)
        shape = self._reshaped(array.shape, binding.reshape, binding.dims)
        try:
            return Tensor(name, datatype, shape, array.reshape(shape))
        except ValueError:
            mismatch = f"made output '{name}' of shape {list(array.shape)}, not {list(shape)}"
            raise Internal(f"model '{self.model_name}' {mismatch}") from None

    def _reshaped(self, shape: Shape, dims: Shape, to_dims: Shape) -> Shape:
        """`shape` has `dims`; the same elements with `to_dims`: its free ones take the free ones' sizes, in order."""
        front = int(self.batched)
        free_sizes = (size for size, dim in zip(shape[front:], dims, strict=False) if dim == -1)
        return (*shape[:front], *(next(free_sizes, 1) if dim == -1 else dim for dim in to_dims))


def _bindings(specs: Sequence[TensorSpec], raw_tensors: Sequence[RawConfig]) -> tuple[TensorBinding, ...]:
    by_name = {raw["name"]: raw for raw in raw_tensors}
    bindings = []
    for spec in specs:
        raw = by_name.get(spec.name, {})
        reshape = tuple(map(int, raw["reshape"].get("shape", ()))) if "reshape" in raw else None
        ragged = bool(raw.get("allow_ragged_batch", False))
        bindings.append(TensorBinding(spec.name, spec.datatype, spec.dims, reshape, ragged, spec.optional))
    return tuple(bindings)


def check_ragged_support(signature: ModelSignature, supported: bool, backend: str) -> None:
    """Raises `InvalidArgument` for ragged inputs that the backend does not support, or without batches."""
    ragged = [binding.name for binding in signature.inputs if binding.ragged]
    if ragged and not (supported and signature.batched):
        reason = "but max_batch_size is 0" if supported else f"which '{backend}' cannot do"
        message = f"input '{ragged[0]}' of model '{signature.model_name}' allows ragged batches, {reason}"
        raise InvalidArgument(message, field="input.allow_ragged_batch")


_TYPES = {"TYPE_INT32": np.int32, "TYPE_FP32": np.float32}


def _element_counts(shapes: Sequence[Shape]) -> NDArray[Any]:
    return np.array([np.prod(shape, dtype=np.int64) for shape in shapes], np.int64)


def _item_shapes(shapes: Sequence[Shape]) -> NDArray[Any]:
    """[items of the batch, dims of one]"""
    return np.array([shape[1:] for shape in shapes for _ in range(shape[0])], np.int64)


_KINDS: dict[str, Callable[[Sequence[Shape]], NDArray[Any]]] = {
    "BATCH_ELEMENT_COUNT": _element_counts,
    "BATCH_ACCUMULATED_ELEMENT_COUNT": lambda shapes: np.cumsum(_element_counts(shapes)),
    "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO": lambda shapes: np.cumsum([0, *_element_counts(shapes)]),
    "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE": lambda shapes: np.zeros(int(_element_counts(shapes).max()), np.int64),
    "BATCH_ITEM_SHAPE": _item_shapes,
    "BATCH_ITEM_SHAPE_FLATTEN": lambda shapes: _item_shapes(shapes).ravel(),
}


class BatchInput(NamedTuple):
    """A tensor `name` made from the shapes (with batch dimension) of the input `source` in each request."""

    name: str
    shape_kind: str
    source: str
    dtype: Any

    def build(self, shapes: Sequence[Shape]) -> NDArray[Any]:
        return _KINDS[self.shape_kind](shapes).astype(self.dtype)


class RaggedConfig(NamedTuple):
    """`batch_input` and `batch_output` of a config. `outputs`: an output's name -> the input whose shape each request's
    part of it has."""

    inputs: tuple[BatchInput, ...] = ()
    outputs: Mapping[str, str] = {}


def read_ragged_config(raw: RawConfig) -> RaggedConfig:
    """Parse `batch_input` and `batch_output`. Raises `InvalidArgument` if a kind, type or source is unknown; `field`
    names it."""
    names = {tensor["name"] for tensor in raw.get("input", ())}
    inputs: list[BatchInput] = []
    for entry in raw.get("batch_input", ()):
        kind = entry.get("kind", "BATCH_ELEMENT_COUNT")
        datatype = entry.get("data_type")
        if kind not in _KINDS:
            raise InvalidArgument(f"unknown kind of batch input '{kind}'", field="batch_input.kind")
        if datatype not in _TYPES:
            raise InvalidArgument("a batch input must be of TYPE_INT32 or TYPE_FP32", field="batch_input.data_type")
        source = _read_source(entry, names, "batch_input")
        inputs += (BatchInput(name, kind, source, _TYPES[datatype]) for name in entry.get("target_name", ()))
    outputs: dict[str, str] = {}
    for entry in raw.get("batch_output", ()):
        outputs |= dict.fromkeys(entry.get("target_name", ()), _read_source(entry, names, "batch_output"))
    return RaggedConfig(tuple(inputs), outputs)


def _read_source(entry: RawConfig, names: set[str], field: str) -> str:
    sources = entry.get("source_input", ())
    if len(sources) != 1 or sources[0] not in names:
        message = f"'{field}' needs one source_input that is an input of the model, got {list(sources)}"
        raise InvalidArgument(message, field=f"{field}.source_input")
    return str(sources[0])


class SequenceLayout(Protocol):
    """The additions of a stateful model to its batches; see `sequences.sequence_support.SequenceSupport`."""

    iterative: bool
    tells_idle_rows: bool
    state_outputs: tuple[str, ...]

    def arrange_rows(self, jobs: Sequence[InferenceJob]) -> Sequence[InferenceJob]: ...

    def sequence_inputs(self, jobs: Sequence[InferenceJob]) -> dict[str, NDArray[Any]]: ...

    def store_states(self, jobs: Sequence[InferenceJob], outputs: Sequence[Arrays]) -> None: ...


class BatchLayout(NamedTuple):
    """How the batches of a model are put together and taken apart. `by_request`: they are not, the runtime takes
    requests as they are."""

    signature: ModelSignature
    ragged: RaggedConfig = RaggedConfig()
    sequences: SequenceLayout | None = None
    by_request: bool = False

    @property
    def holds_sequences(self) -> bool:
        """Whether a sequence's next request needs to wait for the last answer to the one before."""
        return self.sequences is not None and (self.sequences.iterative or bool(self.sequences.state_outputs))


class ExecutionResult(msgspec.Struct, frozen=True):
    """One response or error for each request, None for one that is answered later; or an `error` for all of them."""

    responses: Sequence[InferResponse | Exception | None]
    timing: ExecutionTiming
    error: Exception | None = None


def execute_batch(
    runtime: Runtime, layout: BatchLayout, jobs: Sequence[InferenceJob], instance: str
) -> ExecutionResult:
    """Execute a batch of a model that answers each request once. `instance`: its name, for the log. Never raises."""
    marks = [perf_counter_ns()]
    try:
        jobs = jobs if layout.sequences is None else layout.sequences.arrange_rows(jobs)
        inputs = gather_inputs(layout, jobs)
        marks.append(perf_counter_ns())
        outputs = only_response(runtime.execute(inputs, _output_names(layout, jobs)))
        marks.append(perf_counter_ns())
        responses = split_outputs(layout, jobs, outputs)
    except BaseException as error:  # a model may do anything, even exit: its thread goes on
        if isinstance(error, InvalidArgument) and len(jobs) > 1 and layout.sequences is None:
            # A request may be wrong in what the model alone can judge: those that share its batch are not.
            alone = [execute_batch(runtime, layout, [job], instance) for job in jobs]
            return ExecutionResult([result.error or result.responses[0] for result in alone], _timing(marks))
        return ExecutionResult((), _timing(marks), client_error(error, instance))
    return ExecutionResult(responses, _timing(marks))


def execute_single(runtime: Runtime, layout: BatchLayout, request: InferRequest, instance: str) -> ExecutionResult:
    """Execute one request without ragged inputs: as `execute_batch`, in half the time. Never raises."""
    marks = [perf_counter_ns()]
    signature = layout.signature
    requested = request.outputs
    try:
        inputs = signature.to_arrays(request)
        marks.append(perf_counter_ns())
        outputs = only_response(runtime.execute(inputs, signature.outputs if requested is None else requested))
        marks.append(perf_counter_ns())
        responses = (InferResponse(signature.to_tensors(outputs, requested), final=True),)
    except BaseException as error:
        return ExecutionResult((), _timing(marks), client_error(error, instance))
    begin, gathered, computed = marks
    timing = ExecutionTiming(gathered - begin, computed - gathered, perf_counter_ns() - computed)
    return ExecutionResult(responses, timing)


def execute_decoupled(
    runtime: Runtime, layout: BatchLayout, job: InferenceJob, instance: str
) -> Generator[ExecutionResult, None, None]:
    """Execute one request of a decoupled model: a result for each response; an error is the last. Never raises."""
    marks = [perf_counter_ns()]
    try:
        inputs = gather_inputs(layout, [job])
        marks.append(perf_counter_ns())
        with closing(cast(Any, runtime.execute(inputs, _output_names(layout, [job])))) as responses:
            for outputs in responses:
                marks.append(perf_counter_ns())
                response = InferResponse(layout.signature.to_tensors(outputs, job.requested_outputs))
                yield ExecutionResult([response], _timing(marks))
                marks = marks[2:] * 2
    except GeneratorExit:
        raise
    except BaseException as error:
        yield ExecutionResult((), _timing(marks), client_error(error, instance))


def gather_inputs(layout: BatchLayout, jobs: Sequence[InferenceJob]) -> Arrays:
    """The inputs of all jobs, concatenated, and the tensors that the config derives from them."""
    ragged = {binding.name for binding in layout.signature.inputs if binding.ragged and not layout.by_request}
    inputs = {}
    for name in jobs[0].inputs:
        arrays = [job.inputs[name].ravel() if name in ragged else job.inputs[name] for job in jobs]
        inputs[name] = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
    for batch_input in layout.ragged.inputs:
        if batch_input.source in inputs:
            inputs[batch_input.name] = batch_input.build([job.inputs[batch_input.source].shape for job in jobs])
    return inputs if layout.sequences is None else inputs | layout.sequences.sequence_inputs(jobs)


def split_outputs(layout: BatchLayout, jobs: Sequence[InferenceJob], outputs: Arrays) -> list[InferResponse]:
    """One response for each job that is no idle row. Raises `Internal` if an output does not have the batch's size."""
    parts: Sequence[Arrays] = [outputs]
    if len(jobs) > 1 or layout.ragged.outputs:
        split = {name: _split_output(layout, jobs, name, array) for name, array in outputs.items()}
        parts = [{name: arrays[index] for name, arrays in split.items()} for index in range(len(jobs))]
    if layout.sequences is not None:
        layout.sequences.store_states(jobs, parts)
    return [
        InferResponse(layout.signature.to_tensors(part, job.requested_outputs), final=True)
        for job, part in zip(jobs, parts, strict=True)
        if layout.sequences is None or job.sequence is not None
    ]


def _split_output(
    layout: BatchLayout, jobs: Sequence[InferenceJob], name: str, array: NDArray[Any]
) -> Sequence[NDArray[Any]]:
    if name not in layout.ragged.outputs:
        sizes = [job.batch_size for job in jobs]
        if array.ndim == 0 or len(array) != sum(sizes):
            raise Internal(f"output '{name}' has shape {list(array.shape)} for a batch of {sum(sizes)}")
        ends = np.cumsum(sizes).tolist()  # np.split takes three times as long
        return [array[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    shapes = [job.inputs[layout.ragged.outputs[name]].shape for job in jobs]
    counts = [int(np.prod(shape)) for shape in shapes]
    if array.size != sum(counts):
        raise Internal(f"output '{name}' has {array.size} elements for {sum(counts)} of the batch's requests")
    parts = np.split(array.ravel(), np.cumsum(counts)[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def _output_names(layout: BatchLayout, jobs: Sequence[InferenceJob]) -> Sequence[str]:
    """The outputs that some job reads, or the sequences' states need."""
    names = layout.signature.outputs
    if all(job.requested_outputs is not None for job in jobs):
        requested = {name for job in jobs for name in job.requested_outputs or ()}
        names = tuple(name for name in names if name in requested)
    states = () if layout.sequences is None else layout.sequences.state_outputs
    return (*names, *(name for name in states if name not in names))


def _timing(marks: Sequence[int]) -> ExecutionTiming:
    """`marks`: begin, inputs gathered, outputs computed; of a failed execution only the first ones."""
    now = perf_counter_ns()
    begin, gathered, computed = (*marks, now, now)[:3]
    return ExecutionTiming(gathered - begin, computed - gathered, now - computed)


def client_error(error: BaseException, instance: str) -> Exception:
    """The error that a client sees; one that is not ours is logged."""
    if isinstance(error, CharoniaError):
        return error
    log.error("instance '%s' failed", instance, exc_info=error)
    message = f"{type(error).__name__}: {error}"
    return Internal(f"Failed to process the request(s) for model instance '{instance}', message: {message}")
