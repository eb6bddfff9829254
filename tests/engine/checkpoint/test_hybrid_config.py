"""What config.json may say of layers that keep recurrent states, and what is refused by the field's name."""

import math
import tracemalloc
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeAlias

import pytest

from charonia.engine.checkpoint.hf_config import read_spec
from charonia.engine.checkpoint.model_spec import CheckpointError
from charonia.engine.checkpoint.recurrence import Mamba2Spec

MakeConfig: TypeAlias = Callable[[str], dict[str, Any]]

ARCHITECTURES = {
    "qwen3.5": "Qwen3_5ForCausalLM",
    "qwen3-next": "Qwen3NextForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "lfm2-moe": "Lfm2MoeForCausalLM",
    "granite-hybrid": "GraniteMoeHybridForCausalLM",
    "nemotron-h": "NemotronHForCausalLM",
    "nemotron-3": "NemotronHForCausalLM",
    "mamba": "MambaForCausalLM",
    "falcon-mamba": "FalconMambaForCausalLM",
    "mamba2": "Mamba2ForCausalLM",
    "falcon-h1": "FalconH1ForCausalLM",
    "bamba": "BambaForCausalLM",
    "zamba2": "Zamba2ForCausalLM",
}


@pytest.fixture
def config_of(making: ModuleType) -> MakeConfig:
    """`config_of(kind)`: a config.json that is read."""
    return lambda kind: making.CONFIGS[kind] | {"architectures": [ARCHITECTURES[kind]]}


