"""The `pytorch` backend: TorchScript, exported programs and AOTInductor packages, on the CPU or a GPU.

torch is imported when the first such model is loaded, and stays: about 190 MB of the server's process. Its threads are
those of the host; they compute for one instance as for several.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...core.errors import Internal, InvalidArgument, Unsupported
from ...core.memory_needs import MemoryNeed
from ...core.model import ConfigDocument, ModelConfig
from ...processes.torch_build import torch_has_cuda
from ..backend_parameters import read_flag, read_thread_count, warn_unknown_parameters
from ..config_completion import check_config_matches, complete_config, declares_tensors
from ..instance_groups import bytes_on_disk, memory_per_instance, threads_per_instance
from ..runtime import Arrays, InstancePlacement, Runtime, RuntimeTraits
from .argument_positions import argument_positions, result_positions

if TYPE_CHECKING:
    import torch

    from .model_files import OpenedModel

_FILE = "model.pt"
KNOWN_PARAMETERS = {
    "INFERENCE_MODE",
    "DISABLE_OPTIMIZED_EXECUTION",
    "DISABLE_CUDNN",
    "ENABLE_CACHE_CLEANING",
    "INTRA_OP_THREAD_COUNT",
    "INTER_OP_THREAD_COUNT",
    "default-max-batch-size",
}


class InferenceModes(NamedTuple):
    """How a model is run: without what only training needs, and with or without optimisation, cuDNN, kept memory."""

    inference_mode: bool = True
    optimized_execution: bool = True
    cudnn: bool = True
    clean_cache: bool = False


class TorchLoader:
    """Loads `model.pt` or `model.pt2`, or what `default_model_filename` names."""

    def load(
        self, directory: Path, config: ModelConfig, place: InstancePlacement, parameters: Mapping[str, str]
    ) -> Runtime:
        from .model_files import open_model_file, with_config_names
        from .torch_process import set_torch_threads

        warn_unknown_parameters(config.name, parameters, KNOWN_PARAMETERS)
        modes = read_inference_modes(parameters)
        _check_config(config)
        threads = read_thread_count(parameters, "INTRA_OP_THREAD_COUNT") or threads_per_instance(config.document)
        set_torch_threads(threads, read_thread_count(parameters, "INTER_OP_THREAD_COUNT"))
        device = _device(place)
        opened = open_model_file(_file(directory, config.document), device)
        arguments = argument_positions(config.name, [spec.name for spec in config.inputs], opened.argument_names)
        results = result_positions(config.name, [spec.name for spec in config.outputs])
        if opened.tensors is not None:
            names = _by_place(config, arguments, len(opened.tensors.inputs))
            made = _names(results, [spec.name for spec in config.outputs], len(opened.tensors.outputs))
            check_config_matches(config, with_config_names(opened.tensors, names, made))
        return TorchRuntime(opened, config, ForwardCall(arguments, results, device or "cpu", modes))

    def uses_gpus(self) -> bool:
        return torch_has_cuda()

    def needs(self, directory: Path, document: ConfigDocument, parameters: Mapping[str, str]) -> tuple[MemoryNeed, ...]:
        return memory_per_instance(document, bytes_on_disk(_file(directory, document)))

    def complete(self, directory: Path, document: ConfigDocument, parameters: Mapping[str, str]) -> ConfigDocument:
        """TorchScript does not tell its tensors' types and shapes, nor does an AOTInductor package."""
        file = _file(directory, document)
        if declares_tensors(document) or file.suffix != ".pt2":
            return document
        from .model_files import open_model_file

        found = open_model_file(file, "cpu").tensors
        return document if found is None else complete_config(document, found, parameters)


def read_inference_modes(parameters: Mapping[str, str]) -> InferenceModes:
    """Raises `InvalidArgument` for a parameter that is wrong; `field` names it."""
    return InferenceModes(
        inference_mode=read_flag(parameters, "INFERENCE_MODE", True),
        optimized_execution=not read_flag(parameters, "DISABLE_OPTIMIZED_EXECUTION", False),
        cudnn=not read_flag(parameters, "DISABLE_CUDNN", False),
        clean_cache=read_flag(parameters, "ENABLE_CACHE_CLEANING", False),
    )


def _check_config(config: ModelConfig) -> None:
    for side, specs in (("input", config.inputs), ("output", config.outputs)):
        if not specs:
            message = f"model '{config.name}' must have its {side}s in its config: the file does not tell them"
            raise InvalidArgument(message, field=side)
        for spec in specs:
            if spec.datatype == "BYTES":
                message = (
                    f"{side} '{spec.name}' of model '{config.name}' is TYPE_STRING, which PyTorch has no tensors of"
                )
                raise Unsupported(message, field=f"{side}.{spec.name}")


