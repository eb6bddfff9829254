"""Quantised checkpoints as they are downloaded: in float32 they are what their numbers mean, by the kernels nearly."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import torch
from safetensors.torch import load_file

from charonia.core.errors import InvalidArgument
from charonia.engine.build import describe, memory_needed
from charonia.engine.checkpoint.build_context import BuildContext, Shard, SingleRank
from charonia.engine.checkpoint.hf_checkpoint import open_checkpoint
from charonia.engine.checkpoint.model_spec import CheckpointError
from charonia.engine.checkpoint.quantised_weights import open_weights
from charonia.engine.checkpoint.quantization_config import STORED_AS
from charonia.engine.checkpoint.weights import TensorSlice, WeightLoader
from charonia.engine.config import EngineConfig, ParallelConfig
from charonia.engine.cpu import library
from charonia.engine.layers.mlp import GatedMLP, GatedMLPSpec
from charonia.engine.layers.step_context import StepContext
from charonia.engine.models.registry import checkpoint_builder
from charonia.engine.worker.loaded_rank import check_rank_config
from charonia.telemetry.host_metrics import Gpus
from tests.engine.models.test_models import CPU, KIN, NAMES, PARTS, logits, prompts, right_logits, typical_error
from tests.quantised_files import STYLES, write_quantised

KERNELS = pytest.mark.skipif(library.level() is None, reason="no C extension here")
META = torch.device("meta")
FEW = ("gptq in another order", "awq", "w4a16 asymmetric", "w8a8", "fp8 blocks")

Quantised = Callable[[str, str], tuple[Path, Path]]


@pytest.fixture(scope="module")
def quantised(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Quantised:
    """The named configuration in a style, and its plain twin."""
    made: dict[tuple[str, str], tuple[Path, Path]] = {}

    def make(name: str, style: str) -> tuple[Path, Path]:
        if (name, style) not in made:
            where = tmp_path_factory.mktemp("quantised")
            made[name, style] = write_quantised(checkpoint(name), where, STYLES[style]())
        return made[name, style]

    return make


@pytest.mark.parametrize("style", STYLES)
def test_every_slice_of_a_matrix_is_what_its_numbers_mean(quantised: Quantised, style: str) -> None:
    small, plain = quantised("llama", style)
    weights, right = open_weights(open_checkpoint(small)), load_file(plain / "model.safetensors")
    for name, tensor in right.items():
        whole = TensorSlice(name, tuple(tensor.shape))
        assert torch.equal(weights.read(whole).float(), tensor.float()), name
        if tensor.dim() == 2:
            some = whole._replace(rows=slice(3, 21), columns=slice(8, 40))
            assert torch.equal(weights.read(some).float(), tensor[3:21, 8:40].float()), name
    assert weights.unread == []


@pytest.mark.parametrize(
    ("name", "style"),
    [
        *(("llama", style) for style in FEW),
        ("qwen3-moe", "gptq"),
        pytest.param("deepseek-v3", "fp8 blocks", marks=pytest.mark.proof),
        *(pytest.param("llama", style, marks=pytest.mark.proof) for style in STYLES if style not in FEW),
        *(
            pytest.param(name, style, marks=pytest.mark.proof)
            for name in [*NAMES, *KIN, *PARTS]
            for style in FEW
            if (name, style) != ("qwen3-moe", "w4a16 asymmetric")  # whose groups do not fit its experts
        ),
    ],
)
def test_dequantised_logits_are_transformers(quantised: Quantised, name: str, style: str) -> None:
    small, plain = quantised(name, style)
    right, found = right_logits(plain, torch.float32), logits(small, prompts(), torch.float32)
    assert (found - right).abs().max() < 1e-4 * right.abs().max()
    assert torch.equal(found.argmax(-1), right.argmax(-1))


@pytest.mark.proof
@pytest.mark.parametrize("style", ["w4a16", "w8a16", "fp8 channel"])
def test_dequantised_logits_are_those_of_the_package_that_wrote_the_file(quantised: Quantised, style: str) -> None:
    small, _ = quantised("llama", style)
    right = right_logits(small, torch.float32)
    assert (logits(small, prompts(), torch.float32) - right).abs().max() < 1e-4 * right.abs().max()


@KERNELS
@pytest.mark.parametrize(
    "style", [*FEW, *(pytest.param(style, marks=pytest.mark.proof) for style in STYLES if style not in FEW)]
)
def test_kernels_are_as_near_as_eight_bits_for_activations(quantised: Quantised, style: str) -> None:
    small, plain = quantised("llama", style)
    right = logits(plain, prompts(), torch.float32)
    ours = typical_error(logits(small, prompts(), torch.bfloat16), right, "llama")
    assert ours < 2.5 * typical_error(logits(plain, prompts(), torch.bfloat16), right, "llama")


@KERNELS
def test_what_became_of_the_matrices_is_said_once(quantised: Quantised, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "charonia")
    logits(quantised("llama", "gptq")[0], prompts(), torch.bfloat16)
    assert [record.getMessage() for record in caplog.records if "14 matrices" in record.getMessage()] == [
        f"{quantised('llama', 'gptq')[0]}: 14 matrices gptq 4 bits in groups of 32 as 4 bits by groups of 32, exactly"
        " (0.0 MB, 0.0 MB in the file)"
    ]


class _Rank(SingleRank):
    def __init__(self, rank: int) -> None:
        self.rank, self.size = rank, 2


@pytest.mark.parametrize(
    ("style", "kept"),
    [
        (
            "gptq in another order",
            "14 matrices gptq 4 bits in groups of 32, inputs in an order of their own as 4 bits",
        ),
        ("w8a8", "14 matrices compressed-tensors 8 bits, activations too as 8 bits by output, exactly"),
        ("fp8 blocks", "14 matrices fp8 by blocks of 32 x 32 as bfloat16, off by at most 0.39%"),
    ],
)
@KERNELS
def test_a_check_says_what_loading_would(quantised: Quantised, style: str, kept: str) -> None:
    lines = describe(str(quantised("llama", style)[0]))
    assert lines[1].startswith(kept)
    assert [line.partition(":")[0] for line in lines[2:]] == ["memory", "speed"]


@KERNELS
@pytest.mark.parametrize("style", ["gptq", "gptq in another order", "w8a8"])
def test_ranks_share_quantised_matrices(quantised: Quantised, style: str) -> None:
    """Their shares of down_proj add up to the whole, though a rank's columns begin within a group or an order."""
    small, plain = quantised("llama", style)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    right = load_file(plain / "model.safetensors")
    gate, up, down = (right[f"model.layers.0.mlp.{one}_proj.weight"] for one in ("gate", "up", "down"))
    wide = x.float()
    expected = (torch.nn.functional.silu(wide @ gate.T) * (wide @ up.T)) @ down.T
    total = torch.zeros(5, 64)
    for rank in (0, 1):
        context = BuildContext(torch.bfloat16, CPU, 64, Shard(_Rank(rank)))
        loader = WeightLoader(open_weights(open_checkpoint(small)), context)
        mine = GatedMLP(loader, GatedMLPSpec("model.layers.0.mlp", 64, 96), partial=True)
        total += mine(x, cast(StepContext, None)).float()  # which adapters alone look at
    assert (total - expected).abs().max() < 0.03 * expected.abs().max()


