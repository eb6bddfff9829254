"""Models that write down sounds, over HTTP through OpenAI's package: what they say is what transformers says by the
checkpoint's own extractor and decoder."""

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import openai
import pytest
import torch
import tritonclient.http
from transformers import (
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperTimeStampLogitsProcessor,
    WhisperTokenizer,
)
from transformers.generation.logits_process import SuppressTokensAtBeginLogitsProcessor, SuppressTokensLogitsProcessor
from transformers.generation.utils import GenerateEncoderDecoderOutput
from transformers.models.whisper.tokenization_whisper import _collate_word_timestamps

from charonia.core.speech import LANGUAGE_NAMES
from charonia.telemetry.scrape import Interval, parse_scrape
from charonia.tokenization.tokenizer import Tokenizer
from tests.hearing_models import LANGUAGES, write_whisper
from tests.media.sounds import RATE, sound_file, tones, wav

from .models import write_model
from .serving import Server, serving

SOUND = tones(4.0, 1)
SEED = 4
"""Of weights that say something sure, which does not repeat itself."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_whisper(tmp_path_factory.mktemp("hearing") / "whisper", sureness=3.0, seed=SEED)


@pytest.fixture(scope="module")
def hearing(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("s")
    write_model(folder / "models", "whisper", checkpoint, max_num_seqs=8, dtype="float32")
    with serving(folder / "t", "--model-repository", str(folder / "models")) as running:
        yield running
        assert running.stop() == 0, running.said


@pytest.fixture(scope="module")
def client(hearing: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{hearing.url}/v1", api_key="none", timeout=60, max_retries=0) as connected:
        yield connected


def file_of(samples: Any, name: str = "a.wav") -> Any:
    form = name.rpartition(".")[2]
    return name, io.BytesIO(wav(samples) if form == "wav" else sound_file(form, samples))


class Heard(NamedTuple):
    """What transformers hears: its model, extractor and rules of texts, token by token."""

    text: str
    tokens: list[int]
    mean_logprob: float


@torch.inference_mode()
def expected(checkpoint: Path, samples: Any, *prompt: str, times: bool = False) -> Heard:
    model: Any = WhisperForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32)
    extractor: Any = WhisperFeatureExtractor.from_pretrained(checkpoint)
    tokenizer, config = Tokenizer.load(checkpoint), model.generation_config
    ids = tokenizer.added_tokens(1 << 20)
    features = extractor(samples, sampling_rate=RATE, return_tensors="pt").input_features
    encoded = model.model.encoder(features)
    tokens = [ids[f"<|{name}|>"] for name in ("startoftranscript", *prompt, *(() if times else ("notimestamps",)))]
    begin = len(tokens)
    rules: list[Any] = [
        SuppressTokensLogitsProcessor(config.suppress_tokens),
        SuppressTokensAtBeginLogitsProcessor(config.begin_suppress_tokens, begin),
        *([WhisperTimeStampLogitsProcessor(config, begin)] if times else ()),
    ]
    logprobs: list[float] = []
    while len(tokens) < begin + 32 and (len(tokens) == begin or tokens[-1] != config.eos_token_id):
        sequence = torch.tensor([tokens])
        scores = model(encoder_outputs=encoded, decoder_input_ids=sequence).logits[:, -1]
        for rule in rules:
            scores = rule(sequence, scores)
        tokens.append(int(scores.argmax()))
        logprobs.append(float(scores.log_softmax(-1).max()))
    heard = [token for token in tokens[begin:] if token != config.eos_token_id]
    text = tokenizer.decode([token for token in heard if token < config.eos_token_id])
    return Heard(text.strip(), heard, sum(logprobs) / (len(heard) + 1))


def test_it_hears_what_transformers_hears(hearing: Server, client: openai.OpenAI, checkpoint: Path) -> None:
    before = parse_scrape(httpx.get(hearing.metrics_url).text, "the server")
    plain = client.audio.transcriptions.create(model="whisper", file=file_of(SOUND), language="de", temperature=0)
    assert plain.text == expected(checkpoint, SOUND, "de", "transcribe").text
    assert len(plain.text) > 10
    # OpenAI's package says that translations are deprecated.
    translated = httpx.post(
        f"{hearing.url}/v1/audio/translations", files={"file": file_of(SOUND, "a.flac")}, data={"language": "de"}
    )
    assert translated.json()["text"] == expected(checkpoint, SOUND, "de", "translate").text
    before_it = httpx.post(
        f"{hearing.url}/v1/audio/translations", files={"file": file_of(SOUND)}, data={"prompt": "so it goes"}
    )
    assert before_it.json()["text"] != translated.json()["text"]
    grown = Interval(before, parse_scrape(httpx.get(hearing.metrics_url).text, "the server"))
    assert grown.grown("charonia_tower_images_total", "whisper") == 2  # files differ, sounds do not


def test_times_follow_the_rules(client: openai.OpenAI, checkpoint: Path) -> None:
    verbose: Any = client.audio.transcriptions.create(
        model="whisper", file=file_of(SOUND), response_format="verbose_json", timestamp_granularities=["segment"]
    )
    [language] = (code for code in LANGUAGES if LANGUAGE_NAMES[code] == verbose.language)
    heard = expected(checkpoint, SOUND, language, "transcribe", times=True)
    assert (verbose.text, [token for part in verbose.segments for token in part.tokens]) == (heard.text, heard.tokens)
    assert verbose.segments[0].avg_logprob == pytest.approx(heard.mean_logprob, abs=1e-4)
    assert verbose.duration == 4.0
    assert verbose.segments
    for segment in verbose.segments:
        assert 0 <= segment.start <= segment.end <= 4.0
        assert segment.temperature == 0.0
        assert segment.avg_logprob > -1
        assert 0 <= segment.no_speech_prob < 1
    subtitles: Any = client.audio.transcriptions.create(model="whisper", file=file_of(SOUND), response_format="vtt")
    assert subtitles.startswith("WEBVTT\n\n00:00:0")


@torch.inference_mode()
def expected_words(checkpoint: Path, samples: Any, heard: list[int]) -> list[tuple[str, float, float]]:
    """The words of tokens that were heard as German, by transformers' attention and its own ways from there."""
    model: Any = WhisperForConditionalGeneration.from_pretrained(checkpoint, attn_implementation="eager")
    extractor: Any = WhisperFeatureExtractor.from_pretrained(checkpoint)
    features = extractor(samples, sampling_rate=RATE, return_tensors="pt").input_features
    ids = Tokenizer.load(checkpoint).added_tokens(1 << 20)
    tokens = torch.tensor([[*(ids[f"<|{name}|>"] for name in ("startoftranscript", "de", "transcribe")), *heard]])
    made = model(features, decoder_input_ids=tokens, output_attentions=True)
    outputs = GenerateEncoderDecoderOutput(sequences=tokens, cross_attentions=(made.cross_attentions,))
    heads, frames = model.generation_config.alignment_heads, len(samples) // extractor.hop_length
    [times] = model._extract_token_timestamps(outputs, heads, num_frames=frames, num_input_ids=3)[:, 3:-1].tolist()
    spans = zip([0.0, *times], times, strict=False)
    end = model.generation_config.eos_token_id
    text = [(token, span) for token, span in zip(heard, spans, strict=True) if token < end]
    library: Any = WhisperTokenizer.from_pretrained(checkpoint)
    words = _collate_word_timestamps(library, [token for token, _ in text], [span for _, span in text], "german", False)
    return [(word["text"].strip(), *word["timestamp"]) for word in words]


