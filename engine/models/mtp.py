"""A checkpoint's own layer for multi-token prediction, as those of MiMo (arXiv 2505.07608), DeepSeek V3 (arXiv
2412.19437), GLM-4.5 and Qwen 3-Next, 3.5 and their successors have one: from the model's last hidden states and the
token that follows, it says the token after that."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import torch

from ..checkpoint.build_context import BuildContext
from ..checkpoint.hf_checkpoint import Checkpoint, text_tensor_name
from ..checkpoint.model_spec import CheckpointError, ModelSpec
from ..checkpoint.quantised_weights import open_weights
from ..checkpoint.weights import WeightLoader
from ..cpu.elementwise import join_features
from ..cpu.op_trace import SymbolicTensor
from ..layers.embed_and_head import EMBEDDING_WEIGHT, HEAD_WEIGHT, Embedding, LogitsOutput
from ..layers.linear import LMHead, OutputShard, column_linear
from ..layers.norm import NormFactory, offset_rms_norm, rms_norm
from ..layers.rotary import Rotary
from ..layers.self_attention import AttentionProjections
from .deepseek import build_deepseek_layer
from .draft_head import DraftHead, HeadEnds
from .glm import glm4_moe_variant
from .llama import LlamaVariant, build_layer, shared_rotary
from .native_decoder import DecoderLayer, NativeDecoder
from .qwen3_5 import build_qwen3_5_layer

MTP_PREFIX = "model.mtp_layers.0."
_OWN_LAYER = "model.layers.0."

_BuildLayer: TypeAlias = Callable[[ModelSpec, WeightLoader, Rotary], DecoderLayer]


class MtpLayout(NamedTuple):
    """How checkpoints of a family store the layer, and what is different about it."""

    prefixes: Mapping[str, str]
    """Beginnings of its tensors' names, with {layers} for the number of the model's layers -> in a model of one
    layer."""
    layer_count: str
    """The field of config.json that counts such layers; where it is absent there is one."""
    join: str
    """The name of the matrix that makes one state of a token's embedding and the hidden states before it."""
    token_norm: str
    """The name of the embedding's norm."""
    state_norm: str
    """The name of the hidden states' norm."""
    last_norm: str
    """The name of the norm of what the layer makes."""
    norm: NormFactory
    """The kind of all these norms."""
    build_layer: _BuildLayer
    tokens_first: bool
    """Whether the matrix takes the embedding before the hidden states, and not behind them."""
    after_norm: bool
    """Whether the hidden states are those after the model's last norm, and not before it."""


def _build_mimo(spec: ModelSpec, loader: WeightLoader, rotary: Rotary) -> DecoderLayer:
    return build_layer(spec, loader, 0, LlamaVariant(AttentionProjections(qkv_bias=True)), rotary)


def _build_qwen(spec: ModelSpec, loader: WeightLoader, rotary: Rotary) -> DecoderLayer:
    return build_qwen3_5_layer(spec, loader, 0, rotary)


def _build_glm(spec: ModelSpec, loader: WeightLoader, rotary: Rotary) -> DecoderLayer:
    return build_layer(spec, loader, 0, glm4_moe_variant(spec), rotary)


def _build_deepseek(spec: ModelSpec, loader: WeightLoader, rotary: Rotary) -> DecoderLayer:
    return build_deepseek_layer(spec, loader, 0, rotary)


_MIMO = MtpLayout(
    prefixes={MTP_PREFIX: _OWN_LAYER},
    layer_count="num_nextn_predict_layers",
    join=f"{_OWN_LAYER}input_proj",
    token_norm=f"{_OWN_LAYER}token_layernorm",
    state_norm=f"{_OWN_LAYER}hidden_layernorm",
    last_norm=f"{_OWN_LAYER}final_layernorm",
    norm=rms_norm,
    build_layer=_build_mimo,
    tokens_first=False,
    after_norm=False,
)
_QWEN = MtpLayout(
    prefixes={"mtp.layers.0.": _OWN_LAYER, "mtp.": "mtp."},
    layer_count="mtp_num_hidden_layers",
    join="mtp.fc",
    token_norm="mtp.pre_fc_norm_embedding",
    state_norm="mtp.pre_fc_norm_hidden",
    last_norm="mtp.norm",
    norm=offset_rms_norm,
    build_layer=_build_qwen,
    tokens_first=True,
    after_norm=True,
)
_GLM = MtpLayout(
    prefixes={"model.layers.{layers}.": _OWN_LAYER},
    layer_count="num_nextn_predict_layers",
    join=f"{_OWN_LAYER}eh_proj",
    token_norm=f"{_OWN_LAYER}enorm",
    state_norm=f"{_OWN_LAYER}hnorm",
    last_norm=f"{_OWN_LAYER}shared_head.norm",
    norm=rms_norm,
    build_layer=_build_glm,
    tokens_first=True,
    after_norm=True,
)
_DEEPSEEK = _GLM._replace(build_layer=_build_deepseek)
_LAYOUTS = {
    "DeepseekV32ForCausalLM": _DEEPSEEK,
    "DeepseekV3ForCausalLM": _DEEPSEEK,
    "Glm4MoeForCausalLM": _GLM,
    "Glm4MoeLiteForCausalLM": _DEEPSEEK,
    "GlmMoeDsaForCausalLM": _DEEPSEEK,
    "MiMoForCausalLM": _MIMO,
    "Qwen3NextForCausalLM": _QWEN,
    "Qwen3_5ForCausalLM": _QWEN,
    "Qwen3_5MoeForCausalLM": _QWEN,
}
"""The layout of each architecture's tensors."""


