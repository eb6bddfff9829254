"""Sounds in forms of OpenAI's API: what a model that hears is asked, and the formats of what it says."""

from typing import Any

import httpx
import orjson
import pytest

from charonia.core.errors import InvalidArgument, QueueFull
from charonia.core.request import FinishReason, GenerateChunk, GenerateRequest, Usage
from charonia.core.speech import LANGUAGE_NAMES, Speech, Transcript, TranscriptSegment, TranscriptWord

TRANSCRIPTIONS, TRANSLATIONS = "/v1/audio/transcriptions", "/v1/audio/translations"
FILE = {"file": ("a.wav", b"RIFF")}


def segment(start: float, end: float, text: str) -> TranscriptSegment:
    words = tuple(TranscriptWord(f" {word}", start, end) for word in text.split() if word != "-->")
    return TranscriptSegment(start, end, text, (5, 6), 0.2, -0.5, 1.25, 0.125, 27.5 if start > 27 else 0.0, words)


def said(*segments: TranscriptSegment, last: bool = False) -> GenerateChunk:
    return GenerateChunk(
        text="".join(part.text for part in segments),
        token_ids=(),
        usage=Usage(8, 20),
        finish_reason=FinishReason.STOP if last else None,
        transcript=Transcript("de", 31.25, segments),
    )


CHUNKS = (
    said(segment(0.0, 1.5, " So it"), segment(1.5, 27.25, " goes --> on,\n and on")),
    said(segment(28.0, 31.25, " and ends. ")),
    said(last=True),
)
TEXT = "So it goes --> on,\n and on and ends."


async def ask(client: httpx.AsyncClient, path: str = TRANSCRIPTIONS, files: Any = FILE, **form: Any) -> httpx.Response:
    return await client.post(path, files=files, data={"model": "hearing"} | form)


async def answered(client: httpx.AsyncClient, gateway: Any, path: str = TRANSCRIPTIONS, **form: Any) -> httpx.Response:
    gateway.chunks = CHUNKS
    answer = await ask(client, path, **form)
    assert answer.status_code == 200, answer.text
    return answer


async def test_a_form_becomes_a_request(client: httpx.AsyncClient, gateway: Any) -> None:
    form = {"prompt": "names: Ada", "temperature": "0.4", "seed": "7", "priority": "2", "language": "German"}
    await answered(
        client, gateway, **form, **{"timestamp_granularities[]": "segment", "response_format": "verbose_json"}
    )
    [request] = gateway.asked
    assert isinstance(request, GenerateRequest)
    speech = request.speech
    assert isinstance(speech, Speech)
    assert (speech.sound.kind, speech.sound.data, speech.sound.field) == ("audio", b"RIFF", "file")
    assert (speech.language, speech.context, speech.translate) == ("de", "names: Ada", False)
    assert (speech.timestamps, speech.no_speech) == (True, True)
    assert (request.sampling.temperature, request.sampling.seed, request.priority) == (0.4, 7, 2)
    [context] = gateway.contexts
    assert context.endpoint == "transcriptions"


async def test_text_alone_needs_no_times(client: httpx.AsyncClient, gateway: Any) -> None:
    answer = await answered(client, gateway)
    assert answer.json() == {"text": TEXT, "usage": {"type": "duration", "seconds": 32}}
    speech = gateway.asked[0].speech
    assert (speech.timestamps, speech.no_speech, speech.language) == (False, False, "")
    answer = await answered(client, gateway, response_format="text")
    assert answer.text == f"{TEXT}\n"
    assert answer.headers["content-type"].startswith("text/plain")


async def test_segments_have_what_the_reference_says_of_them(client: httpx.AsyncClient, gateway: Any) -> None:
    body = (await answered(client, gateway, response_format="verbose_json")).json()
    segments = body.pop("segments")
    usage = {"type": "duration", "seconds": 32}
    assert body == {"task": "transcribe", "language": "german", "duration": 31.25, "text": TEXT, "usage": usage}
    assert segments[2] == {
        "id": 2,
        "seek": 2750,
        "start": 28.0,
        "end": 31.25,
        "text": " and ends. ",
        "tokens": [5, 6],
        "temperature": 0.2,
        "avg_logprob": -0.5,
        "compression_ratio": 1.25,
        "no_speech_prob": 0.125,
    }
    assert [part["id"] for part in segments] == [0, 1, 2]


