"""Which checkpoints see, by their files."""

import json
import re
from pathlib import Path

import pytest

from charonia.engine.checkpoint.media_support import media_kinds, refused_media, sees_both_ways

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
        (WRAPPED | {"text_config": {"model_type": "gemma"}}, True, True),
        (WRAPPED | {"text_config": "gemma"}, True, False),
        (WRAPPED | {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": {}}, True, False),
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
    ("config", "processor", "reason"),
    [
        ({"model_type": "gemma3n", "vision_config": {}}, True, "'gemma3n' are not served: .*timm's; Gemma 3's"),
        ({"model_type": "kimi_k25", "vision_config": {}}, True, "over torchvision alone"),
        ({"model_type": "mllama", "vision_config": {}}, True, "images of the family 'mllama' are not served$"),
        (
            {"model_type": "mllama", "vision_config": {}},
            False,
            r"has no processor of images \(processor_config.json or",
        ),
        ({"model_type": "llama"}, True, ""),
        ({"model_type": "llava", "vision_config": {}}, True, ""),
    ],
)
def test_what_a_checkpoint_has_and_is_not_taken_has_a_reason(
    tmp_path: Path, config: dict[str, object], processor: bool, reason: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    if processor:
        (tmp_path / "preprocessor_config.json").write_text("{}")
    refused = refused_media(tmp_path, {"image": 16})
    assert bool(refused) == bool(reason)
    assert re.search(reason, refused.get("image", ""))
    none = refused_media(tmp_path, {})
    assert none == refused or none == {"image": "--limit-mm-per-prompt allows none"}
    assert refused_media(tmp_path / "nowhere", {"image": 16}) == {}


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
