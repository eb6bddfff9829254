"""Attention over latents by Triton kernels, on the interpreter: beside attention by its formula, and to the bit however
a context comes and whatever shares its steps."""

from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from charonia.core.errors import InvalidArgument
from charonia.engine.attention.backend import CacheSpec
from charonia.engine.attention.selector import create_backend
from charonia.engine.attention.torch_attention import ReferenceAttention
from charonia.engine.attention.triton_latents import TritonLatents
from charonia.engine.checkpoint.model_spec import KeyValueShape, LayerAttention, RopeSpec
from charonia.engine.layers.rotary import TorchAngles, TorchRotary
from charonia.engine.step_batch import DeviceBatch, StepBatch

pytestmark = pytest.mark.usefixtures("interpreted")

CPU = torch.device("cpu")
HEADS, LATENT, ROTATED = 3, 24, 8
KEPT = KeyValueShape(1, LATENT + ROTATED, LATENT, values_in_keys=True)
BLOCK, LONGEST, PART = 16, 128, 32
BLOCKS = 3 * LONGEST // BLOCK + 1
TABLES = torch.randperm(BLOCKS - 1, generator=torch.Generator().manual_seed(1)).view(3, -1) + 1
"""Of three rows; what lies in block 0 is NaN."""


def spec(dtype: torch.dtype = torch.float32, **changes: object) -> CacheSpec:
    kind = LayerAttention(scale=0.3, kept=KEPT)
    return CacheSpec((kind, kind), HEADS, 1, KEPT.key_size, BLOCK, dtype, CPU)._replace(**changes)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def made(shape: CacheSpec) -> TritonLatents:
    backend = create_backend("auto", shape)
    assert isinstance(backend, TritonLatents)
    backend.allocate(BLOCKS)
    backend.device_blocks[0].fill_(torch.nan)
    return backend


@pytest.mark.parametrize("view", [{"window": 9}, {"softcap": 2.0}, {"sinks": True}, {"both_ways": True}])
def test_layers_that_see_otherwise_are_no_kernels(view: dict[str, Any]) -> None:
    kind = LayerAttention(scale=0.3, kept=KEPT)
    assert TritonLatents.supports_heads(spec())
    assert not TritonLatents.supports_heads(spec(attention=(kind, kind._replace(**view))))


def batch(rows: list[int], starts: list[int], counts: list[int]) -> StepBatch:
    return StepBatch(rows, starts, counts, torch.zeros(3, 1, dtype=torch.int32), TABLES, BLOCK)


def tokens(row: int, first: int, end: int, dtype: torch.dtype) -> Tensor:
    """What queries and key of a row's tokens are, [n, heads + 1, key size]."""
    return random(LONGEST, HEADS + 1, KEPT.key_size, seed=row)[first:end].to(dtype)


def compute(backend: Any, rows: list[int], starts: list[int], counts: list[int], dtype: torch.dtype) -> list[Tensor]:
    """What each row of a step gets, in layer 1."""
    step = batch(rows, starts, counts)
    parts = zip(rows, starts, counts, strict=True)
    packed = torch.cat([tokens(row, start, start + count, dtype) for row, start, count in parts])
    angles = TorchRotary(RopeSpec(), ROTATED, LONGEST, dtype, CPU)(step.positions)
    out: Tensor = backend.begin_step(step).apply_rope_and_attend(1, packed, angles)
    return [*out.split(counts)]


