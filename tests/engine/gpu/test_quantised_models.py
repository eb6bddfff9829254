"""Checkpoints of eight bits and four through whole models on the path of a GPU, interpreted, beside transformers.

Random models pass every rounding on: one of e4m3's three bits of fraction moves logits by a tenth of their spread.
"""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from charonia.engine.layers import mlp
from tests.engine.models.test_models import logits, prompts
from tests.quantised_files import STYLES, write_quantised

SEQUENCES = prompts((5, 12))


@torch.inference_mode()
def right_logits(directory: Path) -> Tensor:
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return torch.cat([model(tokens[None]).logits[0] for tokens in SEQUENCES])


def share_of_spread(found: Tensor, right: Tensor) -> float:
    """The middle token's error, as a share of how logits spread."""
    return float((found - right).square().mean(-1).median().sqrt() / right.std())


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("name", "style"),
    [
        pytest.param("llama", "fp8 blocks", marks=pytest.mark.proof),
        pytest.param("llama", "w8a8 fp8", marks=pytest.mark.proof),
        pytest.param("llama", "w8a8 fp8 tensor", marks=pytest.mark.proof),
        ("mixtral", "fp8 blocks"),
        *(pytest.param("mixtral", style, marks=pytest.mark.proof) for style in ("w4a16", "awq", "w8a16")),
        pytest.param("qwen3-moe", "w8a8", marks=pytest.mark.proof),
        pytest.param("qwen3-moe", "w8a8 fp8", marks=pytest.mark.proof),
        pytest.param("qwen3-moe", "fp8 blocks", marks=pytest.mark.proof),  # which do not fit its down projections
    ],
)
def test_logits_are_near_those_of_the_values(
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    name: str,
    style: str,
    kernels: dict[str, ModuleType],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of a mixture, whose experts are grouped, are nearer still to what they are one by one."""
    small, plain = write_quantised(checkpoint(name), tmp_path, STYLES[style]())
    built, build = list[object](), mlp.build_experts
    monkeypatch.setattr(mlp, "build_experts", lambda *given: built.append(build(*given)) or built[-1])
    found = logits(small, SEQUENCES, torch.float16)
    bound = 0.2 if "fp8" in style else 0.06 if style == "w8a8" else 0.02
    assert share_of_spread(found, right_logits(plain)) < bound
    if name != "llama":
        assert {type(each) for each in built} == {kernels["experts"].TritonExperts}
        monkeypatch.setattr(mlp, "build_experts", mlp.EachExpert)
        assert share_of_spread(found, logits(small, SEQUENCES, torch.float16)) < 0.06
