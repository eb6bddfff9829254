"""Launches attention over the paged cache: of rows with few places by `decode_attention`, of chunks of prompts by
`chunk_attention`. A query's result depends on its own tokens alone, whichever kernel computes it: see `attention_span`.
The reference is `attention.torch_attention.reference_attention`.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..kernel_choice import FP8_CAPABILITY
from ..step_batch import DeviceBatch
from .attention_plan import (
    CODED_SHAPES,
    DECODE_PLACES,
    SHAPES,
    AttentionSpec,
    LayerCache,
    StepTiles,
    chunk_plan,
    combine_plan,
    decode_plan,
    plan_parts,
)
from .chunk_attention import chunk_kernel
from .decode_attention import combine_kernel, decode_kernel
from .runtime import CODE_TYPES, Specialisation, capability, dependent_launch


def attend(
    spec: AttentionSpec,
    cache: LayerCache,
    batch: DeviceBatch,
    tiles: StepTiles,
    q: Tensor,
    sinks: Tensor | None,
) -> Tensor:
    """Attention of the queries [N, heads, head_dim], heads side by side, over a layer's cache, which has the step's
    keys and values already -> [N, heads * head_dim]. `sinks`: float32 [heads]."""
    shape = spec.shape
    rows = len(batch.counts)
    out = torch.empty(len(q), shape.heads * shape.head_dim, dtype=q.dtype, device=q.device)
    numbers = batch.rows, batch.starts, batch.counts, batch.first_places, batch.block_ids
    decoded = batch.counts if tiles.decoded is None else tiles.decoded
    inputs = q, *cache.pointers, q if sinks is None else sinks, out
    sizes = batch.block_ids.stride(0), q.stride(0)
    if tiles.places:
        shared = plan_parts(spec, rows, tiles)
        mixes = torch.empty(shared.states * shape.heads * shape.head_dim, dtype=torch.float32, device=q.device)
        sums = torch.empty(shared.states * shape.heads * 2, dtype=torch.float32, device=q.device)
        numbers_of_states = shared.run, shared.states
        launch = dependent_launch(q.device)
        plan = decode_plan(spec, tiles.places, sinks is not None) | launch
        lines = -(-tiles.places * spec.group // plan["M"])
        decode = decode_kernel[rows, shape.kv_heads * lines, shared.programs]
        places = batch.starts, decoded, batch.first_places
        few = batch.rows, *places, batch.block_ids
        decode(*inputs, mixes, sums, *few, *sizes, *numbers_of_states, spec.scale, spec.softcap, **plan)
        if shared.states:
            combine = combine_kernel[rows, shape.heads, tiles.places]
            plan = combine_plan(spec, tiles.places, sinks is not None) | launch
            combine(mixes, sums, inputs[4], out, *places, *numbers_of_states, **plan)
    if tiles.chunks is not None:
        ends = batch.ends if spec.both_ways else None
        plan = chunk_plan(spec, capability(q.device), sinks is not None, ends is not None)
        chunk = chunk_kernel[len(tiles.chunks), shape.kv_heads]
        seen = tiles.chunks if ends is None else ends
        chunk(*inputs, tiles.chunks, seen, *numbers, *sizes, spec.scale, spec.softcap, **plan)
    return out


def specialisations() -> Iterator[Specialisation]:
    """The shapes of published models, with and without codes, windows, caps and sinks."""
    specs = [AttentionSpec(shape, shape.head_dim**-0.5) for shape in (*SHAPES, *CODED_SHAPES)]
    specs += [AttentionSpec(SHAPES[0], 0.1, window=4096), AttentionSpec(SHAPES[3], 0.1, window=4096, softcap=50.0)]
    for spec in specs:
        for kind in ("bf16", "fp16"):
            yield from _forms(spec, kind, sinks=spec.shape[:4] == SHAPES[-1][:4])


def _forms(spec: AttentionSpec, kind: str, sinks: bool) -> Iterator[Specialisation]:
    most = spec.most_decoded
    for places in (places for places in DECODE_PLACES if places <= most):
        yield _form(decode_kernel, spec, kind, decode_plan(spec, places, sinks), ("mma",))
    yield _form(combine_kernel, spec, kind, combine_plan(spec, 1, sinks), ())
    for least, most in ((80, 89), (90, 99), (100, 100)):
        form = _form(chunk_kernel, spec, kind, chunk_plan(spec, least, sinks), ("mma",))
        yield form._replace(least=max(least, form.least), most=most)


def _form(kernel: Any, spec: AttentionSpec, kind: str, plan: dict[str, Any], wanted: tuple[str, ...]) -> Specialisation:
    codes = spec.shape.codes
    types = dict.fromkeys(("keys", "values"), f"*{kind if codes is None else CODE_TYPES[codes]}")
    types |= dict.fromkeys(("q", "out"), f"*{kind}") | dict.fromkeys(("mixes", "sums", "sinks", "scales"), "*fp32")
    types |= dict.fromkeys(("rows", "starts", "counts", "first_places", "tiles", "ends"), "*i32")
    types |= dict.fromkeys(("table_stride", "q_stride", "run", "capacity"), "i32") | {"block_ids": "*i64"}
    types |= dict.fromkeys(("scale", "softcap"), "fp32")
    least = FP8_CAPABILITY if codes == torch.float8_e4m3fn else 80
    return Specialisation.of_plan(kernel, types, plan, wanted, least)
