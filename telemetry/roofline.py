"""How much of a step's time reading and arithmetic take, by the formula that `charonia calibrate` fits to a machine and
a checkpoint."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec

from ..core.errors import InvalidArgument
from ..core.regular_files import MAX_TEXT_BYTES, read_regular

MACHINE_FORMAT = "charonia-machine-2"
"""The format of the files that `charonia calibrate` writes."""

NotNegative: TypeAlias = Annotated[float, msgspec.Meta(ge=0)]

SecondsTable: TypeAlias = tuple[tuple[int, NotNegative], ...]
"""Measured seconds by a count, ascending. Between measurements, and beyond the last two, they are interpolated
linearly."""

FileContent = TypeVar("FileContent", bound=msgspec.Struct)


class StepRoofline(msgspec.Struct, frozen=True):
    """The seconds of a language model's step on its machine, by the names in a file of `charonia calibrate`."""

    weights: NotNegative = 0.0
    """Reading the weights."""
    token: NotNegative = 0.0
    """The products of one token."""
    head: NotNegative = 0.0
    """The head of one sampled place."""
    decode_context: NotNegative = 0.0
    """Reading keys and values for one token of a decoding row's context."""
    state: NotNegative = 0.0
    """Reading and writing the recurrent state of a sequence. In what was measured it is among the products."""
    products: SecondsTable = ()
    """Measured by tokens, in place of `weights` and `token`."""
    heads: SecondsTable = ()
    """Measured by sampled places, in place of `head`."""

    def __post_init__(self) -> None:
        """Raises `ValueError` if a table does not ascend."""
        require_ascending("products", self.products)
        require_ascending("heads", self.heads)

    def reading_seconds(self, context: float, sequences: float = 0.0) -> float:
        """The time to read for a context of so many tokens, of all `sequences` together: that of one token, which
        hardly computes."""
        weights = self.products[0][1] if self.products else self.weights
        first = next((seconds for places, seconds in self.heads if places), 0.0)
        return weights + first + context * self.decode_context + sequences * self.state

    def arithmetic_seconds(self, tokens: float, samples: float) -> float:
        products = _beyond_first(self.products, tokens) if self.products else tokens * self.token
        sampled = tuple(entry for entry in self.heads if entry[0])
        return products + (_beyond_first(sampled, samples) if sampled else samples * self.head)


def _beyond_first(table: SecondsTable, count: float) -> float:
    """The time of `count` items, if each takes the mean of those that are computed beside the first."""
    if count <= 1 or len(table) < 2:
        return 0.0
    place = min(max(bisect_left(table, (count,)), 1), len(table) - 1)
    (fewer, short), (more, long) = table[place - 1 : place + 1]
    whole = short + (long - short) * (count - fewer) / (more - fewer)
    return count * max(whole - table[0][1], 0.0) / (count - 1)


def require_ascending(name: str, table: Sequence[Sequence[Any]]) -> None:
    """Raises `ValueError` if the first numbers of a table's rows do not ascend."""
    if any(fewer[0] >= more[0] for fewer, more in pairwise(table)):
        raise ValueError(f"`{name}` must ascend")


class _FileFormat(msgspec.Struct):
    """The field that files of all versions have."""

    format: str = MACHINE_FORMAT


class _CalibratedMachine(msgspec.Struct):
    """The fields that explanations need."""

    machine: StepRoofline


def read_machine_file(path: Path, content: type[FileContent]) -> FileContent:
    """Read the fields of `content` from a file of `charonia calibrate`.

    Raises:
        InvalidArgument: the file is missing or another, or a number is wrong; the message names the field.
    """
    try:
        data = read_regular(path, MAX_TEXT_BYTES)
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
