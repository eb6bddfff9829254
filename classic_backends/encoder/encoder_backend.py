"""The `encoder` backend: sentence-transformers and cross-encoder directories as published, texts to vectors or scores.

Requests are batched by their count, as any model's; inside an execution, texts of similar length are computed together,
a budget of tokens at a time. torch and transformers are imported when the first encoder is loaded, and stay.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...core.errors import InvalidArgument
from ...core.memory_needs import MemoryNeed
from ...core.model import ConfigDocument, ModelConfig
from ...processes.torch_build import torch_has_cuda
from ...tokenization.checkpoint_files import read_json
from ...tokenization.encoder_tokenizer import EncodedText, EncoderTokenizer
from ..backend_parameters import read_integer, read_thread_count, warn_unknown_parameters
from ..config_completion import FoundModel, FoundTensor, check_config_matches, complete_config, declares_tensors
from ..instance_groups import bytes_on_disk, memory_per_instance, threads_per_instance
from ..runtime import Arrays, InstancePlacement, Runtime, RuntimeTraits
from .encoder_files import CrossEncoderFiles, EmbedderFiles, read_encoder
from .token_batches import batch_by_length

if TYPE_CHECKING:
    from torch import Tensor

    from .encoder_modules import Encoder

TEXT, PAIR, IDS = "text_input", "text_pair", "input_ids"
EMBEDDING, SCORE, COUNT = "embedding", "score", "num_input_tokens"
MAX_BATCH_SIZE = 256
"""Texts of one execution, where the config does not say."""

_KNOWN = {"max_batch_tokens", "intra_op_thread_count", "default-max-batch-size"}
_MAX_BATCH_TOKENS = 8192


class EncoderLoader:
    """Loads the version's directory itself: modules.json beside a transformer, or a transformer's config.json.

    Parameters: `max_batch_tokens`, how many are computed together, padding included; `intra_op_thread_count`.
    """

    def load(
        self, directory: Path, config: ModelConfig, place: InstancePlacement, parameters: Mapping[str, str]
    ) -> Runtime:
        from ..torch.torch_process import set_torch_threads

        warn_unknown_parameters(config.name, parameters, _KNOWN)
        budget = read_integer(parameters, "max_batch_tokens", _MAX_BATCH_TOKENS, least=1)
        set_torch_threads(
            read_thread_count(parameters, "intra_op_thread_count") or threads_per_instance(config.document)
        )
        files = read_encoder(directory)
        check_config_matches(config, encoder_tensors(files))
        device = f"cuda:{place.device}" if place.kind == "KIND_GPU" else "cpu"
        tokenizer = EncoderTokenizer.load(files.directory, files.tokenization.max_tokens, files.tokenization.lowercase)
        return EncoderRuntime(_encoder(files, device), EncoderInputReader(files, tokenizer), budget, device)

    def uses_gpus(self) -> bool:
        return torch_has_cuda()

    def needs(self, directory: Path, document: ConfigDocument, parameters: Mapping[str, str]) -> tuple[MemoryNeed, ...]:
        return memory_per_instance(document, bytes_on_disk(directory))

    def complete(self, directory: Path, document: ConfigDocument, parameters: Mapping[str, str]) -> ConfigDocument:
        if declares_tensors(document):
            return document
        sized = {**document, "max_batch_size": document.get("max_batch_size") or MAX_BATCH_SIZE}
        return complete_config(sized, encoder_tensors(read_encoder(directory)), parameters)


def encoder_tensors(files: EmbedderFiles | CrossEncoderFiles) -> FoundModel:
    """What goes in and comes out of an encoder: texts, or in place of them ids; in rows that -1 fills up."""
    text, count = FoundTensor(TEXT, "BYTES", (-1, 1)), FoundTensor(COUNT, "INT32", (-1, 1))
    if isinstance(files, CrossEncoderFiles):
        score = FoundTensor(SCORE, "FP32", (-1, files.labels))
        return FoundModel((text, FoundTensor(PAIR, "BYTES", (-1, 1))), (score, count))
    inputs = text._replace(optional=True), FoundTensor(IDS, "INT64", (-1, -1), optional=True)
    return FoundModel(inputs, (FoundTensor(EMBEDDING, "FP32", (-1, files.size)), count))


def _encoder(files: EmbedderFiles | CrossEncoderFiles, device: str) -> "Encoder":
    from .encoder_modules import CrossEncoder, Embedder

    return CrossEncoder(files, device) if isinstance(files, CrossEncoderFiles) else Embedder(files, device)


class EncoderInputReader:
    """Reads the inputs of requests: tokens, however they are given."""

    def __init__(self, files: EmbedderFiles | CrossEncoderFiles, tokenizer: EncoderTokenizer) -> None:
        self._tokenizer = tokenizer
        self._length = files.tokenization.max_tokens
        self._prompt = files.tokenization.prompt
        self._vocabulary = int(read_json(files.directory / "config.json").get("vocab_size", 0))
        self.output = SCORE if isinstance(files, CrossEncoderFiles) else EMBEDDING

    def read_tokens(self, inputs: Arrays) -> list[EncodedText]:
        """Raises `InvalidArgument` for neither texts nor ids, both of them, or wrong ids."""
        if (TEXT in inputs) == (IDS in inputs):
            raise InvalidArgument(f"give either {TEXT} or {IDS}", field=TEXT)
        if IDS in inputs:
            return [self._given(row) for row in inputs[IDS].tolist()]
        texts = [self._prompt + text for text in _texts(inputs[TEXT])]
        return self._tokenizer.encode(texts, _texts(inputs[PAIR]) if PAIR in inputs else None)

    def _given(self, row: list[int]) -> EncodedText:
        ids = row[: row.index(-1)] if -1 in row else row
        if not 0 < len(ids) <= self._length:
            message = f"{IDS} must be 1 to {self._length} tokens for this model, got {len(ids)}"
            raise InvalidArgument(message, field=IDS)
        wrong = [each for each in (*ids, *row[len(ids) :]) if not -1 <= each < self._vocabulary]
        if wrong or any(each != -1 for each in row[len(ids) :]):
            message = f"{IDS} must be between 0 and {self._vocabulary - 1}, filled up with -1"
            raise InvalidArgument(f"{message}, got {(wrong or row)[0]}", field=IDS)
        return EncodedText(ids, [0] * len(ids))


def _texts(array: NDArray[Any]) -> list[str]:
    """What is not UTF-8 reads as U+FFFD: other requests share the batch."""
    return [text.decode(errors="replace") for text in array.ravel()]


class PaddedBatch(NamedTuple):
    """See `encoder_modules.Padded`."""

    ids: "Tensor"
    mask: "Tensor"
    segments: "Tensor"


class EncoderRuntime:
    """One instance with weights of its own."""

    def __init__(self, encoder: "Encoder", reader: EncoderInputReader, budget: int, device: str) -> None:
        self._encoder: Encoder | None = encoder
        self._reader = reader
        self._budget = budget
        self._device = device

    @property
    def traits(self) -> RuntimeTraits:
        return RuntimeTraits()

    def execute(self, inputs: Arrays, wanted: Sequence[str]) -> Iterator[Arrays]:
        sequences = self._reader.read_tokens(inputs)
        counts = np.array([[len(sequence.ids)] for sequence in sequences], np.int32)
        yield {self._reader.output: self._compute(sequences), COUNT: counts}

    def close(self) -> None:
        from ..torch.torch_process import release_torch_memory

        self._encoder = None
        release_torch_memory()

    def _compute(self, sequences: Sequence[EncodedText]) -> NDArray[np.float32]:
        import torch

        assert self._encoder is not None
        made: dict[int, NDArray[np.float32]] = {}
        with torch.inference_mode():
            for indices in batch_by_length([len(each.ids) for each in sequences], self._budget):
                batch = self._padded([sequences[index] for index in indices], self._encoder.pad_id)
                made.update(zip(indices, self._encoder(batch).cpu().numpy(), strict=True))
        return np.stack([made[index] for index in range(len(sequences))])

    def _padded(self, sequences: Sequence[EncodedText], pad: int) -> PaddedBatch:
        """Rows of equal length; what fills them up stands at the end."""
        import torch

        rows = len(sequences), max(len(each.ids) for each in sequences)
        ids, mask, segments = np.full(rows, pad), np.zeros(rows, np.int64), np.zeros(rows, np.int64)
        for row, each in enumerate(sequences):
            length = len(each.ids)
            ids[row, :length], mask[row, :length], segments[row, :length] = each.ids, 1, each.segments
        return PaddedBatch(*(torch.from_numpy(array).to(self._device) for array in (ids, mask, segments)))


ENCODER = EncoderLoader()
