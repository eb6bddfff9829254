"""The `tower` backend: the tower of one checkpoint as a classic model, whose requests are images and sounds.

A request has one medium's inputs by the names of the checkpoint's processor, each in an array with a first dimension of
1 in front. They share executions as ragged inputs. torch and transformers are imported when a tower is loaded.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...core.errors import InvalidArgument
from ...core.media import KIND_NOUNS
from ...core.model import MemoryNeed, ModelConfig, RawConfig
from ...core.request import InferRequest
from ...core.runtime import Arrays, InstancePlacement, Parameters, Runtime, RuntimeLoader, RuntimeTraits
from ...core.tensor import NUMPY_TYPES, Tensor, TensorSpec
from ...processes.host import torch_has_cuda
from ..backend_config import config_type, threads_per_instance
from .tower_files import INPUTS, TowerFiles, read_tower_files

if TYPE_CHECKING:
    from .tower import Tower

ROWS, DEEPSTACK, LENGTH = "rows", "deepstack", "length"
"""The outputs: bytes, bytes, and how many rows there are."""

DTYPE = "dtype"
"""A parameter: torch's name of what is computed in, or `auto`."""
KINDS = "kinds"
"""A parameter: the kinds of media, parted by commas."""
OWN_ENCODER, OWN_ALIGNER, QUANTIZATION = "own_encoder", "own_aligner", "quantization"
"""Parameters: the fields of `TowerSpec` of these names."""

GPU_BATCH = 8
"""Media of one execution on a GPU; on the host they are computed one by one, and answered as soon."""

_SHAPE = "_shape"
_BACKEND = "tower"


class TowerLoader(RuntimeLoader):
    """Loads the tower of the checkpoint in the version's directory."""

    def load(
        self, directory: Path, config: ModelConfig, placement: InstancePlacement, parameters: Parameters
    ) -> Runtime:
        from ..torch.torch_backend import choose_device, set_torch_threads
        from .tower import Tower, load_beside_text
        from .tower_module import OwnParts, load_own_parts

        set_torch_threads(threads_per_instance(config.raw))
        device = choose_device(config.name, placement) or "cpu"
        files = _read_files(directory, parameters)
        encoder = parameters.get(OWN_ENCODER)
        own = OwnParts(encoder or "", parameters.get(OWN_ALIGNER, ""), parameters.get(QUANTIZATION, "none"))
        load = partial(load_own_parts, own) if encoder else load_beside_text
        return TowerRuntime(Tower(files, device, device != "cpu", load))

    def uses_gpus(self) -> bool:
        return torch_has_cuda()

    def needs(self, directory: Path, raw: RawConfig, parameters: Parameters) -> tuple[MemoryNeed, ...]:
        files = _read_files(directory, parameters)
        [group] = raw["instance_group"]
        gpus = group.get("gpus", ())
        return (MemoryNeed(files.bytes(bool(gpus)), *gpus),)


def _read_files(directory: Path, parameters: Parameters) -> TowerFiles:
    named = parameters.get(KINDS, "image").split(",")
    kinds = tuple(kind for kind in KIND_NOUNS if kind in named)
    return read_tower_files(directory, parameters.get(DTYPE, "auto"), kinds)


class TowerRuntime(Runtime):
    """One instance, with weights of its own."""

    def __init__(self, tower: "Tower") -> None:
        self.traits = RuntimeTraits(ragged=True)
        self._tower: Tower | None = tower

    def execute(self, inputs: Arrays, output_names: Sequence[str]) -> Iterator[Arrays]:
        assert self._tower is not None
        encoded = self._tower.encode(_split_inputs(inputs))
        yield {
            ROWS: np.array([[_bytes_of(medium.rows)] for medium in encoded], object),
            DEEPSTACK: np.array([[_bytes_of(medium.deepstack)] for medium in encoded], object),
            LENGTH: np.array([[len(medium.rows)] for medium in encoded], np.int32),
        }

    def close(self) -> None:
        from ..torch.torch_backend import release_torch_memory

        self._tower = None
        release_torch_memory()


def _split_inputs(inputs: Arrays) -> list[Arrays]:
    """The inputs of each medium, from flat arrays and the shapes of each medium's part."""
    names = [name for name in inputs if not name.endswith(_SHAPE)]
    media: list[dict[str, Any]] = [{} for _ in inputs[names[0] + _SHAPE]]
    for name in names:
        begin = 0
        for medium, shape in zip(media, inputs[name + _SHAPE].tolist(), strict=True):
            end = begin + int(np.prod(shape))
            medium[name] = inputs[name][begin:end].reshape(shape)
            begin = end
    return list(media)


def _bytes_of(tensor: Any) -> bytes:
    """Its numbers, one after the other."""
    import torch

    flat = tensor.detach().contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor.to(torch.uint8)
    return bytes(flat.cpu().numpy().tobytes())


def tower_config(name: str, version: str, files: TowerFiles, gpu: int | None, parameters: Parameters) -> ModelConfig:
    """The config of a tower's model, with one instance on the host or on that GPU."""
    inputs = [
        {"name": name, "data_type": config_type(datatype), "dims": [-1], "allow_ragged_batch": True}
        for name, datatype in INPUTS.items()
    ]
    shapes = [
        {
            "kind": "BATCH_ITEM_SHAPE",
            "target_name": [name + _SHAPE],
            "data_type": "TYPE_INT32",
            "source_input": [name],
        }
        for name in INPUTS
    ]
    placement: dict[str, Any] = {"kind": "KIND_CPU"} if gpu is None else {"kind": "KIND_GPU", "gpus": [gpu]}
    batch = 1 if gpu is None else GPU_BATCH
    raw = {
        "name": name,
        "max_batch_size": batch,
        "input": inputs,
        "batch_input": shapes,
        "instance_group": [placement],
        "dynamic_batching": {},
    }
    outputs = TensorSpec(ROWS, "BYTES", (1,)), TensorSpec(DEEPSTACK, "BYTES", (1,)), TensorSpec(LENGTH, "INT32", (1,))
    return ModelConfig(
        name,
        version,
        _BACKEND,
        max_batch_size=batch,
        inputs=tuple(TensorSpec(name, datatype, (-1,), optional=True) for name, datatype in INPUTS.items()),
        outputs=outputs,
        parameters={**parameters, DTYPE: files.dtype, KINDS: ",".join(files.kinds)},
        raw=raw,
    )


def tower_request(inputs: Arrays) -> InferRequest:
    """The request for one medium. Raises `InvalidArgument` for inputs that no tower takes."""
    tensors: dict[str, Tensor] = {}
    for name, array in inputs.items():
        if name not in INPUTS:
            raise InvalidArgument(f"the processor has made '{name}', which no tower takes")
        batch = np.ascontiguousarray(array, NUMPY_TYPES[INPUTS[name]])[None]
        tensors[name] = Tensor(name, INPUTS[name], batch.shape, batch)
    return InferRequest(inputs=tensors)


def read_response(outputs: Sequence[Tensor]) -> Mapping[str, Any]:
    """The outputs of one image, by their names."""
    return {tensor.name: tensor.data.reshape(-1)[0] for tensor in outputs}


TOWER = TowerLoader()
