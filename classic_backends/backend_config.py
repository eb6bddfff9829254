"""What every backend reads of a model's config: its parameters, instances, and the tensors that its file declares.

Source: https://github.com/triton-inference-server/server/blob/main/docs/user_guide/model_configuration.md. Knows no
backend's parameters, and opens no file: each backend reads its own.
"""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ..core.errors import InvalidArgument
from ..core.model import MemoryNeed, ModelConfig, RawConfig
from ..core.runtime import InstancePlacement, Parameters
from ..core.tensor import TensorSpec
from ..processes.host import usable_cores
from ..processes.rate_limiter import read_rate

log = logging.getLogger(__name__)

T = TypeVar("T", int, float)

_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off", ""}
_MAX_INTEGER = 2**31 - 1
"""The largest number that the libraries of backends take."""

_MAX_THREADS = 1024
"""Libraries start as many threads as they are told to."""


def read_thread_count(parameters: Parameters, name: str) -> int:
    """0 if absent. Raises as `read_integer`."""
    return read_integer(parameters, name, 0, most=_MAX_THREADS)


def read_integer(parameters: Parameters, name: str, default: int, least: int = 0, most: int = _MAX_INTEGER) -> int:
    """Raises `InvalidArgument` for anything but a whole number from `least` to `most`; `field` names the parameter."""
    value = _parse(parameters, name, default, int)
    if value is None or not least <= value <= most:
        bound = f"at most {most}" if value is not None and value > most else f"at least {least}"
        message = f"parameter '{name}' must be a whole number of {bound}, got '{parameters[name]}'"
        raise InvalidArgument(message, field=name)
    return value


def read_number(parameters: Parameters, name: str, default: float = 0.0) -> float:
    """Raises `InvalidArgument` for anything but a finite number of at least 0; `field` names it."""
    value = _parse(parameters, name, default, float)
    if value is None or not 0 <= value < float("inf"):
        message = f"parameter '{name}' must be a number of at least 0, got '{parameters[name]}'"
        raise InvalidArgument(message, field=name)
    return value


def _parse(parameters: Parameters, name: str, default: T, parse: Callable[[str], T]) -> T | None:
    """The value of a parameter, or the default; None for a text that `parse` does not take."""
    try:
        return parse(parameters[name]) if name in parameters else default
    except ValueError:
        return None


def read_flag(parameters: Parameters, name: str, default: bool) -> bool:
    """Raises `InvalidArgument` for anything but 0, 1, true or false; `field` names the parameter."""
    text = parameters.get(name)
    if text is None:
        return default
    if text.lower() not in _TRUE | _FALSE:
        raise InvalidArgument(f"parameter '{name}' must be 0, 1, true or false, got '{text}'", field=name)
    return text.lower() in _TRUE


def read_choice(parameters: Parameters, name: str, choices: Collection[str], default: str) -> str:
    """Raises `InvalidArgument` for none of the `choices`; `field` names the parameter."""
    text = parameters.get(name, default)
    if text not in choices:
        known = ", ".join(f"'{choice}'" for choice in choices)
        raise InvalidArgument(f"parameter '{name}' must be one of {known}, got '{text}'", field=name)
    return text


def warn_unknown_parameters(model: str, parameters: Parameters, known: Collection[str]) -> None:
    """Log the parameters that a backend does not know: a config may carry them for other programs."""
    unknown = sorted(set(parameters) - set(known))
    if unknown:
        named = ", ".join(unknown)
        log.warning("model '%s': parameters that its backend does not know have no effect: %s", model, named)


def read_placements(model: str, raw: RawConfig) -> tuple[InstancePlacement, ...]:
    """The instances of all groups in order, at least one; a GPU group has `count` on each of its GPUs. Raises
    `InvalidArgument` if all of them are passive."""
    placements = tuple(_all_placements(model, raw))
    if all(placement.passive for placement in placements):
        message = f"model '{model}' has no instance that takes requests"
        raise InvalidArgument(message, field="instance_group")
    return placements


def instances_per_gpu(raw: RawConfig) -> Counter[int | None]:
    """The number of instances on each GPU, and of all others under None."""
    return Counter(placement.gpu for placement in _all_placements("", raw))


