"""The model that is measured on a GPU: Llama's shapes with random weights made on the device, an executor of it, and
the plans of its steps."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..core.resolved_sampling import ResolvedSampling
from ..engine.checkpoint.build_context import BuildContext
from ..engine.checkpoint.code_forms import StoredForm
from ..engine.checkpoint.hf_checkpoint import Checkpoint
from ..engine.checkpoint.weights import TensorSlice
from ..engine.config import CacheConfig, EngineConfig, SpeculationConfig
from ..engine.cpu.matmul import GroupedRows
from ..engine.cpu.recurrent import RecurrenceShape
from ..engine.models.registry import NativeBuilder
from ..engine.worker.device_step_computer import DeviceStepComputer
from ..engine.worker.inline_executor import InlineExecutor
from ..engine.worker.loaded_rank import load_rank
from ..engine.worker.model_runner import ModelRunner
from ..scheduler.config import SchedulerConfig
from ..scheduler.plan import IntArray, NewSequence, StepPlan
from .checkpoint import LLAMA_ONE_BILLION
from .gpu_served import StreamLoads

LLAMA_ONE: dict[str, Any] = LLAMA_ONE_BILLION | {"architectures": ["LlamaForCausalLM"]}
LLAMA_EIGHT_BILLION: dict[str, Any] = LLAMA_ONE | {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "head_dim": 128,
    "intermediate_size": 14336,
    "rope_scaling": LLAMA_ONE_BILLION["rope_scaling"] | {"factor": 8.0},
    "tie_word_embeddings": False,
}
"""Llama-3.1-8B's config.json, as far as it shapes the computation."""

BLOCK = 16


class GpuWork(NamedTuple):
    """What is measured of a model."""

    name: str = "8B"
    config: dict[str, Any] = LLAMA_EIGHT_BILLION
    """The config.json that shapes it."""
    dtype: str = "bfloat16"
    batches: tuple[int, ...] = (1, 64, 256)
    """Rows of decode steps; the second number also decodes with drafts."""
    context: int = 1024
    """Tokens that each of those rows has."""
    attended: tuple[int, int] = (64, 2048)
    """Rows and context of the attention alone."""
    far: tuple[int, int, int] = (16, 64, 16384)
    """Rows of a decode step, and of the attention alone, in a long context, and that context."""
    prompt: int = 8192
    """Tokens of one prefill."""
    offline: int = 64
    """Sequences that generate `new` tokens each behind `new` others, without a server."""
    more_offline: int = 256
    """As many more by our engine alone."""
    new: int = 1000
    steps: int = 40
    """Of which the mean counts."""
    copied: int = 1 << 31
    """Bytes that are copied for the bandwidth."""
    multiplied: int = 8192
    """Rows and columns of the matrices that are multiplied for the peak."""
    drafts: int = 4
    """Of each row in a decode step."""
    experts: tuple[int, int, int, int] = (128, 8, 2048, 768)
    """How many there are, and of a token, and their sizes: Qwen3-30B-A3B's."""
    delta_rule: RecurrenceShape = RecurrenceShape(32, 16, 128, 128, 0, 2048, 4096)
    """Qwen3-Next's."""
    scan: RecurrenceShape = RecurrenceShape(128, 8, 128, 64, 9216, 8192, 0)
    """Nemotron-H 8B's."""
    latents: tuple[int, int, int] = (16, 512, 64)
    """Heads, numbers of a latent, and numbers that are rotated: DeepSeek V3's on one of eight ranks."""
    normed: tuple[int, int, int] = (32, 8, 128)
    """Heads of queries and of keys that have norms, and their size: Qwen3-8B's."""
    served: StreamLoads = StreamLoads({1: 2, 64: 128, 256: 256}, 1000, 300, 128256)
    """The requests of loads over HTTP."""
    frontends: tuple[int, ...] = (1, 4)
    """Of the servers that these are put to."""
    batch_invariance: bool = False
    """Whether products are so, too."""


SMALL = GpuWork("1B", LLAMA_ONE, context=256, served=StreamLoads({1: 4, 64: 128, 256: 512}, 128, 300, 128256))


class RandomWeights:
    """A `WeightSource` of a checkpoint that does not exist: numbers as `write_random` draws them, on the device."""

    files: list[Path] = []
    bytes = 1
    unread: list[str] = []
    quantization: str | None = None

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device

    def __contains__(self, name: str) -> bool:
        return True

    def form(self, piece: TensorSlice) -> StoredForm:
        return StoredForm("random", 8 * self._dtype.itemsize, plain=True)

    def read(self, piece: TensorSlice) -> Tensor:
        shape = (len(piece.row_range), *([piece.width] if len(piece.shape) == 2 else piece.shape[1:]))
        drawn = torch.randn(shape, dtype=self._dtype, device=self._device)
        return drawn.mul_(2 / piece.shape[-1] ** 0.5) if len(shape) == 2 else drawn.mul_(0.1).add_(1.0)

    def codes(self, piece: TensorSlice) -> GroupedRows:
        raise NotImplementedError("random weights are floats")

    def blocks(self, piece: TensorSlice) -> tuple[str, Tensor] | None:
        return None


