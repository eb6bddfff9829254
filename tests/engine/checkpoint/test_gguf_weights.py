"""What our reader makes of tensors that the public gguf package wrote."""

import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from charonia.core.errors import CharoniaError
from charonia.engine.checkpoint.build_context import BuildContext
from charonia.engine.checkpoint.code_forms import dequantise_codes
from charonia.engine.checkpoint.gguf_blocks import BLOCKS, decode_rows
from charonia.engine.checkpoint.gguf_config import read_gguf_config
from charonia.engine.checkpoint.gguf_weights import GgufWeights
from charonia.engine.checkpoint.hf_checkpoint import open_checkpoint
from charonia.engine.checkpoint.hf_config import read_spec
from charonia.engine.checkpoint.model_spec import CheckpointError
from charonia.engine.checkpoint.weights import TensorSlice
from charonia.engine.cpu import library
from charonia.engine.models.registry import checkpoint_builder
from charonia.tokenization.gguf_file import TENSOR_TYPES, read_gguf


@pytest.fixture(scope="session")
def writing(sibling: Callable[[str], ModuleType]) -> ModuleType:
    return sibling("gguf_models.py")


@pytest.fixture(scope="session")
def written(
    checkpoint: Callable[..., Path], writing: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """The named configuration in GGUF."""

    def write(name: str, kind: str = "F32", extra: dict[str, Any] | None = None, **changes: Any) -> Path:
        path = tmp_path_factory.mktemp("gguf") / "model.gguf"
        return Path(writing.write_gguf(checkpoint(name, **changes), path, kind, extra))

    return write


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_are_decoded_to_the_last_bit(kind: str) -> None:
    """Any bytes are blocks, but for scales that are no numbers."""
    numbers = gguf.GGMLQuantizationType[kind]
    size = gguf.GGML_QUANT_SIZES[numbers][1]
    drawn = np.random.default_rng(0)
    blocks = drawn.integers(0, 256, (5, 3, size), np.uint8)
    if kind == "MXFP4":
        blocks[..., 0] = drawn.integers(110, 140, (5, 3))
    for at in (208,) if kind == "Q6_K" else (0, 2) if kind != "MXFP4" else ():
        if at == 0 or kind[3] == "1" or kind.endswith("K"):
            blocks[..., at : at + 2] = drawn.normal(size=(5, 3, 1)).astype(np.float16).view(np.uint8)
    rows = blocks.reshape(5, -1)
    found = dequantise_codes(decode_rows(kind, torch.from_numpy(rows)), BLOCKS[kind].form)
    assert np.array_equal(found.numpy(), gguf.quants.dequantize(rows, numbers))
    with patch.object(library, "level", lambda: None):
        by_torch = decode_rows(kind, torch.from_numpy(rows))
        assert torch.equal(dequantise_codes(by_torch, BLOCKS[kind].form), found)
    for one, other in zip(decode_rows(kind, torch.from_numpy(rows)), by_torch, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


def test_the_table_of_types_is_the_format_s() -> None:
    for number, kind in TENSOR_TYPES.items():
        known = gguf.GGMLQuantizationType(number)
        assert (kind.name, (kind.values, kind.bytes)) == (known.name, gguf.GGML_QUANT_SIZES[known])


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0"])
@pytest.mark.parametrize("name", ["llama-linear-biased", "qwen3-moe", "gemma2", "qwen3.5"])
def test_every_tensor_is_the_checkpoint_s_whole_and_in_part(
    name: str, kind: str, written: Callable[..., Path], checkpoint: Callable[..., Path], writing: ModuleType
) -> None:
    whole_blocks = {"qwen3-moe": {"moe_intermediate_size": 64}, "qwen3.5": {"linear_value_head_dim": 32}}
    changes = whole_blocks.get(name, {})
    opened = open_checkpoint(written(name, kind, **changes))
    assert opened.gguf is not None
    weights = GgufWeights(opened.gguf, opened.spec.head_dim, opened.spec.recurrence)
    for tensor, stored in saved_tensors(checkpoint(name, **changes)).items():
        if tensor == "lm_head.weight" and opened.spec.tied_embeddings:
            continue
        own = writing.stored_type(tensor, stored, kind)
        expected = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(stored, own), own))
        some = slice(3, len(stored) - 2)
        torch.testing.assert_close(
            weights.read(TensorSlice(tensor, stored.shape)).float(),
            expected,
            rtol=0,
            atol=1e-6 if "A_log" in tensor else 2e-7,
            msg=tensor,
        )
        form = weights.form(TensorSlice(tensor, stored.shape)).codes
        if form is not None:
            codes = weights.codes(TensorSlice(tensor, stored.shape, some))
            torch.testing.assert_close(dequantise_codes(codes, form), expected[some], rtol=0, atol=2e-7, msg=tensor)
        if stored.ndim == 2:
            part = weights.read(TensorSlice(tensor, stored.shape, some, slice(8, 40)))
            assert torch.equal(part.float(), expected[some, 8:40])
    assert weights.unread == []
    assert "model.norm.weight" in weights
    assert "model.layers.0.mlp.nonsense.weight" not in weights


