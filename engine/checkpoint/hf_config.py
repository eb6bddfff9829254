"""Reads a parsed config.json of any supported architecture into a `ModelSpec`. Knows nothing of tensors or files."""

from collections.abc import Mapping
from typing import Any

from ...core.errors import shorten
from .config_fields import MOST_PARTS, ArchitectureDefaults, ConfigFields
from .gemma_config import GEMMAS
from .hybrid_config import HYBRIDS
from .latent_config import LATENTS, latent_attention
from .llama_kin_config import LLAMA_KIN
from .model_spec import CheckpointError, LayerAttention, ModelSpec
from .seq2seq_config import SEQ2SEQ


def read_spec(config: Mapping[str, Any], where: str) -> ModelSpec:
    """The spec of a parsed config.json, with the fields of transformers 5 or the older ones; `where` is its path, for
    errors.

    Raises:
        CheckpointError: a field is missing or has a value that is not supported.
        UnsupportedVariant: none of our own files computes the variant.
    """
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1:
        raise CheckpointError(f"{where}: architectures must name one class, got {names!r}")
    architecture = str(names[0])
    defaults = _ARCHITECTURES.get(architecture, ArchitectureDefaults())
    fields = ConfigFields(config, where, defaults)
    try:
        others = _OWN_FIELDS | _FAMILY_FIELD_NAMES - _FAMILY_FIELDS.get(architecture, _NO_FIELDS)
        published = {name: value for name, value in config.items() if name not in others}
        fields = fields._replace(config={**defaults.absent, **published})
        fields = fields._replace(config=defaults.translate(fields))
        if config.get("use_bidirectional_attention") not in (None, False, "vision"):  # no text attends ahead
            raise fields.error("use_bidirectional_attention is not supported; only causal attention is")
        return _spec(architecture, fields)
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
        raise fields.error(f"a field has a value of the wrong kind: {error}") from error


