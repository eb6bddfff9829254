"""Causal convolutions over sequences that come in pieces: a tile of tokens and channels each, and the windows of inputs
that rows and snapshots keep. A result depends on its own inputs alone, to the bit. The reference is
`layers.state_convolution.TorchConvolution`.
"""

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from ..cpu.recurrent import ConvolutionColumns
from .gate import activate
from .runtime import DIVISIBLE, TRITON_TYPES, Specialisation
from .state_rows import FEW_TOKENS, TILE_TOKENS, StateMoves, StateRows


@triton.jit
def _inputs_at(
    at, x, windows, first, count, source, channel, channels, stride, inputs, gates,
    GATED: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """The inputs [n, BLOCK] at tokens `at` [n, 1] of a row, in x's dtype: below 0 those of the window."""
    valid = channel < channels
    own = valid & (at >= 0) & (at < count)
    line = x + (first + at) * stride + channel
    values = tl.load(line + inputs, mask=own, other=0.0)
    if GATED:
        values = values * tl.load(line + gates, mask=own, other=0.0)
    kept = valid & (at < 0) & (source >= 0)
    earlier = tl.load(windows + (source * WINDOW + WINDOW + at) * channels + channel, mask=kept, other=0.0)
    return tl.where(at < 0, earlier, values)


@triton.jit
def _convolve_kernel(
    x,
    weight,
    bias,
    out,
    windows,
    tiles,
    rows,
    counts,
    first_places,
    sources,
    save_begins,
    save_ends,
    save_counts,
    save_slots,
    channels,
    stride,
    inputs,
    input_gates,
    output_gates,
    TILED: tl.constexpr,
    BIASED: tl.constexpr,
    GATED: tl.constexpr,
    RESULTS_GATED: tl.constexpr,
    ACTIVATED: tl.constexpr,
    KERNEL: tl.constexpr,
    WINDOW: tl.constexpr,
    LINES: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (tile, n) has TOKENS tokens of a row, from the offset in `tiles` on, and BLOCK channels. That of a row's
    first tile also writes its `windows` [slots, WINDOW, channels], which no other one reads. `weight` [KERNEL,
    channels] and `bias` are float32."""
    index = tl.program_id(0)
    offset = index * 0
    if TILED:
        offset = tl.load(tiles + tl.program_id(0) * 2 + 1)
        index = tl.load(tiles + tl.program_id(0) * 2)
        if index < 0:
            return
    count = tl.load(counts + index)
    if offset >= count:
        return
    first = tl.load(first_places + index).to(tl.int64)
    source = tl.load(sources + index).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    token = offset + tl.arange(0, TOKENS)[:, None]
    total = tl.zeros((TOKENS, BLOCK), tl.float32)
    for tap in tl.static_range(KERNEL):
        values = _inputs_at(
            token - WINDOW + tap, x, windows, first, count, source, channel, channels, stride, inputs, input_gates,
            GATED, WINDOW,
        )  # fmt: skip
        factors = tl.load(weight + tap * channels + channel, mask=channel < channels, other=0.0)
        total = tl.fma(values.to(tl.float32), tl.broadcast_to(factors, (TOKENS, BLOCK)), total)
    if BIASED:
        total += tl.load(bias + channel, mask=channel < channels, other=0.0)
    if ACTIVATED:
        total = activate(total, "silu")
    valid = (channel < channels) & (token < count)
    if RESULTS_GATED:
        total *= tl.load(x + (first + token) * stride + output_gates + channel, mask=valid, other=0.0).to(tl.float32)
    tl.store(out + (first + token) * channels + channel, total.to(out.dtype.element_ty), mask=valid)
    if offset == 0:
        line = tl.arange(0, LINES)[:, None]
        stored = (line < WINDOW) & (channel < channels)
        for save in range(tl.load(save_begins + index), tl.load(save_ends + index)):
            kept = _inputs_at(
                tl.load(save_counts + save) - WINDOW + line, x, windows, first, count, source, channel, channels,
                stride, inputs, input_gates, GATED, WINDOW,
            )  # fmt: skip
            slot = tl.load(save_slots + save).to(tl.int64)
            tl.store(windows + (slot * WINDOW + line) * channels + channel, kept, mask=stored)
        kept = _inputs_at(
            count - WINDOW + line, x, windows, first, count, source, channel, channels, stride, inputs, input_gates,
            GATED, WINDOW,
        )  # fmt: skip
        slot = tl.load(rows + index).to(tl.int64)
        tl.debug_barrier()  # all have read what the row's own slot held
        tl.store(windows + (slot * WINDOW + line) * channels + channel, kept, mask=stored)


class TritonConvolution:
    """The same as `CausalConvolution`, by a kernel."""

    untraceable: str | None = "Triton computes its convolution"

    def __init__(self, weight: Tensor, bias: Tensor | None, activated: bool, columns: ConvolutionColumns) -> None:
        self._weight = weight.t().contiguous()  # [kernel, channels]
        self._bias = bias
        self._activated = activated
        self._columns = columns

    def __call__(self, x: Tensor, windows: Tensor, rows: StateRows) -> Tensor:
        """x [N, width] -> [N, channels]; changes `windows` [slots, kernel - 1, channels]."""
        kernel, channels = self._weight.shape
        inputs, gates, results = self._columns
        out = x.new_empty(len(x), channels)
        batch, moves = rows.batch, rows.moves
        numbers = batch.rows, batch.counts, batch.first_places, *moves
        columns = x.stride(0), inputs, gates or 0, results or 0
        kinds = self._bias is not None, gates is not None, results is not None, self._activated
        plan = _plan(kernel, rows.tile_tokens)
        grid = rows.num_tiles, triton.cdiv(channels, plan["BLOCK"])
        tensors = self._weight, self._weight if self._bias is None else self._bias, out, windows
        tiles = batch.rows if rows.tiles is None else rows.tiles
        _convolve_kernel[grid](x, *tensors, tiles, *numbers, channels, *columns, rows.tiles is not None, *kinds, **plan)
        return out


def _plan(kernel: int, tokens: int) -> dict[str, int]:
    """Tiles of 512 to 2,048 numbers: with fewer channels for a few tokens a form spills."""
    window = kernel - 1
    block = 64 if tokens == TILE_TOKENS else max(512 // tokens, 128)
    sizes = {"KERNEL": kernel, "WINDOW": window, "LINES": triton.next_power_of_2(max(window, 1))}
    return sizes | {"TOKENS": tokens, "BLOCK": block, "num_warps": 4}


def specialisations() -> Iterator[Specialisation]:
    """Those of Qwen 3.5 and Mamba-2, activated, and the short gated ones of LFM2, for one token, a few and many."""
    for kind in TRITON_TYPES.values():
        for tokens in (1, FEW_TOKENS, TILE_TOKENS):
            for kernel, short in ((4, False), (3, True)):
                yield _form(kind, kernel, tokens, short)


def _form(kind: str, kernel: int, tokens: int, short: bool) -> Specialisation:
    types = dict.fromkeys(("x", "out", "windows"), f"*{kind}") | dict.fromkeys(("weight", "bias"), "*fp32")
    types |= dict.fromkeys(("tiles", "rows", "counts", "first_places", *StateMoves._fields), "*i32")
    types |= dict.fromkeys(("channels", "stride", "inputs", "input_gates", "output_gates"), f"i32{DIVISIBLE}")
    kinds = {"TILED": tokens == TILE_TOKENS, "BIASED": False, "GATED": short, "RESULTS_GATED": short}
    plan = _plan(kernel, tokens) | kinds | {"ACTIVATED": not short}
    return Specialisation.of_plan(_convolve_kernel, types, plan)
