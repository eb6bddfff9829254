"""What the processors of checkpoints make of images is what transformers makes of them, bit for bit."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image

from charonia.core.errors import InvalidArgument
from charonia.media.processor import ImageProcessor
from charonia.processes.limited_process import CallLimits, LimitedProcess
from tests.image_processors import PROCESSORS, write_processor

from .pictures import picture
from .processor_answers import WHOLE, ComparedImage, compare_processors

CROPS = {
    "do_pan_and_scan": True,
    "pan_and_scan_min_crop_size": 20,
    "pan_and_scan_max_num_crops": 3,
}
"""Which leave a small image of Gemma 3's in several pieces."""


@pytest.fixture(scope="module")
def process() -> Iterator[LimitedProcess]:
    found = LimitedProcess("charonia-test", compare_processors)
    yield found
    if found.alive:
        found.close()


def qwen(rows: int, columns: int, token: str = "<|image_pad|>") -> str:
    return token * rows * columns


def glm(rows: int, columns: int) -> str:
    return qwen(rows, columns, "<|image|>")


def pixtral(rows: int, columns: int) -> str:
    return "[IMG_BREAK]".join(["[IMG]" * columns] * rows) + "[IMG_END]"


def tiles(count: int) -> str:
    return f"<img>{'<IMG_CONTEXT>' * 4 * count}</img>"


def soft(count: int) -> str:
    return f"<|image>{'<|image|>' * count}<image|>"


def smol(rows: int, columns: int) -> str:
    around, image = "<fake_token_around_image>", "<image>" * 4
    cut = "".join(
        "".join(f"{around}<row_{row}_col_{column}>{image}" for column in range(1, columns + 1)) + "\n"
        for row in range(1, rows + 1)
    )
    return f"{cut}\n{around}<global-img>{image}{around}" if rows else f"{around}<global-img>{image}{around}"


PLACEHOLDERS = {
    "glm4v": [glm(2, 3), glm(4, 1), glm(1, 1)],
    "qwen2-vl": [qwen(2, 3), qwen(4, 1), qwen(1, 1)],
    "qwen2.5-vl": [qwen(2, 3), qwen(4, 1), qwen(1, 1)],
    "qwen3-vl": [qwen(2, 3), qwen(4, 1), qwen(1, 1)],
    "pixtral": [pixtral(2, 3), pixtral(3, 1), pixtral(1, 1)],
    "internvl": [tiles(3), tiles(5), tiles(1)],
    "gemma4": [soft(66), soft(60), soft(64)],
    "smolvlm": [smol(2, 2), smol(2, 1), smol(2, 2)],
}
"""For the three sizes, of families whose whole processor cannot be asked."""
IN_THE_SUITE = ("qwen3-vl", "pixtral", "idefics3")


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=() if family in IN_THE_SUITE else pytest.mark.proof)
        for family in (*PLACEHOLDERS, *sorted(WHOLE))
    ],
)
def test_a_familys_images(process: LimitedProcess, family: str) -> None:
    answer = process.call(family.encode(), CallLimits(60.0, 2 << 30))
    images = msgspec.msgpack.decode(answer, type=list[ComparedImage])
    for index, image in enumerate(images):
        assert not image.differing
        assert image.token in image.placeholder
        if family in WHOLE:
            assert image.own_tokens == image.tokens
        else:
            assert image.placeholder == PLACEHOLDERS[family][index]
        if family.startswith(("qwen", "glm")):
            assert image.grid[1] * image.grid[2] == image.placeholder.count(image.token)
        else:
            assert image.grid == (0, 0, 0)
    assert len({image.settings for image in images}) == 1


def test_an_image_without_a_place_is_too_small(tmp_path: Path) -> None:
    processor = ImageProcessor(write_processor(tmp_path, "lighton-ocr"))
    with pytest.raises(InvalidArgument, match="the image is too small: 14 x 300 pixels have no place in a prompt"):
        processor.process(Image.new("RGB", (14, 300)))


@pytest.mark.parametrize(
    ("family", "token", "row"),
    [
        ("janus", "<image_placeholder>", "<image_placeholder>"),
        ("qianfan-ocr", "<image>", "<IMG_CONTEXT>"),
    ],
)
def test_tokens_that_a_processor_has_no_numbers_of_or_two_of(tmp_path: Path, family: str, token: str, row: str) -> None:
    """Janus' knows the text alone, and Qianfan-OCR's puts other tokens where its template has one."""
    processor = ImageProcessor(write_processor(tmp_path, family))
    medium = processor.process(Image.new("RGB", (60, 40)))
    words = processor._processor.tokenizer.get_vocab()
    assert (processor.token, processor.token_ids[0]) == (token, words[row])
    assert row in medium.placeholder


