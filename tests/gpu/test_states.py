"""Kernels over states and latents on the device beside torch's forms there, in shapes of published models: prompts,
drafts and single tokens in one step, to the bit as alone.

CHARONIA_KERNELS=triton runs smaller shapes on the interpreter, without bf16.
"""

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from charonia.engine.attention.backend import CacheSpec
from charonia.engine.attention.selector import create_backend
from charonia.engine.attention.torch_attention import ReferenceAttention
from charonia.engine.checkpoint.model_spec import KeyValueShape, LayerAttention
from charonia.engine.cpu.recurrent import ConvolutionColumns, LayerStates, RecurrenceShape, ScanSteps
from charonia.engine.gpu import runtime
from charonia.engine.layers.recurrence import DeltaRuleGates, TorchRecurrence, TorchScanSteps
from charonia.engine.layers.recurrent_state import LayerSlots, StepSlotStates
from charonia.engine.layers.state_convolution import TorchConvolution
from charonia.engine.step_batch import StepBatch
from charonia.engine.step_states import StepStates

INTERPRETED = os.environ.get("CHARONIA_KERNELS") == "triton"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="no CUDA device"),
]
DTYPES = [torch.float16] if INTERPRETED else [torch.bfloat16, torch.float16]
ROWS, LONG = 4, 9 if INTERPRETED else 300
COUNTS = [1, LONG, 5, 1]
SAVES = [(1, 7, ROWS), (2, 1, ROWS + 1), (2, 2, ROWS + 2)]
DELTA = RecurrenceShape(2, 1, 32, 24, 0, 32, 64) if INTERPRETED else RecurrenceShape(32, 16, 128, 128, 0, 2048, 4096)
SCAN = RecurrenceShape(2, 1, 32, 24, 80, 48, 0) if INTERPRETED else RecurrenceShape(48, 1, 128, 64, 3200, 3072, 0)
assert runtime.serves(DTYPES[0], DEVICE) or not INTERPRETED  # which asks for the interpreter before Triton comes
Layer = Callable[[Tensor, Tensor, Tensor, StepSlotStates], Tensor]


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


def step(
    kept: LayerSlots, rows: list[int], counts: list[int], saves: list[tuple[int, int, int]], start: int = 5
) -> StepSlotStates:
    """A step of rows of which the first begins now, from position `start` on."""
    tables = (torch.zeros(ROWS, 1, dtype=kind, device=DEVICE) for kind in (torch.int32, torch.int64))
    batch = StepBatch(rows, [start] * len(rows), counts, *tables, 16)
    sources = [-1 if row == 0 else row for row in rows]
    return StepSlotStates([kept], batch, StepStates(sources, saves), LayerStates([], []))


def convolutions(short: bool) -> tuple[Layer, Layer, int, int]:
    """Torch's, the kernel, and their channels and window."""
    from charonia.engine.gpu.convolution import TritonConvolution

    channels, taps = (70, 3 if short else 4) if INTERPRETED else (2048, 3) if short else (8192, 4)
    columns = ConvolutionColumns(2 * channels, 0, channels) if short else ConvolutionColumns(0)
    own = random(channels, taps), None, not short, columns
    reference, kernel = TorchConvolution(*own), TritonConvolution(*own)
    by_torch: Layer = lambda x, gates, kept, states: reference(x, kept, states)  # noqa: E731
    by_kernel: Layer = lambda x, gates, kept, states: kernel(x, kept, states.on_device)  # noqa: E731
    return by_torch, by_kernel, channels, taps - 1


def recurrences(shape: RecurrenceShape, chunked: bool = False) -> tuple[Layer, Layer]:
    from charonia.engine.gpu.recurrence import TritonRecurrence

    rates, bias = -random(shape.heads).abs(), random(shape.heads)
    if shape is DELTA:
        reference = TorchRecurrence(shape, DeltaRuleGates(rates, bias, 0, shape.heads))
        kernel = TritonRecurrence(shape, 0, shape.heads, ScanSteps(rates, bias, None), chunked)
    else:
        steps = ScanSteps(rates, bias, rates)
        reference = TorchRecurrence(shape, TorchScanSteps(steps, 0))
        kernel = TritonRecurrence(shape, 0, None, steps, chunked)
    by_torch: Layer = lambda x, gates, kept, states: reference(x, gates, kept, states)  # noqa: E731
    by_kernel: Layer = lambda x, gates, kept, states: kernel(x, gates, kept, states.on_device)  # noqa: E731
    return by_torch, by_kernel


