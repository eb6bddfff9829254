"""The `pytorch` backend: TorchScript, exported programs and AOTInductor packages, on the CPU or a GPU.

torch is imported when the first such model is loaded, and stays: about 190 MB of the process. Its threads are the
host's; they compute for one instance as for several. Source: https://github.com/triton-inference-server/pytorch_backend.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...core.errors import Internal, InvalidArgument, Unsupported
from ...core.model import MemoryNeed, ModelConfig, RawConfig
from ...core.runtime import Arrays, InstancePlacement, Parameters, Runtime, RuntimeLoader
from ...core.tensor import TensorSpec
from ...processes.host import release_free_memory, torch_has_cuda
from ..backend_config import (
    FoundModel,
    check_config_matches,
    complete_config,
    declares_tensors,
    memory_per_instance,
    read_flag,
    read_thread_count,
    threads_per_instance,
    warn_unknown_parameters,
)

if TYPE_CHECKING:
    import torch

    from .model_files import OpenedModel

KNOWN_PARAMETERS = {
    "INFERENCE_MODE",
    "DISABLE_OPTIMIZED_EXECUTION",
    "DISABLE_CUDNN",
    "ENABLE_CACHE_CLEANING",
    "INTRA_OP_THREAD_COUNT",
    "INTER_OP_THREAD_COUNT",
    "default-max-batch-size",
}
_INDEXED_NAME = re.compile(r".+__(\d+)")


class InferenceModes(NamedTuple):
    """The settings of torch during an execution. `clean_cache`: give cached GPU memory back after each."""

    inference_mode: bool = True
    optimized_execution: bool = True
    cudnn: bool = True
    clean_cache: bool = False


class TorchLoader(RuntimeLoader):
    """Loads `model.pt` or `model.pt2`, or the `default_model_filename`."""

    def load(
        self, directory: Path, config: ModelConfig, placement: InstancePlacement, parameters: Parameters
    ) -> Runtime:
        from .model_files import open_model_file

        warn_unknown_parameters(config.name, parameters, KNOWN_PARAMETERS)
        modes = InferenceModes(
            inference_mode=read_flag(parameters, "INFERENCE_MODE", True),
            optimized_execution=not read_flag(parameters, "DISABLE_OPTIMIZED_EXECUTION", False),
            cudnn=not read_flag(parameters, "DISABLE_CUDNN", False),
            clean_cache=read_flag(parameters, "ENABLE_CACHE_CLEANING", False),
        )
        for side, specs in (("input", config.inputs), ("output", config.outputs)):
            if not specs:
                message = f"model '{config.name}' must have its {side}s in its config: the file does not tell them"
                raise InvalidArgument(message, field=side)
            for spec in specs:
                if spec.datatype == "BYTES":
                    message = f"{side} '{spec.name}' of model '{config.name}' is TYPE_STRING, which PyTorch has no"
                    raise Unsupported(f"{message} tensors of", field=f"{side}.{spec.name}")
        threads = read_thread_count(parameters, "INTRA_OP_THREAD_COUNT") or threads_per_instance(config.raw)
        set_torch_threads(threads, read_thread_count(parameters, "INTER_OP_THREAD_COUNT"))
        device = choose_device(config.name, placement)
        opened = open_model_file(_model_file(directory, config.raw), device)
        arguments = argument_positions(config.name, [spec.name for spec in config.inputs], opened.argument_names)
        results = indexed_positions(config.name, "output", [spec.name for spec in config.outputs])
        if opened.tensors is not None:
            check_config_matches(config, _with_config_names(opened.tensors, config, arguments, results))
        inputs = [config.inputs[index] for index in sorted(range(len(arguments)), key=arguments.__getitem__)]
        outputs = dict(zip((spec.name for spec in config.outputs), results, strict=True))
        return TorchRuntime(opened, inputs, outputs, device or "cpu", modes)

    def uses_gpus(self) -> bool:
        return torch_has_cuda()

    def needs(self, directory: Path, raw: RawConfig, parameters: Parameters) -> tuple[MemoryNeed, ...]:
        return memory_per_instance(raw, _model_file(directory, raw))

    def complete(self, directory: Path, raw: RawConfig, parameters: Parameters) -> RawConfig:
        """Only exported programs declare the types and shapes of their tensors."""
        file = _model_file(directory, raw)
        if declares_tensors(raw) or file.suffix != ".pt2":
            return raw
        from .model_files import open_model_file

        tensors = open_model_file(file, "cpu").tensors
        return raw if tensors is None else complete_config(raw, tensors, parameters)


def _model_file(directory: Path, raw: RawConfig) -> Path:
    named = raw.get("default_model_filename")
    if named:
        return directory / str(named)
    exported = (directory / "model.pt2").exists() and not (directory / "model.pt").exists()
    return directory / ("model.pt2" if exported else "model.pt")


def argument_positions(model: str, names: Sequence[str], arguments: Sequence[str]) -> tuple[int, ...]:
    """The position of the argument of each input. `arguments`: the names of forward's, empty if unknown. By Triton's
    naming conventions: the inputs have the arguments' names, or names as INPUT__0 with the position, or they are in the
    config in the arguments' order. Raises `InvalidArgument` if two inputs have the same argument, or one has none."""
    if arguments and set(names) <= set(arguments):
        return tuple(arguments.index(name) for name in names)
    positions = indexed_positions(model, "input", names)
    in_order = sorted(positions) == list(range(len(positions)))
    if not in_order or (arguments and len(positions) > len(arguments)):
        count = f", which has {len(arguments)}" if arguments else ""
        message = f"model '{model}': inputs {', '.join(names)} are not the arguments of the model{count}"
        raise InvalidArgument(message, field="input")
    return positions


