"""What LoRA adapters cost: `python -m charonia.bench.adapters --scratch ./scratch`.

So many streams over so many adapters, each of every linear layer, and the same streams without, in turns; then streams
that decode while another adapter is loaded. In one process, without a server. Adapters have random numbers.
"""

import json
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Literal

import msgspec
import numpy as np
import torch
from cyclopts import App
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import save_file

from ..engine.config import CacheConfig, EngineConfig, LoraConfig
from ..engine.worker.executor import StepFuture
from ..engine.worker.inline_executor import InlineExecutor
from ..kvcache.manager import KVCacheManager
from ..scheduler.config import SchedulerConfig
from ..scheduler.scheduler import Scheduler
from ..scheduler.sequence import SequenceRequest
from .command import Count
from .inline_loop import BLOCK, PRECISIONS, run_to_end
from .offline import prepare_checkpoint

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
    console = Console()
    with prepare_checkpoint(checkpoint, "qwen2.5-0.5b", scratch, console.print) as (model, folder):
        layers = linear_layers(model)
        paths = [folder / f"adapter-{rank}-{number}" for number in range(adapters + 1)]
        for number, path in enumerate(paths):
            if not path.exists():
                write_adapter(path, layers, number, r=rank)
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
