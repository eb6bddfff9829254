"""What crosses between a frontend and the hub comes out as it went in."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from charonia.core import errors
from charonia.core.errors import CharoniaError, QueueFull, SentError
from charonia.core.logprobs import PromptToken
from charonia.core.request import GenerateChunk, Usage
from charonia.core.request_context import RequestContext
from charonia.core.tensor import NUMPY_TYPES, Tensor
from charonia.http_workers.messages import (
    ModelCall,
    RequestOrigin,
    TextAnswer,
    decode_from_worker,
    decode_origin,
    decode_to_worker,
    encode_origin,
    encode_part,
)
from charonia.http_workers.state_messages import LogLevels
from charonia.http_workers.tensors import SentTensor
from charonia.repository.model_registry import NotResident
from charonia.telemetry.logging_setup import LogSettings
from tests.scored_tokens import scored

ORIGIN = RequestOrigin("infer", "", 1.0, 0.0)


def crossed(tensor: Tensor) -> Tensor:
    call = ModelCall(1, 2, msgspec.Raw(encode_origin(ORIGIN)), "m", "", "", [SentTensor.of(tensor)], None, {})
    [found] = decode_from_worker(msgspec.msgpack.encode([call]))
    assert isinstance(found, ModelCall)
    assert decode_origin(found.origin) == ORIGIN
    return found.inputs[0].tensor()


def same(one: Tensor, other: Tensor) -> bool:
    head = (one.name, one.datatype, one.shape) == (other.name, other.datatype, other.shape)
    return head and one.data.dtype == other.data.dtype and one.data.ravel().tolist() == other.data.ravel().tolist()


@pytest.mark.parametrize("datatype", [name for name in NUMPY_TYPES if name != "BYTES"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 4)])
def test_numbers(datatype: str, shape: tuple[int, ...]) -> None:
    tensor = Tensor.from_values("x", datatype, np.ones(shape))
    found = crossed(tensor)
    assert same(tensor, found)
    assert not found.data.flags.writeable


def test_logprobs_cross_without_their_vocabularys_pieces() -> None:
    token = scored(5, "a", -1.0, (7, "b", -2.0), rank=2, width=1)
    prompt = (PromptToken(3, "x"), PromptToken(5, "a", token, 1))
    chunk = GenerateChunk(text="a", token_ids=(5,), usage=Usage(2, 1), logprobs=(token,), prompt_logprobs=prompt)
    [answer] = decode_to_worker(msgspec.msgpack.encode([TextAnswer(1, chunk)], enc_hook=encode_part))
    assert isinstance(answer, TextAnswer)
    for found in (*answer.chunk.logprobs, answer.chunk.prompt_logprobs[1].given):
        assert found is not None
        assert (found.id, found.scores, found.width, found.text) == (5, token.scores, 1, "")
    assert answer.chunk.prompt_logprobs[0] == prompt[0]


def test_an_array_that_is_not_contiguous() -> None:
    data: NDArray[np.int32] = np.arange(12, dtype=np.int32).reshape(3, 4)[:, ::2]
    assert same(Tensor("x", "INT32", data.shape, data), crossed(Tensor("x", "INT32", data.shape, data)))


@given(st.lists(st.binary(max_size=8)))
def test_strings(strings: list[bytes]) -> None:
    data = np.empty(len(strings), np.object_)
    data[:] = strings
    assert same(Tensor("x", "BYTES", data.shape, data), crossed(Tensor("x", "BYTES", data.shape, data)))


def test_a_datatype_that_does_not_exist_stays_bytes() -> None:
    found = crossed(Tensor("x", "FP7", (2,), np.frombuffer(b"abcd", np.uint8)))
    assert found.data.tobytes() == b"abcd"


ALL_ERRORS = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, CharoniaError) and value is not QueueFull
]


@pytest.mark.parametrize("kind", ALL_ERRORS)
def test_errors_keep_their_kind(kind: type[CharoniaError]) -> None:
    error = kind("what was wrong")
    error.field, error.retry_after = "where", 2.5
    found = msgspec.msgpack.decode(msgspec.msgpack.encode(SentError.of(error)), type=SentError).error()
    assert type(found) is kind
    assert (found.message, found.field, found.retry_after) == ("what was wrong", "where", 2.5)


def test_a_full_queue_says_which_limit() -> None:
    found = SentError.of(QueueFull("full", retry_after=7.0, limit="tokens")).error()
    assert isinstance(found, QueueFull)
    assert (found.limit, found.retry_after) == ("tokens", 7.0)


def test_an_error_of_another_room_is_the_nearest_that_all_know() -> None:
    assert type(SentError.of(NotResident("m")).error()) is errors.NotReady


def test_a_message_that_quotes_half_a_character_can_leave() -> None:
    told = SentError.of(errors.NotFound("model '\ud800'"))
    assert msgspec.msgpack.encode(told)


def test_the_origin_makes_a_context_that_its_frontend_logs() -> None:
    mine, theirs = RequestContext("infer", ((b"a", b"b"),)), RequestContext("infer")
    mine.tenant, mine.tenant_weight, mine.id, mine.client_id = "t", 2.0, "1", "2"
    RequestOrigin.of(mine, False).note_in(theirs, logged=True)
    for name in ("tenant", "tenant_weight", "id", "client_id", "arrived_at"):
        assert getattr(mine, name) == getattr(theirs, name)
    assert theirs.logged
    assert RequestOrigin.of(mine, True).headers == [(b"a", b"b")]


def test_log_settings_cross_without_the_file() -> None:
    settings = LogSettings("file", False, True, False, 2, "json")
    assert LogLevels.of(settings).settings() == LogSettings("", False, True, False, 2, "json")
