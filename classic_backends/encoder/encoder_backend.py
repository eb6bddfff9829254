"""The `encoder` backend: published sentence-transformers and cross-encoder directories, texts to vectors or scores.

Requests are batched by their number, as any model's; within an execution, texts of similar length are computed
together, a budget of tokens at a time. torch and transformers are imported when the first encoder is loaded, and stay.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ...core.encoder_tensors import (
    COUNT,
    DOCUMENT,
    EMBEDDING,
    FINAL_SCORES,
    IDS,
    INSTRUCTION,
    NO_TOKEN,
    PAIR,
    PROMPT,
    SCORE,
    TEXT,
    TOKEN_EMBEDDING,
    TOKEN_EMBEDDING_COUNT,
    TOKEN_IDS,
    TOKEN_WEIGHT,
)
from ...core.errors import InvalidArgument, shorten
from ...core.model import MemoryNeed, ModelConfig, RawConfig
from ...core.runtime import Arrays, InstancePlacement, Parameters, Runtime, RuntimeLoader
from ...processes.host import torch_has_cuda
from ...tokenization.bounded_encoder import EncodedText
from ...tokenization.checkpoint_files import read_json
from ...tokenization.tokenizer_json import EncoderTokenizer
from ..backend_config import (
    FoundModel,
    FoundTensor,
    check_config_matches,
    complete_config,
    declares_tensors,
    memory_per_instance,
    read_integer,
    read_thread_count,
    threads_per_instance,
    warn_unknown_parameters,
)
from .encoder_files import AnswerTokens, CrossEncoderFiles, EmbedderFiles, read_encoder
from .late_interaction import MarkedText, MarkedTokenizer
from .late_interaction_files import LateInteractionFiles, read_late_interaction
from .pair_template import PairEncoder

if TYPE_CHECKING:
    from .encoder_modules import Encoder

MAX_BATCH_SIZE = 256
"""Texts of one execution, if the config does not say."""

_KNOWN_PARAMETERS = {"max_batch_tokens", "intra_op_thread_count", "default-max-batch-size", FINAL_SCORES}
_MAX_BATCH_TOKENS = 8192
MAX_BATCH_TOKENS_ON_CPU = 1024
"""What an MLP makes of so many tokens stays in a processor's caches: of 8,192 each pass reads it from memory again."""

_MAX_OUTPUT_BYTES = 1 << 30
"""The bytes of one execution's outputs: bge-m3's vectors of a text of 8,192 tokens take 32 MiB."""

_MIN_FILLED = 0.75
"""The least share of a batch's tokens that is no padding, unless the batch is small."""

_SMALL_BATCH = 256
"""Tokens of a batch, padding included, up to which a longer row costs less than another pass."""


EncoderFiles: TypeAlias = EmbedderFiles | CrossEncoderFiles | LateInteractionFiles


def read_files(directory: Path) -> EncoderFiles:
    """The encoder in a directory, of any kind. Raises as `read_encoder`."""
    return read_late_interaction(directory) or read_encoder(directory)


