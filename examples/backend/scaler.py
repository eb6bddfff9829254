"""The backend `scaler`: Y is X times the number in its model's file `factor.txt`."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from charonia.classic_backends.backend_config import FoundModel, FoundTensor, check_config_matches, complete_config
from charonia.core.errors import InvalidArgument
from charonia.core.model import ModelConfig, RawConfig
from charonia.core.runtime import Arrays, InstancePlacement, Parameters, Runtime, RuntimeLoader

TENSORS = FoundModel((FoundTensor("X", "FP32", (-1, -1)),), (FoundTensor("Y", "FP32", (-1, -1)),))


class Scaler(Runtime):
    """One instance. It has a thread of its own, and its batches come one after the other."""

    def __init__(self, factor: float) -> None:
        self._factor = factor

    def execute(self, inputs: Arrays, output_names: Sequence[str]) -> Iterator[Arrays]:
        yield {"Y": self._factor * inputs["X"]}


class ScalerLoader(RuntimeLoader):
    """Makes the instances; `complete` lets configs be as short as `backend: "scaler"`."""

    def load(
        self, directory: Path, config: ModelConfig, placement: InstancePlacement, parameters: Parameters
    ) -> Runtime:
        check_config_matches(config, TENSORS)
        try:
            return Scaler(float((directory / "factor.txt").read_text()))
        except (OSError, ValueError) as error:
            raise InvalidArgument(f"cannot read the factor of model '{config.name}': {error}") from None

    def complete(self, directory: Path, raw: RawConfig, parameters: Parameters) -> RawConfig:
        return complete_config(raw, TENSORS, parameters)


SCALER = ScalerLoader()
