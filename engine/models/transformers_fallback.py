"""Any other decoder: transformers' module on top, our paged attention underneath.

For architectures without a file of their own. Slower: the module's Python runs layer by layer as transformers wrote
it. Imports transformers, so only for such checkpoints.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from ..attention.backend import StepAttention
from ..checkpoint.build_context import BuildContext
from ..checkpoint.hf_checkpoint import Checkpoint
from ..checkpoint.model_spec import DTYPES, LAYER_TYPES, CheckpointError, DecoderShape
from ..checkpoint.weights import CheckpointWeights
from ..config import ParallelConfig
from ..step_batch import SampledTokens, StepBatch
from .interfaces import BuiltDecoder, LogitsIterator
from .transformers_attention import ATTENTION_NAME, AttentionCall, register_attention
from .transformers_probe import ProbedLayer, probe_layers, verify_decoder

log = logging.getLogger(__name__)

_BATCH_DEPENDENT_ROPE = {"dynamic", "longrope"}
"""Rotations that follow the longest sequence of a batch; ours are packed from many."""


class TransformersDecoder:
    """A transformers model as a Decoder: packed tokens are its one sequence, told apart by our attention alone.

    The cache has `kv_heads` heads of `head_dim` numbers in every layer. Smaller queries, keys and values are filled up
    with zeros; of fewer heads of keys and values each is there for several."""

    def __init__(self, model: Any, kv_heads: int, head_dim: int) -> None:
        self._model, self._kv_heads, self._head_dim = model, kv_heads, head_dim

    def compute_logits(self, batch: StepBatch, attend: StepAttention, chosen: Sequence[Tensor]) -> LogitsIterator:
        def by_layer(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            filled = (
                self._padded_heads(q, q.shape[1]),
                self._padded_heads(k, self._kv_heads),
                self._padded_heads(v, self._kv_heads),
            )
            mixed = attend(call.module.layer_idx, *filled, call.sinks)
            return mixed.view(len(q), -1, self._head_dim)[..., : v.shape[2]].flatten(1)

        said: list[Any] = []
        tokens = batch.tokens
        first, *others = chosen or (batch.positions[:0],)
        with self._model.get_decoder().register_forward_hook(lambda layers, args, out: said.append(out)):
            out = self._model(
                input_ids=tokens.unsqueeze(0),
                position_ids=batch.positions.unsqueeze(0),
                use_cache=False,
                logits_to_keep=first,
                attend=by_layer,
            )
        return chain((out.logits[0],), (self._logits_at(tokens, said[0], places) for places in others))

    def begin_step(
        self, batch: StepBatch, attend: StepAttention, places: Tensor, picks: SampledTokens | None = None
    ) -> None:
        """transformers computes when it is asked to, and not before."""

    def close(self) -> None:
        """It has no threads of its own."""

    def _padded_heads(self, x: Tensor, heads: int) -> Tensor:
        """x [N, its heads, its size] as [N, heads, head_dim]."""
        if x.shape[1] < heads:
            x = x.repeat_interleave(heads // x.shape[1], 1)
        return x if x.shape[2] == self._head_dim else pad(x, (0, self._head_dim - x.shape[2]))

    def _logits_at(self, tokens: Tensor, said: Any, places: Tensor) -> Tensor:
        """The logits of other places in what the layers `said`: what each class does behind them is its own."""
        layers = self._model.get_decoder()
        layers.forward = lambda *_, **__: said
        try:
            logits: Tensor = self._model(input_ids=tokens.unsqueeze(0), use_cache=False, logits_to_keep=places).logits
            return logits[0]
        finally:
            del layers.forward


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

    def build(self, place: BuildContext) -> BuiltDecoder:
        """Load, listen to the layers, try it out.

        Raises:
            CheckpointError: the weights are broken, or the model does not work over our cache; says why.
        """
        try:
            _check_context(place)
            model = _load(self.directory, place)
            heard = probe_layers(model)
            decoder = TransformersDecoder(model, heard[0].kv_heads, heard[0].head_dim)
            verify_decoder(model, decoder, heard, place.dtype)
        except CheckpointError as error:
            raise _refusal(str(self.directory), self.architecture, error.message) from error
        log.warning("%s has no file of its own: transformers computes it over our cache, slower", self.architecture)
        return BuiltDecoder(decoder, self._shape(heard))

    def dry_run(self, place: BuildContext, parallel: ParallelConfig) -> str:
        """Weights are opened, and no more: which tensors it needs is transformers' business."""
        try:
            _check_context(place, parallel.world)
        except CheckpointError as error:
            raise _refusal(str(self.directory), self.architecture, error.message) from error
        CheckpointWeights(self.directory)
        return f"transformers computes {self.architecture}, which is tried out when it loads"

    def _shape(self, heard: list[ProbedLayer]) -> DecoderShape:
        hidden, any_layer = int(self.config.hidden_size), heard[0]
        width = getattr(self.config, "intermediate_size", None) or 4 * hidden  # a list says it layer by layer
        return DecoderShape(
            vocab_size=int(self.config.vocab_size),
            hidden_size=hidden,
            intermediate_size=max(width) if isinstance(width, list) else int(width),
            heads=any_layer.heads,
            kv_heads=any_layer.kv_heads,
            head_dim=any_layer.head_dim,
            attention=tuple(each.attention for each in heard),
        )


def _check_context(place: BuildContext, ranks: int = 1) -> None:
    if ranks > 1 or not place.shard.is_whole or place.whole_experts:
        raise CheckpointError("its layers can't be split over ranks")
    if place.quantized:
        raise CheckpointError("transformers computes it, whose weights we can't quantise; use quantization none")


def transformers_builder(checkpoint: Checkpoint) -> TransformersBuilder:
    """A recipe for what transformers calls a causal language model with exchangeable attention.

    Raises:
        CheckpointError: it is none, or something in its config.json rules it out; says what.
    """
    architecture = str((checkpoint.config.get("architectures") or ["without a name"])[0])
    try:
        config = _config(checkpoint.directory)
        _check_class(config, architecture)
        _check_config(config)
    except CheckpointError as error:
        raise _refusal(checkpoint.where, architecture, error.message) from error
    return TransformersBuilder(checkpoint.directory, architecture, config)


def _refusal(where: str, architecture: str, reason: str) -> CheckpointError:
    return CheckpointError(f"{where}: architecture {architecture} is not supported: {reason}")


def _config(directory: Path) -> Any:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except (ValueError, KeyError, OSError, StrictDataclassError) as error:
        raise CheckpointError(f"transformers does not know it either ({str(error).splitlines()[0]})") from error


def _check_class(config: Any, architecture: str) -> None:
    """The class must be the causal language model of its configuration, a decoder alone, its attention exchangeable."""
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


def _check_config(config: Any) -> None:
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


def _load(directory: Path, place: BuildContext) -> Any:
    """The model with our attention in it, every tensor from the checkpoint."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    auto: Any = AutoModelForCausalLM
    register_attention()
    disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        model, found = auto.from_pretrained(
            directory,
            dtype=place.dtype,
            attn_implementation=ATTENTION_NAME,
            output_loading_info=True,
            local_files_only=True,
            trust_remote_code=False,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"transformers could not load it: {str(error).splitlines()[0]}") from error
    if found["missing_keys"]:
        raise CheckpointError(f"tensor {min(found['missing_keys'])} is missing from the weights")
    return model.to(place.device)
