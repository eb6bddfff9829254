"""Norm, gate and rotation at every level, against float64 and beside torch's."""

import itertools

import pytest
import torch
from torch import Tensor
from transformers.activations import ACT2FN

from charonia.engine.checkpoint.model_spec import ACTIVATIONS
from charonia.engine.cpu.elementwise import (
    ACTIVATION_CODES,
    CLAMPED_SWIGLU,
    HAVE_NO_GATE,
    SQUARED_RELU,
    FusedGate,
    FusedNorm,
    FusedSoftCap,
    apply_rope,
    join_features,
)
from charonia.engine.layers.mlp import ACTIVATION_FUNCTIONS, TorchGate

SIZES = (1, 3, 8, 15, 16, 17, 64, 100, 896)
DTYPES = (torch.float32, torch.bfloat16)
CASES = list(itertools.product(SIZES, DTYPES))


def random(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(*shape, generator=generator) * scale).to(dtype)


def close(found: Tensor, right: Tensor, roundings: float = 4) -> bool:
    """Within a few roundings of the largest number in the row, or of 1 where that is small."""
    bound = roundings * torch.finfo(found.dtype).eps * right.abs().amax(-1, keepdim=True).clamp(min=1e-2)
    return bool(((found.double() - right).abs() <= bound).all())


def norm_of(weight: Tensor, eps: float = 1e-6) -> FusedNorm:
    return FusedNorm(weight.float(), eps, weight.dtype)