@pytest.mark.parametrize(
    ("kind", "changes", "says"),
    [
        ("granite-hybrid", {"num_local_experts": 2, "num_experts_per_tok": 3}, "but there are 2 experts"),
        ("granite-hybrid", {"mamba_d_head": 7}, "mamba_d_head 7 times 8 heads is not 128"),
        ("granite-hybrid", {"mamba_expand": 1_000_000_000}, "mamba_expand"),
        ("granite-hybrid", {"mamba_expand": 60_000, "mamba_d_head": "auto"}, "more than 65536"),
        ("granite-hybrid", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported beside states"),
        ("qwen3.5", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported beside states"),
        ("nemotron-h", {"layers_block_type": None, "hybrid_override_pattern": "M?"}, "layer_types must say of every"),
        ("nemotron-h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act 'silu' is not supported here, relu2 is"),
        ("nemotron-3", {"n_group": 4}, "topk_group 1 of n_group 4 can't be chosen of 6 experts"),
        ("zamba2", {"num_mem_blocks": 4}, "num_mem_blocks must be between 1 and 3"),
        ("zamba2", {"use_shared_attention_adapter": True}, "use_shared_attention_adapter True is not supported here"),
        ("zamba2", {"layers_block_type": None}, "layers_block_type must say of every layer"),
        ("mamba", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported beside states"),
        ("mamba", {"time_step_rank": "all"}, "time_step_rank must be"),
        ("mamba2", {"num_heads": 7}, "mamba_n_heads 7 must divide 128 features"),
        ("mamba2", {"head_dim": 8}, "mamba_d_head 8 times 8 heads is not 128"),
        ("falcon-h1", {"ssm_multipliers": [1.0]}, "ssm_multipliers must be 5 positive numbers"),
        ("falcon-h1", {"mlp_multipliers": [0.0, 1.0]}, "mlp_multipliers must be a positive number, got 0.0"),
        ("falcon-h1", {"mamba_proj_bias": True}, "mamba_proj_bias True is not supported here"),
    ],
)
def test_what_layers_with_states_cannot_be_is_refused(
    config_of: MakeConfig, kind: str, changes: dict[str, Any], says: str
) -> None:
    config = config_of(kind)
    with pytest.raises(CheckpointError, match=says):
        read_spec(config | changes, "here")


NO_COUNTS: tuple[Any, ...] = (-1, 300_000_000_000, 1 << 70, True, "7", 2.5, math.nan, math.inf, [1], {})
NO_REALS: tuple[Any, ...] = (-1.0, 10**400, True, "7", math.nan, math.inf, [1.0], {"a": 1})
NO_FLAGS: tuple[Any, ...] = ("true", 2, math.nan, [True])
NO_LAYERS: tuple[Any, ...] = (5, "0", {"0": 1}, [-1], [True], [1 << 70], ["0"], [0.0])
NO_LAYER_TYPES: tuple[Any, ...] = (
    ["full_attention"],
    "xxxx",
    5,
    ["else"] * 4,
    [["conv"]] * 4,
    [1] * 4,
    ["full_attention"] * 99_999,
    dict.fromkeys(("full_attention", "conv", "mamba", "linear_attention")),
)
NO_STEP_LIMITS: tuple[Any, ...] = (
    *([5, 1], [math.nan, math.nan], [0.0, math.nan], [math.inf, math.inf], [-1, 1], [0], [0, 1, 2], [10**400, 10**400]),
    *([True, "7"], [False, True], ["0", "1"], [0, {"__float__": "7"}], [{"__float__": "Infinity"}] * 2, 7, "ab", {}),
)
SHARED_COUNTS = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size"),
    *("intermediate_size", "max_position_embeddings"),
)
SHARED = {
    **dict.fromkeys(SHARED_COUNTS, NO_COUNTS),
    **dict.fromkeys(("attention_bias", "tie_word_embeddings"), NO_FLAGS),
    "layer_types": NO_LAYER_TYPES,
}
EXPERTS = {
    **dict.fromkeys(("num_experts", "num_experts_per_tok", "moe_intermediate_size"), NO_COUNTS),
    "norm_topk_prob": NO_FLAGS,
}
DELTA_COUNTS = (
    *("head_dim", "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    *("linear_conv_kernel_dim", "full_attention_interval"),
)
DELTA_NET = SHARED | dict.fromkeys(DELTA_COUNTS, NO_COUNTS) | {"rms_norm_eps": NO_REALS}
MAMBA_COUNTS = (
    *("mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_conv", "mamba_d_head", "mamba_expand"),
    *("shared_intermediate_size", "num_local_experts"),
)
NEMOTRON_COUNTS = (
    *("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel", "n_routed_experts"),
    *("num_experts_per_tok", "moe_intermediate_size", "moe_shared_expert_intermediate_size", "moe_latent_size"),
)
FALCON_MULTIPLIERS = (
    *("embedding_multiplier", "lm_head_multiplier", "key_multiplier", "attention_in_multiplier"),
    *("attention_out_multiplier", "ssm_in_multiplier", "ssm_out_multiplier"),
)
MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
LFM2 = SHARED | {"conv_L_cache": NO_COUNTS, "conv_bias": NO_FLAGS, "tie_embedding": NO_FLAGS, "norm_eps": NO_REALS}
CANNOT_BE: dict[str, dict[str, tuple[Any, ...]]] = {
    "qwen3.5": DELTA_NET,
    "qwen3-next": DELTA_NET
    | EXPERTS
    | {"decoder_sparse_step": NO_COUNTS, "shared_expert_intermediate_size": NO_COUNTS, "mlp_only_layers": NO_LAYERS},
    "lfm2": LFM2
    | {
        "block_ff_dim": NO_COUNTS,
        "block_multiple_of": NO_COUNTS,
        "block_ffn_dim_multiplier": NO_REALS,
        "block_auto_adjust_ff_dim": NO_FLAGS,
        "full_attn_idxs": NO_LAYERS,
    },
    "lfm2-moe": LFM2
    | EXPERTS
    | {"num_dense_layers": NO_COUNTS, "routed_scaling_factor": NO_REALS, "use_expert_bias": NO_FLAGS},
    "granite-hybrid": SHARED
    | dict.fromkeys(MAMBA_COUNTS, NO_COUNTS)
    | dict.fromkeys(MULTIPLIERS, NO_REALS)
    | dict.fromkeys(("mamba_proj_bias", "mamba_conv_bias"), NO_FLAGS)
    | {"rms_norm_eps": NO_REALS, "time_step_limit": NO_STEP_LIMITS},
    "nemotron-3": dict.fromkeys(NEMOTRON_COUNTS, NO_COUNTS)
    | {
        "layers_block_type": ("xxxx", 5, [1] * 4),
        "use_bias": NO_FLAGS,
        "use_conv_bias": NO_FLAGS,
        "norm_topk_prob": NO_FLAGS,
    }
    | dict.fromkeys(("layer_norm_epsilon", "time_step_min", "routed_scaling_factor"), NO_REALS),
    "falcon-mamba": dict.fromkeys(("state_size", "expand", "conv_kernel"), NO_COUNTS)
    | dict.fromkeys(("layer_norm_epsilon", "mixer_rms_eps"), NO_REALS)
    | {"use_bias": NO_FLAGS},
    "mamba2": dict.fromkeys(("num_heads", "head_dim", "state_size", "expand", "n_groups", "conv_kernel"), NO_COUNTS)
    | {"layer_norm_epsilon": NO_REALS, "time_step_limit": NO_STEP_LIMITS},
    "falcon-h1": dict.fromkeys((*MAMBA_COUNTS[:5], "mamba_d_ssm"), NO_COUNTS)
    | dict.fromkeys(FALCON_MULTIPLIERS, NO_REALS)
    | dict.fromkeys(("mamba_rms_norm", "mamba_norm_before_gate", "projectors_bias"), NO_FLAGS),
    "zamba2": dict.fromkeys(
        ("n_mamba_heads", "mamba_ngroups", "mamba_d_state", "mamba_d_conv", "adapter_rank"), NO_COUNTS
    )
    | {"add_bias_linear": NO_FLAGS, "use_mem_rope": NO_FLAGS},
    "bamba": SHARED | {"attn_layer_indices": NO_LAYERS, "mlp_bias": NO_FLAGS, "layer_types": ()},
}
"""Values that fields of configs with recurrent layers cannot have."""


@pytest.mark.parametrize("kind", CANNOT_BE)
def test_what_a_field_of_layers_with_states_cannot_be_is_refused_by_its_name(config_of: MakeConfig, kind: str) -> None:
    config = config_of(kind)
    accepted = []
    tracemalloc.start()
    try:
        for name, values in CANNOT_BE[kind].items():
            for value in values:
                changed = {
                    other: config[other] for other in config if name != "full_attn_idxs" or other != "layer_types"
                }
                try:
                    read_spec(changed | {name: value}, "here")
                except CheckpointError as error:
                    refusal = error.message
                else:
                    refusal = "read"
                if name not in refusal or len(refusal) > 600:
                    accepted.append((name, value, refusal))
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert not accepted
    assert most < 1 << 23


def test_the_least_that_limits_of_layers_with_states_may_be_is_read(config_of: MakeConfig) -> None:
    dense = config_of("lfm2-moe")
    for count, sparse in ((0, (True, True, True)), (1, (False, True, True)), (60_000, (False, False, False))):
        experts = read_spec(dense | {"num_dense_layers": count}, "here").experts
        assert experts is not None
        assert experts.sparse_layers == sparse
    granite = config_of("granite-hybrid")
    for limits, read in (
        (None, (0.0, math.inf)),
        ([0, math.inf], (0.0, math.inf)),
        ([0.5, {"__float__": "Infinity"}], (0.5, math.inf)),
        ([1, 1], (1.0, 1.0)),
    ):
        recurrence = read_spec(granite | {"time_step_limit": limits}, "here").recurrence
        assert isinstance(recurrence, Mamba2Spec)
        assert recurrence.step_limits == read