class EncoderLoader(RuntimeLoader):
    """Loads the version's directory itself: modules.json beside a transformer, or a transformer's config.json.
    Parameters: `max_batch_tokens` computed together, padding included; `intra_op_thread_count`."""

    def load(
        self, directory: Path, config: ModelConfig, placement: InstancePlacement, parameters: Parameters
    ) -> Runtime:
        from ..torch.torch_backend import choose_device, set_torch_threads
        from .encoder_modules import CausalCrossEncoder, CrossEncoder, Embedder, TokenEmbedder

        warn_unknown_parameters(config.name, parameters, _KNOWN_PARAMETERS)
        threads = read_thread_count(parameters, "intra_op_thread_count") or threads_per_instance(config.raw)
        set_torch_threads(threads)
        files = read_files(directory)
        check_config_matches(config, encoder_tensors(files))
        device = choose_device(config.name, placement) or "cpu"
        default = MAX_BATCH_TOKENS_ON_CPU if device == "cpu" else _MAX_BATCH_TOKENS
        max_batch_tokens = read_integer(parameters, "max_batch_tokens", default, least=1)
        if isinstance(files, LateInteractionFiles):
            return EncoderRuntime(TokenEmbedder(files, device), MarkedTextReader(files).read, max_batch_tokens)
        tokenizer = EncoderTokenizer.load(files.directory, files.tokenization.max_tokens, files.tokenization.lowercase)
        encoder: Encoder
        if isinstance(files, EmbedderFiles):
            encoder = Embedder(files, device)
        elif files.answer is None:
            encoder = CrossEncoder(files, device)
        else:
            encoder = CausalCrossEncoder(files, answer_ids(files.answer, tokenizer, files.directory), device)
        return EncoderRuntime(encoder, TextReader(files, tokenizer).read, max_batch_tokens)

    def uses_gpus(self) -> bool:
        return torch_has_cuda()

    def needs(self, directory: Path, raw: RawConfig, parameters: Parameters) -> tuple[MemoryNeed, ...]:
        return memory_per_instance(raw, directory)

    def complete(self, directory: Path, raw: RawConfig, parameters: Parameters) -> RawConfig:
        if declares_tensors(raw):
            return raw
        sized = {**raw, "max_batch_size": raw.get("max_batch_size") or MAX_BATCH_SIZE}
        return complete_config(sized, encoder_tensors(read_files(directory)), parameters)

    def file_parameters(self, directory: Path, parameters: Parameters) -> Mapping[str, str]:
        files = read_files(directory)
        return {FINAL_SCORES: "true"} if isinstance(files, CrossEncoderFiles) and files.final else {}


def encoder_tensors(files: EncoderFiles) -> FoundModel:
    """The tensors of an encoder. An embedder's texts may come as ids instead, in rows that -1 fills up; a classifier's
    need no pair, unless a template writes one. A prompt may be named where the files have some."""
    text = FoundTensor(TEXT, "BYTES", (-1, 1))
    count = FoundTensor(COUNT, "INT32", (-1, 1))
    if isinstance(files, CrossEncoderFiles):
        score = FoundTensor(SCORE, "FP32", (-1, files.labels))
        pair = FoundTensor(PAIR, "BYTES", (-1, 1), optional=not files.template)
        instruction = FoundTensor(INSTRUCTION, "BYTES", (-1, 1), optional=True)
        takes_instruction = files.template is not None and files.template.carries_instruction
        return FoundModel((text, pair, instruction) if takes_instruction else (text, pair), (score, count))
    prompt = FoundTensor(PROMPT, "BYTES", (-1, 1), optional=True)
    vectors = FoundTensor(TOKEN_EMBEDDING, "FP32", (-1, -1, files.size))
    vector_count = FoundTensor(TOKEN_EMBEDDING_COUNT, "INT32", (-1, 1))
    if isinstance(files, LateInteractionFiles):
        return FoundModel((text, prompt), (vectors, vector_count, count))
    inputs: tuple[FoundTensor, ...] = text._replace(optional=True), FoundTensor(IDS, "INT64", (-1, -1), optional=True)
    if files.tokenization.prompts:
        inputs = *inputs, prompt
    outputs: tuple[FoundTensor, ...] = (FoundTensor(EMBEDDING, "FP32", (-1, files.size)), count)
    if files.token_heads:
        weights = FoundTensor(TOKEN_WEIGHT, "FP32", (-1, -1)), FoundTensor(TOKEN_IDS, "INT64", (-1, -1))
        outputs = *outputs, vectors._replace(shape=(-1, -1, files.token_heads.size)), vector_count, *weights
    return FoundModel(inputs, outputs)