def test_quantising_anew_is_refused_but_for_floats(quantised: Quantised) -> None:
    with pytest.raises(InvalidArgument, match=r"integers of 4 bits \(awq\) already; leave quantization out"):
        check_rank_config(EngineConfig(model=str(quantised("llama", "awq")[0]), quantization="int8"))
    check_rank_config(EngineConfig(model=str(quantised("llama", "fp8 blocks")[0]), quantization="int8"))


def config_of(directory: Path, **changes: object) -> dict[str, object]:
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] |= changes
    return config


@pytest.mark.parametrize(
    ("style", "changes", "says"),
    [
        ("gptq", {"bits": 5}, "bits 5 is not supported; supported: 2, 3, 4, 8"),
        ("gptq", {"bits": 8}, r"qweight \[8, 64\] is not what 8 bits are for 64 inputs"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not supported"),
        ("gptq", {"group_size": 64}, "it has 2 groups, but quantization_config means 1"),
        ("gptq", {"group_size": "32"}, "group_size must be a whole number, got '32'"),
        ("gptq", {"group_size": 0}, "group_size must be -1 or positive, got 0"),
        ("awq", {"version": "gemv"}, "version 'gemv' is not supported; supported: gemm"),
        ("awq", {"bits": 8}, "bits 8 is not supported"),
        (
            "awq",
            {"quant_method": "quark"},
            r"quantised weights \(quark\) are not supported; supported: .*gptq, awq, fp8",
        ),
        ("fp8 blocks", {"weight_block_size": [64, 64]}, r"weight_scale_inv \[2, 2\] is not what"),
        ("fp8 blocks", {"weight_block_size": 64}, "weight_block_size must be two positive numbers"),
        ("w4a16", {"format": "marlin-24"}, "format 'marlin-24' is not supported"),
        ("w4a16", {"transform_config": {"a": 1}}, "transform_config is not supported"),
        ("w4a16", {"config_groups": None}, "config_groups is missing"),
        ("w4a16", {"config_groups": {"group_0": 3}}, "group_0 must be an object, got 3"),
        ("w4a16", {"quantization_status": "frozen"}, "quantization_status 'frozen' is not supported"),
    ],
)
def test_configs_that_are_not_served_are_named(
    quantised: Quantised, tmp_path: Path, style: str, changes: dict[str, object], says: str
) -> None:
    copy = Path(shutil.copytree(quantised("llama", style)[0], tmp_path / "copy"))
    (copy / "config.json").write_text(json.dumps(config_of(copy, **changes)))
    with pytest.raises(CheckpointError, match=says):
        checkpoint_builder(open_checkpoint(copy)).dry_run(BuildContext(torch.float32, CPU, 64), ParallelConfig())


@pytest.mark.parametrize("style", FEW)
def test_a_name_of_vllms_says_what_the_weights_are(quantised: Quantised, style: str) -> None:
    small, plain = quantised("llama", style)
    own = open_checkpoint(small).stored_as
    right = [name for name, method in STORED_AS.items() if method == own]
    for name in right:
        check_rank_config(EngineConfig(model=str(small), quantization=name))
    other = next(name for name in STORED_AS if name not in right)
    with pytest.raises(InvalidArgument, match=f"quantization {other} .* stored as {own}; leave quantization out"):
        check_rank_config(EngineConfig(model=str(small), quantization=other))
    with pytest.raises(InvalidArgument, match=f"quantization {other} .* plain floats: int8, fp8 and int4"):
        check_rank_config(EngineConfig(model=str(plain), quantization=other))


@KERNELS
@pytest.mark.parametrize("style", FEW)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_memory_is_reserved_for_what_the_weights_become(
    quantised: Quantised, monkeypatch: pytest.MonkeyPatch, style: str, device: str
) -> None:
    """Codes stay codes where kernels multiply with them, on a GPU as on a CPU."""
    small, plain = quantised("llama", style)
    right = load_file(plain / "model.safetensors")
    floats = sum(value.numel() for value in right.values())

    def needed(dtype: str = "auto", capability: int = 90) -> int:
        monkeypatch.setattr(Gpus, "capability", lambda gpus, number: capability)
        [need] = memory_needed(str(small), {"device": device, "dtype": dtype}, ())
        return need.size

    assert needed("float32") == 4 * floats
    if device == "cuda":
        assert (needed(capability=80) == 2 * floats) is (style == "fp8 blocks")
        monkeypatch.setenv(library.LEVEL_VARIABLE, "none")
        assert needed() == 2 * floats
        monkeypatch.setenv(library.LEVEL_VARIABLE, "triton")  # a build on no device then is one for a GPU
    else:
        assert needed("float16") == 2 * floats
    served = checkpoint_builder(open_checkpoint(small)).build(BuildContext(torch.bfloat16, META, 1)).served
    assert served is not None
    kept = sum(each.kept for form, each in served._counts.items() if not form.plain)
    matrices = sum(each.numel() for name, each in right.items() if name.endswith("_proj.weight"))
    assert kept <= needed() - 2 * (floats - matrices) < 1.15 * kept
    assert (kept == 2 * matrices) is (style == "fp8 blocks" and device == "cpu")
