"""Long JSON in pieces is the same as at once: values, elements, and what is no JSON."""

import json
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from charonia.api import chunked_json
from charonia.api.chunked_json import (
    TooManyValues,
    UnparsedContainer,
    ValueBudget,
    parse_fully,
    read_json_object,
    read_long_json,
)
from charonia.api.json_tensors import flatten
from charonia.core.errors import InvalidArgument


@pytest.fixture(autouse=True, params=[3])
def _small(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces and blocks of a few bytes."""
    monkeypatch.setattr(chunked_json, "PIECE_BYTES", request.param)
    monkeypatch.setattr(chunked_json, "_BLOCK", request.param + 1)


def run(coroutine: Any) -> Any:
    """Without a loop: nothing here waits for anything but its turn."""
    while True:
        try:
            coroutine.send(None)
        except StopIteration as end:
            return end.value


async def at_once(body: bytes) -> Any:
    return await parse_fully(await read_long_json(body), ValueBudget(10**6))


texts = st.text(st.sampled_from('a,[]{}:"\\\n é\U0001f600\ud800'), max_size=8)
scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | texts
values = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(texts, inner), max_leaves=10)
spaces = st.sampled_from([None, 0, 1])


@settings(max_examples=50)
@given(values, spaces, st.booleans())
def test_any_text(value: Any, indent: int | None, ascii: bool) -> None:
    body = json.dumps(value, indent=indent, ensure_ascii=ascii).encode(errors="surrogatepass")
    try:
        expected = chunked_json.parse_json(body)
    except InvalidArgument:
        with pytest.raises(InvalidArgument):
            run(at_once(body))
    else:
        assert run(at_once(body)) == expected


@settings(max_examples=50)
@given(st.recursive(st.lists(scalars), lambda inner: st.lists(inner | scalars), max_leaves=10), spaces)
def test_elements_of_arrays_in_arrays(value: list[Any], indent: int | None) -> None:
    body = json.dumps(value, indent=indent).encode()

    async def elements() -> list[Any]:
        found = await read_long_json(body)
        assert isinstance(found, UnparsedContainer)
        return [element async for piece in found.flat_elements() for element in flatten(piece)]

    assert run(elements()) == flatten(json.loads(body))


@settings(max_examples=50)
@given(st.text('[]{},:"\\1a ', max_size=14))
def test_what_is_no_json(text: str) -> None:
    body = text.encode()
    try:
        expected = chunked_json.parse_json(body)
    except InvalidArgument:
        with pytest.raises(InvalidArgument):
            run(at_once(body))
    else:
        assert run(at_once(body)) == expected


@settings(max_examples=50)
@given(st.text("[],1 ", max_size=14))
def test_what_is_no_array_of_elements(text: str) -> None:
    body = f"[{text}]".encode()

    async def elements() -> list[Any]:
        return [element async for piece in (await read_long_json(body)).flat_elements() for element in flatten(piece)]

    try:
        expected = flatten(orjson.loads(body))
    except ValueError:
        with pytest.raises(InvalidArgument):
            run(elements())
    else:
        assert run(elements()) == expected


def test_nothing_of_a_long_value_is_read_before_it_is_wanted() -> None:
    body = b'{"a": 1, "data": [%b], "b": "x"}' % b",".join([b"nonsense"] * 1000)
    found = run(read_json_object(body))
    assert (found["a"], found["b"]) == (1, "x")
    with pytest.raises(InvalidArgument, match="failed to parse the request JSON buffer"):
        run(found["data"].parse(ValueBudget()))


def test_there_may_be_too_many_values() -> None:
    body = b"[%b]" % b",".join([b"[1,2,3]"] * 100)
    assert len(run(at_once(body))) == 100
    for size in (50, 90):
        with pytest.raises(TooManyValues, match=f"more than {size} values"):
            run(run(read_long_json(body)).parse(ValueBudget(size)))


def test_depth_has_an_end() -> None:
    with pytest.raises(InvalidArgument, match="nested too deeply"):
        run(read_long_json(b"[" * 100_000))