@pytest.mark.parametrize(
    ("granularities", "parts"), [(["word"], {"words"}), (["word", "segment"], {"words", "segments"})]
)
async def test_words_come_where_they_are_asked_for(
    client: httpx.AsyncClient, gateway: Any, granularities: list[str], parts: set[str]
) -> None:
    form: Any = {"timestamp_granularities[]": granularities, "response_format": "verbose_json"}
    body = (await answered(client, gateway, **form)).json()
    assert body.keys() == {"task", "language", "duration", "text", "usage"} | parts
    assert [word["word"] for word in body["words"]] == ["So", "it", "goes", "on,", "and", "on", "and", "ends."]
    assert body["words"][-1] == {"word": "ends.", "start": 28.0, "end": 31.25}
    assert gateway.asked[0].speech.words
    assert not (await answered(client, gateway, response_format="verbose_json")).json().keys() & {"words"}
    assert not gateway.asked[1].speech.words


async def test_times_of_words_are_of_whole_transcriptions(client: httpx.AsyncClient) -> None:
    form = {"timestamp_granularities[]": "word", "response_format": "verbose_json"}
    for path, more, param in (
        (TRANSLATIONS, {}, "timestamp_granularities"),
        (TRANSCRIPTIONS, {"stream": "true"}, "stream"),
    ):
        answer = await ask(client, path, **form, **more)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_subtitles(client: httpx.AsyncClient, gateway: Any) -> None:
    answer = await answered(client, gateway, response_format="srt")
    assert answer.text == (
        "1\n00:00:00,000 --> 00:00:01,500\nSo it\n\n"
        "2\n00:00:01,500 --> 00:00:27,250\ngoes -> on, and on\n\n"
        "3\n00:00:28,000 --> 00:00:31,250\nand ends.\n\n"
    )
    answer = await answered(client, gateway, response_format="vtt")
    assert answer.headers["content-type"].startswith("text/vtt")
    assert answer.text.startswith("WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nSo it\n\n")
    gateway.chunks = (said(segment(3599.9996, 7261.5, " late")), said(last=True))
    answer = await ask(client, response_format="vtt")
    assert answer.text == "WEBVTT\n\n01:00:00.000 --> 02:01:01.500\nlate\n\n"


async def test_translations_are_in_english(client: httpx.AsyncClient, gateway: Any) -> None:
    body = (await answered(client, gateway, TRANSLATIONS, response_format="verbose_json")).json()
    assert (body["task"], body["language"]) == ("translate", "english")
    assert gateway.asked[0].speech.translate
    assert gateway.contexts[0].endpoint == "translations"


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    return [orjson.loads(line.removeprefix("data: ")) for line in answer.text.split("\n\n") if line]


async def test_a_stream_has_a_delta_for_each_window(client: httpx.AsyncClient, gateway: Any) -> None:
    answer = await answered(client, gateway, stream="true")
    assert answer.headers["content-type"].startswith("text/event-stream")
    first, second, done = events(answer)
    assert first == {"type": "transcript.text.delta", "delta": "So it goes --> on,\n and on"}
    assert second == {"type": "transcript.text.delta", "delta": " and ends. "}
    assert (done["type"], done["text"]) == ("transcript.text.done", TEXT)
    assert done["usage"] == {"type": "tokens", "input_tokens": 8, "output_tokens": 20, "total_tokens": 28}


async def test_a_stream_that_breaks_says_why(client: httpx.AsyncClient, gateway: Any) -> None:
    gateway.texts, gateway.error = ("so",), InvalidArgument("file: it is broken", field="file")
    answer = await ask(client, stream="true")
    assert [*events(answer)[-1]] == ["error"]