@pytest.mark.parametrize(
    ("family", "options", "as_processor"),
    [
        ("qwen2.5-vl", {"max_pixels": 1568}, {"size": {"shortest_edge": 28 * 28, "longest_edge": 1568}}),
        ("qwen3-vl", {"size": {"shortest_edge": 784, "longest_edge": 3136}}, None),
        ("glm4v", {"size": {"shortest_edge": 784, "longest_edge": 3136}}, None),
        ("gemma4", {"max_soft_tokens": 140}, None),
        ("idefics3", {"size": {"longest_edge": 56}}, None),
        ("smolvlm", {"do_image_splitting": False}, None),
        ("internvl", {"max_patches": 1}, None),
        ("internvl", {"crop_to_patches": False}, None),
        ("pixtral", {"size": {"longest_edge": 56}}, None),
    ],
)
def test_options_of_a_request_are_those_of_the_processor(
    tmp_path: Path, family: str, options: dict[str, Any], as_processor: dict[str, Any] | None
) -> None:
    processor = ImageProcessor(write_processor(tmp_path, family))
    image = picture(200, 90)
    asked = processor.process(image, processor.options.settings(options))
    images: Any = processor._processor.image_processor
    unit = {"patch_size": 28} if family == "pixtral" else {}
    wanted = images([image], return_tensors="np", **unit, **(as_processor or options))
    assert asked.inputs.keys() <= wanted.keys()
    for name, array in asked.inputs.items():
        assert np.array_equal(array, wanted[name]), name
    assert asked.placeholder != processor.process(image).placeholder


@pytest.mark.parametrize(
    ("family", "options", "problem"),
    [
        ("gemma3", {"size": {"height": 56, "width": 56}}, "size is none of this model's: do_pan_and_scan, pan_and_sc"),
        ("gemma3", {"do_pan_and_scan": True}, "do_pan_and_scan is the operator's to set, by --mm-processor-kwargs"),
        ("gemma3", {"pan_and_scan_min_crop_size": 300}, "min_crop_size is the operator's to set"),
        ("internvl", {"size": {"height": 112, "width": 112}}, "size is none of this model's: crop_to_patches, min_"),
        ("idefics3", {"size": {"longest_edge": 56, "height": 9}}, "size has height, and may have longest_edge"),
        ("smolvlm", {"do_image_splitting": 0}, "do_image_splitting must be a boolean, got 0"),
        ("llava", {"max_pixels": 784}, "max_pixels is none of this model's: size"),
        (
            "qwen2.5-vl",
            {"min_pixels": 20_000_000},
            "min_pixels may be at most 12544, as this model is served, got 200",
        ),
        ("qwen2.5-vl", {"max_pixels": 12545}, "kwargs.max_pixels may be at most 12544"),
        ("qwen3-vl", {"size": {"shortest_edge": 12545}}, "size.shortest_edge may be at most 12544"),
        ("video-llama-3", {"max_pixels": 12545}, "kwargs.max_pixels may be at most 12544"),
        ("glm4v", {"size": {"longest_edge": 25089}}, "size.longest_edge may be at most 25088"),
        ("llava", {"size": {"shortest_edge": 29}}, "size.shortest_edge may be at most 28"),
        ("pixtral", {"size": {"longest_edge": 85}}, "size.longest_edge may be at most 84"),
        ("idefics3", {"size": {"longest_edge": 113}}, "size.longest_edge may be at most 112"),
        ("internvl", {"min_patches": 100, "max_patches": 100}, "min_patches may be at most 4"),
        ("cohere2-vision", {"max_patches": 5}, "max_patches may be at most 4"),
        ("lfm2-vl", {"min_image_tokens": 7}, "min_image_tokens may be at most 6"),
        ("lfm2-vl", {"max_image_tokens": 7}, "max_image_tokens may be at most 6"),
        ("gemma4", {"max_soft_tokens": 1121}, "max_soft_tokens may be at most 1120"),
    ],
)
def test_what_is_no_option_of_a_processor_is_named(
    tmp_path: Path, family: str, options: dict[str, Any], problem: str
) -> None:
    processor = ImageProcessor(write_processor(tmp_path, family))
    with pytest.raises(InvalidArgument, match=problem) as refusal:
        processor.options.settings(options)
    assert refusal.value.field == "mm_processor_kwargs"


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen2.5-vl", {"max_pixels": 25088}),
        ("qwen3-vl", {"size": {"longest_edge": 3136}}),
        ("pixtral", {"size": {"longest_edge": 168}}),
        ("internvl", {"crop_to_patches": False}),
        ("gemma4", {"max_soft_tokens": 140}),
        ("gemma3", CROPS),
    ],
)
def test_settings_of_an_operator_stand_in_place_of_the_checkpoints(
    tmp_path: Path, family: str, settings: dict[str, Any]
) -> None:
    checkpoint = write_processor(tmp_path, family)
    own, told = ImageProcessor(checkpoint), ImageProcessor(checkpoint, settings)
    image = picture(240, 110)
    wanted = own.process(image, own.options.settings(settings, bounded=False))
    result = told.process(image)
    assert result.placeholder == wanted.placeholder != own.process(image).placeholder
    assert result.inputs.keys() == wanted.inputs.keys()
    for name, array in result.inputs.items():
        assert np.array_equal(array, wanted.inputs[name]), name
    assert told.settings != own.settings


