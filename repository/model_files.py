"""The files in a model's directory that its config names: labels, and the data of warm-up requests and initial states.

See https://github.com/triton-inference-server/server/blob/main/docs/user_guide/model_configuration.md.
"""

from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..core.errors import InvalidArgument, request_id_prefix
from ..core.model import ModelConfig, ModelSamples, WarmupRequest
from ..core.request import InferRequest
from ..core.tensor import MAX_CONFIG_TENSOR_BYTES, NUMPY_TYPES, Tensor, is_config_tensor_size_allowed, zero_array
from .config_io import ConfigMessage, v2_datatype
from .request_validation import validate_request


def read_label_files(config: ConfigMessage, directory: Path) -> dict[str, tuple[str, ...]]:
    """The labels of each output that has a label file, one label a line.

    Raises:
        InvalidArgument: a file cannot be read, or is outside the directory.
    """
    named = (output for output in config.output if output.label_filename)
    return {output.name: _read(output.name, path_within(directory, output.label_filename)) for output in named}


def path_within(directory: Path, path: str) -> Path:
    """The path of a file that a config names.

    Raises:
        InvalidArgument: it would be outside the directory.
    """
    file = directory / path
    try:
        within = file.resolve().is_relative_to(directory.resolve())
    except (OSError, ValueError, RuntimeError) as error:  # of a loop of links, or a name that no file can have
        raise InvalidArgument(f"cannot read {path!r}: {error}", field=path) from None
    if not within:
        raise InvalidArgument(f"'{path}' must stay within the model directory", field=path)
    return file


def _read(output: str, file: Path) -> tuple[str, ...]:
    try:
        return tuple(file.read_text().splitlines())
    except (OSError, UnicodeDecodeError) as error:
        message = f"cannot read the labels of output '{output}' from {file}: {error}"
        raise InvalidArgument(message, field=f"output.{output}.label_filename") from None


def read_model_samples(config: ConfigMessage, directory: Path) -> ModelSamples:
    """The warm-up requests and initial states of a model. Raises `InvalidArgument` as their readers do."""
    return ModelSamples(read_warmup_requests(config, directory), read_initial_states(config, directory))


def read_warmup_requests(config: ConfigMessage, directory: Path) -> tuple[WarmupRequest, ...]:
    """The requests of `model_warmup`, with data from `warmup/` in the model's directory.

    Raises:
        InvalidArgument: a sample does not fit the model, or its file not the sample.
    """
    return tuple(
        WarmupRequest(_warmup_request(config, each, directory), max(each.count, 1)) for each in config.model_warmup
    )


def validate_warmup_requests(config: ModelConfig, samples: Iterable[WarmupRequest]) -> None:
    """Raises `InvalidArgument` for a request that no client could send. Those of a stateful model may have controls and
    states among their inputs."""
    if "sequence_batching" in config.raw:
        return
    for sample, _ in samples:
        try:
            validate_request(config, sample)
        except InvalidArgument as error:
            said = f"warm-up sample '{sample.id}': {error.message.removeprefix(request_id_prefix(sample.id))}"
            raise InvalidArgument(said, field=f"model_warmup.{sample.id}") from None


def _warmup_request(config: ConfigMessage, sample: ConfigMessage, directory: Path) -> InferRequest:
    of, where = f"warm-up sample '{sample.name}' of model '{config.name}'", f"model_warmup.{sample.name}"
    if sample.batch_size > max(config.max_batch_size, 1):
        message = f"{of} has batch_size {sample.batch_size}, more than max_batch_size {config.max_batch_size}"
        raise InvalidArgument(message, field=where)
    batch = (max(sample.batch_size, 1),) if config.max_batch_size > 0 else ()
    inputs = {
        name: SampleTensor(given, f"input '{name}' of {of}", f"{where}.inputs.{name}")
        for name, given in sorted(sample.inputs.items())
    }
    tensors = {name: given.tensor(name, batch, directory / "warmup") for name, given in inputs.items()}
    return InferRequest(sample.name, tensors)


_FIELD = "sequence_batching.state.initial_state"


def read_initial_states(config: ConfigMessage, directory: Path) -> dict[str, Tensor]:
    """The initial state of each state input of `sequence_batching`, without a batch dimension; data files are in
    `initial_state/` of the model's directory.

    Raises:
        InvalidArgument: one does not fit its state, or its file not itself.
    """
    given = {state.input_name: state for state in config.sequence_batching.state if state.initial_state}
    return {name: _initial_state(config, state, directory) for name, state in given.items()}


def _initial_state(config: ConfigMessage, state: ConfigMessage, directory: Path) -> Tensor:
    of = f"initial_state of state '{state.input_name}' of model '{config.name}'"
    if len(state.initial_state) > 1:
        raise InvalidArgument(f"{of} is there more than once", field=_FIELD)
    [given] = state.initial_state
    _check(state, given, of)
    return SampleTensor(given, of, _FIELD).tensor(state.input_name, (), directory / "initial_state")


