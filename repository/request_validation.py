"""The check of a request against what its model declares, in Triton's order and with its messages.

Knows nothing of protocols or of how a model computes.
"""

from collections.abc import Iterable

from ..core.errors import InvalidArgument, request_id_prefix
from ..core.model import ModelConfig
from ..core.request import InferRequest
from ..core.tensor import Tensor, TensorSpec

_BATCH_NOTE = (
    "NOTE: with a non-zero max_batch_size the first dimension is the batch, which the dims of a config leave out."
)


def validate_request(config: ModelConfig, request: InferRequest) -> None:
    """Raises `InvalidArgument` for the first thing that does not fit."""
    inputs = request.inputs
    if request.outputs:
        _check_names(config, "output", request.outputs, config.outputs)
    known = 0
    for spec in config.inputs:
        known += spec.name in inputs
    if known != len(inputs):
        _check_names(config, "input", inputs, config.inputs)
    if known != len(config.inputs):
        _check_count(config, request)
    if config.max_batch_size > 0 and inputs:
        _check_batch(config, request)
    for spec in config.inputs:
        if spec.name in inputs:
            _check_tensor(config, spec, inputs[spec.name], request)


def _check_names(config: ModelConfig, side: str, names: Iterable[str], specs: Iterable[TensorSpec]) -> None:
    known = {spec.name for spec in specs}
    for name in names:
        if name not in known:
            raise InvalidArgument(f"unexpected inference {side} '{name}' for model '{config.name}'", field=name)


def _check_count(config: ModelConfig, request: InferRequest) -> None:
    missing = [spec.name for spec in config.inputs if not spec.optional and spec.name not in request.inputs]
    if not missing:
        return
    total, required = len(config.inputs), sum(not spec.optional for spec in config.inputs)
    expected = f"{total} inputs" if total == required else f"number of inputs between {required} and {total}"
    raise InvalidArgument(
        f"{request_id_prefix(request.id)}expected {expected} but got {len(request.inputs)} inputs "
        f"for model '{config.name}'. "
        f"Got input(s) [{_quoted_names(request.inputs)}], but missing required input(s) [{_quoted_names(missing)}]. "
        "Please provide all required input(s).",
        field=missing[0],
    )


def _check_batch(config: ModelConfig, request: InferRequest) -> None:
    size = None
    for name, tensor in request.inputs.items():
        if not tensor.shape:
            message = f"input '{name}' has no shape but model requires batch dimension for '{config.name}'"
            raise _invalid(request, message, name)
        if size is not None and tensor.shape[0] != size:
            message = f"input '{name}' batch size does not match other inputs for '{config.name}'"
            raise _invalid(request, message, name)
        size = tensor.shape[0]
        if not 1 <= size <= config.max_batch_size:
            bound = ">= 1" if size < 1 else f"<= {config.max_batch_size}"
            raise _invalid(request, f"inference request batch-size must be {bound} for '{config.name}'", name)


def _invalid(request: InferRequest, message: str, field: str) -> InvalidArgument:
    return InvalidArgument(f"{request_id_prefix(request.id)}{message}", field=field)


def _check_tensor(config: ModelConfig, spec: TensorSpec, tensor: Tensor, request: InferRequest) -> None:
    if tensor.datatype != spec.datatype:
        message = (
            f"inference input '{spec.name}' data-type is '{tensor.datatype}', "
            f"but model '{config.name}' expects '{spec.datatype}'"
        )
        raise _invalid(request, message, spec.name)
    batched = config.max_batch_size > 0
    shape = tensor.shape[1:] if batched else tensor.shape
    if shape != spec.dims and not _is_shape_allowed(shape, spec.dims):
        expected = (-1, *spec.dims) if batched else spec.dims
        message = (
            f"unexpected shape for input '{spec.name}' for model '{config.name}'. "
            f"Expected {_format_dims(expected)}, got {_format_dims(tensor.shape)}. {_BATCH_NOTE if batched else ''}"
        )
        raise _invalid(request, message, spec.name)


def _is_shape_allowed(shape: tuple[int, ...], dims: tuple[int, ...]) -> bool:
    if len(shape) != len(dims):
        return False
    # all() over a generator takes three times as long
    return not [dim for size, dim in zip(shape, dims, strict=True) if dim not in (-1, size)]


def _quoted_names(names: Iterable[str]) -> str:
    return ",".join(f"'{name}'" for name in names)


def _format_dims(dims: tuple[int, ...]) -> str:
    return f"[{','.join(map(str, dims))}]"
