"""Answers read from pieces of any size, and what the doors make of their events."""

import asyncio
from typing import Any

import orjson
import pytest

from charonia.bench.load.driver import ENDPOINTS, RequestOptions, RequestResult, read_answer
from charonia.bench.load.http_client import HttpClient, HttpResponseReader

STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"


def chunked(*pieces: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in (*pieces, b""))


def fed(raw: bytes, step: int) -> HttpResponseReader:
    answer = HttpResponseReader()
    for at in range(0, len(raw), step):
        assert not answer.complete
        answer.feed(raw[at : at + step], float(at))
    return answer


def answered(*events: Any) -> HttpResponseReader:
    return fed(STREAM + chunked(*(b"data: " + orjson.dumps(event) + b"\n\n" for event in events)), 1 << 20)


@pytest.mark.parametrize("step", [1, 2, 7, 64, 4096])
def test_an_event_stream_reads_the_same_in_any_pieces(step: int) -> None:
    answer = fed(STREAM + chunked(b"data: a\n\n", b"data: b\n\nda", b"ta: c\r\n\r\n"), step)
    assert answer.complete
    assert answer.status == 200
    assert answer.reusable
    assert [event.data for event in answer.events] == [b"data: a", b"data: b", b"data: c"]
    assert [event.at for event in answer.events] == sorted(event.at for event in answer.events)


@pytest.mark.parametrize("step", [1, 5, 4096])
def test_a_plain_answer_ends_with_its_length(step: int) -> None:
    answer = fed(b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 4\r\nconnection: close\r\n\r\nbusy", step)
    assert (answer.complete, answer.status, answer.body, answer.reusable) == (True, 429, b"busy", False)
    assert read_answer(answer, ENDPOINTS["chat"]).status == "HTTP 429"


def test_an_answer_without_body_is_complete() -> None:
    assert fed(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", 4096).complete


def test_completions_count_text_and_usage() -> None:
    usage = {"completion_tokens": 3, "prompt_tokens": 5}
    heard = read_answer(
        answered(
            {"choices": [{"text": "a"}]},
            {"choices": [{"text": ""}]},
            {"choices": [{"text": "b"}]},
            {"choices": [], "usage": usage},
        ),
        ENDPOINTS["completions"],
    )
    assert (heard.status, len(heard.times), heard.tokens, heard.prompt_tokens) == ("ok", 2, 3, 5)
    assert heard.frames == 4


def test_a_chat_begins_with_its_first_text_and_not_with_its_role() -> None:
    opening, text = {"role": "assistant", "content": ""}, {"content": "a"}
    deltas = (opening, text, {})
    heard = read_answer(answered(*({"choices": [{"delta": delta}]} for delta in deltas)), ENDPOINTS["chat"])
    assert len(heard.times) == 1


def test_generate_counts_ids() -> None:
    events = ({"text_output": "ab", "output_ids": [1, 2]}, {"text_output": "", "output_ids": 3, "num_input_tokens": 4})
    heard = read_answer(answered(*events), ENDPOINTS["generate"])
    assert (len(heard.times), heard.tokens, heard.prompt_tokens) == (2, 3, 4)


@pytest.mark.parametrize("error", ["the core died", {"message": "the core died"}])
def test_an_error_in_the_stream_is_an_error(error: Any) -> None:
    heard = read_answer(answered({"text_output": "a"}, {"error": error}), ENDPOINTS["generate"])
    assert heard.status == "event: the core died"


@pytest.mark.parametrize("event", [1, {}, {"choices": 5}, {"choices": [{}]}])
def test_a_strange_event_is_an_error(event: Any) -> None:
    assert read_answer(answered(event), ENDPOINTS["completions"]).status.startswith("strange event")


def test_a_stream_without_tokens_is_an_error() -> None:
    assert read_answer(answered(), ENDPOINTS["completions"]) == RequestResult(status="no token")


def test_doors_ask_for_the_same() -> None:
    for door in ENDPOINTS.values():
        body = door.body("hello", 9, RequestOptions("m", temperature=0.5))
        assert (body.get("max_tokens", body.get("max_output_tokens")), body["temperature"]) == (9, 0.5)
        assert (body.get("ignore_eos", True), body["stream"]) == (True, True)


async def test_connections_are_kept_and_a_hang_up_is_an_error() -> None:
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        for _ in range(2):
            await reader.readuntil(b"\r\n\r\n{}")
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        await reader.readuntil(b"\r\n\r\n{}")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        client = HttpClient(*server.sockets[0].getsockname())
        answers = [await client.post("/", b"{}") for _ in range(2)]
        assert [answer.body for answer in answers] == [b"ok", b"ok"]
        with pytest.raises(ConnectionError, match="hung up"):
            await client.post("/", b"{}")
        assert connections == 1
        client.close()
