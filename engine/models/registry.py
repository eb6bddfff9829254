"""The architectures that are written here, and the way to all others."""

import logging
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass, replace

import torch

from ..checkpoint.adapter_targets import AdapterTargets
from ..checkpoint.build_context import BuildContext
from ..checkpoint.hf_checkpoint import Checkpoint, is_drafting_layer, text_tensor_name
from ..checkpoint.media_support import media_kinds
from ..checkpoint.model_spec import CheckpointError, ModelSpec, UnsupportedVariant
from ..checkpoint.packing_cache import Packing, packing_key
from ..checkpoint.partition import PipelineStage, check_partition
from ..checkpoint.quantised_weights import open_weights
from ..checkpoint.weights import WeightLoader, WeightSource, dtype_name
from ..config import ParallelConfig
from ..cpu import library
from ..cpu.memory import HugePageArena
from ..layers.embed_and_head import HEAD_WEIGHT
from .bamba import build_bamba, build_falcon_h1
from .calibration import calibrate
from .deepseek import build_deepseek, is_of_indexer
from .ernie import build_ernie, build_ernie_moe
from .gemma import build_gemma2, build_gemma3
from .gemma3n import build_gemma3n
from .gemma4 import build_gemma4
from .glm import build_dots1, build_glm, build_glm4, build_glm4_moe
from .gpt_oss import build_gpt_oss
from .granite_hybrid import build_granite_hybrid
from .interfaces import BuiltDecoder, CheckpointBuilder, Decoder, default_length
from .lfm2 import build_lfm2
from .llama import (
    build_llama,
    build_mistral,
    build_mixtral,
    build_phi3,
    build_qwen2,
    build_qwen3,
    build_qwen3_moe,
    build_seed_oss,
)
from .mamba import build_mamba
from .minimax_m2 import build_minimax_m2
from .mtp import MTP_PREFIX
from .nemotron_h import build_nemotron_h
from .olmo import build_exaone4, build_olmo
from .qwen3_5 import build_qwen3_5
from .seq2seq import build_bart, build_m2m, build_marian, build_mbart, build_pegasus, build_whisper
from .t5 import build_t5
from .zamba2 import build_zamba2

log = logging.getLogger(__name__)

ARCHITECTURES: dict[str, Callable[[ModelSpec, WeightLoader], Decoder]] = {
    "BambaForCausalLM": build_bamba,
    "BartForConditionalGeneration": build_bart,
    "DeepseekV2ForCausalLM": build_deepseek,
    "DeepseekV32ForCausalLM": build_deepseek,
    "DeepseekV3ForCausalLM": build_deepseek,
    "Dots1ForCausalLM": build_dots1,
    "Ernie4_5ForCausalLM": build_ernie,
    "Ernie4_5_MoeForCausalLM": build_ernie_moe,
    "Exaone4ForCausalLM": build_exaone4,
    "FalconH1ForCausalLM": build_falcon_h1,
    "FalconMambaForCausalLM": build_mamba,
    "Gemma2ForCausalLM": build_gemma2,
    "Gemma3ForCausalLM": build_gemma3,
    "Gemma3nForCausalLM": build_gemma3n,
    "Gemma4ForCausalLM": build_gemma4,
    "Gemma4UnifiedForCausalLM": build_gemma4,
    "Glm4ForCausalLM": build_glm4,
    "Glm4MoeForCausalLM": build_glm4_moe,
    "Glm4MoeLiteForCausalLM": build_deepseek,
    "GlmForCausalLM": build_glm,
    "GlmMoeDsaForCausalLM": build_deepseek,
    "GptOssForCausalLM": build_gpt_oss,
    "GraniteMoeHybridForCausalLM": build_granite_hybrid,
    "Lfm2ForCausalLM": build_lfm2,
    "Lfm2MoeForCausalLM": build_lfm2,
    "LlamaForCausalLM": build_llama,
    "M2M100ForConditionalGeneration": build_m2m,
    "MBartForConditionalGeneration": build_mbart,
    "MT5ForConditionalGeneration": build_t5,
    "Mamba2ForCausalLM": build_mamba,
    "MambaForCausalLM": build_mamba,
    "MarianMTModel": build_marian,
    "MiMoForCausalLM": build_qwen2,
    "MiniMaxM2ForCausalLM": build_minimax_m2,
    "Ministral3ForCausalLM": build_mistral,
    "MistralForCausalLM": build_mistral,
    "MixtralForCausalLM": build_mixtral,
    "NemotronHForCausalLM": build_nemotron_h,
    "Olmo2ForCausalLM": build_olmo,
    "Olmo3ForCausalLM": build_olmo,
    "PegasusForConditionalGeneration": build_pegasus,
    "Phi3ForCausalLM": build_phi3,
    "Qwen2ForCausalLM": build_qwen2,
    "Qwen3ForCausalLM": build_qwen3,
    "Qwen3MoeForCausalLM": build_qwen3_moe,
    "Qwen3NextForCausalLM": build_qwen3_5,
    "Qwen3_5ForCausalLM": build_qwen3_5,
    "Qwen3_5MoeForCausalLM": build_qwen3_5,
    "SeedOssForCausalLM": build_seed_oss,
    "SmolLM3ForCausalLM": build_llama,
    "SolarOpenForCausalLM": build_glm4_moe,
    "T5ForConditionalGeneration": build_t5,
    "WhisperForConditionalGeneration": build_whisper,
    "Zamba2ForCausalLM": build_zamba2,
}
"""The entry in config.json's `architectures` -> the function that builds the decoder, or the rank's share of it."""