def rms_normalised(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize(("size", "dtype"), CASES, ids=str)
def test_norm(level: str, size: int, dtype: torch.dtype) -> None:
    x, weight = random(7, size, dtype=dtype, scale=3.0), random(size, dtype=dtype)
    assert close(norm_of(weight)(x), rms_normalised(x, weight, 1e-6))


@pytest.mark.parametrize(("size", "dtype"), CASES, ids=str)
def test_layer_norm(level: str, size: int, dtype: torch.dtype) -> None:
    """With a bias, of numbers far from 0, and of a sum."""
    x, delta, weight, bias = (random(number, size, dtype=dtype) for number in (7, 7, 2, 3))
    norm = FusedNorm(weight[0].float(), 1e-5, dtype, bias[0].float())
    summed = x + delta + 3
    right = torch.nn.functional.layer_norm(summed.double(), (size,), weight[0].double(), bias[0].double(), 1e-5)
    assert close(norm(summed), right, roundings=8)
    first = summed.clone()
    assert torch.equal(norm.add_and_norm(first, delta), norm(summed + delta))
    assert torch.equal(first, summed + delta)


@pytest.mark.parametrize(("size", "dtype"), CASES, ids=str)
def test_norm_after_a_sum(level: str, size: int, dtype: torch.dtype) -> None:
    """The sum is torch's, to the bit, and the norm that of the rounded sum."""
    x, delta, weight = (random(rows, size, dtype=dtype) for rows in (5, 5, 1))
    summed, norm = x + delta, norm_of(weight[0], 1e-5)
    found = norm.add_and_norm(x, delta)
    assert torch.equal(x, summed)
    assert torch.equal(found, norm(summed))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm_of_heads_between_others(level: str, dtype: torch.dtype) -> None:
    """Heads of queries and keys in a row that holds values too, each head with its own weight."""
    packed, weight = random(4, 9, 24, dtype=dtype), random(7, 24, dtype=dtype)
    before = packed.clone()
    norm_of(weight).norm_heads(packed, 7)
    assert close(packed[:, :7], rms_normalised(before[:, :7], weight, 1e-6))
    assert torch.equal(packed[:, 7:], before[:, 7:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm_of_all_heads_together(level: str, dtype: torch.dtype) -> None:
    """Of keys that stand between queries and values."""
    packed, weight = random(4, 9, 24, dtype=dtype), random(1, 72, dtype=dtype)[0]
    before = packed.clone()
    norm_of(weight).norm_part(packed, 96)
    right = rms_normalised(before[:, 4:7].flatten(1), weight, 1e-6)
    assert close(packed[:, 4:7].flatten(1), right)
    assert torch.equal(packed[:, :4], before[:, :4])
    assert torch.equal(packed[:, 7:], before[:, 7:])


@pytest.mark.parametrize(("size", "dtype"), CASES, ids=str)
def test_soft_cap(level: str, size: int, dtype: torch.dtype) -> None:
    """Near nothing, around the cap, and far beyond it."""
    x = random(4, size, dtype=dtype) * torch.tensor([[1e-3], [1.0], [30.0], [1e6]]).to(dtype)
    right = 20.0 * (x.double() / 20.0).tanh()
    found = FusedSoftCap(20.0)(x)
    assert found is x
    assert ((found.double() - right).abs() <= 4 * torch.finfo(dtype).eps * right.abs() + 1e-5).all()


def test_a_part_of_lines_is_joined_to_others() -> None:
    first, second = random(3, 4, dtype=torch.float32), random(3, 10, dtype=torch.float32)
    assert torch.equal(join_features(first, second, 5), torch.cat((first, second[:, 5:9]), 1))


def test_every_activation_is_what_transformers_means_by_it() -> None:
    x = torch.linspace(-6, 6, 4001)
    assert set(ACTIVATIONS.values()) == set(ACTIVATION_CODES) - {CLAMPED_SWIGLU} - HAVE_NO_GATE
    assert set(ACTIVATIONS.values()) == set(ACTIVATION_FUNCTIONS) - HAVE_NO_GATE
    for theirs, name in ACTIVATIONS.items():
        right = ACT2FN[theirs](x.double())
        assert close(ACTIVATION_FUNCTIONS[name](x), right), theirs
        assert close(FusedGate(name)(torch.cat((x, torch.ones_like(x)))[None])[0], right), theirs


@pytest.mark.parametrize("name", ACTIVATION_CODES)
@pytest.mark.parametrize(("size", "dtype"), CASES, ids=str)
def test_gate(level: str, size: int, dtype: torch.dtype, name: str) -> None:
    x = random(6, 2 * size, dtype=dtype, scale=5.0)
    assert close(FusedGate(name)(x), TorchGate(name)(x.double()), roundings=8 if name.endswith("gelu") else 4)


def test_a_clamped_gate_is_what_gpt_oss_means_by_it(level: str) -> None:
    gate, up = torch.linspace(-20, 20, 401).repeat(2, 1)
    up = up.flip(0)
    low, high = gate.double().clamp(max=7), up.double().clamp(-7, 7)
    right = (high + 1) * low * torch.sigmoid(1.702 * low)
    assert close(FusedGate(CLAMPED_SWIGLU)(torch.cat((gate, up))[None])[0], right)


def test_squares_are_of_what_is_positive(level: str) -> None:
    x = torch.tensor([[-1e30, -2.0, 0.0, 0.25, 1.5, 3.0]])
    assert torch.equal(FusedGate(SQUARED_RELU)(x), torch.tensor([[0.0, 0.0, 0.0, 0.0625, 2.25, 9.0]]))
    for name in (CLAMPED_SWIGLU, SQUARED_RELU):
        assert FusedGate(name)(torch.tensor([[float("nan"), 1.0]])).isnan().any()
    assert FusedGate(CLAMPED_SWIGLU)(torch.tensor([[1.0, float("nan")]])).isnan().all()


@pytest.mark.parametrize("name", sorted(set(ACTIVATIONS.values())))
def test_gate_of_numbers_far_out(level: str, name: str) -> None:
    far = torch.tensor([-1e30, -3e4, -200.0, -90.0, -1e-30, 0.0, 1e-30, 50.0, 200.0, 1e30])
    found = FusedGate(name)(torch.cat((far, torch.ones_like(far)))[None])[0]
    halved = torch.tensor([0, 0, 0, 0, 0.5, 0.5, 0.5, 1, 1, 1])
    assert torch.allclose(found, far * halved, atol=1e-6, rtol=1e-6)
    assert FusedGate(name)(torch.tensor([[float("nan"), 1.0]])).isnan().all()


@pytest.mark.parametrize("half", [1, 4, 8, 20, 32, 64])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_turn(level: str, half: int, dtype: torch.dtype) -> None:
    packed = random(5, 6, 2 * half, dtype=dtype)
    angles = random(5, half, dtype=torch.float32, scale=9.0).double()
    turns = torch.stack((angles.cos(), angles.sin()), 1).float()
    first, second = packed[:, :4].double().chunk(2, -1)
    cos, sin = (turns[:, one].double().unsqueeze(1) for one in (0, 1))
    right = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    assert close(apply_rope(packed[:, :4], turns), right)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_do_not_depend_on_their_number(level: str, dtype: torch.dtype) -> None:
    """To the bit: 1 row on one thread, 300 on all."""
    x, turns = random(300, 2 * 896, dtype=dtype), random(300, 2, 32, dtype=torch.float32)
    norm, gate = norm_of(random(2 * 896, dtype=dtype)), FusedGate("silu")
    heads = x.view(300, 28, 64)
    for row in (0, 17, 299):
        one = slice(row, row + 1)
        assert torch.equal(norm(x)[one], norm(x[one]))
        assert torch.equal(gate(x)[one], gate(x[one]))
        assert torch.equal(apply_rope(heads, turns)[one], apply_rope(heads[one], turns[one]))


def test_no_rows(level: str) -> None:
    assert norm_of(torch.ones(8))(torch.empty(0, 8)).shape == (0, 8)
    assert FusedGate("silu")(torch.empty(0, 8)).shape == (0, 4)
