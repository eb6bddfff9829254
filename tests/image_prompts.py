"""Prompts with images for the tiny models of `checkpoints.PARTS`: what transformers' whole models are called with, and
the same as spans, whose rows are those of their towers."""

from collections.abc import Sequence
from hashlib import sha256
from typing import Any, NamedTuple

import torch
from torch import Tensor

from charonia.scheduler.encoders.encoder_rows import EmbeddedSpan

PLACEHOLDER = 380
"""The token at an image's places."""

QWENS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5")
PLACED = (*QWENS, "glm4v", "glm4v_moe", "glm46v", "glm_ocr")
"""Families whose positions of images have three dimensions."""


class Images(NamedTuple):
    """Images as a model's processor would have them: what the tower is called with, and the places of each."""

    inputs: dict[str, Any]
    lengths: list[int]
    grids: list[tuple[int, int, int]]


class ImagePrompt(NamedTuple):
    """A prompt with images between parts of its text."""

    tokens: list[int]
    spans: tuple[EmbeddedSpan, ...]
    images: Images


def draw_images(config: Any, sizes: Sequence[tuple[int, int]], seed: int) -> Images:
    """Images of random pixels, of (height, width) in units of a place each; where a tower takes one size alone, of that
    one."""
    torch.manual_seed(seed)
    eye = config.vision_config
    kind = config.model_type
    if kind in PLACED:
        merge = eye.spatial_merge_size
        grids = [(1, height, width) for height, width in sizes]
        pixels = 3 * eye.temporal_patch_size * eye.patch_size**2
        values = torch.randn(sum(height * width for height, width in sizes) * merge**2, pixels)
        patches = torch.tensor([(1, height * merge, width * merge) for height, width in sizes])
        return Images({"pixel_values": values, "image_grid_thw": patches}, [h * w for h, w in sizes], grids)
    flat = [(0, 0, 0)] * len(sizes)
    if kind == "gemma4":
        side = eye.pooling_kernel_size
        most = max(height * width for height, width in sizes) * side**2
        positions = torch.full((len(sizes), most, 2), -1)
        for own, (height, width) in zip(positions, sizes, strict=True):
            rows, columns = torch.meshgrid(torch.arange(height * side), torch.arange(width * side), indexing="ij")
            own[: rows.numel()] = torch.stack((columns.flatten(), rows.flatten()), -1)
        values = torch.rand(len(sizes), most, 3 * eye.patch_size**2)
        return Images({"pixel_values": values, "image_position_ids": positions}, [h * w for h, w in sizes], flat)
    if kind == "mistral3":
        unit = eye.patch_size * config.spatial_merge_size
        most_high, most_wide = (unit * max(size[axis] for size in sizes) for axis in (0, 1))
        values = torch.randn(len(sizes), 3, most_high, most_wide)
        pixels = [(unit * height, unit * width) for height, width in sizes]
        return Images({"pixel_values": values, "image_sizes": torch.tensor(pixels)}, [h * w for h, w in sizes], flat)
    if kind == "lfm2_vl":
        shapes = torch.tensor(sizes) * config.downsample_factor
        patches = shapes.prod(1)
        mask = (torch.arange(int(patches.max())) < patches[:, None]).int()
        values = torch.rand(*mask.shape, 3 * eye.patch_size**2) * mask[..., None]
        inputs = {"pixel_values": values, "spatial_shapes": shapes, "pixel_attention_mask": mask}
        return Images(inputs, [h * w for h, w in sizes], flat)
    length = config.mm_tokens_per_image if kind == "gemma3" else (eye.image_size // eye.patch_size) ** 2
    values = torch.randn(len(sizes), 3, eye.image_size, eye.image_size)
    return Images({"pixel_values": values}, [length] * len(sizes), flat)


@torch.inference_mode()
def image_prompt(model: Any, texts: Sequence[list[int]], sizes: Sequence[tuple[int, int]], seed: int) -> ImagePrompt:
    """Images of these sizes, each behind one of `texts`, of which there is one more."""
    images = draw_images(model.config, sizes, seed)
    features = model.get_image_features(**images.inputs, return_dict=True)
    deepstack = getattr(features, "deepstack_features", None) or []
    tokens = list(texts[0])
    spans = []
    for number, (length, grid) in enumerate(zip(images.lengths, images.grids, strict=True)):
        rows = features.pooler_output[number].reshape(-1, model.config.text_config.hidden_size)
        assert len(rows) == length
        stacked = [layer[number] for layer in deepstack]
        span = EmbeddedSpan(
            start=len(tokens),
            length=length,
            digest=sha256(as_bytes(rows) + repr(grid).encode()).digest(),
            rows=as_bytes(rows),
            dtype="float32",
            grid=grid,
            bidirectional=sees_both_ways(model.config),
            deepstack=as_bytes(torch.stack(stacked)) if stacked else b"",
        )
        spans.append(span)
        tokens += [PLACEHOLDER] * length + texts[number + 1]
    return ImagePrompt(tokens, tuple(spans), images)


def sees_both_ways(config: Any) -> bool:
    """Whether places of an image see one another."""
    text = config.text_config
    return config.model_type == "gemma3" or getattr(text, "use_bidirectional_attention", None) == "vision"


@torch.inference_mode()
def whole_logits(model: Any, prompt: ImagePrompt, following: Sequence[int] = ()) -> Tensor:
    """Transformers' logits [places, vocabulary] of the prompt and tokens after it, from pixels."""
    ids = torch.tensor([[*prompt.tokens, *following]])
    kinds = {"gemma3": "token_type_ids"}.get(model.config.model_type, "mm_token_type_ids")
    types = {kinds: (ids == PLACEHOLDER).int()} if model.config.model_type in (*PLACED, "gemma3", "gemma4") else {}
    logits: Tensor = model(input_ids=ids, **prompt.images.inputs, **types, use_cache=False).logits[0]
    return logits


def as_bytes(rows: Tensor) -> bytes:
    return rows.contiguous().numpy().tobytes()