_DRAFTING_TENSORS = (MTP_PREFIX, "mtp.", "model.mtp_")
"""Beginnings of the names of tensors that draft, and are no part of the model itself."""

_BESIDE_DECODER = ("encoder.", "model.embed_positions.")
"""Beginnings of the names of tensors that a decoder leaves to its encoder, and of positions that it may compute."""

_COMPUTED_TENSORS = "rotary_emb.inv_freq"
"""Tensors of older checkpoints that are computed here instead."""


@dataclass(frozen=True, slots=True)
class NativeBuilder(CheckpointBuilder):
    """A `CheckpointBuilder` of an architecture in the table."""

    checkpoint: Checkpoint
    spec: ModelSpec

    @property
    def keeps_states(self) -> bool:
        return any(self.spec.states)

    @property
    def length_reason(self) -> str:
        if not 0 < self.spec.most_dense_tokens < self.spec.max_position:
            return ""
        return f"of {self.spec.max_position}: up to there its index_topk chooses every token, and beyond is not served"

    def build(self, context: BuildContext) -> BuiltDecoder:
        built, unread = self._build(context)
        if context.observer is None and context.device.type != "meta":  # else it will be built again, and says it then
            self._report(built, unread, context.shard.is_whole)
            if context.shard.reports_results and self.length_reason:
                message = "%s: texts of at most %d tokens are served, %s"
                log.warning(message, self.checkpoint.directory, self.max_position, self.length_reason)
        return built

    def _build(self, context: BuildContext) -> tuple[BuiltDecoder, list[str]]:
        """The decoder, and the names of tensors that a whole model should have read."""
        shard = context.shard
        spec = self.spec
        directory = self.checkpoint.directory
        part = self.checkpoint.language_part
        check_partition(spec, str(directory), shard.group.size, shard.stage, context.whole_experts)
        weights = self._open_weights(context)
        if part:  # the whole's config.json has a default that its language part may not follow
            spec = replace(spec, tied_embeddings=HEAD_WEIGHT not in weights)
        packing = self._packing(context, weights)
        if context.quantization == "int4" and spec.encoder is not None:
            message = (
                "int4 is calibrated on texts of the decoder alone, and it attends to an encoder's output; int8 is not"
            )
            raise CheckpointError(f"{directory}: quantization {message}", field="quantization")
        if context.quantization == "int4" and shard.is_whole and not packing.found and context.device.type != "meta":
            context = self._calibrated(context)
        loader = WeightLoader(weights, context, packing)
        decoder = ARCHITECTURES[spec.architecture](spec, loader)
        packing.keep()
        harmless = (_COMPUTED_TENSORS, HEAD_WEIGHT) if self.spec.tied_embeddings else (_COMPUTED_TENSORS,)
        unread = []
        if shard.is_whole:
            stray = (name for name in weights.unread if not name.endswith(harmless))
            own = (name for name in stray if not is_drafting_layer(name, self.checkpoint.config))
            unread = [name for name in own if not name.startswith(_DRAFTING_TENSORS) and not is_of_indexer(name, spec)]
        return BuiltDecoder(decoder, spec, self._adapter_targets(loader), loader.served), unread

    def _report(self, built: BuiltDecoder, unread: list[str], whole: bool) -> None:
        """Say what became of the tensors, and of which it is not clear whose they are."""
        directory, part = self.checkpoint.directory, self.checkpoint.language_part
        if built.served is not None and (served := built.served.lines()):
            log.info("%s: %s", directory, "; ".join(served))
        encoder = self.spec.encoder
        if encoder is not None and encoder.reads_text:  # both parts are loaded
            part = False
            unread = [name for name in unread if not text_tensor_name(name).startswith(_BESIDE_DECODER)]
        if part and media_kinds(directory):
            log.info("%s: its language part is loaded; the tower is a model beside it", directory)
        elif part and whole:
            message = "%s: its language part is served; %d other tensors are its towers', or left out, such as %s"
            log.warning(message, directory, len(unread), next(iter(unread), "none"))
        elif unread:
            message = "%s: config.json knows nothing of %d tensors of the weights, such as %s: is it theirs?"
            log.warning(message, directory, len(unread), unread[0])

    def _adapter_targets(self, loader: WeightLoader) -> AdapterTargets | None:
        if loader.adaptable is None:
            return None
        layers = self.spec.layers
        part = self.checkpoint.language_part
        mine = loader.stage.layers(layers)
        return AdapterTargets(loader.adaptable, loader.dtype, loader.device, mine, layers, part, loader.elsewhere)

    def _open_weights(self, context: BuildContext) -> WeightSource:
        weights = open_weights(self.checkpoint)
        if weights.quantization is not None and context.quantization != "none":
            where = self.checkpoint.directory
            message = f"{where}: its weights are {weights.quantization} already; leave quantization out, or say none"
            raise CheckpointError(message, field="quantization")
        return weights

    def _calibrated(self, context: BuildContext) -> BuildContext:
        """The context with a plan for four bits, which takes the first half of `progress`."""
        began = time.monotonic()
        report = context.progress
        plan = calibrate(self, context._replace(progress=lambda part: report(part / 2)))
        message = "%s: calibrated for int4 in %.1f s; %d of %d matrices in its layers stay at 8 bits"
        seconds = time.monotonic() - began
        log.info(message, self.checkpoint.directory, seconds, len(plan.higher), len(plan.squares))
        return context._replace(plan=plan, progress=lambda part: report((1 + part) / 2))

    def _packing(self, context: BuildContext, weights: WeightSource) -> Packing:
        """The matrices that an earlier load of the same rank kept, if there is a cache."""
        if context.cache is None:
            return Packing()
        if not library.supports(context.dtype, context.device):
            log.info("cache_dir keeps no weights: only the C kernels pack them, and these do not compute here")
            return Packing()
        shard = context.shard
        dtype = dtype_name(context.dtype)
        facts = {
            "config": self.checkpoint.config,
            "dtype": dtype,
            "level": library.level(),
            "quantization": context.quantization,
            "rank": [shard.group.rank, shard.group.size, *astuple(shard.stage)],
            "whole_experts": context.whole_experts,
        }
        about = f"{self.checkpoint.directory}: "
        about += f"{dtype if context.quantization == 'none' else context.quantization} for {library.level()}"
        if not shard.is_whole:
            about += f", rank {shard.group.rank} of {shard.group.size} in stage {shard.stage.index}"
        key = packing_key(weights.files, facts)
        memory = HugePageArena()
        return Packing(context.cache, key, about, lambda size: memory.allocate(size).numpy())

    def dry_run(self, context: BuildContext, parallel: ParallelConfig) -> str:
        """Build on torch's meta device, which holds shapes alone: every tensor is looked up and none is read."""
        stage = PipelineStage(0, parallel.pipeline, parallel.layers)
        check_partition(self.spec, str(self.checkpoint.directory), parallel.tensor, stage, parallel.whole_experts)
        self._open_weights(context)
        built, unread = self._build(BuildContext(context.dtype, torch.device("meta"), 1))
        self._report(built, unread, whole=True)
        return ""


