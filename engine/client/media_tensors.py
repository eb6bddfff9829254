"""Images and sounds among the tensors of a v2 request, which become media of its prompt.

A model that sees has `image` (files, their base64, or URLs) and `image_pixels` (images of one size); one that hears
has `audio`. What another model has made of images comes as `image_embeds`, with `image_grid_thw` where there are
several or positions have three dimensions.
"""

import struct
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from math import prod

import numpy as np
import orjson
from numpy.typing import NDArray

from ...core.errors import InvalidArgument
from ...core.media import EMBEDS, MediaKind, MediaSource
from ...core.model import ModelConfig
from ...core.tensor import Tensor, TensorSpec

_PIXELS = "image_pixels"
MEDIA_INPUTS: Mapping[MediaKind, tuple[TensorSpec, ...]] = {
    "image": (
        TensorSpec("image", "BYTES", (-1,), optional=True),
        TensorSpec(_PIXELS, "UINT8", (-1, -1, -1, 3), optional=True),
    ),
    "audio": (TensorSpec("audio", "BYTES", (-1,), optional=True),),
}
"""By kind, in the order of their media in a text that has no places for them. Files come by the kind's name."""
_ROWS = {EMBEDS: ("FP32", "F32"), f"{EMBEDS}_fp16": ("FP16", "F16"), f"{EMBEDS}_bf16": ("BF16", "BF16")}
"""By input for rows that were encoded elsewhere, its datatype, and what safetensors call it."""
_GRIDS = TensorSpec("image_grid_thw", "INT64", (-1, 3), optional=True)
MEDIA_NAMES = frozenset(spec.name for specs in MEDIA_INPUTS.values() for spec in specs) | {*_ROWS, _GRIDS.name}

_MOST = 1024
"""Media that are looked at; how many a prompt may have, the model's own limit says."""
_URLS = ("data:", "http:", "https:", "file:")
_TIFF_HEADER = 128


def with_media(config: ModelConfig, kinds: frozenset[MediaKind], transcribes: bool, row_width: int = 0) -> ModelConfig:
    """The config of a language model with its media and the inputs for them; its layout may have some already, or all,
    of one that does nothing else than to write down sounds. `row_width`: numbers of a row of an image that was encoded
    elsewhere; 0: none is taken."""
    config = replace(config, media=kinds, transcribes=transcribes)
    if transcribes:
        return config
    names = {spec.name for spec in config.inputs}
    own = [spec for kind, specs in MEDIA_INPUTS.items() if kind in config.media for spec in specs]
    if row_width:
        own += [TensorSpec(name, datatype, (-1, row_width), optional=True) for name, (datatype, _) in _ROWS.items()]
        own.append(_GRIDS)
    return replace(config, inputs=(*config.inputs, *(spec for spec in own if spec.name not in names)))


def refuse_media(parameters: Mapping[str, object], config: ModelConfig) -> None:
    """Raises `InvalidArgument` for a medium among the parameters of a request, as which a body of `generate` has what
    the model has no input for."""
    for kind in (MEDIA_INPUTS.keys() & parameters.keys()) - config.media:
        if parameters[kind] not in (None, "", []):
            reason = config.refused_media.get(kind, "")
            message = f"{kind}: model '{config.name}' takes no {kind}"
            raise InvalidArgument(f"{message} ({reason})" if reason else message, field=kind)


def read_media(inputs: Mapping[str, Tensor]) -> tuple[MediaSource, ...]:
    """The media of a request: files first. Raises `InvalidArgument` for what is neither a file nor text, for images
    without pixels, and for more than any prompt may have."""
    media = tuple(islice(_media(inputs), _MOST + 1))
    if len(media) > _MOST:
        raise InvalidArgument(f"{media[-1].field}: a request may have at most {_MOST} media", field=media[-1].field)
    return media


