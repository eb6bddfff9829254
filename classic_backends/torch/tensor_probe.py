"""Finds out the tensors of a TorchScript model, which its file does not declare, by running it: on inputs of the types
and shapes that its first weights suggest, and again with each dimension changed, to learn which are free.

A guess for somebody to look at. Imported only where one is asked for.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile, ZipFile

import torch

from ...core.errors import InvalidArgument
from ...core.model import RawConfig
from ..config_completion import FoundModel, FoundTensor, complete_config
from .model_files import DATATYPES, open_model_file

_BATCH = 2
_IMAGE_SIZES = (224, 64, 32, 28)
_LENGTH = 8
"""Of a sequence."""


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
    """The tensors alone."""
    _refuse_weights(file)
    module: Any = open_model_file(file, "cpu").module
    arguments = [each for each in module.forward.schema.arguments[1:] if not each.has_default_value()]
    names = ", ".join(f"{each.name}: {each.type}" for each in module.forward.schema.arguments[1:])
    if arguments and all(each.type.kind() == "TensorType" for each in arguments):
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
    for weight in (each for each in module.parameters() if each.ndim >= 2):
        size = weight.shape[1]
        if weight.ndim == 2:
            yield Trial(weight.dtype, (_BATCH, size))
            yield Trial(torch.int64, (_BATCH, _LENGTH))
            yield Trial(weight.dtype, (_BATCH, _LENGTH, size))
        else:
            spatial = weight.ndim - 2
            yield from (Trial(weight.dtype, (_BATCH, size, *(side,) * spatial)) for side in _IMAGE_SIZES)
        break  # what comes first is what meets the inputs
    yield Trial(torch.float32, (_BATCH, _LENGTH))
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
        results = {f"OUTPUT__{index}": each for index, each in enumerate(several)}
    fits = results and all(isinstance(each, torch.Tensor) and each.dtype in DATATYPES for each in results.values())
    return dict(results) if fits else None


def _measured(module: Any, trial: Trial, results: dict[str, torch.Tensor], count: int) -> FoundModel:
    given = list(trial.shape)
    made = {name: list(tensor.shape) for name, tensor in results.items()}
    for axis, size in enumerate(trial.shape):
        changed = (*trial.shape[:axis], size + 1, *trial.shape[axis + 1 :])
        others = _run(module, trial._replace(shape=changed), count)
        if others is None or {name: each.ndim for name, each in others.items()} != {n: len(s) for n, s in made.items()}:
            continue
        given[axis] = -1
        for name, shape in made.items():
            now = others[name].shape
            made[name] = [here if here == there else -1 for here, there in zip(shape, now, strict=True)]
    inputs = (FoundTensor(f"INPUT__{index}", DATATYPES[trial.dtype], tuple(given)) for index in range(count))
    outputs = (FoundTensor(name, DATATYPES[tensor.dtype], tuple(made[name])) for name, tensor in results.items())
    return FoundModel(tuple(inputs), tuple(outputs))
