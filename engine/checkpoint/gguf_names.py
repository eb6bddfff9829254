"""What GGUF files call a checkpoint's tensors, by architecture. Knows no tensors and no files."""

import re
from collections.abc import Container
from dataclasses import dataclass

EMBEDDING_TABLES = "token_embd.weight", "per_layer_token_embd.weight"
"""Of which a step takes single rows: of tokens, and of tokens for each layer."""

_OUTER = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.embedding_norm": "token_embd_norm",
    "model.final_layernorm": "output_norm",
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
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
    "mlp.router": "ffn_gate_inp",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.k_b_proj": "attn_k_b",
    "self_attn.v_b_proj": "attn_v_b",
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
    "feed_forward.gate": "ffn_gate_inp",
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
    "linear_attn.in_proj_qkvz": "ssm_in",
    "linear_attn.in_proj_ba": "ssm_ba",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
_SCAN = {"in_proj": "ssm_in", "conv1d": "ssm_conv1d", "norm": "ssm_norm", "out_proj": "ssm_out"}
_MIXER = {
    "norm": "attn_norm",
    **{f"mixer.{part}": own for part, own in _SCAN.items()},
    "mixer.q_proj": "attn_q",
    "mixer.k_proj": "attn_k",
    "mixer.v_proj": "attn_v",
    "mixer.o_proj": "attn_output",
    "mixer.up_proj": "ffn_up",
    "mixer.down_proj": "ffn_down",
    "mixer.gate": "ffn_gate_inp",
    "mixer.fc1_latent_proj": "ffn_latent_down",
    "mixer.fc2_latent_proj": "ffn_latent_up",
    "mixer.shared_experts.up_proj": "ffn_up_shexp",
    "mixer.shared_experts.down_proj": "ffn_down_shexp",
}
"""The names of Mamba's own line and of Nemotron."""
_MAMBA = {f"mamba.{part}": own for part, own in _SCAN.items()}
_GRANITE = _MAMBA | {
    "post_attention_layernorm": "ffn_norm",
    "block_sparse_moe.router.layer": "ffn_gate_inp",
}
_GRANITE_MLP = {"gate_proj": "ffn_gate", "up_proj": "ffn_up", "output_linear": "ffn_down"}
"""Of its shared MLP, which has the names of one where there are no experts beside it."""
_FALCON = _MAMBA | {
    "pre_ff_layernorm": "ffn_norm",
    "feed_forward.gate_proj": "ffn_gate",
    "feed_forward.up_proj": "ffn_up",
    "feed_forward.down_proj": "ffn_down",
}
_BARE = {
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "block_sparse_moe.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.moe_statics.e_score_correction_bias": "exp_probs_b.bias",
    "mixer.gate.e_score_correction_bias": "exp_probs_b.bias",
    "feed_forward.expert_bias": "exp_probs_b.bias",
    "self_attn.sinks": "attn_sinks.weight",
    "layer_scalar": "layer_output_scale.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "altup.correct_output_scale": "altup_correct_scale.weight",
    **{
        f"{mixer}.{part}": own
        for mixer in ("mamba", "mixer")
        for part, own in (("A_log", "ssm_a"), ("dt_bias", "ssm_dt.bias"), ("D", "ssm_d"))
    },
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
_GEMMA_INPUTS = _GEMMA_NORMS | {
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
}
_GEMMA4 = _GEMMA_INPUTS | {
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "router.proj": "ffn_gate_inp",
}
_GEMMA3N = _GEMMA_INPUTS | {
    "altup.router_norm": "altup_router_norm",
    "altup.modality_router": "altup_router",
    "altup.prediction_coefs": "altup_predict_coef",
    "altup.correction_coefs": "altup_correct_coef",
    "laurel.linear_left": "laurel_l",
    "laurel.linear_right": "laurel_r",
    "laurel.post_laurel_norm": "laurel_post_norm",
}
_EXPERT = {
    "gate_proj": "ffn_gate_exps",
    "up_proj": "ffn_up_exps",
    "down_proj": "ffn_down_exps",
    "w1": "ffn_gate_exps",
    "w3": "ffn_up_exps",
    "w2": "ffn_down_exps",
    "output_linear": "ffn_down_exps",
    "gate_up_proj": "ffn_gate_up_exps",
}

_OF_ARCHITECTURE = {
    **dict.fromkeys(("lfm2", "lfm2moe"), _LFM2),
    **dict.fromkeys(("qwen35", "qwen35moe", "qwen3next"), _QWEN35),
    **dict.fromkeys(("mamba2", "nemotron_h", "nemotron_h_moe"), _MIXER),
    "granitehybrid": _GRANITE,
    "falcon-h1": _FALCON,
    "gemma3n": _GEMMA3N,
    "gemma4": _GEMMA4,
    "gpt-oss": {"post_attention_layernorm": "post_attention_norm"},
    **dict.fromkeys(("olmo2", "exaone4", "seed_oss", "glm4moe"), _NORMS_BEHIND),
}
"""What an architecture's layers have beside `_LAYER`, by general.architecture."""

_LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)")
_EXPERT_NAME = re.compile(r"(?:(?:mlp|block_sparse_moe|feed_forward|mixer)\.)?experts\.(\d+)\.(\w+)")
_STREAMS_NAME = re.compile(r"model\.altup_(projections|unembed_projections)\.(\d+)")
_STREAMS = {"projections": "altup_proj", "unembed_projections": "altup_unembd_proj"}
_ROTATED = ("attn_q", "attn_k")
_PERMUTED = frozenset({"llama", "smollm3", "granitehybrid", "nemotron_h", "nemotron_h_moe"})
"""Architectures whose converter permutes the rows of queries and keys."""

