"""What a model's file tells of its inputs and outputs, beside what its config says: fills in, or compares.

model-config.md sections 1.3 and 3. Knows nothing of files: each backend reads its own.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from ..core.errors import InvalidArgument
from ..core.model import ConfigDocument, ModelConfig
from ..core.tensor import TensorSpec
from .backend_parameters import read_integer
from .sequences.sequence_tensors import sequence_tensor_names

DEFAULT_MAX_BATCH_SIZE = 4
"""Triton's, for a model that can batch and whose config does not say how much."""


class FoundTensor(NamedTuple):
    """A tensor as the model has it: the whole shape, a batch dimension included; -1 is free. `shape` None: untold."""

    name: str
    datatype: str
    shape: tuple[int, ...] | None
    optional: bool = False


class FoundModel(NamedTuple):
    """Everything that goes into a model and comes out."""

    inputs: tuple[FoundTensor, ...]
    outputs: tuple[FoundTensor, ...]


def declares_tensors(document: ConfigDocument) -> bool:
    """It names inputs and outputs: then Triton looks no further, and 0 means that the model does not batch."""
    return bool(document.get("input")) and bool(document.get("output"))


def complete_config(document: ConfigDocument, found: FoundModel, parameters: Mapping[str, str]) -> dict[str, Any]:
    """`document` with the inputs, outputs and batch size that it lacks.

    Raises:
        InvalidArgument: it wants batches of a model that has none.
    """
    size = int(document.get("max_batch_size") or 0)
    batches = _can_batch(found) and _leaves_out_batch(document, found)
    if size and not batches:
        name = document.get("name", "")
        message = "model does not support batching while non-zero max_batch_size is specified"
        raise InvalidArgument(f"autofill failed for model '{name}': {message}", field="max_batch_size")
    if batches and not size:
        size = read_integer(parameters, "default-max-batch-size", DEFAULT_MAX_BATCH_SIZE)
    inputs, outputs = sequence_tensor_names(document)
    sides = {
        "input": [each for each in found.inputs if each.name not in inputs],
        "output": [each for each in found.outputs if each.name not in outputs],
    }
    filled = {side: [_tensor(each, size > 0) for each in tensors] for side, tensors in sides.items()}
    given = {side: document[side] for side in sides if document.get(side)}
    return {**document, **filled, **given, "max_batch_size": size}


def _can_batch(found: FoundModel) -> bool:
    return all(each.shape and each.shape[0] == -1 for each in (*found.inputs, *found.outputs))


def _leaves_out_batch(document: ConfigDocument, found: FoundModel) -> bool:
    """No tensor of the config has as many dims as the model's own: then the batch would be among them."""
    ranks = {each.name: len(each.shape or ()) for each in (*found.inputs, *found.outputs)}
    given = [*(document.get("input") or ()), *(document.get("output") or ())]
    return all(len(_dims(each)) != ranks.get(each["name"]) for each in given)


def _tensor(found: FoundTensor, batched: bool) -> dict[str, Any]:
    dims = list((found.shape or ())[int(batched) :])
    tensor: dict[str, Any] = {"name": found.name, "data_type": config_type(found.datatype), "dims": dims or [1]}
    if not dims:
        tensor["reshape"] = {"shape": []}
    return tensor | ({"optional": True} if found.optional else {})


def config_type(datatype: str) -> str:
    """v2's name of a datatype in the words of configs."""
    return "TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}"


def check_config_matches(config: ModelConfig, found: FoundModel) -> None:
    """Every tensor of the config is one of the model's, of its type, and of a shape that fits.

    Raises:
        InvalidArgument: one is not; `field` names it.
    """
    made = {name for helper in config.document.get("batch_input", ()) for name in helper.get("target_name", ())}
    _check_count(config, found, made)
    documents = {each["name"]: each for side in ("input", "output") for each in config.document.get(side, ())}
    for side, specs, tensors in (("input", config.inputs, found.inputs), ("output", config.outputs, found.outputs)):
        known = {each.name: each for each in tensors}
        for spec in specs:
            where = f"{side}.{spec.name}"
            if spec.name not in known:
                allowed = ", ".join(sorted(known))
                _refuse(config, where, f"unexpected inference {side} '{spec.name}', allowed {side}s are: {allowed}")
            _check_tensor(config, where, known[spec.name], spec, documents.get(spec.name, {}))


def _check_count(config: ModelConfig, found: FoundModel, made: set[str]) -> None:
    given = {spec.name for spec in config.inputs} | made
    missing = [each.name for each in found.inputs if each.name not in given and not each.optional]
    if missing:
        count = f"configuration expects {len(given)} inputs, model provides {len(found.inputs)}"
        _refuse(config, "input", f"{count}: '{missing[0]}' is missing")


def _check_tensor(
    config: ModelConfig, where: str, found: FoundTensor, spec: TensorSpec, document: ConfigDocument
) -> None:
    if found.datatype != spec.datatype:
        wanted, has = config_type(spec.datatype), config_type(found.datatype)
        message = f"'{spec.name}' has data type {wanted} in the configuration, {has} in the model"
        _refuse(config, f"{where}.data_type", message)
    if document.get("allow_ragged_batch") or found.shape is None:
        return  # a flat tensor, whatever the dims of a request
    dims = _dims(document) if document else spec.dims
    whole = (-1, *dims) if config.max_batch_size else tuple(dims)
    if not found.shape and all(dim == -1 for dim in whole):
        return  # onnxruntime says the same of a scalar and of a rank that it does not know
    if not _fits(whole, found.shape):
        message = f"'{spec.name}' has shape {list(whole)} in the configuration, {list(found.shape)} in the model"
        batch = "; its first dimension is the batch, because max_batch_size > 0" if config.max_batch_size else ""
        _refuse(config, f"{where}.dims", message + batch)


def _dims(document: ConfigDocument) -> Sequence[int]:
    """As the model sees them."""
    reshaped = document.get("reshape")
    dims = document.get("dims", ()) if reshaped is None else reshaped.get("shape", ())
    return tuple(int(dim) for dim in dims)


def _fits(given: Sequence[int], shape: Sequence[int]) -> bool:
    """As Triton compares: a free dimension of the config needs a free one of the model."""
    return len(given) == len(shape) and all(there in (-1, here) for here, there in zip(given, shape, strict=True))


def _refuse(config: ModelConfig, field: str, message: str) -> NoReturn:
    raise InvalidArgument(f"unable to load model '{config.name}': {message}", field=field)