def answer_ids(answer: AnswerTokens, tokenizer: EncoderTokenizer, directory: Path) -> list[int]:
    """The ids of the tokens that answer. Raises `InvalidArgument` for one that the tokenizer lacks."""
    ids = []
    for token in filter(lambda token: token is not None, (answer.relevant, answer.irrelevant)):
        token_id = tokenizer.token_id(token) if isinstance(token, str) else token
        if token_id is None:
            raise InvalidArgument(f"{directory / 'config.json'}: its tokenizer has no token {shorten(repr(token))}")
        ids.append(token_id)
    return ids


class EncoderRuntime(Runtime):
    """One instance, with weights of its own; `read_tokens` reads its requests."""

    def __init__(
        self, encoder: "Encoder", read_tokens: Callable[[Arrays], Sequence[Any]], max_batch_tokens: int
    ) -> None:
        self._encoder: Encoder | None = encoder
        self._read_tokens = read_tokens
        self._max_batch_tokens = max_batch_tokens

    def execute(self, inputs: Arrays, output_names: Sequence[str]) -> Iterator[Arrays]:
        assert self._encoder is not None
        yield encode_in_batches(self._encoder, self._read_tokens(inputs), output_names, self._max_batch_tokens)

    def close(self) -> None:
        from ..torch.torch_backend import release_torch_memory

        self._encoder = None
        release_torch_memory()


class TextReader:
    """Reads requests of texts, pairs of texts, or ids."""

    def __init__(self, files: EmbedderFiles | CrossEncoderFiles, tokenizer: EncoderTokenizer) -> None:
        self._tokenizer = tokenizer
        self._max_tokens = files.tokenization.max_tokens
        self._prompt = files.tokenization.prompt
        self._prompts = files.tokenization.prompts
        self._vocabulary_size = int(read_json(files.directory / "config.json").get("vocab_size", 0))
        self._pairs: PairEncoder | None = None
        if isinstance(files, CrossEncoderFiles) and files.template:
            self._pairs = PairEncoder(files.template, tokenizer, self._max_tokens)

    def read(self, inputs: Arrays) -> list[EncodedText]:
        """Raises `InvalidArgument` for neither texts nor ids, both of them, wrong ids, or a prompt of another name."""
        if (TEXT in inputs) == (IDS in inputs):
            raise InvalidArgument(f"give either {TEXT} or {IDS}", field=TEXT)
        if IDS in inputs:
            if PROMPT in inputs:
                raise InvalidArgument(f"{PROMPT} goes with texts, not with {IDS}", field=PROMPT)
            return [self._check_ids(row) for row in inputs[IDS].tolist()]
        texts = _decoded(inputs[TEXT])
        if self._pairs:
            instructions = _decoded(inputs[INSTRUCTION]) if INSTRUCTION in inputs else [self._prompt] * len(texts)
            return [*self._pairs.encode(texts, _decoded(inputs[PAIR]), instructions)]
        prompts = self._named_prompts(_decoded(inputs[PROMPT])) if PROMPT in inputs else [self._prompt] * len(texts)
        texts = [prompt + text for prompt, text in zip(prompts, texts, strict=True)]
        return self._tokenizer.encode(texts, _decoded(inputs[PAIR]) if PAIR in inputs else None)

    def _named_prompts(self, names: Sequence[str]) -> list[str]:
        check_prompt_names(names, self._prompts)
        return [self._prompts[name] for name in names]

    def _check_ids(self, row: list[int]) -> EncodedText:
        ids = row[: row.index(NO_TOKEN)] if NO_TOKEN in row else row
        if not 0 < len(ids) <= self._max_tokens:
            message = f"{IDS} must be 1 to {self._max_tokens} tokens for this model, got {len(ids)}"
            raise InvalidArgument(message, field=IDS)
        wrong = [token for token in row if not NO_TOKEN <= token < self._vocabulary_size]
        if wrong or any(token != NO_TOKEN for token in row[len(ids) :]):
            message = f"{IDS} must be between 0 and {self._vocabulary_size - 1}, filled up with {NO_TOKEN}"
            raise InvalidArgument(f"{message}, got {(wrong or row)[0]}", field=IDS)
        return EncodedText(ids, [0] * len(ids))


