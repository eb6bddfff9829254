"""Which checkpoints see, by their files."""

import json
from pathlib import Path

import pytest

from charonia.engine.checkpoint.media_support import media_kinds, sees_both_ways

WRAPPED: dict[str, object] = {
    "architectures": ["UnknownForConditionalGeneration"],
    "vision_config": {},
    "text_config": {"model_type": "qwen2"},
}


@pytest.mark.parametrize(
    ("config", "processor", "sees"),
    [
        ({"model_type": "llava", "vision_config": {}}, True, True),
        ({"model_type": "llava", "vision_config": {}}, False, False),
        ({"model_type": "llava"}, True, False),
        ({"model_type": "mllama", "vision_config": {}}, True, False),
        ({"model_type": "llama"}, True, False),
        (WRAPPED, True, True),
        (WRAPPED | {"text_config": {"model_type": "gemma"}}, True, False),
        (WRAPPED | {"model_type": ["llava"], "text_config": {"model_type": ["qwen2"]}}, True, False),
    ],
)
def test_a_tower_and_a_processor_make_a_model_see(
    tmp_path: Path, config: dict[str, object], processor: bool, sees: bool
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    if processor:
        (tmp_path / "preprocessor_config.json").write_text("{}")
    assert media_kinds(tmp_path) == (("image",) if sees else ())
    assert not media_kinds(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("config", "both"),
    [
        ({"model_type": "gemma3"}, True),
        ({"model_type": "gemma4", "text_config": {"use_bidirectional_attention": "vision"}}, True),
        ({"model_type": "gemma4", "text_config": {}}, False),
        ({"model_type": "llava"}, False),
    ],
)
def test_gemmas_images_are_seen_both_ways(tmp_path: Path, config: dict[str, object], both: bool) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert sees_both_ways(tmp_path) == both
