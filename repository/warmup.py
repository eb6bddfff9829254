"""Requests that a model answers before anybody else's: the samples of a config's `model_warmup`.

model-config.md section 7. Makes the requests; who runs them on which instance, the model decides.
"""

from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.errors import InvalidArgument
from ..core.request import InferRequest
from ..core.tensor import NUMPY_TYPES, Tensor
from .document import Config
from .labels import inside

_WIDTHS = {"BF16": np.dtype(np.uint16)}


def read_warmup(config: Config, directory: Path) -> tuple[InferRequest, ...]:
    """The samples, each as often as it counts, with data from `warmup/` in the model's directory.

    Raises:
        InvalidArgument: a sample does not fit the model, or its file not the sample.
    """
    samples = ((_sample(config, sample, directory), max(sample.count, 1)) for sample in config.model_warmup)
    return tuple(request for request, count in samples for _ in range(count))


def _sample(config: Config, sample: Config, directory: Path) -> InferRequest:
    where = f"model_warmup.{sample.name}"
    if sample.batch_size > max(config.max_batch_size, 1):
        message = f"warm-up sample '{sample.name}' of model '{config.name}' has batch_size {sample.batch_size}"
        raise InvalidArgument(f"{message}, more than max_batch_size {config.max_batch_size}", field=where)
    batch = (max(sample.batch_size, 1),) if config.max_batch_size > 0 else ()
    tensors = {name: _tensor(config, sample, name, batch, directory) for name in sorted(sample.inputs)}
    return InferRequest(sample.name, tensors)


def _tensor(config: Config, sample: Config, name: str, batch: tuple[int, ...], directory: Path) -> Tensor:
    given, where = sample.inputs[name], f"model_warmup.{sample.name}.inputs.{name}"
    of = f"input '{name}' of warm-up sample '{sample.name}' of model '{config.name}'"
    if any(dim < 0 for dim in given.dims):
        raise InvalidArgument(f"{of} must have dims of at least 0, got {list(given.dims)}", field=where)
    if given.data_type == 0:
        raise InvalidArgument(f"{of} must specify 'data_type'", field=where)
    datatype = datatype_of(given)
    shape = (*batch, *given.dims)
    match given.WhichOneof("input_data_type"):
        case "zero_data":
            data = _zeros(datatype, shape)
        case "random_data":
            data = _random(datatype, shape)
        case "input_data_file":
            data = _file(datatype, shape, inside(directory, f"warmup/{given.input_data_file}"), of)
        case _:
            raise InvalidArgument(f"{of} must have one of zero_data, random_data and input_data_file", field=where)
    return Tensor(name, datatype, shape, data)


def datatype_of(message: Any) -> str:
    """v2's name of a field `data_type`: FP32 for TYPE_FP32, BYTES for TYPE_STRING."""
    values = message.DESCRIPTOR.fields_by_name["data_type"].enum_type.values_by_number
    name = str(values[message.data_type].name).removeprefix("TYPE_")
    return "BYTES" if name == "STRING" else name


def _dtype(datatype: str) -> np.dtype[Any]:
    return _WIDTHS.get(datatype) or np.dtype(NUMPY_TYPES[datatype])


def _zeros(datatype: str, shape: tuple[int, ...]) -> NDArray[Any]:
    if datatype == "BYTES":
        return np.full(shape, b"", dtype=np.object_)
    return np.zeros(shape, _dtype(datatype))


def _random(datatype: str, shape: tuple[int, ...]) -> NDArray[Any]:
    """Of strings, empty ones, as Triton has it; of floats numbers from 0 to 1, of integers small ones."""
    generator = np.random.default_rng(0)
    dtype = _dtype(datatype)
    if datatype == "BYTES":
        return _zeros(datatype, shape)
    if datatype == "BF16":
        return (generator.random(shape, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    if dtype.kind == "f":
        return generator.random(shape).astype(dtype)
    return generator.integers(0, 2 if datatype == "BOOL" else 100, shape).astype(dtype)


def _file(datatype: str, shape: tuple[int, ...], file: Path, of: str) -> NDArray[Any]:
    """Raw elements in the machine's order; of strings each after its length in 4 bytes."""
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise InvalidArgument(f"{of}: cannot read {file}: {error.strerror}") from None
    if datatype == "BYTES":
        return _strings(raw, shape, f"{of}: {file}")
    wanted = prod(shape) * _dtype(datatype).itemsize
    if len(raw) != wanted:
        raise InvalidArgument(f"{of}: {file} has {len(raw)} bytes, not {wanted}")
    return np.frombuffer(raw, _dtype(datatype)).reshape(shape)


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
