"""Triton's small example backends, built in: `identity`, `repeat` and `square`.

Made for trying out clients, batching and streams without a model; none reads a file. Where Triton's `repeat` and
`square` answer several requests at a time on one instance, a request here has its instance to itself until its last
response, so that `WAIT`, after which Triton's takes the next one, changes nothing.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ..core.errors import InvalidArgument
from ..core.memory_needs import MemoryNeed
from ..core.model import ConfigDocument, ModelConfig
from ..core.tensor import TensorSpec
from .backend_parameters import read_integer, warn_unknown_parameters
from .runtime import Arrays, InstancePlacement, Runtime, RuntimeTraits
from .sequences.sequence_tensors import sequence_tensor_names

_MILLISECOND = 1e-3
_IDENTITY_PARAMETERS = ("execute_delay_ms", "instance_wise_delay_multiplier", "creation_delay_sec")


class Identity:
    """Each output is the input in the same place of the config; `delay`: seconds that takes."""

    def __init__(self, pairs: Sequence[tuple[str, str]], delay: float, ragged: bool) -> None:
        self._pairs = tuple(pairs)
        self._delay = delay
        self._traits = RuntimeTraits(inline=not delay and not ragged, ragged=ragged)

    @property
    def traits(self) -> RuntimeTraits:
        return self._traits

    def execute(self, inputs: Arrays, wanted: Sequence[str]) -> Iterator[Arrays]:
        if self._delay:
            time.sleep(self._delay)
        yield {output: inputs[given] for given, output in self._pairs if given in inputs}

    def close(self) -> None:
        pass


class Repeat:
    """A response for each element of `IN`, `DELAY` milliseconds after the one before it; `IDX` counts them."""

    @property
    def traits(self) -> RuntimeTraits:
        return RuntimeTraits()

    def execute(self, inputs: Arrays, wanted: Sequence[str]) -> Iterator[Arrays]:
        if inputs["IN"].shape != inputs["DELAY"].shape:
            shapes = f"{list(inputs['IN'].shape)} and {list(inputs['DELAY'].shape)}"
            raise InvalidArgument(f"expected IN and DELAY shape to match, got {shapes}", field="DELAY")
        for index, delay in enumerate(inputs["DELAY"].tolist()):
            time.sleep(delay * _MILLISECOND)
            yield {"OUT": inputs["IN"][index : index + 1], "IDX": np.array([index], np.uint32)}

    def close(self) -> None:
        pass


class Square:
    """As many responses as `IN` says, each of which is `IN`."""

    @property
    def traits(self) -> RuntimeTraits:
        return RuntimeTraits()

    def execute(self, inputs: Arrays, wanted: Sequence[str]) -> Iterator[Arrays]:
        for _ in range(int(inputs["IN"].item())):
            yield {"OUT": inputs["IN"]}

    def close(self) -> None:
        pass


class IdentityLoader:
    """`identity`: as many outputs as inputs, each of the same datatype.

    Parameters, as Triton's: `execute_delay_ms` for each execution, times the instance's number and
    `instance_wise_delay_multiplier` where that is more; `creation_delay_sec` to load.
    """

    def load(
        self, directory: Path, config: ModelConfig, place: InstancePlacement, parameters: Mapping[str, str]
    ) -> Runtime:
        # Triton's takes no notice of a sequence's controls.
        hidden, _ = sequence_tensor_names(config.document)
        config = replace(config, inputs=tuple(spec for spec in config.inputs if spec.name not in hidden))
        _check_pairs(config)
        time.sleep(read_integer(parameters, "creation_delay_sec", 0))
        factor = max(1, place.number * read_integer(parameters, "instance_wise_delay_multiplier", 0))
        delay = read_integer(parameters, "execute_delay_ms", 0) * factor * _MILLISECOND
        warn_unknown_parameters(config.name, config.parameters, _IDENTITY_PARAMETERS)
        pairs = [(given.name, made.name) for given, made in zip(config.inputs, config.outputs, strict=True)]
        return Identity(pairs, delay, _check_ragged(config, pairs))

    def uses_gpus(self) -> bool:
        return False

    def needs(self, directory: Path, document: ConfigDocument, parameters: Mapping[str, str]) -> tuple[MemoryNeed, ...]:
        return ()

    def complete(self, directory: Path, document: ConfigDocument, parameters: Mapping[str, str]) -> ConfigDocument:
        return document


class DecoupledLoader:
    """A backend whose models all look the same: these inputs and outputs, decoupled, without batches."""

    def __init__(self, make: type[Repeat] | type[Square], inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]):
        self._make = make
        self._inputs = inputs
        self._outputs = outputs

    def load(
        self, directory: Path, config: ModelConfig, place: InstancePlacement, parameters: Mapping[str, str]
    ) -> Runtime:
        if not config.decoupled or config.max_batch_size:
            message = f"model '{config.name}' must be decoupled and have max_batch_size 0 for '{config.backend}'"
            raise InvalidArgument(message, field="model_transaction_policy.decoupled")
        _check_specs(config, "input", config.inputs, self._inputs)
        _check_specs(config, "output", config.outputs, self._outputs)
        return self._make()

    def uses_gpus(self) -> bool:
        return False

    def needs(self, directory: Path, document: ConfigDocument, parameters: Mapping[str, str]) -> tuple[MemoryNeed, ...]:
        return ()

    def complete(self, directory: Path, document: ConfigDocument, parameters: Mapping[str, str]) -> ConfigDocument:
        """`document` with what every such model has where it says nothing of it."""
        whole = dict(document)
        whole["input"] = document.get("input") or [_field(spec) for spec in self._inputs]
        whole["output"] = document.get("output") or [_field(spec) for spec in self._outputs]
        whole.setdefault("model_transaction_policy", {"decoupled": True})
        return whole


def _field(spec: TensorSpec) -> ConfigDocument:
    return {"name": spec.name, "data_type": f"TYPE_{spec.datatype}", "dims": list(spec.dims)}


def _check_pairs(config: ModelConfig) -> None:
    if len(config.inputs) != len(config.outputs):
        raise InvalidArgument(f"model '{config.name}' must have equal input/output pairs", field="output")
    for given, made in zip(config.inputs, config.outputs, strict=True):
        if given.datatype != made.datatype:
            message = f"output '{made.name}' must have the datatype of input '{given.name}', {given.datatype}"
            raise InvalidArgument(f"model '{config.name}': {message}", field="output")


def _check_ragged(config: ModelConfig, pairs: Sequence[tuple[str, str]]) -> bool:
    """Whether inputs allow ragged batches; then their outputs must be said to have the inputs' shapes."""
    ragged = {each["name"] for each in config.document.get("input", ()) if each.get("allow_ragged_batch", False)}
    scattered = {name for each in config.document.get("batch_output", ()) for name in each.get("target_name", ())}
    for given, made in pairs:
        if (given in ragged) != (made in scattered):
            message = f"output '{made}' needs a batch_output exactly if input '{given}' allows ragged batches"
            raise InvalidArgument(f"model '{config.name}': {message}", field="batch_output")
    return bool(ragged)


