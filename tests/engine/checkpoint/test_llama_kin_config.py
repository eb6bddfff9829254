"""What config.json says of architectures that are Llama but for a few fields, as it is published and as transformers
writes it."""

from typing import Any

import pytest

from charonia.engine.checkpoint.hf_checkpoint import text_config
from charonia.engine.checkpoint.hf_config import read_spec
from charonia.engine.checkpoint.model_spec import NO_ROPE, CheckpointError, ModelSpec, UnsupportedVariant

SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "dtype": "bfloat16",
}


def spec(architecture: str, **changes: Any) -> ModelSpec:
    return read_spec(SIZES | {"architectures": [f"{architecture}ForCausalLM"]} | changes, "here")


def test_every_fourth_layer_of_smollm3_does_not_rotate() -> None:
    usual = spec("SmolLM3", rope_theta=5e6)
    assert usual.rotates == (True, True, True, False) * 2
    assert [usual.layer_rope(layer).kind for layer in (2, 3)] == ["default", NO_ROPE]
    assert usual.rope.theta == 5e6
    assert usual.tied_embeddings
    assert spec("SmolLM3", no_rope_layers=[1, 1, 1, 0] * 3).rotates == usual.rotates
    assert spec("SmolLM3", no_rope_layer_interval=2).rotates == (True, False) * 4
    windowed = spec("SmolLM3", use_sliding_window=True, sliding_window=128)
    assert [windowed.has_window(layer) for layer in (2, 3)] == [False, True]


@pytest.mark.parametrize("marks", [[1] * 7, "all", [2] * 8, [[1]] * 8])
def test_marks_of_layers_that_rotate_are_one_or_none(marks: object) -> None:
    with pytest.raises(CheckpointError, match="no_rope_layers"):
        spec("SmolLM3", no_rope_layers=marks)


def test_layers_of_exaone4_without_a_window_do_not_rotate() -> None:
    usual = spec("Exaone4", num_key_value_heads=4)
    assert usual.rotates == (True, True, True, False) * 2
    assert [usual.has_window(layer) for layer in (2, 3)] == [True, False]
    by_letters = spec("Exaone4", num_key_value_heads=4, sliding_window_pattern="LLLG")
    assert by_letters == usual
    by_types = ["full_attention", *["sliding_attention"] * 7]
    assert spec("Exaone4", num_key_value_heads=4, layer_types=by_types).rotates == (False, *[True] * 7)
    small = spec("Exaone4", num_key_value_heads=4, sliding_window=None)
    assert small.rotates == ()
    assert not any(small.has_window(layer) for layer in range(8))


