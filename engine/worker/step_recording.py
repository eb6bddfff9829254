"""Which steps of a rank are recorded as CUDA graphs."""

import logging
import time
from collections.abc import Callable

from ..attention.backend import AttentionBackend
from ..checkpoint.build_context import BuildContext
from ..config import EngineConfig
from ..gpu import runtime
from ..gpu.graph_buckets import GraphBuckets
from ..gpu.graphs import Recorder, StepGraphs
from ..models.interfaces import Decoder
from ..models.native_decoder import NativeDecoder
from .device_step_computer import DeviceStepComputer
from .draft_model import DraftModel
from .rank_group import RankGroup
from .step_drafter import StepDrafter

log = logging.getLogger(__name__)


def record_steps(
    config: EngineConfig,
    context: BuildContext,
    computer: DeviceStepComputer,
    draft: StepDrafter | None,
    record: Recorder,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Have a rank's decode steps, steps with short parts of prompts, and a draft model's passes recorded by `record` if
    they can be. Rows with drafts have as many places as the attention takes, and adapters
    are in it where kernels add them. `clock`: with several ranks the same on all of them."""
    if config.enforce_eager:
        log.info("steps are computed without CUDA graphs: enforce_eager")
        return
    rows = config.scheduler.max_num_seqs
    adapters = 0
    if config.lora is not None and runtime.serves(context.dtype, context.device):
        adapters = config.lora.max_loras
    obstacle = _unrecordable(computer.decoder, computer.attention)
    if obstacle is None:
        most = min(1 + config.most_drafts, computer.attention.recordable_places)
        prompts = 0
        if computer.attention.records_prompts:
            prompts = min(config.graph_prompt_tokens, config.scheduler.max_num_batched_tokens)
        buckets = GraphBuckets.of_limits(rows, context.max_positions, most, adapters, prompts)
        recorder = record
        if computer.link is not None:
            computer.link.most_places = buckets.places
            recorder = computer.link.recorder(record)
        group = context.shard.group
        ranks = group if isinstance(group, RankGroup) else None
        computer.graphs = StepGraphs(computer.compute_static, buckets, context.device, recorder, clock, ranks)
    else:
        log.info("steps are computed without CUDA graphs: %s", obstacle)
    if not isinstance(draft, DraftModel):
        return
    obstacle = _unrecordable(draft.decoder, draft.attention)
    if obstacle is None:
        most = min(2, draft.attention.recordable_places)  # after drafts that were all right it lacks two tokens
        buckets = GraphBuckets.of_limits(rows, draft.longest, most)
        draft.graphs = StepGraphs(draft.compute_static, buckets, context.device, record)
    else:
        log.info("a draft model's passes are computed without CUDA graphs: %s", obstacle)


def _unrecordable(decoder: Decoder, attention: AttentionBackend) -> str | None:
    """Why steps of such a model cannot be recorded; None: they can."""
    if not isinstance(decoder, NativeDecoder):
        return "it is computed by transformers"
    if decoder.host_bound:
        return (
            "its experts have biases, adapters or weights that no grouped product takes, and each is computed by itself"
            ", or its states are computed by torch, or it attends to an encoder's output"
        )
    return None if attention.recordable_places else "the attention reads rows on the host"
