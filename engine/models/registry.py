"""The architectures we serve: those with a file of their own, and the way to all others."""

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..checkpoint.build_context import Place
from ..checkpoint.hf_checkpoint import Checkpoint
from ..checkpoint.model_spec import CheckpointError, ModelSpec, UnknownVariant
from ..checkpoint.partition import check_split
from ..checkpoint.pipeline_stage import Stage
from ..checkpoint.text_part import own_name
from ..checkpoint.weights import Loader, Weights
from ..config import ParallelConfig
from ..layers.embed_and_head import HEAD
from .gemma import gemma2, gemma3
from .interfaces import Builder, Built, Recipe
from .llama import llama
from .mistral import mistral
from .mixtral import mixtral
from .phi3 import phi3
from .qwen2 import qwen2
from .qwen3 import qwen3, qwen3_moe

log = logging.getLogger(__name__)

ARCHITECTURES: dict[str, Builder] = {
    "Gemma2ForCausalLM": gemma2,
    "Gemma3ForCausalLM": gemma3,
    "LlamaForCausalLM": llama,
    "MistralForCausalLM": mistral,
    "MixtralForCausalLM": mixtral,
    "Phi3ForCausalLM": phi3,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
    "Qwen3MoeForCausalLM": qwen3_moe,
}
"""config.json's `architectures` entry -> what builds the model."""

_TABLES = "rotary_emb.inv_freq"
"""Older checkpoints store what is computed here."""


@dataclass(frozen=True, slots=True)
class Native:
    """A checkpoint of an architecture in the table, or its `language_part` alone."""

    directory: Path
    spec: ModelSpec
    builder: Builder
    language_part: bool = False

    @property
    def dtype(self) -> str:
        return self.spec.dtype

    @property
    def max_position(self) -> int:
        return self.spec.max_position

    @property
    def default_length(self) -> int:
        """Longrope's factors for long texts make short ones worse: a longer length is to be asked for."""
        rope = self.spec.rope
        return min(rope.original_max_position, self.max_position) if rope.kind == "longrope" else self.max_position

    def build(self, place: Place) -> Built:
        seat = place.seat
        check_split(self.spec, str(self.directory), seat.group.size, seat.stage, place.whole_experts)
        weights, spec = Weights(self.directory, own_name if self.language_part else str), self.spec
        if self.language_part:  # the whole's config.json has a default that its language part may not follow
            spec = replace(spec, tied_embeddings=HEAD not in weights)
        built = Built(self.builder(spec, Loader(weights, place)), spec)
        if seat.alone:
            self._tell_unread(weights)
        return built

    def examine(self, place: Place, parallel: ParallelConfig) -> str:
        """Every tensor is asked for as ever, and none is computed with: torch's meta device holds shapes alone."""
        stage = Stage(0, parallel.pipeline, parallel.layers)
        check_split(self.spec, str(self.directory), parallel.tensor, stage, parallel.whole_experts)
        self.build(Place(place.dtype, torch.device("meta"), 1))
        return ""

    def _tell_unread(self, weights: Weights) -> None:
        harmless = (_TABLES, HEAD) if self.spec.tied_embeddings else (_TABLES,)
        unread = [name for name in weights.unread if not name.endswith(harmless)]
        if self.language_part:
            message = "%s: its language part is served, for text alone; %d other tensors are left out, such as %s"
            log.warning(message, self.directory, len(unread), next(iter(unread), "none"))
        elif unread:
            message = "%s: config.json knows nothing of %d tensors of the weights, such as %s: is it theirs?"
            log.warning(message, self.directory, len(unread), unread[0])


def recipe(checkpoint: Checkpoint) -> Recipe:
    """How to build the checkpoint's model: by our own file if there is one that knows all that its config.json asks
    for, else through transformers.

    Raises:
        CheckpointError: its config.json is broken, or it can't be served; says why.
    """
    names = checkpoint.config.get("architectures")
    if isinstance(names, list) and len(names) == 1 and names[0] not in ARCHITECTURES:
        from .transformers_fallback import foreign  # transformers takes seconds to import

        return foreign(checkpoint)
    try:
        spec = checkpoint.spec
    except UnknownVariant as variant:
        return _through_transformers(checkpoint, variant)
    return Native(checkpoint.directory, spec, ARCHITECTURES[spec.architecture], checkpoint.language_part)


def _through_transformers(checkpoint: Checkpoint, variant: UnknownVariant) -> Recipe:
    from .transformers_fallback import foreign

    try:
        found = foreign(checkpoint)
    except CheckpointError as error:
        raise CheckpointError(f"{variant.message}; nor does transformers serve it: {error.message}") from error
    log.warning("%s; so transformers computes it", variant.message)
    return found
