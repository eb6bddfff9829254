"""Any other decoder: a transformers model over our paged attention (`transformers_attention.py`).

It serves architectures without a module of their own here, more slowly: its Python runs layer by layer as transformers
wrote it. This module imports transformers, so it is imported for such checkpoints alone.
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

from ..attention.backend import CacheSpec
from ..attention.torch_attention import ReferenceAttention
from ..checkpoint.build_context import BuildContext
from ..checkpoint.hf_checkpoint import Checkpoint
from ..checkpoint.model_spec import DTYPES, LAYER_TYPES, CheckpointError, DecoderShape
from ..checkpoint.weights import CheckpointWeights
from ..config import ParallelConfig
from ..layers.step_context import StepContext
from ..step_batch import SampledTokens, StepBatch
from .interfaces import BuiltDecoder, CheckpointBuilder, Decoder, LogitsIterator, default_length
from .transformers_attention import (
    ATTENTION_NAME,
    AttentionCall,
    AttentionHandler,
    ProbedLayer,
    probe_layers,
    refuse_failures,
    register_attention,
)

_BLOCK_SIZE = 4
_FIRST_STEP = (4, 4)
"""Tokens of two sequences in the check's first step."""

_SECOND_STEP = (3,)
"""Tokens of the first of them in its second step."""

_TOLERANCE = {torch.float32: 2e-3, torch.float16: 0.05, torch.bfloat16: 0.15}
"""The tolerated error relative to the spread of logits. Correct roundings differ less; forgetting something, more."""


@torch.inference_mode()
def verify_decoder(model: Any, decoder: Decoder, layers: list[ProbedLayer], dtype: torch.dtype) -> None:
    """Compare two sequences over a paged cache, packed and in two steps, their logits in pieces, with transformers' own
    attention over each alone.

    Raises:
        CheckpointError: logits differ by more than rounding; the message is the reason alone.
    """
    high = min(int(model.config.vocab_size), 1000)
    first = torch.arange(7, 7 + 11 * (_FIRST_STEP[0] + _SECOND_STEP[0]), 11, device=model.device) % high
    second = torch.arange(5, 5 + 17 * _FIRST_STEP[1], 17, device=model.device) % high
    with refuse_failures("by itself, so its config.json may contradict itself"):
        right = _logits_of_transformers(model, first), _logits_of_transformers(model, second)
    heads = layers[0][1:]
    attention = tuple(layer.attention for layer in layers)
    cache = ReferenceAttention(CacheSpec(attention, *heads, _BLOCK_SIZE, dtype, model.device))
    cache.allocate(4)
    packed = torch.cat((first[: _FIRST_STEP[0]], second))
    with refuse_failures("over a cache that holds several sequences in blocks"):
        parts = [
            *torch.split(_logits_over_cache(decoder, cache, packed, (0, 0), _FIRST_STEP), list(_FIRST_STEP)),
            _logits_over_cache(decoder, cache, first[_FIRST_STEP[0] :], (_FIRST_STEP[0],), _SECOND_STEP),
        ]
        expected = right[0][: _FIRST_STEP[0]], right[1], right[0][_FIRST_STEP[0] :]
        worst = max(_relative_error(part, right_part) for part, right_part in zip(parts, expected, strict=True))
    if not worst < _TOLERANCE[dtype]:
        differ = f"differ from its own by {worst:.1%} of their spread"
        raise CheckpointError(f"over a cache of keys and values its logits {differ}")


def _logits_of_transformers(model: Any, tokens: Tensor) -> Tensor:
    model.set_attn_implementation("eager")
    try:
        logits: Tensor = model(input_ids=tokens.unsqueeze(0), use_cache=False).logits[0]
        return logits
    finally:
        model.set_attn_implementation(ATTENTION_NAME)


def _logits_over_cache(
    decoder: Decoder, cache: ReferenceAttention, tokens: Tensor, starts: tuple[int, ...], counts: tuple[int, ...]
) -> Tensor:
    """Logits of `tokens`, rows one after the other; row r has blocks 2r and 2r + 1."""
    tables = torch.arange(2 * len(counts), device=tokens.device).view(-1, 2)
    batch = StepBatch.from_tokens(tokens, starts, counts, tables, _BLOCK_SIZE)
    pieces = torch.split(torch.arange(len(tokens), device=tokens.device), 2)
    logits = decoder.compute_logits(StepContext(batch, cache.begin_step(batch)), pieces)
    assert logits is not None, "transformers computes the whole model"
    return torch.cat(list(logits))


