"""The memory that a rank's steps take, and what is left for its cache."""

from collections.abc import Callable
from traceback import clear_frames

import torch

from ...core.errors import Unavailable
from ...processes.host import available_memory, own_anonymous_memory
from ..checkpoint.build_context import BuildContext
from ..checkpoint.model_spec import DecoderShape
from ..config import EngineConfig
from ..gpu import runtime
from .device_step_computer import DeviceStepComputer
from .model_runner import ModelRunner
from .rank_group import PeerLost, RankGroup


def estimate_step_bytes(config: EngineConfig, shape: DecoderShape) -> int:
    """Activations of a step's tokens, and logits of its rows or of a piece of a prompt (float32, three times: logits,
    probabilities, their sums)."""
    activations = config.scheduler.max_num_batched_tokens * (8 * shape.hidden_size + 4 * shape.intermediate_size) * 4
    return activations + config.most_sampled * shape.vocab_size * 12


def measure_step_bytes(
    config: EngineConfig, context: BuildContext, shape: DecoderShape, runner: ModelRunner, computer: DeviceStepComputer
) -> int:
    """The bytes of a GPU that the worst step of `runner` takes, and that recorded steps keep: the largest one's
    activations, and what comes out. The ranks of a stage call this together, and compute alone; a stage's worst step
    is estimated. The step's block and states are not counted; the cache is to be allocated anew.

    Raises:
        Unavailable: a step takes more memory than there is.
        PeerLost: another rank could not compute its steps.
    """
    device = context.device
    scheduler = config.scheduler
    tokens = scheduler.max_num_batched_tokens
    adapted = config.lora is not None and runtime.serves(context.dtype, device)

    def compute_worst_step() -> None:
        computer.compute_worst_step(tokens, scheduler.max_num_seqs, config.most_sampled, adapted)

    def measure() -> int:
        runner.allocate(1)
        in_stages = context.shard.link is not None
        worst = estimate_step_bytes(config, shape) if in_stages else peak_bytes(device, compute_worst_step)
        peaks = sum(peak_bytes(device, graphs.compute_largest) for graphs in runner.all_graphs)
        return worst + peaks + sum(graphs.bytes for graphs in runner.all_graphs)

    ranks = context.shard.group
    try:
        measured = _measure_among(ranks, device, measure) if isinstance(ranks, RankGroup) else measure()
    except torch.OutOfMemoryError as error:
        message = f"the largest steps cannot be computed beside the weights: {str(error).splitlines()[0]} Lower "
        message += f"max_num_batched_tokens ({tokens}) or max_num_seqs ({scheduler.max_num_seqs}), or free the GPU"
        raise Unavailable(message) from error
    runner.free_cache()
    torch.cuda.empty_cache()  # nothing without a GPU
    return measured


def _measure_among(ranks: RankGroup, device: torch.device, measure: Callable[[], int]) -> int:
    """What `measure` returns, which each rank does alone. All raise where one has: its own error, or `PeerLost`. Then
    the ranks are connected for what steps exchange, so that memory which that takes is no longer free."""
    failure: Exception | None = None
    measured = 0
    try:
        with ranks.alone():
            measured = measure()
    except Exception as error:
        failure = error
        clear_frames(error.__traceback__)  # what they hold of the device's memory is wanted to say so
    everyone = ranks.agree(failure is None, device)
    if failure is not None:
        raise failure
    if not everyone:
        raise PeerLost("another rank could not compute its largest steps")
    ranks.connect()
    return measured


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
