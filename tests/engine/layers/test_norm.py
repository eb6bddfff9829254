"""Norms whose weights are changed before they are used."""

import pytest
import torch

from charonia.engine.cpu import library
from charonia.engine.layers.norm import divided_rms_norm, rms_norm

HALF_ULP = 2.0**-8
"""The most that rounding to bfloat16 changes a number, as a share of it."""


@pytest.mark.parametrize("native", [True, False])
def test_a_divided_norm_is_rounded_once(monkeypatch: pytest.MonkeyPatch, native: bool) -> None:
    """Granite's logits are divided in the last norm's weight. A weight divided in bfloat16 would be rounded before."""
    if not native:
        monkeypatch.setattr(library, "supports", lambda *arguments: False)
    elif library.level() is None:
        pytest.skip("no C kernels here")
    random = torch.Generator().manual_seed(0)
    weight = torch.rand(96, generator=random).add_(0.5).bfloat16()
    x = torch.randn(7, 96, generator=random).bfloat16()
    wide = x.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * (weight.double() / 6)

    def error(normed: torch.Tensor) -> float:
        return float(((normed.double() - exact) / exact).abs().max())

    assert error(divided_rms_norm(weight, 1e-5, 6.0)(x)) < 1.01 * HALF_ULP
    assert error(rms_norm(weight / 6, 1e-5)(x)) > 1.2 * HALF_ULP
