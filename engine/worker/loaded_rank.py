"""A rank built from a configuration: model, adapters, attention, rows and runner, and what it has room for.

Every executor builds its ranks here. Knows nothing of threads, processes, or how ranks reach each other.
"""

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import torch

from ...core.errors import InvalidArgument
from ...kvcache.layer_groups import ONE_GROUP, LayerGroups
from ...processes.host import usable_cores
from ..attention.layer_places import groups_of
from ..attention.selector import capable_backends
from ..checkpoint.build_context import BuildContext, Shard
from ..checkpoint.hf_checkpoint import open_checkpoint
from ..checkpoint.model_spec import DecoderShape, ModelSpec
from ..checkpoint.partition import can_share
from ..checkpoint.served_forms import ServedForms
from ..checkpoint.weights import dtype_name
from ..config import EngineConfig
from ..cpu import library
from ..gpu.few_rows import graph_timer
from ..gpu.graphs import CudaRecorder
from ..gpu.runtime import describe_gpu, use_dependent_launch
from ..kernel_choice import LEVEL_VARIABLE
from ..layers.recurrent_state import StateSlots
from ..models.interfaces import CheckpointBuilder
from ..models.registry import checkpoint_builder
from ..step_adapters import RankAdapter
from .cpu_step_computer import CpuStepComputer
from .device_step_computer import DeviceStepComputer
from .drafter_loading import check_draft_head, check_drafter, load_drafter
from .embedded_rows import ImagePlaces
from .executor import Capacity
from .image_files import ImageDirectorySettings, RankImages
from .model_runner import ModelRunner
from .model_setup import (
    WHOLE_MODEL,
    build_context,
    check_cache,
    check_products,
    create_attention,
    create_cross_cache,
    use_cpu_level,
)
from .rank_adapters import RankAdapters
from .rank_group import RankGroup
from .rank_memory import estimate_step_bytes, free_memory, measure_step_bytes
from .roofline import measure_roofline
from .row_states import RowStates
from .stage_link import StageLink
from .step_computer import RowStores, StepComputer
from .step_recording import record_steps

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedRank:
    """A rank that is ready to compute."""

    config: EngineConfig
    context: BuildContext
    shape: DecoderShape
    """The shape of the whole model."""
    groups: LayerGroups
    """The groups of the whole model's layers."""
    rows: RowStates
    runner: ModelRunner
    adapters: RankAdapters | None = None
    """None where none may be loaded."""
    served: ServedForms | None = None
    """What the matrices are kept as, where that is known."""

    @property
    def loaded_adapters(self) -> RankAdapters:
        if self.adapters is None:
            raise RuntimeError("this engine takes no adapters")
        return self.adapters

    def open_directory(self, settings: ImageDirectorySettings, rank: int = 0, ranks: int = 1) -> RankImages:
        """Move this rank's images from and to a directory; for who closes it before the rank."""
        return RankImages(settings.share(rank, ranks), *self.runner.places)

    def close(self) -> None:
        """End its threads; no step may follow."""
        self.runner.close()
        if self.adapters is not None:
            self.adapters.close()

    def capacity(self, neighbours: int = 1) -> Capacity:
        """Sizes of this rank, and the memory left for its cache when all `neighbours` that share it have loaded."""
        config = self.config
        computer = self.runner.computer
        states, encoded = computer.stores
        # A step takes memory beside weights and cache, and adapters may come.
        if isinstance(computer, DeviceStepComputer):
            step_bytes = measure_step_bytes(config, self.context, self.shape, self.runner, computer)
        else:
            step_bytes = estimate_step_bytes(config, self.shape)
        lora_bytes = 0 if config.lora is None else config.lora.max_bytes // config.parallel.world
        cross_bytes = 0 if encoded is None else encoded.bytes
        free_bytes = free_memory(self.context.device, neighbours, config) - step_bytes - lora_bytes
        if cross_bytes > max(free_bytes, 0):
            message = f"what {config.scheduler.max_num_seqs} sequences keep of the encoder's output takes {cross_bytes}"
            message += f" bytes, and {max(free_bytes, 0)} are free; lower max_num_seqs"
            raise InvalidArgument(message, field="max_num_seqs")
        on_cpu = self.context.device.type == "cpu"
        return Capacity(
            self.shape.vocab_size,
            self.context.max_positions,
            sum(attention.block_bytes for attention in self.runner.attentions),
            max(free_bytes - cross_bytes, 0),
            machine=self._machine() if on_cpu else describe_gpu(self.context.device),
            ahead=0 if on_cpu else 1,
            on_gpu=not on_cpu,
            state_bytes=0 if states is None else states.slot_bytes,
            groups=self.groups,
            latent=any(self.shape.kept(kind).values_in_keys for kind in self.shape.cached_attention),
            splits=isinstance(self.shape, ModelSpec)
            and can_share(self.shape, 2 * config.parallel.tensor, config.parallel.whole_experts),
            encoder=self.shape.encoder,
            cross_bytes=cross_bytes,
            dtype=dtype_name(self.context.dtype),
        )

    def _machine(self) -> str:
        """Cores, threads, and the bound that memory sets a rank that is alone, for people."""
        threads = torch.get_num_threads()
        if library.level() is None and LEVEL_VARIABLE not in os.environ:
            log.warning("%s; to compile them: %s", library.describe(), library.BUILD_COMMAND)
        machine = f"{usable_cores()}; {threads} thread{'s' if threads > 1 else ''}; {library.describe()}"
        quantization = self.context.quantization
        weight_format = dtype_name(self.context.dtype) if quantization == "none" else quantization
        bound = measure_roofline(self.shape, weight_format, self.served) if self.context.shard.is_whole else None
        return machine if bound is None else f"{machine}; {bound}"