def keep(backend: Any, row: int, length: int, dtype: torch.dtype) -> None:
    """Let the row's first tokens be in layer 1's cache."""
    place = torch.arange(length)
    angles = TorchRotary(RopeSpec(), ROTATED, LONGEST, dtype, CPU)(place)
    keys = tokens(row, 0, length, dtype)[:, -1]
    keys[:, LATENT:] = angles.rotate(keys[:, None, LATENT:])[:, 0]
    blocks = backend.device_blocks[-1]
    lines = blocks[:, 1] if isinstance(backend, TritonLatents) else blocks
    lines[TABLES[row, place // BLOCK], place % BLOCK] = keys


@pytest.fixture
def short_parts(kernels: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Parts of a context that the interpreter is not busy with for long; the module that has them."""
    monkeypatch.setattr(kernels["latent_attention"], "PART_TOKENS", PART)
    return kernels["latent_attention"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_prompts_tokens_and_drafts_are_those_of_the_formula(short_parts: Any, dtype: torch.dtype) -> None:
    shape = spec(dtype)
    mine, reference = made(shape), ReferenceAttention(shape)
    reference.allocate(BLOCKS)
    bound = {"atol": 2e-5, "rtol": 1e-3} if dtype == torch.float32 else {"atol": 6e-3, "rtol": 4e-3}
    for own in (mine, reference):
        keep(own, 2, 60, dtype)
    for step in (([0, 1], [0, 0], [17, 1]), ([2, 1, 0], [60, 1, 17], [8, 1, 2]), ([0, 2], [19, 68], [3, 20])):
        found, right = (compute(backend, *step, dtype) for backend in (mine, reference))
        for own, expected in zip(found, right, strict=True):
            torch.testing.assert_close(own, expected, **bound)


@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_no_bit_depends_on_cuts_and_company(
    interpreted: None, sums_of_a_gpu: None, short_parts: Any, data: st.DataObject
) -> None:
    """A context of three parts: its last tokens come together, as drafts and one by one, beside others or alone."""
    dtype, known, length = torch.float16, 60, 71
    backend = made(spec(dtype))
    keep(backend, 1, known, dtype)
    [whole] = compute(backend, [1], [known], [length - known], dtype)
    found, at = [], known
    with pytest.MonkeyPatch.context() as patch:
        while at < length:
            patch.setattr(short_parts, "_ENOUGH_PROGRAMS", data.draw(st.sampled_from((1, 1000))))
            patch.setattr(short_parts, "_LONG_RUN", data.draw(st.sampled_from((1, 2, 32))))
            patch.setattr(short_parts, "_STATE_BYTES", data.draw(st.sampled_from((0, 1 << 20))))
            count = min(data.draw(st.sampled_from((1, 3, 9))), length - at)
            others = data.draw(st.lists(st.sampled_from((0, 2)), unique=True))
            place = data.draw(st.integers(0, len(others)))
            rows, starts, counts = [*others], [0] * len(others), [5] * len(others)
            for column, own in ((rows, 1), (starts, at), (counts, count)):
                column.insert(place, own)
            found.append(compute(backend, rows, starts, counts, dtype)[place])
            at += count
    assert torch.equal(torch.cat(found), whole)


@pytest.mark.parametrize("prompts", [False, True])
def test_padded_rows_and_places_touch_nothing(short_parts: Any, prompts: bool) -> None:
    """As a recorded step has them, which may have parts of prompts: of four rows and eight places two and six count."""
    shape = spec()
    backend, right = made(shape), made(shape)
    for own in (backend, right):
        compute(own, [0, 1], [0, 0], [40, 3], torch.float32)
    step = [0, 1], [40, 3], [1, 5]
    expected = compute(right, *step, torch.float32)
    numbers = torch.zeros(4, 4, dtype=torch.int32)
    numbers[:, :2] = torch.tensor([*step, [0, 1]])
    numbers[3, 2:] = 6
    bounds = np.zeros(4), np.full(4, 120), np.full(4, 1 if prompts else 8)
    there = DeviceBatch(*numbers, TABLES, 8, prompts=prompts)
    padded = StepBatch(*bounds, torch.zeros(3, 1, dtype=torch.int32), TABLES, BLOCK, there)
    rows = [tokens(0, 40, 41, torch.float32), tokens(1, 3, 8, torch.float32), tokens(2, 0, 2, torch.float32)]
    angles = TorchRotary(RopeSpec(), ROTATED, LONGEST, torch.float32, CPU)(padded.positions)
    assert isinstance(angles, TorchAngles)
    found = backend.begin_step(padded).apply_rope_and_attend(1, torch.cat(rows), angles)
    assert torch.equal(found[:6], torch.cat(expected))
    for mine, theirs in zip(backend.device_blocks, right.device_blocks, strict=True):
        assert torch.equal(mine.nan_to_num(), theirs.nan_to_num())


def test_codes_are_refused() -> None:
    """As the kernels read none."""
    with pytest.raises(InvalidArgument, match="can't do 3 heads on 1 with keys of 32 and values of 24"):
        create_backend("auto", spec(kv_cache_dtype="int8"))
