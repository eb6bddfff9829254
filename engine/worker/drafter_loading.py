"""Loads the model or the head that drafts beside a target, and refuses one that cannot."""

import msgspec

from ...core.errors import InvalidArgument
from ..checkpoint.build_context import BuildContext
from ..checkpoint.hf_checkpoint import open_checkpoint
from ..checkpoint.model_spec import DecoderShape, ModelSpec
from ..checkpoint.quantization_config import STORED_AS
from ..config import EngineConfig, ParallelConfig, SpeculationConfig
from ..models.draft_head import DraftHead
from ..models.eagle3 import Eagle3Head, read_eagle3_config
from ..models.interfaces import CheckpointBuilder, Decoder
from ..models.mtp import MtpHead, check_mtp
from ..models.native_decoder import NativeDecoder
from ..models.registry import checkpoint_builder
from .draft_model import DraftLimits, DraftModel
from .head_drafter import HeadDrafter
from .model_setup import build_context, check_products, create_attention
from .row_states import RowStates
from .step_drafter import StepDrafter
from .vocabulary_map import map_draft_vocabulary


def load_drafter(
    config: EngineConfig, target: BuildContext, decoder: Decoder, shape: DecoderShape, rows: RowStates
) -> StepDrafter | None:
    """Load the model that drafts for a target of `shape`, if one does; `check_draft_head` has passed. Raises as
    `load_rank`."""
    speculation = config.speculation
    if speculation is None or not speculation.computes:
        return None
    if speculation.method == "draft_model":
        draft = _load_draft_model(config, speculation, target, shape, rows)
        # Behind a later step of the model, which waits for the host, a pass would wait for ever.
        alone = config.parallel.pipeline == 1 and not config.scheduler.ahead
        if alone and isinstance(decoder, NativeDecoder) and isinstance(draft.model, NativeDecoder):
            draft.model.compute_beside(decoder)
        return draft
    if not isinstance(decoder, NativeDecoder) or not isinstance(shape, ModelSpec):
        message = f"speculative_config: {speculation.method} needs a model that is not computed by transformers"
        raise InvalidArgument(message, field="speculative_config")
    quantization = speculation.quantization or ("none" if target.quantization == "none" else "int8")
    sizes = target.dtype, target.device, target.max_positions
    context = BuildContext(*sizes, quantization=quantization, few_rows=target.few_rows)
    head: DraftHead
    if speculation.method == "mtp":
        head = MtpHead(open_checkpoint(config.model), shape, context, decoder, config.parallel.tensor > 1)
    else:
        eagle = read_eagle3_config(speculation.model, shape)
        context = context._replace(max_positions=min(target.max_positions, eagle.spec.max_position))
        head = Eagle3Head(eagle, context, config.model)
    decoder.keep_states(head.target_layers)
    attention = create_attention(config, context, head.spec)
    return HeadDrafter(head, attention, decoder, rows, context.max_positions, speculation.draws)


def check_drafter(config: EngineConfig) -> None:
    """Refuse everything that `load_drafter` would, short of reading weights. Raises as `load_rank`."""
    speculation = config.speculation
    if speculation is None:
        return
    check_draft_head(config)
    if speculation.method == "draft_model":
        draft, builder = _draft_builder(config)
        plain = msgspec.structs.replace(draft, device="cpu", max_model_len=None)
        builder.dry_run(build_context(plain, builder), ParallelConfig())
        sizes = (open_checkpoint(model).config.get("vocab_size", 0) for model in (config.model, draft.model))
        map_draft_vocabulary(config, draft.model, *sizes)


def check_draft_head(config: EngineConfig) -> None:
    """Refuse a head, if one drafts, that does not go with the target, or could not read the states of its last step:
    before the target's weights are read. Raises as `load_rank`."""
    speculation = config.speculation
    if speculation is None or speculation.method not in ("eagle3", "mtp"):
        return
    message = ""
    if config.parallel.pipeline > 1 or config.scheduler.ahead:
        name = "pipeline_parallel_size" if config.parallel.pipeline > 1 else "ahead"
        message = f"{speculation.method} needs the last step's hidden states, which {name} takes from it"
    if message:
        raise InvalidArgument(f"speculative_config: {message}", field="speculative_config")
    target = open_checkpoint(config.model)
    if speculation.method == "mtp":
        check_mtp(target)
    else:
        read_eagle3_config(speculation.model, target.spec)


def _load_draft_model(
    config: EngineConfig, speculation: SpeculationConfig, target: BuildContext, shape: DecoderShape, rows: RowStates
) -> DraftModel:
    draft, builder = _draft_builder(config)
    positions = min(target.max_positions, builder.max_position)
    draft = msgspec.structs.replace(draft, max_model_len=positions, device=str(target.device))
    context = build_context(draft, builder)
    context = context._replace(few_rows=context.few_rows and target.few_rows)  # measured with the target's
    check_products(context)
    decoder, own, _, _ = builder.build(context)
    vocabulary = map_draft_vocabulary(config, draft.model, shape.vocab_size, own.vocab_size)
    if vocabulary is not None:
        limits = DraftLimits(positions, vocabulary=vocabulary._replace(own=vocabulary.own.to(target.device)))
    else:
        limits = DraftLimits(positions, own.vocab_size if own.vocab_size < shape.vocab_size else None)
    return DraftModel(decoder, create_attention(config, context, own), rows, limits, speculation.draws)


def _draft_builder(config: EngineConfig) -> tuple[EngineConfig, CheckpointBuilder]:
    """The configuration of the draft model, whose checkpoint is read: what is not said of it is as the target's."""
    speculation = config.speculation
    assert speculation is not None
    checkpoint = open_checkpoint(speculation.model)
    quantization = str(speculation.quantization or "")
    if not quantization:
        quantization = "none" if checkpoint.stored_as or config.quantization in STORED_AS else config.quantization
    draft = msgspec.structs.replace(config, model=speculation.model, quantization=quantization, lora=None)
    builder = checkpoint_builder(checkpoint)
    if builder.keeps_states:
        message = f"speculative_config: {speculation.model} keeps states, from which no proposal can be taken back"
        raise InvalidArgument(message, field="speculative_config")
    return draft, builder
