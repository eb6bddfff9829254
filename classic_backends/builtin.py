"""Triton's small example backends, built in: `identity`, `repeat` and `square`.

Made for trying out clients, batching and streams without a model. None reads a file.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ..core.errors import InvalidArgument
from ..core.model import ModelConfig
from .runtime import Arrays, Document, Place, Runtime, Traits


class Identity:
    """Each output is the input in the same place of the config, as Triton's identity backend has it."""

    def __init__(self, pairs: Sequence[tuple[str, str]]) -> None:
        self._pairs = tuple(pairs)

    @property
    def traits(self) -> Traits:
        return Traits(inline=True)

    def execute(self, inputs: Arrays, wanted: Sequence[str]) -> Iterator[Arrays]:
        yield {output: inputs[given] for given, output in self._pairs if given in inputs}

    def close(self) -> None:
        pass


class IdentityLoader:
    """`identity`: as many outputs as inputs, each of the same datatype."""

    def load(self, directory: Path, config: ModelConfig, place: Place, parameters: Mapping[str, str]) -> Runtime:
        if len(config.inputs) != len(config.outputs):
            message = f"model '{config.name}' must have equal input/output pairs"
            raise InvalidArgument(message, field="output")
        for given, made in zip(config.inputs, config.outputs, strict=True):
            if given.datatype != made.datatype:
                message = f"output '{made.name}' must have the datatype of input '{given.name}', {given.datatype}"
                raise InvalidArgument(f"model '{config.name}': {message}", field="output")
        return Identity([(given.name, made.name) for given, made in zip(config.inputs, config.outputs, strict=True)])

    def complete(self, directory: Path, document: Document, parameters: Mapping[str, str]) -> Document:
        return document


IDENTITY = IdentityLoader()
