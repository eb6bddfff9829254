"""What of a step's time reading and arithmetic take, by the formula that `charonia calibrate` fitted to a machine and a
checkpoint."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec

from ..core.errors import InvalidArgument

MACHINE_FORMAT = "charonia-machine-2"
"""Of the files that `charonia calibrate` writes."""

NotNegative: TypeAlias = Annotated[float, msgspec.Meta(ge=0)]

SecondsTable: TypeAlias = tuple[tuple[int, NotNegative], ...]
"""Measured seconds by a count, ascending; between measurements, and beyond the last two, on a straight line."""

FileContent = TypeVar("FileContent", bound=msgspec.Struct)


class StepRoofline(msgspec.Struct, frozen=True):
    """The seconds that a step of a language model takes on its machine, by the names in a file of `charonia calibrate`:
    reading the `weights`, and keys and values of each token of context that decoding rows attend to; the products of a
    `token`, and the `head` of a sampled place. `products` and `heads` are measured, by tokens and by sampled places,
    and take the place of `weights` and `token`, and of `head`."""

    weights: NotNegative = 0.0
    token: NotNegative = 0.0
    head: NotNegative = 0.0
    decode_context: NotNegative = 0.0
    products: SecondsTable = ()
    heads: SecondsTable = ()

    def __post_init__(self) -> None:
        """Raises `ValueError`, which a reader of JSON makes its own: a table does not ascend."""
        require_ascending("products", self.products)
        require_ascending("heads", self.heads)

    def reading_seconds(self, context: float) -> float:
        """The least of them is what reading takes: one token is hardly computed with."""
        weights = self.products[0][1] if self.products else self.weights
        first = next((seconds for places, seconds in self.heads if places), 0.0)
        return weights + first + context * self.decode_context

    def arithmetic_seconds(self, tokens: float, samples: float) -> float:
        products = _beyond_first(self.products, tokens) if self.products else tokens * self.token
        sampled = tuple(each for each in self.heads if each[0])
        return products + (_beyond_first(sampled, samples) if sampled else samples * self.head)


def _beyond_first(table: SecondsTable, count: float) -> float:
    """What `count` take if each takes as long as, on average, those do that are computed beside the first."""
    if count <= 1 or len(table) < 2:
        return 0.0
    place = min(max(bisect_left(table, (count,)), 1), len(table) - 1)
    (fewer, short), (more, long) = table[place - 1 : place + 1]
    whole = short + (long - short) * (count - fewer) / (more - fewer)
    return count * max(whole - table[0][1], 0.0) / (count - 1)


def require_ascending(name: str, table: Sequence[Sequence[Any]]) -> None:
    """Raises `ValueError` where the first numbers of the lines of a table do not ascend."""
    if any(fewer[0] >= more[0] for fewer, more in pairwise(table)):
        raise ValueError(f"`{name}` must ascend")


class _FileFormat(msgspec.Struct):
    """What the files of all versions have."""

    format: str = MACHINE_FORMAT


class _CalibratedMachine(msgspec.Struct):
    """What explanations need of a file."""

    machine: StepRoofline


def read_machine_file(path: Path, content: type[FileContent]) -> FileContent:
    """The fields of `content` in a file that `charonia calibrate` wrote.

    Raises:
        InvalidArgument: there is no such file, it is another one, or its numbers cannot be; the message names the
            field.
    """
    try:
        data = path.read_bytes()
        if (format := msgspec.json.decode(data, type=_FileFormat).format) == MACHINE_FORMAT:
            return msgspec.json.decode(data, type=content)
    except OSError as error:
        raise InvalidArgument(f"cannot read {path}: {error.strerror}", field="machine") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, InvalidArgument) as error:
        raise InvalidArgument(f"{path} is no file of charonia calibrate: {error}", field="machine") from None
    message = f"{path} has the format {format!r}, and this version reads {MACHINE_FORMAT}: calibrate again"
    raise InvalidArgument(message, field="machine")


def read_roofline(path: Path) -> StepRoofline:
    """Raises `InvalidArgument` as `read_machine_file` does."""
    return read_machine_file(path, _CalibratedMachine).machine
