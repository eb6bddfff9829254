"""Stateful models of a few lines, and the configs that go with them."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from charonia.core.model import ModelConfig
from charonia.core.runtime import Arrays, InstancePlacement, RawConfig, RuntimeTraits
from charonia.core.tensor import TensorSpec


def control(name: str, kind: str, **form: Any) -> dict[str, Any]:
    return {"name": name, "control": [{"kind": f"CONTROL_SEQUENCE_{kind}", **form}]}


CONTROLS = [
    control("START", "START", int32_false_true=[0, 1]),
    control("READY", "READY", fp32_false_true=[0.0, 1.0]),
    control("END", "END", bool_false_true=[False, True]),
    control("ID", "CORRID", data_type="TYPE_INT64"),
]


def state(dims: Sequence[int]) -> dict[str, Any]:
    return {"input_name": "S", "output_name": "T", "data_type": "TYPE_INT32", "dims": list(dims)}


def config(max_batch_size: int = 4, decoupled: bool = False, **sequences: Any) -> ModelConfig:
    raw = {"sequence_batching": {"control_input": CONTROLS} | sequences}
    return ModelConfig(
        "m",
        "1",
        "test",
        max_batch_size=max_batch_size,
        decoupled=decoupled,
        inputs=(TensorSpec("X", "INT32", (1,)),),
        outputs=(TensorSpec("SUM", "INT32", (1,)),),
        raw=raw,
    )


class Loader:
    """One model for all instances."""

    traits = RuntimeTraits()
    by_request = False

    def load(
        self, directory: Path, config: ModelConfig, place: InstancePlacement, parameters: Mapping[str, str]
    ) -> Any:
        return self

    def complete(self, directory: Path, raw: RawConfig, parameters: Mapping[str, str]) -> RawConfig:
        return raw

    def close(self) -> None:
        pass


class Rows(Loader):
    """Remembers a sum and a sequence for each row of its batches."""

    def __init__(self) -> None:
        self.sums: dict[int, int] = {}
        self.ids: dict[int, int] = {}

    def execute(self, inputs: Arrays, wanted: Sequence[str]) -> Iterator[Arrays]:
        for row in range(len(inputs["X"])):
            self._take(row, {name: array[row].item() for name, array in inputs.items()})
        yield {"SUM": np.array([[self.sums.get(row, 0)] for row in range(len(inputs["X"]))], np.int32)}

    def _take(self, row: int, told: Mapping[str, Any]) -> None:
        if not told["READY"]:
            assert told == {"X": 0, "START": 0, "READY": 0.0, "END": False, "ID": 0}
            return
        if told["START"]:
            self.sums[row], self.ids[row] = 0, told["ID"]
        assert self.ids[row] == told["ID"]
        self.sums[row] += told["X"]
        if told["END"]:
            del self.ids[row]


class Carried(Loader):
    """Remembers nothing: the sum so far goes in, and comes out again."""

    def execute(self, inputs: Arrays, wanted: Sequence[str]) -> Iterator[Arrays]:
        made = np.where(inputs["START"] == 1, 0, inputs["S"]) + inputs["X"]
        yield {"SUM": made, "T": made}


class Histories(Loader):
    """All that came goes in, and comes out one longer: only sequences of the same length fit in one batch."""

    def execute(self, inputs: Arrays, wanted: Sequence[str]) -> Iterator[Arrays]:
        begins = inputs["START"].ravel() == 1
        before = np.where(begins[:, np.newaxis], 0, inputs["S"])
        made = np.concatenate([before, inputs["X"]], axis=1)
        yield {"SUM": made.sum(axis=1, keepdims=True, dtype=np.int32), "T": made}