@pytest.mark.parametrize(
    ("form", "field", "fault"),
    [
        ({"model": "llm"}, "model", "'llm' writes down no sounds"),
        ({"model": "nobody"}, "model", "unknown model"),
        ({"language": "xx"}, "language", "must be a code of ISO 639-1"),
        ({"temperature": "1.5"}, "temperature", "must be between 0 and 1"),
        ({"temperature": "warm"}, "temperature", "must be"),
        ({"temperature": "nan"}, "temperature", "must be between 0 and 1"),
        ({"response_format": "xml"}, "response_format", "is wrong"),
        ({"response_format": "srt", "stream": "true"}, "stream", "needs a response_format of json or text"),
        ({"timestamp_granularities[]": "word"}, "timestamp_granularities", "needs the response_format verbose_json"),
        ({"timestamp_granularities[]": "segment"}, "timestamp_granularities", "needs the response_format verbose_json"),
        ({"include[]": "logprobs"}, "include", "is not supported yet"),
        ({"chunking_strategy": '{"type": "server_vad"}'}, "chunking_strategy", "is not supported yet"),
        ({"langauge": "de"}, "langauge", "unknown field"),
    ],
)
async def test_what_is_not_served_is_refused_by_its_name(
    client: httpx.AsyncClient, form: dict[str, str], field: str, fault: str
) -> None:
    answer = await ask(client, **form)
    error = answer.json()["error"]
    assert answer.status_code == (404 if fault == "unknown model" else 400)
    assert error["param"] == field
    assert fault in error["message"]


async def test_harmless_and_unknown_fields(client: httpx.AsyncClient, gateway: Any) -> None:
    answer = await answered(client, gateway, chunking_strategy="auto", user="me", language="", colour_of_voice="red")
    assert answer.headers["x-charonia-warning"] == "ignored: colour_of_voice"


@pytest.mark.parametrize(
    ("files", "data", "field", "fault"),
    [
        ({"sound": ("a", b"x")}, {}, "file", "is missing"),
        ({"file": ("a", b"")}, {}, "file", "is empty"),
        ({"file": ("a", b"x"), "more": ("b", b"y")}, {}, "more", "the form takes one"),
        ([("file", ("a", b"x")), ("file", ("b", b"y"))], {}, "file", "two such files"),
        ({"file": ("a", b"x")}, {"prompt": ["a", "b"]}, "prompt", "comes 2 times"),
    ],
)
async def test_a_form_has_one_sound(
    client: httpx.AsyncClient, files: Any, data: dict[str, Any], field: str, fault: str
) -> None:
    answer = await client.post(TRANSCRIPTIONS, files=files, data={"model": "hearing"} | data)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field
    assert fault in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "content_type", "fault"),
    [
        (b"{}", "application/json", "must be multipart/form-data"),
        (b"", "multipart/form-data", "boundary"),
        (b"", "multipart/form-data; boundary=b", "cut off"),
        (b"no form", "multipart/form-data; boundary=b", "not valid multipart"),
        (b"--b\r\nContent-Disposition: form-data\r\n\r\nx\r\n--b--\r\n", "multipart/form-data; boundary=b", "a name"),
        (b"--b\r\nContent-Disposition: form-data; name=prompt\r\n\r\n\xff\r\n--b--\r\n",
         "multipart/form-data; boundary=b", "not valid UTF-8"),
    ],
)  # fmt: skip
async def test_a_body_that_is_no_form(client: httpx.AsyncClient, body: bytes, content_type: str, fault: str) -> None:
    answer = await client.post(TRANSCRIPTIONS, content=body, headers={"content-type": content_type})
    assert answer.status_code == 400
    assert fault in answer.json()["error"]["message"]


async def test_a_long_body_is_refused_before_it_is_read(client: httpx.AsyncClient, gateway: Any) -> None:
    answer = await ask(client, files={"file": ("a.wav", bytes(3000))})
    assert answer.status_code == 413
    assert "exceeds the maximum allowed value of 2000 bytes" in answer.json()["error"]["message"]
    parts = "".join('--b\r\nContent-Disposition: form-data; name="a"\r\n\r\n\r\n' for _ in range(25))
    headers = {"content-type": "multipart/form-data; boundary=b"}
    answer = await client.post(TRANSCRIPTIONS, content=f"{parts}--b--\r\n", headers=headers)
    assert answer.status_code == 400
    gateway.full = QueueFull("full", retry_after=1.0)
    assert (await ask(client)).status_code == 429
    assert not gateway.asked


def test_languages_have_names() -> None:
    assert (len(LANGUAGE_NAMES), LANGUAGE_NAMES["en"], LANGUAGE_NAMES["ht"]) == (100, "english", "haitian creole")