def _media(inputs: Mapping[str, Tensor]) -> Iterator[MediaSource]:
    for kind in MEDIA_INPUTS:
        for index, element in enumerate(inputs[kind].data.ravel() if kind in inputs else ()):
            field = f"{kind}[{index}]"
            content = element.encode() if isinstance(element, str) else bytes(element)
            if not content:
                raise InvalidArgument(f"{field} is empty", field=field)
            yield file_source(kind, content, field)
    if _PIXELS in inputs:
        pixels = inputs[_PIXELS].data.reshape(inputs[_PIXELS].shape)
        if pixels.size == 0 and len(pixels):
            raise InvalidArgument(f"{_PIXELS} has images without pixels: {list(pixels.shape)}", field=_PIXELS)
        for index, image in enumerate(pixels):
            yield MediaSource("image", data=_tiff(image), field=f"{_PIXELS}[{index}]")
    yield from _encoded_images(inputs)


def _encoded_images(inputs: Mapping[str, Tensor]) -> Iterator[MediaSource]:
    """A file of safetensors for each image whose rows are there: as many of them as its part of all patches."""
    names = [name for name in _ROWS if name in inputs]
    if len(names) != 1:
        if names or _GRIDS.name in inputs:
            field = (names or [_GRIDS.name])[0]
            raise InvalidArgument(f"{field}: rows of images come in one of {', '.join(_ROWS)}", field=field)
        return
    [name] = names
    rows = inputs[name].data.reshape(inputs[name].shape)
    if _GRIDS.name not in inputs:
        yield MediaSource("image", _safetensors(rows, _ROWS[name][1]), field=name, encoded=True)
        return
    grids = [(time, height, width) for time, height, width in inputs[_GRIDS.name].data.reshape(-1, 3).tolist()]
    patches = [prod(grid) if min(grid) >= 1 else 0 for grid in grids]
    counts = [len(rows) * own // (sum(patches) or 1) for own in patches]
    if not (len(grids) <= _MOST and all(counts)) or sum(counts) != len(rows):
        message = f"{_GRIDS.name} does not part the {len(rows)} rows of {name} among {len(grids)} images"
        raise InvalidArgument(message, field=_GRIDS.name)
    begin = 0
    for index, (grid, count) in enumerate(zip(grids, counts, strict=True)):
        part = _safetensors(rows[begin : begin + count], _ROWS[name][1])
        yield MediaSource("image", part, field=f"{name} of image {index}", encoded=True, grid=grid)
        begin += count


def _safetensors(rows: NDArray[np.generic], dtype: str) -> bytes:
    header = {EMBEDS: {"dtype": dtype, "shape": rows.shape, "data_offsets": [0, rows.nbytes]}}
    head = orjson.dumps(header)
    return struct.pack("<Q", len(head)) + head + rows.tobytes()


def file_source(kind: MediaKind, content: bytes, field: str) -> MediaSource:
    """A file as it is, or where text says that it is. No format that is read is text alone."""
    if not content.isascii() or b"\0" in content:
        return MediaSource(kind, data=content, field=field)
    text = content.decode("ascii").strip()
    url = text if text[:6].lower().startswith(_URLS) else f"data:;base64,{text}"
    return MediaSource(kind, url=url, field=field)


def _tiff(image: NDArray[np.uint8]) -> bytes:
    """The pixels [height, width, 3] as an uncompressed TIFF file, which is a header before them."""
    height, width, _ = image.shape
    short, long = 3, 4
    entries = (
        (256, long, 1, width),
        (257, long, 1, height),
        (258, short, 3, _TIFF_HEADER - 6),  # bits of each sample, at the header's end
        (259, short, 1, 1),  # not compressed
        (262, short, 1, 2),  # RGB
        (273, long, 1, _TIFF_HEADER),
        (277, short, 1, 3),
        (278, long, 1, height),
        (279, long, 1, image.size),
    )
    directory = b"".join(struct.pack("<HHII", *entry) for entry in entries)
    header = struct.pack("<2sHIH", b"II", 42, 8, len(entries)) + directory + struct.pack("<I3H", 0, 8, 8, 8)
    return header + np.ascontiguousarray(image).data.cast("B")