class RandomBuilder(NativeBuilder):
    """Builds a decoder of a configuration whose weights are nowhere."""

    __slots__ = ()

    def _open_weights(self, context: BuildContext) -> RandomWeights:
        return RandomWeights(context.dtype, context.device)


class RandomExecutor(InlineExecutor):
    """An executor of such a decoder."""

    def __init__(self, work: GpuWork, device: str, rows: int, length: int, blocks: int) -> None:
        scheduler = SchedulerConfig(max_num_seqs=rows, max_num_batched_tokens=max(work.prompt, rows), ahead=1)
        config = EngineConfig(
            model="",
            device=device,
            dtype=work.dtype,
            max_model_len=length,
            batch_invariance=work.batch_invariance,
            scheduler=scheduler,
            cache=CacheConfig(block_size=BLOCK),
            speculation=SpeculationConfig(method="ngram", num_speculative_tokens=work.drafts),
        )
        super().__init__(config)
        checkpoint = Checkpoint(Path("random"), work.config)
        spec = checkpoint.spec
        builder = RandomBuilder(work.dtype, spec.max_position, spec.max_position, checkpoint, spec)
        self._rank = load_rank(config, builder=builder)
        self.allocate(blocks)


def decode_plans(rows: int, context: int, steps: int, blocks: int) -> Iterator[StepPlan]:
    """Steps of `rows` sequences that have `context` tokens, each with `blocks` blocks of its own."""
    every = np.arange(rows, dtype=np.int32)
    known = np.ones(context, np.int32)
    new = tuple(NewSequence(row, known, context - 1, ResolvedSampling()) for row in range(rows))
    appended = np.stack([every.repeat(blocks), np.arange(rows * blocks, dtype=np.int32)], 1)
    for step in range(steps):
        yield one_plan(
            step, context - 1 + step, 1, every, new if not step else (), appended if not step else appended[:0]
        )


def with_drafts(plan: StepPlan, count: int) -> StepPlan:
    """The plan with so many drafts a row, all of which were wrong when the next one begins."""
    drafts = np.full(len(plan.rows), count, np.int32)
    drafted, counts = np.ones(int(drafts.sum()), np.int32), plan.counts + drafts
    return plan._replace(counts=counts, num_logits=counts, drafts=drafts, drafted=drafted)


def mixed_plans(rows: int, context: int, steps: int, blocks: int, chunk: int) -> Iterator[StepPlan]:
    """The same beside a sequence of which each step computes `chunk` tokens of its prompt."""
    every, is_decoding = np.arange(rows + 1, dtype=np.int32), np.arange(rows + 1) < rows
    known, prompt = np.ones(context, np.int32), np.ones(chunk * (steps + 1), np.int32)
    new = [NewSequence(row, known, context - 1, ResolvedSampling()) for row in range(rows)]
    new.append(NewSequence(rows, prompt, 0, ResolvedSampling()))
    appended = np.stack([every.repeat(blocks), np.arange((rows + 1) * blocks, dtype=np.int32)], 1)
    for step in range(steps):
        starts = np.where(is_decoding, context - 1 + step, chunk * step).astype(np.int32)
        counts = np.where(is_decoding, 1, chunk).astype(np.int32)
        columns = every, starts, counts, is_decoding, is_decoding.astype(np.int32)
        first = step == 0
        added = appended if first else appended[:0]
        yield StepPlan(step, *columns, added, tuple(new) if first else (), np.zeros(0, np.int32))


def one_plan(
    step: int, start: int, count: int, rows: IntArray, new: Sequence[NewSequence], appended: IntArray
) -> StepPlan:
    """A step in which each row computes `count` tokens from `start` on, and samples the next."""
    ones = np.ones(len(rows), np.int32)
    columns = rows, start * ones, count * ones, ones.astype(np.bool_), ones
    return StepPlan(step, *columns, appended, tuple(new), np.zeros(0, np.int32))


def random_prompts(work: GpuWork, sequences: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    size = (sequences, work.new)
    prompts: list[list[int]] = torch.randint(1, work.config["vocab_size"], size, generator=generator).tolist()
    return prompts


@contextmanager
def without_graphs(runner: ModelRunner) -> Iterator[None]:
    """Steps are launched kernel by kernel here. Behind it graphs refer to the cache that there was before."""
    computer = runner.computer
    if not isinstance(computer, DeviceStepComputer):
        yield
        return
    graphs, computer.graphs = computer.graphs, None
    try:
        yield
    finally:
        computer.graphs = graphs


UNCOUNTED = 12
"""Steps that `time_steps` does not count: they compile kernels and capture graphs."""


def time_steps(runner: ModelRunner, plans: Sequence[StepPlan]) -> tuple[float, float]:
    """Seconds of a step, and of the host to launch it, where each begins before the last one's result is read."""
    runner.begin_step(plans[0])
    launching, began = 0.0, 0.0
    for at, plan in enumerate(plans[1:]):
        if at == UNCOUNTED:
            launching, began = 0.0, perf_counter()
        before = perf_counter()
        runner.begin_step(plan)
        launching += perf_counter() - before
        runner.finish_step()
    counted = len(plans) - 1 - UNCOUNTED
    seconds = (perf_counter() - began) / counted
    runner.finish_step()
    return seconds, launching / counted