def checkpoint_builder(checkpoint: Checkpoint) -> CheckpointBuilder:
    """The builder of the checkpoint's decoder: of our own architecture, if there is one that knows everything that its
    config.json asks for, else through transformers.

    Raises:
        CheckpointError: its config.json is broken, or it can't be served; says why.
    """
    if checkpoint.tried_wrapper:
        from .image_wrapper import check_image_wrapper

        check_image_wrapper(checkpoint.directory, checkpoint.tried_wrapper)
    names = checkpoint.config.get("architectures")
    if isinstance(names, list) and len(names) == 1 and names[0] not in ARCHITECTURES:
        from .transformers_fallback import transformers_builder  # transformers takes seconds to import

        return transformers_builder(checkpoint)
    try:
        spec = checkpoint.spec
    except UnsupportedVariant as variant:
        if checkpoint.gguf is not None:
            raise
        from .transformers_fallback import transformers_builder

        return transformers_builder(checkpoint, variant.message)
    longest = min(spec.max_position, spec.most_dense_tokens or spec.max_position)
    rope = spec.rope
    # Longrope's factors for longer texts make short ones worse.
    usual = min(rope.original_max_position, longest) if rope.kind == "longrope" else longest
    return NativeBuilder(spec.dtype, longest, default_length(usual), checkpoint, spec)
