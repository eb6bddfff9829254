"""Models whose layers keep states: logits against transformers, however prompts are cut, whatever shares a step, and
from whichever snapshot a row begins."""

import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from charonia.core.resolved_sampling import ResolvedSampling
from charonia.engine.attention.backend import CacheSpec
from charonia.engine.attention.selector import create_backend
from charonia.engine.checkpoint.build_context import BuildContext
from charonia.engine.checkpoint.hf_checkpoint import open_checkpoint
from charonia.engine.cpu import library
from charonia.engine.layers.recurrent_state import StateSlots
from charonia.engine.layers.step_context import StepContext
from charonia.engine.layers.torch_matmul import quantize_rows
from charonia.engine.models.registry import checkpoint_builder
from charonia.engine.step_batch import StepBatch
from charonia.scheduler.plan import NewSequence

CPU = torch.device("cpu")
NAMES = ["qwen3.5", "lfm2", "granite-hybrid"]
KIN = ["nemotron-h", "falcon-h1", "mamba", "falcon-mamba", "mamba2", "bamba", "zamba2"]
"""What keeps the states of one of these."""
SPARSE = ["qwen3-next", "qwen3.5-moe", "lfm2-moe", "granite-hybrid-moe", "nemotron-3"]
SMALL = ["x_proj", "dt_proj", "in_proj_a", "in_proj_b"]
"""The matrices of layers that are not quantised."""
PARTS = ["qwen3.5-image"]
"""The language part of what takes images too."""
LENGTHS = (130, 1, 23, 64, 100)
BLOCK = 16
ROWS = 5
SNAPSHOTS = 3


def prompts(lengths: Sequence[int] = LENGTHS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(1, 384, (length,), generator=generator) for length in lengths]


class Engine:
    """A model with a cache and states of ROWS rows, which begin with anything in them."""

    def __init__(self, directory: Path, dtype: torch.dtype = torch.float32, quantization: str = "none") -> None:
        builder = checkpoint_builder(open_checkpoint(directory))
        context = BuildContext(dtype, CPU, builder.max_position, quantization=quantization)
        self.decoder, shape, *_ = builder.build(context)
        sizes = shape.heads, shape.kv_heads, shape.head_dim, BLOCK
        self.attention = create_backend("auto", CacheSpec(shape.cached_attention, *sizes, dtype, CPU))
        self.attention.allocate(ROWS * 16)
        self.states = StateSlots(shape.states, ROWS, dtype, CPU)
        self.states.allocate(SNAPSHOTS)
        self.poison(range(ROWS + SNAPSHOTS))

    def poison(self, slots: Sequence[int]) -> None:
        for windows, matrices in self.states.layers:
            for slot in slots:
                windows[slot] = torch.nan
                matrices[slot] = torch.nan

    @torch.inference_mode()
    def step(
        self,
        parts: dict[int, tuple[int, Tensor]],
        saves: Sequence[tuple[int, int, int]] = (),
        new: Sequence[NewSequence] = (),
    ) -> dict[int, Tensor]:
        """Logits [n, vocabulary] of each row's tokens [n], which begin at a position."""
        rows = list(parts)
        tokens = torch.zeros(ROWS, 256, dtype=torch.int32)
        for row, (start, some) in parts.items():
            tokens[row, start : start + len(some)] = some
        starts, counts = [parts[row][0] for row in rows], [len(parts[row][1]) for row in rows]
        blocks = torch.arange(ROWS * 16).view(ROWS, 16)
        batch = StepBatch(rows, starts, counts, tokens, blocks, BLOCK)
        states = self.states.begin_step(batch, new, np.array(saves, np.int32).reshape(-1, 3))
        context = StepContext(batch, self.attention.begin_step(batch), states=states)
        logits = self.decoder.compute_logits(context, [torch.arange(batch.size)])
        assert logits is not None
        return dict(zip(rows, torch.split(next(logits).float().clone(), counts), strict=True))

    def whole(self, tokens: Tensor, row: int = 0) -> Tensor:
        return self.step({row: (0, tokens)})[row]

    def cut(
        self, tokens: Tensor, at: Sequence[int], row: int = 0, start: int = 0, snapshot: int | None = None
    ) -> Tensor:
        """The same by pieces that end `at` these positions, from `start` on, where a `snapshot` was taken."""
        bounds = [start, *at, len(tokens)]
        new = [] if snapshot is None else [sequence(row, tokens, start, snapshot)]
        logits = []
        for first, end in pairwise(bounds):
            if first < end:
                logits.append(self.step({row: (first, tokens[first:end])}, new=new)[row])
                new = []
        return torch.cat(logits)


