"""EAGLE-3 heads (arXiv 2503.01840) in the format of the speculators library: one decoder layer that goes on from hidden
states of its target, with a vocabulary of its own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checkpoint.build_context import BuildContext
from ..checkpoint.hf_checkpoint import open_checkpoint
from ..checkpoint.hf_config import read_spec
from ..checkpoint.model_spec import CheckpointError, ModelSpec
from ..checkpoint.quantised_weights import open_weights
from ..checkpoint.weights import CheckpointWeights, TensorSlice, WeightLoader
from ..cpu.elementwise import join_features
from ..layers.embed_and_head import EMBEDDING_WEIGHT, Embedding
from ..layers.linear import LMHead, OutputShard, column_linear
from ..layers.mlp import GatedMLP
from ..layers.norm import rms_norm
from ..layers.self_attention import AttentionProjections, SelfAttention
from .draft_head import DraftHead, HeadEnds
from .llama import mlp_spec, shared_rotary

_LAYER = "layers.0."
_OWN_LAYER = "model.layers.0."
_NOT_SERVED = ("norm_before_fc", "fc_norm", "parallel_drafting")


class Eagle3Config(NamedTuple):
    """A head's config.json: `spec` of its layer, whose vocabulary and hidden states are the target's; the layers of the
    target whose input it takes; the tokens it chooses among; whether what is added to its layer's result is the
    normalised hidden states."""

    directory: Path
    spec: ModelSpec
    target_layers: tuple[int, ...]
    draft_vocab_size: int
    norm_before_residual: bool


def read_eagle3_config(model: str, target: ModelSpec) -> Eagle3Config:
    """The head in a checkpoint directory or of a hub id, for `target`.

    Raises:
        CheckpointError: it is no head in this format, asks for what is not served, or is another target's.
    """
    checkpoint = open_checkpoint(model)
    config = checkpoint.config
    where = checkpoint.where

    def fail(reason: str) -> CheckpointError:
        return CheckpointError(f"{where}: {reason}", field="speculative_config")

    if config.get("speculators_model_type") != "eagle3" or not isinstance(config.get("transformer_layer_config"), dict):
        raise fail('no EAGLE-3 head in the format of speculators: "speculators_model_type" must be "eagle3"')
    if stray := next(filter(config.get, _NOT_SERVED), None):
        raise fail(f"{stray} is not served")
    layer: dict[str, Any] = {**config["transformer_layer_config"], "architectures": ["LlamaForCausalLM"]}
    spec = read_spec({"dtype": config.get("dtype") or config.get("torch_dtype"), **layer}, where)
    if spec.layers != 1:
        raise fail(f"a head of {spec.layers} layers is not served; one is")
    if config.get("target_hidden_size") not in (None, target.hidden_size) or spec.hidden_size != target.hidden_size:
        raise fail(f"it is made for hidden states of another size than the model's {target.hidden_size}")
    if spec.vocab_size != target.vocab_size:
        raise fail(f"it is made for {spec.vocab_size} tokens, and the model has {target.vocab_size}")
    usual = (2, target.layers // 2, target.layers - 3)
    layer_ids = config.get("eagle_aux_hidden_state_layer_ids") or usual
    if not isinstance(layer_ids, list | tuple) or not {*map(str, layer_ids)} <= {*map(str, range(target.layers))}:
        ids = "eagle_aux_hidden_state_layer_ids"
        raise fail(f"{ids} must be layers of the model, 0 to {target.layers - 1}, got {layer_ids}")
    size = config.get("draft_vocab_size") or spec.vocab_size
    if type(size) is not int or not 1 <= size <= spec.vocab_size:
        raise fail(f"draft_vocab_size must be 1 to {spec.vocab_size}, got {size!r}")
    directory = checkpoint.directory
    before_residual = bool(config.get("norm_before_residual", True))
    return Eagle3Config(directory, spec, tuple(map(int, layer_ids)), size, before_residual)


class Eagle3Head(DraftHead):
    """The head itself."""

    def __init__(self, config: Eagle3Config, context: BuildContext, target: str) -> None:
        """`target`: the checkpoint whose embeddings it shares where it has none of its own.

        Raises:
            CheckpointError: tensors are missing, or of another shape than config.json says.
        """
        spec = config.spec
        self.target_layers = config.target_layers
        self.spec = spec
        weights = CheckpointWeights(config.directory, _own_name)
        loader = WeightLoader(weights, context)
        hidden = spec.hidden_size
        eps = spec.norm_eps
        name = _OWN_LAYER.rstrip(".")
        shared = loader if EMBEDDING_WEIGHT in weights else WeightLoader(open_weights(open_checkpoint(target)), context)
        embedding = Embedding(shared, spec)
        fused = OutputShard("fc", hidden, slice(0, hidden))
        self._project = column_linear(loader, [fused], len(config.target_layers) * hidden, bias="fc.bias" in weights)

        def norm(of: str) -> Callable[[Tensor], Tensor]:
            return rms_norm(loader.vector(f"{of}.weight", hidden), eps)

        self._of_tokens = norm(f"{name}.input_layernorm")
        self._of_states = norm(f"{name}.hidden_norm")
        self._before_mlp = rms_norm(loader.vector(f"{name}.post_attention_layernorm.weight", hidden), eps)
        last = rms_norm(loader.vector("model.norm.weight", hidden), eps)
        rotary = shared_rotary(spec.rope, spec, loader)
        bias = AttentionProjections(qkv_bias=spec.attention_bias, out_bias=spec.attention_bias)
        self._attention = SelfAttention(loader, spec, 0, bias, rotary, inputs=2 * hidden)
        self._mlp = GatedMLP(loader, mlp_spec(spec, 0))
        lm_head = LMHead(loader, "lm_head.weight", config.draft_vocab_size, hidden)
        self._norm_before_residual = config.norm_before_residual
        target_ids = torch.arange(config.draft_vocab_size, dtype=torch.int32, device=context.device)
        if "d2t" in weights:
            offsets = weights.view(TensorSlice("d2t", (config.draft_vocab_size,)), {"I64": torch.int64})
            target_ids += offsets.to(target_ids)
        elif config.draft_vocab_size != spec.vocab_size:
            raise CheckpointError(f"{config.directory}: tensor d2t is missing from the weights")
        untraceable = self._attention.untraceable or self._mlp.untraceable
        super().__init__(HeadEnds(embedding, last, lm_head, target_ids), untraceable)

    def _fuse(self, states: Any, context: Any) -> Any:
        return self._project(states, context)

    def _layer(self, embedded: Any, states: Any, context: Any) -> tuple[Any, Any]:
        normed = self._of_states(states)
        joined = join_features(self._of_tokens(embedded), normed)
        residual = normed if self._norm_before_residual else states
        mixed = self._before_mlp.add_and_norm(residual, self._attention(joined, context))
        return residual, self._mlp(mixed, context)


def _own_name(stored: str) -> str:
    for prefix, own in ((_LAYER, _OWN_LAYER), ("norm.", "model.norm."), ("embed_tokens.", "model.embed_tokens.")):
        if stored.startswith(prefix):
            return own + stored.removeprefix(prefix)
    return stored