class MarkedTextReader:
    """Reads requests of texts and maybe their roles."""

    def __init__(self, files: LateInteractionFiles) -> None:
        self._tokenizer = MarkedTokenizer(files)
        self._prompts = files.tokenization.prompts

    def read(self, inputs: Arrays) -> list[MarkedText]:
        """Raises `InvalidArgument` for a role that has no prompt."""
        texts = _decoded(inputs[TEXT])
        roles = _decoded(inputs[PROMPT]) if PROMPT in inputs else [DOCUMENT] * len(texts)
        check_prompt_names(roles, self._prompts)
        return self._tokenizer.encode(texts, roles)


def encode_in_batches(encoder: "Encoder", texts: Sequence[Any], output_names: Sequence[str], most: int) -> Arrays:
    """The arrays of all texts [texts, ...] and how many tokens they have, computed by batches of `most` tokens.

    Where texts have arrays of several lengths, the shorter ones are filled up: by 0, or by `NO_TOKEN` where they are
    tokens.
    Raises `InvalidArgument` for more than an execution may make.
    """
    made: dict[int, Arrays] = {}
    for indices in batch_by_length([len(text.ids) for text in texts], most):
        made.update(zip(indices, encoder.encode([texts[index] for index in indices], output_names), strict=True))
        # The longest texts come first, and the others' arrays are filled up to theirs.
        if len(texts) * sum(array.nbytes for array in made[indices[0]].values()) > _MAX_OUTPUT_BYTES:
            message = f"the outputs of these texts take more than {_MAX_OUTPUT_BYTES >> 20} MiB: send fewer at once"
            raise InvalidArgument(message, field=TEXT)
    outputs = {name: _stacked([made[index][name] for index in range(len(texts))], name) for name in made[0]}
    return {**outputs, COUNT: np.array([[len(text.ids)] for text in texts], np.int32)}


def _stacked(arrays: Sequence[NDArray[Any]], name: str) -> NDArray[Any]:
    longest = max(map(len, arrays))
    if all(len(array) == longest for array in arrays):
        return np.stack(arrays)
    filler = NO_TOKEN if name == TOKEN_IDS else 0
    filled = np.full((len(arrays), longest, *arrays[0].shape[1:]), filler, arrays[0].dtype)
    for row, array in zip(filled, arrays, strict=True):
        row[: len(array)] = array
    return filled


def check_prompt_names(names: Sequence[str], prompts: Mapping[str, str]) -> None:
    """Raises `InvalidArgument` for a name that is none of the `prompts`."""
    wrong = [name for name in names if name not in prompts]
    if wrong:
        message = f"{PROMPT} must be one of {', '.join(prompts)} for this model, got {shorten(repr(wrong[0]))}"
        raise InvalidArgument(message, field=PROMPT)


def _decoded(array: NDArray[Any]) -> list[str]:
    """U+FFFD stands for bytes that are not UTF-8, rather than an error: other requests share the batch."""
    return [text.decode(errors="replace") for text in array.ravel()]


def batch_by_length(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Batches of indices of `lengths`, each index in exactly one; the longest come first. No batch has more than
    `max_tokens`, padding included, unless it is a single sequence; and little is padding."""
    batch: list[int] = []
    longest = 0
    tokens = 0
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        padded = longest * (len(batch) + 1)
        filled = tokens + lengths[index]
        fits = padded <= max_tokens and (padded <= _SMALL_BATCH or filled >= _MIN_FILLED * padded)
        if batch and not fits:
            yield batch
            batch = []
            tokens = 0
        if not batch:
            longest = lengths[index]
        batch.append(index)
        tokens += lengths[index]
    if batch:
        yield batch


ENCODER = EncoderLoader()
