"""Any other decoder: a transformers model over our paged attention.

It serves architectures without a module of their own here, more slowly: its Python runs layer by layer as transformers
wrote it. This module imports transformers, so it is imported for such checkpoints alone.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from ..checkpoint.build_context import BuildContext
from ..checkpoint.hf_checkpoint import Checkpoint
from ..checkpoint.model_spec import DTYPES, LAYER_TYPES, CheckpointError, DecoderShape
from ..checkpoint.weights import CheckpointWeights
from ..config import ParallelConfig
from ..layers.step_context import StepContext
from ..step_batch import SampledTokens
from .interfaces import BuiltDecoder, LogitsIterator
from .transformers_probe import (
    ATTENTION_NAME,
    AttentionCall,
    AttentionHandler,
    probe_layers,
    register_attention,
    verify_decoder,
)

log = logging.getLogger(__name__)

_BATCH_DEPENDENT_ROPE = {"dynamic", "longrope"}
"""Rope types whose angles follow the longest sequence of a batch; our batches are packed from many sequences."""


class TransformersDecoder:
    """A transformers model as a `Decoder`: packed tokens are its one sequence, and our attention tells them apart. The
    cache has `kv_heads` heads of `head_dim` numbers in every layer. Smaller queries, keys and values are padded with
    zeros, and fewer heads of keys and values are repeated."""

    def __init__(self, model: Any, kv_heads: int, head_dim: int) -> None:
        self._model, self._kv_heads, self._head_dim = model, kv_heads, head_dim

    def compute_logits(self, context: StepContext, selections: Sequence[Tensor]) -> LogitsIterator:
        def attend(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            queries, (keys, values) = self._padded(q, q.shape[1]), (self._padded(x, self._kv_heads) for x in (k, v))
            mixed = context.attention(call.module.layer_idx, queries, keys, values, call.sinks)
            return mixed.view(len(q), -1, self._head_dim)[..., : v.shape[2]].flatten(1)

        batch, layers_output = context.batch, []
        first, *others = selections or (batch.positions[:0],)
        with self._model.get_decoder().register_forward_hook(lambda layers, args, out: layers_output.append(out)):
            logits = self._logits(batch.tokens, batch.positions, attend, first)
        return chain((logits,), (self._logits_again(context, layers_output[0], places) for places in others))

    def begin_step(self, context: StepContext, logits_indices: Tensor, samples: SampledTokens | None = None) -> None:
        """Returns None: transformers computes in the caller's thread alone."""

    def close(self) -> None:
        """Nothing is to be ended: the decoder has no threads of its own."""

    def _logits(self, tokens: Tensor, positions: Tensor, attend: AttentionHandler, places: Tensor) -> Tensor:
        ids, position_ids = tokens.unsqueeze(0), positions.unsqueeze(0)
        out = self._model(
            input_ids=ids, position_ids=position_ids, use_cache=False, logits_to_keep=places, attend=attend
        )
        logits: Tensor = out.logits[0]
        return logits

    def _logits_again(self, context: StepContext, layers_output: Any, places: Tensor) -> Tensor:
        """Logits of other places of a step that was computed. Each class does things of its own between its layers and
        its logits, so the model is called again, for one token, and a hook puts the step's `layers_output` in place of
        that token's."""

        def attend_nowhere(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return q.new_zeros(len(q), q.shape[1] * v.shape[2])

        one = slice(0, 1)
        with self._model.get_decoder().register_forward_hook(lambda layers, args, out: layers_output):
            return self._logits(context.batch.tokens[one], context.batch.positions[one], attend_nowhere, places)

    def _padded(self, x: Tensor, heads: int) -> Tensor:
        """x [N, heads of x, size of x] as [N, heads, head_dim]."""
        if x.shape[1] < heads:
            x = x.repeat_interleave(heads // x.shape[1], 1)
        return x if x.shape[2] == self._head_dim else pad(x, (0, self._head_dim - x.shape[2]))


@dataclass(frozen=True, slots=True)
class TransformersBuilder:
    """A checkpoint that transformers can open and whose config.json forbids nothing."""

    directory: Path
    architecture: str
    config: Any

    @property
    def dtype(self) -> str:
        return str(self.config.dtype or "float32").removeprefix("torch.")

    @property
    def max_position(self) -> int:
        return int(getattr(self.config, "max_position_embeddings", None) or 2048)

    @property
    def default_length(self) -> int:
        return self.max_position

    def build(self, context: BuildContext) -> BuiltDecoder:
        """Load the model, probe its layers, and verify it over a small cache."""
        try:
            _check_context(context)
            model = _load(self.directory, context)
            layers = probe_layers(model)
            decoder = TransformersDecoder(model, layers[0].kv_heads, layers[0].head_dim)
            verify_decoder(model, decoder, layers, context.dtype)
        except CheckpointError as error:
            raise _refusal(str(self.directory), self.architecture, error.message) from error
        log.warning("%s has no file of its own: transformers computes it over our cache, slower", self.architecture)
        hidden = int(self.config.hidden_size)
        width = getattr(self.config, "intermediate_size", None) or 4 * hidden  # a list has one for each layer
        shape = DecoderShape(
            vocab_size=int(self.config.vocab_size),
            hidden_size=hidden,
            intermediate_size=max(width) if isinstance(width, list) else int(width),
            heads=layers[0].heads,
            kv_heads=layers[0].kv_heads,
            head_dim=layers[0].head_dim,
            attention=tuple(each.attention for each in layers),
        )
        return BuiltDecoder(decoder, shape)

    def dry_run(self, context: BuildContext, parallel: ParallelConfig) -> str:
        """Open the weights, and no more: transformers alone knows which tensors the model needs."""
        try:
            _check_context(context, parallel.world)
        except CheckpointError as error:
            raise _refusal(str(self.directory), self.architecture, error.message) from error
        CheckpointWeights(self.directory)
        return f"transformers computes {self.architecture}, which is tried out when it loads"


def transformers_builder(checkpoint: Checkpoint) -> TransformersBuilder:
    """The builder of a causal language model of transformers with exchangeable attention.

    Raises:
        CheckpointError: it is none, or something in its config.json rules it out; says what.
    """
    architecture = str((checkpoint.config.get("architectures") or ["without a name"])[0])
    try:
        config = _read_config(checkpoint.directory)
        _check_config(config, architecture)
    except CheckpointError as error:
        raise _refusal(checkpoint.where, architecture, error.message) from error
    return TransformersBuilder(checkpoint.directory, architecture, config)


def _refusal(where: str, architecture: str, reason: str) -> CheckpointError:
    return CheckpointError(f"{where}: architecture {architecture} is not supported: {reason}")


def _check_context(context: BuildContext, ranks: int = 1) -> None:
    if ranks > 1 or not context.shard.is_whole or context.whole_experts:
        raise CheckpointError("its layers can't be split over ranks")
    if context.quantization != "none":
        raise CheckpointError("transformers computes it, whose weights we can't quantise; use quantization none")


def _read_config(directory: Path) -> Any:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except (ValueError, KeyError, OSError, StrictDataclassError) as error:
        raise CheckpointError(f"transformers does not know it either ({str(error).splitlines()[0]})") from error


def _check_config(config: Any, architecture: str) -> None:
    """Raise unless `architecture` is the language model of `config`, a decoder whose attention can be exchanged."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    found: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if getattr(config, "is_encoder_decoder", False):
        raise CheckpointError("it is an encoder and a decoder")
    if config.get_text_config() is not config:
        raise CheckpointError("it takes more than text")
    if found is None:
        raise CheckpointError(f"transformers has no causal language model of type {config.model_type}")
    if found.__name__ != architecture:
        raise CheckpointError(f"the causal language model of type {config.model_type} is {found.__name__}")
    if not found._supports_attention_backend:
        raise CheckpointError("it does not support transformers' attention interface")
    if getattr(config, "quantization_config", None):
        method = config.to_dict()["quantization_config"].get("quant_method", "unknown method")
        raise CheckpointError(f"its weights are quantised ({method}); supported dtypes: {', '.join(DTYPES)}")
    strange = set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES
    if strange:
        raise CheckpointError(f"it has layers of type {', '.join(sorted(strange))}")
    ropes = getattr(config, "rope_parameters", None) or {}
    nested = [each for each in ropes.values() if isinstance(each, dict)] or [ropes]
    longest = _BATCH_DEPENDENT_ROPE & {each.get("rope_type") for each in nested}
    if longest:
        raise CheckpointError(f"rope type {', '.join(longest)} depends on the other sequences of a batch")


def _load(directory: Path, context: BuildContext) -> Any:
    """The model with our attention, all of its tensors from the checkpoint."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    auto: Any = AutoModelForCausalLM
    register_attention()
    disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        model, found = auto.from_pretrained(
            directory,
            dtype=context.dtype,
            attn_implementation=ATTENTION_NAME,
            output_loading_info=True,
            local_files_only=True,
            trust_remote_code=False,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"transformers could not load it: {str(error).splitlines()[0]}") from error
    if found["missing_keys"]:
        raise CheckpointError(f"tensor {min(found['missing_keys'])} is missing from the weights")
    return model.to(context.device)
