"""What became of a checkpoint's matrices while they were loaded: counted, and said once of those that are quantised."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

SCALE_ERROR = 2.0**-11
"""The most that rounding to eleven bits changes a scale or an offset by, as a share of it."""


class ServedForm(NamedTuple):
    """Matrices stored as `stored` are computed with as `kept`. `error`: the most by which that changes a weight, as a
    share of it (of an offset: of the offset); None: they are quantised anew, as the options say. `plain`: they are
    stored as floats, and what becomes of them is what the options say."""

    stored: str
    kept: str
    error: float | None = 0.0
    plain: bool = False

    def __str__(self) -> str:
        if self.error is None:
            return f"{self.stored}, quantised anew as {self.kept}"
        return f"{self.stored} as {self.kept}" + (f", off by at most {self.error:.2%}" if self.error else ", exactly")


@dataclass(slots=True)
class _Bytes:
    matrices: int = 0
    stored: float = 0
    kept: float = 0


class ServedForms:
    """The forms of one load."""

    def __init__(self) -> None:
        self._found: dict[ServedForm, _Bytes] = {}
        self._numbers, self._product_bytes = 0, 0.0

    def __iter__(self) -> Iterator[ServedForm]:
        return iter(self._found)

    @property
    def bytes(self) -> int:
        """That all matrices take in memory."""
        return int(sum(each.kept for each in self._found.values()))

    @property
    def bits(self) -> float:
        """That a number of a product takes, on average."""
        return 8 * self._product_bytes / max(self._numbers, 1)

    @property
    def quantised(self) -> bool:
        """Whether some matrices are stored so."""
        return any(not each.plain for each in self._found)

    def add(self, served: ServedForm, numbers: int, stored_bits: float, kept_bits: float, product: bool = True) -> None:
        """Count a matrix of so many `numbers`, with the bits of each in the file and in memory."""
        if product:
            self._numbers += numbers
            self._product_bytes += numbers * kept_bits / 8
        found = self._found.setdefault(served, _Bytes())
        found.matrices += 1
        found.stored += numbers * stored_bits / 8
        found.kept += numbers * kept_bits / 8

    def lines(self) -> list[str]:
        """For people, what takes most first."""
        found = sorted((item for item in self._found.items() if not item[0].plain), key=lambda item: -item[1].kept)
        return [
            f"{each.matrices} matrices {served} ({each.kept / 1e6:.1f} MB, {each.stored / 1e6:.1f} MB in the file)"
            for served, each in found
        ]
