"""What a process that prepares media answers: the tensors go into memory that it shares with the server."""

import mmap
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..core.errors import CharoniaError, InvalidArgument, SentError
from ..core.media import KIND_NOUNS, MediaKind
from ..core.media_models import MediaFacts
from ..processes.limited_process import Answer
from .limits import MediaLimits

if TYPE_CHECKING:
    from .processor import ProcessedMedium

_ALIGNMENT = 64
_PACKAGES = {None: "pillow", "PIL": "pillow"}
"""The packages of modules by whose names an import fails."""


class SentArray(NamedTuple):
    """An array in the shared memory."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


class PreparedAnswer(msgspec.Struct, array_like=True):
    """The answer about one medium; about the processor, if the message was empty."""

    error: SentError | None = None
    facts: MediaFacts | None = None
    placeholder: str = ""
    grid: tuple[int, int, int] = (0, 0, 0)
    arrays: list[SentArray] = []


class _KindPart(NamedTuple):
    """What prepares the media of a checkpoint."""

    facts: MediaFacts
    prepare: Callable[[bytes], "ProcessedMedium"]
    """Makes it of a file. Raises `InvalidArgument`."""


def make_answer(checkpoint: str, limits: MediaLimits, memory: int, kind: MediaKind = "image") -> Answer:
    """In the process: the function that answers. `memory` is the descriptor of `limits.max_output_for` bytes."""
    os.environ |= {"TRANSFORMERS_NO_ADVISORY_WARNINGS": "1", "TOKENIZERS_PARALLELISM": "false"}
    # Transformers is there in a quarter of the time and of the memory without, and computes by numpy here.
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    shared = mmap.mmap(memory, limits.max_output_for(kind))
    noun = KIND_NOUNS[kind]
    try:
        preparation = _PREPARATIONS[kind](Path(checkpoint), limits)
    except CharoniaError as error:
        return partial(_refuse, SentError.of(error))
    except ImportError as error:
        package = _PACKAGES.get(error.name, error.name)
        message = f"{noun}s need the package {package}, which is not installed: pip install '.[media]'"
        return partial(_refuse, SentError.of(InvalidArgument(message)))

    def answer(message: bytes) -> bytes:
        if not message:
            return msgspec.msgpack.encode(PreparedAnswer(facts=preparation.facts))
        try:
            result = preparation.prepare(message)
            arrays = _share(result.inputs, shared, noun)
            answered = PreparedAnswer(placeholder=result.placeholder, grid=result.grid, arrays=arrays)
        except MemoryError:
            too_much = InvalidArgument(f"preparing the {noun} takes more memory than it may")
            answered = PreparedAnswer(SentError.of(too_much))
        except Exception as error:
            answered = PreparedAnswer(SentError.of(error))
        return msgspec.msgpack.encode(answered)

    return answer


def _refuse(error: SentError, message: bytes) -> bytes:
    return msgspec.msgpack.encode(PreparedAnswer(error))


def _image_preparation(checkpoint: Path, limits: MediaLimits) -> _KindPart:
    from .image_file import decode_image
    from .processor import ImageProcessor

    processor = ImageProcessor(checkpoint)
    facts = MediaFacts(processor.token, processor.token_ids, processor.settings)
    return _KindPart(facts, lambda data: processor.process(decode_image(data, limits)))


def _sound_preparation(checkpoint: Path, limits: MediaLimits) -> _KindPart:
    from .processor import ProcessedMedium
    from .sound_file import decode_sound
    from .sound_processor import SoundProcessor

    processor = SoundProcessor(checkpoint)

    def prepare(data: bytes) -> ProcessedMedium:
        return ProcessedMedium(processor.process(decode_sound(data, processor.rate, limits)))

    return _KindPart(MediaFacts("", (), processor.settings), prepare)


_PREPARATIONS: Mapping[MediaKind, Callable[[Path, MediaLimits], _KindPart]] = {
    "image": _image_preparation,
    "audio": _sound_preparation,
}


def _share(inputs: Mapping[str, NDArray[np.generic]], shared: mmap.mmap, noun: str) -> list[SentArray]:
    """Copy arrays into the shared memory, one behind the other."""
    arrays: list[SentArray] = []
    offset = 0
    for name, array in inputs.items():
        if offset + array.nbytes > len(shared):
            raise InvalidArgument(f"the prepared {noun} has more than {len(shared):,} bytes")
        target = np.frombuffer(shared, array.dtype, array.size, offset).reshape(array.shape)
        target[...] = array
        arrays.append(SentArray(name, array.dtype.str, array.shape, offset))
        offset += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    return arrays


def copy_arrays(arrays: list[SentArray], shared: mmap.mmap) -> dict[str, NDArray[np.generic]]:
    """In the server: the arrays, as memory of their own."""
    result: dict[str, NDArray[np.generic]] = {}
    for sent in arrays:
        count = int(np.prod(sent.shape))
        result[sent.name] = np.frombuffer(shared, sent.dtype, count, sent.offset).reshape(sent.shape).copy()
    return result