def _relative_error(logits: Tensor, right: Tensor) -> float:
    """The median error of a token's logits relative to their spread; not the mean, for a rounding may send one token to
    another expert."""
    error = (logits.float() - right.float()).pow(2).mean(-1).sqrt()
    return float((error / right.float().std(-1)).median())


log = logging.getLogger(__name__)

_BATCH_DEPENDENT_ROPE = {"dynamic", "longrope"}
"""Rope types whose angles follow the longest sequence of a batch; our batches are packed from many sequences."""


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
            logits = self._logits(batch.tokens, batch.positions, attend, first)
        return chain((logits,), (self._logits_again(context, layers_output[0], places) for places in others))

    def begin_step(self, context: StepContext, logits_indices: Tensor, samples: SampledTokens | None = None) -> None:
        """Returns None: transformers computes in the caller's thread alone."""

    def close(self) -> None:
        """Nothing is to be ended: the decoder has no threads of its own."""

    def _logits(self, tokens: Tensor, positions: Tensor, attend: AttentionHandler, places: Tensor) -> Tensor:
        ids = tokens.unsqueeze(0)
        position_ids = positions.unsqueeze(0)
        named = {"use_cache": False, "logits_to_keep": places, "attend": attend}
        logits: Tensor = self._model(input_ids=ids, position_ids=position_ids, **named).logits[0]
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
            attention=tuple(layer.attention for layer in layers),
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
    dtype = str(config.dtype or checkpoint.config.get("dtype") or "float32").removeprefix("torch.")
    longest = int(getattr(config, "max_position_embeddings", None) or 2048)
    return TransformersBuilder(dtype, longest, default_length(longest), checkpoint.directory, architecture, config)


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
        raise CheckpointError(f"transformers does not know it either ({_first_line(error)})") from error


def _first_line(error: Exception) -> str:
    """What a library's exception says: a key's name says nothing without what it is of."""
    line = str(error).partition("\n")[0]
    return line if line and not isinstance(error, KeyError) else f"{type(error).__name__} {line}"


def _check_config(config: Any, architecture: str) -> None:
    """Raise unless `architecture` is the language model of `config`, a decoder whose attention can be exchanged."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if getattr(config, "is_encoder_decoder", False):
        raise CheckpointError("it is an encoder and a decoder")
    if config.get_text_config() is not config:
        raise CheckpointError("it takes more than text")
    if model_class is None:
        raise CheckpointError(f"transformers has no causal language model of type {config.model_type}")
    if model_class.__name__ != architecture:
        raise CheckpointError(f"the causal language model of type {config.model_type} is {model_class.__name__}")
    if not model_class._supports_attention_backend:
        message = "its class has not got transformers' attention interface, by which ours takes the place of its own"
        raise CheckpointError(message)
    if getattr(config, "quantization_config", None):
        method = config.to_dict()["quantization_config"].get("quant_method", "unknown method")
        raise CheckpointError(f"its weights are quantised ({method}); supported dtypes: {', '.join(DTYPES)}")
    strange = set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES
    if strange:
        served = ", ".join(sorted(LAYER_TYPES))
        raise CheckpointError(f"it has layers of type {', '.join(sorted(strange))}; served are {served}")
    ropes = getattr(config, "rope_parameters", None) or {}
    nested = [rope for rope in ropes.values() if isinstance(rope, dict)] or [ropes]
    longest = _BATCH_DEPENDENT_ROPE & {rope.get("rope_type") for rope in nested}
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
        model, loading_info = auto.from_pretrained(
            directory,
            dtype=context.dtype,
            attn_implementation=ATTENTION_NAME,
            output_loading_info=True,
            local_files_only=True,
            trust_remote_code=False,
        )
    except (OSError, ValueError, RuntimeError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"transformers could not load it: {_first_line(error)}") from error
    if loading_info["missing_keys"]:
        raise CheckpointError(f"tensor {min(loading_info['missing_keys'])} is missing from the weights")
    return model.to(context.device)
