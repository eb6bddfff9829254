"""`charonia run-model`: one model of a repository, one request, its answers, without a server.

Loads the model and the steps of an ensemble, as mode explicit does, and prints each response as a line of JSON. What a
model prints goes to the standard error.
"""

import asyncio
import json
import logging
import sys
from collections.abc import Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..api.json_tensors import flatten, to_array
from ..core.errors import InvalidArgument
from ..core.model import ModelConfig
from ..core.request import InferRequest, InferResponse, ParameterValue
from ..core.tensor import NUMPY_TYPES, Tensor, TensorSpec
from ..repository.builder import ModelBuilder, parse_backend_config
from ..repository.catalog import RepositoryCatalog
from ..repository.config_options import ConfigOptions
from ..repository.gateway import InProcessGateway
from ..repository.model_control import ModelControl

ENDPOINT = "run-model"


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """A request as the command line says it: inputs as NAME=VALUE, parameters as KEY=VALUE, and names of models to load
    before this one."""

    inputs: Sequence[str] = ()
    parameters: Sequence[str] = ()
    loads: Sequence[str] = ()


def print_responses(directory: Path, request: ModelRequest, options: ConfigOptions) -> None:
    """Print the responses of the model in `directory`, as they come.

    Raises:
        CharoniaError: the model does not load, the request does not fit it, or it answered with an error.
    """
    if not directory.is_dir():
        raise InvalidArgument(f"there is no directory '{directory}'")
    directory = directory.resolve()
    backends = parse_backend_config(options.backend_config, options.backend_directory)
    complete = not options.disable_auto_complete_config
    builder = ModelBuilder(backends, complete, backend_directory=options.backend_directory)
    catalog = RepositoryCatalog([directory.parent], config_name=options.model_config_name)
    asyncio.run(_ask_model(directory.name, request, catalog, builder))


def log_what_models_print() -> None:
    """Write warnings, and what models print and tell, to the standard error."""
    logging.basicConfig(format="%(message)s", stream=sys.stderr, level=logging.WARNING)
    for name in ("charonia.classic_backends", "charonia.engine"):
        logging.getLogger(name).setLevel(logging.INFO)


async def _ask_model(
    model: str, model_request: ModelRequest, catalog: RepositoryCatalog, builder: ModelBuilder
) -> None:
    gateway = InProcessGateway(end_listeners=(), builder=builder)
    # A pipeline's code is that of whoever runs the command.
    gateway.model_control = ModelControl(catalog, gateway.registry, gateway.lifecycle, allow_pipelines=True)
    try:
        for name in (*model_request.loads, model):
            await gateway.load_model(name)
        config = gateway.model_config(model)
        inputs = {tensor.name: tensor for tensor in (_read_input(text, config) for text in model_request.inputs)}
        request = InferRequest("", inputs, None, dict(_read_parameters(model_request.parameters)))
        with gateway.open_request(ENDPOINT) as context:
            handle = await gateway.acquire(context, config.name)
            async with aclosing(handle.infer(request)) as responses:
                async for response in responses:
                    _print_response(response)
    finally:
        gateway.begin_exit()
        await gateway.lifecycle.close()


def _read_parameters(texts: Sequence[str]) -> Iterable[tuple[str, ParameterValue]]:
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise InvalidArgument(f"--param must be KEY=VALUE, got '{text}'")
        try:
            parsed = json.loads(value)
        except ValueError:
            parsed = value
        yield name, parsed if isinstance(parsed, (bool, int, float, str)) else value


def _read_input(text: str, config: ModelConfig) -> Tensor:
    """The tensor of NAME=JSON, NAME=@file.npy or, where the model takes strings, NAME=text."""
    name, equals, value = text.partition("=")
    if not equals:
        raise InvalidArgument(f"--input must be NAME=VALUE, got '{text}'")
    spec = next((spec for spec in config.inputs if spec.name == name), None)
    if spec is None:
        known = ", ".join(spec.name for spec in config.inputs)
        raise InvalidArgument(f"model '{config.name}' has no input '{name}'; it has {known}", field=name)
    array = _read_file(spec, Path(value[1:])) if value.startswith("@") else _read_value(spec, value)
    rank = len(spec.dims) + (config.max_batch_size > 0)
    if array.ndim == 0 or (config.max_batch_size > 0 and array.ndim == rank - 1):
        array = array.reshape((1,) * (rank - array.ndim) + array.shape)
    return Tensor(name, spec.datatype, array.shape, array)


def _read_file(spec: TensorSpec, file: Path) -> NDArray[Any]:
    try:
        array = np.load(file, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"input '{spec.name}': '{file}' cannot be read: {error}", field=spec.name) from None
    if spec.datatype == "BYTES" and array.dtype.kind in "SU":
        texts = [text if isinstance(text, bytes) else text.encode() for text in array.ravel().tolist()]
        return np.array(texts, np.object_).reshape(array.shape)
    if array.dtype != NUMPY_TYPES[spec.datatype]:
        message = f"input '{spec.name}' is {spec.datatype}, and '{file}' has {array.dtype}"
        raise InvalidArgument(message, field=spec.name)
    return np.ascontiguousarray(array)


def _read_value(spec: TensorSpec, text: str) -> NDArray[Any]:
    value: Any = text
    if spec.datatype != "BYTES" or text.startswith("["):
        try:
            value = json.loads(text)
        except ValueError as error:
            raise InvalidArgument(f"input '{spec.name}' is no JSON: {error}", field=spec.name) from None
    shape, inner = [], value
    while isinstance(inner, list):
        shape.append(len(inner))
        inner = inner[0] if inner else None
    if spec.datatype == "BF16":
        raise InvalidArgument(f"input '{spec.name}' is BF16: give its bits as @file.npy of uint16", field=spec.name)
    datatype = "FP32" if spec.datatype == "FP16" else spec.datatype
    array = to_array(datatype, flatten(value) if shape else [value], spec.name)
    if array.size != np.prod(shape, dtype=int):
        raise InvalidArgument(f"input '{spec.name}' has rows of different lengths", field=spec.name)
    return array.astype(NUMPY_TYPES[spec.datatype], copy=False).reshape(shape)


def _print_response(response: InferResponse) -> None:
    """A line of JSON; none for a response that only says that there are no more."""
    outputs = {tensor.name: _to_json(tensor) for tensor in response.outputs}
    line = {"outputs": outputs, **({"parameters": dict(response.parameters)} if response.parameters else {})}
    if outputs or response.parameters:
        print(json.dumps(line, default=lambda value: value.decode(errors="replace")), flush=True)


def _to_json(tensor: Tensor) -> Any:
    data = tensor.data.reshape(tensor.shape)
    if tensor.datatype == "BF16":
        data = (data.astype(np.uint32) << 16).view(np.float32)
    return data.tolist()
