"""Towers: their rows are those of transformers, whatever other images are computed beside them."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, LlavaForConditionalGeneration

from charonia.classic_backends.tower.tower import Tower
from charonia.classic_backends.tower.tower_files import read_tower_files
from charonia.core.errors import InvalidArgument, Unsupported
from charonia.core.runtime import Arrays
from charonia.media.processor import ImageProcessor
from tests.checkpoints import write_checkpoint
from tests.quantised_files import STYLES, write_quantised
from tests.seeing_models import MODELS, picture, write_seeing

SIZES = ((90, 50), (60, 120), (90, 50))


@torch.inference_mode()
def reference(
    directory: Path, media: list[Arrays], dtype: torch.dtype
) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
    """Rows and deepstack of each image by the whole model."""
    model: Any = AutoModelForImageTextToText.from_pretrained(directory, dtype=dtype)
    model.set_experts_implementation("eager")  # others have no double precision
    outputs = []
    for arrays in media:
        inputs = {name: torch.tensor(array) for name, array in arrays.items()}
        inputs = {name: value.to(dtype) if value.is_floating_point() else value for name, value in inputs.items()}
        made = model.model.get_image_features(**inputs, return_dict=True)
        rows = torch.cat([part.reshape(-1, part.shape[-1]) for part in made.pooler_output])
        layers = [torch.cat(list(layer)).float() for layer in getattr(made, "deepstack_features", None) or ()]
        outputs.append((rows.float(), layers))
    return outputs


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", MODELS)
def test_rows_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    directory = write_seeing(tmp_path, name)
    processor = ImageProcessor(directory)
    media = [processor.process(Image.fromarray(picture(*size, seed))).inputs for seed, size in enumerate(SIZES)]
    files = read_tower_files(directory, "auto")
    exact, rounded = (reference(directory, media, dtype) for dtype in (torch.float64, torch.float32))
    alone = Tower(files, "cpu", together=False).encode(media)
    beside = Tower(files, "cpu", together=True).encode(media)
    for (rows, layers), (near, _), one, other in zip(exact, rounded, alone, beside, strict=True):
        # Products with packed weights are summed in another order, and rows are of the size of tens.
        most = max(1e-5 * max(1.0, float(rows.abs().max())), 2 * float((near - rows).abs().max()))
        torch.testing.assert_close(one.rows, rows, rtol=1e-5, atol=most)
        torch.testing.assert_close(list(one.deepstack), layers, rtol=2e-5, atol=2e-5)
        # So are those of more rows.
        torch.testing.assert_close(other.rows, one.rows, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(other.deepstack, one.deepstack, rtol=1e-5, atol=1e-5)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", [name for name in MODELS if name != "lighton-ocr"])
def test_the_smallest_image_has_a_row_for_each_place(tmp_path: Path, name: str) -> None:
    directory = write_seeing(tmp_path, name)
    processor = ImageProcessor(directory)
    medium = processor.process(Image.new("RGB", (1, 1)))
    [encoded] = Tower(read_tower_files(directory, "auto"), "cpu", together=False).encode([medium.inputs])
    places = processor._processor.tokenizer(medium.placeholder)["input_ids"]
    assert len(encoded.rows) == places.count(processor.token_ids[0]) > 0


@pytest.mark.parametrize("name", ["mistral3", pytest.param("mistral-large4", marks=pytest.mark.proof)])
def test_an_image_of_one_place_has_its_row(tmp_path: Path, name: str) -> None:
    """Of which transformers' class makes nothing unless another stands beside it."""
    directory = write_seeing(tmp_path, name)
    processor = ImageProcessor(directory)
    small = processor.process(Image.new("RGB", (20, 9), (9, 80, 200))).inputs
    both = {key: np.concatenate((array, array)) for key, array in small.items()}
    [encoded] = Tower(read_tower_files(directory, "auto"), "cpu", together=False).encode([small])
    [(pair, _)] = reference(directory, [both], torch.float32)
    torch.testing.assert_close(encoded.rows, pair[:1], rtol=2e-5, atol=2e-5)
    assert len(pair) == 2


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qwen3-vl", {"max_pixels": 3136}),
        ("gemma4", {"max_soft_tokens": 140}),
        ("smolvlm", {"do_image_splitting": False}),
        ("internvl", {"max_patches": 1}),
        ("mistral3", {"size": {"longest_edge": 56}}),
        ("lfm2-vl", {"max_image_tokens": 5}),
    ],
)
def test_images_of_a_requests_own_options_have_a_row_for_each_place(
    tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    directory = write_seeing(tmp_path, name)
    processor = ImageProcessor(directory)
    medium = processor.process(Image.fromarray(picture(200, 120)), processor.options.settings(options))
    [encoded] = Tower(read_tower_files(directory, "auto"), "cpu", together=False).encode([medium.inputs])
    places = processor._processor.tokenizer(medium.placeholder)["input_ids"]
    assert len(encoded.rows) == places.count(processor.token_ids[0]) > 0


def test_what_is_no_tower_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="images of the family 'llama' are not served"):
        read_tower_files(write_checkpoint(tmp_path / "text"), "auto")
    with pytest.raises(Unsupported, match=r"sounds of the family 'llama' are not served; those of .*voxtral"):
        read_tower_files(tmp_path / "text", "auto", ("audio",))
    seeing = write_seeing(tmp_path / "llava", "llava")
    files = read_tower_files(seeing, "bfloat16")
    numbers = sum(weight.numbers for weight in files.weights)
    assert (files.bytes(gpu=True), files.bytes(gpu=False)) == (2 * numbers, 4 * numbers)
    lacking = files._replace(weights=files.weights[1:])
    with pytest.raises(InvalidArgument, match="lacks 1 weights of its tower: model"):
        Tower(lacking, "cpu", together=False)
    tower = Tower(files, "cpu", together=False)
    [medium] = tower.encode([{"pixel_values": torch.zeros(1, 3, 28, 28).numpy()}])
    assert medium.rows.dtype == torch.bfloat16
    with pytest.raises(InvalidArgument, match="no pixel_values"):
        tower.encode([{"image_sizes": torch.zeros(1, 2).numpy()}])
    with pytest.raises(InvalidArgument, match=r"the tower refuses pixel_values \[1, 3, 30, 30\]"):
        tower.encode([{"pixel_values": torch.zeros(1, 3, 30, 30).numpy()}])


