"""Images as tensors of v2 requests: which are files, which say where one is, and pixels as they are."""

import base64
import io
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from charonia.core.errors import InvalidArgument
from charonia.core.media import MediaSource
from charonia.core.model import ModelConfig
from charonia.core.request import InferRequest, TextWithMedia
from charonia.core.tensor import Tensor
from charonia.engine.client.infer import OWN_LAYOUT, parse_infer_request
from charonia.engine.client.media_tensors import MEDIA_INPUTS, read_media, refuse_media, with_media
from charonia.engine.vllm.build import VLLM_LAYOUT
from charonia.media.encoded_file import read_rows
from charonia.media.image_file import decode_image
from charonia.media.limits import MediaLimits
from charonia.tokenization.media_text import MediaText, text_with_places
from tests.seeing_models import picture


def tensors(**values: Any) -> dict[str, Tensor]:
    datatypes = {"image": "BYTES", "image_pixels": "UINT8", "text_input": "BYTES", "input_ids": "INT32"}
    return {name: Tensor.from_values(name, datatypes[name], value) for name, value in values.items()}


@pytest.mark.parametrize("form", ["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF"])
def test_a_file_is_told_from_text(form: str) -> None:
    file = io.BytesIO()
    Image.fromarray(picture(8, 8)).save(file, form)
    data = file.getvalue()
    text = base64.b64encode(data)
    sources = read_media(tensors(image=np.array([data, text, b"data:x;base64," + text, b"https://a/b.png"], object)))
    assert sources == (
        MediaSource("image", data=data, field="image[0]"),
        MediaSource("image", url=f"data:;base64,{text.decode()}", field="image[1]"),
        MediaSource("image", url=f"data:x;base64,{text.decode()}", field="image[2]"),
        MediaSource("image", url="https://a/b.png", field="image[3]"),
    )


@pytest.mark.parametrize(("width", "height"), [(1, 1), (7, 3), (30, 50)])
def test_pixels_are_seen_as_they_are(width: int, height: int) -> None:
    images = np.stack([picture(width, height, seed) for seed in (1, 2)])
    sources = read_media(tensors(image_pixels=images))
    assert [source.field for source in sources] == ["image_pixels[0]", "image_pixels[1]"]
    for source, image in zip(sources, images, strict=True):
        assert np.array_equal(np.asarray(decode_image(source.data, MediaLimits())), image)


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"image": np.array([b"a", b""], object)}, r"image\[1\] is empty"),
        ({"image_pixels": np.zeros((2, 0, 4, 3))}, r"image_pixels has images without pixels: \[2, 0, 4, 3\]"),
        ({"image_pixels": np.zeros((1025, 1, 1, 3))}, "at most 1024 media"),
        ({"image": np.array([b"a"], object), "input_ids": [1]}, r"image\[0\]: media stand in a text_input"),
    ],
)
def test_what_is_no_image_is_named(values: dict[str, Any], complaint: str) -> None:
    inputs = tensors(**values)
    if "input_ids" not in inputs:
        inputs |= tensors(text_input=np.array([b"?"], object))
    with pytest.raises(InvalidArgument, match=complaint):
        parse_infer_request(InferRequest(inputs=inputs), OWN_LAYOUT)


ROWS = np.arange(24, dtype=np.float32).reshape(8, 3)


@pytest.mark.parametrize(
    ("name", "datatype"), [("image_embeds", "FP32"), ("image_embeds_fp16", "FP16"), ("image_embeds_bf16", "BF16")]
)
def test_rows_are_parted_among_images(name: str, datatype: str) -> None:
    rows = ROWS.view(np.uint32) >> 16 if datatype == "BF16" else ROWS
    tensor = Tensor.from_values(name, datatype, rows)
    [alone] = read_media({name: tensor})
    assert (alone.encoded, alone.grid, alone.field) == (True, (0, 0, 0), name)
    grids = Tensor.from_values("image_grid_thw", "INT64", [[1, 4, 6], [1, 2, 4]])
    images = read_media({name: tensor, "image_grid_thw": grids})
    assert [(image.grid, image.field) for image in images] == [
        ((1, 4, 6), f"{name} of image 0"),
        ((1, 2, 4), f"{name} of image 1"),
    ]
    parts = [read_rows(image.data).rows for image in images]
    assert [len(part) for part in parts] == [6, 2]
    assert np.array_equal(np.concatenate(parts), tensor.data)
    assert np.array_equal(read_rows(alone.data).rows, tensor.data)


