"""Counts the forms that a checkpoint's matrices got while they were loaded, and describes those of quantised ones."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

SCALE_ERROR = 2.0**-11
"""The largest relative error of a scale or an offset that is rounded to eleven bits."""


class ServedForm(NamedTuple):
    """A form in the file, and the form in memory."""

    stored: str
    kept: str
    error: float | None = 0.0
    """The largest relative error of a weight, or of its offset; None: it is quantised anew, as the options say."""
    plain: bool = False
    """Whether it is stored as floats, which become what the options say."""

    def __str__(self) -> str:
        if self.error is None:
            return f"{self.stored}, quantised anew as {self.kept}"
        return f"{self.stored} as {self.kept}" + (f", off by at most {self.error:.2%}" if self.error else ", exactly")


@dataclass(slots=True)
class _FormCount:
    """Matrices of one form, and their bytes in the file and in memory."""

    matrices: int = 0
    stored: float = 0
    kept: float = 0


class ServedForms:
    """The counts of the forms of one load."""

    def __init__(self) -> None:
        self._counts: dict[ServedForm, _FormCount] = {}
        self._numbers, self._product_bytes = 0, 0.0

    def __iter__(self) -> Iterator[ServedForm]:
        return iter(self._counts)

    @property
    def bytes(self) -> int:
        """The memory of all matrices."""
        return int(sum(count.kept for count in self._counts.values()))

    @property
    def bits(self) -> float:
        """The average bits of a product's number."""
        return 8 * self._product_bytes / max(self._numbers, 1)

    @property
    def quantised(self) -> bool:
        """Whether some matrices are stored quantised."""
        return any(not form.plain for form in self._counts)

    def add(self, served: ServedForm, numbers: int, stored_bits: float, kept_bits: float, product: bool = True) -> None:
        """Count a matrix of so many `numbers`, with a number's bits in the file and in memory."""
        if product:
            self._numbers += numbers
            self._product_bytes += numbers * kept_bits / 8
        count = self._counts.setdefault(served, _FormCount())
        count.matrices += 1
        count.stored += numbers * stored_bits / 8
        count.kept += numbers * kept_bits / 8

    def lines(self) -> list[str]:
        """Descriptions for people of quantised matrices, those that take most memory first."""
        quantised = sorted((item for item in self._counts.items() if not item[0].plain), key=lambda item: -item[1].kept)
        return [
            f"{count.matrices} matrices {form} ({count.kept / 1e6:.1f} MB, {count.stored / 1e6:.1f} MB in the file)"
            for form, count in quantised
        ]


def float_error(dtype: torch.dtype) -> float:
    """The largest relative error of a number that is rounded to the dtype."""
    return 0.0 if dtype == torch.float32 else torch.finfo(dtype).eps / 2
