"""What config.json says of architectures that are Llama but for a few fields, as it is published and as transformers
writes it."""

from typing import Any

import pytest

from charonia.engine.checkpoint.hf_checkpoint import text_config
from charonia.engine.checkpoint.hf_config import read_spec
from charonia.engine.checkpoint.model_spec import NO_ROPE, CheckpointError, ModelSpec

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


@pytest.mark.parametrize("marks", [[1] * 7, "all", [2] * 8])
def test_marks_of_layers_that_rotate_are_one_or_none(marks: object) -> None:
    with pytest.raises(CheckpointError, match="no_rope_layers"):
        spec("SmolLM3", no_rope_layers=marks)


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
