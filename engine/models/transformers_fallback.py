"""Any other decoder: a transformers model over our paged attention (`transformers_attention.py`), or, where that can't
take the place of its own, as it is and one sequence at a time (`transformers_sequences.py`). It is slower: its Python
runs layer by layer.

This module imports transformers, so it is imported for such checkpoints alone.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...tokenization.checkpoint_files import read_json
from ..checkpoint.build_context import BuildContext
from ..checkpoint.hf_checkpoint import Checkpoint
from ..checkpoint.model_spec import DTYPES, LAYER_TYPES, CheckpointError, DecoderShape
from ..checkpoint.weights import CheckpointWeights
from ..config import ParallelConfig
from ..layers.step_context import StepContext
from ..step_batch import SampledTokens
from .image_wrapper import drop_towers, try_image_wrapper
from .interfaces import BuiltDecoder, CheckpointBuilder, LogitsIterator, default_length
from .transformers_attention import (
    ATTENTION_NAME,
    AttentionCall,
    AttentionHandler,
    ProbedLayer,
    probe_layers,
    register_attention,
)
from .transformers_caches import SequenceCaches, keeps_states, sequence_caches
from .transformers_check import verify_decoder
from .transformers_rope import fix_longrope, original_length, refuse_rope
from .transformers_sequences import SequenceDecoder, named_inputs, sequence_shape, step_inputs

log = logging.getLogger(__name__)


class TransformersDecoder:
    """A transformers model as a `Decoder`: packed tokens are its one sequence, and our attention tells them apart. The
    cache has `kv_heads` heads of `head_dim` numbers in every layer. Smaller queries, keys and values are padded with
    zeros, and fewer heads of keys and values are repeated."""

    def __init__(self, model: Any, kv_heads: int, head_dim: int) -> None:
        self._model = model
        self._kv_heads = kv_heads
        self._head_dim = head_dim
        # "decoder" is the name of the layers in some classes, and of the LM head in others.
        layers = model.get_decoder()
        self._layers = model.base_model if layers is model.get_output_embeddings() else layers

    def compute_logits(self, context: StepContext, selections: Sequence[Tensor]) -> LogitsIterator:
        def attend(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            queries = self._padded(q, q.shape[1])
            keys, values = (self._padded(x, self._kv_heads) for x in (k, v))
            mixed = context.attention(call.module.layer_idx, queries, keys, values, call.sinks)
            return mixed.view(len(q), -1, self._head_dim)[..., : v.shape[2]].flatten(1)

        batch = context.batch
        layers_output = []
        first, *others = selections or (batch.positions[:0],)
        with self._layers.register_forward_hook(lambda layers, args, out: layers_output.append(out)):
            logits = self._logits(step_inputs(self._model, batch), batch.positions, attend, first)
        return chain((logits,), (self._logits_again(context, layers_output[0], places) for places in others))

    def begin_step(self, context: StepContext, logits_indices: Tensor, samples: SampledTokens | None = None) -> None:
        """Returns None: transformers computes in the caller's thread alone."""

    def close(self) -> None:
        """Nothing is to be ended: the decoder has no threads of its own."""

    def _logits(self, inputs: Tensor, positions: Tensor, attend: AttentionHandler, places: Tensor) -> Tensor:
        position_ids = positions.unsqueeze(0)
        named = {"use_cache": False, "logits_to_keep": places, "attend": attend, **named_inputs(inputs)}
        logits: Tensor = self._model(position_ids=position_ids, **named).logits[0]
        return logits

    def _logits_again(self, context: StepContext, layers_output: Any, places: Tensor) -> Tensor:
        """Logits of other places of a step that was computed: the model is called again, for one token, and a hook puts
        the step's `layers_output` in place of that token's. What each class does between layers and logits is done so,
        too. Of the places alone: some classes take what is longer than their input for cut already."""

        def attend_nowhere(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return q.new_zeros(len(q), q.shape[1] * v.shape[2])

        one = slice(0, 1)
        every = torch.arange(len(places), device=places.device)
        output = _output_at(layers_output, places)
        with self._layers.register_forward_hook(lambda layers, args, out: output):
            return self._logits(context.batch.tokens[one], context.batch.positions[one], attend_nowhere, every)

    def _padded(self, x: Tensor, heads: int) -> Tensor:
        """x [N, heads of x, size of x] as [N, heads, head_dim]."""
        if x.shape[1] < heads:
            x = x.repeat_interleave(heads // x.shape[1], 1)
        return x if x.shape[2] == self._head_dim else pad(x, (0, self._head_dim - x.shape[2]))


def _output_at(output: Any, places: Tensor) -> Any:
    """The output of a model's layers, whose first member are states [1, N, size], of these places."""
    states = output[0][:, places]
    if isinstance(output, tuple):
        return (states, *output[1:])
    return replace(output, **{fields(output)[0].name: states})


@dataclass(frozen=True, slots=True)
class TransformersBuilder(CheckpointBuilder):
    """A checkpoint that transformers can open and whose config.json forbids nothing."""

    directory: Path
    architecture: str
    config: Any
    """The configuration of its language part, where it takes more than texts."""
    obstacle: str | None
    """Why our attention can't take the place of its own; None: it may."""
    caches: SequenceCaches | None
    """The caches that transformers computes one sequence with; None: the class takes none that we can fill."""
    sees: bool = False
    """Whether it takes rows of images, too."""
    variant: str = ""
    """What of its config.json our own file of the architecture does not compute, as a refusal says it; empty: it has no
    such file."""

    @property
    def keeps_states(self) -> bool:
        return self.caches is not None and keeps_states(self.caches)

    @property
    def attends_itself(self) -> bool:
        return self.obstacle is not None

    def build(self, context: BuildContext) -> BuiltDecoder:
        """Load the model, find out what it keeps, and verify it over a small cache."""
        if self.variant:
            log.warning("%s; so transformers computes it", self.variant)
        try:
            _check_context(context)
            built = self._build_over_attention(context) if self.obstacle is None else None
            if built is None:
                built = self._build_by_sequence(context)
        except CheckpointError as error:
            raise _refusal(str(self.directory), self.architecture, error.message, self.variant) from error
        return built

    def _build_over_attention(self, context: BuildContext) -> BuiltDecoder | None:
        """The model over our attention; None: it does something else, so it may serve by sequence alone."""
        model = _load(self, context, ATTENTION_NAME)
        try:
            layers = probe_layers(model)
            shape = _attending_shape(self.config, layers)
            decoder = TransformersDecoder(model, shape.kv_heads, shape.head_dim)
            verify_decoder(model, decoder, shape, context.dtype)
        except CheckpointError as error:
            if self.caches is None or self.keeps_states:
                raise
            log.info("%s: our attention can't take the place of its own: %s", self.architecture, error.message)
            return None
        log.warning("%s has no file of its own: transformers computes it over our cache, slower", self.architecture)
        return BuiltDecoder(decoder, shape)

    def _build_by_sequence(self, context: BuildContext) -> BuiltDecoder:
        """The model as it is, called for one sequence at a time."""
        assert self.caches is not None
        model = _load(self, context)
        self.caches.probe(model)
        shape = sequence_shape(self.config, self.caches)
        if any(shape.states) and not self.keeps_states:
            raise CheckpointError("it keeps states that its config.json does not tell of")
        decoder = SequenceDecoder(model, self.caches)
        try:
            verify_decoder(model, decoder, shape, context.dtype)
        except CheckpointError:
            if not any(shape.states):
                raise
            decoder = SequenceDecoder(model, self.caches, resumes_singly=True)
            verify_decoder(model, decoder, shape, context.dtype)
        message = "%s has no file of its own: transformers computes it one sequence after the other, much slower"
        log.warning(message, self.architecture)
        return BuiltDecoder(decoder, shape)

    def dry_run(self, context: BuildContext, parallel: ParallelConfig) -> str:
        """Open the weights, and no more: transformers alone knows which tensors the model needs."""
        try:
            _check_context(context, parallel.world)
        except CheckpointError as error:
            raise _refusal(str(self.directory), self.architecture, error.message, self.variant) from error
        CheckpointWeights(self.directory)
        return f"transformers computes {self.architecture}, which is tried out when it loads"


def transformers_builder(checkpoint: Checkpoint, variant: str = "") -> TransformersBuilder:
    """The builder of a causal language model that transformers computes. `variant`: as of `TransformersBuilder`.

    Raises:
        CheckpointError: it is none, or something in its config.json rules it out; says what.
    """
    outer = read_json(checkpoint.directory / "config.json") if checkpoint.language_part else checkpoint.config
    architecture = str((outer.get("architectures") or ["without a name"])[0])
    try:
        whole = _read_config(checkpoint.directory)
        config = whole.get_text_config()
        if sees := _sees(whole, architecture):
            try_image_wrapper(checkpoint.directory, architecture, own_logits=True)
        model_class = _model_class(whole, architecture, sees)
        obstacle = _attention_obstacle(config, model_class)
        caches = _caches(model_class, config, obstacle)
    except CheckpointError as error:
        raise _refusal(checkpoint.where, architecture, error.message, variant) from error
    dtype = str(whole.dtype or config.dtype or checkpoint.config.get("dtype") or "float32").removeprefix("torch.")
    longest = int(getattr(config, "max_position_embeddings", None) or 2048)
    kinds = architecture, config, obstacle, caches, sees
    usual = default_length(original_length(config, longest))
    return TransformersBuilder(dtype, longest, usual, checkpoint.directory, *kinds, variant)


def _refusal(where: str, architecture: str, reason: str, variant: str) -> CheckpointError:
    refusal = f"{where}: architecture {architecture} is not supported: {reason}"
    return CheckpointError(f"{variant}; nor does transformers serve it: {refusal}" if variant else refusal)


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
        raise CheckpointError(f"transformers does not know it either ({_first_line(error)})") from error


def _first_line(error: Exception) -> str:
    """What a library's exception says: a key's name says nothing without what it is of."""
    line = str(error).partition("\n")[0]
    return line if line and not isinstance(error, KeyError) else f"{type(error).__name__} {line}"


def _sees(config: Any, architecture: str) -> bool:
    """Whether it is a class of images and texts."""
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    known: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None)
    apart = config.get_text_config() is not config and not getattr(config, "is_encoder_decoder", False)
    return known is not None and known.__name__ == architecture and apart


def _model_class(config: Any, architecture: str, sees: bool) -> Any:
    """The class of `architecture`. Raises unless it is the language model of `config`, a decoder of plain numbers."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    classes: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if sees else MODEL_FOR_CAUSAL_LM_MAPPING
    model_class: Any = classes.get(type(config), None)
    if getattr(config, "is_encoder_decoder", False):
        raise CheckpointError("it is an encoder and a decoder")
    if config.model_type == "phi4_multimodal":
        chosen = "chosen by the images and sounds of a prompt; Phi-4-mini is served"
        raise CheckpointError(f"its language part has adapters that are {chosen}")
    if config.get_text_config() is not config and not sees:
        raise CheckpointError("it takes more than text")
    if model_class is None:
        raise CheckpointError(f"transformers has no causal language model of type {config.model_type}")
    if model_class.__name__ != architecture:
        raise CheckpointError(f"the causal language model of type {config.model_type} is {model_class.__name__}")
    if getattr(config, "quantization_config", None):
        method = config.to_dict()["quantization_config"].get("quant_method", "unknown method")
        raise CheckpointError(f"its weights are quantised ({method}); supported dtypes: {', '.join(DTYPES)}")
    refuse_rope(config.get_text_config())
    return model_class


def _attention_obstacle(config: Any, model_class: Any) -> str | None:
    """Why our attention can't take the place of the model's own, as far as its class and configuration say."""
    if not model_class._supports_attention_backend:
        return "its class has not got transformers' attention interface, by which ours takes the place of its own"
    strange = set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES
    if strange:
        served = ", ".join(sorted(LAYER_TYPES))
        return f"it has layers of type {', '.join(sorted(strange))}; served are {served}"
    return None


def _caches(model_class: Any, config: Any, obstacle: str | None) -> SequenceCaches | None:
    """The caches of a model; None: it has none, but may be computed over our attention."""
    try:
        return sequence_caches(model_class, config)
    except CheckpointError as error:
        if obstacle is None:
            return None
        raise CheckpointError(f"{obstacle}, and {error.message}") from error


def _attending_shape(config: Any, layers: Sequence[ProbedLayer]) -> DecoderShape:
    hidden = int(config.hidden_size)
    width = getattr(config, "intermediate_size", None) or 4 * hidden  # a list has one for each layer
    return DecoderShape(
        vocab_size=int(config.vocab_size),
        hidden_size=hidden,
        intermediate_size=max(width) if isinstance(width, list) else int(width),
        heads=layers[0].heads,
        kv_heads=layers[0].kv_heads,
        head_dim=layers[0].head_dim,
        attention=tuple(layer.attention for layer in layers),
    )


def _load(builder: TransformersBuilder, context: BuildContext, attention: str | None = None) -> Any:
    """The model with the named attention, or the one that transformers chooses, all tensors from the checkpoint. Of one
    that sees the tower is dropped: its rows come with the prompts."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.utils.logging import disable_progress_bar

    auto: Any = AutoModelForImageTextToText if builder.sees else AutoModelForCausalLM
    chosen = {"text_config": attention} if builder.sees and attention else attention
    register_attention()
    disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        model, loading_info = auto.from_pretrained(
            builder.directory,
            dtype=context.dtype,
            attn_implementation=chosen,
            output_loading_info=True,
            local_files_only=True,
            trust_remote_code=False,
        )
    except (OSError, ValueError, RuntimeError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"transformers could not load it: {_first_line(error)}") from error
    if loading_info["missing_keys"]:
        raise CheckpointError(f"tensor {min(loading_info['missing_keys'])} is missing from the weights")
    if builder.sees:
        drop_towers(model)
    fix_longrope(model, context.max_positions)
    return model.to(context.device)
