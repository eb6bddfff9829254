"""The files in a model's directory that its config names: labels, and the data of warm-up requests and initial states.

See https://github.com/triton-inference-server/server/blob/main/docs/user_guide/model_configuration.md.
"""

from collections.abc import Iterable, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.errors import InvalidArgument, request_id_prefix
from ..core.model import ModelConfig, RawConfig, WarmupRequest
from ..core.regular_files import read_regular, read_text
from ..core.request import InferRequest
from ..core.tensor import MAX_CONFIG_TENSOR_BYTES, NUMPY_TYPES, Tensor, is_config_tensor_size_allowed, zero_array
from .config_io import v2_datatype
from .request_validation import validate_request

_WARMUP_SOURCES = ("zero_data", "random_data", "input_data_file")
_STATE_SOURCES = ("zero_data", "data_file")
"""One of these fields says where data comes from; the last names a file."""

_STATE_FIELD = "sequence_batching.state.initial_state"


def read_label_files(config: RawConfig, directory: Path) -> dict[str, tuple[str, ...]]:
    """The labels of each output that has a label file, one label a line. Raises `InvalidArgument` if a file cannot be
    read, or is outside the directory."""
    labels = {}
    for output in config["output"]:
        if output["label_filename"]:
            name, file = output["name"], path_within(directory, output["label_filename"])
            try:
                labels[name] = tuple(read_text(file).splitlines())
            except (OSError, UnicodeDecodeError) as error:
                message = f"cannot read the labels of output '{name}' from {file}: {error}"
                raise InvalidArgument(message, field=f"output.{name}.label_filename") from None
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


def read_warmup_requests(config: RawConfig, directory: Path) -> tuple[WarmupRequest, ...]:
    """The requests of `model_warmup`, with data from `warmup/` in the model's directory. Raises `InvalidArgument` if a
    sample does not fit the model, or its file not the sample."""
    requests, most = [], config["max_batch_size"]
    for sample in config["model_warmup"]:
        id, size = sample["name"], sample["batch_size"]
        of, field = f"warm-up sample '{id}' of model '{config['name']}'", f"model_warmup.{id}"
        if size > max(most, 1):
            message = f"{of} has batch_size {size}, more than max_batch_size {most}"
            raise InvalidArgument(message, field=field)
        batch = (max(size, 1),) if most > 0 else ()
        inputs = {}
        for name, entry in sorted(sample["inputs"].items()):
            where = f"input '{name}' of {of}", f"{field}.inputs.{name}"
            data = _sample_data(entry, _WARMUP_SOURCES, batch, directory / "warmup", *where)
            inputs[name] = Tensor(name, v2_datatype(entry), data.shape, data)
        requests.append(WarmupRequest(InferRequest(id, inputs), max(sample["count"], 1)))
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


def read_initial_states(config: RawConfig, directory: Path) -> dict[str, Tensor]:
    """The initial state of each state input of `sequence_batching`, without a batch dimension; data files are in
    `initial_state/` of the model's directory. Raises `InvalidArgument` if one does not fit its state, or its file not
    itself."""
    states = {}
    for state in config.get("sequence_batching", {}).get("state", ()):
        if not state["initial_state"]:
            continue
        name = state["input_name"]
        of = f"initial_state of state '{name}' of model '{config['name']}'"
        if len(state["initial_state"]) > 1:
            raise InvalidArgument(f"{of} is there more than once", field=_STATE_FIELD)
        [entry] = state["initial_state"]
        if entry["data_type"] != state["data_type"]:
            message = f"{of} is of {v2_datatype(entry)}, the state of {v2_datatype(state)}"
            raise InvalidArgument(message, field=f"{_STATE_FIELD}.data_type")
        dims = zip(state["dims"], entry["dims"], strict=False)
        if len(entry["dims"]) != len(state["dims"]) or not all(dim in (-1, size) for dim, size in dims):
            message = f"{of} has dims {entry['dims']}, the state {state['dims']}"
            raise InvalidArgument(message, field=f"{_STATE_FIELD}.dims")
        data = _sample_data(entry, _STATE_SOURCES, (), directory / "initial_state", of, _STATE_FIELD)
        states[name] = Tensor(name, v2_datatype(entry), data.shape, data)
    return states


def _sample_data(
    entry: RawConfig, sources: Sequence[str], batch: tuple[int, ...], directory: Path, of: str, field: str
) -> NDArray[Any]:
    """The data of a field with `data_type`, `dims` and one of the `sources`, of shape [*batch, *dims]; a data file is
    read from `directory`. Errors call it `of`, and its place in the config `field`. Raises `InvalidArgument` if
    something of it is missing, or the file does not fit."""
    if any(dim < 0 for dim in entry["dims"]):
        raise InvalidArgument(f"{of} must have dims of at least 0, got {entry['dims']}", field=f"{field}.dims")
    if entry["data_type"] == "TYPE_INVALID":
        raise InvalidArgument(f"{of} must specify 'data_type'", field=f"{field}.data_type")
    datatype, shape = v2_datatype(entry), (*batch, *entry["dims"])
    if not is_config_tensor_size_allowed(datatype, shape):
        limits = f"at most 64 dimensions and {MAX_CONFIG_TENSOR_BYTES} bytes"
        raise InvalidArgument(f"{of} must have {limits}, got shape {list(shape)}", field=f"{field}.dims")
    if "zero_data" in entry:
        return zero_array(shape, np.dtype(NUMPY_TYPES[datatype]))
    if "random_data" in entry:
        return _random_data(datatype, shape)
    *others, file_field = sources
    if file_field in entry:
        file = path_within(directory.parent, f"{directory.name}/{entry[file_field]}")
        return _file_data(datatype, batch, tuple(entry["dims"]), file, of)
    raise InvalidArgument(f"{of} must have one of {', '.join(others)} and {file_field}", field=field)


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