def load_rank(
    config: EngineConfig,
    shard: Shard = WHOLE_MODEL,
    progress: Callable[[float], None] = lambda _: None,
    builder: CheckpointBuilder | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> LoadedRank:
    """Load this rank's share of the model, in the thread that will compute. `progress` gets the fraction of bytes
    read. A stage's ranks need equally many of torch's threads, and a `clock` that is the same at the same command.

    Raises:
        CheckpointError: a broken or unsupported checkpoint.
        InvalidArgument: it does not fit the checkpoint, its split or the machine.
    """
    if config.cpu_level != "auto":
        use_cpu_level(config)
    use_dependent_launch(config.dependent_launch)
    builder = builder or checkpoint_builder(open_checkpoint(config.model))
    check_cache(config, builder)
    block_size = config.cache.block_size
    context = build_context(config, builder, shard, progress)
    device = context.device
    if device.type != "cpu" and shard.group.size > 1:
        shard = shard._replace(group=RankGroup(shard.group))
        context = context._replace(shard=shard)
    link = None
    if device.type != "cpu" and shard.link is not None:
        link = StageLink(shard.link)
        context = context._replace(shard=shard._replace(link=link))
    if device.type == "cuda":
        torch.cuda.set_device(device)  # of the thread: kernels, streams and events go by it, not by tensors
    check_products(context)
    check_draft_head(config)
    capable_backends(config.attention, device, context.dtype, block_size, config.cache.dtype)
    decoder, shape, targets, served = builder.build(context)
    if config.lora is not None and targets is None:
        message = "enable_lora: this model is computed by transformers, where layers take no adapters"
        raise InvalidArgument(message, field="enable_lora")
    progress(1.0)
    local = shard.local_shape(shape)
    groups = ONE_GROUP
    if config.cache.layer_groups:
        groups = groups_of(shape, context.max_positions)
    if config.speculation is not None and config.speculation.computes and not groups.full:
        groups = ONE_GROUP  # what drafts has a cache of the first group's blocks, and may attend to all tokens
    attention = create_attention(config, context, local, groups)
    states = None
    if any(shape.states):
        states = StateSlots(local.states, config.scheduler.max_num_seqs, context.dtype, device)
    stores = RowStores(states, create_cross_cache(config, context, local, decoder))
    held: dict[str, RankAdapter] = {}
    lines = 0 if device.type == "cpu" else config.scheduler.max_num_seqs  # recorded steps read them in place
    images = ImagePlaces(shape.shifts_positions, shape.image_token)
    rows = RowStates(context.max_positions, block_size, device, held, lines, groups.total, images)
    adapters = None if config.lora is None or targets is None else RankAdapters(targets, config.lora, held, rows)
    draft = load_drafter(config, context, decoder, shape, rows) if shard.reports_results else None
    computer: StepComputer
    if device.type == "cpu":
        computer = CpuStepComputer(decoder, attention, rows, stores)
    else:
        computer = DeviceStepComputer(decoder, attention, rows, device, stores, link)
        if context.few_rows is not None:
            context.few_rows.choose(graph_timer(CudaRecorder(device), device))
        record_steps(config, context, computer, draft, CudaRecorder(device), clock)
    return LoadedRank(config, context, shape, groups, rows, ModelRunner(computer, rows, draft), adapters, served)


def check_rank_config(config: EngineConfig) -> str:
    """Refuse everything that `load_rank` would, short of reading weights; returns what only the weights can show, if
    anything. The devices of this machine are not looked at: the model may be served elsewhere.

    Raises:
        CheckpointError: as `load_rank`.
        InvalidArgument: the configuration does not fit the checkpoint.
    """
    builder = checkpoint_builder(open_checkpoint(config.model))
    check_cache(config, builder)
    context = build_context(msgspec.structs.replace(config, device="cpu"), builder)
    check_drafter(config)
    return builder.dry_run(context, config.parallel)
