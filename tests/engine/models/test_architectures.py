"""Every architecture that was ever right, from its configuration alone; the proof `families` builds all of them."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

from charonia.bench.checkpoint import write_random
from charonia.engine.checkpoint.hf_checkpoint import open_checkpoint
from charonia.engine.models import registry
from charonia.engine.models.registry import checkpoint_builder
from charonia.engine.models.transformers_fallback import TransformersDecoder

from ...proofs.families import (
    ARCHITECTURES,
    BY_SEQUENCE,
    FAMILIES,
    TOLERANCE,
    build_and_compare,
    faults,
    is_known,
    refusal,
    tiny_config,
)

KNOWN = [model_type for model_type in sorted(ARCHITECTURES | FAMILIES) if is_known(model_type)]


@pytest.mark.one_in(8)
@pytest.mark.parametrize("model_type", KNOWN)
def test_no_configuration_is_refused(model_type: str, tmp_path: Path) -> None:
    """Whatever transformers has made of it since."""
    config = CONFIG_MAPPING[model_type](**tiny_config(model_type))
    told = config.to_dict() | {"architectures": [MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]}
    # A decoder of an encoder-decoder is saved by itself.
    fields = {"dtype": "float32", "is_encoder_decoder": False}
    (tmp_path / "config.json").write_text(json.dumps(told | fields))
    longest = getattr(config, "max_position_embeddings", 2048)
    assert checkpoint_builder(open_checkpoint(tmp_path)).max_position == longest
    assert longest in (256, 2048)


def test_the_table_is_of_what_transformers_has() -> None:
    """But for single ones that it may drop."""
    assert len(KNOWN) > 140


@pytest.mark.parametrize("model_type", KNOWN[::32])
def test_it_is_served_still(model_type: str, tmp_path: Path) -> None:
    assert refusal(model_type, tmp_path) == ""


STRETCHED = {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0, "rope_theta": 1e4}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.0, 1.1, 1.1, 1.2, 1.3, 1.5, 2.0],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 12.0, 20.0],
}
PHIMOE = LONGROPE | {"short_mscale": 1.1, "long_mscale": 1.2}


@pytest.mark.parametrize(
    ("model_type", "rope"),
    [
        ("hunyuan_v1_dense", STRETCHED),
        ("hunyuan_v1_moe", STRETCHED),
        ("minicpm3", LONGROPE | {"original_max_position_embeddings": 200}),
        ("minicpm3", LONGROPE | {"original_max_position_embeddings": 32}),
        ("phimoe", PHIMOE | {"original_max_position_embeddings": 200}),
    ],
    ids=str,
)
def test_positions_that_need_not_depend_on_a_batch(model_type: str, rope: dict[str, Any], tmp_path: Path) -> None:
    """Of sequences within longrope's original length, and of longer ones: 128 tokens, of which a prompt has 60."""
    write_random(tmp_path, tiny_config(model_type) | {"rope_parameters": rope})
    decoder, error = build_and_compare(tmp_path)
    assert isinstance(decoder, TransformersDecoder)
    assert error < TOLERANCE
    longest = min(256, rope.get("original_max_position_embeddings", 256))
    assert checkpoint_builder(open_checkpoint(tmp_path)).default_length == longest


def test_a_short_prompt_has_the_frequencies_of_what_it_may_become(tmp_path: Path) -> None:
    """With room for more than the original length, though transformers takes those for short texts until then."""
    rope = LONGROPE | {"original_max_position_embeddings": 100}
    write_random(tmp_path, tiny_config("minicpm3") | {"rope_parameters": rope})
    assert build_and_compare(tmp_path)[1] > TOLERANCE
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_parameters"]["short_factor"] = LONGROPE["long_factor"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert build_and_compare(tmp_path)[1] < TOLERANCE


@pytest.mark.parametrize("model_type", ["modernbert-decoder", "gemma4_text"])
def test_logits_are_computed_a_piece_at_a_time(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two that were refused since they are, by transformers: one calls its LM head "decoder", which was taken for
    the layers; the other takes states that are more than its input for those of the piece."""
    monkeypatch.delitem(registry.ARCHITECTURES, "Gemma4ForCausalLM")
    assert refusal(model_type, tmp_path) == ""


@pytest.mark.proof
@pytest.mark.parametrize("model_type", BY_SEQUENCE)
def test_what_is_computed_by_sequence_generates_what_transformers_does(model_type: str, tmp_path: Path) -> None:
    """Prompts are cut, found in the prefix cache and preempted, with states and without."""
    assert [*faults(model_type, tmp_path)] == []
