"""What GGUF files say of architectures some of whose layers keep a state: the fields of config.json that are special
there."""

from collections.abc import Callable
from typing import Any

from ...tokenization.gguf_file import GgufFile
from .gguf_fields import grouped_experts, has_tensor, kv_heads, own_layers, plain_experts, sigmoid_experts
from .model_spec import CheckpointError


def _lfm2(fields: GgufFile) -> dict[str, Any]:
    """Layers without key/value heads convolve."""
    if fields.number("attention.sliding_window", 0):
        raise CheckpointError(f"{fields.path}: {fields.prefix}attention.sliding_window is not supported beside states")
    counts = kv_heads(fields)
    return {
        "architectures": ["Lfm2ForCausalLM"],
        "layer_types": ["full_attention" if heads else "conv" for heads in counts] or None,
        "conv_L_cache": fields.number("shortconv.l_cache"),
        "norm_eps": fields.real("attention.layer_norm_rms_epsilon"),
        "block_auto_adjust_ff_dim": False,
    }


def _lfm2_moe(fields: GgufFile) -> dict[str, Any]:
    return {
        **_lfm2(fields),
        "architectures": ["Lfm2MoeForCausalLM"],
        **sigmoid_experts(fields),
        "num_experts": fields.number("expert_count"),
        "num_dense_layers": fields.number("leading_dense_block_count"),
        "use_expert_bias": has_tensor(fields, ".exp_probs_b.bias"),
    }


def _qwen3_5(fields: GgufFile) -> dict[str, Any]:
    """Layers with decays keep states."""
    layers = range(own_layers(fields))
    recurs = [f"blk.{layer}.ssm_a" in fields.tensors for layer in layers]
    value_heads = fields.number("ssm.time_step_rank")
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "num_hidden_layers": len(layers),
        "layer_types": ["linear_attention" if state else "full_attention" for state in recurs],
        "linear_num_key_heads": fields.number("ssm.group_count"),
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": fields.number("ssm.state_size"),
        "linear_value_head_dim": fields.number("ssm.inner_size") // max(value_heads, 1),
        "linear_conv_kernel_dim": fields.number("ssm.conv_kernel"),
    }


def _qwen3_5_moe(architecture: str) -> Callable[[GgufFile], dict[str, Any]]:
    def mixed(fields: GgufFile) -> dict[str, Any]:
        layers = range(own_layers(fields))
        return {
            **_qwen3_5(fields),
            "architectures": [architecture],
            **plain_experts(fields),
            "num_experts": fields.number("expert_count"),
            "moe_intermediate_size": fields.number("expert_feed_forward_length"),
            "shared_expert_intermediate_size": fields.number("expert_shared_feed_forward_length"),
            "mlp_only_layers": [layer for layer in layers if f"blk.{layer}.ffn_gate_inp.weight" not in fields.tensors],
        }

    return mixed


class _Scan:
    """The sizes of Mamba-2's layers."""

    def __init__(self, fields: GgufFile) -> None:
        self.heads = fields.number("ssm.time_step_rank")
        self.inner = fields.number("ssm.inner_size")
        self.head_dim = self.inner // max(self.heads, 1)
        self.state = fields.number("ssm.state_size")
        self.groups = fields.number("ssm.group_count")
        self.kernel = fields.number("ssm.conv_kernel")
        self.bias = has_tensor(fields, ".ssm_in.bias")
        self.convolution_bias = has_tensor(fields, ".ssm_conv1d.bias")
        self.norm_eps = fields.real("attention.layer_norm_rms_epsilon")

    def of_granite(self) -> dict[str, Any]:
        """In the fields that Granite and Falcon-H1 have for them."""
        return {
            "mamba_n_heads": self.heads,
            "mamba_d_head": self.head_dim,
            "mamba_d_state": self.state,
            "mamba_n_groups": self.groups,
            "mamba_d_conv": self.kernel,
            "mamba_expand": None,
            "mamba_proj_bias": self.bias,
            "mamba_conv_bias": self.convolution_bias,
        }

    def of_mixer(self) -> dict[str, Any]:
        """In those that Mamba's own line and Nemotron share."""
        return {
            "n_groups": self.groups,
            "conv_kernel": self.kernel,
            "use_bias": self.bias,
            "use_conv_bias": self.convolution_bias,
            "layer_norm_epsilon": self.norm_eps,
        }