def _check_specs(config: ModelConfig, field: str, given: Sequence[TensorSpec], known: Sequence[TensorSpec]) -> None:
    """A model need not have all of the outputs; what it has must be as the backend knows it."""
    by_name = {spec.name: spec for spec in known}
    for spec in given:
        if spec.name not in by_name:
            message = f"expected {field} names of {sorted(by_name)}, got '{spec.name}'"
            raise InvalidArgument(f"model '{config.name}': {message}", field=field)
        if spec.datatype != by_name[spec.name].datatype or len(spec.dims) != 1:
            message = f"expected {spec.name} to be {by_name[spec.name].datatype} with one dimension"
            raise InvalidArgument(f"model '{config.name}': {message}", field=field)
    missing = by_name.keys() - {spec.name for spec in given}
    if field == "input" and missing:
        raise InvalidArgument(f"model '{config.name}' lacks inputs {sorted(missing)}", field=field)


IDENTITY = IdentityLoader()
REPEAT = DecoupledLoader(
    Repeat,
    (TensorSpec("IN", "INT32", (-1,)), TensorSpec("DELAY", "UINT32", (-1,)), TensorSpec("WAIT", "UINT32", (1,))),
    (TensorSpec("OUT", "INT32", (1,)), TensorSpec("IDX", "UINT32", (1,))),
)
SQUARE = DecoupledLoader(Square, (TensorSpec("IN", "INT32", (1,)),), (TensorSpec("OUT", "INT32", (1,)),))