def test_requests_may_ask_for_less_than_an_operator(tmp_path: Path) -> None:
    gemma3 = write_processor(tmp_path / "gemma3", "gemma3")
    cropping = ImageProcessor(gemma3, CROPS).options
    assert cropping.settings({"do_pan_and_scan": False}) == {"do_pan_and_scan": False}
    with pytest.raises(InvalidArgument, match="max_num_crops may be at most 3"):
        cropping.settings({"pan_and_scan_max_num_crops": 4})
    with pytest.raises(InvalidArgument, match="max_num_crops may be at most 4, as this model is served"):
        ImageProcessor(gemma3, {"do_pan_and_scan": True}).options.settings({"pan_and_scan_max_num_crops": 5})
    for family, settings, asked, problem in (
        ("internvl", {"crop_to_patches": False}, {"crop_to_patches": True}, "is the operator's to set"),
        ("smolvlm", {"do_image_splitting": False}, {"do_image_splitting": True}, "is the operator's to set"),
        ("gemma4", {"max_soft_tokens": 140}, {"max_soft_tokens": 280}, "may be at most 140"),
    ):
        options = ImageProcessor(write_processor(tmp_path / family, family), settings).options
        with pytest.raises(InvalidArgument, match=problem):
            options.settings(asked)
    processor = ImageProcessor(write_processor(tmp_path, "qwen2.5-vl"), {"max_pixels": 25088})
    assert processor.options.settings({"max_pixels": 25088})["size"]["longest_edge"] == 25088
    with pytest.raises(InvalidArgument, match="max_pixels may be at most 25088"):
        processor.options.settings({"max_pixels": 25089})


def test_a_setting_that_the_configuration_has_already_still_counts(tmp_path: Path) -> None:
    """InternVL's class cuts images whatever the configuration says: an operator who forbids it has other images."""
    checkpoint = write_processor(tmp_path, "internvl")
    file = checkpoint / "preprocessor_config.json"
    file.write_bytes(msgspec.json.encode(msgspec.json.decode(file.read_bytes()) | {"crop_to_patches": False}))
    own, told = ImageProcessor(checkpoint), ImageProcessor(checkpoint, {"crop_to_patches": False})
    assert len(told.process(picture(200, 90)).inputs["pixel_values"]) == 1
    assert len(own.process(picture(200, 90)).inputs["pixel_values"]) > 1
    assert told.settings != own.settings


def test_a_checkpoint_that_prepares_no_image_is_no_fault_of_a_setting(tmp_path: Path) -> None:
    checkpoint = write_processor(tmp_path, "idefics2")
    with pytest.raises(InvalidArgument, match="does not tell which text") as refusal:
        ImageProcessor(checkpoint, {"size": {"longest_edge": 56}})
    assert refusal.value.field is None


@pytest.mark.parametrize(
    ("family", "settings", "problem"),
    [
        ("gemma3", {"max_pixels": 784}, "max_pixels is none of this model's"),
        ("pixtral", {"size": {"longest_edge": 1}}, "mm_processor_kwargs: "),
        ("qwen2.5-vl", {"max_pixels": "many"}, "max_pixels must be a positive whole number"),
        ("gemma4", {"max_soft_tokens": 141}, "mm_processor_kwargs: .*141"),
    ],
)
def test_a_wrong_setting_of_an_operator_is_named(
    tmp_path: Path, family: str, settings: dict[str, Any], problem: str
) -> None:
    with pytest.raises(InvalidArgument, match=problem) as refusal:
        ImageProcessor(write_processor(tmp_path, family), settings)
    assert refusal.value.field == "mm_processor_kwargs"


@pytest.mark.one_in(4)
@pytest.mark.parametrize("family", [family for family in PROCESSORS if family != "idefics2"])
def test_a_placeholder_of_rows_is_that_of_an_image(tmp_path: Path, family: str) -> None:
    """A text for each row between a beginning and an end, whatever the image's sides; or there is none such."""
    processor = ImageProcessor(write_processor(tmp_path, family))
    row_text = processor.row_text()
    images = [Image.new("RGB", size) for size in ((60, 40), (300, 40), (40, 300), (500, 480))]
    placeholders = [processor.process(image).placeholder for image in images]
    row = processor._processor.tokenizer.convert_ids_to_tokens(processor.token_ids[0])
    if row_text is None:
        assert any(row * text.count(row) not in text for text in placeholders)
        return
    begin, each, end = row_text
    assert each == row
    assert placeholders == [begin + row * text.count(row) + end for text in placeholders]
