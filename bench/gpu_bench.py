"""Measures the engine on a CUDA device, row by row of a table: what the device allows, attention, steps, served over
HTTP, and offline beside transformers."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, partial
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from ..core.resolved_sampling import ResolvedSampling
from ..engine.attention.backend import CacheSpec
from ..engine.checkpoint.model_spec import LayerAttention
from ..engine.gpu import runtime
from ..engine.gpu.graphs import CudaRecorder
from ..kvcache.manager import KVCacheManager
from ..scheduler.config import SchedulerConfig
from ..scheduler.plan import NewSequence, StepPlan
from ..scheduler.scheduler import Scheduler
from ..scheduler.sequence import SequenceSpec
from .gpu_engine import (
    BLOCK,
    GpuWork,
    RandomExecutor,
    decode_plans,
    mixed_plans,
    one_plan,
    random_prompts,
    time_steps,
    with_drafts,
    without_graphs,
)
from .gpu_layers import LAYERS, LayerBench
from .gpu_report import PEAKS, Figure, Row
from .gpu_served import StepRates, served_figures, written_checkpoint
from .inline_loop import run_to_end
from .server_process import ServerAddress, own_server
from .step_trace import HOST, lane_microseconds, trace_step, write_picture


class GpuBench:
    """Measures `work` on `device`, in order of worth; peaks of the device first. `pictures`: the folder for those.
    `start`: a server over the arguments that it is given."""

    def __init__(
        self,
        work: GpuWork,
        device: str,
        pictures: Path,
        start: Callable[..., AbstractContextManager[ServerAddress]] = own_server,
    ) -> None:
        self.work = work
        self.device = torch.device(device)
        self.read = 1.0
        self.operations = 1.0
        self.pictures, self.start = pictures, start
        self.layers = LayerBench(work, self.device, self.kernel_seconds)
        self.rows = max(*work.batches, work.more_offline)
        far = work.far[2] + work.steps + 20
        self.length = max(work.prompt, 2 * work.new, 2 * work.context, far)
        self.decode_seconds: dict[int, float] = {}
        self.prompt_rate = 0.0

    def table(self, small: "GpuBench | None" = None, invariant: "GpuBench | None" = None) -> list[Row]:
        """All rows; `small`: another model, whose steps are measured because it is served; `invariant`: this one, whose
        products are batch-invariant."""
        work, (far_rows, far_attended, far) = self.work, self.work.far
        of_small = [] if small is None else small.served_rows(self)
        rows = [
            Row(PEAKS[0], 3, self.copy_bandwidth),
            Row(PEAKS[1], 3, self.matmul_peak),
            Row("attention, decode", 6, lambda: self.decode_attention(*work.attended)),
            Row("attention, prefill", 6, lambda: self.prefill_attention(work.prompt)),
            *self.step_rows(),
            Row("decode steps with what can be switched", 40, self.switched_steps),
            Row("decode steps with drafts", 10, lambda: self.decode_steps(work.batches[1], work.drafts)),
            Row("steps with parts of prompts", 10, self.mixed_steps),
            Row("layers with states", 10, lambda: self.layers.states(self.read)),
            Row("latents", 8, lambda: self.layers.latents(self.read, self.operations)),
            Row("experts", 20, lambda: self.layers.experts(self.read)),
            *(
                [
                    Row("products of few rows", 15, lambda: self.layers.few_rows(self.read)),
                    Row("norms of heads", 8, self.layers.head_norms),
                ]
                if self.dtype.itemsize == 2 and runtime.serves(self.dtype, self.device)
                else []
            ),
            Row("pictures of steps", 15, self.trace),
            *self.served_rows(None),
            *([] if invariant is None else invariant.step_rows_after(self)),
            *of_small,
            Row("attention in a long context", 8, lambda: self.decode_attention(far_attended, far)),
            Row("prefill attention of a long prompt", 8, lambda: self.prefill_attention(far)),
            Row("decode steps in a long context", 25, lambda: self.decode_steps(far_rows, context=far)),
            *(
                Row(f"attention over a cache in {kept}", 12, partial(self.coded_attention, kept))
                for kept in (["fp8", "int8"] if runtime.serves_fp8(self.dtype, self.device) else ["int8"])
            ),
            Row("offline", 15, lambda: self.offline(work.offline)),
            Row("transformers offline", 90, self.transformers_offline),
            Row("more sequences offline", 40, lambda: self.offline(work.more_offline)),
        ]
        if self.device.type == "cuda" and torch.cuda.device_count() > 1:
            rows.append(Row(f"{work.name} served by two ranks", 75, lambda: self.served(work.frontends[-1:], 2)))
        return rows

    def step_rows(self) -> list[Row]:
        """What a served model's steps are."""
        steps = [
            Row(f"{self.work.name} steps of {rows}", 12, partial(self.decode_steps, rows)) for rows in self.work.batches
        ]
        return [*steps, Row(f"{self.work.name} prefill", 8, self.prefill)]

    def served_rows(self, peaks: "GpuBench | None") -> list[Row]:
        """The model over HTTP; and its steps before, with another's `peaks`, if they are not measured anyway."""
        steps = self.step_rows() if peaks is None else self.step_rows_after(peaks)
        needs = (*PEAKS, *(row.name for row in steps))
        seconds = 55 * len(self.work.frontends) + 20
        served = Row(f"{self.work.name} served", seconds, lambda: self.served(self.work.frontends), needs)
        return [served] if peaks is None else [*steps, served]

    def step_rows_after(self, peaks: "GpuBench") -> list[Row]:
        def begin() -> Iterator[Figure]:
            peaks.release()
            self.read, self.operations = peaks.read, peaks.operations
            return iter(())

        first = Row(f"{self.work.name} begins", 0, begin)
        return [first, *(row._replace(needs=(*PEAKS, first.name)) for row in self.step_rows())]

    def copy_bandwidth(self) -> Iterator[Figure]:
        source = torch.ones(self.work.copied, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        self.read = 2 * source.nbytes / self.seconds(lambda: target.copy_(source))
        yield Figure("copy bandwidth", self.read / 1e9, "GB/s")

    def matmul_peak(self) -> Iterator[Figure]:
        size, dtype = self.work.multiplied, getattr(torch, self.work.dtype)
        left, right = (torch.randn(size, size, dtype=dtype, device=self.device) for _ in range(2))
        self.operations = 2 * size**3 / self.seconds(lambda: left @ right)
        yield Figure(f"{self.work.dtype} products", self.operations / 1e12, "TFLOP/s")

    def decode_attention(self, rows: int, context: int, kept: str = "auto") -> Iterator[Figure]:
        """Of codes, the bytes that are to be read are theirs and their scales'."""
        seconds, token_bytes = self.attention(rows, context - 1, 1, kept)
        share = rows * context * token_bytes / seconds / self.read
        name = f"attention, decode of {rows} at {context:,}{_told(kept)}"
        yield Figure(name, 1e6 * seconds, "us", share, "bandwidth", 0.8 if kept == "auto" else None)

    def prefill_attention(self, tokens: int, kept: str = "auto") -> Iterator[Figure]:
        config = self.work.config
        seconds, _ = self.attention(1, 0, tokens, kept)
        share = 2 * tokens**2 * config["num_attention_heads"] * config["head_dim"] / seconds / self.operations
        name = f"attention, prefill of {tokens:,}{_told(kept)}"
        yield Figure(name, 1e6 * seconds, "us", share, "peak", 0.45 if kept == "auto" else None)

    def coded_attention(self, kept: str) -> Iterator[Figure]:
        yield from self.decode_attention(*self.work.attended, kept)
        yield from self.decode_attention(*self.work.far[1:], kept)
        yield from self.prefill_attention(self.work.prompt, kept)

    def switched_steps(self) -> Iterator[Figure]:
        """Decode steps with few rows by cuBLAS alone and by the kernel alone, and with dependent launches."""
        few_rows = self.executor.rank.context.few_rows
        if few_rows is not None:
            for by_kernel, how in ((False, "cuBLAS"), (True, "the kernel")):
                with few_rows.forced(by_kernel):
                    yield from self.decode_steps(1, how=f", few rows by {how}")
        if runtime.can_launch_dependently(self.device):
            runtime.use_dependent_launch(True)
            try:
                for rows in self.work.batches:
                    yield from self.decode_steps(rows, how=", dependent launches")
            finally:
                runtime.use_dependent_launch(False)

    def decode_steps(self, rows: int, drafts: int = 0, context: int | None = None, how: str = "") -> Iterator[Figure]:
        """Steps that are begun one ahead, each with so many drafts a row; the first ones capture what is recorded.
        `how`: what is switched."""
        work, executor, context = self.work, self.executor, context or self.work.context
        blocks = -(-(context + work.steps + 20 + drafts) // BLOCK)
        self.allocate(rows * blocks)
        plans = [*decode_plans(rows, context, work.steps + 14, blocks)]
        if drafts:
            plans = [with_drafts(plan, drafts) for plan in plans]
        runner = executor.rank.runner
        graphs = runner.computer.graphs
        if graphs is not None:
            graphs.capture_now(rows * (1 + drafts), context + work.steps + 14 + drafts, 1 + drafts)
        eager = 0 if graphs is None else graphs.eager_steps.total()
        seconds, launching = time_steps(runner, plans)
        bound = (self.weight_bytes + rows * context * self.token_bytes) / self.read
        bar = None if drafts or how or context > work.context else 0.78 if rows == 1 else 0.65
        name = f"{work.name} decode step of {rows} at {context:,}" + (f" with {drafts} drafts each" if drafts else how)
        more = f"launched in {1e3 * launching:.2f} ms of the host"
        if graphs is not None and (launched := graphs.eager_steps.total() - eager):
            more += f", {launched} steps kernel by kernel"
        if not drafts and not how and context == work.context:
            self.decode_seconds[rows] = seconds
        yield Figure(name, 1e3 * seconds, "ms", bound / seconds, "bandwidth", bar, more)

    def mixed_steps(self) -> Iterator[Figure]:
        """Steps with a part of a prompt beside rows that decode, launched kernel by kernel and as a graph."""
        runner = self.executor.rank.runner
        with without_graphs(runner):
            yield self.mixed_step(", launched")
        if runner.computer.graphs is not None:
            yield self.mixed_step()

    def mixed_step(self, how: str = "") -> Figure:
        work, runner = self.work, self.executor.rank.runner
        rows, chunk, steps = work.batches[1], max(work.prompt // 32, 1), work.steps // 4 + 14
        blocks = -(-max(work.context + steps, chunk * (steps + 1)) // BLOCK)
        self.allocate((rows + 1) * blocks)
        seconds, launching = time_steps(runner, [*mixed_plans(rows, work.context, steps, blocks, chunk)])
        name = f"{work.name} step of {rows} and {chunk:,} tokens of a prompt{how}"
        return Figure(name, 1e3 * seconds, "ms", more=f"launched in {1e3 * launching:.2f} ms of the host")

    def prefill(self) -> Iterator[Figure]:
        tokens, executor = self.work.prompt, self.executor
        blocks = -(-tokens // BLOCK)
        self.allocate(blocks)
        sequence = NewSequence(0, np.ones(tokens, np.int32), 0, ResolvedSampling())
        appended = np.stack([np.zeros(blocks), np.arange(blocks)], 1).astype(np.int32)
        whole = one_plan(0, 0, tokens, np.zeros(1, np.int32), (sequence,), appended)
        seconds = self.seconds(lambda: executor.rank.runner.run_step(whole), 3)
        spec = executor.rank.shape
        products = 2 * tokens * (self.weight_bytes / self.dtype.itemsize - spec.vocab_size * spec.hidden_size)
        attention = tokens**2 * spec.attended_numbers
        share = (products + attention) / seconds / self.operations
        self.prompt_rate = tokens / seconds
        yield Figure(f"{self.work.name} prefill of {tokens:,}", 1e3 * seconds, "ms", share, "peak", 0.6)

    def trace(self) -> Iterator[Figure]:
        """A decode step, and one that computes a part of a prompt, too; kernel by kernel."""
        rows, context, runner = self.work.batches[1], self.work.context, self.executor.rank.runner
        chunk = min(context, self.work.prompt // 8)
        blocks = -(-max(context + 4, 4 * chunk) // BLOCK)
        for name, plans in (
            (f"decode step of {rows}", decode_plans(rows, context, 4, blocks)),
            (f"step of {rows} and {chunk:,} tokens of a prompt", mixed_plans(rows, context, 4, blocks, chunk)),
        ):
            self.allocate((rows + 1) * blocks)
            if runner.computer.graphs is not None:
                runner.computer.graphs.capture_now(rows, context + 4)
            runner.run_step(next(plans))

            def compute(plans: Iterator[StepPlan] = plans) -> None:
                runner.run_step(next(plans))

            spans = trace_step(compute, self.device)
            stem = name.split(" and ")[0].replace(" ", "-") + ("-mixed" if "prompt" in name else "")
            file = self.pictures / f"gpu-{stem}.svg"
            title = f"{self.work.name} {name} at {context:,}"
            write_picture(spans, title, file)
            lanes = lane_microseconds(spans)
            lane_times = ", ".join(f"{lane} {microseconds / 1e3:.2f}" for lane, microseconds in lanes.items())
            kernels = sum(microseconds for lane, microseconds in lanes.items() if lane != HOST)
            yield Figure(f"{title}: kernels at work", kernels / 1e3, "ms", more=f"{lane_times} ms; {file.name}")

    def served(self, frontends_of: Sequence[int], ranks: int = 1) -> Iterator[Figure]:
        """The model in servers of its own with so many frontends, over a checkpoint that is made for it."""
        work = self.work
        self.release()
        rates = StepRates(self.prompt_rate, self.decode_seconds)
        name = work.name if ranks == 1 else f"{work.name} by {ranks} ranks"
        complete = ranks == 1 and self.prompt_rate > 0 and rates.decode_seconds.keys() >= work.served.requests.keys()
        config = {name: value for name, value in work.config.items() if name != "architectures"}
        with written_checkpoint(config, str(self.device)) as directory:
            self.empty_cache()
            for frontends in frontends_of:
                flags = ["--device", self.device.type, "--max-num-seqs", str(max(work.served.requests))]
                if ranks > 1:
                    flags += ["--tensor-parallel-size", str(ranks)]
                began = perf_counter()
                with self.start(str(directory), *flags, "--frontends", str(frontends)) as place:
                    yield Figure(f"{name} server ready, frontends: {frontends}", perf_counter() - began, "s")
                    yield from served_figures(name, place, work.served, rates if complete else None, frontends)

    def offline(self, sequences: int) -> Iterator[Figure]:
        blocks = self.allocate(sequences * -(-2 * self.work.new // BLOCK))
        most = max(self.work.prompt, sequences)
        rule = SchedulerConfig(max_num_seqs=sequences, max_num_batched_tokens=most, max_model_len=self.length, ahead=1)
        scheduler = Scheduler(rule, KVCacheManager(blocks, BLOCK, prefix_caching=False))
        specs = [
            SequenceSpec(key=key, prompt=np.array(prompt, np.int32), max_tokens=self.work.new)
            for key, prompt in enumerate(random_prompts(self.work, sequences))
        ]
        seconds = run_to_end(scheduler, self.executor, specs).seconds
        yield Figure(f"offline, {sequences} sequences", sequences * self.work.new / seconds, "tokens/s")

    def transformers_offline(self) -> Iterator[Figure]:
        """Its continuous batching, with the attention that it chooses."""
        self.release()
        transformers: Any = import_module("transformers")
        fields = {name: value for name, value in self.work.config.items() if name != "architectures"}
        config: Any = transformers.AutoConfig.for_model(**fields)
        with self.device:
            model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=self.dtype).eval()
        new = self.work.new
        generation = transformers.GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
        began = perf_counter()
        prompts = random_prompts(self.work, self.work.offline)
        answers = model.generate_batch(prompts, generation_config=generation, progress_bar=False)
        made = sum(len(answer.generated_tokens) for answer in answers.values())
        name = f"transformers' continuous batching, {self.work.offline} sequences"
        yield Figure(name, made / (perf_counter() - began), "tokens/s")

    def attention(self, rows: int, start: int, count: int, kept: str) -> tuple[float, float]:
        """See `LayerBench.attention`: of the model's heads."""
        config = self.work.config
        sizes = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"], BLOCK
        spec = CacheSpec((LayerAttention(),) * LAYERS, *sizes, self.dtype, self.device, kept)
        return self.layers.attention(spec, rows, start, count)

    @cached_property
    def executor(self) -> RandomExecutor:
        return RandomExecutor(self.work, str(self.device), self.rows, self.length, 1)

    @cached_property
    def most_blocks(self) -> int:
        """What there is room for beside weights and the worst step."""
        capacity = self.executor.rank.capacity()
        return int(0.95 * capacity.free_bytes) // capacity.block_bytes

    def allocate(self, blocks: int) -> int:
        """Make a cache of so many blocks, or of as many as fit; an earlier one is freed first."""
        self.executor.allocate(1)
        allocated = min(blocks, self.most_blocks)
        self.executor.allocate(allocated)
        return allocated

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.work.dtype)
        return dtype

    @property
    def weight_bytes(self) -> int:
        """Of the matrices that a step reads whole."""
        spec = self.executor.rank.shape
        attention = 2 * spec.hidden_size * (spec.heads + spec.kv_heads) * spec.head_dim
        layer = attention + 3 * spec.hidden_size * spec.intermediate_size
        return (spec.layers * layer + spec.vocab_size * spec.hidden_size) * self.dtype.itemsize

    @property
    def token_bytes(self) -> int:
        """Of a token's keys and values."""
        return self.executor.rank.runner.computer.attention.block_bytes // BLOCK

    def release(self) -> None:
        """Give the model's memory back; whoever asks for the executor makes another."""
        if "executor" in self.__dict__:
            self.executor.close()
            del self.executor
            self.__dict__.pop("most_blocks", None)
        self.empty_cache()

    def empty_cache(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def kernel_seconds(self, compute: Callable[[], object]) -> float:
        """Of the kernels that a call launches, without the time that the host takes to launch them."""
        if self.device.type != "cuda":
            return self.seconds(compute)
        compute()  # which compiles them

        def launch() -> None:
            compute()

        return self.seconds(CudaRecorder(self.device)(launch))  # a failed capture leaves nothing to later rows

    def seconds(self, compute: Callable[[], object], times: int = 10) -> float:
        """Of one call, the mean of `times` behind each other, after two to warm up."""
        for _ in range(2):
            compute()
        self.wait()
        began = perf_counter()
        for _ in range(times):
            compute()
        self.wait()
        return (perf_counter() - began) / times

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def _told(kept: str) -> str:
    return "" if kept == "auto" else f", cache in {kept}"
