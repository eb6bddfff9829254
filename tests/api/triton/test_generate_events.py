"""Events of `generate_stream` are the same bytes, whether the JSON around a text is known already or not."""

from types import SimpleNamespace
from typing import Any

import pytest

from charonia.api.http.connection import sse_event
from charonia.api.triton.endpoints import GenerateEventEncoder
from charonia.api.triton.generate import SHORT_TEXT_BYTES, encode_generate_response
from charonia.core.errors import InvalidArgument
from charonia.core.model import ModelConfig
from charonia.core.request import InferResponse
from charonia.core.tensor import Tensor

LIMIT = 1 << 20
TEXTS = ["a", "", 'say "b"\n\\', "\0text\0", "é€\U0001f600", "x" * SHORT_TEXT_BYTES, "x" * (SHORT_TEXT_BYTES + 1)]


def config(name: str) -> ModelConfig:
    return ModelConfig(name, "1", "charonia", max_batch_size=0, decoupled=True, inputs=(), outputs=())


def response_of(text: bytes, name: str = "text_output") -> InferResponse:
    return InferResponse((Tensor.from_values(name, "BYTES", [text]),))


@pytest.mark.parametrize("request_id", ["", "id \0text\0"])
def test_a_texts_event_is_what_any_responses_is(request_id: str) -> None:
    model: Any = SimpleNamespace(config=config("one"))
    encoder = GenerateEventEncoder(model, request_id, LIMIT)
    for text in TEXTS * 2:
        for name in ("text_output", "other"):
            response = response_of(text.encode(), name)
            expected = sse_event(encode_generate_response(model.config, request_id, response, LIMIT))
            assert encoder.encode_item(response) == expected


def test_a_text_alone_has_the_same_event() -> None:
    model: Any = SimpleNamespace(config=config("one"))
    encoder = GenerateEventEncoder(model, "id", LIMIT)
    assert encoder.encode_text is not None
    for text in TEXTS:
        assert encoder.encode_text(text, 2, None) == (encoder.encode_item(response_of(text.encode())) if text else b"")
    assert GenerateEventEncoder(model, "id", 16).encode_text is None, "even a short text may be too long"


def test_the_event_names_the_model_that_answers() -> None:
    model: Any = SimpleNamespace(config=config("one"))
    encoder = GenerateEventEncoder(model, "", LIMIT)
    events = []
    for name in ("one", "two"):
        model.config = config(name)
        events.append(encoder.encode_item(response_of(b"a")))
    assert events[1] == sse_event(b'{"model_name":"two","model_version":"1","text_output":"a"}')
    assert events[0] == events[1].replace(b"two", b"one")  # type: ignore[union-attr]


def test_what_is_no_text_and_what_is_too_long_is_refused_as_ever() -> None:
    model: Any = SimpleNamespace(config=config("one"))
    with pytest.raises(InvalidArgument, match="UTF-8"):
        GenerateEventEncoder(model, "", LIMIT).encode_item(response_of(b"\xff"))
    with pytest.raises(InvalidArgument, match="text_output"):
        GenerateEventEncoder(model, "", 16).encode_item(response_of(b"12345678"))