def sequence(row: int, tokens: Tensor, computed: int, snapshot: int) -> NewSequence:
    return NewSequence(row, tokens.numpy(), computed, ResolvedSampling(), state=snapshot)


@pytest.fixture(scope="module")
def engine(checkpoint: Callable[..., Path]) -> Callable[..., Engine]:
    @cache
    def make(name: str, dtype: torch.dtype = torch.float32) -> Engine:
        return Engine(checkpoint(name), dtype)

    return make


@cache
@torch.inference_mode()
def right_logits(directory: Path, dtype: torch.dtype) -> list[Tensor]:
    """What transformers says of each prompt, with and without a cache alike."""
    name = json.loads((directory / "config.json").read_text())["architectures"][0]
    model = getattr(transformers, name).from_pretrained(directory, dtype=dtype)
    return [model(tokens[None]).logits[0].float() for tokens in prompts()]


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("name", [*NAMES, *KIN, *SPARSE, *PARTS])
def test_float32_logits_are_transformers(checkpoint: Callable[..., Path], name: str, backend: str) -> None:
    """Rows in one step, with our kernels and without any. Of Zamba 2 transformers itself is off by as much from what
    it computes in float64."""
    most = 1e-3 if name == "zamba2" else 1e-4
    right = right_logits(checkpoint(name), torch.float32)
    with patch.object(library, "level", lambda: None) if backend == "torch" else nullcontext():
        found = Engine(checkpoint(name)).step({row: (0, tokens) for row, tokens in enumerate(prompts())})
    for row, expected in enumerate(right):
        assert (found[row] - expected).abs().max() < most * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [*NAMES, "qwen3.5-moe", "nemotron-3"])
def test_a_decoder_with_states_is_one_program(engine: Callable[..., Engine], name: str, dtype: torch.dtype) -> None:
    """It computes what its layers do one by one, to the bit."""
    recorded = engine(name, dtype)
    found = recorded.whole(prompts()[0])
    decoder: Any = recorded.decoder
    assert decoder.program is not None
    with patch.object(decoder, "program", None):
        assert torch.equal(recorded.whole(prompts()[0]), found)