_OFFSET = frozenset({"gemma2", "gemma3", "qwen35", "qwen35moe", "qwen3next"})
"""Architectures whose converter adds one to the weights of norms."""


@dataclass(frozen=True, slots=True)
class StoredName:
    """The place of a checkpoint's tensor in a GGUF file."""

    name: str
    expert: int | None = None
    """The expert that it is of a layer's, or the stream that it makes of a token's, where all are one tensor."""
    rotated: bool = False
    """Whether its rows are permuted heads: those that are rotated together are adjacent."""
    plus_one: bool = False
    """Whether one was added to its numbers."""


class GgufNames:
    """The names of one architecture."""

    def __init__(self, architecture: str, tensors: Container[str]) -> None:
        """`architecture`: general.architecture of the file; `tensors`: the names of those in it."""
        gemma = architecture.startswith("gemma")
        self._layer: dict[str, str] = _LAYER | _OF_ARCHITECTURE.get(
            architecture, _GEMMA_NORMS if gemma else _LLAMA_NORMS
        )
        if architecture == "granitehybrid":
            suffix = "_shexp" if "blk.0.ffn_gate_shexp.weight" in tensors else ""
            self._layer |= {f"shared_mlp.{part}": f"{own}{suffix}" for part, own in _GRANITE_MLP.items()}
        self._bare = _BARE
        if "blk.0.ffn_norm" in tensors:  # as the converter calls it in Falcon-H1
            self._bare = _BARE | {"pre_ff_layernorm.weight": "ffn_norm"}
        self._permuted = architecture in _PERMUTED
        self._plus_one = architecture in _OFFSET

    def stored(self, name: str) -> StoredName | None:
        """The place of the tensor that a checkpoint calls `name`; None if it has none."""
        layer = _LAYER_NAME.fullmatch(name)
        if layer is None:
            return self._outer(*name.rsplit(".", 1))
        if bare := self._bare.get(layer[2]):
            return StoredName(f"blk.{layer[1]}.{bare}")
        module, _, kind = layer[2].rpartition(".")
        if (expert := _EXPERT_NAME.fullmatch(module)) and expert[2] in _EXPERT:
            return StoredName(f"blk.{layer[1]}.{_EXPERT[expert[2]]}.{kind}", int(expert[1]))
        own = self._layer.get(module)
        if own is None:
            return None
        rotated = self._permuted and own in _ROTATED
        plus_one = self._plus_one and own.endswith("norm") and own != "ssm_norm"
        return StoredName(f"blk.{layer[1]}.{own}.{kind}", None, rotated, plus_one)

    def _outer(self, module: str, kind: str = "") -> StoredName | None:
        if streams := _STREAMS_NAME.fullmatch(module):
            return StoredName(f"{_STREAMS[streams[1]]}.{kind}", int(streams[2]))
        outer = _OUTER.get(module)
        plus_one = self._plus_one and module.endswith("norm")
        return None if outer is None else StoredName(f"{outer}.{kind}", plus_one=plus_one)
