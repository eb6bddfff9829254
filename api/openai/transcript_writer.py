"""Transcripts in the formats of OpenAI's API."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import orjson
from starlette.responses import Response

from ...core.errors import CharoniaError
from ...core.request import GenerateChunk, Usage
from ...core.speech import LANGUAGE_NAMES, TranscriptSegment
from ..http.connection import sse_event
from ..http.error_responses import json_response, openai_error_body
from .transcription_request import ParsedTranscription


def transcript_response(chunks: Sequence[GenerateChunk], parsed: ParsedTranscription, translate: bool) -> Response:
    """The answer of all chunks of a stream."""
    kind = parsed.format
    text = "".join(chunk.text for chunk in chunks).strip()
    segments = [segment for chunk in chunks if chunk.transcript for segment in chunk.transcript.segments]
    if kind == "text":
        return Response(f"{text}\n", media_type="text/plain")
    if kind == "srt":
        return Response("".join(_srt(segments)), media_type="text/plain")
    if kind == "vtt":
        return Response("".join(_vtt(segments)), media_type="text/vtt")
    transcript = chunks[-1].transcript
    assert transcript is not None
    usage = {"type": "duration", "seconds": math.ceil(transcript.duration)}
    if kind == "json":
        return json_response({"text": text, "usage": usage})
    language = LANGUAGE_NAMES.get(transcript.language, transcript.language)
    verbose: dict[str, Any] = {
        "task": "translate" if translate else "transcribe",
        "language": "english" if translate else language,
        "duration": round(transcript.duration, 3),
        "text": text,
    }
    if "word" in parsed.granularities:
        words = (word for segment in segments for word in segment.words)
        verbose["words"] = [{"word": word.text.strip(), "start": word.start, "end": word.end} for word in words]
    if "segment" in parsed.granularities:
        verbose["segments"] = [_segment(number, segment) for number, segment in enumerate(segments)]
    return json_response(verbose | {"usage": usage})


def _segment(number: int, segment: TranscriptSegment) -> dict[str, Any]:
    return {
        "id": number,
        "seek": round(100 * segment.window),
        "start": segment.start,
        "end": segment.end,
        "text": segment.text,
        "tokens": list(segment.tokens),
        "temperature": segment.temperature,
        "avg_logprob": segment.mean_logprob,
        "compression_ratio": segment.compression,
        "no_speech_prob": segment.no_speech,
    }


def _srt(segments: Iterable[TranscriptSegment]) -> Iterator[str]:
    for number, segment in enumerate(segments, 1):
        yield f"{number}\n{_clock(segment.start, ',')} --> {_clock(segment.end, ',')}\n{_line(segment)}\n\n"


def _vtt(segments: Iterable[TranscriptSegment]) -> Iterator[str]:
    yield "WEBVTT\n\n"
    for segment in segments:
        yield f"{_clock(segment.start, '.')} --> {_clock(segment.end, '.')}\n{_line(segment)}\n\n"


def _line(segment: TranscriptSegment) -> str:
    """The text, which must not look like a line of times, nor end its cue."""
    return " ".join(segment.text.split()).replace("-->", "->")


def _clock(seconds: float, mark: str) -> str:
    milliseconds = round(1000 * seconds)
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest // 1000:02}{mark}{rest % 1000:03}"


class TranscriptEvents:
    """Encodes the chunks of a stream into the events `transcript.text.delta` and `transcript.text.done`."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._usage = Usage(0, 0)

    def encode_item(self, item: GenerateChunk) -> bytes:
        self._usage = item.usage
        text = item.text if self._texts else item.text.lstrip()
        if not text:
            return b""
        self._texts.append(text)
        return _event({"type": "transcript.text.delta", "delta": text})

    @property
    def encode_text(self) -> None:
        return None

    def encode_end(self) -> bytes:
        usage = self._usage
        counts = {
            "type": "tokens",
            "input_tokens": usage.prompt_tokens,
            "output_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }
        return _event({"type": "transcript.text.done", "text": "".join(self._texts).rstrip(), "usage": counts})

    def encode_error(self, error: CharoniaError) -> bytes:
        return _event(openai_error_body(error))


def _event(body: dict[str, Any]) -> bytes:
    return sse_event(orjson.dumps(body))