def test_a_class_that_cannot_be_made_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the library raises, as where a part of its configuration is missing."""
    files = read_tower_files(write_seeing(tmp_path, "llava"), "auto")

    def fails(*inputs: Any, **named: Any) -> None:
        raise TypeError("Parameter config should be an instance of class PreTrainedConfig")

    monkeypatch.setattr(LlavaForConditionalGeneration, "from_pretrained", fails)
    with pytest.raises(InvalidArgument, match=r"transformers cannot load the tower of .*Parameter config"):
        Tower(files, "cpu", together=False)


def test_memory_of_loading_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process on the host keeps what it frees: it would hold the weights twice until pictures have come."""
    released: list[bool] = []
    monkeypatch.setattr("charonia.classic_backends.tower.tower.release_free_memory", lambda: released.append(True))
    Tower(read_tower_files(write_seeing(tmp_path, "llava"), "auto"), "cpu", together=False)
    assert released == [True]


SIZES_OF_PICTURES = """
import resource, sys
import numpy as np
from pathlib import Path
from charonia.classic_backends.tower.tower import Tower
from charonia.classic_backends.tower.tower_files import read_tower_files
tower = Tower(read_tower_files(Path(sys.argv[1]), "auto"), "cpu", together=False)
for count in range(1, 121):
    grid = 2 * (1 + count % 12), 2 * (1 + count // 12)
    pixels = np.ones((grid[0] * grid[1], 1176), np.float32)
    tower.encode([{"pixel_values": pixels, "image_grid_thw": np.array([[1, *grid]])}])
    if count in (60, 120):
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)
"""
"""Prints the MiB of a tower behind pictures of 60 sizes, and of 120."""


@pytest.mark.proof
def test_code_for_pictures_of_many_sizes_is_not_kept(tmp_path: Path) -> None:
    """It was 0.3 MiB for each product of each size, up to 1,024 of them."""
    directory = write_seeing(tmp_path, "qwen2.5-vl")
    command = [sys.executable, "-c", SIZES_OF_PICTURES, str(directory)]
    half, all_of_them = map(int, subprocess.check_output(command, text=True, timeout=300).split())
    assert all_of_them - half < 30


@pytest.mark.parametrize("style", ["awq", pytest.param("gptq", marks=pytest.mark.proof)])
def test_a_tower_beside_a_quantised_language_part(tmp_path: Path, style: str) -> None:
    """As such checkpoints are published: the tower's weights stand as they are beside packed ones."""
    source = write_seeing(tmp_path / "source", "qwen2.5-vl")
    small, _ = write_quantised(source, tmp_path / "quantised", STYLES[style]())
    media = [ImageProcessor(source).process(Image.fromarray(picture(90, 50))).inputs]
    [right] = Tower(read_tower_files(source, "auto"), "cpu", together=False).encode(media)
    files = read_tower_files(small, "auto")
    assert all("visual" in weight.name for weight in files.weights)
    [medium] = Tower(files, "cpu", together=False).encode(media)
    assert torch.equal(medium.rows, right.rows)