def compare(by_torch: Layer, by_kernel: Layer, inputs: tuple[Tensor, Tensor], kept: Tensor, cut: int = 4) -> None:
    """Results and what is kept, and the bits of the long row alone; its tokens after a cut, too."""
    slots = LayerSlots(kept, kept)
    right, found, alone = kept.clone(), kept.clone(), kept.clone()
    expected = by_torch(*inputs, right, step(slots, [*range(ROWS)], COUNTS, SAVES))
    out = by_kernel(*inputs, found, step(slots, [*range(ROWS)], COUNTS, SAVES))
    bound = 1e-2 if out.dtype == torch.bfloat16 else 2e-3
    torch.testing.assert_close(out, expected, atol=bound * float(expected.abs().max()), rtol=bound)
    torch.testing.assert_close(found, right, atol=bound * float(right.abs().max()), rtol=bound)
    pieces, first = [], COUNTS[0]
    for count in (cut, LONG - cut):
        own = [part[first : first + count] for part in inputs]
        pieces.append(by_kernel(own[0], own[1], alone, step(slots, [1], [count], [], 5 + first - COUNTS[0])))
        first += count
    assert torch.equal(torch.cat(pieces), out[COUNTS[0] : COUNTS[0] + LONG])
    assert torch.equal(alone[1], found[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("short", [True, False])
def test_convolutions(short: bool, dtype: torch.dtype) -> None:
    by_torch, by_kernel, channels, window = convolutions(short)
    x = random(sum(COUNTS), 3 * channels, dtype=dtype)
    compare(by_torch, by_kernel, (x, x), random(ROWS + 3, window, channels, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [DELTA, SCAN], ids=["delta", "scan"])
def test_recurrences(shape: RecurrenceShape, dtype: torch.dtype) -> None:
    by_torch, by_kernel = recurrences(shape)
    x = random(sum(COUNTS), shape.channels, dtype=dtype)
    gates = random(sum(COUNTS), 2 * shape.heads, dtype=dtype)
    compare(by_torch, by_kernel, (x, gates), random(ROWS + 3, shape.heads, shape.key_size, shape.value_size))


@pytest.mark.skipif(INTERPRETED, reason="tests/engine/gpu/test_chunks.py has them on the interpreter")
@pytest.mark.parametrize("shape", [DELTA, SCAN], ids=["delta", "scan"])
def test_recurrences_by_chunks(shape: RecurrenceShape) -> None:
    """Cut where a chunk ends."""
    by_torch, by_kernel = recurrences(shape, chunked=True)
    x = random(sum(COUNTS), shape.channels, dtype=torch.bfloat16)
    gates = random(sum(COUNTS), 2 * shape.heads, dtype=torch.bfloat16)
    kept = random(ROWS + 3, shape.heads, shape.key_size, shape.value_size)
    compare(by_torch, by_kernel, (x, gates), kept, 48 - 5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_latents(dtype: torch.dtype) -> None:
    """Contexts of one part and of many."""
    heads, latent, rotated, block = (3, 24, 8, 16) if INTERPRETED else (16, 512, 64, 16)
    starts, counts = ([0, 40, 15], [1, 1, 5]) if INTERPRETED else ([0, 4097, 1023, 700, 0], [1, 1, 1, 8, 300])
    kept = KeyValueShape(1, latent + rotated, latent, values_in_keys=True)
    spec = CacheSpec((LayerAttention(kept=kept),), heads, 1, latent + rotated, block, dtype, DEVICE)
    width = -(-(max(starts) + max(counts)) // block)
    tables = torch.randperm(len(starts) * width, device=DEVICE).view(len(starts), width)
    known = torch.zeros(len(starts), 1, dtype=torch.int32, device=DEVICE)
    backends: list[Any] = [create_backend("auto", spec), ReferenceAttention(spec)]
    assert type(backends[0]).__name__ == "TritonLatents"
    for backend in backends:
        backend.allocate(len(starts) * width)

    def attend(backend: Any, rows: list[int], first: bool) -> Tensor:
        own = [(0, starts[row]) if first else (starts[row], counts[row]) for row in rows]
        batch = StepBatch(rows, *np.array(own).T, known, tables, block)
        q = torch.cat([random(starts[row] + counts[row], heads, kept.key_size, dtype=dtype) for row in rows])
        at = np.concatenate(
            [
                np.arange(begin, begin + count) + sum(starts[other] + counts[other] for other in rows[:place])
                for place, (begin, count) in enumerate(own)
            ]
        )
        queries = q[torch.from_numpy(at).to(DEVICE)]
        out: Tensor = backend.begin_step(batch)(0, queries, queries[:, :1], None)
        return out

    for backend in backends:
        attend(backend, [row for row in range(len(starts)) if starts[row]], True)
    found, right = (attend(backend, [*range(len(starts))], False) for backend in backends)
    bound = 2e-2 if dtype == torch.bfloat16 else 4e-3
    torch.testing.assert_close(found, right, atol=bound, rtol=bound)
    assert torch.equal(attend(backends[0], [1], False), found[counts[0] : counts[0] + counts[1]])