def _spec(architecture: str, fields: ConfigFields) -> ModelSpec:
    heads, hidden = fields.number("num_attention_heads"), fields.number("hidden_size")
    head_dim = fields.number("head_dim", hidden // heads, MOST_PARTS)
    kv_heads = fields.number("num_key_value_heads", heads)
    if heads % kv_heads:
        raise fields.error(f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    for name, value in fields.defaults.only.items():
        if fields.config.get(name, value) != value:
            raise fields.unknown(f"{name} {shorten(repr(fields.config[name]))} is not supported here, {value} is")
    hybrid = None if fields.defaults.hybrid is None else fields.defaults.hybrid(fields)
    unequal = None if fields.defaults.unequal is None else fields.defaults.unequal(fields)
    latent = None if fields.defaults.latent is None else fields.defaults.latent(fields)
    if latent is not None:
        attention: tuple[LayerAttention | None, ...] = latent_attention(fields, latent)
    else:
        attention = fields.attention(hybrid, head_dim) if unequal is None else unequal.attention
    rope = fields.rope("full_attention", head_dim if unequal is None else unequal.full_head_dim)
    longest = fields.number("max_position_embeddings", 2048)
    return ModelSpec(
        architecture=architecture,
        vocab_size=fields.number("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.number("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        attention=attention,
        cache_owners=() if unequal is None else unequal.cache_owners,
        mlp_sizes=() if unequal is None else unequal.mlp_sizes,
        gemma=None if unequal is None else unequal.gemma,
        states=() if hybrid is None else hybrid.states,
        recurrence=None if hybrid is None else hybrid.recurrence,
        gated_attention=hybrid is not None and hybrid.gated,
        multipliers=fields.multipliers(),
        feeds=() if hybrid is None else hybrid.feeds,
        shared_blocks=None if hybrid is None else hybrid.shared,
        mlp_matrices=fields.number("mlp_matrices", 3),
        attention_out_bias=fields.flag("attention_out_bias"),
        normed_heads=fields.flag("use_qk_norm"),
        rotates=fields.flags("rotates"),
        query_growth=fields.real("query_growth") or 0.0,
        latent=latent,
        most_dense_tokens=fields.number("most_dense_tokens", 0, least=0),
        norm_eps=fields.real("rms_norm_eps") or 1e-6,
        rope=rope,
        local_rope=fields.rope("sliding_attention", head_dim),
        # Yarn's recipes often leave max_position_embeddings at the length before scaling.
        max_position=max(longest, int(rope.original_max_position * rope.factor)) if rope.kind == "yarn" else longest,
        tied_embeddings=fields.flag("tie_word_embeddings"),
        attention_bias=fields.flag("attention_bias"),
        mlp_bias=fields.flag("mlp_bias"),
        activation=fields.activation(),
        logit_softcap=fields.real("final_logit_softcapping"),
        experts=fields.experts(),
        dtype=fields.dtype(),
        deepstack=fields.number("deepstack_layers", 0, least=0),
        encoder=None if fields.defaults.encoder is None else fields.defaults.encoder(fields),
        distance_buckets=fields.number("relative_attention_num_buckets", 0, least=0) if attention[0] else 0,
    )


def _always(config: Mapping[str, Any], layer: int) -> bool:
    return True


_OWN_FIELDS = frozenset(
    {
        "attends_both_ways",
        "attention_sinks",
        "float32_router",
        "group_judges",
        "least_weight_sum",
        "mlp_matrices",
        "most_dense_tokens",
        "query_growth",
        "rotates",
        "score_distances",
        "sigmoid_router",
    }
)
"""What a family's `translate` alone says: in a config.json these names stand for nothing that is known here."""

_NO_FIELDS = frozenset[str]()
_SOFTCAPS = frozenset({"final_logit_softcapping", "hidden_activation"})
_SCALED_SCORES = _SOFTCAPS | {"query_pre_attn_scalar", "attn_logit_softcapping"}
_EXPERTS = frozenset({"num_experts_per_tok"})
_SIZED_EXPERTS = _EXPERTS | {"moe_intermediate_size", "norm_topk_prob"}
_ROUTED = _SIZED_EXPERTS | {"routed_scaling_factor", "n_group", "topk_group"}
_SPARSE_LAYERS = _SIZED_EXPERTS | {"decoder_sparse_step", "mlp_only_layers"}
_MULTIPLIED_BRANCHES = frozenset(
    f"{part}_multiplier" for part in ("lm_head", "key", "attention_in", "attention_out", "ssm_in", "ssm_out")
)
_FAMILY_FIELDS = {
    **dict.fromkeys(SEQ2SEQ, frozenset({"embedding_multiplier"})),
    "BambaForCausalLM": frozenset({"mlp_bias"}),
    "DeepseekV2ForCausalLM": _ROUTED | {"mlp_bias"},
    "DeepseekV32ForCausalLM": _ROUTED,
    "DeepseekV3ForCausalLM": _ROUTED,
    "Dots1ForCausalLM": _ROUTED,
    "Ernie4_5_MoeForCausalLM": frozenset({"moe_intermediate_size"}),
    "FalconH1ForCausalLM": _MULTIPLIED_BRANCHES
    | {"embedding_multiplier", "mlp_multipliers", "ssm_multipliers", "mlp_bias"}
    | {"mamba_d_ssm", "mamba_rms_norm", "mamba_norm_before_gate", "projectors_bias"},
    "Zamba2ForCausalLM": frozenset({"query_pre_attn_scalar", "mlp_bias"}),
    "Gemma2ForCausalLM": _SCALED_SCORES,
    "Gemma3ForCausalLM": _SCALED_SCORES,
    "Gemma3nForCausalLM": _SOFTCAPS,
    "Gemma4ForCausalLM": _SOFTCAPS | {"moe_intermediate_size"},
    "Gemma4UnifiedForCausalLM": _SOFTCAPS,
    "Glm4MoeForCausalLM": _ROUTED | {"use_qk_norm"},
    "Glm4MoeLiteForCausalLM": _ROUTED,
    "GlmMoeDsaForCausalLM": _ROUTED,
    "GptOssForCausalLM": _EXPERTS,
    "GraniteMoeHybridForCausalLM": _EXPERTS
    | {"attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"},
    "Lfm2MoeForCausalLM": _SIZED_EXPERTS | {"routed_scaling_factor", "use_expert_bias"},
    "LlamaForCausalLM": frozenset({"mlp_bias"}),
    "MiniMaxM2ForCausalLM": _EXPERTS,
    "MixtralForCausalLM": _EXPERTS,
    "NemotronHForCausalLM": _ROUTED | {"mlp_bias", "moe_latent_size"},
    "Qwen3MoeForCausalLM": _SPARSE_LAYERS,
    "Qwen3NextForCausalLM": _SPARSE_LAYERS | {"shared_expert_intermediate_size"},
    "Qwen3_5MoeForCausalLM": _EXPERTS | {"moe_intermediate_size", "shared_expert_intermediate_size"},
    "SeedOssForCausalLM": frozenset({"mlp_bias", "attention_out_bias"}),
    "SmolLM3ForCausalLM": frozenset({"mlp_bias"}),
    "SolarOpenForCausalLM": _ROUTED,
}
"""Fields that some families alone have: in a config.json of another they stand for nothing, as in transformers."""

_FAMILY_FIELD_NAMES = frozenset[str]().union(*_FAMILY_FIELDS.values())


def _if_used(config: Mapping[str, Any], layer: int) -> bool:
    return bool(config.get("use_sliding_window"))


def _qwen(config: Mapping[str, Any], layer: int) -> bool:
    return _if_used(config, layer) and layer >= int(config.get("max_window_layers", 28))


def _even(config: Mapping[str, Any], layer: int) -> bool:
    return layer % 2 == 0


def _gemma3(config: Mapping[str, Any], layer: int) -> bool:
    return (layer + 1) % int(config.get("sliding_window_pattern") or 6) != 0


_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _gpt_oss_fields(fields: ConfigFields) -> Mapping[str, Any]:
    config = fields.config
    own: dict[str, Any] = {"attention_sinks": True}
    if not config.get("rope_parameters") and not config.get("rope_scaling"):
        own["rope_parameters"] = _GPT_OSS_ROPE
    return {**config, **own}


_GEMMA = {
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_QWEN2 = ArchitectureDefaults(
    _qwen,
    {"sliding_window": 4096},
    reads_layer_types=True,
    # The three positions that mrope gives a token are one and the same where there are no images.
    rope_types={"mrope": "default"},
)
_ARCHITECTURES: dict[str, ArchitectureDefaults] = {
    "MistralForCausalLM": ArchitectureDefaults(_always, {"sliding_window": 4096}),
    "MiMoForCausalLM": _QWEN2,
    "Qwen2ForCausalLM": _QWEN2,
    "Qwen3ForCausalLM": _QWEN2._replace(absent={"sliding_window": 4096, "head_dim": 128}),
    "Qwen3MoeForCausalLM": ArchitectureDefaults(_if_used, {"sliding_window": 4096, "norm_topk_prob": False}),
    "MixtralForCausalLM": ArchitectureDefaults(_always, {"rms_norm_eps": 1e-5}),
    "Phi3ForCausalLM": ArchitectureDefaults(
        _always,
        {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096},
        partial_rotary=True,
        rope_types={"su": "longrope", "yarn": "longrope"},
    ),
    "Gemma2ForCausalLM": ArchitectureDefaults(
        _even,
        _GEMMA | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        reads_layer_types=True,
    ),
    "Gemma3ForCausalLM": ArchitectureDefaults(
        _gemma3,
        _GEMMA | {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "max_position_embeddings": 131072},
        reads_layer_types=True,
        translate=lambda fields: {**fields.config, "attends_both_ways": True},
    ),
    **GEMMAS,
    "GptOssForCausalLM": ArchitectureDefaults(
        _even,
        {
            "head_dim": 64,
            "num_key_value_heads": 8,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131072,
            "rope_theta": 150000.0,
            "attention_bias": True,
        },
        reads_layer_types=True,
        translate=_gpt_oss_fields,
        only={"swiglu_limit": 7.0, "swiglu_alpha": 1.702, "hidden_act": "silu"},
    ),
    **HYBRIDS,
    **LATENTS,
    **LLAMA_KIN,
    **SEQ2SEQ,
}
"""Any other architecture has Llama's defaults: no layer has a window."""
