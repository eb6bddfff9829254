"""gpt-oss as it is published: experts in floats of four bits, two in an octet, 32 under a power of two."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from charonia.engine.build import memory_needed
from charonia.engine.checkpoint.build_context import BuildContext
from charonia.engine.checkpoint.hf_checkpoint import open_checkpoint
from charonia.engine.checkpoint.hf_config import read_spec
from charonia.engine.checkpoint.model_spec import CheckpointError, UnsupportedVariant
from charonia.engine.checkpoint.quantised_weights import open_weights
from charonia.engine.checkpoint.weights import TensorSlice
from charonia.engine.cpu import library
from charonia.engine.models.registry import checkpoint_builder
from tests.engine.models.test_models import CPU, logits, prompts, typical_error

NUMBERS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
LAYERS, EXPERTS = 2, 6


def decoded(blocks: Tensor, scales: Tensor) -> Tensor:
    """What octets [..., groups, 16] with exponents [..., groups] stand for, one number after the other."""
    table = torch.tensor([*NUMBERS, *(-number for number in NUMBERS)])
    pairs = torch.stack((table[(blocks % 16).long()], table[(blocks // 16).long()]), -1).flatten(-2)
    return (pairs * (scales.float() - 127).exp2().unsqueeze(-1)).flatten(-2)


@pytest.fixture(scope="module")
def packed(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint in MXFP4, and its twin in plain floats, laid out as transformers writes them."""
    where = tmp_path_factory.mktemp("mxfp4")
    small, plain = (Path(shutil.copytree(checkpoint("gpt-oss"), where / name)) for name in ("small", "plain"))
    tensors, generator = load_file(plain / "model.safetensors"), torch.Generator().manual_seed(2)
    stored = dict(tensors)
    for layer in range(LAYERS):
        for part in ("gate_up_proj", "down_proj"):
            name = f"model.layers.{layer}.mlp.experts.{part}"
            experts, inputs, outputs = stored.pop(name).shape
            shape = experts, outputs, inputs // 32
            blocks = torch.randint(256, (*shape, 16), generator=generator).to(torch.uint8)
            scales = torch.randint(121, 125, shape, generator=generator).to(torch.uint8)
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            tensors[name] = decoded(blocks, scales).transpose(1, 2).contiguous()
    save_file(tensors, plain / "model.safetensors")
    save_file(stored, small / "model.safetensors")
    config = json.loads((small / "config.json").read_text())
    stored_as = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (small / "config.json").write_text(json.dumps(config | {"quantization_config": stored_as}))
    return small, plain


def test_every_slice_of_an_expert_is_what_its_numbers_mean(packed: tuple[Path, Path]) -> None:
    """Gate and up take turns in the files."""
    small, plain = packed
    weights, right = open_weights(open_checkpoint(small)), load_file(plain / "model.safetensors")
    twin = open_weights(open_checkpoint(plain))
    mixture = "model.layers.1.mlp.experts"
    for expert in (0, EXPERTS - 1):
        both, down = (right[f"{mixture}.{part}"][expert].T for part in ("gate_up_proj", "down_proj"))
        biases = right[f"{mixture}.gate_up_proj_bias"][expert]
        for part, expected in (("gate_proj", both[::2]), ("up_proj", both[1::2]), ("down_proj", down)):
            piece = TensorSlice(f"{mixture}.{expert}.{part}.weight", tuple(expected.shape))
            some = piece._replace(rows=slice(3, 21), columns=slice(5, 40))
            for source in (weights, twin):
                assert torch.equal(source.read(piece), expected)
                assert torch.equal(source.read(some), expected[3:21, 5:40])
        for part, expected in (("gate_proj", biases[::2]), ("up_proj", biases[1::2])):
            piece = TensorSlice(f"{mixture}.{expert}.{part}.bias", (96,), slice(7, 31))
            assert torch.equal(weights.read(piece), expected[7:31])


def test_logits_are_those_of_the_numbers(packed: tuple[Path, Path]) -> None:
    """To the bit in float32; by kernels in bfloat16 weights are exact, and activations have eight bits."""
    small, plain = packed
    right = logits(plain, prompts(), torch.float32)
    assert torch.equal(logits(small, prompts(), torch.float32), right)
    ours = typical_error(logits(small, prompts(), torch.bfloat16), right, "gpt-oss")
    assert ours < 2.5 * typical_error(logits(plain, prompts(), torch.bfloat16), right, "gpt-oss")


@pytest.mark.skipif(library.level() is None, reason="no C extension here")
def test_memory_is_reserved_for_what_the_experts_become(packed: tuple[Path, Path]) -> None:
    small, plain = packed
    matrices = {name: each.numel() for name, each in load_file(plain / "model.safetensors").items()}
    experts = sum(
        size for name, size in matrices.items() if name.endswith(("experts.gate_up_proj", "experts.down_proj"))
    )
    [need] = memory_needed(str(small), {"device": "cpu"}, ())
    assert need.size == 2 * (sum(matrices.values()) - experts) + 0.5625 * experts
    served = checkpoint_builder(open_checkpoint(small)).build(BuildContext(torch.bfloat16, CPU, 64)).served
    assert served is not None
    assert any("mxfp4 as fp4 by groups of 32, exactly" in line for line in served.lines())


@pytest.mark.parametrize(
    ("part", "change", "says"),
    [
        (
            "gate_up_proj_blocks",
            lambda blocks: blocks[..., :8].contiguous(),
            r"blocks \[96, 2, 8\] .* mxfp4 .* \[96, 64\]",
        ),
        ("down_proj_scales", lambda scales: scales[..., :1].contiguous(), r"scales \[64, 1\]"),
        ("down_proj_scales", lambda scales: torch.full_like(scales, 255), "a scale is no number"),
    ],
)
def test_a_broken_file_is_refused(
    packed: tuple[Path, Path], tmp_path: Path, part: str, change: Callable[[Tensor], Tensor], says: str
) -> None:
    copy = Path(shutil.copytree(packed[0], tmp_path / "copy"))
    tensors = load_file(copy / "model.safetensors")
    name = f"model.layers.0.mlp.experts.{part}"
    tensors[name] = change(tensors[name])
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(CheckpointError, match=says):
        checkpoint_builder(open_checkpoint(copy)).build(BuildContext(torch.float32, CPU, 64))


@pytest.mark.parametrize("changes", [{"swiglu_limit": 5.0}, {"swiglu_alpha": 1.0}, {"hidden_act": "gelu"}])
def test_another_gate_is_not_computed_here(packed: tuple[Path, Path], changes: dict[str, object]) -> None:
    config = json.loads((packed[1] / "config.json").read_text())
    with pytest.raises(UnsupportedVariant, match=f"{next(iter(changes))} .* is not supported here"):
        read_spec(config | changes, "here")


def test_a_config_that_says_nothing_is_the_published_one() -> None:
    """Half of the layers have a window, the first of them, and positions are stretched by yarn."""
    spec = read_spec(
        {
            "architectures": ["GptOssForCausalLM"],
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_attention_heads": 64,
            "num_hidden_layers": 4,
            "vocab_size": 9,
        },
        "here",
    )
    assert [None if kind is None else kind.window for kind in spec.attention] == [128, None, 128, None]
    assert all(kind is not None and kind.sinks for kind in spec.attention)
    assert (spec.rope.kind, spec.rope.theta, spec.rope.factor, spec.rope.truncate) == ("yarn", 150000.0, 32.0, False)
