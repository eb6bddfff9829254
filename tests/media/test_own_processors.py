"""Processors that transformers has over torchvision alone, which is not there, so its classes compute here with
torchvision's few functions written over pillow and torch."""

import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import transformers.image_processing_backends as backends
import transformers.models.auto.image_processing_auto  # noqa: F401 - which asks whether torchvision is there
from PIL import Image
from transformers.image_utils import PILImageResampling
from transformers.utils import import_utils

from charonia.media.cohere2_images import Cohere2VisionImageProcessorPil
from charonia.media.lfm2_images import Lfm2VlImageProcessorPil

from .pictures import picture

SETTINGS: dict[str, Any] = {"encoder_patch_size": 4, "tile_size": 32, "min_image_tokens": 6, "max_image_tokens": 20}
SIZES = ((60, 40), (40, 60), (200, 31), (31, 200), (90, 90), (8, 8), (3, 100), (500, 333))


def resize(image: torch.Tensor, size: tuple[int, int], **_: Any) -> torch.Tensor:
    made = [
        Image.fromarray(each.permute(1, 2, 0).numpy()).resize(size[::-1], PILImageResampling.BILINEAR)
        for each in image.reshape(-1, *image.shape[-3:])
    ]
    scaled = torch.from_numpy(np.stack([np.asarray(each) for each in made])).permute(0, 3, 1, 2)
    return scaled.reshape(*image.shape[:-2], *size)


def normalize(image: torch.Tensor, mean: torch.Tensor, std: torch.Tensor, inplace: bool) -> torch.Tensor:
    return image.sub(mean.view(-1, 1, 1)).div(std.view(-1, 1, 1))


@pytest.fixture
def original(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], Any]]:
    """A class of transformers by its family and name."""
    deeper = ("", ".transforms", ".transforms.v2", ".transforms.v2.functional")
    names = [f"torchvision{path}" for path in deeper]
    modules = {name: ModuleType(name) for name in names}
    functions = modules[names[-1]]
    vars(functions).update(resize=resize, normalize=normalize, InterpolationMode=PILImageResampling)
    vars(modules[names[-2]])["functional"] = functions
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(import_utils, "is_torchvision_available", lambda: True)
    monkeypatch.setattr(backends, "tvF", functions, raising=False)
    same = {method: method for method in PILImageResampling}
    monkeypatch.setattr(backends, "pil_torch_interpolation_mapping", same)
    imported = []

    def find(family: str, name: str) -> Any:
        imported.append(f"transformers.models.{family}.image_processing_{family}")
        return getattr(import_module(imported[-1]), name)

    yield find
    for name in imported:
        del sys.modules[name]


@pytest.mark.parametrize("settings", [{}, {"min_tiles": 1, "max_tiles": 3}, {"do_image_splitting": False}])
def test_lfm2_images_are_those_of_transformers_but_for_the_scaling(
    original: Callable[[str, str], Any], settings: dict[str, Any]
) -> None:
    mine = Lfm2VlImageProcessorPil(**SETTINGS, **settings)
    theirs = original("lfm2_vl", "Lfm2VlImageProcessor")(**SETTINGS, **settings)
    tiled = 0
    for size in SIZES:
        made = mine([picture(*size)], return_tensors="np", return_row_col_info=True)
        right = theirs([picture(*size)], return_tensors="pt", return_row_col_info=True)
        assert made.keys() == right.keys()
        tiled += int(made["image_rows"][0]) * int(made["image_cols"][0]) > 1
        for name, values in right.items():
            assert np.array_equal(made[name], np.asarray(values)), name
    assert tiled >= 3 or "do_image_splitting" in settings


@pytest.mark.parametrize("settings", [{}, {"max_patches": 5}, {"crop_to_patches": False}])
def test_cohere2_images_are_those_of_transformers_but_for_the_scaling(
    original: Callable[[str, str], Any], settings: dict[str, Any]
) -> None:
    settings = {"size": {"height": 32, "width": 32}, "resample": PILImageResampling.BILINEAR} | settings
    mine = Cohere2VisionImageProcessorPil(**settings)
    theirs = original("cohere2_vision", "Cohere2VisionImageProcessor")(**settings)
    counts = set()
    for size in SIZES:
        made = mine([picture(*size)], return_tensors="np")
        right = theirs([picture(*size)], return_tensors="pt")
        assert made.keys() == right.keys()
        assert np.array_equal(made["num_patches"], right["num_patches"])
        np.testing.assert_allclose(made["pixel_values"], right["pixel_values"], atol=1e-6)
        counts.add(int(made["num_patches"][0]))
    assert len(counts) >= 3 or "crop_to_patches" in settings