def indexed_positions(model: str, side: str, names: Sequence[str]) -> tuple[int, ...]:
    """The positions that names such as INPUT__0 or OUTPUT__0 tell, or else the names' own. Raises `InvalidArgument`
    where two are the same."""
    matches = [_INDEXED_NAME.fullmatch(name) for name in names]
    positions = tuple(int(match[1]) for match in matches if match) if all(matches) else tuple(range(len(names)))
    if len(set(positions)) != len(positions):
        raise InvalidArgument(f"model '{model}': two {side}s have the same index: {', '.join(names)}", field=side)
    return positions


def _with_config_names(
    model: FoundModel, config: ModelConfig, arguments: Sequence[int], results: Sequence[int]
) -> FoundModel:
    """The tensors of a model's file under the names that the config gives them; one that the config does not have gets
    a name that no config can have."""
    if len(config.inputs) != len(model.inputs):
        message = f"configuration expects {len(config.inputs)} inputs, model provides {len(model.inputs)}"
        raise InvalidArgument(f"unable to load model '{config.name}': {message}", field="input")
    renamed = []
    for tensors, specs, positions in (
        (model.inputs, config.inputs, arguments),
        (model.outputs, config.outputs, results),
    ):
        names = dict(zip(positions, (spec.name for spec in specs), strict=True))
        renamed.append(
            tuple(tensor._replace(name=names.get(index, f"#{index}")) for index, tensor in enumerate(tensors))
        )
    return FoundModel(*renamed)


