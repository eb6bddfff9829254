"""What GGUF files call a checkpoint's tensors, by architecture. Knows no tensors and no files."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

_OUTER = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.embedding_norm": "token_embd_norm",
}
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "block_sparse_moe.gate": "ffn_gate_inp",
}
_LFM2 = {
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "self_attn.out_proj": "attn_output",
    "conv.in_proj": "shortconv.in_proj",
    "conv.conv": "shortconv.conv",
    "conv.out_proj": "shortconv.out_proj",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
}
_QWEN35 = {
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
_BARE = {
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "block_sparse_moe.e_score_correction_bias": "exp_probs_b.bias",
}
"""Tensors of a layer that are not a module's weight or bias, there or here."""

_LLAMA_NORMS = {"post_attention_layernorm": "ffn_norm"}
_NORMS_BEHIND = {
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
"""Names in layers that normalise what attention, or both parts, give. The norm before an MLP of Seed-OSS and GLM-4.5
has the first name, too."""
_GEMMA_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_EXPERT = {
    "gate_proj": "ffn_gate_exps",
    "up_proj": "ffn_up_exps",
    "down_proj": "ffn_down_exps",
    "w1": "ffn_gate_exps",
    "w3": "ffn_up_exps",
    "w2": "ffn_down_exps",
}

_OF_ARCHITECTURE = {
    "lfm2": _LFM2,
    "qwen35": _QWEN35,
    **dict.fromkeys(("olmo2", "exaone4", "seed_oss", "glm4moe"), _NORMS_BEHIND),
}
"""What an architecture's layers have beside `_LAYER`, by general.architecture."""

_LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)")
_EXPERT_NAME = re.compile(r"(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)")
_ROTATED = ("attn_q", "attn_k")


@dataclass(frozen=True, slots=True)
class StoredName:
    """The place of a checkpoint's tensor in a GGUF file."""

    name: str
    expert: int | None = None
    """The expert that it is of a layer's, which are one tensor."""
    rotated: bool = False
    """Whether its rows are permuted heads: those that are rotated together are adjacent."""
    plus_one: bool = False
    """Whether one was added to its numbers."""


class GgufNames:
    """The names of one architecture."""

    def __init__(self, architecture: str) -> None:
        """`architecture`: general.architecture of the file."""
        gemma = architecture.startswith("gemma")
        self._layer: Mapping[str, str] = _LAYER | _OF_ARCHITECTURE.get(
            architecture, _GEMMA_NORMS if gemma else _LLAMA_NORMS
        )
        self._permuted = architecture in ("llama", "smollm3")
        self._plus_one = gemma or architecture == "qwen35"

    def stored(self, name: str) -> StoredName | None:
        """The place of the tensor that a checkpoint calls `name`; None if it has none."""
        module, _, kind = name.rpartition(".")
        layer = _LAYER_NAME.fullmatch(module)
        if layer is None:
            outer = _OUTER.get(module)
            plus_one = self._plus_one and module.endswith("norm")
            return None if outer is None else StoredName(f"{outer}.{kind}", plus_one=plus_one)
        if bare := _BARE.get(f"{layer[2]}.{kind}"):
            return StoredName(f"blk.{layer[1]}.{bare}")
        if (expert := _EXPERT_NAME.fullmatch(layer[2])) and expert[2] in _EXPERT:
            return StoredName(f"blk.{layer[1]}.{_EXPERT[expert[2]]}.{kind}", int(expert[1]))
        own = self._layer.get(layer[2])
        if own is None:
            return None
        rotated = self._permuted and own in _ROTATED
        return StoredName(
            f"blk.{layer[1]}.{own}.{kind}", None, rotated, self._plus_one and own.endswith("norm") and own != "ssm_norm"
        )
