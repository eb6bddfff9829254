"""The processor of Cohere2 Vision's images over pillow: transformers has it over torchvision alone.

It does what transformers' `Cohere2VisionImageProcessor` does; only the scaling is pillow's. Imported where such images
are prepared alone.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers.image_utils import SizeDict
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil


class Cohere2VisionImageProcessorPil(GotOcr2ImageProcessorPil):
    """Tiles of an image that is scaled to whole ones, and a thumbnail where there are several."""

    size: Any = {"height": 512, "width": 512}
    crop_to_patches = True
    patch_size = 16

    def crop_image_to_patches(
        self,
        image: NDArray[Any],
        min_patches: int,
        max_patches: int,
        use_thumbnail: bool = True,
        patch_size: Any = None,
        resample: Any = None,
    ) -> list[NDArray[Any]]:
        tile = patch_size.height
        columns, rows = tile_grid(image.shape[-2], image.shape[-1], tile, max_patches)
        resized = np.asarray(self.resize(image, SizeDict(height=tile * rows, width=tile * columns), resample=resample))
        tiles = [
            resized[:, row : row + tile, column : column + tile]
            for row in range(0, tile * rows, tile)
            for column in range(0, tile * columns, tile)
        ]
        if use_thumbnail and len(tiles) != 1:
            tiles.append(np.asarray(self.resize(image, patch_size, resample=resample)))
        return tiles


def tile_grid(height: int, width: int, tile: int, most: int) -> tuple[int, int]:
    """Columns and rows of at most `most` tiles: those that an image is scaled up to least, or, where all are smaller
    than it, down to least; of several the fewest tiles, and then the fewest columns."""
    grids = [(columns, rows) for columns in range(1, most + 1) for rows in range(1, most // columns + 1)]
    grids.sort(key=lambda grid: grid[0] * grid[1])
    scales = [min(columns * tile / width, rows * tile / height) for columns, rows in grids]
    wanted = min((scale for scale in scales if scale >= 1), default=max(scales))
    return grids[scales.index(wanted)]
