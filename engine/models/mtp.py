"""A checkpoint's own layer for multi-token prediction, as MiMo's has one (arXiv 2505.07608): from the model's last
hidden states and the token that follows, it says the token after that."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.build_context import BuildContext
from ..checkpoint.hf_checkpoint import Checkpoint
from ..checkpoint.model_spec import CheckpointError, ModelSpec
from ..checkpoint.weights import CheckpointWeights, WeightLoader
from ..cpu.elementwise import join_features
from ..layers.embed_and_head import Embedding, LogitsOutput
from ..layers.linear import OutputShard, column_linear
from ..layers.mlp import GatedMLP
from ..layers.norm import rms_norm
from ..layers.self_attention import AttentionProjections, SelfAttention
from .draft_head import DraftHead, HeadEnds
from .llama import mlp_spec, shared_rotary
from .native_decoder import NativeDecoder

MTP_PREFIX = "model.mtp_layers.0."
_OWN_LAYER = "model.layers.0."
_WITH_LAYERS = "MiMoForCausalLM"


def check_mtp(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint that has no such layer, or one that is not served.

    Raises:
        CheckpointError: says why.
    """
    config = checkpoint.config
    reason = ""
    if _WITH_LAYERS not in (config.get("architectures") or ()):
        reason = f"mtp is for checkpoints with layers for it, of {_WITH_LAYERS}"
    elif (layers := config.get("num_nextn_predict_layers")) != 1:
        reason = f"num_nextn_predict_layers must be 1 for the method mtp, got {layers!r}"
    elif checkpoint.stored_as or checkpoint.gguf is not None:
        reason = "its layer for multi-token prediction is quantised, which is not served"
    if reason:
        raise CheckpointError(f"{checkpoint.where}: {reason}", field="speculative_config")


class MtpHead(DraftHead):
    """The layer, with the embeddings and the LM head of its `target`. It goes on from its own states as from the
    target's: proposals after the first are less often right, for it was trained to make one."""

    carries_norm = True

    def __init__(self, checkpoint: Checkpoint, spec: ModelSpec, context: BuildContext, target: NativeDecoder) -> None:
        """`spec`: the target's.

        Raises:
            CheckpointError: tensors are missing, or of another shape than config.json says.
        """
        check_mtp(checkpoint)
        self.spec = replace(spec, attention=spec.attention[-1:])
        self.target_layers = (spec.layers,)
        loader = WeightLoader(CheckpointWeights(checkpoint.directory, _own_name), context)
        hidden = spec.hidden_size

        def norm(of: str) -> Callable[[Any], Any]:
            return rms_norm(loader.vector(f"{_OWN_LAYER}{of}.weight", hidden), spec.norm_eps)

        self._of_tokens = norm("token_layernorm")
        self._of_states = norm("hidden_layernorm")
        self._before_attention = norm("input_layernorm")
        self._before_mlp: Any = norm("post_attention_layernorm")
        joined = OutputShard(f"{_OWN_LAYER}input_proj", hidden, slice(0, hidden))
        self._join = column_linear(loader, [joined], 2 * hidden, bias=False)
        rotary = shared_rotary(spec.rope, spec, loader)
        self._attention = SelfAttention(loader, self.spec, 0, AttentionProjections(qkv_bias=True), rotary)
        self._mlp = GatedMLP(loader, mlp_spec(self.spec, 0))
        embedding = target.ends.input
        output = target.ends.output
        assert isinstance(embedding, Embedding), "a model of one stage has both ends"
        assert isinstance(output, LogitsOutput), "a model of one stage has both ends"
        last = rms_norm(loader.vector(f"{_OWN_LAYER}final_layernorm.weight", hidden), spec.norm_eps)
        ids = torch.arange(spec.vocab_size, dtype=torch.int32, device=context.device)
        untraceable = self._attention.untraceable or self._mlp.untraceable
        super().__init__(HeadEnds(embedding, last, output.head, ids), untraceable)

    def _fuse(self, states: Tensor, context: Any) -> Tensor:
        return states

    def _layer(self, embedded: Any, states: Any, context: Any) -> tuple[Any, Any]:
        joined = join_features(self._of_states(states), self._of_tokens(embedded))
        residual = self._join(joined, context)
        attended = self._attention(self._before_attention(residual), context)
        return residual, self._mlp(self._before_mlp.add_and_norm(residual, attended), context)


def _own_name(stored: str) -> str:
    """The layer's tensors as those of a model of one layer, and the target's out of the way."""
    if stored.startswith(MTP_PREFIX):
        return _OWN_LAYER + stored.removeprefix(MTP_PREFIX)
    return f"target.{stored}"
