"""Encodes texts by a tokenizer from the internet, within a stated time and memory. Work that is not known to be bounded
(`encoding_bounds.py`), or a text that may grow long, goes to a process that may be killed. Thread-safe."""

import logging
import os
import threading
import weakref
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import msgspec
import tokenizers

from ..core.errors import Internal, InvalidArgument, SentError
from ..core.native_calls import CONTROL_FLOW, NativeCall, describe_panic
from ..processes.limited_process import Answer, CallLimits, CallLost, LimitedProcess, TimeLimitExceeded
from .encoding_bounds import read_bounds

log = logging.getLogger(__name__)

BYTES_OF_CHARACTER = 4096
"""The memory that a separate process may take for each character of the text."""
_LEAST_MEMORY = 64 << 20
_MOST_MEMORY = 1 << 30
_SECONDS = 5.0
_MOST_GROWN = 1 << 24
"""The most characters that a text may become in this process."""
_PLAIN_GROWTH = 4
"""The growth up to which texts of any length are encoded in this process."""
_SAMPLE = "The 1st text: d\u00e9j\u00e0 vu,\n\u65e5\u672c\u8a9e \U0001f98a  end"

EncoderInput: TypeAlias = str | tuple[str, str]
"""A text, or a pair of them."""


class EncodedText(NamedTuple):
    """The tokens of one text or pair; `segments` distinguishes the two texts, as BERT's models want it."""

    ids: Sequence[int]
    segments: Sequence[int]


class BoundedEncoder:
    """Encodes by `backend`, which stays unchanged; `where` is its file, for messages. Raises `InvalidArgument` if it
    cannot decode within bounds, see `read_bounds`."""

    def __init__(self, backend: tokenizers.Tokenizer, where: str) -> None:
        self._backend = backend
        self._where = where
        try:
            with NativeCall(f"{where}: the tokenizer failed"):
                self._growth, self.unbounded = read_bounds(backend)
        except (InvalidArgument, Internal) as error:
            raise InvalidArgument(f"{where}: {error.message}") from error
        self._apart: _EncodingProcess | None = None
        self._lock = threading.Lock()

    @property
    def bounded(self) -> bool:
        """Whether short texts take little time."""
        return not self.unbounded

    @property
    def may_run_apart(self) -> bool:
        """Whether there are texts that go to the process that may be killed."""
        return bool(self.unbounded) or self._growth > _PLAIN_GROWTH

    def try_out(self, example: str) -> None:
        """Encode an example of the checkpoint's own, such as its chat template. Raises `InvalidArgument` if it fails or
        exceeds the limits: requests would do no better."""
        if self.unbounded:
            message = "%s: texts are encoded in a process of their own, for %s is not known to be harmless"
            log.warning(message, self._where, ", ".join(self.unbounded))
        for text in (_SAMPLE, example):
            try:
                [encoded] = self.encode([text])
                with NativeCall("the tokenizer failed"):
                    self._backend.decode(list(encoded.ids)[:256], skip_special_tokens=False)
            except (InvalidArgument, Internal) as error:
                raise InvalidArgument(
                    f"{self._where}: an example of {len(text)} characters: {error.message}"
                ) from error

    def encode(self, inputs: Sequence[EncoderInput], special: bool = True) -> list[EncodedText]:
        """The tokens of each input; `special` adds what the model wants around a text. Other threads run meanwhile.

        Raises:
            InvalidArgument: encoding takes too much time or memory.
            Internal: the library failed.
            TypeError, UnicodeEncodeError: an input is not Unicode.
        """
        if self._runs_apart(sum(len(item) if isinstance(item, str) else sum(map(len, item)) for item in inputs)):
            return self._encode_apart(inputs, special)
        with NativeCall("the tokenizer failed"):
            encodings = self._backend.encode_batch([*inputs], add_special_tokens=special)
        return [EncodedText(encoding.ids, encoding.type_ids) for encoding in encodings]

    def _runs_apart(self, characters: int) -> bool:
        return self.may_run_apart and (bool(self.unbounded) or characters * self._growth > _MOST_GROWN)

    def _encode_apart(self, inputs: Sequence[EncoderInput], special: bool) -> list[EncodedText]:
        message = msgspec.msgpack.encode((inputs, special))
        memory = min(_LEAST_MEMORY + BYTES_OF_CHARACTER * len(message), _MOST_MEMORY)
        with self._lock:
            if self._apart is None:
                with NativeCall("the tokenizer failed"):
                    self._apart = _EncodingProcess(self._backend.to_str())
            answer = self._apart.call(message, CallLimits(_SECONDS, memory))
        if answer.error is not None:
            raise answer.error.error()
        return [EncodedText(*tokens) for tokens in answer.encoded]


class _EncodingAnswer(msgspec.Struct, array_like=True):
    encoded: list[tuple[list[int], list[int]]]
    error: SentError | None = None


class _EncodingProcess:
    """The process of one tokenizer, restarted after a text that ended it. It ends with this object."""

    def __init__(self, tokenizer: str) -> None:
        self._tokenizer = tokenizer
        self._process: LimitedProcess | None = None

    def call(self, message: bytes, limits: CallLimits) -> _EncodingAnswer:
        """Answer a request of `_make_answer`. Raises `InvalidArgument` if it exceeds the limits."""
        try:
            if self._process is None or not self._process.alive:
                self._process = LimitedProcess("charonia-tokens", _make_answer, self._tokenizer)
                weakref.finalize(self, _end, self._process)
            return msgspec.msgpack.decode(self._process.call(message, limits), type=_EncodingAnswer)
        except TimeLimitExceeded as error:
            raise InvalidArgument(f"encoding the text takes {error}") from None
        except CallLost as error:
            most = f"{limits.memory >> 20} MiB"
            raise InvalidArgument(
                f"encoding the text takes more than {most}, or breaks the library ({error})"
            ) from None


def _end(process: LimitedProcess) -> None:
    if process.alive:
        process.close()


def _make_answer(tokenizer: str) -> Answer:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads would take address space, which is limited
    return partial(_answer, tokenizers.Tokenizer.from_str(tokenizer))


def _answer(backend: tokenizers.Tokenizer, message: bytes) -> bytes:
    received, special = msgspec.msgpack.decode(message)
    try:
        inputs = [item if isinstance(item, str) else tuple(item) for item in received]
        encodings = backend.encode_batch(inputs, add_special_tokens=special)
        answer = _EncodingAnswer([(encoding.ids, encoding.type_ids) for encoding in encodings])
    except CONTROL_FLOW:
        raise
    except BaseException as error:
        failure = Internal(f"the tokenizer failed: {describe_panic(error)}")
        answer = _EncodingAnswer([], SentError.of(failure))
    return msgspec.msgpack.encode(answer)
