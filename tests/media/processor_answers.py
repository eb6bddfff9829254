"""What runs in a process without torch: a family's processor as the server has it beside transformers' own."""

import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from charonia.processes.limited_process import Answer

from ..image_processors import write_processor
from .pictures import picture

SIZES = ((90, 50), (33, 120), (28, 28))
WHOLE = {"gemma3", "llava", "llava-next", "idefics3"}
"""Families whose whole processor transformers loads without torchvision; of the others it is the images' part."""


class ComparedImage(msgspec.Struct):
    """One image of a family; `differing` names the encoder's inputs that are not transformers', bit for bit."""

    differing: list[str]
    placeholder: str
    tokens: list[int]
    """The placeholder's, as the whole processor has them; empty without one."""
    own_tokens: list[int]
    grid: tuple[int, int, int]
    token: str
    settings: bytes


def compare_processors() -> Answer:
    sys.modules["torch"] = None  # type: ignore[assignment]
    return lambda family: msgspec.msgpack.encode(_compare(family.decode()))


def _compare(family: str) -> list[ComparedImage]:
    from transformers import AutoImageProcessor, AutoProcessor, AutoTokenizer

    from charonia.media.processor import ImageProcessor

    with tempfile.TemporaryDirectory() as directory:
        checkpoint = write_processor(Path(directory), family)
        ours = ImageProcessor(checkpoint)
        tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        whole: Any = AutoProcessor.from_pretrained(checkpoint) if family in WHOLE else None
        images = AutoImageProcessor.from_pretrained(checkpoint, backend="pil")
    options = {"patch_size": 28} if family == "pixtral" else {}
    compared = []
    for size in SIZES:
        image = picture(*size)
        result, tokens = ours.process(image), list[int]()
        if whole is not None:
            wanted = whole(images=[image], text=[ours.token], return_tensors="np")
            tokens = wanted["input_ids"][0].tolist()
        else:
            wanted = images([image], return_tensors="np", **options)
        differing = [
            name
            for name, array in result.inputs.items()
            if array.dtype != wanted[name].dtype or not np.array_equal(array, wanted[name])
        ]
        own = tokenizer(result.placeholder)["input_ids"]
        compared.append(
            ComparedImage(differing, result.placeholder, tokens, own, result.grid, ours.token, ours.settings)
        )
    return compared