def test_words_have_the_times_of_transformers(hearing: Server, client: openai.OpenAI, checkpoint: Path) -> None:
    before = parse_scrape(httpx.get(hearing.metrics_url).text, "the server")
    verbose: Any = client.audio.transcriptions.create(
        model="whisper",
        file=file_of(SOUND),
        language="de",
        temperature=0,
        response_format="verbose_json",
        timestamp_granularities=["word", "segment"],
    )
    [segment] = verbose.segments
    wanted = expected_words(checkpoint, SOUND, segment.tokens)
    assert len(wanted) > 4
    assert len({word.end for word in verbose.words}) > 2
    *before_last, last = [(word.word, pytest.approx(word.start), pytest.approx(word.end)) for word in verbose.words]
    assert before_last == wanted[:-1]
    assert last[0].startswith(wanted[-1][0]), "what is left of a character at the end is a part of a word here"
    grown = Interval(before, parse_scrape(httpx.get(hearing.metrics_url).text, "the server"))
    assert grown.grown("charonia_tower_aligned_windows_total", "whisper") == 1


def test_a_long_sound_is_heard_window_by_window(client: openai.OpenAI) -> None:
    long = tones(65)
    long[28 * RATE : 29 * RATE] = 0
    whole = client.audio.transcriptions.create(model="whisper", file=file_of(long), language="en", temperature=0.2)
    again = client.audio.transcriptions.create(model="whisper", file=file_of(long), language="en", temperature=0.2)
    assert whole.text == again.text
    stream = client.audio.transcriptions.create(
        model="whisper", file=file_of(long), language="en", temperature=0.2, stream=True
    )
    events: list[Any] = list(stream)
    assert [event.type for event in events[-1:]] == ["transcript.text.done"]
    assert events[-1].text == whole.text == "".join(event.delta for event in events[:-1]).strip()
    assert 2 <= len(events) <= 4
    assert events[-1].usage.output_tokens > 0
    verbose: Any = client.audio.transcriptions.create(
        model="whisper", file=file_of(long), language="en", temperature=0.2, response_format="verbose_json"
    )
    assert any(segment.start >= 28 for segment in verbose.segments)
    assert all(segment.end <= 29 or segment.start >= 28 for segment in verbose.segments), "it is cut in the silence"


