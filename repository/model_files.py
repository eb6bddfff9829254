"""The files in a model's directory that its config names: labels, and the data of warm-up requests and initial states.

See https://github.com/triton-inference-server/server/blob/main/docs/user_guide/model_configuration.md.
"""

from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.errors import InvalidArgument, request_id_prefix
from ..core.model import ModelConfig, WarmupRequest
from ..core.regular_files import read_regular, read_text
from ..core.request import InferRequest
from ..core.tensor import MAX_CONFIG_TENSOR_BYTES, NUMPY_TYPES, Tensor, is_config_tensor_size_allowed, zero_array
from .config_io import ConfigMessage, v2_datatype
from .request_validation import validate_request

_STATE_FIELD = "sequence_batching.state.initial_state"


def read_label_files(config: ConfigMessage, directory: Path) -> dict[str, tuple[str, ...]]:
    """The labels of each output that has a label file, one label a line. Raises `InvalidArgument` if a file cannot be
    read, or is outside the directory."""
    labels = {}
    for output in config.output:
        if output.label_filename:
            file = path_within(directory, output.label_filename)
            try:
                labels[output.name] = tuple(read_text(file).splitlines())
            except (OSError, UnicodeDecodeError) as error:
                message = f"cannot read the labels of output '{output.name}' from {file}: {error}"
                raise InvalidArgument(message, field=f"output.{output.name}.label_filename") from None
    return labels


def path_within(directory: Path, path: str) -> Path:
    """The path of a file that a config names. Raises `InvalidArgument` if it would be outside the directory."""
    file = directory / path
    try:
        within = file.resolve().is_relative_to(directory.resolve())
    except (OSError, ValueError, RuntimeError) as error:  # of a loop of links, or a name that no file can have
        raise InvalidArgument(f"cannot read {path!r}: {error}", field=path) from None
    if not within:
        raise InvalidArgument(f"'{path}' must stay within the model directory", field=path)
    return file


def read_warmup_requests(config: ConfigMessage, directory: Path) -> tuple[WarmupRequest, ...]:
    """The requests of `model_warmup`, with data from `warmup/` in the model's directory. Raises `InvalidArgument` if a
    sample does not fit the model, or its file not the sample."""
    requests = []
    for sample in config.model_warmup:
        of, field = f"warm-up sample '{sample.name}' of model '{config.name}'", f"model_warmup.{sample.name}"
        if sample.batch_size > max(config.max_batch_size, 1):
            message = f"{of} has batch_size {sample.batch_size}, more than max_batch_size {config.max_batch_size}"
            raise InvalidArgument(message, field=field)
        batch = (max(sample.batch_size, 1),) if config.max_batch_size > 0 else ()
        inputs = {}
        for name, given in sorted(sample.inputs.items()):
            data = _sample_data(given, batch, directory / "warmup", f"input '{name}' of {of}", f"{field}.inputs.{name}")
            inputs[name] = Tensor(name, v2_datatype(given), data.shape, data)
        requests.append(WarmupRequest(InferRequest(sample.name, inputs), max(sample.count, 1)))
    return tuple(requests)


def validate_warmup_requests(config: ModelConfig, samples: Iterable[WarmupRequest]) -> None:
    """Raises `InvalidArgument` for a request that no client could send. Those of a stateful model may have controls and
    states among their inputs."""
    if "sequence_batching" in config.raw:
        return
    for sample, _ in samples:
        try:
            validate_request(config, sample)
        except InvalidArgument as error:
            message = f"warm-up sample '{sample.id}': {error.message.removeprefix(request_id_prefix(sample.id))}"
            raise InvalidArgument(message, field=f"model_warmup.{sample.id}") from None


def read_initial_states(config: ConfigMessage, directory: Path) -> dict[str, Tensor]:
    """The initial state of each state input of `sequence_batching`, without a batch dimension; data files are in
    `initial_state/` of the model's directory. Raises `InvalidArgument` if one does not fit its state, or its file not
    itself."""
    states = {}
    for state in config.sequence_batching.state:
        if not state.initial_state:
            continue
        of = f"initial_state of state '{state.input_name}' of model '{config.name}'"
        if len(state.initial_state) > 1:
            raise InvalidArgument(f"{of} is there more than once", field=_STATE_FIELD)
        [given] = state.initial_state
        if given.data_type != state.data_type:
            message = f"{of} is of {v2_datatype(given)}, the state of {v2_datatype(state)}"
            raise InvalidArgument(message, field=f"{_STATE_FIELD}.data_type")
        dims = zip(state.dims, given.dims, strict=False)
        if len(given.dims) != len(state.dims) or not all(dim in (-1, size) for dim, size in dims):
            message = f"{of} has dims {list(given.dims)}, the state {list(state.dims)}"
            raise InvalidArgument(message, field=f"{_STATE_FIELD}.dims")
        data = _sample_data(given, (), directory / "initial_state", of, _STATE_FIELD)
        states[state.input_name] = Tensor(state.input_name, v2_datatype(given), data.shape, data)
    return states