def _check(state: ConfigMessage, given: ConfigMessage, of: str) -> None:
    if given.data_type != state.data_type:
        message = f"{of} is of {v2_datatype(given)}, the state of {v2_datatype(state)}"
        raise InvalidArgument(message, field=f"{_FIELD}.data_type")
    fits = len(given.dims) == len(state.dims) and all(
        dim in (-1, size) for dim, size in zip(state.dims, given.dims, strict=True)
    )
    if not fits:
        message = f"{of} has dims {list(given.dims)}, the state {list(state.dims)}"
        raise InvalidArgument(message, field=f"{_FIELD}.dims")


class SampleTensor(NamedTuple):
    """A tensor that a config describes: a message with `data_type`, `dims` and a choice of data sources.

    Errors call it `description`, and its place in the config `field`.
    """

    given: ConfigMessage
    description: str
    field: str

    def tensor(self, name: str, batch: tuple[int, ...], files: Path) -> Tensor:
        """The tensor, of shape [*batch, *dims]; a data file is read from the directory `files`.

        Raises:
            InvalidArgument: something of it is missing, or the file is not what it should be.
        """
        if any(dim < 0 for dim in self.given.dims):
            message = f"{self.description} must have dims of at least 0, got {list(self.given.dims)}"
            raise InvalidArgument(message, field=f"{self.field}.dims")
        if self.given.data_type == 0:
            raise InvalidArgument(f"{self.description} must specify 'data_type'", field=f"{self.field}.data_type")
        datatype, shape = v2_datatype(self.given), (*batch, *self.given.dims)
        if not is_config_tensor_size_allowed(datatype, shape):
            limits = f"at most 64 dimensions and {MAX_CONFIG_TENSOR_BYTES} bytes"
            raise InvalidArgument(
                f"{self.description} must have {limits}, got shape {list(shape)}", field=f"{self.field}.dims"
            )
        return Tensor(name, datatype, shape, self._data(datatype, shape, files))

    def _data(self, datatype: str, shape: tuple[int, ...], files: Path) -> NDArray[Any]:
        [ways] = self.given.DESCRIPTOR.oneofs
        match self.given.WhichOneof(ways.name):
            case "zero_data":
                return _zero_data(datatype, shape)
            case "random_data":
                return _random_data(datatype, shape)
            case "data_file" | "input_data_file" as way:
                file = path_within(files.parent, f"{files.name}/{getattr(self.given, way)}")
                return _file_data(datatype, shape, file, self.description)
        *others, last = (way.name for way in ways.fields)
        raise InvalidArgument(f"{self.description} must have one of {', '.join(others)} and {last}", field=self.field)


def _zero_data(datatype: str, shape: tuple[int, ...]) -> NDArray[Any]:
    return zero_array(shape, np.dtype(NUMPY_TYPES[datatype]))


def _random_data(datatype: str, shape: tuple[int, ...]) -> NDArray[Any]:
    """Floats from 0 to 1, small integers, and empty strings as Triton has them; the same ones each time."""
    generator = np.random.default_rng(0)
    dtype = np.dtype(NUMPY_TYPES[datatype])
    if datatype == "BYTES":
        return _zero_data(datatype, shape)
    if datatype == "BF16":
        return (generator.random(shape, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    if dtype.kind == "f":
        return generator.random(shape).astype(dtype)
    return generator.integers(0, 2 if datatype == "BOOL" else 100, shape).astype(dtype)


def _file_data(datatype: str, shape: tuple[int, ...], file: Path, of: str) -> NDArray[Any]:
    """The file's raw elements in the machine's byte order; strings each after its length in 4 bytes."""
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise InvalidArgument(f"{of}: cannot read {file}: {error.strerror}") from None
    if datatype == "BYTES":
        return _strings(raw, shape, f"{of}: {file}")
    dtype = np.dtype(NUMPY_TYPES[datatype])
    wanted = prod(shape) * dtype.itemsize
    if len(raw) != wanted:
        raise InvalidArgument(f"{of}: {file} has {len(raw)} bytes, not {wanted}")
    return np.frombuffer(raw, dtype).reshape(shape)


def _strings(raw: bytes, shape: tuple[int, ...], of: str) -> NDArray[Any]:
    found, position = [], 0
    while position + 4 <= len(raw):
        end = position + 4 + int.from_bytes(raw[position : position + 4], "little")
        found.append(raw[position + 4 : end])
        position = end
    if position != len(raw) or len(found) != prod(shape):
        raise InvalidArgument(f"{of} does not hold {prod(shape)} strings, each after its length")
    strings = np.empty(len(found), np.object_)
    strings[:] = found
    return strings.reshape(shape)
