"""Decodes the file of an image, by pillow. Runs in a process that may be killed."""

import io
import warnings

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from ..core.errors import InvalidArgument
from .limits import MediaLimits

FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF")
"""Formats that are read; pillow knows more, whose decoders are rarely looked at."""
_SIXTEEN_BIT = ("I;16", "I;16L", "I;16B", "I;16N")
_WHITE = (255, 255, 255, 255)


def decode_image(data: bytes, limits: MediaLimits) -> Image.Image:
    """The first frame of the file as RGB, upright as its EXIF data say, over white where it is transparent.

    Raises:
        InvalidArgument: it is no image of a format that is read, is broken, or exceeds the limits.
    """
    Image.MAX_IMAGE_PIXELS = None  # ours is checked instead, before a pixel is decoded
    try:
        with warnings.catch_warnings(action="ignore"), Image.open(io.BytesIO(data), formats=FORMATS) as image:
            limits.check_image_size(*image.size)
            image.load()
            limits.check_image_size(*image.size)  # decoding may tell better
            return _to_rgb(_upright(image))
    except InvalidArgument:
        raise
    except UnidentifiedImageError as error:
        message = f"the file is no image that can be read; formats are {', '.join(FORMATS)}"
        raise InvalidArgument(message) from error
    except MemoryError as error:
        raise InvalidArgument("decoding the image takes more memory than it may") from error
    except Exception as error:  # decoders raise whatever a broken file makes them meet
        raise InvalidArgument(f"the image is broken: {error or type(error).__name__}") from error


def _upright(image: Image.Image) -> Image.Image:
    """The image as its EXIF data say; as it is where they are broken."""
    try:
        return ImageOps.exif_transpose(image)
    except MemoryError:
        raise
    except Exception:
        return image


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode in _SIXTEEN_BIT or image.mode == "I":
        image = _eight_bits(image)
    if image.mode == "F":
        raise InvalidArgument("the image has floating-point pixels: send one of 8 or 16 bits")
    if "A" in image.getbands() or "a" in image.getbands() or "transparency" in image.info:
        pixels = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", pixels.size, _WHITE), pixels).convert("RGB")
    return image.convert("RGB")


def _eight_bits(image: Image.Image) -> Image.Image:
    """An image of 16 bits a pixel with the upper 8; pillow would cut off what is above 255."""
    values = np.asarray(image)
    if values.size and (values.max() > 0xFFFF or values.min() < 0):
        raise InvalidArgument("the image has pixels of more than 16 bits")
    return Image.fromarray((values.astype(np.uint16) >> 8).astype(np.uint8))