class TorchRuntime(Runtime):
    """One instance, with weights of its own. `inputs`: in the order of forward's arguments; `result_positions`: of each
    output among forward's results."""

    def __init__(
        self,
        opened: "OpenedModel",
        inputs: Sequence[TensorSpec],
        result_positions: Mapping[str, int],
        device: str,
        modes: InferenceModes,
    ) -> None:
        self._opened: OpenedModel | None = opened
        self._inputs = inputs
        self._result_positions = result_positions
        self._device = device
        self._modes = modes

    def execute(self, inputs: Arrays, output_names: Sequence[str]) -> Iterator[Arrays]:
        import torch

        assert self._opened is not None
        missing = [spec.name for spec in self._inputs if spec.name not in inputs]
        if missing:
            raise InvalidArgument(f"input '{missing[0]}' of a PyTorch model cannot be left out", field=missing[0])
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode() if self._modes.inference_mode else torch.no_grad())
            if not self._modes.optimized_execution:
                stack.enter_context(torch.jit.optimized_execution(False))  # type: ignore[attr-defined]
            if not self._modes.cudnn:
                stack.enter_context(torch.backends.cudnn.flags(enabled=False))
            arguments = [_to_tensor(inputs[spec.name], spec.datatype, self._device) for spec in self._inputs]
            names = self._opened.argument_names or [""] * len(arguments)
            keyword_names = self._opened.keyword_names
            keywords = {name: value for name, value in zip(names, arguments, strict=False) if name in keyword_names}
            results = self._opened.module(*arguments[: len(arguments) - len(keywords)], **keywords)
        outputs = [_result(results, name, self._result_positions[name]) for name in output_names]
        yield dict(zip(output_names, _to_arrays(outputs), strict=True))
        if self._modes.clean_cache:
            torch.cuda.empty_cache()

    def close(self) -> None:
        self._opened = None
        release_torch_memory()


def _to_tensor(array: NDArray[Any], datatype: str, device: str) -> "torch.Tensor":
    """A copy of an array that may be a client's memory: a model may write to its arguments. On its way to a GPU it lies
    in pinned memory, from which that fetches it by itself."""
    import torch

    if device == "cpu":
        tensor = torch.from_numpy(np.require(array, requirements=["C", "W", "O"]))
    else:
        staged = torch.empty(array.shape, dtype=torch.from_numpy(np.empty(0, array.dtype)).dtype, pin_memory=True)
        staged.numpy()[...] = array
        tensor = staged.to(device, non_blocking=True)  # torch does not use the memory again before that is done
    return tensor.view(torch.bfloat16) if datatype == "BF16" else tensor


def _to_arrays(tensors: Sequence["torch.Tensor"]) -> list[NDArray[Any]]:
    """The arrays over tensors of the host, or over copies of a GPU's, all fetched side by side."""
    import torch

    on_host = [tensor.detach().to("cpu", non_blocking=True) for tensor in tensors]
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    return [(tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy() for tensor in on_host]


def _result(results: Any, name: str, position: int) -> "torch.Tensor":
    import torch

    if isinstance(results, Mapping):
        if name not in results:
            raise Internal(f"the model made no output '{name}', but {', '.join(map(str, results))}")
        value = results[name]
    else:
        several = results if isinstance(results, (tuple, list)) else (results,)
        if position >= len(several):
            raise Internal(f"the model made {len(several)} outputs, and none in the place {position} of '{name}'")
        value = several[position]
    if not isinstance(value, torch.Tensor):
        raise Internal(f"the model made a {type(value).__name__} where a tensor was expected")
    return value


def choose_device(model: str, placement: InstancePlacement) -> str | None:
    """Torch's name of an instance's device, None where the model's file decides. A GPU becomes the calling thread's
    current one: code of models makes tensors there. Raises `Unsupported` if torch has no such GPU."""
    import torch

    if placement.gpu is None:
        return None if placement.kind == "KIND_MODEL" else "cpu"
    if placement.gpu >= torch.cuda.device_count():
        built = "built for CUDA" if torch_has_cuda() else "built without CUDA"
        message = f"model '{model}': there is no GPU {placement.gpu} for this torch, which is {built}"
        raise Unsupported(message, field="instance_group.kind")
    torch.cuda.set_device(placement.gpu)
    return f"cuda:{placement.gpu}"


def set_torch_threads(intra_op: int, inter_op: int = 0) -> None:
    """Set the threads of one operator, for the calling thread, and of operators that run at once, for the whole process
    and only before the first runs; 0 keeps torch's own number."""
    import torch

    torch.set_num_threads(intra_op)
    if inter_op and inter_op != torch.get_num_interop_threads():
        with suppress(RuntimeError):  # the threads are running already
            torch.set_num_interop_threads(inter_op)


def release_torch_memory() -> None:
    """Return freed memory to the system and to GPUs."""
    import torch

    release_free_memory()
    torch.cuda.empty_cache()


PYTORCH = TorchLoader()
