"""The checks that every door shares: does a request fit what the model declares?

v2's section 4, in its order and its words. Knows nothing of protocols or of how a model computes.
"""

from collections.abc import Iterable

from ..core.errors import InvalidArgument
from ..core.model import ModelConfig
from ..core.request import InferRequest
from ..core.tensor import Tensor, TensorSpec


def check(config: ModelConfig, request: InferRequest) -> None:
    """Raises `InvalidArgument` for the first thing that does not fit."""
    _check_names(config, request)
    _check_count(config, request)
    for spec in config.inputs:
        if spec.name in request.inputs:
            _check_tensor(config, spec, request.inputs[spec.name], request)


def _check_names(config: ModelConfig, request: InferRequest) -> None:
    outputs = {spec.name for spec in config.outputs}
    for name in request.outputs or ():
        if name not in outputs:
            raise InvalidArgument(f"unexpected inference output '{name}' for model '{config.name}'", field=name)
    inputs = {spec.name for spec in config.inputs}
    for name in request.inputs:
        if name not in inputs:
            raise InvalidArgument(f"unexpected inference input '{name}' for model '{config.name}'", field=name)


def _check_count(config: ModelConfig, request: InferRequest) -> None:
    missing = [spec.name for spec in config.inputs if not spec.optional and spec.name not in request.inputs]
    if not missing:
        return
    total, required = len(config.inputs), sum(not spec.optional for spec in config.inputs)
    expected = f"{total} inputs" if total == required else f"number of inputs between {required} and {total}"
    raise InvalidArgument(
        f"{_prefix(request)}expected {expected} but got {len(request.inputs)} inputs for model '{config.name}'. "
        f"Got input(s) [{_names(request.inputs)}], but missing required input(s) [{_names(missing)}]. "
        "Please provide all required input(s).",
        field=missing[0],
    )


def _check_tensor(config: ModelConfig, spec: TensorSpec, tensor: Tensor, request: InferRequest) -> None:
    if tensor.datatype != spec.datatype:
        raise InvalidArgument(
            f"{_prefix(request)}inference input '{spec.name}' data-type is '{tensor.datatype}', "
            f"but model '{config.name}' expects '{spec.datatype}'",
            field=spec.name,
        )
    expected = (-1, *spec.dims) if config.max_batch_size > 0 else spec.dims
    if not _fits(tensor.shape, expected):
        raise InvalidArgument(
            f"{_prefix(request)}unexpected shape for input '{spec.name}' for model '{config.name}'. "
            f"Expected {_dims(expected)}, got {_dims(tensor.shape)}. ",
            field=spec.name,
        )


def _fits(shape: tuple[int, ...], dims: tuple[int, ...]) -> bool:
    return len(shape) == len(dims) and all(dim in (-1, size) for size, dim in zip(shape, dims, strict=True))


def _prefix(request: InferRequest) -> str:
    return f"[request id: {request.id or '<id_unknown>'}] "


def _names(names: Iterable[str]) -> str:
    return ",".join(f"'{name}'" for name in names)


def _dims(dims: tuple[int, ...]) -> str:
    return f"[{','.join(map(str, dims))}]"
