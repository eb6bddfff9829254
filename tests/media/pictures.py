"""Pictures, their files, and the requests that have them."""

import io
from typing import Any

import numpy as np
from PIL import Image

from charonia.core.media import MediaSource
from charonia.core.request_context import RequestContext


def picture(width: int = 60, height: int = 40, seed: int = 0) -> Image.Image:
    """Smooth colours, of which no two corners have the same, so that what is turned or cut shows."""
    rows, columns = np.mgrid[0:height, 0:width]
    colours = np.stack((columns * 4 + seed, rows * 6, (rows + columns) * 2), -1)
    return Image.fromarray(colours.astype(np.uint8))


def file_of(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    target = io.BytesIO()
    image.save(target, form, **options)
    return target.getvalue()


def source(data: bytes = b"", **others: Any) -> MediaSource:
    return MediaSource("image", data, **({"field": "messages[0].content[0].image_url"} | others))


def context(tenant: str = "") -> RequestContext:
    return RequestContext("test", tenant=tenant)
