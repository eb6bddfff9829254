"""Models whose prompts have sounds, over HTTP through OpenAI's package: what they say is what transformers says by the
checkpoint's own processor, with a picture beside the sound where the family has both, and a second turn computes
neither the sound nor the prompt again."""

import base64
import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForMultimodalLM

from charonia.telemetry.scrape import Interval, parse_scrape
from charonia.tokenization.tokenizer import Tokenizer
from tests.hearing_prompts import MODELS_THAT_HEAR, only_ears, prompt_inputs, transformers_form, write_hearing
from tests.media.sounds import sound_file, tones, wav
from tests.seeing_models import picture

from .models import write_model
from .serving import Server, serving
from .test_seeing import part as picture_part

NAME = "gemma4"
"""The one that sees, too; others are served by `make proof`."""
PUBLISHED = "voxtral-published"
"""The one with Mistral's tokenizer, and with conversations in its form."""
NEW = 12


def in_file(samples: Any) -> Any:
    """The samples that come out of a WAV file."""
    return (samples * 32767).astype(np.int16).astype(np.float32) / 32768


SOUNDS = tones(3.3, 1), tones(0.7, 2)
EQUALLY_LONG = tones(1.7, 1), tones(1.7, 2)
"""Transformers pads the shorter sound of a prompt for Gemma 3n, and hears what it padded."""
PICTURE = picture(90, 50, 1)


def data_of(samples: Any, form: str = "wav") -> str:
    return base64.b64encode(wav(samples) if form == "wav" else sound_file(form, samples)).decode()


def sounds_for(name: str) -> tuple[Any, Any]:
    return EQUALLY_LONG if name == "gemma3n" else SOUNDS