def test_experts_in_one_tensor_are_those_one_by_one(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Qwen 3.5's mixtures are published so; transformers writes them one by one."""
    copy = Path(shutil.copytree(checkpoint("qwen3.5-moe"), tmp_path / "stacked"))
    tensors = load_file(copy / "model.safetensors")
    for layer in range(4):
        mixture = f"model.layers.{layer}.mlp.experts"
        parts = {
            part: [tensors.pop(f"{mixture}.{expert}.{part}.weight") for expert in range(6)]
            for part in ("gate_proj", "up_proj", "down_proj")
        }
        pairs = zip(parts["gate_proj"], parts["up_proj"], strict=True)
        tensors[f"{mixture}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
        tensors[f"{mixture}.down_proj"] = torch.stack(parts["down_proj"])
    save_file(tensors, copy / "model.safetensors")
    tokens = prompts()[0]
    assert torch.equal(Engine(copy).whole(tokens), Engine(checkpoint("qwen3.5-moe")).whole(tokens))


@pytest.mark.parametrize("name", KIN)
def test_kin_are_one_program_and_the_same_however_they_are_cut_and_resumed(
    engine: Callable[..., Engine], name: str
) -> None:
    model = engine(name, torch.bfloat16)
    tokens = prompts()[0]
    right = model.whole(tokens)
    decoder: Any = model.decoder
    assert decoder.program is not None
    with patch.object(decoder, "program", None):
        assert torch.equal(model.whole(tokens), right)
    assert torch.equal(model.cut(tokens, [1, 64, 127], row=1), right)
    model.step({2: (0, tokens[:100]), 4: (0, prompts()[2])}, saves=[(2, 48, 1)])
    model.cut(tokens[:48], [], row=3)  # keys and values, which a hit would share
    model.poison([2, 3])
    assert torch.equal(model.cut(tokens, [90], row=3, start=48, snapshot=1), right[48:])


@pytest.mark.parametrize("name", [*NAMES, *KIN])
def test_half_precision_is_as_near_as_transformers(
    engine: Callable[..., Engine], checkpoint: Callable[..., Path], name: str
) -> None:
    """Both round; ours may be off by what theirs is, with a little room for luck."""
    right = torch.cat(right_logits(checkpoint(name), torch.float32))
    theirs = (torch.cat(right_logits(checkpoint(name), torch.bfloat16)) - right).pow(2).mean().sqrt()
    parts = engine(name, torch.bfloat16).step({row: (0, tokens) for row, tokens in enumerate(prompts())})
    ours = (torch.cat(list(parts.values())) - right).pow(2).mean().sqrt()
    assert ours < 1.25 * theirs


@pytest.fixture(scope="module")
def quantisable(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A checkpoint whose logits say something about the codes. Of the tiny Zamba 2's they do not: its sharp attention
    has no residual stream beside it, and each use of a block makes an error several times as large, bfloat16's too."""

    @cache
    def make(name: str) -> Path:
        if name != "zamba2":
            return checkpoint(name)
        copy = Path(shutil.copytree(checkpoint(name), tmp_path_factory.mktemp("calm") / name))
        tensors = load_file(copy / "model.safetensors")
        for part, factor in {"q_proj": 0.125, ".linear.": 0.05, "mamba.out_proj": 0.5}.items():
            tensors |= {name: factor * tensor for name, tensor in tensors.items() if part in name}
        save_file(tensors, copy / "model.safetensors")
        return copy

    return make


def rounded(x: Tensor) -> Tensor:
    """What int8 with a scale for each of the last dimension's rows makes of x, in float64."""
    codes, scales = quantize_rows(x)
    return codes.double() * scales.double().unsqueeze(-1)


@torch.inference_mode()
def logits_in_int8(directory: Path) -> Tensor:
    """What transformers computes in float64 when both sides of our int8 products are rounded."""
    name = json.loads((directory / "config.json").read_text())["architectures"][0]
    model = getattr(transformers, name).from_pretrained(directory, dtype=torch.float64)
    for label, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and label.rsplit(".", 1)[-1] not in SMALL:
            module.weight = torch.nn.Parameter(rounded(module.weight))
            module.register_forward_pre_hook(lambda _, given: (rounded(given[0]),))
    return torch.cat([model(tokens[None]).logits[0].float() for tokens in prompts()])


@pytest.mark.parametrize("name", [*NAMES, "mamba", "falcon-mamba", "zamba2"])
def test_int8_logits_are_transformers_in_int8(quantisable: Callable[[str], Path], name: str) -> None:
    """But for codes that float32 rounds to their neighbours; so they are about as far from what is right."""
    model = Engine(quantisable(name), torch.float32, "int8")
    ours = torch.cat([model.whole(tokens) for tokens in prompts()])
    assert spread(ours, logits_in_int8(quantisable(name))) < 0.05
    right = torch.cat(right_logits(quantisable(name), torch.float32))
    assert 1e-4 < spread(ours, right) < 0.25


@pytest.mark.parametrize("name", [*NAMES, "falcon-mamba", "zamba2"])
def test_int4_logits_are_near(quantisable: Callable[[str], Path], name: str) -> None:
    """Random weights of few inputs are hard on four bits."""
    right = torch.cat(right_logits(quantisable(name), torch.float32))
    model = Engine(quantisable(name), torch.float32, "int4")
    ours = torch.cat([model.whole(tokens) for tokens in prompts()])
    assert 1e-4 < spread(ours, right) < 0.7


def spread(ours: Tensor, right: Tensor) -> float:
    """The error's share of what logits differ by."""
    return float((ours - right).pow(2).mean().sqrt() / right.std())


@pytest.mark.parametrize("piece", [1, 63, 64, 65])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_where_a_prompt_is_cut_changes_nothing(
    engine: Callable[..., Engine], name: str, dtype: torch.dtype, piece: int
) -> None:
    tokens = prompts()[0]
    right = engine(name, dtype).whole(tokens)
    assert torch.equal(engine(name, dtype).cut(tokens, range(piece, len(tokens), piece), row=1), right)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_what_shares_a_step_changes_nothing(engine: Callable[..., Engine], name: str, dtype: torch.dtype) -> None:
    alone = [engine(name, dtype).whole(tokens) for tokens in prompts()]
    together = engine(name, dtype).step({4 - row: (0, tokens) for row, tokens in enumerate(prompts())})
    for row, right in enumerate(alone):
        assert torch.equal(together[4 - row], right)


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_one_step_go_on_from_unequal_places(engine: Callable[..., Engine], name: str) -> None:
    """A row that begins, one that goes on with a piece, and one that decodes."""
    model = engine(name)
    first, _, third, _, fifth = prompts()
    right = [model.whole(tokens) for tokens in (first, third, fifth)]
    model.step({1: (0, first[:70]), 2: (0, fifth[:99])})
    found = model.step({3: (0, third), 2: (99, fifth[99:]), 1: (70, first[70:])})
    assert torch.equal(found[1], right[0][70:])
    assert torch.equal(found[3], right[1])
    assert torch.equal(found[2], right[2][99:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_row_goes_on_from_a_snapshot(engine: Callable[..., Engine], name: str, dtype: torch.dtype) -> None:
    """Of several taken in the middle of one chunk, in another row, whose slot is anything by then."""
    model = engine(name, dtype)
    tokens = prompts()[0]
    right = model.whole(tokens)
    other = prompts()[2]
    model.step({2: (0, other), 0: (0, tokens[:100])}, saves=[(0, 64, 2), (0, 16, 0), (2, 16, 1)])
    model.attention.allocate(ROWS * 16)  # the cache of the row that is begun anew holds nothing
    for snapshot, computed in ((2, 64), (0, 16)):
        model.poison([3])
        model.cut(tokens[:computed], [], row=3)  # keys and values, which a hit would share
        model.poison([3])
        assert torch.equal(model.cut(tokens, [90], row=3, start=computed, snapshot=snapshot), right[computed:])
    model.poison([0, 1, 2])
    model.cut(other[:16], [], row=4)
    assert torch.equal(model.cut(other, [], row=4, start=16, snapshot=1), model.whole(other)[16:])


@pytest.mark.parametrize("name", NAMES)
def test_a_snapshot_is_not_written_by_the_row_that_began_with_it(engine: Callable[..., Engine], name: str) -> None:
    model = engine(name)
    tokens = prompts()[0]
    model.step({0: (0, tokens[:48])}, saves=[(0, 48, 0)])
    kept = [(windows[ROWS].clone(), matrices[ROWS].clone()) for windows, matrices in model.states.layers]
    model.cut(tokens, [], start=48, snapshot=0)
    for (windows, matrices), (window, matrix) in zip(model.states.layers, kept, strict=True):
        assert torch.equal(windows[ROWS], window)
        assert torch.equal(matrices[ROWS], matrix)


def test_tokens_without_their_state_are_refused(engine: Callable[..., Engine]) -> None:
    with pytest.raises(ValueError, match="row 3 begins after tokens whose state is not kept"):
        engine("qwen3.5").cut(prompts()[0], [], row=3, start=16, snapshot=-1)


def test_a_state_counts_its_bytes(checkpoint: Callable[..., Path]) -> None:
    """Three layers, each with a window of three inputs and four matrices of 16 x 24."""
    made: Any = Engine(checkpoint("qwen3.5"), torch.bfloat16)
    assert made.states.slot_bytes == 3 * (3 * (2 * 2 * 16 + 4 * 24) * 2 + 4 * 16 * 24 * 4)
