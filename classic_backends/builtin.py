"""Triton's small example backends, built in: `identity`, `repeat` and `square`.

They are for trying out clients, batching and streams without a model; none reads a file. Sources:
https://github.com/triton-inference-server/identity_backend, repeat_backend and square_backend beside it. Here a request
has its instance to itself until its last response: `WAIT`, after which Triton's `repeat` takes the next one, has no
effect.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np

from ..core.errors import InvalidArgument
from ..core.model import ModelConfig, RawConfig
from ..core.runtime import Arrays, InstancePlacement, Parameters, Runtime, RuntimeLoader, RuntimeTraits
from ..core.tensor import TensorSpec
from .backend_config import read_integer, sequence_tensor_names, warn_unknown_parameters

_IDENTITY_PARAMETERS = ("execute_delay_ms", "instance_wise_delay_multiplier", "creation_delay_sec")

Specs: TypeAlias = Sequence[TensorSpec]


@dataclass(frozen=True)
class BuiltinRuntime(Runtime):
    """A runtime that holds nothing. `compute`: inputs -> outputs, any number of times."""

    compute: Callable[[Arrays], Iterator[Arrays]]
    traits: RuntimeTraits = Runtime.traits

    def execute(self, inputs: Arrays, output_names: Sequence[str]) -> Iterator[Arrays]:
        return self.compute(inputs)


@dataclass(frozen=True)
class BuiltinLoader(RuntimeLoader):
    """The `RuntimeLoader` of a backend without files."""

    make: Callable[[ModelConfig, InstancePlacement, Parameters], Runtime]
    fill: Callable[[RawConfig], RawConfig]

    def load(
        self, directory: Path, config: ModelConfig, placement: InstancePlacement, parameters: Parameters
    ) -> Runtime:
        return self.make(config, placement, parameters)

    def complete(self, directory: Path, raw: RawConfig, parameters: Parameters) -> RawConfig:
        return self.fill(raw)


def _make_identity(config: ModelConfig, placement: InstancePlacement, parameters: Parameters) -> Runtime:
    """A runtime with as many outputs as inputs, each of the same datatype. Triton's parameters: `execute_delay_ms` for
    each execution, times the instance's number and `instance_wise_delay_multiplier` where that is more;
    `creation_delay_sec` to load."""
    # Triton's takes no notice of a sequence's controls.
    hidden, _ = sequence_tensor_names(config.raw)
    config = replace(config, inputs=tuple(spec for spec in config.inputs if spec.name not in hidden))
    if len(config.inputs) != len(config.outputs):
        raise InvalidArgument(f"model '{config.name}' must have equal input/output pairs", field="output")
    for source, target in zip(config.inputs, config.outputs, strict=True):
        if source.datatype != target.datatype:
            message = f"output '{target.name}' must have the datatype of input '{source.name}', {source.datatype}"
            raise InvalidArgument(f"model '{config.name}': {message}", field="output")
    time.sleep(read_integer(parameters, "creation_delay_sec", 0))
    factor = max(1, placement.number * read_integer(parameters, "instance_wise_delay_multiplier", 0))
    delay = read_integer(parameters, "execute_delay_ms", 0) * factor / 1000
    warn_unknown_parameters(config.name, config.parameters, _IDENTITY_PARAMETERS)
    pairs = [(source.name, target.name) for source, target in zip(config.inputs, config.outputs, strict=True)]
    ragged = _is_ragged(config, pairs)
    traits = RuntimeTraits(inline=not (delay or ragged), ragged=ragged)
    return BuiltinRuntime(partial(_identity, pairs, delay), traits)


def _identity(pairs: Sequence[tuple[str, str]], delay: float, inputs: Arrays) -> Iterator[Arrays]:
    """Copies inputs to outputs, by (input, output) `pairs`; `delay`: seconds."""
    if delay:
        time.sleep(delay)
    yield {target: inputs[source] for source, target in pairs if source in inputs}


def _is_ragged(config: ModelConfig, pairs: Sequence[tuple[str, str]]) -> bool:
    """Whether inputs allow ragged batches; then a batch_output must give their outputs the same shapes."""
    ragged = {entry["name"] for entry in config.raw.get("input", ()) if entry.get("allow_ragged_batch", False)}
    split = {name for entry in config.raw.get("batch_output", ()) for name in entry.get("target_name", ())}
    for source, target in pairs:
        if (source in ragged) != (target in split):
            message = f"output '{target}' needs a batch_output exactly if input '{source}' allows ragged batches"
            raise InvalidArgument(f"model '{config.name}': {message}", field="batch_output")
    return bool(ragged)


def _repeat(inputs: Arrays) -> Iterator[Arrays]:
    """A response for each element of `IN`, `DELAY` milliseconds after the one before it; `IDX` counts them."""
    if inputs["IN"].shape != inputs["DELAY"].shape:
        shapes = f"{list(inputs['IN'].shape)} and {list(inputs['DELAY'].shape)}"
        raise InvalidArgument(f"expected IN and DELAY shape to match, got {shapes}", field="DELAY")
    for index, delay_ms in enumerate(inputs["DELAY"].tolist()):
        time.sleep(delay_ms / 1000)
        yield {"OUT": inputs["IN"][index : index + 1], "IDX": np.array([index], np.uint32)}


def _square(inputs: Arrays) -> Iterator[Arrays]:
    """Responds with `IN`, as often as its value says."""
    for _ in range(int(inputs["IN"].item())):
        yield {"OUT": inputs["IN"]}


def _decoupled_loader(compute: Callable[[Arrays], Iterator[Arrays]], inputs: Specs, outputs: Specs) -> BuiltinLoader:
    """The loader of a backend whose models all have these tensors, are decoupled, and do not batch."""

    def make(config: ModelConfig, placement: InstancePlacement, parameters: Parameters) -> Runtime:
        if not config.decoupled or config.max_batch_size:
            message = f"model '{config.name}' must be decoupled and have max_batch_size 0 for '{config.backend}'"
            raise InvalidArgument(message, field="model_transaction_policy.decoupled")
        _check_specs(config.name, "input", config.inputs, inputs)
        missing = {spec.name for spec in inputs} - {spec.name for spec in config.inputs}
        if missing:
            raise InvalidArgument(f"model '{config.name}' lacks inputs {sorted(missing)}", field="input")
        _check_specs(config.name, "output", config.outputs, outputs)
        return BuiltinRuntime(compute)

    def fill(raw: RawConfig) -> RawConfig:
        filled = dict(raw)
        for side, specs in (("input", inputs), ("output", outputs)):
            filled[side] = raw.get(side) or [
                {"name": spec.name, "data_type": f"TYPE_{spec.datatype}", "dims": list(spec.dims)} for spec in specs
            ]
        filled.setdefault("model_transaction_policy", {"decoupled": True})
        return filled

    return BuiltinLoader(make, fill)


def _check_specs(model: str, side: str, specs: Specs, known: Specs) -> None:
    """Each tensor of the config must be one that the backend knows, and of its type."""
    by_name = {spec.name: spec for spec in known}
    for spec in specs:
        if spec.name not in by_name:
            message = f"expected {side} names of {sorted(by_name)}, got '{spec.name}'"
            raise InvalidArgument(f"model '{model}': {message}", field=side)
        if spec.datatype != by_name[spec.name].datatype or len(spec.dims) != 1:
            message = f"expected {spec.name} to be {by_name[spec.name].datatype} with one dimension"
            raise InvalidArgument(f"model '{model}': {message}", field=side)


IDENTITY = BuiltinLoader(_make_identity, lambda raw: raw)
REPEAT = _decoupled_loader(
    _repeat,
    (TensorSpec("IN", "INT32", (-1,)), TensorSpec("DELAY", "UINT32", (-1,)), TensorSpec("WAIT", "UINT32", (1,))),
    (TensorSpec("OUT", "INT32", (1,)), TensorSpec("IDX", "UINT32", (1,))),
)
SQUARE = _decoupled_loader(_square, (TensorSpec("IN", "INT32", (1,)),), (TensorSpec("OUT", "INT32", (1,)),))