def _device(place: InstancePlacement) -> str | None:
    if place.kind == "KIND_MODEL":
        return None
    return f"cuda:{place.device}" if place.kind == "KIND_GPU" else "cpu"


def _file(directory: Path, document: ConfigDocument) -> Path:
    named = document.get("default_model_filename")
    if named:
        return directory / str(named)
    found = [name for name in (_FILE, "model.pt2") if (directory / name).exists()]
    return directory / (found or [_FILE])[0]


def _by_place(config: ModelConfig, places: Sequence[int], count: int) -> list[str]:
    if len(places) != count:
        message = f"configuration expects {len(places)} inputs, model provides {count}"
        raise InvalidArgument(f"unable to load model '{config.name}': {message}", field="input")
    return _names(places, [spec.name for spec in config.inputs], count)


def _names(places: Sequence[int], names: Sequence[str], count: int) -> list[str]:
    """The names in the order of the model's own; where a config has none, one that it cannot have."""
    named = dict(zip(places, names, strict=True))
    return [named.get(place, f"#{place}") for place in range(count)]


class ForwardCall(NamedTuple):
    """Where inputs go and outputs come from, by their order in the config; on which device, and how."""

    argument_positions: tuple[int, ...]
    result_positions: tuple[int, ...]
    device: str
    modes: InferenceModes


class TorchRuntime:
    """One instance with weights of its own."""

    def __init__(self, opened: "OpenedModel", config: ModelConfig, call: ForwardCall) -> None:
        self._opened: OpenedModel | None = opened
        self._call = call
        order = sorted(zip(call.argument_positions, config.inputs, strict=True), key=lambda each: each[0])
        self._inputs = tuple(spec for _, spec in order)
        self._places = {spec.name: place for place, spec in zip(call.result_positions, config.outputs, strict=True)}

    @property
    def traits(self) -> RuntimeTraits:
        return RuntimeTraits()

    def execute(self, inputs: Arrays, wanted: Sequence[str]) -> Iterator[Arrays]:
        with _entered(self._call.modes):
            made = self._run(inputs)
        yield {name: _array(_result(made, name, self._places[name])) for name in wanted}
        if self._call.modes.clean_cache:
            import torch

            torch.cuda.empty_cache()

    def close(self) -> None:
        from .torch_process import release_torch_memory

        self._opened = None
        release_torch_memory()

    def _run(self, inputs: Arrays) -> Any:
        assert self._opened is not None
        missing = [spec.name for spec in self._inputs if spec.name not in inputs]
        if missing:
            raise InvalidArgument(f"input '{missing[0]}' of a PyTorch model cannot be left out", field=missing[0])
        given = [_tensor(inputs[spec.name], spec.datatype).to(self._call.device) for spec in self._inputs]
        names = self._opened.argument_names or [""] * len(given)
        named = {name: value for name, value in zip(names, given, strict=False) if name in self._opened.keyword_names}
        return self._opened.module(*given[: len(given) - len(named)], **named)


def _entered(modes: InferenceModes) -> ExitStack:
    import torch

    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode() if modes.inference_mode else torch.no_grad())
        if not modes.optimized_execution:
            stack.enter_context(torch.jit.optimized_execution(False))  # type: ignore[attr-defined]
        if not modes.cudnn:
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        return stack.pop_all()


def _tensor(array: NDArray[Any], datatype: str) -> "torch.Tensor":
    """A copy of what may be a client's memory: a model may write to its arguments."""
    import torch

    tensor = torch.from_numpy(np.require(array, requirements=["C", "W", "O"]))
    return tensor.view(torch.bfloat16) if datatype == "BF16" else tensor


def _result(made: Any, name: str, place: int) -> Any:
    if isinstance(made, Mapping):
        results: Mapping[str, Any] = made
        if name not in results:
            raise Internal(f"the model made no output '{name}', but {', '.join(map(str, results))}")
        return results[name]
    several = made if isinstance(made, (tuple, list)) else (made,)
    if place >= len(several):
        raise Internal(f"the model made {len(several)} outputs, and none in the place {place} of '{name}'")
    return several[place]


def _array(value: Any) -> NDArray[Any]:
    import torch

    if not isinstance(value, torch.Tensor):
        raise Internal(f"the model made a {type(value).__name__} where a tensor was expected")
    here = value.detach().cpu()
    made: NDArray[Any] = (here.view(torch.uint16) if here.dtype == torch.bfloat16 else here).numpy()
    return made


PYTORCH = TorchLoader()
