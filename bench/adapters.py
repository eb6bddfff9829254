"""What LoRA adapters cost. They have random numbers, and change every linear layer.

    python -m charonia.bench.adapters --scratch ./scratch
    python -m charonia.bench.adapters serve --scratch ./scratch

The first: so many streams over so many adapters, and the same streams without, in turns; then streams that decode while
another adapter is loaded; in one process, without a server. The second: streams of a server, with an adapter, while
another is loaded and unloaded over HTTP, and without, in turns.
"""

import json
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from threading import Event
from time import perf_counter
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import torch
from cyclopts import App
from safetensors import safe_open
from safetensors.torch import save_file

from ..core.errors import InvalidArgument, Unavailable
from ..engine.config import CacheConfig, EngineConfig, LoraConfig
from ..engine.worker.executor import StepFuture
from ..engine.worker.inline_executor import InlineExecutor
from ..kvcache.manager import KVCacheManager
from ..planning.requests import uniform_jobs
from ..scheduler.config import SchedulerConfig
from ..scheduler.scheduler import Scheduler
from ..scheduler.sequence import SequenceRequest
from .command import Count, exit_on_error, report_console
from .inline_loop import BLOCK, PRECISIONS, run_to_end
from .load.driver import OK, LoopMode, RequestOptions
from .load.figures import inter_token_times
from .load.plan import Prompts
from .load.worker import LoadRun, LoadTarget, run
from .offline import prepare_checkpoint
from .server_process import ServerAddress, fetch, own_server

CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "bias": "none", "target_modules": "all-linear"}
PROMPT = 32

app = App(name="python -m charonia.bench.adapters", help=__doc__)


def linear_layers(checkpoint: Path, names: tuple[str, ...] = ("proj",)) -> dict[str, tuple[int, int]]:
    """The paths of a checkpoint's linear layers that take adapters and end as one of `names` does, with the shapes of
    their weights. The checkpoint is one safetensors file."""
    found: dict[str, tuple[int, int]] = {}
    with safe_open(checkpoint / "model.safetensors", "pt") as file:
        for tensor in file.keys():  # noqa: SIM118 (it is no dictionary)
            path = tensor.removesuffix(".weight")
            if path != tensor and path.endswith(names):
                outputs, inputs = file.get_slice(tensor).get_shape()
                found[path] = outputs, inputs
    return found


def write_adapter(
    directory: Path,
    layers: Mapping[str, tuple[int, int]],
    seed: int = 0,
    *,
    dtype: torch.dtype = torch.float32,
    ranks: Mapping[str, int] = {},
    **changes: Any,
) -> Path:
    """A random adapter of `layers` as PEFT saves it, strong enough to change what is said. `ranks`: of
    layers whose rank is not `r`. `changes`: of CONFIG."""
    config, generator = CONFIG | changes, torch.Generator().manual_seed(seed)
    tensors = {}
    for path, (outputs, inputs) in layers.items():
        rank = ranks.get(path, config["r"])
        a, b = (torch.randn(shape, generator=generator) for shape in ((rank, inputs), (outputs, rank)))
        tensors[f"base_model.model.{path}.lora_A.weight"] = (a / inputs**0.5).to(dtype)
        tensors[f"base_model.model.{path}.lora_B.weight"] = (b * 0.2).to(dtype)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