@pytest.mark.parametrize("grids", [[[1, 4, 6]] * 9, [[1, 4, 6], [1, 0, 4]], [[1, 1, 1], [1, 1, 2]], [[-1, -4, 6]], []])
def test_a_grid_that_parts_no_rows_is_named(grids: list[list[int]]) -> None:
    tensor = Tensor.from_values("image_grid_thw", "INT64", np.array(grids, np.int64).reshape(-1, 3))
    rows = Tensor.from_values("image_embeds", "FP32", ROWS)
    with pytest.raises(InvalidArgument, match="image_grid_thw does not part the 8 rows of image_embeds among"):
        read_media({"image_embeds": rows, "image_grid_thw": tensor})
    halves = Tensor.from_values("image_embeds_fp16", "FP16", ROWS)
    for inputs in ({"image_grid_thw": tensor}, {"image_embeds": rows, "image_embeds_fp16": halves}):
        with pytest.raises(InvalidArgument, match="rows of images come in one of image_embeds, image_embeds_fp16"):
            read_media(inputs)


@pytest.mark.parametrize("layout", [OWN_LAYOUT, VLLM_LAYOUT])
def test_they_belong_to_the_prompt(layout: Any) -> None:
    inputs = tensors(text_input=np.array([b"?"], object), image=np.array([b"\x89"], object))
    [request] = parse_infer_request(InferRequest(inputs=inputs), layout).requests
    assert request.prompt == TextWithMedia("?", (MediaSource("image", data=b"\x89", field="image[0]"),))
    config = ModelConfig("m", "1", "charonia", inputs=layout.inputs)
    names = [spec.name for spec in with_media(config, frozenset({"image"}), False).inputs]
    assert {*names} >= {spec.name for spec in MEDIA_INPUTS["image"]}
    assert len({*names}) == len(names)
    rows = with_media(config, frozenset({"image"}), False, 192).inputs[-4:]
    assert [(spec.name, spec.datatype, spec.dims) for spec in rows] == [
        ("image_embeds", "FP32", (-1, 192)),
        ("image_embeds_fp16", "FP16", (-1, 192)),
        ("image_embeds_bf16", "BF16", (-1, 192)),
        ("image_grid_thw", "INT64", (-1, 3)),
    ]
    hears = with_media(replace(config, inputs=()), frozenset({"audio"}), False)
    assert ([spec.name for spec in hears.inputs], hears.media) == (["audio"], {"audio"})
    assert with_media(config, frozenset({"audio"}), True).inputs == layout.inputs


@pytest.mark.parametrize("kind", ["image", "audio"])
def test_a_medium_that_a_model_has_no_input_for_is_named(kind: Any) -> None:
    """In a body of `generate` it is a parameter; one that asks for nothing may stay."""
    config = ModelConfig("m", "1", "charonia", refused_media={kind: "no tower"})
    with pytest.raises(InvalidArgument, match=rf"^{kind}: model 'm' takes no {kind} \(no tower\)$"):
        refuse_media({kind: "aGk=", "max_tokens": 1}, config)
    with pytest.raises(InvalidArgument, match=rf"^{kind}: model 'm' takes no {kind}$"):
        refuse_media({kind: ["aGk="]}, replace(config, refused_media={}))
    for nothing in (None, "", []):
        refuse_media({kind: nothing}, config)
    refuse_media({kind: "aGk="}, replace(config, media=frozenset({kind})))  # such a parameter is refused as any other


def test_a_text_without_places_has_them_in_front() -> None:
    source = MediaSource("image", url="x")
    media = MediaText({"image": "<i>"}, (("image", "<i><i>"), ("image", "<i>")))
    assert text_with_places(TextWithMedia("?", (source, source)), media) == "<i><i>?"
    assert text_with_places(TextWithMedia("a<i>b", (source, source)), media) == "a<i>b"
