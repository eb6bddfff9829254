"""Models of images and texts that have no description: a class is served if rows stand at its images' places, and
refused with the reason if they enter otherwise."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from charonia.classic_backends.tower.tower_files import read_tower_files
from charonia.core.errors import CharoniaError
from charonia.engine.build import examine
from charonia.engine.checkpoint.hf_checkpoint import open_checkpoint, text_tensor_name
from charonia.engine.checkpoint.media_support import media_kinds
from charonia.engine.models.image_wrapper import _check_call, check_image_wrapper
from charonia.engine.models.registry import NativeBuilder, checkpoint_builder
from charonia.engine.models.transformers_fallback import TransformersBuilder, transformers_builder
from tests.proofs.image_families import write_config
from tests.seeing_models import write_seeing

NO_ROWS = "no language part that takes rows"


@pytest.mark.parametrize("family", ["llava_onevision", "lighton_ocr"])
def test_rows_in_place_of_tokens_are_served(tmp_path: Path, family: str) -> None:
    check_image_wrapper(tmp_path, write_config(tmp_path, family))


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("paddleocr_vl", "positions in three dimensions"),
        ("paligemma", "told apart by token_type_ids"),
        ("mllama", NO_ROWS),
        ("blip-2", NO_ROWS),
        ("muse_glimmer", "its logits are more than those of its language part"),
        ("gemma3n", "timm"),
    ],
)
def test_what_enters_otherwise_is_refused_with_the_reason(tmp_path: Path, family: str, reason: str) -> None:
    architecture = write_config(tmp_path, family)
    with pytest.raises(CharoniaError, match=rf"architecture {architecture} is not supported: .*{reason}"):
        check_image_wrapper(tmp_path, architecture)


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        ({"position_ids": torch.zeros(3, 1, 4)}, "is given position_ids"),
        ({"attention_mask": {"full_attention": None}}, "is given attention_mask"),
        ({"deepstack": [torch.zeros(1)]}, "is given deepstack"),
        ({"inputs_embeds": torch.ones(1, 4, 2)}, "more than rows"),
    ],
)
def test_a_language_part_may_be_given_rows_alone(inputs: dict[str, Any], reason: str) -> None:
    wanted = torch.zeros(1, 4, 2)
    _check_call([{"inputs_embeds": wanted, "position_ids": torch.arange(4)[None], "use_cache": False}], wanted)
    with pytest.raises(CharoniaError, match=reason):
        _check_call([{"inputs_embeds": wanted, **inputs}], wanted)


def test_a_language_part_by_its_older_name(tmp_path: Path) -> None:
    """EXAONE 4.5 was published with one."""
    directory = write_seeing(tmp_path, "exaone4.5")
    newer = checkpoint_builder(open_checkpoint(directory))
    config = json.loads((directory / "config.json").read_text())
    config["text_config"]["model_type"] = "exaone4_5_text"
    (directory / "config.json").write_text(json.dumps(config))
    older = checkpoint_builder(open_checkpoint(directory))
    assert isinstance(newer, NativeBuilder)
    assert isinstance(older, NativeBuilder)
    assert older.spec == newer.spec
    assert media_kinds(directory) == ("image",)


def test_a_config_with_the_language_part_s_fields_among_the_others(tmp_path: Path) -> None:
    """As dots.note is published."""
    directory = write_seeing(tmp_path, "dots3-note")
    config = json.loads((directory / "config.json").read_text())
    text = config.pop("text_config")
    del text["model_type"]
    (directory / "config.json").write_text(json.dumps(text | config))
    builder = checkpoint_builder(open_checkpoint(directory))
    assert isinstance(builder, TransformersBuilder)
    assert builder.sees
    assert media_kinds(directory) == ("image",)
    assert read_tower_files(directory, "auto").family == "dots3_note"


@pytest.mark.parametrize("within", ["encoder.", ""])
def test_a_language_part_as_transformers_writes_it_and_as_it_was_published(within: str) -> None:
    """Qianfan-OCR's."""
    assert text_tensor_name(f"language_model.model.{within}layers.0.mlp.up_proj.weight") == (
        "model.layers.0.mlp.up_proj.weight"
    )


def test_phi_4_s_adapters_are_the_reason(tmp_path: Path) -> None:
    config = {"model_type": "phi4_multimodal", "architectures": ["Phi4MultimodalForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CharoniaError, match="chosen by the images and sounds of a prompt"):
        transformers_builder(open_checkpoint(tmp_path))


@pytest.mark.parametrize("hidden", [0, "many"])
def test_a_config_that_no_class_takes_is_the_checkpoints_fault(tmp_path: Path, hidden: object) -> None:
    """Whatever the library raises for it."""
    architecture = write_config(tmp_path, "llava_onevision")
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["hidden_size"] = hidden
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CharoniaError, match="is not supported: transformers cannot make it: "):
        check_image_wrapper(tmp_path, architecture)


def test_a_checkpoint_is_tried_before_it_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose class does more than that is refused as a whole: its texts may be other ones, too."""
    directory = write_seeing(tmp_path, "vipllava")
    examine(str(directory), {})
    known: Any = type(AutoModelForImageTextToText.from_pretrained(directory))
    forward = known.forward

    def scaled(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = forward(self, *args, **kwargs)
        output.logits = output.logits * 2
        return output

    scaled.__wrapped__ = forward  # type: ignore[attr-defined]
    monkeypatch.setattr(known, "forward", scaled)
    with pytest.raises(CharoniaError, match="VipLlavaForConditionalGeneration is not supported: its logits are more"):
        examine(str(directory), {})
    config = json.loads((directory / "config.json").read_text())
    config["text_config"]["model_type"] = "nothing"
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(CharoniaError, match="VipLlavaForConditionalGeneration is not supported"):
        examine(str(directory), {})
