"""Opens the files that PyTorch saves of models: TorchScript (`.pt`), exported programs and AOTInductor packages
(`.pt2`).

Imported only where such a model is loaded.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import torch

from ...core.errors import InvalidArgument, NotFound, Unsupported
from ...core.tensor import NUMPY_TYPES
from ...processes.host import map_large_blocks_separately
from ..config_completion import FoundModel, FoundTensor

DATATYPES: dict[torch.dtype, str] = {
    getattr(torch, np.dtype(dtype).name): datatype
    for datatype, dtype in NUMPY_TYPES.items()
    if datatype not in ("BF16", "BYTES")
} | {torch.bfloat16: "BF16"}


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
    if not file.is_file():
        raise NotFound(f"unable to find '{file}' for model '{file.parent.parent.name}'")
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
                compiled = any("/aotinductor/" in name for name in package.namelist())
            if compiled:
                return OpenedModel(torch._inductor.aoti_load_package(str(file)))
            return _open_exported(file, device)
    except Unsupported:
        raise
    except Exception as error:  # PyTorch raises many classes
        raise InvalidArgument(f"PyTorch cannot load {file}: {error}") from error


def _open_exported(file: Path, device: str | None) -> OpenedModel:
    program = torch.export.load(file)
    if device is not None and device != "cpu":
        from torch.export.passes import move_to_device_pass

        program = move_to_device_pass(program, device)
    names = tuple(program.graph_signature.user_inputs)
    _, given = program.example_inputs or ((), {})
    nodes = {node.name: node for node in program.graph.nodes}
    if not all(isinstance(name, str) and isinstance(nodes[name].meta.get("val"), torch.Tensor) for name in names):
        raise Unsupported(f"{file}: the arguments of an exported program must be tensors")
    inputs = tuple(_found(str(name), nodes[str(name)]) for name in names)
    outputs = tuple(
        _found(f"OUTPUT__{index}", nodes[str(name)])
        for index, name in enumerate(program.graph_signature.user_outputs)
        if isinstance(name, str)
    )
    return OpenedModel(program.module(), tuple(map(str, names)), frozenset(given), FoundModel(inputs, outputs))


def _found(name: str, node: Any) -> FoundTensor:
    value = node.meta["val"]
    shape = tuple(size if isinstance(size, int) else -1 for size in value.shape)
    return FoundTensor(name, DATATYPES.get(value.dtype, ""), shape)
