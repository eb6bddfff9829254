"""The names and arrangement of a model's tensors in GGUF files, where they differ from those of a checkpoint.

Llama's converter permutes the rows of queries and keys, so that the two numbers that are rotated together are
neighbours; Gemma's adds one to the weights of norms; the experts of a layer are one tensor.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

_OUTER = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
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
    "block_sparse_moe.gate": "ffn_gate_inp",
}
_LLAMA_NORMS = {"post_attention_layernorm": "ffn_norm"}
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

_LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)")
_EXPERT_NAME = re.compile(r"(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)")
_ROTATED = ("attn_q", "attn_k")


@dataclass(frozen=True, slots=True)
class StoredName:
    """The place of one of a checkpoint's tensors: in tensor `name`, of which it may be one `expert`. Its rows may be
    `rotated` heads with neighbours in pairs; its numbers may be by one larger (`plus_one`)."""

    name: str
    expert: int | None = None
    rotated: bool = False
    plus_one: bool = False


class GgufNames:
    """The names of one architecture."""

    def __init__(self, architecture: str) -> None:
        """`architecture`: general.architecture of the file."""
        gemma = architecture.startswith("gemma")
        self._layer: Mapping[str, str] = _LAYER | (_GEMMA_NORMS if gemma else _LLAMA_NORMS)
        self._permuted, self._plus_one = architecture == "llama", gemma

    def stored(self, name: str) -> StoredName | None:
        """Where the tensor that a checkpoint calls `name` is; None if there is no such thing."""
        module, _, kind = name.rpartition(".")
        layer = _LAYER_NAME.fullmatch(module)
        if layer is None:
            outer = _OUTER.get(module)
            plus_one = self._plus_one and module.endswith("norm")
            return None if outer is None else StoredName(f"{outer}.{kind}", plus_one=plus_one)
        if (expert := _EXPERT_NAME.fullmatch(layer[2])) and expert[2] in _EXPERT:
            return StoredName(f"blk.{layer[1]}.{_EXPERT[expert[2]]}.{kind}", int(expert[1]))
        own = self._layer.get(layer[2])
        if own is None:
            return None
        rotated = self._permuted and own in _ROTATED
        return StoredName(f"blk.{layer[1]}.{own}.{kind}", None, rotated, self._plus_one and own.endswith("norm"))