def _mamba2(fields: GgufFile) -> dict[str, Any]:
    scan = _Scan(fields)
    sizes = {"num_heads": scan.heads, "head_dim": scan.head_dim, "state_size": scan.state}
    expand = scan.inner // max(fields.number("embedding_length"), 1)
    return {"architectures": ["Mamba2ForCausalLM"], **scan.of_mixer(), **sizes, "expand": expand}


def _granite_hybrid(fields: GgufFile) -> dict[str, Any]:
    """Layers without key/value heads are Mamba-2's. No layer rotates: those of Bamba do."""
    if fields.value("rope.scaling.finetuned", False):
        message = f"{fields.prefix}rope.scaling.finetuned is not supported: it is Bamba's, whose layers rotate"
        raise CheckpointError(f"{fields.path}: {message}")
    experts = fields.number("expert_count", 0)
    width = fields.number("feed_forward_length")
    return {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "layer_types": ["attention" if heads else "mamba" for heads in kv_heads(fields)],
        **_Scan(fields).of_granite(),
        "attention_bias": has_tensor(fields, ".attn_q.bias"),
        "attention_multiplier": fields.real("attention.scale", 1.0),
        "embedding_multiplier": fields.real("embedding_scale", 1.0),
        "residual_multiplier": fields.real("residual_scale", 1.0),
        "logits_scaling": fields.real("logit_scale", 1.0),
        "partial_rotary_factor": None,
        "num_local_experts": experts,
        "num_experts_per_tok": fields.number("expert_used_count") if experts else None,
        "shared_intermediate_size": fields.number("expert_shared_feed_forward_length") if experts else width,
    }


def _falcon_h1(fields: GgufFile) -> dict[str, Any]:
    """The multipliers of its config.json are in the weights."""
    scan = _Scan(fields)
    return {
        "architectures": ["FalconH1ForCausalLM"],
        **scan.of_granite(),
        "mamba_d_ssm": scan.inner,
        "mamba_rms_norm": has_tensor(fields, ".ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        "projectors_bias": has_tensor(fields, ".ssm_out.bias"),
    }


def _nemotron_h(fields: GgufFile) -> dict[str, Any]:
    """What a layer is, its tensors tell. Its router is a corrected sigmoid's, and says nothing of it."""
    scan = _Scan(fields)
    marks = {"ssm_in": "M", "attn_q": "*", "ffn_gate_inp": "E", "ffn_up": "-"}
    pattern = ""
    for layer in range(own_layers(fields)):
        kinds = [mark for part, mark in marks.items() if f"blk.{layer}.{part}.weight" in fields.tensors]
        pattern += kinds[0] if kinds else "M"
    mixed = {}
    if "E" in pattern:
        mixed = grouped_experts(fields) | {
            "moe_shared_expert_intermediate_size": fields.number("expert_shared_feed_forward_length"),
            "moe_latent_size": fields.number("moe_latent_size", 0) or None,
        }
    return {
        "architectures": ["NemotronHForCausalLM"],
        "hybrid_override_pattern": pattern,
        **scan.of_mixer(),
        "mamba_num_heads": scan.heads,
        "mamba_head_dim": scan.head_dim,
        "ssm_state_size": scan.state,
        "attention_bias": has_tensor(fields, ".attn_q.bias"),
        "mlp_bias": has_tensor(fields, ".ffn_up.bias"),
        **mixed,
    }


HYBRIDS = {
    "falcon-h1": _falcon_h1,
    "granitehybrid": _granite_hybrid,
    "lfm2": _lfm2,
    "lfm2moe": _lfm2_moe,
    "mamba2": _mamba2,
    "nemotron_h": _nemotron_h,
    "nemotron_h_moe": _nemotron_h,
    "qwen35": _qwen3_5,
    "qwen35moe": _qwen3_5_moe("Qwen3_5MoeForCausalLM"),
    "qwen3next": _qwen3_5_moe("Qwen3NextForCausalLM"),
}
"""general.architecture -> what is special in its config.json."""
