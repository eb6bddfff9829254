"""The processor of LFM2-VL's images over pillow: transformers has it over torchvision alone.

It does what transformers' `Lfm2VlImageProcessor` does, with the same sums in single precision; only the scaling is
pillow's. Imported where such images are prepared alone.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers.image_processing_backends import PilBackend
from transformers.image_processing_base import BatchFeature
from transformers.image_utils import PILImageResampling, SizeDict
from transformers.processing_utils import ImagesKwargs


class Lfm2VlImageKwargs(ImagesKwargs, total=False):
    """What a checkpoint says beside the fields of any processor."""

    downsample_factor: int
    do_image_splitting: bool
    min_tiles: int
    max_tiles: int
    use_thumbnail: bool
    min_image_tokens: int
    max_image_tokens: int
    encoder_patch_size: int
    tile_size: int
    max_pixels_tolerance: float
    return_row_col_info: bool


class Lfm2VlImageProcessorPil(PilBackend):
    """Patches of a large image's tiles and its thumbnail; of another one scaled to whole squares."""

    downsample_factor = 2
    do_image_splitting = True
    min_tiles = 2
    max_tiles = 10
    use_thumbnail = True
    min_image_tokens = 64
    max_image_tokens = 256
    encoder_patch_size = 16
    tile_size = 512
    max_pixels_tolerance = 2.0
    do_resize = True
    size: Any = {"height": 512, "width": 512}
    resample = PILImageResampling.BILINEAR
    do_rescale = True
    rescale_factor = 1 / 255
    do_normalize = True
    do_pad = True
    return_row_col_info = False
    image_mean: Any = (0.5, 0.5, 0.5)
    image_std: Any = (0.5, 0.5, 0.5)
    valid_kwargs = Lfm2VlImageKwargs
    model_input_names: Any = ("pixel_values", "pixel_attention_mask", "spatial_shapes")

    def _preprocess(self, images: list[NDArray[Any]], resample: Any, **settings: Any) -> Any:  # type: ignore[override]
        tiled = settings["do_image_splitting"] and not settings["min_tiles"] == settings["max_tiles"] == 1
        factor, patch = settings["downsample_factor"], settings["encoder_patch_size"]
        longest = settings["max_image_tokens"] * factor**2
        if settings["do_image_splitting"]:
            longest = max(longest, (settings["tile_size"] // patch) ** 2)
        outputs: dict[str, list[Any]] = {name: [] for name in (*self.model_input_names, *_LAYOUT)}
        for image in images:
            height, width = image.shape[-2:]
            side = factor * patch
            most = settings["max_image_tokens"] * side**2
            scaled = _scaled_size(height, width, side, settings["min_image_tokens"] * side**2, most)
            rows = columns = 1
            thumbnail = [self._scaled(image, *scaled, resample)]
            parts = thumbnail
            rounded = [max(patch, round(length / side) * side) for length in (height, width)]
            if tiled and math.prod(rounded) > most * settings["max_pixels_tolerance"]:
                tile = settings["tile_size"]
                rows, columns = _tiles(height, width, settings["min_tiles"], settings["max_tiles"], tile)
                grid = self._scaled(image, tile * rows, tile * columns, resample)
                parts = [
                    grid[:, row : row + tile, column : column + tile]
                    for row in range(0, tile * rows, tile)
                    for column in range(0, tile * columns, tile)
                ]
                parts += thumbnail if settings["use_thumbnail"] and rows * columns != 1 else []
            for part in parts:
                patches = _patches(_normalised(part, settings), patch)
                mask = np.arange(longest) < len(patches)
                outputs["pixel_values"].append(np.pad(patches, ((0, longest - len(patches)), (0, 0))))
                outputs["pixel_attention_mask"].append(mask.astype(np.int32))
                outputs["spatial_shapes"].append([length // patch for length in part.shape[-2:]])
            for name, value in zip(_LAYOUT, (rows, columns, scaled), strict=True):
                outputs[name].append(value)
        wanted = (*self.model_input_names, *(_LAYOUT if settings["return_row_col_info"] else ()))
        return BatchFeature({name: outputs[name] for name in wanted}, tensor_type=settings["return_tensors"])

    def _scaled(self, image: NDArray[Any], height: int, width: int, resample: Any) -> NDArray[Any]:
        return np.asarray(self.resize(image, SizeDict(height=height, width=width), resample=resample))


_LAYOUT = ("image_rows", "image_cols", "image_sizes")
"""What the text of an image is written by."""


def _scaled_size(height: int, width: int, side: int, least: int, most: int) -> tuple[int, int]:
    """The size in whole squares of `side` pixels, within these numbers of pixels, that is most like the image's."""
    rows, columns = (max(side, round(length / side) * side) for length in (height, width))
    if rows * columns > most:
        scale = math.sqrt(height * width / most)
        rows, columns = (max(side, math.floor(length / scale / side) * side) for length in (height, width))
    elif rows * columns < least:
        scale = math.sqrt(least / (height * width))
        rows, columns = (math.ceil(length * scale / side) * side for length in (height, width))
    return rows, columns


def _tiles(height: int, width: int, least: int, most: int, tile: int) -> tuple[int, int]:
    """Rows and columns of tiles, in the ratio that is closest to the image's: of those that are as close the last one
    whose pixels the image has more than half of."""
    if least > most:
        raise ValueError("min_tiles must be less than or equal to max_tiles")
    # In the order of transformers, which sorts a set by the number of tiles alone.
    ratios = sorted(
        {(across, down) for count in range(least, most + 1) for across in range(1, count + 1)
         for down in range(1, count + 1) if least <= across * down <= most},
        key=lambda ratio: ratio[0] * ratio[1],
    )  # fmt: skip
    best, closest = (1, 1), math.inf
    for across, down in ratios:
        difference = abs(width / height - across / down)
        if difference < closest:
            best, closest = (across, down), difference
        elif difference == closest and height * width > 0.5 * tile * tile * across * down:
            best = (across, down)
    across, down = best
    return down, across


def _normalised(image: NDArray[Any], settings: dict[str, Any]) -> NDArray[Any]:
    if not settings["do_normalize"]:
        return image * np.float32(settings["rescale_factor"]) if settings["do_rescale"] else image
    scale = np.float32(1 / settings["rescale_factor"] if settings["do_rescale"] else 1)
    mean, deviation = (np.array(settings[name], np.float32) * scale for name in ("image_mean", "image_std"))
    normalised: NDArray[np.float32] = (image.astype(np.float32) - mean[:, None, None]) / deviation[:, None, None]
    return normalised


def _patches(image: NDArray[Any], side: int) -> NDArray[Any]:
    """Squares of pixels [patches, side * side * channels]."""
    channels, height, width = image.shape
    squares = image.reshape(channels, height // side, side, width // side, side)
    return squares.transpose(1, 3, 2, 4, 0).reshape(-1, side * side * channels)
