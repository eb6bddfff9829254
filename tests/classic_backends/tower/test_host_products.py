"""Products of towers on the host: those of torch, with packed weights and windows side by side."""

from itertools import pairwise
from types import SimpleNamespace
from weakref import ref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from charonia.classic_backends.tower.host_products import (
    PackedLinear,
    PackedPatches,
    _pack_layers,
    attend,
    attend_windows,
    compute_on_host,
    packing_works,
)

HEADS, SIZE = 3, 20
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def tokens(count: int, dtype: torch.dtype) -> list[Tensor]:
    """Queries, keys and values as towers have them: parts of one product."""
    packed = torch.randn(count, 3, HEADS, SIZE, generator=torch.manual_seed(count)).to(dtype)
    return [packed[:, part] for part in range(3)]


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_windows_are_attended_to_by_themselves(dtype: torch.dtype) -> None:
    bounds = [0]
    for length in (16, 8, 700, 0, 16, 128, 1, 0, 8, 16):
        bounds.append(bounds[-1] + length)
    q, k, v = tokens(bounds[-1], dtype)
    v = v[..., :13]
    made = attend_windows(q, k, v, bounds, 0.3)
    for begin, end in pairwise(bounds):
        wide = (part[begin:end].transpose(0, 1).double() for part in (q, k, v))
        expected = F.scaled_dot_product_attention(*wide, scale=0.3).transpose(0, 1).to(dtype)
        torch.testing.assert_close(made[begin:end], expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_attention_of_many_short_windows_comes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tokens(60, torch.float32)
    bounds = range(0, 61, 4)
    whole = attend_windows(q, k, v, bounds, 1.0)
    monkeypatch.setattr("charonia.classic_backends.tower.host_products._SCORES", HEADS * 16 * 4)
    torch.testing.assert_close(attend_windows(q, k, v, bounds, 1.0), whole)


def test_attention_in_transformers_form() -> None:
    module = nn.Module()
    q, k, v = (torch.randn(2, heads, 30, SIZE, generator=torch.manual_seed(heads)) for heads in (6, 3, 2))
    k, v = k[:, :2], v[:, :2]
    shared = [part.repeat_interleave(3, 1) for part in (k, v)]
    rows, _ = attend(module, q, k, v, None, is_causal=False)
    torch.testing.assert_close(rows, F.scaled_dot_product_attention(q, *shared).transpose(1, 2), rtol=1e-5, atol=1e-5)
    mask = torch.rand(2, 1, 30, 30, generator=torch.manual_seed(0)) > 0.3
    masked, _ = attend(module, q, *shared, mask, scaling=0.5, is_causal=False, dropout=0.0)
    expected = F.scaled_dot_product_attention(q, *shared, mask, scale=0.5).transpose(1, 2)
    torch.testing.assert_close(masked, expected, rtol=1e-5, atol=1e-5)
    ordered, _ = attend(module, q, *shared, None)
    expected = F.scaled_dot_product_attention(q, *shared, is_causal=True).transpose(1, 2)
    torch.testing.assert_close(ordered, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("queries", "keys"), [(8, 30), (1, 16)])
def test_attention_to_others_keys_is_torchs(queries: int, keys: int) -> None:
    """As a few queries of a projector ask all patches."""
    q, k, v = (torch.randn(2, 4, count, SIZE) for count in (queries, keys, keys))
    rows, _ = attend(nn.Module(), q, k, v, None, is_causal=False)
    torch.testing.assert_close(rows, F.scaled_dot_product_attention(q, k, v).transpose(1, 2))


class Model(nn.Module):
    """As much of transformers' models as is looked at."""

    def __init__(self, dtype: torch.dtype, attention: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(20, 40), nn.Sequential(nn.GELU(), nn.Linear(40, 7, bias=False))
        self.again = self.first
        self.derived = nn.modules.linear.NonDynamicallyQuantizableLinear(7, 7)
        self.dtype = dtype
        self.config = SimpleNamespace(vision_config=SimpleNamespace(_attn_implementation=attention))
        self.requires_grad_(False).to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.derived(self.second(self.first(x)))
        return result


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_linear_layers_are_packed(dtype: torch.dtype) -> None:
    assert packing_works(dtype)
    model = Model(dtype, "sdpa")
    x = torch.randn(2, 9, 20, generator=torch.manual_seed(1)).to(dtype)
    expected = model(x)
    compute_on_host(model, ("vision_config", "audio_config"))
    assert isinstance(model.first, PackedLinear)
    assert model.again is model.first
    assert (model.first.weight.dtype, tuple(model.first.weight.shape)) == (dtype, (40, 20))
    assert type(model.derived) is nn.modules.linear.NonDynamicallyQuantizableLinear, "others read its weights"
    torch.testing.assert_close(model(x), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert model(x[:, :0]).shape == (2, 0, 7)
    assert "flash" in model.config.vision_config._attn_implementation


def test_a_weight_is_let_go_of_when_it_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Conv2d(8, 8, 2, 2)) for _ in range(3)))
    model.requires_grad_(False).append(model[0][0])
    weights = [ref(parameter) for parameter in model.parameters() if parameter.dim() > 1]
    there: list[int] = []

    def pack(weight: Tensor) -> Tensor:
        there.append(sum(held() is not None for held in weights))
        return weight.clone()

    monkeypatch.setattr("charonia.classic_backends.tower.host_products._pack", pack)
    _pack_layers(model)
    assert there == [6, 5, 4, 3, 2, 1]
    assert model[3] is model[0][0], "a layer of two"


def test_what_is_derived_from_a_convolution_stays() -> None:
    class Doubled(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    model = nn.Sequential(Doubled(3, 8, 2, 2))
    _pack_layers(model)
    assert type(model[0]) is Doubled


@pytest.mark.parametrize("size", [(1, 28, 14), (2, 30, 17)])
def test_patches_are_products(size: tuple[int, ...]) -> None:
    """Numbers beyond the last whole patch are left out."""
    x = torch.randn(3, 3, *size, generator=torch.manual_seed(2))
    flat = nn.Sequential(nn.Conv2d(3, 8, 14, 14, padding="valid"), nn.Conv2d(8, 8, 1, padding=(1, 0)))
    deep = nn.Sequential(nn.Conv3d(3, 8, (1, 14, 7), (1, 14, 7), bias=False), nn.Conv3d(8, 8, 2, 1, padding=1))
    for layers, picture in ((flat, x[:, :, 0]), (deep, x)):
        model = Model(torch.float32, "sdpa")
        model.second = layers.requires_grad_(False)
        expected = layers(picture)
        compute_on_host(model, ())
        assert type(layers[0]) is PackedPatches
        assert type(layers[1]) in (nn.Conv2d, nn.Conv3d), "its kernels overlap, or go beyond the picture"
        torch.testing.assert_close(layers(picture), expected, rtol=1e-5, atol=1e-5)


def test_what_is_not_for_the_library_stays() -> None:
    eager = Model(torch.float32, "eager")
    compute_on_host(eager, ("vision_config",))
    assert eager.config.vision_config._attn_implementation == "eager"
    half = Model(torch.float16, "sdpa")
    compute_on_host(half, ("vision_config",))
    assert type(half.first) is nn.Linear
    assert half.config.vision_config._attn_implementation == "sdpa"
