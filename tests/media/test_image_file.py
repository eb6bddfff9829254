"""Files of images become upright pictures in RGB, or are refused by what is wrong with them."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageOps

from charonia.core.errors import InvalidArgument
from charonia.core.media_models import MediaConfig
from charonia.media.image_file import decode_image
from charonia.media.limits import MediaLimits

from .hostile_files import png
from .pictures import file_of, picture

LIMITS = MediaLimits(MediaConfig(max_pixels=1 << 16), max_aspect=20)


def decoded(data: bytes) -> np.ndarray:
    image = decode_image(data, LIMITS)
    assert image.mode == "RGB"
    return np.asarray(image)


@pytest.mark.parametrize("form", ["PNG", "GIF", "WEBP", "BMP", "TIFF"])
def test_a_picture_is_what_it_was(form: str) -> None:
    image = picture().quantize(64).convert("RGB")
    options = {"lossless": True} if form == "WEBP" else {}
    assert np.array_equal(decoded(file_of(image, form, **options)), np.asarray(image))


def test_a_jpeg_is_what_transformers_reads() -> None:
    data = file_of(picture(), "JPEG", quality=90)
    assert np.array_equal(decoded(data), np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_picture_is_turned_as_its_camera_was(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = file_of(picture(), "PNG", exif=exif)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    assert upright.size == ((40, 60) if orientation > 4 else (60, 40))
    assert np.array_equal(decoded(data), np.asarray(upright))


def test_a_picture_whose_camera_wrote_nonsense_is_not_turned() -> None:
    exif = b"Exif\0\0II*\0\x08\0\0\0\x02\0\x12\x01\x03\0\xff\xff\xff\xff\x06\0\0\0"
    for size in (len(exif), 16, 10, 7):
        data = file_of(picture(), "JPEG", exif=exif[:size])
        assert decoded(data).shape == (40, 60, 3)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_what_is_transparent_is_white(mode: str) -> None:
    image = Image.new("RGBA", (8, 8), (0, 0, 0, 0))
    image.paste((20, 40, 60, 255), (0, 0, 4, 8))
    if mode == "P":
        data = file_of(image.convert("P"), "PNG", transparency=image.convert("P").getpixel((7, 7)))
    else:
        data = file_of(image.convert(mode), "PNG")
    pixels = decoded(data)
    assert pixels[:, 4:].min() == 255
    assert pixels[:, :4].max() < 70


@pytest.mark.parametrize("form", ["PNG", "TIFF"])
def test_sixteen_bits_keep_the_upper_eight(form: str) -> None:
    values = np.linspace(0, 0xFFFF, 64).astype(np.uint16).reshape(8, 8)
    pixels = decoded(file_of(Image.fromarray(values), form))
    assert np.array_equal(pixels, np.repeat((values >> 8).astype(np.uint8)[..., None], 3, -1))


def test_sixteen_bits_of_each_colour() -> None:
    values = np.random.default_rng(0).integers(0, 0x10000, (4, 5, 3), dtype=np.uint16)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    assert np.array_equal(decoded(png(5, 4, rows, depth=16)), (values >> 8).astype(np.uint8))


@pytest.mark.parametrize("mode", ["1", "L", "CMYK", "YCbCr"])
def test_other_colours_become_rgb(mode: str) -> None:
    form = "JPEG" if mode == "YCbCr" else "TIFF"
    image = picture().convert(mode)
    data = file_of(image, form)
    assert np.array_equal(decoded(data), np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG", "TIFF"])
def test_of_several_frames_the_first_counts(form: str) -> None:
    frames = [picture(seed=seed).quantize(32).convert("RGB") for seed in (0, 99)]
    options = {"lossless": True} if form == "WEBP" else {}
    data = file_of(frames[0], form, save_all=True, append_images=frames[1:], **options)
    assert np.array_equal(decoded(data), np.asarray(frames[0]))


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (file_of(picture(300, 300)), "has 300 x 300 pixels, and may have 65,536"),
        (file_of(picture(300, 10)), "is 300 x 10: one side may be at most 20 times the other"),
        (png(60_000, 60_000, b""), "has 60000 x 60000 pixels"),
        (file_of(Image.fromarray(np.ones((4, 4), np.float32)), "TIFF"), "floating-point"),
        (file_of(Image.fromarray(np.full((4, 4), 1 << 20, np.int32)), "TIFF"), "more than 16 bits"),
        (file_of(picture(), "PPM"), "no image that can be read; formats are PNG, JPEG"),
        (file_of(picture(), "ICO"), "no image that can be read"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "no image that can be read"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "no image that can be read"),
        (file_of(picture())[:-40], "is broken"),
        (png(8, 8, b""), "is broken"),
    ],
)
def test_what_is_no_picture_is_refused_by_its_fault(data: bytes, problem: str) -> None:
    with pytest.raises(InvalidArgument, match=problem):
        decode_image(data, LIMITS)


def test_the_size_is_judged_before_a_pixel_is_decoded() -> None:
    """A hundred thousandth of the bytes that it would become."""
    bomb = png(1 << 15, 1 << 15, zlib.compress(b"\0" * 1000), packed=True)
    assert len(bomb) < 1000
    with pytest.raises(InvalidArgument, match="32768 x 32768 pixels"):
        decode_image(bomb, LIMITS)
    assert struct.unpack(">I", bomb[16:20]) == (1 << 15,)