class AdapterBench:
    """An engine for `streams` at a time."""

    def __init__(self, config: EngineConfig, streams: int, new: int) -> None:
        self._streams, self._new = streams, new
        self.executor = InlineExecutor(config)
        self.executor.load(lambda phase, fraction: None)
        blocks = streams * -(-(PROMPT + new) // BLOCK)
        self.executor.allocate(blocks)
        rule = SchedulerConfig(max_num_seqs=streams, max_model_len=PROMPT + new, ahead=1)
        self._scheduler = Scheduler(rule, KVCacheManager(blocks, BLOCK, prefix_caching=False))

    def load(self, path: Path) -> str:
        """The digest."""
        return self.executor.load_adapter(str(path)).result().digest

    def requests(self, digests: list[str]) -> Iterator[SequenceRequest]:
        """One for each stream, which has the digests in turn."""
        random = np.random.default_rng(7)
        for key in range(self._streams):
            prompt = random.integers(1, 1000, PROMPT).astype(np.int32)
            adapter = digests[key % len(digests)]
            yield SequenceRequest(key=key, prompt=prompt, max_tokens=self._new, adapter=adapter)

    def tokens_a_second(self, digests: list[str]) -> float:
        outcome = run_to_end(self._scheduler, self.executor, self.requests(digests))
        return outcome.generated / outcome.seconds

    def gaps(self, digests: list[str], load: Path | None) -> list[float]:
        """Seconds between the tokens of all streams, from the tenth token on; then `load` begins, if there is one, and
        when it is there, it is forgotten and loaded again."""
        for request in self.requests(digests):
            self._scheduler.add(request)
        flying, ends, loading, held = deque[StepFuture](), list[float](), None, set(digests)
        while self._scheduler.has_work:
            if load is not None and len(ends) >= 10 and (loading is None or loading.done()):
                if loading is not None and loading.result().digest not in held:
                    self.executor.unload_adapter(loading.result().digest)
                loading = self.executor.load_adapter(str(load))
            while plan := self._scheduler.schedule():
                flying.append(self.executor.execute(plan))
            self._scheduler.apply(flying.popleft().result())
            ends.append(perf_counter())
        if loading is not None:
            loading.result()
        return np.diff(ends[10:]).tolist()


def prepare_adapters(checkpoint: Path, folder: Path, rank: int, count: int) -> list[Path]:
    """Adapters of all linear layers; those that are in the folder already are kept."""
    paths = [folder / f"adapter-{rank}-{number}" for number in range(count)]
    for number, path in enumerate(paths):
        if not path.exists():
            write_adapter(path, linear_layers(checkpoint), number, r=rank)
    return paths


class StreamGaps(NamedTuple):
    """Milliseconds between tokens: the p99 of all streams', and that of the stream whose p99 is longest. `loads`: how
    often an adapter was loaded meanwhile."""

    together: float
    worst: float
    loads: int


def stream_gaps(place: ServerAddress, adapter: str, streams: int, new: int, load: Path | None) -> StreamGaps:
    """Of streams with `adapter`, behind the first ten gaps: by then all of them decode. `load` is loaded and unloaded
    over HTTP all the time, if there is one.

    Raises:
        InvalidArgument: a stream has no more than ten gaps.
        Unavailable: a stream failed.
        OSError: an adapter was not loaded, or not unloaded.
    """
    asked = LoadTarget(
        host=place.host, port=place.http_port, door="completions", manner=RequestOptions(adapter, counted=False)
    )
    work = LoadRun(
        target=asked,
        jobs=uniform_jobs([0.0] * streams, PROMPT, new),
        prompts=Prompts(),
        pace=LoopMode(concurrency=streams),
    )
    ended = Event()
    with ThreadPoolExecutor(1) as thread:
        loads = thread.submit(_load_again, place, load, ended)
        try:
            records = [record for outcome in run(work) for record in outcome.records]
        finally:
            ended.set()
    if failed := {record.status for record in records if record.status != OK}:
        raise Unavailable(f"streams ended with {', '.join(failed)}")
    gaps = [inter_token_times(record)[10:] for record in records]
    if not all(gaps):
        raise InvalidArgument(f"{new} new tokens came in too few pieces: ask for more")
    each = [1e3 * float(np.percentile(own, 99)) for own in gaps]
    together = 1e3 * float(np.percentile(np.concatenate(gaps), 99))
    return StreamGaps(together, max(each), loads.result())


def _load_again(place: ServerAddress, path: Path | None, ended: Event) -> int:
    loads = 0
    while path is not None and not ended.is_set():
        fetch(place, "/v1/load_lora_adapter", {"lora_name": "another", "lora_path": path.name})
        fetch(place, "/v1/unload_lora_adapter", {"lora_name": "another"})
        loads += 1
    return loads


@app.command
def serve(
    *,
    checkpoint: Path | None = None,
    scratch: Path | None = None,
    precision: Literal["bf16", "fp32", "int8", "int4"] = "int8",
    streams: Count = 16,
    rank: Count = 16,
    new: Count = 128,
    turns: Count = 3,
) -> None:
    """Print what loading adapters over HTTP does to the time between tokens of a server's streams.

    Parameters
    ----------
    checkpoint
        Directory of a checkpoint in one file; by default random weights of Qwen2.5-0.5B's shape.
    scratch
        Where what is made is kept; by default nothing is.
    precision
        In which matrices are kept.
    streams
        At a time, all with one adapter.
    rank
        Of both adapters.
    new
        Tokens of each stream.
    turns
        How often each is measured, one after the other.
    """
    console, ratios = report_console(), []
    with exit_on_error(), prepare_checkpoint(checkpoint, "qwen2.5-0.5b", scratch, console.print) as (model, folder):
        used, another = prepare_adapters(model, folder, rank, 2)
        kept = [f"--{name}={value}" for name, value in PRECISIONS[precision].items()]
        flags = ("--enable-lora", "--lora-modules", f"used={used}", "--allow-runtime-lora", f"--lora-root={folder}")
        with own_server(str(model), *kept, *flags) as place:
            for _ in range(turns):
                quiet, loud = (stream_gaps(place, "used", streams, new, path) for path in (None, another))
                ratios.append((loud.together / quiet.together, loud.worst / quiet.worst))
                said = f"p99 between tokens {quiet.together:.0f} ms, of the worst stream {quiet.worst:.0f} ms; "
                console.print(f"{said}beside {loud.loads} loads {loud.together:.0f} ms and {loud.worst:.0f} ms")
    together, worst = (median(each) for each in zip(*ratios, strict=True))
    console.print(f"{streams} streams, {precision}: {together:.2f} of without, the worst stream {worst:.2f}")


@app.default
def main(
    *,
    checkpoint: Path | None = None,
    scratch: Path | None = None,
    precision: Literal["bf16", "fp32", "int8", "int4"] = "int8",
    streams: Count = 16,
    adapters: Count = 8,
    rank: Count = 16,
    new: Count = 48,
    turns: Count = 3,
) -> None:
    """Print tokens a second with adapters over those without, and what loading one does to the time between tokens.

    Parameters
    ----------
    checkpoint
        Directory of a checkpoint in one file; by default random weights of Qwen2.5-0.5B's shape.
    scratch
        Where what is made is kept; by default nothing is.
    precision
        In which matrices are kept.
    streams
        Sequences at a time.
    adapters
        Different ones among them.
    rank
        Of each.
    new
        Tokens of each sequence.
    turns
        How often each is measured, one after the other.
    """
    console = report_console()
    with prepare_checkpoint(checkpoint, "qwen2.5-0.5b", scratch, console.print) as (model, folder):
        paths = prepare_adapters(model, folder, rank, adapters + 1)
        plain = EngineConfig(model=str(model), device="cpu", cache=CacheConfig(block_size=BLOCK), lora=LoraConfig())
        bench = AdapterBench(msgspec.structs.replace(plain, **PRECISIONS[precision]), streams, new)
        digests = [bench.load(path) for path in paths[:-1]]
        shares = []
        for _ in range(turns):
            without, with_adapters = bench.tokens_a_second([""]), bench.tokens_a_second(digests)
            shares.append(with_adapters / without)
            console.print(f"{precision}: {without:.1f} tokens/s, with adapters {with_adapters:.1f}, {shares[-1]:.2f}")
        console.print(f"{streams} streams over {adapters} adapters of rank {rank}: {median(shares):.2f} of without")
        quiet, loading = (1e3 * float(np.percentile(bench.gaps(digests, path), 99)) for path in (None, paths[-1]))
        console.print(f"p99 between tokens {quiet:.0f} ms, while adapters load {loading:.0f} ms, {loading / quiet:.2f}")
        bench.executor.close()


if __name__ == "__main__":
    app()