def test_tensors_are_heard_as_forms_are(hearing: Server, client: openai.OpenAI) -> None:
    name, file = file_of(SOUND)
    form = client.audio.transcriptions.create(model="whisper", file=(name, file), language="de")
    body = {"audio": base64.b64encode(file.getvalue()).decode(), "language": "de"}
    answer = httpx.post(f"{hearing.url}/v2/models/whisper/generate", json=body)
    assert answer.json()["text_output"] == form.text
    with tritonclient.http.InferenceServerClient(hearing.http_address) as triton:
        sound = tritonclient.http.InferInput("audio", [1], "BYTES")
        sound.set_data_from_numpy(np.array([file.getvalue()], object))
        language = tritonclient.http.InferInput("language", [1], "BYTES")
        language.set_data_from_numpy(np.array([b"de"], object))
        result = triton.infer("whisper", [sound, language])
        assert result.as_numpy("text_output")[0].decode() == form.text
    assert httpx.post(f"{hearing.url}/v2/models/whisper/generate", json={"audio": "AAAA"}).status_code == 400
    assert "/v1/audio/transcriptions -F file=@speech.wav -F model=whisper" in hearing.said


def test_what_is_no_sound_is_named(hearing: Server, client: openai.OpenAI) -> None:
    for file, fault in (
        (("a.wav", b"no sound"), "file: the file is no sound that can be read"),
        (("a.wav", wav(SOUND)[:5000]), "file: the sound is cut off"),
    ):
        with pytest.raises(openai.BadRequestError, match=fault) as refusal:
            client.audio.transcriptions.create(model="whisper", file=file)
        assert refusal.value.param == "file"
    with pytest.raises(openai.BadRequestError, match="this model does not know 'ha', but en, zh, de, es"):
        client.audio.transcriptions.create(model="whisper", file=file_of(SOUND), language="ha")
    with pytest.raises(openai.BadRequestError, match="it has a special token"):
        client.audio.transcriptions.create(model="whisper", file=file_of(SOUND), prompt="<|startoftranscript|>")
    with pytest.raises(openai.BadRequestError, match="model 'whisper' writes down sounds, and nothing else"):
        client.completions.create(model="whisper", prompt="hello", max_tokens=3)
    [card] = httpx.get(f"{hearing.url}/v1/models").json()["data"]
    assert card["input_modalities"] == ["audio"]


@pytest.mark.proof
def test_several_frontends_hear(checkpoint: Path, tmp_path: Path) -> None:
    write_model(tmp_path / "models", "whisper", checkpoint, max_num_seqs=8, dtype="float32")
    wanted = expected(checkpoint, SOUND, "de", "transcribe").text
    with serving(tmp_path / "t", "--model-repository", str(tmp_path / "models"), "--frontends", "2") as running:
        for stream in (False, True, False, True):
            with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", timeout=60, max_retries=0) as client:
                answer: Any = client.audio.transcriptions.create(
                    model="whisper", file=file_of(SOUND), language="de", stream=stream
                )
                assert (list(answer)[-1] if stream else answer).text == wanted
        assert running.stop() == 0, running.said