def check_mtp(checkpoint: Checkpoint) -> MtpLayout:
    """The layout of the layer in a checkpoint; refuses one that has none, or one that is not served.

    Raises:
        CheckpointError: says why.
    """
    config = checkpoint.config
    layout = _LAYOUTS.get(str(next(iter(config.get("architectures") or ()), "")))
    reason = ""
    if layout is None:
        reason = f"mtp is for checkpoints with layers for it, of {', '.join(_LAYOUTS)}"
    elif (layers := config.get(layout.layer_count, 1)) != 1:
        reason = f"{layout.layer_count} must be 1 for the method mtp, got {layers!r}"
    elif config.get("mtp_use_dedicated_embeddings"):
        reason = "mtp_use_dedicated_embeddings is not served: the layer takes the model's own embeddings"
    elif checkpoint.gguf is not None or checkpoint.stored_as not in ("", "fp8"):
        reason = f"layers for multi-token prediction of checkpoints stored as {checkpoint.stored_as} are not served"
    if layout is None or reason:
        raise CheckpointError(f"{checkpoint.where}: {reason}", field="speculative_config")
    return layout


class MtpHead(DraftHead):
    """The layer, with the embeddings and the LM head of its `target`, or whole ones of its own where ranks share those.
    It goes on from its own states as from the target's: proposals after the first are less often right, for it was
    trained to make one."""

    carries_norm = True

    def __init__(
        self,
        checkpoint: Checkpoint,
        spec: ModelSpec,
        context: BuildContext,
        target: NativeDecoder,
        split: bool = False,
    ) -> None:
        """`spec`: the target's. `split`: ranks share its ends.

        Raises:
            CheckpointError: tensors are missing, or of another shape than config.json says.
        """
        layout = check_mtp(checkpoint)
        self.spec = _one_layer(spec)
        self.target_layers = (spec.layers,)
        prefixes = {prefix.format(layers=spec.layers): own for prefix, own in layout.prefixes.items()}
        weights = open_weights(checkpoint, lambda stored: _own_name(text_tensor_name(stored), prefixes))
        if f"{layout.join}.weight" not in weights:
            message = f"{checkpoint.where}: it has no tensors of a layer for multi-token prediction"
            raise CheckpointError(message, field="speculative_config")
        loader = WeightLoader(weights, context)
        hidden = spec.hidden_size

        def norm(name: str) -> Any:
            return layout.norm(loader.vector(f"{name}.weight", hidden), spec.norm_eps)

        self._of_tokens = norm(layout.token_norm)
        self._of_states = norm(layout.state_norm)
        self._tokens_first = layout.tokens_first
        joined = OutputShard(layout.join, hidden, slice(0, hidden))
        self._join = column_linear(loader, [joined], 2 * hidden, bias=False)
        self._block: Any = layout.build_layer(self.spec, loader, shared_rotary(spec.rope, spec, loader))
        embedding = target.ends.input
        output = target.ends.output
        assert isinstance(embedding, Embedding), "a model of one stage has both ends"
        assert isinstance(output, LogitsOutput), "a model of one stage has both ends"
        self._target_norm: Any = output.norm if layout.after_norm else None
        head = output.head
        if split:
            whole = WeightLoader(open_weights(checkpoint), context)
            embedding = Embedding(whole, spec)
            name = EMBEDDING_WEIGHT if spec.tied_embeddings else HEAD_WEIGHT
            head = LMHead(whole, name, spec.vocab_size, hidden)
        ids = torch.arange(spec.vocab_size, dtype=torch.int32, device=context.device)
        super().__init__(HeadEnds(embedding, norm(layout.last_norm), head, ids), self._block.untraceable)

    def _fuse(self, states: Any, context: Any) -> Any:
        return states if self._target_norm is None else self._target_norm(states)

    def _layer(self, embedded: Any, states: Any, context: Any) -> tuple[Any, Any]:
        parts = self._of_states(states), self._of_tokens(embedded)
        residual: Any = self._join(join_features(*(parts[::-1] if self._tokens_first else parts)), context)
        nothing = residual.trace.no_delta if isinstance(residual, SymbolicTensor) else torch.zeros_like(residual)
        return residual, self._block(residual, nothing, context)


def _one_layer(spec: ModelSpec) -> ModelSpec:
    """A model of one layer that is as the last of those that attend."""
    layer = max(layer for layer, kind in enumerate(spec.attention) if kind is not None)
    experts = spec.experts
    if experts is not None:
        experts = replace(experts, sparse_layers=experts.sparse_layers[layer : layer + 1])
    alone = spec.attention[layer : layer + 1]
    return replace(spec, attention=alone, states=(), cache_owners=(), recurrence=None, experts=experts)


def _own_name(stored: str, prefixes: Mapping[str, str]) -> str:
    """The layer's tensors as those of a model of one layer, and the target's out of the way."""
    for prefix, own in prefixes.items():
        if stored.startswith(prefix):
            return own + stored.removeprefix(prefix)
    return f"target.{stored}"
