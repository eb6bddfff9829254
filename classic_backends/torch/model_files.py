"""Opens the files that PyTorch saves of models: TorchScript (`.pt`), exported programs and AOTInductor packages
(`.pt2`).

TorchScript does not declare its tensors. They can be guessed: the model is run on inputs that its first weights
suggest, and again with each dimension changed, to learn which are free. Imported only where such a model is loaded.
"""

import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile, ZipFile

import numpy as np
import torch

from ...core.errors import InvalidArgument, Unsupported
from ...core.model import RawConfig
from ...core.tensor import NUMPY_TYPES
from ...processes.host import map_large_blocks_separately
from ..backend_config import FoundModel, FoundTensor, complete_config
from ..library_models import require_file

DATATYPES: dict[torch.dtype, str] = {
    getattr(torch, np.dtype(dtype).name): datatype
    for datatype, dtype in NUMPY_TYPES.items()
    if datatype not in ("BF16", "BYTES")
} | {torch.bfloat16: "BF16"}


_PACKAGE_METADATA, _PACKAGE_DEVICE = "_metadata.json", "AOTI_DEVICE_KEY"
"""The end of the names of an AOTInductor package's files that tell what it was compiled for, and the key in them."""


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model and the names of its arguments in order, empty if the file does not declare them; `keyword_names` are
    those to be passed by name. `tensors`: None if the file does not declare them."""

    module: Callable[..., Any]
    argument_names: tuple[str, ...] = ()
    keyword_names: frozenset[str] = frozenset()
    tensors: FoundModel | None = None


def open_model_file(file: Path, device: str | None) -> OpenedModel:
    """Load a model. `device`: of its weights; None leaves them where they were when it was saved. Raises `NotFound` if
    there is no such file, `InvalidArgument` if PyTorch cannot load it, and `Unsupported` if an argument is no
    tensor."""
    require_file(file)
    map_large_blocks_separately()
    try:
        with warnings.catch_warnings():
            # TorchScript is deprecated, which the model's owner knows.
            warnings.simplefilter("ignore", DeprecationWarning)
            if file.suffix != ".pt2":
                module: Any = torch.jit.load(str(file), map_location=device)  # type: ignore[no-untyped-call]
                module.eval()
                arguments = module.forward.schema.arguments[1:]
                return OpenedModel(module, tuple(argument.name for argument in arguments))
            with ZipFile(file) as package:
                compiled = [name for name in package.namelist() if "/aotinductor/" in name]
                metadata = [json.loads(package.read(name)) for name in compiled if name.endswith(_PACKAGE_METADATA)]
            if compiled:
                targets = {entries[_PACKAGE_DEVICE] for entries in metadata if _PACKAGE_DEVICE in entries}
                return _open_compiled(file, device, targets)
            return _open_exported(file, device)
    except Unsupported:
        raise
    except Exception as error:  # PyTorch raises many classes
        raise InvalidArgument(f"PyTorch cannot load {file}: {error}") from error


def _open_compiled(file: Path, device: str | None, targets: set[str]) -> OpenedModel:
    """A package has code for one kind of device, which finds nothing where another one keeps its tensors. `targets`:
    the kinds that its metadata name."""
    kind, _, number = (device or "").partition(":")
    if kind and targets and targets != {kind}:
        message = f"{file} was compiled for {', '.join(sorted(targets))}, and its instance is on {device}"
        raise Unsupported(f"{message}: set its kind to KIND_GPU for cuda, or KIND_CPU", field="instance_group.kind")
    return OpenedModel(torch._inductor.aoti_load_package(str(file), device_index=int(number or -1)))


def _open_exported(file: Path, device: str | None) -> OpenedModel:
    program = torch.export.load(file)
    if device is not None and device != "cpu":
        from torch.export.passes import move_to_device_pass

        program = move_to_device_pass(program, device)
    names = tuple(program.graph_signature.user_inputs)
    _, keywords = program.example_inputs or ((), {})
    nodes = {node.name: node for node in program.graph.nodes}
    if not all(isinstance(name, str) and isinstance(nodes[name].meta.get("val"), torch.Tensor) for name in names):
        raise Unsupported(f"{file}: the arguments of an exported program must be tensors")
    inputs = tuple(_found(str(name), nodes[str(name)]) for name in names)
    outputs = tuple(
        _found(f"OUTPUT__{index}", nodes[str(name)])
        for index, name in enumerate(program.graph_signature.user_outputs)
        if isinstance(name, str)
    )
    return OpenedModel(program.module(), tuple(map(str, names)), frozenset(keywords), FoundModel(inputs, outputs))


def _found(name: str, node: Any) -> FoundTensor:
    value = node.meta["val"]
    shape = tuple(size if isinstance(size, int) else -1 for size in value.shape)
    return FoundTensor(name, DATATYPES.get(value.dtype, ""), shape)


_BATCH = 2
_IMAGE_SIZES = (224, 64, 32, 28)
_SEQUENCE_LENGTH = 8


class Trial(NamedTuple):
    """A type and shape, batch included, that all inputs have."""

    dtype: torch.dtype
    shape: tuple[int, ...]


def guess_config(raw: RawConfig, file: Path) -> RawConfig:
    """`raw` with the batch size and tensors of a TorchScript file, named INPUT__0, OUTPUT__0 and so on, as Triton's
    repositories name them.

    Raises:
        InvalidArgument: it is no TorchScript, or runs on nothing that is tried.
    """
    return complete_config(raw, guess_tensors(file), {})


def guess_tensors(file: Path) -> FoundModel:
    """The tensors alone; see `guess_config`."""
    _refuse_weights(file)
    module: Any = open_model_file(file, "cpu").module
    declared = module.forward.schema.arguments[1:]
    arguments = [argument for argument in declared if not argument.has_default_value()]
    names = ", ".join(f"{argument.name}: {argument.type}" for argument in declared)
    if arguments and all(argument.type.kind() == "TensorType" for argument in arguments):
        for trial in _trials(module):
            if (results := _run(module, trial, len(arguments))) is not None:
                return _measured(module, trial, results, len(arguments))
    raise InvalidArgument(
        f"{file} does not declare the types and shapes of its tensors, and forward({names}) runs on none that were "
        "tried: write its config by hand, with input and output (docs/repositories.md)"
    )


def _refuse_weights(file: Path) -> None:
    try:
        with ZipFile(file) as archive:
            names = archive.namelist()
    except (BadZipFile, OSError) as error:
        raise InvalidArgument(f"{file} is no TorchScript: {error}") from None
    if not any(name.endswith("/constants.pkl") for name in names):
        raise InvalidArgument(
            f"{file} holds weights and no model: save that by torch.jit.script(model).save(...), or torch.export.save"
        )


def _trials(module: Any) -> Iterator[Trial]:
    for weight in (parameter for parameter in module.parameters() if parameter.ndim >= 2):
        size = weight.shape[1]
        if weight.ndim == 2:
            yield Trial(weight.dtype, (_BATCH, size))
            yield Trial(torch.int64, (_BATCH, _SEQUENCE_LENGTH))
            yield Trial(weight.dtype, (_BATCH, _SEQUENCE_LENGTH, size))
        else:
            spatial = weight.ndim - 2
            yield from (Trial(weight.dtype, (_BATCH, size, *(side,) * spatial)) for side in _IMAGE_SIZES)
        break  # what comes first is what meets the inputs
    yield Trial(torch.float32, (_BATCH, _SEQUENCE_LENGTH))
    yield Trial(torch.float32, (_BATCH, 3, 32, 32))


def _run(module: Any, trial: Trial, count: int) -> dict[str, torch.Tensor] | None:
    """The outputs by name; None where the model does not run so, or makes something else than tensors."""
    try:
        with torch.inference_mode():
            results = module(*(torch.ones(trial.shape, dtype=trial.dtype) for _ in range(count)))
    except Exception:  # of a model's own making
        return None
    if not isinstance(results, Mapping):
        several = results if isinstance(results, (tuple, list)) else (results,)
        results = {f"OUTPUT__{index}": result for index, result in enumerate(several)}
    fits = all(isinstance(result, torch.Tensor) and result.dtype in DATATYPES for result in results.values())
    return dict(results) if results and fits else None


def _measured(module: Any, trial: Trial, results: dict[str, torch.Tensor], count: int) -> FoundModel:
    input_shape = list(trial.shape)
    output_shapes = {name: list(tensor.shape) for name, tensor in results.items()}
    ranks = {name: len(shape) for name, shape in output_shapes.items()}
    for axis, size in enumerate(trial.shape):
        changed_shape = (*trial.shape[:axis], size + 1, *trial.shape[axis + 1 :])
        changed_results = _run(module, trial._replace(shape=changed_shape), count)
        if changed_results is None or {name: tensor.ndim for name, tensor in changed_results.items()} != ranks:
            continue
        input_shape[axis] = -1
        for name, shape in output_shapes.items():
            changed = changed_results[name].shape
            output_shapes[name] = [size if size == other else -1 for size, other in zip(shape, changed, strict=True)]
    datatype = DATATYPES[trial.dtype]
    inputs = (FoundTensor(f"INPUT__{index}", datatype, tuple(input_shape)) for index in range(count))
    outputs = (
        FoundTensor(name, DATATYPES[tensor.dtype], tuple(output_shapes[name])) for name, tensor in results.items()
    )
    return FoundModel(tuple(inputs), tuple(outputs))