@pytest.mark.parametrize("older", [False, True])
def test_matrices_that_make_heads_of_latents_are_read_whole_and_in_part(
    older: bool, written: Callable[..., Path], checkpoint: Callable[..., Path], writing: ModuleType
) -> None:
    """Newer files have its halves by themselves, one of them transposed."""
    extra = {"keep_kv_b": True} if older else None
    opened = open_checkpoint(written("deepseek-v3", extra=extra))
    assert opened.gguf is not None
    assert ("blk.0.attn_kv_b.weight" in opened.gguf.tensors) is older
    weights = GgufWeights(opened.gguf, opened.spec.head_dim)
    name = "model.layers.0.self_attn.kv_b_proj.weight"
    right = torch.from_numpy(saved_tensors(checkpoint("deepseek-v3"))[name])
    whole = TensorSlice(name, tuple(right.shape))
    assert torch.equal(weights.read(whole), right)
    assert torch.equal(weights.read(whole._replace(rows=slice(50, 140), columns=slice(3, 9))), right[50:140, 3:9])
    assert weights.form(whole).codes is None
    with pytest.raises(CheckpointError, match=r"kv_b|k_b_proj"):
        weights.read(TensorSlice(name, (right.shape[0] + 4, right.shape[1])))


def test_blocks_that_draft_are_left_out(written: Callable[..., Path]) -> None:
    opened = open_checkpoint(written("glm4-moe"))
    assert opened.gguf is not None
    assert any("nextn" in name for name in opened.gguf.tensors)
    assert not any("nextn" in name for name in GgufWeights(opened.gguf, opened.spec.head_dim).unread)


def saved_tensors(directory: Path) -> dict[str, Any]:
    return {name: value for file in directory.glob("*.safetensors") for name, value in load_file(file).items()}


def test_a_tensor_that_is_missing_or_of_another_shape_is_named(written: Callable[..., Path]) -> None:
    opened = open_checkpoint(written("llama"))
    assert opened.gguf is not None
    weights = GgufWeights(opened.gguf, 16)
    with pytest.raises(
        CheckpointError, match=r"model.layers.7.self_attn.q_proj.weight \(blk.7.attn_q.weight\) is missing"
    ):
        weights.read(TensorSlice("model.layers.7.self_attn.q_proj.weight", (64, 64)))
    with pytest.raises(CheckpointError, match=r"output_norm.weight has shape \[64\], but its metadata means \[65\]"):
        weights.read(TensorSlice("model.norm.weight", (65,)))


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        ({"general.architecture": "mamba"}, "architecture 'mamba' is not supported; supported: llama, qwen2"),
        ({"llama.attention.value_length": 8}, "keys and values have different lengths"),
        ({"llama.rope.dimension_count": 10}, "partial_rotary_factor 0.625 of heads of 16 is not supported"),
        ({"llama.attention.causal": False}, "llama.attention.causal False is not supported"),
        ({"llama.logit_scale": 0.5}, "llama.logit_scale 0.5 is not supported"),
        ({"llama.block_count": 1 << 31}, "llama.block_count is 2147483648, but it has 2[01] tensors"),
        ({"llama.block_count": 0}, "num_hidden_layers must be a positive whole number, got 0"),
        ({"llama.attention.head_count": 0}, "num_attention_heads must be a positive whole number, got 0"),
    ],
)
def test_what_is_not_computed_here_is_refused_by_name(
    written: Callable[..., Path], extra: dict[str, Any], told: str
) -> None:
    file = read_gguf(shared_file(written))
    changed = replace(file, metadata={**file.metadata, **extra})
    with pytest.raises(CharoniaError, match=told) as error:
        read_spec(read_gguf_config(changed), str(file.path))
    assert str(file.path) in error.value.message


@settings(max_examples=40)
@given(st.data())
def test_metadata_that_lies_is_refused_or_loads(written: Callable[..., Path], data: st.DataObject) -> None:
    path = shared_file(written)
    content = bytearray(path.read_bytes())
    end = min(tensor.offset for tensor in read_gguf(path).tensors.values())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, end - 4))
        content[at : at + 4] = data.draw(
            st.sampled_from([b"\xff" * 4, bytes(4), struct.pack("<I", 1 << 20), b"\1\0\0\0"])
        )
    spoilt = path.with_name("spoilt.gguf")
    spoilt.write_bytes(content)
    with suppress(CharoniaError):
        checkpoint_builder(open_checkpoint(spoilt)).build(BuildContext(torch.float32, torch.device("meta"), 1))


MADE: list[Path] = []


def shared_file(written: Callable[..., Path]) -> Path:
    if not MADE:
        MADE.append(written("llama-llama3-tied", "Q8_0"))
    return MADE[0]