def with_one_instance(raw: RawConfig, placement: InstancePlacement) -> dict[str, Any]:
    gpus = [] if placement.gpu is None else [placement.gpu]
    return {**raw, "instance_group": [{"kind": placement.kind, "gpus": gpus}]}


def memory_per_instance(raw: RawConfig, weights: Path) -> tuple[MemoryNeed, ...]:
    """The needs of a model whose instances load that file, or all files of a directory, each for itself."""
    size = _bytes_on_disk(weights)
    return tuple(MemoryNeed(size * count, gpu) for gpu, count in instances_per_gpu(raw).items())


def memory_shared_by_instances(raw: RawConfig, weights: Path) -> tuple[MemoryNeed, ...]:
    """The needs of a model whose instances on one device share what they load."""
    size = _bytes_on_disk(weights)
    return tuple(MemoryNeed(size, gpu) for gpu in instances_per_gpu(raw))


def threads_per_instance(raw: RawConfig) -> int:
    """The threads of an instance that has its own: the host's, shared out over the instances."""
    return max(1, usable_cores().threads // max(1, instances_per_gpu(raw)[None]))


def _bytes_on_disk(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def _all_placements(model: str, raw: RawConfig) -> Iterator[InstancePlacement]:
    for index, group in enumerate(raw.get("instance_group") or [{}]):
        kind = group.get("kind") or "KIND_CPU"
        name = group.get("name") or f"{model}_{index}"
        devices = [int(gpu) for gpu in group.get("gpus") or [0]] if kind == "KIND_GPU" else [0]
        count = max(1, int(group.get("count") or 1))
        passive = bool(group.get("passive", False))
        for number in range(len(devices) * count):
            device = devices[number // count]
            rate = None if passive else read_rate(group, device)
            yield InstancePlacement(kind, device, number, f"{name}_{number}", passive, rate)


DEFAULT_MAX_BATCH_SIZE = 4
"""Triton's, for a model that can batch and whose config has no max_batch_size."""


class FoundTensor(NamedTuple):
    """A tensor as the model has it. `shape`: with the batch dimension, -1 where any size fits; None: not declared."""

    name: str
    datatype: str
    shape: tuple[int, ...] | None
    optional: bool = False


class FoundModel(NamedTuple):
    """The tensors of a model as its file has them."""

    inputs: tuple[FoundTensor, ...]
    outputs: tuple[FoundTensor, ...]


def declares_tensors(raw: RawConfig) -> bool:
    """Whether a config names inputs and outputs: then Triton completes nothing, and an absent max_batch_size is 0."""
    return bool(raw.get("input")) and bool(raw.get("output"))


def complete_config(raw: RawConfig, model: FoundModel, parameters: Parameters) -> dict[str, Any]:
    """`raw` with the inputs, outputs and batch size that it lacks. Raises `InvalidArgument` if it has a max_batch_size,
    and the model cannot batch."""
    size = int(raw.get("max_batch_size") or 0)
    tensors = (*model.inputs, *model.outputs)
    ranks = {tensor.name: len(tensor.shape or ()) for tensor in tensors}
    entries = [*(raw.get("input") or ()), *(raw.get("output") or ())]
    # A tensor of the config with all of the model's dims would have the batch among them.
    batches = all(tensor.shape and tensor.shape[0] == -1 for tensor in tensors) and all(
        len(model_dims(entry)) != ranks.get(entry["name"]) for entry in entries
    )
    if size and not batches:
        name = raw.get("name", "")
        message = "model does not support batching while non-zero max_batch_size is specified"
        raise InvalidArgument(f"autofill failed for model '{name}': {message}", field="max_batch_size")
    if batches and not size:
        size = read_integer(parameters, "default-max-batch-size", DEFAULT_MAX_BATCH_SIZE)
    completed = {**raw, "max_batch_size": size}
    for side, side_tensors, hidden in zip(
        ("input", "output"), (model.inputs, model.outputs), sequence_tensor_names(raw), strict=True
    ):
        if not raw.get(side):
            completed[side] = [_tensor_entry(tensor, size > 0) for tensor in side_tensors if tensor.name not in hidden]
    return completed


def _tensor_entry(tensor: FoundTensor, batched: bool) -> dict[str, Any]:
    dims = list((tensor.shape or ())[int(batched) :])
    entry: dict[str, Any] = {"name": tensor.name, "data_type": config_type(tensor.datatype), "dims": dims or [1]}
    if not dims:
        entry["reshape"] = {"shape": []}
    return entry | ({"optional": True} if tensor.optional else {})


def sequence_tensor_names(raw: RawConfig) -> tuple[set[str], set[str]]:
    """Inputs and outputs of the model that belong to its sequences: controls and states, no tensors of clients."""
    sequence_batching: RawConfig = raw.get("sequence_batching") or {}
    states: Sequence[RawConfig] = sequence_batching.get("state", ())
    controls = (str(control.get("name", "")) for control in sequence_batching.get("control_input", ()))
    inputs = {*controls, *(str(state.get("input_name", "")) for state in states)}
    return inputs, {str(state.get("output_name", "")) for state in states}


def config_type(datatype: str) -> str:
    """The `data_type` of a config for a v2 datatype."""
    return "TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}"


def check_config_matches(config: ModelConfig, model: FoundModel) -> None:
    """Check that each tensor of the config is one of the model's, of its type and of a shape that fits. Raises
    `InvalidArgument` if one is not; `field` names it."""
    batch_inputs = (name for entry in config.raw.get("batch_input", ()) for name in entry.get("target_name", ()))
    names = {*batch_inputs, *(spec.name for spec in config.inputs)}
    missing = [tensor.name for tensor in model.inputs if tensor.name not in names and not tensor.optional]
    if missing:
        count = f"configuration expects {len(names)} inputs, model provides {len(model.inputs)}"
        raise _refuse(config, "input", f"{count}: '{missing[0]}' is missing")
    entries = chain.from_iterable(config.raw.get(side, ()) for side in ("input", "output"))
    raw_tensors = {entry["name"]: entry for entry in entries}
    for side, specs, tensors in (("input", config.inputs, model.inputs), ("output", config.outputs, model.outputs)):
        known = {tensor.name: tensor for tensor in tensors}
        for spec in specs:
            path = f"{side}.{spec.name}"
            if spec.name not in known:
                allowed = ", ".join(sorted(known))
                message = f"unexpected inference {side} '{spec.name}', allowed {side}s are: {allowed}"
                raise _refuse(config, path, message)
            _check_tensor(config, path, known[spec.name], spec, raw_tensors.get(spec.name, {}))


def _check_tensor(config: ModelConfig, path: str, tensor: FoundTensor, spec: TensorSpec, raw: RawConfig) -> None:
    if tensor.datatype != spec.datatype:
        types = f"{config_type(spec.datatype)} in the configuration, {config_type(tensor.datatype)} in the model"
        raise _refuse(config, f"{path}.data_type", f"'{spec.name}' has data type {types}")
    if raw.get("allow_ragged_batch") or tensor.shape is None:
        return  # a ragged tensor is flat, whatever the dims of a request
    dims = model_dims(raw) if raw else spec.dims
    shape = (-1, *dims) if config.max_batch_size else tuple(dims)
    if not tensor.shape and all(dim == -1 for dim in shape):
        return  # onnxruntime reports a scalar and an unknown rank alike
    # As in Triton, a free dimension of the config needs a free one of the model.
    if len(shape) != len(tensor.shape) or any(
        model_dim not in (-1, dim) for dim, model_dim in zip(shape, tensor.shape, strict=True)
    ):
        message = f"'{spec.name}' has shape {list(shape)} in the configuration, {list(tensor.shape)} in the model"
        batch = "; its first dimension is the batch, because max_batch_size > 0" if config.max_batch_size else ""
        raise _refuse(config, f"{path}.dims", message + batch)


def model_dims(raw: RawConfig) -> tuple[int, ...]:
    """The dims of a config's tensor as the model sees them."""
    reshaped = raw.get("reshape")
    dims = raw.get("dims", ()) if reshaped is None else reshaped.get("shape", ())
    return tuple(int(dim) for dim in dims)


def _refuse(config: ModelConfig, field: str, message: str) -> InvalidArgument:
    return InvalidArgument(f"unable to load model '{config.name}': {message}", field=field)
