"""What config.json of Gemma 3n and 4 says of their layers, as it is published and as transformers writes it."""

from dataclasses import replace
from typing import Any

import pytest

from charonia.core.errors import InvalidArgument
from charonia.engine.checkpoint.hf_config import read_spec
from charonia.engine.checkpoint.model_spec import (
    AltUpSpec,
    CheckpointError,
    GemmaSpec,
    KeyValueShape,
    LayerAttention,
    ModelSpec,
    UnsupportedVariant,
)
from charonia.engine.checkpoint.partition import PipelineStage, check_partition

SLIDING = LayerAttention(512, 1.0)
E2B: dict[str, Any] = {
    "architectures": ["Gemma4ForCausalLM"],
    "vocab_size": 262_144,
    "hidden_size": 1536,
    "intermediate_size": 6144,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "global_head_dim": 512,
    "layer_types": [*4 * ["sliding_attention"], "full_attention"] * 7,
    "num_kv_shared_layers": 20,
    "use_double_wide_mlp": True,
    "sliding_window": 512,
    "final_logit_softcapping": 30.0,
    "use_bidirectional_attention": None,
    "dtype": "bfloat16",
}


def spec(**changes: Any) -> ModelSpec:
    return read_spec(E2B | changes, "here")


def test_the_last_layers_attend_to_the_keys_of_the_last_ones_of_their_kind() -> None:
    small = spec()
    full = LayerAttention(None, 1.0, kept=KeyValueShape(1, 512, 512))
    assert small.attention == (*4 * (SLIDING,), full) * 7
    assert small.cache_owners == (*range(15), *4 * (*4 * (13,), 14))
    assert small.cached_attention == (*4 * (SLIDING,), full) * 3
    assert small.token_numbers == 2 * (12 * 256 + 3 * 512)
    assert [small.mlp_size(layer) for layer in (14, 15)] == [6144, 12288]
    assert small.gemma is not None
    assert small.gemma.per_layer_size == 256
    assert small.rope.rotary_dim(512) == 512
    assert (small.rope.theta, small.local_rope.theta) == (1e6, 1e4)


@pytest.mark.parametrize("digits", [1, 2])
def test_per_layer_config_says_what_older_fields_say(digits: int) -> None:
    """Of the large ones, whose layers that see all have fewer heads, which make values of keys."""
    large = {
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
        "num_key_value_heads": 4,
        "attention_k_eq_v": True,
    }
    older = spec(**large, num_global_key_value_heads=2, hidden_size_per_layer_input=0)
    full = {f"{layer:0{digits}}": {"head_dim": 512, "num_key_value_heads": 2} for layer in range(4, 35, 5)}
    assert spec(**large, per_layer_config=full, global_head_dim=None, hidden_size_per_layer_input=0) == older
    assert older.attention[4] == LayerAttention(None, 1.0, kept=KeyValueShape(2, 512, 512))
    assert older.gemma is not None
    assert older.gemma.keys_as_values


def test_the_unified_one_has_no_embeddings_for_layers() -> None:
    unified = spec(architectures=["Gemma4UnifiedForCausalLM"], hidden_size_per_layer_input=256, top_k_experts=2)
    assert unified.gemma == GemmaSpec(0, 0)
    assert unified.experts is None


def test_attention_between_images_is_no_texts() -> None:
    seeing, plain = spec(use_bidirectional_attention="vision"), spec()
    assert [kind.both_ways for kind in seeing.attention] == [kind.window is not None for kind in plain.attention]
    assert replace(seeing, attention=plain.attention) == plain
    with pytest.raises(CheckpointError, match="use_bidirectional_attention"):
        spec(use_bidirectional_attention="all")


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"num_kv_shared_layers": 35}, CheckpointError, "num_kv_shared_layers must be at least 0 and less than 35"),
        ({"num_kv_shared_layers": 32}, CheckpointError, "no layer of type full_attention has keys and values"),
        ({"layer_types": ["full_attention"]}, CheckpointError, "one for each of 35 layers"),
        ({"layer_types": 35 * ["chunked_attention"]}, UnsupportedVariant, "layer_types must say of every layer"),
        ({"per_layer_config": {"3": {"num_attention_heads": 2}}}, UnsupportedVariant, "per_layer_config of layer 3"),
        ({"per_layer_config": {"4": {"head_dim": 512}}}, UnsupportedVariant, r"heads of one size, got \[256, 512\]"),
        ({"per_layer_config": {"0": {"num_key_value_heads": 3}}}, CheckpointError, "no multiple of 3 key/value heads"),
    ],
)
def test_what_no_layer_can_be_is_refused(changes: dict[str, Any], kind: type[CheckpointError], message: str) -> None:
    with pytest.raises(kind, match=message):
        spec(**changes)


E4B_3N: dict[str, Any] = {
    "architectures": ["Gemma3nForCausalLM"],
    "vocab_size": 262_400,
    "hidden_size": 2048,
    "intermediate_size": 35 * [16384],
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "activation_sparsity_pattern": [*10 * [0.95], *25 * [0.0]],
    "dtype": "bfloat16",
}


def spec_3n(**changes: Any) -> ModelSpec:
    return read_spec(E4B_3N | changes, "here")


def test_gemma_3n_has_streams_and_gates_that_are_thinned() -> None:
    model = spec_3n()
    assert model.gemma is not None
    assert model.gemma.altup == AltUpSpec(4, 0, True, 64, (*10 * (0.95,), *25 * (0.0,)))
    assert model.cache_owners == (*range(20), *3 * (*4 * (18,), 19))
    assert (model.rope.theta, model.local_rope.theta, model.logit_softcap) == (1e6, 1e4, 30.0)
    assert spec_3n(intermediate_size=16384, activation_sparsity_pattern=None) == model
    with pytest.raises(InvalidArgument, match="several streams of hidden states can't be shared by 2 ranks"):
        check_partition(model, "model", 2, PipelineStage())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"intermediate_size": [16384]}, "intermediate_size must be one number, or one for each of 35 layers"),
        ({"activation_sparsity_pattern": [0.5]}, "activation_sparsity_pattern must be a share below 1 for each of 35"),
        ({"activation_sparsity_pattern": 35 * [1.0]}, "activation_sparsity_pattern must be a share below 1"),
        ({"altup_active_idx": 4}, "altup_active_idx must be one of 4 streams, got 4"),
        ({"hidden_size_per_layer_input": 0}, "hidden_size_per_layer_input 0 is not supported"),
    ],
)
def test_what_no_layer_of_gemma_3n_can_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        spec_3n(**changes)


def test_embeddings_for_layers_stay_with_the_first() -> None:
    apart = spec(num_kv_shared_layers=0)
    check_partition(apart, "model", 1, PipelineStage())
    with pytest.raises(InvalidArgument, match="2 stages") as refusal:
        check_partition(apart, "model", 1, PipelineStage(0, 2))
    assert refusal.value.field == "pipeline_parallel_size"
