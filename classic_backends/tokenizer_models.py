"""The models `preprocessing` and `postprocessing` of Triton's TensorRT-LLM repositories, without their Python code:
texts become token ids, and token ids texts.

Tensors and parameters are those of
https://github.com/triton-inference-server/tensorrtllm_backend/tree/main/all_models/inflight_batcher_llm. A request is
never mixed with another: rows would have to be padded to the longest one of both.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.errors import CharoniaError, InvalidArgument, NotFound
from ..core.model import ModelConfig, RawConfig
from ..core.runtime import (
    Arrays,
    InstancePlacement,
    Parameters,
    Runtime,
    RuntimeAnswer,
    RuntimeLoader,
    RuntimeRequest,
    RuntimeResponse,
    RuntimeTraits,
)
from ..tokenization.checkpoint_files import locate_checkpoint
from ..tokenization.tokenizer import Tokenizer
from .backend_config import FoundModel, FoundTensor, complete_config, config_type, declares_tensors, read_flag


def _tensors(*texts: str, optional: bool = False) -> tuple[FoundTensor, ...]:
    """Tensors of `name DATATYPE dims`, the dims as in `2,-1`."""
    parts = (text.split() for text in texts)
    return tuple(FoundTensor(name, kind, (-1, *map(int, dims.split(","))), optional) for name, kind, dims in parts)


PREPROCESSING_TENSORS = FoundModel(
    (
        *_tensors("QUERY BYTES 1", "REQUEST_OUTPUT_LEN INT32 1"),
        *_tensors("DECODER_QUERY BYTES 1", "BAD_WORDS_DICT BYTES -1", "STOP_WORDS_DICT BYTES -1", optional=True),
        *_tensors("EMBEDDING_BIAS_WORDS BYTES -1", "EMBEDDING_BIAS_WEIGHTS FP32 -1", optional=True),
        *_tensors("END_ID INT32 1", "PAD_ID INT32 1", "PROMPT_TABLE_EXTRA_ID UINT64 1", optional=True),
    ),
    (
        *_tensors("INPUT_ID INT32 -1", "REQUEST_INPUT_LEN INT32 1"),
        *_tensors("DECODER_INPUT_ID INT32 -1", "REQUEST_DECODER_INPUT_LEN INT32 1"),
        *_tensors("BAD_WORDS_IDS INT32 2,-1", "STOP_WORDS_IDS INT32 2,-1", "EMBEDDING_BIAS FP32 -1"),
        *_tensors("REQUEST_OUTPUT_LEN INT32 -1", "OUT_END_ID INT32 1", "OUT_PAD_ID INT32 1"),
        *_tensors("OUT_PROMPT_TABLE_EXTRA_IDS UINT64 -1"),
    ),
)
POSTPROCESSING_TENSORS = FoundModel(
    _tensors("TOKENS_BATCH INT32 -1,-1", "SEQUENCE_LENGTH INT32 -1"), _tensors("OUTPUT BYTES -1")
)

_UNREAD = {"DECODER_QUERY"}
"""Inputs that are declared, and refused when they hold something, as those that are not declared."""

Answer = Callable[[Arrays], Arrays]


@dataclass(frozen=True)
class TokenizerRuntime(Runtime):
    """A runtime that answers each request by itself."""

    answer: Answer
    traits: RuntimeTraits

    def execute(self, inputs: Arrays, output_names: Sequence[str]) -> Iterator[Arrays]:
        yield self.answer(inputs)

    def execute_requests(self, requests: Sequence[RuntimeRequest]) -> Sequence[RuntimeAnswer]:
        return [self._answer_request(request) for request in requests]

    def _answer_request(self, request: RuntimeRequest) -> RuntimeAnswer:
        try:
            return RuntimeResponse(self.answer(request.inputs))
        except CharoniaError as error:
            return error


@dataclass(frozen=True)
class TokenizerLoader(RuntimeLoader):
    """The `RuntimeLoader` of one of the two models. `make`: its answers, from a tokenizer, a config and parameters.
    `inline`: they take microseconds. Parameter: `tokenizer_dir`, a directory or hub id; the version's directory if that
    is not set."""

    tensors: FoundModel
    make: Callable[[Tokenizer, ModelConfig, Mapping[str, str]], Answer]
    inline: bool
    by_request = True

    def load(
        self, directory: Path, config: ModelConfig, placement: InstancePlacement, parameters: Parameters
    ) -> Runtime:
        self._check_types(config)
        # Triton's repositories come with ${...} where somebody is to write a value.
        filled_in = {name: value for name, value in parameters.items() if value and not value.startswith("${")}
        tokenizer_directory = filled_in.get("tokenizer_dir", "")
        try:
            tokenizer = Tokenizer.load(locate_checkpoint(tokenizer_directory) if tokenizer_directory else directory)
        except NotFound:
            if tokenizer_directory:
                raise
            message = f"model '{config.name}' needs the parameter 'tokenizer_dir': the directory of its tokenizer"
            raise InvalidArgument(message, field="tokenizer_dir") from None
        traits = RuntimeTraits(inline=self.inline)
        return TokenizerRuntime(self.make(tokenizer, config, filled_in), traits)

    def _check_types(self, config: ModelConfig) -> None:
        for side, specs, tensors in (
            ("input", config.inputs, self.tensors.inputs),
            ("output", config.outputs, self.tensors.outputs),
        ):
            known = {tensor.name: tensor.datatype for tensor in tensors}
            for spec in specs:
                if known.get(spec.name, spec.datatype) != spec.datatype:
                    types = f"must be {config_type(known[spec.name])}, not {config_type(spec.datatype)}"
                    message = f"{side} '{spec.name}' of model '{config.name}' {types}"
                    raise InvalidArgument(message, field=f"{side}.{spec.name}.data_type")

    def complete(self, directory: Path, raw: RawConfig, parameters: Parameters) -> RawConfig:
        if declares_tensors(raw):
            return raw
        return complete_config(raw, self.tensors, parameters)


def _make_preprocessing(tokenizer: Tokenizer, config: ModelConfig, parameters: Parameters) -> Answer:
    preprocessor = Preprocessor(tokenizer, read_flag(parameters, "add_special_tokens", True))
    return partial(_in_rows, preprocessor.answer, config.max_batch_size > 0)


def _in_rows(answer: Answer, batched: bool, inputs: Arrays) -> Arrays:
    """The answer to inputs that have a batch dimension, or get one for it."""
    if batched:
        return answer(inputs)
    outputs = answer({name: array[None] for name, array in inputs.items()})
    return {name: array[0] for name, array in outputs.items()}


class Preprocessor:
    """Makes the token ids of prompts and words. `special`: prompts begin as the model wants them to, with bos say."""

    def __init__(self, tokenizer: Tokenizer, special: bool) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._end = tokenizer.token_id("eos_token")
        self._pad = tokenizer.token_id("pad_token")
        self._known = {tensor.name for tensor in PREPROCESSING_TENSORS.inputs} - _UNREAD

    def answer(self, inputs: Arrays) -> Arrays:
        """Raises `InvalidArgument` for an input that asks for more than texts."""
        for name, array in inputs.items():
            if name not in self._known and array.size and any(element not in (b"", 0) for element in array.flat):
                raise InvalidArgument(f"input '{name}' is not supported by this model", field=name)
        prompts = [self._tokenizer.encode(_text("QUERY", row.item()), self._special) for row in inputs["QUERY"]]
        size = len(prompts)
        outputs: dict[str, NDArray[Any]] = {
            "INPUT_ID": _padded(prompts, self._number(inputs, "PAD_ID") or 0),
            "REQUEST_INPUT_LEN": np.array([[len(prompt)] for prompt in prompts], np.int32),
            "DECODER_INPUT_ID": np.zeros((size, 0), np.int32),
            "REQUEST_DECODER_INPUT_LEN": np.zeros((size, 1), np.int32),
            "BAD_WORDS_IDS": self._words("BAD_WORDS_DICT", inputs, size),
            "STOP_WORDS_IDS": self._words("STOP_WORDS_DICT", inputs, size),
            "EMBEDDING_BIAS": self._bias(inputs, size),
            "REQUEST_OUTPUT_LEN": inputs["REQUEST_OUTPUT_LEN"],
        }
        end = self._number(inputs, "END_ID")
        for name, token in (("OUT_END_ID", end), ("OUT_PAD_ID", self._number(inputs, "PAD_ID"))):
            if (token := end if token is None else token) is not None:
                outputs[name] = np.full((size, 1), token, np.int32)
        if "PROMPT_TABLE_EXTRA_ID" in inputs:
            length = len(outputs["INPUT_ID"][0])
            outputs["OUT_PROMPT_TABLE_EXTRA_IDS"] = np.repeat(inputs["PROMPT_TABLE_EXTRA_ID"], length, 1)
        return outputs

    def _number(self, inputs: Arrays, name: str) -> int | None:
        own = self._end if name == "END_ID" else self._pad
        return int(inputs[name].flat[0]) if name in inputs else own

    def _words(self, name: str, inputs: Arrays, size: int) -> NDArray[Any]:
        """int32 [size, 2, n]: the tokens of all words one after the other, and where each word ends, then -1."""
        rows = inputs[name].reshape(size, -1) if name in inputs else [()] * size
        texts = ([text for element in row if (text := _text(name, element))] for row in rows)
        encoded = [self._tokenizer.word_ids(row) for row in texts]
        width = max(sum(map(len, words)) for words in encoded)
        array = np.tile(np.array([[[0] * width, [-1] * width]], np.int32), (size, 1, 1))
        for row, words in zip(array, encoded, strict=True):
            tokens = [token for word in words for token in word]
            row[0, : len(tokens)] = tokens
            row[1, : len(words)] = list(accumulate(map(len, words)))
        return array

    def _bias(self, inputs: Arrays, size: int) -> NDArray[Any]:
        """float32 [size, vocabulary]: the weight of each word, added to all its tokens; [size, 0] without words."""
        words = inputs.get("EMBEDDING_BIAS_WORDS")
        weights = inputs.get("EMBEDDING_BIAS_WEIGHTS")
        if words is None and weights is None:
            return np.zeros((size, 0), np.float32)
        if words is None or weights is None or words.shape != weights.shape:
            message = "EMBEDDING_BIAS_WORDS and EMBEDDING_BIAS_WEIGHTS must be there together, and equally many"
            raise InvalidArgument(message, field="EMBEDDING_BIAS_WEIGHTS")
        bias = np.zeros((size, self._tokenizer.size), np.float32)
        for row, row_words, row_weights in zip(bias, words, weights, strict=True):
            for word, weight in zip(row_words.ravel(), row_weights.ravel(), strict=True):
                tokens = self._tokenizer.encode(_text("EMBEDDING_BIAS_WORDS", word), special=False)
                row[list(set(tokens))] += weight
        return bias


def _text(name: str, element: bytes | str) -> str:
    try:
        return element if isinstance(element, str) else element.decode()
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{name} is not UTF-8: {error}", field=name) from None


def _padded(rows: Sequence[Sequence[int]], pad: int) -> NDArray[Any]:
    padded = np.full((len(rows), max(map(len, rows))), pad, np.int32)
    for target, row in zip(padded, rows, strict=True):
        target[: len(row)] = row
    return padded


def _make_postprocessing(tokenizer: Tokenizer, config: ModelConfig, parameters: Parameters) -> Answer:
    special = not read_flag(parameters, "skip_special_tokens", True)
    return partial(_postprocess, tokenizer, special)


def _postprocess(tokenizer: Tokenizer, special: bool, inputs: Arrays) -> Arrays:
    """The texts of all answers of all rows, one after the other, as Triton's model has them."""
    tokens = inputs["TOKENS_BATCH"]
    lengths = inputs["SEQUENCE_LENGTH"].ravel()
    answers = tokens.reshape(math.prod(tokens.shape[:-1]), tokens.shape[-1])
    if len(lengths) != len(answers):
        message = f"SEQUENCE_LENGTH must have one element for each of {len(answers)} answers, got {len(lengths)}"
        raise InvalidArgument(message, field="SEQUENCE_LENGTH")
    texts = [
        tokenizer.decode(row[: max(0, length)].tolist(), special).encode()
        for row, length in zip(answers, lengths.tolist(), strict=True)
    ]
    return {"OUTPUT": np.array(texts, object)}


PREPROCESSING = TokenizerLoader(PREPROCESSING_TENSORS, _make_preprocessing, inline=False)
POSTPROCESSING = TokenizerLoader(POSTPROCESSING_TENSORS, _make_postprocessing, inline=True)
