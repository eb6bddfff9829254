"""A model whose encoder reads the prompt and whose decoder writes another text, over HTTP: its tokens are those of
transformers, and prompts count as they were sent."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, MarianConfig, T5Config

from charonia.telemetry.scrape import Interval, Scrape, parse_scrape
from charonia.tokenization.tokenizer import Tokenizer
from tests.checkpoints import write_tokenizer

from .serving import Server, serving

START, FIRST, END, BANNED = 2, 5, 3, 40
READ, WRITTEN = 384, 420
"""The vocabularies of the encoder and of the decoder."""
GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(9)
    config = MarianConfig(
        vocab_size=READ,
        decoder_vocab_size=WRITTEN,
        share_encoder_decoder_embeddings=False,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        max_position_embeddings=128,
        init_std=0.2,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=END,
        decoder_start_token_id=START,
        forced_eos_token_id=None,
    )
    model: Any = AutoModelForSeq2SeqLM.from_config(config).float().eval()
    model.generation_config.forced_bos_token_id = FIRST
    model.generation_config.suppress_tokens = [BANNED]
    path = tmp_path_factory.mktemp("written") / "marian"
    model.save_pretrained(path)
    write_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def writing(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("s") / "t", str(directory), "--max-num-seqs", "4") as running:
        yield running
        assert running.stop() == 0, running.said


def completion(server: Server, prompt: Any, **fields: Any) -> httpx.Response:
    body = {"model": "marian", "prompt": prompt, "max_tokens": 20, **GREEDY} | fields
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)


def scrape(server: Server) -> Scrape:
    return parse_scrape(httpx.get(server.metrics_url).text, server.metrics_url)


@pytest.fixture(scope="module")
def model(directory: Path) -> Any:
    return AutoModelForSeq2SeqLM.from_pretrained(directory, dtype=torch.float32)


def written(model: Any, source: list[int], count: int) -> list[int]:
    """What transformers writes."""
    ids = torch.tensor([source])
    made = model.generate(ids, max_new_tokens=count + 1, do_sample=False, num_beams=1, eos_token_id=None)[0].tolist()
    assert made[:2] == [START, FIRST]
    tokens: list[int] = made[2:]
    return tokens


def test_prompts_are_read_by_the_encoder(writing: Server, model: Any) -> None:
    sources = [[7, 9, 30, 200, 11], [50], [*range(10, 90)], [7, 9, 30, 200, 11]]
    before = scrape(writing)
    answer = completion(writing, sources, return_token_ids=True).json()
    for source, choice in zip(sources, answer["choices"], strict=True):
        assert choice["token_ids"] == written(model, source, 20)
        assert choice["prompt_token_ids"] == source
    read = sum(map(len, sources))
    assert answer["usage"]["prompt_tokens"] == read
    grown = Interval(before, scrape(writing))
    assert grown.grown("charonia_prompt_tokens_total", "marian") == read
    assert grown.grown("charonia_tower_images_total", "marian") == len({*map(tuple, sources)})


@pytest.mark.proof
def test_t5_writes_what_transformers_writes(tmp_path: Path) -> None:
    torch.manual_seed(1)
    sizes = {"vocab_size": READ, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4}
    config = T5Config(**sizes, feed_forward_proj="gated-gelu", decoder_start_token_id=0, initializer_factor=3.0)
    own: Any = AutoModelForSeq2SeqLM.from_config(config).float().eval()
    own.save_pretrained(tmp_path / "t5")
    write_tokenizer(tmp_path / "t5")
    source = [7, 9, 30, 200, 11, *range(50, 90)]
    ids = own.generate(torch.tensor([source]), max_new_tokens=30, do_sample=False, eos_token_id=None, pad_token_id=1)
    with serving(tmp_path / "t", str(tmp_path / "t5"), "--dtype", "float32") as server:
        body = {"model": "t5", "prompt": source, "max_tokens": 30, "return_token_ids": True, **GREEDY}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
        assert answer["choices"][0]["token_ids"] == ids[0, 1:].tolist()
        assert len({*answer["choices"][0]["token_ids"]}) > 3
        assert server.stop() == 0, server.said


@pytest.mark.proof
def test_several_frontends_leave_the_encoder_to_the_hub(directory: Path, model: Any, tmp_path: Path) -> None:
    with serving(tmp_path / "t", str(directory), "--max-num-seqs", "4", "--frontends", "2") as server:
        source = [7, 9, 30, 200, 11]
        [choice] = completion(server, source, return_token_ids=True).json()["choices"]
        assert choice["token_ids"] == written(model, source, 20)
        body = {"text_input": "a small text", "parameters": {"max_tokens": 4, **GREEDY}}
        text = completion(server, "a small text", max_tokens=4).json()["choices"][0]["text"]
        answer = httpx.post(f"{server.url}/v2/models/marian/generate", json=body, timeout=60)
        assert answer.json()["text_output"] == text
        assert server.stop() == 0, server.said


def test_texts_are_tokenized_over_v2_too(writing: Server, directory: Path, model: Any) -> None:
    text = "a small text"
    tokens = httpx.post(f"{writing.url}/tokenize", json={"prompt": text}).json()["tokens"]
    expected = Tokenizer.load(directory).decode(written(model, tokens, 4))
    body = {"text_input": text, "parameters": {"max_tokens": 4, **GREEDY}}
    answer = httpx.post(f"{writing.url}/v2/models/marian/generate", json=body, timeout=60)
    assert answer.json()["text_output"] == expected
    assert completion(writing, text, max_tokens=4).json()["choices"][0]["text"] == expected


def test_what_the_encoder_cannot_read_is_refused(writing: Server) -> None:
    for prompt, said in (([5] * 200, "the encoder reads 1 to 128"), ([7, READ], f"vocabulary of {READ}")):
        refusal = completion(writing, prompt)
        assert (refusal.status_code, refusal.json()["error"]["param"]) == (400, "prompt")
        assert said in refusal.json()["error"]["message"]
    assert completion(writing, [7, READ - 1]).status_code == 200
    assert "knows nothing of" not in writing.said
