"""What a process that prepares media answers: the tensors go into memory that it shares with the server."""

import mmap
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..core.errors import CharoniaError, InvalidArgument, SentError
from ..core.media import KIND_NOUNS, MediaKind, plural_nouns
from ..core.media_models import HEARING_FAMILIES, MediaFacts
from ..processes.limited_process import Answer
from .limits import MediaLimits

if TYPE_CHECKING:
    from .processor import MediumProcessor, ProcessedMedium

_ALIGNMENT = 64
_LENGTH = 4
"""Bytes of a length in a message."""
_PACKAGES = {None: "pillow", "PIL": "pillow"}
"""The packages of modules by whose names an import fails."""


class SentArray(NamedTuple):
    """An array in the shared memory."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


class PreparedAnswer(msgspec.Struct, array_like=True):
    """The answer about one medium; about the processors, if the message was empty."""

    error: SentError | None = None
    facts: dict[MediaKind, MediaFacts] = {}
    placeholder: str = ""
    grid: tuple[int, int, int] = (0, 0, 0)
    arrays: list[SentArray] = []
    seconds: float = 0.0


def pack_message(kind: int, options: str, data: bytes) -> bytes:
    """The message about a medium's file: the place of its kind, what its processor is told, and the file."""
    told = options.encode()
    return bytes((kind,)) + len(told).to_bytes(_LENGTH, "little") + told + data


def _unpack_message(message: bytes) -> tuple[int, dict[str, Any], bytes]:
    begin = 1 + _LENGTH
    end = begin + int.from_bytes(message[1:begin], "little")
    return message[0], msgspec.json.decode(message[begin:end] or b"{}"), message[end:]


class _KindPart(NamedTuple):
    """What prepares the media of a checkpoint."""

    processor: "MediumProcessor"
    prepare: Callable[[bytes, Mapping[str, Any]], "ProcessedMedium"]
    """Reads a file and processes it, as the options say. Raises `InvalidArgument`."""
    row_text: tuple[str, str, str] | None = None
    gridded: bool = False
    patch: int = 0
    """As of `MediaFacts`."""

    @property
    def facts(self) -> MediaFacts:
        processor = self.processor
        own = self.row_text, self.gridded, self.patch
        return MediaFacts(processor.token, processor.token_ids, processor.settings, *own)


def make_answer(checkpoint: str, limits: MediaLimits, memory: int, kinds: tuple[MediaKind, ...] = ("image",)) -> Answer:
    """In the process: the function that answers messages of `pack_message`, and an empty one with the facts. `memory`
    is the descriptor of `limits.max_output_for` bytes."""
    os.environ |= {"TRANSFORMERS_NO_ADVISORY_WARNINGS": "1", "TOKENIZERS_PARALLELISM": "false"}
    # Transformers is there in a quarter of the time and of the memory without, and computes by numpy here.
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    shared = mmap.mmap(memory, max(map(limits.max_output_for, kinds)))
    try:
        preparations = {kind: _PREPARATIONS[kind](Path(checkpoint), limits) for kind in kinds}
    except CharoniaError as error:
        return partial(_refuse, SentError.of(error))
    except ImportError as error:
        package = _PACKAGES.get(error.name, error.name)
        message = f"{plural_nouns(kinds)} need the package {package}, which is not installed: pip install '.[media]'"
        return partial(_refuse, SentError.of(InvalidArgument(message)))

    def answer(message: bytes) -> bytes:
        if not message:
            facts = {kind: preparation.facts for kind, preparation in preparations.items()}
            return msgspec.msgpack.encode(PreparedAnswer(facts=facts))
        index, options, data = _unpack_message(message)
        kind = kinds[index]
        noun = KIND_NOUNS[kind]
        try:
            preparation = preparations[kind]
            result = preparation.prepare(data, options)
            arrays = _share(result.inputs, shared, noun)
            answered = PreparedAnswer(None, {}, result.placeholder, result.grid, arrays, result.seconds)
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

    processor = ImageProcessor(checkpoint, msgspec.json.decode(limits.config.processor_settings or b"{}"))
    row_text = processor.row_text()
    patch = processor.patch if row_text is None else 0

    def prepare(data: bytes, options: Mapping[str, Any]) -> "ProcessedMedium":
        settings = processor.options.settings(options) if options else {}  # first: this costs less than the image
        return processor.process(decode_image(data, limits), settings)

    return _KindPart(processor, prepare, row_text, processor.gridded, patch)


def _sound_preparation(checkpoint: Path, limits: MediaLimits) -> _KindPart:
    from .processor import read_json
    from .prompt_sounds import PromptSounds
    from .sound_file import decode_sound
    from .sound_processor import SoundProcessor

    in_prompts = read_json(checkpoint / "config.json").get("model_type") in HEARING_FAMILIES
    processor = PromptSounds(checkpoint) if in_prompts else SoundProcessor(checkpoint)
    return _KindPart(processor, lambda data, options: processor.process(decode_sound(data, processor.rate, limits)))


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