def test_the_scaling_of_olmo3_is_of_layers_that_see_all() -> None:
    """As it is published, with `rope_scaling`, and as transformers writes it."""
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192, "attention_factor": 1.2}
    published = spec("Olmo3", rope_theta=500000, rope_scaling=yarn, max_position_embeddings=65536)
    assert [published.layer_rope(layer).kind for layer in (2, 3)] == ["default", "yarn"]
    assert published.rope.attention_factor == 1.2
    assert published.rope.theta == published.local_rope.theta == 500000
    full = yarn | {"rope_theta": 500000}
    both = {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": 500000}}
    assert spec("Olmo3", rope_parameters=both, max_position_embeddings=65536) == published
    plain = spec("Olmo3")
    assert [plain.layer_rope(layer).kind for layer in (2, 3)] == ["default", "default"]


def test_glm4_5_as_it_is_published() -> None:
    config = {"n_routed_experts": 16, "moe_intermediate_size": 64, "routed_scaling_factor": 2.5, "use_qk_norm": True}
    config |= {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 3, "num_nextn_predict_layers": 1}
    glm = spec("Glm4Moe", head_dim=32, attention_bias=True, partial_rotary_factor=0.5, **config)
    assert glm.rope.rotary_dim(32) == 16
    assert glm.normed_heads
    experts = glm.experts
    assert experts is not None
    assert experts.sparse_layers == (False,) * 3 + (True,) * 5
    assert (experts.count, experts.per_token, experts.shared_size, experts.scale) == (16, 8, 64, 2.5)
    assert experts.sigmoid
    assert experts.biased
    assert experts.normalised
    solar = spec("SolarOpen", **config)
    assert solar.experts is not None
    assert all(solar.experts.sparse_layers)
    assert not solar.normed_heads


def test_half_of_each_head_of_dense_glm4_is_rotated() -> None:
    for architecture in ("Glm", "Glm4"):
        glm = spec(architecture)
        assert (glm.kv_heads, glm.head_dim, glm.attention_bias) == (2, 128, True)
        assert glm.rope.rotary_dim(128) == 64


def test_layers_of_ernie_are_mixtures_in_an_interval() -> None:
    config = {"moe_num_experts": 16, "num_key_value_heads": 4, "moe_layer_interval": 2}
    ernie = spec("Ernie4_5_Moe", **config)
    experts = ernie.experts
    assert experts is not None
    assert experts.sparse_layers == (False, True) * 4
    assert (experts.per_token, experts.shared_size, experts.sigmoid, experts.biased) == (6, 2 * 1536, False, True)
    some = spec("Ernie4_5_Moe", **config | {"moe_layer_start_index": 2, "moe_layer_end_index": 6}).experts
    assert some is not None
    assert some.sparse_layers == (False, False, False, True, False, True, False, False)
    assert spec("Ernie4_5").tied_embeddings
    with pytest.raises(UnsupportedVariant, match="use_bias True is not supported here"):
        spec("Ernie4_5", use_bias=True)


def test_minimax_m2_as_it_is_published() -> None:
    config = {"rotary_dim": 64, "num_local_experts": 16, "scoring_func": "sigmoid", "qk_norm_type": "per_layer"}
    m2 = spec("MiniMaxM2", use_qk_norm=True, use_mtp=True, num_mtp_modules=3, **config)
    assert m2.rope.rotary_dim(m2.head_dim) == 64
    both = spec("MiniMaxM2", partial_rotary_factor=0.25, **config)
    assert both.rope.rotary_dim(both.head_dim) == 32, "as transformers: rotary_dim is of checkpoints without the factor"
    assert m2.experts is not None
    assert m2.experts.sigmoid
    with pytest.raises(CheckpointError, match="scoring_func 'softmax' is not supported here, sigmoid is"):
        spec("MiniMaxM2", **config | {"scoring_func": "softmax"})


def test_seed_oss_has_two_kinds_of_biases() -> None:
    assert (spec("SeedOss").attention_bias, spec("SeedOss").attention_out_bias) == (True, False)
    assert spec("SeedOss", attention_out_bias=True).attention_out_bias


def test_ministral3_in_what_takes_images() -> None:
    """As it is published: the text part has its rotation in transformers 5's fields, and the wrapper the rest."""
    rope = {"type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384}
    rope |= {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
    config = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "text_config": SIZES | {"model_type": "ministral3", "head_dim": 128, "rope_parameters": rope},
        "tie_word_embeddings": True,
    }
    part = text_config(config)
    assert part is not None
    text = read_spec(part, "here")
    assert text.architecture == "Ministral3ForCausalLM"
    assert text.query_growth == 0.1
    assert (text.rope.original_max_position, text.rope.attention_factor) == (16384, 1.0)
    assert text.max_position == 262_144
    assert text.tied_embeddings
    assert spec("Ministral3").rope == text.rope
    assert spec("Ministral3").query_growth == 0.1


def test_glm_in_what_takes_images() -> None:
    """As GLM-4.1V is published, its fields in a part of their own or among the others."""
    text = SIZES | {"hidden_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    text |= {"partial_rotary_factor": 0.5, "rope_scaling": {"type": "default", "mrope_section": [4, 6, 6]}}
    for config in ({"text_config": text | {"model_type": "glm4v_text"}}, text | {"model_type": "glm4v"}):
        part = text_config({"architectures": ["Glm4vForConditionalGeneration"], "vision_config": {}} | config)
        assert part is not None
        with pytest.raises(CheckpointError, match="mrope_section must have 32 pairs"):
            read_spec(part, "here")
        sections = text["rope_scaling"] | {"mrope_section": [8, 12, 12]}
        spec = read_spec(part | {"rope_scaling": sections}, "here")
        assert (spec.architecture, spec.head_dim, spec.max_position) == ("Glm4ForCausalLM", 128, 32_768)
        assert (spec.attention_bias, spec.rope.sections, spec.rope.interleaved) == (True, (8, 12, 12), False)
