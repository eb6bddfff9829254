"""Layers by one recorded call, by however many threads, against layers one by one: the same bits."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from charonia.engine.attention.backend import CacheSpec
from charonia.engine.attention.native import NativeAttention
from charonia.engine.checkpoint.build_context import BuildContext
from charonia.engine.checkpoint.hf_checkpoint import open_checkpoint
from charonia.engine.cpu import library
from charonia.engine.cpu.program import DecoderProgram
from charonia.engine.layers.step_context import StepContext
from charonia.engine.models.gemma3n import Gemma3nDecoderLayer
from charonia.engine.models.interfaces import Decoder
from charonia.engine.models.native_decoder import NativeDecoder
from charonia.engine.models.registry import checkpoint_builder
from charonia.engine.step_batch import StepBatch

CPU = torch.device("cpu")
DENSE = [
    "llama",
    "llama-linear-biased",
    "qwen2",
    "mistral",
    "qwen3",
    "phi3",
    "phi4-mini",
    "gemma2",
    "gemma3",
    "gemma4",
    "gemma4-small",
    "smollm3",
    "olmo3",
    "glm4",
]
SPARSE = ["qwen3-moe", "gpt-oss", "gemma4-moe", "minimax-m2"]
LATENTS = ["deepseek-v3", "deepseek-v2-lite", "glm4-lite"]
MIXED = "gemma3n"
"""Whose layers are not recorded."""
LOGGER = "charonia.engine.models.native_decoder"

pytestmark = pytest.mark.skipif(library.level() is None, reason="no C extension here")


def chunk(ids: torch.Tensor, start: int) -> StepBatch:
    """One sequence's next tokens, in blocks one after the other."""
    return StepBatch.from_tokens(ids, [start], [len(ids)], torch.arange(8).view(1, 8), 16)


@torch.inference_mode()
def spoken(decoder: Decoder, attention: NativeAttention) -> list[torch.Tensor]:
    """Logits of a prompt in two chunks, then of single tokens."""
    attention.allocate(8)
    ids, at, found = torch.arange(3, 128), 0, []
    for count in (40, 17, 1, 1):
        step = chunk(ids[at : at + count], at)
        logits = decoder.compute_logits(StepContext(step, attention.begin_step(step)), [torch.arange(count)])
        assert logits is not None
        found.append(next(logits).clone())
        at += count
    return found


def whole(decoder: Decoder) -> tuple[bool, bool]:
    """Whether its program begins with token ids, and whether it ends with logits."""
    assert isinstance(decoder, NativeDecoder)
    marks = None if decoder.program is None else decoder.program.io
    return marks is not None and marks.embeds_tokens, marks is not None and marks.logits is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [*DENSE, *SPARSE, *LATENTS, MIXED])
def test_a_program_changes_no_bit(
    checkpoint: Callable[..., Path],
    name: str,
    dtype: torch.dtype,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    runs = 0
    begin = DecoderProgram.begin

    def counted(*args: object) -> object:
        nonlocal runs
        runs += 1
        return begin(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(DecoderProgram, "begin", counted)
    found = checkpoint_builder(open_checkpoint(checkpoint(name)))
    decoder, shape, *_ = found.build(BuildContext(dtype, CPU, 128))
    sizes = shape.heads, shape.kv_heads, shape.head_dim, 16
    stored = "int8" if name == LATENTS[0] else "auto"
    attention = NativeAttention(CacheSpec(shape.cached_attention, *sizes, dtype, CPU, stored))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        by_program = spoken(decoder, attention)
    finally:
        torch.set_num_threads(before)
    assert runs == (0 if name == MIXED else 4)
    assert whole(decoder) == (name != MIXED, name != MIXED)
    told = [record.getMessage() for record in caplog.records if record.name == LOGGER]
    assert len(told) == (name == MIXED)
    assert ("its streams are mixed by torch" in "".join(told)) == (name == MIXED)
    monkeypatch.setattr(NativeDecoder, "_program_for", lambda *_: None)
    one_by_one = spoken(decoder, attention)
    assert all(torch.equal(a, b) for a, b in zip(by_program, one_by_one, strict=True))


def test_a_layer_that_wrongly_says_it_can_be_recorded_fails(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Gemma3nDecoderLayer, "untraceable", None)
    decoder, shape, *_ = checkpoint_builder(open_checkpoint(checkpoint(MIXED))).build(
        BuildContext(torch.float32, CPU, 128)
    )
    spec = CacheSpec(shape.cached_attention, shape.heads, shape.kv_heads, shape.head_dim, 16, torch.float32, CPU)
    with pytest.raises((TypeError, AttributeError)):
        spoken(decoder, NativeAttention(spec))
