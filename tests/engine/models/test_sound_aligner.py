"""Where tokens begin in a sound: as transformers finds it from the attention that its own generation gives back."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import WhisperConfig, WhisperForConditionalGeneration
from transformers.generation.utils import GenerateEncoderDecoderOutput
from transformers.models.whisper.generation_whisper import _dynamic_time_warping, _median_filter

from charonia.engine.checkpoint.model_spec import CheckpointError
from charonia.engine.models.sound_aligner import load_sound_aligner
from charonia.engine.models.time_warping import align_by_warping, median_filter

HOST = torch.device("cpu")
POSITIONS = 60
HEADS = [[1, 0], [1, 3], [2, 1]]
PROMPT = 3


class Written(NamedTuple):
    directory: Path
    model: Any
    rows: Tensor
    """What the encoder made of two windows."""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    torch.manual_seed(2)
    config = WhisperConfig(
        vocab_size=90,
        d_model=32,
        encoder_layers=1,
        decoder_layers=4,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_source_positions=POSITIONS,
        max_target_positions=64,
        num_mel_bins=8,
        init_std=0.4,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=0,
        decoder_start_token_id=1,
    )
    model: Any = WhisperForConditionalGeneration(config).eval()
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            weight.data.normal_(std=0.2)
    model.set_attn_implementation("eager")
    model.generation_config.alignment_heads = HEADS
    directory = tmp_path_factory.mktemp("whisper")
    model.save_pretrained(directory)
    with torch.inference_mode():
        rows = model.model.encoder(torch.randn(2, 8, 2 * POSITIONS)).last_hidden_state
    return Written(directory, model, rows)


TOKENS = [[1, 7, 8, *range(20, 50)], [1, 9, 8, *range(60, 72)]]
SOUNDING = (POSITIONS, 41)


def expected(written: Written, number: int, heads: list[list[int]]) -> list[int]:
    """By transformers, which has the attention from generating; it knows none of the last token."""
    tokens, rows = TOKENS[number], written.rows[number : number + 1]
    ids = torch.tensor([tokens])
    with torch.inference_mode():
        made = written.model(encoder_outputs=(rows,), decoder_input_ids=ids, output_attentions=True)
    outputs = GenerateEncoderDecoderOutput(sequences=ids, cross_attentions=(made.cross_attentions,))
    times = written.model._extract_token_timestamps(
        outputs, heads, num_frames=2 * SOUNDING[number], num_input_ids=PROMPT
    )
    return [round(time / 0.02) for time in times[0, PROMPT:-1].tolist()]


def aligned(directory: Path, rows: Tensor, *numbers: int) -> list[list[int]]:
    align = load_sound_aligner(directory, rows.dtype, HOST)
    longest = max(len(TOKENS[number]) for number in numbers)
    tokens = torch.tensor([TOKENS[number] + [0] * (longest - len(TOKENS[number])) for number in numbers])
    spans = torch.tensor([(PROMPT, len(TOKENS[number]), SOUNDING[number]) for number in numbers])
    stored = rows[list(numbers)].flatten(1).contiguous().view(torch.uint8)
    begins = align(aligned_tokens=tokens, aligned_spans=spans, aligned_rows=stored)
    return [rows[: len(TOKENS[number]) - PROMPT, 0].tolist() for number, rows in zip(numbers, begins, strict=True)]


def test_tokens_begin_where_transformers_finds_them(written: Written) -> None:
    wanted = [expected(written, number, HEADS) for number in (0, 1)]
    assert len(set(wanted[0])) > 10
    assert all(begins == sorted(begins) for begins in wanted)
    assert aligned(written.directory, written.rows, 0, 1) == wanted
    assert [*aligned(written.directory, written.rows, 1), *aligned(written.directory, written.rows, 0)] == wanted[::-1]


def without_heads(written: Written, directory: Path, **generation: Any) -> Path:
    for file in written.directory.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory


def test_without_named_heads_all_of_the_upper_layers_count(written: Written, tmp_path: Path) -> None:
    upper = [[layer, head] for layer in (2, 3) for head in range(4)]
    assert aligned(without_heads(written, tmp_path), written.rows, 0) == [expected(written, 0, upper)]


@pytest.mark.parametrize("heads", [[[1, 0], [4, 0]], [[0, 4]]])
def test_heads_of_a_larger_decoder_say_nothing(
    written: Written, tmp_path: Path, heads: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    """Distilled checkpoints are published with those of the model that they were made of."""
    directory = without_heads(written, tmp_path, alignment_heads=heads)
    upper = [[layer, head] for layer in (2, 3) for head in range(4)]
    assert aligned(directory, written.rows, 0) == [expected(written, 0, upper)]
    assert "its alignment_heads are not those of 4 layers of 4 heads" in caplog.text


@pytest.mark.parametrize("heads", [[[0]], [[-1, 0]], [["a", 1]], {"a": 1}, 7])
def test_heads_that_are_no_pairs_are_refused(written: Written, tmp_path: Path, heads: Any) -> None:
    with pytest.raises(CheckpointError, match="alignment_heads must be pairs of a layer and a head, got"):
        load_sound_aligner(without_heads(written, tmp_path, alignment_heads=heads), torch.float32, HOST)


@pytest.mark.parametrize(
    ("tokens", "span"),
    [([1, 2, 90], (1, 3, 4)), ([1] * 65, (1, 3, 4)), ([1, 2], (2, 2, 4)), ([1, 2], (1, 2, 61)), ([1, 2], (1, 3, 4))],
)
def test_windows_that_nobody_heard_are_refused(written: Written, tokens: list[int], span: tuple[int, ...]) -> None:
    align = load_sound_aligner(written.directory, torch.float32, HOST)
    rows = written.rows[:1].flatten(1).contiguous().view(torch.uint8)
    with pytest.raises(ValueError, match=r"too many|have no"):
        align(aligned_tokens=torch.tensor([tokens]), aligned_spans=torch.tensor([span]), aligned_rows=rows)


def test_paths_are_the_reference_s() -> None:
    drawn = np.random.default_rng(0)
    shapes = ((1, 1), (1, 9), (5, 1), (7, 5), (6, 40), (30, 31))
    for values in (lambda shape: drawn.normal(size=shape), lambda shape: drawn.integers(0, 3, shape)):
        matrices = [values(shape).astype(np.float32) for shape in shapes]
        for matrix, begins in zip(matrices, align_by_warping(matrices), strict=True):
            tokens, rows = _dynamic_time_warping(-matrix.astype(np.float64))
            assert begins.tolist() == rows[np.diff(tokens, prepend=-1) > 0].tolist()


def test_what_is_no_number_has_a_path() -> None:
    [begins] = align_by_warping([np.full((4, 6), np.nan, np.float32)])
    assert begins.tolist() == sorted(begins)


@pytest.mark.parametrize(("width", "numbers"), [(7, 40), (7, 4), (7, 3), (1, 5), (3, 5)])
def test_medians_are_the_reference_s(width: int, numbers: int) -> None:
    values = torch.randn(5, numbers)
    assert torch.equal(median_filter(values, width), _median_filter(values[None, None], width)[0, 0])