def chat(name: str) -> list[Any]:
    sees, sounds = name == NAME, sounds_for(name)
    first = {"type": "input_audio", "input_audio": {"data": data_of(sounds[0]), "format": "wav"}}
    second = {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{data_of(sounds[1])}"}}
    between = [{"type": "text", "text": " over "}, picture_part(PICTURE)] if sees else []
    texts = [{"type": "text", "text": text} for text in ("What is ", " beside ", "?")]
    return [{"role": "user", "content": [texts[0], first, *between, texts[1], second, texts[2]]}]


@torch.inference_mode()
def expected(directory: Path, name: str) -> str:
    """What transformers generates greedily for the chat."""
    sees = name == NAME
    with only_ears():
        model: Any = AutoModelForMultimodalLM.from_pretrained(transformers_form(directory, name), dtype=torch.float32)
    model.generation_config.eos_token_id = None
    kind = MODELS_THAT_HEAR[name]
    sound = f"{kind.before}{kind.token}{kind.behind}"
    over = " over <|image|>" if sees else ""
    text = f"<|user|>What is {sound}{over} beside {sound}?<|end|>\n<|assistant|>"
    if name == "voxtral-published":
        text = f"<s>[INST]What is {sound} beside {sound}?[/INST]"
    if name.startswith("qwen3-asr"):  # its processor takes one sound for each text
        inputs = _joined(directory, name, text)
    else:
        inputs = prompt_inputs(directory, name, text, [*map(in_file, sounds_for(name))], [PICTURE] if sees else [])
    out = model.generate(**inputs, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    return Tokenizer.load(directory).decode(out[0, inputs["input_ids"].shape[1] :].tolist())


def _joined(directory: Path, name: str, text: str) -> dict[str, Any]:
    """Both sounds in one prompt, each prepared by the processor, and the shorter one filled up."""
    first, second = text.split(" beside ")
    texts = f"{first} beside ", second
    parts = [prompt_inputs(directory, name, text, [in_file(sound)]) for text, sound in zip(texts, SOUNDS, strict=True)]
    frames = max(made["input_features"].shape[-1] for made in parts)
    filled = {
        key: torch.cat([functional.pad(made[key], (0, frames - made[key].shape[-1])) for made in parts])
        for key in ("input_features", "input_features_mask")
    }
    return filled | {key: torch.cat([made[key] for made in parts], 1) for key in ("input_ids", "attention_mask")}


def serve(folder: Path, checkpoints: Mapping[str, Path]) -> AbstractContextManager[Server]:
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "limit_mm_per_prompt": "audio=2"}
    for name, checkpoint in checkpoints.items():
        write_model(folder / "models", name, checkpoint, dtype="float32", **limits)
    return serving(folder / "t", "--model-repository", str(folder / "models"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hearing(tmp_path_factory.mktemp("hearing") / NAME, NAME)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hearing(tmp_path_factory.mktemp("published") / PUBLISHED, PUBLISHED)


@pytest.fixture(scope="module")
def hearing(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path, published: Path) -> Iterator[Server]:
    with serve(tmp_path_factory.mktemp("h"), {NAME: checkpoint, PUBLISHED: published}) as running:
        yield running
        assert running.stop() == 0, running.said


def said(server: Server, name: str, messages: list[Any]) -> Any:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=60, max_retries=0) as client:
        return client.chat.completions.create(
            model=name, messages=messages, max_tokens=NEW, temperature=0, extra_body={"ignore_eos": True}
        )


def check_answers(server: Server, checkpoint: Path, name: str) -> None:
    right, messages = expected(checkpoint, name), chat(name)
    before = parse_scrape(httpx.get(server.metrics_url).text, "the server")
    first = said(server, name, messages)
    assert first.choices[0].message.content == right
    second = said(server, name, [*messages, {"role": "assistant", "content": right}, {"role": "user", "content": "?"}])
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached >= first.usage.prompt_tokens // 16 * 16
    grown = Interval(before, parse_scrape(httpx.get(server.metrics_url).text, "the server"))
    assert grown.grown("charonia_tower_images_total", name) == 2 + (name == NAME)
    assert grown.grown("charonia_tower_cache_hits_total", name) == 2 + (name == NAME)


TRANSCRIBING = {
    "qwen3-asr": "<|user|><|audio_start|><|audio_pad|><|audio_end|><|end|>\n<|assistant|>language English<asr_text>",
    "voxtral": "[INST][BEGIN_AUDIO][AUDIO][/INST]lang:en[TRANSCRIBE]",
}
"""What a model is asked to write a sound down in English."""


@torch.inference_mode()
def check_transcript(server: Server, checkpoint: Path, name: str) -> None:
    model: Any = AutoModelForMultimodalLM.from_pretrained(transformers_form(checkpoint, name), dtype=torch.float32)
    asked = TRANSCRIBING[name.removesuffix("-published")]
    inputs = prompt_inputs(checkpoint, name, asked, [in_file(SOUNDS[0])])
    out = model.generate(**inputs, max_new_tokens=60, do_sample=False, eos_token_id=0, pad_token_id=0)
    tokens = out[0, inputs["input_ids"].shape[1] :].tolist()
    text = Tokenizer.load(checkpoint).decode([token for token in tokens if token])
    form = {"model": name, "language": "en", "stream": "true"}
    files = {"file": ("a.wav", wav(SOUNDS[0]))}
    url = f"{server.url}/v1/audio/transcriptions"
    whole = httpx.post(url, files=files, data=form | {"stream": "false"}, timeout=60).json()
    assert len(text.strip()) > 0, repr((text, whole))
    assert whole["text"].startswith(text.strip())
    assert whole["usage"] == {"type": "duration", "seconds": 4}
    assert (
        f'"text":"{json.dumps(whole["text"], ensure_ascii=False)[1:-1]}"'
        in httpx.post(url, files=files, data=form, timeout=60).text
    )
    refused = httpx.post(url, files=files, data=form | {"stream": "false", "response_format": "srt"}, timeout=60)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "response_format")


def test_it_says_what_transformers_says(hearing: Server, checkpoint: Path) -> None:
    check_answers(hearing, checkpoint, NAME)


def test_a_checkpoint_is_served_as_it_is_published(hearing: Server, published: Path) -> None:
    check_answers(hearing, published, PUBLISHED)
    check_transcript(hearing, published, PUBLISHED)


@pytest.mark.proof
@pytest.mark.parametrize("name", [name for name in MODELS_THAT_HEAR if name not in (NAME, PUBLISHED)])
def test_others_say_what_transformers_says(tmp_path: Path, name: str) -> None:
    checkpoint = write_hearing(tmp_path / "made", name)
    with serve(tmp_path, {name: checkpoint}) as running:
        check_answers(running, checkpoint, name)
        with pytest.raises(openai.BadRequestError, match="takes no image: it reads text and audio alone"):
            said(running, name, [{"role": "user", "content": [picture_part(PICTURE)]}])
        if name != "gemma3n":
            check_transcript(running, checkpoint, name)
        assert running.stop() == 0, running.said


def test_what_is_no_sound_is_named(hearing: Server) -> None:
    named = {"type": "input_audio", "input_audio": {"data": data_of(SOUNDS[1]), "format": "wav"}, "uuid": "heard"}
    said(hearing, NAME, [{"role": "user", "content": [named]}])
    long = {"type": "input_audio", "input_audio": {"data": data_of(tones(31)), "format": "wav"}}
    for content, complaint in (
        ([long | {"input_audio": {"data": "AAAA", "format": "wav"}}], r"content\[0\].input_audio: the file is"),
        ([long] * 3, r"content\[2\].input_audio: a prompt may have at most 2 of the kind audio"),
        ([long], "the sound has 31.0 seconds, and the model hears 30 at a time"),
        (
            [long | {"input_audio": {"data": data_of(SOUNDS[0][:160]), "format": "wav"}}],
            r"content\[0\].input_audio: the sound is too short: it has 160 samples at 16000 Hz",
        ),
        ([{"type": "image_url", "image_url": None, "uuid": "heard"}], "there is no image with uuid 'heard' here"),
        ([{"type": "text", "text": "<|audio|>"}], "1 tokens that stand for parts of sounds"),
    ):
        with pytest.raises(openai.BadRequestError, match=complaint):
            said(hearing, NAME, [{"role": "user", "content": content}])


def test_a_model_that_was_not_trained_for_it_writes_nothing_down(hearing: Server) -> None:
    files = {"file": ("a.wav", wav(SOUNDS[0]))}
    answer = httpx.post(f"{hearing.url}/v1/audio/transcriptions", files=files, data={"model": NAME}, timeout=60)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
    assert "writes down no sounds" in answer.json()["error"]["message"]


def test_it_is_the_same_in_other_protocols(hearing: Server) -> None:
    sound = data_of(SOUNDS[0], "flac")
    part = {"type": "input_audio", "input_audio": {"data": sound, "format": "flac"}}
    right = said(hearing, NAME, [{"role": "user", "content": [part, {"type": "text", "text": "?"}]}])
    options = {"temperature": 0, "ignore_eos": True}
    content = [part, {"type": "input_text", "text": "?"}]
    body = {"model": NAME, "max_output_tokens": NEW, "input": [{"role": "user", "content": content}], **options}
    answer = httpx.post(f"{hearing.url}/v1/responses", json=body, timeout=60).json()
    assert answer["output"][-1]["content"][0]["text"] == right.choices[0].message.content
    tensors = {"text_input": "<|user|><|audio|>?<|end|>\n<|assistant|>", "audio": sound, "max_tokens": NEW, **options}
    generated = httpx.post(f"{hearing.url}/v2/models/{NAME}/generate", json=tensors, timeout=60).json()
    assert generated["text_output"] == right.choices[0].message.content
