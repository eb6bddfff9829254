"""A tower whose process ends while it computes, as often as the file `deaths` in its directory says, and whenever it
computes the row of the file `poison`; a file `fails` fails the load. Imported there only."""

import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from charonia.classic_backends.tower.tower_backend import DEEPSTACK, LENGTH, ROWS, _split_inputs
from charonia.core.errors import InvalidArgument
from charonia.core.model import MemoryNeed, ModelConfig
from charonia.core.runtime import Arrays, InstancePlacement, RawConfig, RuntimeTraits


class DyingTower:
    traits = RuntimeTraits(ragged=True)

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._deaths = directory / "deaths"

    def execute(self, inputs: Arrays, wanted: Sequence[str]) -> Iterator[Arrays]:
        rows = [medium["pixel_values"].ravel()[:1].tobytes() for medium in _split_inputs(inputs)]
        with (self._directory / "batches").open("a") as file:
            file.write(f"{len(rows)}\n")
        poison = self._directory / "poison"
        if poison.exists() and poison.read_bytes() in rows:
            os.kill(os.getpid(), signal.SIGKILL)
        left = int(self._deaths.read_text()) if self._deaths.exists() else 0
        if left:
            self._deaths.write_text(str(left - 1))
            os.kill(os.getpid(), signal.SIGKILL)
        yield {
            ROWS: np.array([[row] for row in rows], object),
            DEEPSTACK: np.array([[b""] for _ in rows], object),
            LENGTH: np.array([[1] for _ in rows], np.int32),
        }

    def close(self) -> None:
        pass


class DyingTowerLoader:
    by_request = False

    def load(
        self, directory: Path, config: ModelConfig, place: InstancePlacement, parameters: Mapping[str, str]
    ) -> DyingTower:
        if (directory / "fails").exists():
            raise InvalidArgument("no weights")
        with (directory / "loads").open("a") as file:
            file.write(f"{os.getpid()}\n")
        return DyingTower(directory)

    def needs(self, directory: Path, raw: RawConfig, parameters: Mapping[str, str]) -> tuple[MemoryNeed, ...]:
        return ()


DYING = DyingTowerLoader()
