"""A model whose encoder reads the prompt and whose decoder writes another text, from its files to the answer."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, BartConfig

import charonia
from charonia import SamplingParams
from charonia.core.errors import InvalidArgument
from tests.checkpoints import write_tokenizer

START, FIRST, END, BANNED = 2, 5, 3, 40


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(9)
    config = BartConfig(
        vocab_size=384,
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
    path = tmp_path_factory.mktemp("bart")
    model.save_pretrained(path)
    write_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def llm(directory: Path) -> Iterator[charonia.LLM]:
    with charonia.LLM(directory, max_num_seqs=4) as loaded:
        yield loaded


def test_prompts_are_read_by_the_encoder(llm: charonia.LLM, directory: Path) -> None:
    sources = [[7, 9, 30, 200, 11], [50], [*range(10, 90)], [7, 9, 30, 200, 11]]
    sampling = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    answers = llm.generate([{"prompt_token_ids": source} for source in sources], sampling)
    model: Any = AutoModelForSeq2SeqLM.from_pretrained(directory, dtype=torch.float32)
    for source, answer in zip(sources, answers, strict=True):
        made = model.generate(
            torch.tensor([source]), max_new_tokens=21, do_sample=False, num_beams=1, eos_token_id=None
        )
        assert made[0, :2].tolist() == [START, FIRST]
        assert list(answer.outputs[0].token_ids) == made[0, 2:].tolist()
        assert len(answer.prompt_token_ids or ()) == len(source)


def test_texts_are_tokenized_and_long_ones_refused(llm: charonia.LLM) -> None:
    (answer,) = llm.generate(["a small text"], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    assert len(answer.outputs[0].token_ids) == 4
    with pytest.raises(InvalidArgument, match="prompt"):
        llm.generate([{"prompt_token_ids": [5] * 200}], SamplingParams(max_tokens=4))
