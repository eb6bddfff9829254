"""What config.json of DeepSeek V2 and V3, Kimi-K2 and GLM-4.7-Flash says of latents and experts, as it is published."""

import math
from typing import Any

import pytest

from charonia.engine.checkpoint.hf_config import read_spec
from charonia.engine.checkpoint.model_spec import (
    CheckpointError,
    ExpertsSpec,
    LatentSpec,
    ModelSpec,
    UnsupportedVariant,
)
from charonia.engine.checkpoint.partition import PipelineStage, check_partition

YARN = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "original_max_position_embeddings": 4096, "type": "yarn"}
V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 129_280,
    "hidden_size": 7168,
    "intermediate_size": 18_432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 163_840,
    "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
}
V2_LITE = V3 | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "hidden_size": 2048,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "first_k_dense_replace": 1,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "routed_scaling_factor": 1.0,
    "q_lora_rank": None,
    "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
}
GLM = {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "vocab_size": 154_880,
    "hidden_size": 2048,
    "intermediate_size": 10_240,
    "num_hidden_layers": 47,
    "num_attention_heads": 20,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}


V32 = V3 | {
    "architectures": ["DeepseekV32ForCausalLM"],
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 2048,
}
GLM5 = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "vocab_size": 154_880,
    "hidden_size": 6144,
    "intermediate_size": 12_288,
    "num_hidden_layers": 78,
    "num_attention_heads": 64,
    "layer_types": ["indexed_attention"] * 78,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}


def spec(config: dict[str, Any], **changes: Any) -> ModelSpec:
    return read_spec(config | changes, "here")


def test_a_token_keeps_one_latent_and_one_rotated_key() -> None:
    large = spec(V3)
    assert large.latent == LatentSpec(512, 1536, 128, 64, 128, adjacent_pairs=True)
    assert large.token_numbers == 61 * 576
    assert large.rope.rotary_dim(large.head_dim) == 64
    assert large.rope.attention_factor == 1
    stretch = 0.1 * math.log(40) + 1
    assert large.attention[0] is not None
    assert large.attention[0].scale == pytest.approx(192**-0.5 * stretch**2)
    sparse = (False,) * 3 + (True,) * 58
    assert large.experts == ExpertsSpec(
        256, 8, 2048, True, sparse, True, 2.5, True, 2048, 0, True, 1e-20, groups=8, chosen_groups=4
    )


def test_an_indexer_bounds_what_is_served() -> None:
    sparse, dense = spec(V32), spec(V3)
    assert sparse.most_dense_tokens == 2048
    assert dense.most_dense_tokens == spec(V3, index_topk=7).most_dense_tokens == 0
    assert (sparse.latent, sparse.experts, sparse.attention) == (dense.latent, dense.experts, dense.attention)
    assert sparse.max_position == 163_840
    glm = spec(GLM5, rope_interleave=False)
    assert glm.latent == LatentSpec(512, 2048, 192, 64, 256, adjacent_pairs=True)
    assert glm.experts is not None
    assert glm.experts.sparse_layers == (False,) * 3 + (True,) * 75
    types = ["sparse", *77 * ["dense"]]
    other = spec(GLM5, mlp_layer_types=types, index_topk=512)
    assert other.experts is not None
    assert other.experts.sparse_layers == (True,) + (False,) * 77
    assert other.most_dense_tokens == 512


def test_a_scaling_of_another_kind_does_not_stretch_scores() -> None:
    plain = {"rope_type": "default", "rope_theta": 1e6, "factor": 4.0, "mscale_all_dim": 1.0}
    attention = spec(GLM, rope_parameters=plain).attention[0]
    assert attention is not None
    assert attention.scale == 256**-0.5


def test_kin_say_it_in_their_own_way() -> None:
    lite = spec(V2_LITE)
    assert lite.latent == LatentSpec(512, 0, 128, 64, 128, adjacent_pairs=True)
    assert lite.experts is not None
    assert not any((lite.experts.sigmoid, lite.experts.normalised, lite.experts.biased))
    assert lite.experts.groups == 1
    flash = spec(GLM)
    assert flash.latent == LatentSpec(512, 768, 192, 64, 256, adjacent_pairs=True)
    assert flash.attention[0] is not None
    assert flash.attention[0].scale == 256**-0.5
    assert flash.experts is not None
    assert flash.experts.sparse_layers == (False,) + (True,) * 46
    types = ["dense", "dense", *45 * ["sparse"]]
    other = spec(GLM, mlp_layer_types=types).experts
    assert other is not None
    assert other.sparse_layers == (False, False) + (True,) * 45
    beside = spec(V3, mlp_layer_types=types, first_k_dense_replace=3).experts
    assert beside is not None
    assert beside.sparse_layers[:4] == (False, False, False, True), "transformers' class of V3 has no mlp_layer_types"


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"topk_method": "noaux_tc"}, UnsupportedVariant, "topk_method 'noaux_tc' is not supported"),
        ({"kv_lora_rank": 0}, CheckpointError, "kv_lora_rank must be a positive"),
        ({"topk_method": "group_limited_greedy", "n_group": 7}, CheckpointError, "topk_group 1 of n_group 7"),
        (
            {"topk_method": "group_limited_greedy", "n_group": 32, "topk_group": 2},
            CheckpointError,
            "num_experts_per_tok is 6, but there are 4 experts in 2 of 32 groups",
        ),
        ({"architectures": V32["architectures"], "index_topk": 0}, CheckpointError, "index_topk must be a positive"),
        ({"n_shared_experts": -1}, CheckpointError, "n_shared_experts must be a whole number"),
        ({"rope_scaling": YARN | {"mscale_all_dim": "all"}}, CheckpointError, "mscale_all_dim must be a positive"),
    ],
)
def test_what_no_latent_can_be_is_refused(changes: dict[str, Any], kind: type[CheckpointError], message: str) -> None:
    with pytest.raises(kind, match=message):
        spec(V2_LITE, **changes)


def test_ranks_share_heads_and_have_all_latents() -> None:
    for tensor in (2, 4, 20):
        check_partition(spec(GLM), "flash", tensor, PipelineStage())
