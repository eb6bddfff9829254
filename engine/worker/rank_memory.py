"""The memory that a rank's steps take, and what is left for its cache."""

from collections.abc import Callable

import torch

from ...processes.host import available_memory, own_anonymous_memory
from ..checkpoint.build_context import BuildContext
from ..checkpoint.model_spec import DecoderShape
from ..config import EngineConfig
from ..gpu import runtime
from .device_step_computer import DeviceStepComputer
from .model_runner import ModelRunner


def estimate_step_bytes(config: EngineConfig, shape: DecoderShape) -> int:
    """Activations of a step's tokens, and logits of its rows or of a piece of a prompt (float32, three times: logits,
    probabilities, their sums)."""
    activations = config.scheduler.max_num_batched_tokens * (8 * shape.hidden_size + 4 * shape.intermediate_size) * 4
    return activations + config.most_sampled * shape.vocab_size * 12


def measure_step_bytes(
    config: EngineConfig, context: BuildContext, shape: DecoderShape, runner: ModelRunner, computer: DeviceStepComputer
) -> int:
    """The bytes of a GPU that the worst step of `runner` takes, and that recorded steps keep: the largest one's
    activations, and what comes out. The ranks of a split model, whose worst step is estimated, call this together. The
    step's block and states are not counted; the cache is to be allocated anew."""
    device = context.device
    scheduler = config.scheduler
    tokens = scheduler.max_num_batched_tokens
    adapted = config.lora is not None and runtime.serves(context.dtype, device)

    def compute_worst_step() -> None:
        computer.compute_worst_step(tokens, scheduler.max_num_seqs, config.most_sampled, adapted)

    runner.allocate(1)
    whole = context.shard.is_whole
    worst = peak_bytes(device, compute_worst_step) if whole else estimate_step_bytes(config, shape)
    peaks = sum(peak_bytes(device, graphs.compute_largest) for graphs in runner.all_graphs)
    kept = sum(graphs.bytes for graphs in runner.all_graphs)
    runner.free_cache()
    torch.cuda.empty_cache()  # nothing without a GPU
    return worst + peaks + kept


def peak_bytes(device: torch.device, compute: Callable[[], object]) -> int:
    """The memory that `compute` takes of a GPU and gives back, as torch reserves it."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_reserved(device)
    compute()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_reserved(device)
    torch.cuda.empty_cache()
    return peak - before


def free_memory(device: torch.device, neighbours: int, config: EngineConfig) -> int:
    """Bytes left to each of `neighbours`. Other replicas may be loading still, and other models have been promised
    memory: this engine has no more than was granted to it, nor than its share of a GPU, what its ranks have taken
    already included."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        granted, share = config.gpu_memory, config.cache.gpu_utilization
        if share is not None:
            granted = min(int(total * share), total if granted is None else granted)
        taken = torch.cuda.memory_reserved(device) if granted is not None else 0
    else:
        free = available_memory()
        granted = config.host_memory
        taken = own_anonymous_memory()
    return free // neighbours if granted is None else min(free // neighbours, granted // neighbours - taken)