def _sample_data(given: ConfigMessage, batch: tuple[int, ...], directory: Path, of: str, field: str) -> NDArray[Any]:
    """The data of a message with `data_type`, `dims` and a choice of sources, of shape [*batch, *dims]; a data file is
    read from `directory`. Errors call it `of`, and its place in the config `field`. Raises `InvalidArgument` if
    something of it is missing, or the file does not fit."""
    if any(dim < 0 for dim in given.dims):
        raise InvalidArgument(f"{of} must have dims of at least 0, got {list(given.dims)}", field=f"{field}.dims")
    if given.data_type == 0:
        raise InvalidArgument(f"{of} must specify 'data_type'", field=f"{field}.data_type")
    datatype, shape = v2_datatype(given), (*batch, *given.dims)
    if not is_config_tensor_size_allowed(datatype, shape):
        limits = f"at most 64 dimensions and {MAX_CONFIG_TENSOR_BYTES} bytes"
        raise InvalidArgument(f"{of} must have {limits}, got shape {list(shape)}", field=f"{field}.dims")
    [sources] = given.DESCRIPTOR.oneofs
    match given.WhichOneof(sources.name):
        case "zero_data":
            return zero_array(shape, np.dtype(NUMPY_TYPES[datatype]))
        case "random_data":
            return _random_data(datatype, shape)
        case "data_file" | "input_data_file" as source:
            file = path_within(directory.parent, f"{directory.name}/{getattr(given, source)}")
            return _file_data(datatype, batch, tuple(given.dims), file, of)
    *others, last = (source.name for source in sources.fields)
    raise InvalidArgument(f"{of} must have one of {', '.join(others)} and {last}", field=field)


def _random_data(datatype: str, shape: tuple[int, ...]) -> NDArray[Any]:
    """Floats from 0 to 1, small integers, and empty strings as Triton has them; the same ones each time."""
    generator = np.random.default_rng(0)
    dtype = np.dtype(NUMPY_TYPES[datatype])
    if datatype == "BYTES":
        return zero_array(shape, dtype)
    if datatype == "BF16":
        return (generator.random(shape, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    if dtype.kind == "f":
        return generator.random(shape).astype(dtype)
    return generator.integers(0, 2 if datatype == "BOOL" else 100, shape).astype(dtype)


def _file_data(datatype: str, batch: tuple[int, ...], dims: tuple[int, ...], file: Path, of: str) -> NDArray[Any]:
    """The file's raw elements in the machine's byte order; strings each after its length in 4 bytes. As in Triton a
    file holds one item, which all of the batch are; one that holds the whole batch is taken, too."""
    try:
        content = read_regular(file, MAX_CONFIG_TENSOR_BYTES)
    except OSError as error:
        raise InvalidArgument(f"{of}: cannot read {file}: {error.strerror}") from None
    if datatype != "BYTES":
        dtype = np.dtype(NUMPY_TYPES[datatype])
        wanted = prod(dims) * dtype.itemsize
        if len(content) not in (wanted, prod(batch) * wanted):
            raise InvalidArgument(f"{of}: {file} has {len(content)} bytes, not {wanted}")
        return _batch_of(np.frombuffer(content, dtype), batch, dims)
    strings, position = [], 0
    while position + 4 <= len(content):
        end = position + 4 + int.from_bytes(content[position : position + 4], "little")
        strings.append(content[position + 4 : end])
        position = end
    count = prod(dims)
    if position != len(content) or len(strings) not in (count, prod(batch) * count):
        raise InvalidArgument(f"{of}: {file} does not hold {count} strings, each after its length")
    return _batch_of(np.array(strings, np.object_), batch, dims)


def _batch_of(elements: NDArray[Any], batch: tuple[int, ...], dims: tuple[int, ...]) -> NDArray[Any]:
    """The elements of one item, or of a whole batch, as a batch."""
    repeated = prod(batch) if elements.size == prod(dims) else 1
    return np.tile(elements, repeated).reshape((*batch, *dims))
