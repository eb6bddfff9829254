"""The checkpoint's own processor of images: transformers', by the checkpoint's configuration, over pillow and numpy.

Runs in a process that may be killed.
"""

import importlib.util
import sys
from collections.abc import Mapping
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..core.errors import InvalidArgument
from ..core.media_models import PLACED_FAMILIES
from ..core.regular_files import read_regular
from .image_options import SETTINGS_FIELD, ImageOptions

_MAX_CONFIG_BYTES = 8 << 20
_GRIDS = "image_grid_thw"
_PATCH = 14
"""Pixels along a side of a patch where the processor does not say: it scales all sizes of a ratio to one."""
_SAMPLE_SIDES = (64, 1024)
"""Pixels of images that no processor makes one row of places of: a small one, and one that some cut in tiles."""
_TEXT_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
"""What a processor makes of the text beside an image."""
_NAMING_FILES = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")
"""Files that may name the class of the processor, the first one first."""

OWN_PROCESSORS = {
    "Cohere2VisionProcessor": "cohere2_images:Cohere2VisionImageProcessorPil",
    "Lfm2VlProcessor": "lfm2_images:Lfm2VlImageProcessorPil",
}
"""The class of a processor whose images transformers prepares by torchvision alone -> ours for pillow."""


class ProcessedMedium(NamedTuple):
    """What a processor makes of one medium, whatever others a prompt has."""

    inputs: Mapping[str, NDArray[np.generic]]
    """By the encoder's names for them, with a first dimension for one image, its patches or a sound's windows."""
    placeholder: str = ""
    """The text that stands for it in the prompt, if it stands there."""
    grid: tuple[int, int, int] = (0, 0, 0)
    """Its places by time, height and width; zeros where positions have one dimension."""
    seconds: float = 0.0
    """Seconds of a sound."""


class MediumProcessor(Protocol):
    """What makes an encoder's inputs of the media of a kind, as a checkpoint says."""

    token: str
    """The text that the chat template has for a medium; empty where none stands in a prompt."""
    token_ids: tuple[int, ...]
    """The tokens of a placeholder that belong to the medium; the first one stands where its rows go."""
    settings: bytes
    """SHA-256 of what decides, beside the medium, on the result."""

    def process(self, medium: Any) -> ProcessedMedium:
        """The result for a medium that was decoded. Raises `InvalidArgument` for one that the processor refuses."""


class ImageProcessor:
    """A loaded processor, with an operator's `settings` in place of the checkpoint's. Raises `InvalidArgument` for a
    checkpoint that has none, or whose family is not known, and for settings that it lacks, by their field."""

    def __init__(self, checkpoint: Path, settings: Mapping[str, Any] = {}) -> None:
        try:
            self._processor = processor = _load(checkpoint)
        except (ImportError, OSError, ValueError, TypeError, LookupError, AttributeError) as error:
            raise InvalidArgument(f"{checkpoint}: its processor of images cannot be loaded: {error}") from error
        name = type(processor).__mro__[1].__name__
        token = getattr(processor, "image_token", None)
        if not isinstance(token, str) or not hasattr(processor, "image_token_ids"):
            raise InvalidArgument(f"{checkpoint}: its processor, {name}, has no token for an image")
        # Qianfan-OCR's template has another text than its rows.
        self.token = str(getattr(processor, "image_placeholder_token", None) or token)
        known = tuple(number for number in processor.image_token_ids if number is not None)
        self.token_ids = known or (_token_id(processor.tokenizer, token),)
        self._row = str(processor.tokenizer.convert_ids_to_tokens(self.token_ids[0]))
        self.gridded = str(read_json(checkpoint / "config.json").get("model_type")) in PLACED_FAMILIES
        self._merge = int(getattr(processor.image_processor, "merge_size", 1) or 1)
        self._operators_settings: Mapping[str, Any] = {}
        """Said with each image, too: some classes have defaults there that come before the configuration."""
        if settings:
            self._apply(settings)
        images = processor.image_processor
        decisive = f"{name} {images.to_json_string()} {self.token} {self.token_ids}"
        told = msgspec.json.encode(self._operators_settings, order="sorted") if settings else b""
        self.settings = sha256(decisive.encode() + told).digest()
        patch = getattr(images, "encoder_patch_size", None) or getattr(images, "patch_size", None)
        self.patch = int(patch if isinstance(patch, int) else (patch or {}).get("height", _PATCH))
        """Pixels along a side of a patch."""

    def _apply(self, settings: Mapping[str, Any]) -> None:
        """Put an operator's settings in place of the checkpoint's. Raises `InvalidArgument` by their field if it is
        they that do not work."""
        self._process_samples()
        images = self._processor.image_processor
        self._operators_settings = ImageOptions(images).settings(settings, bounded=False)
        try:
            self._processor.image_processor = type(images).from_dict(images.to_dict() | self._operators_settings)
            self._process_samples()
        except (InvalidArgument, ValueError, TypeError) as error:
            message = error.message if isinstance(error, InvalidArgument) else str(error)
            raise InvalidArgument(f"{SETTINGS_FIELD}: {message}", field=SETTINGS_FIELD) from error

    def _process_samples(self) -> None:
        from PIL import Image

        small, large = _SAMPLE_SIDES
        for size in ((small, small), (large, large), (large, large // 4)):
            self.process(Image.new("RGB", size))

    def row_text(self) -> tuple[str, str, str] | None:
        """As of `MediaFacts`, by the placeholders of images that are made for it."""
        from PIL import Image

        row = self._row
        begin = end = ""
        for side in _SAMPLE_SIDES:
            text = self.process(Image.new("RGB", (side, side))).placeholder
            rows = row * text.count(row)
            begin, between, end = text.partition(rows) if rows else (text, "", "")
            if not between:
                return None
        return begin, row, end

    @cached_property
    def options(self) -> ImageOptions:
        """What requests may say of their images' sizes."""
        processor = self._processor
        defaults = getattr(type(processor), "images_kwargs", {})
        return ImageOptions(processor.image_processor, defaults, self._operators_settings)

    def process(self, image: Any, settings: Mapping[str, Any] = {}) -> ProcessedMedium:
        """The result for an image of pillow's, in RGB, as the model is served but for `settings`, which are those
        of `options`. Raises `InvalidArgument` for one that the processor refuses."""
        try:
            features = self._processor(
                images=[image],
                text=[self.token],
                return_tensors="np",
                padding=False,
                return_text_replacement_offsets=True,
                images_kwargs={**self._operators_settings, **settings},
            )
            if (replacements := features.pop("text_replacement_offsets", None)) is None:
                name = type(self._processor).__mro__[1].__name__
                raise InvalidArgument(f"{name} does not tell which text stands for an image")
            [[replacement]] = replacements
        except MemoryError:
            raise
        except (ValueError, TypeError, ArithmeticError, LookupError) as error:
            raise InvalidArgument(f"the model's processor refuses the image: {error}") from error
        placeholder = str(replacement["replacement"])
        if self._row not in placeholder:
            size = " x ".join(map(str, image.size))
            raise InvalidArgument(f"the image is too small: {size} pixels have no place in a prompt of this model")
        inputs = {name: np.asarray(value) for name, value in features.items() if name not in _TEXT_INPUTS}
        time, height, width = _grid(inputs) if self.gridded else (0, 0, 0)
        return ProcessedMedium(inputs, placeholder, (time, height // self._merge, width // self._merge))


def _token_id(tokenizer: Any, token: str) -> int:
    """The id of a token that its processor knows by its text alone, as Janus'. Raises `InvalidArgument` if the
    vocabulary lacks it."""
    number = tokenizer.get_vocab().get(token)
    if number is None:
        raise InvalidArgument(f"the vocabulary has no {token}, which stands for parts of an image")
    return int(number)


def _grid(inputs: Mapping[str, NDArray[Any]]) -> tuple[int, int, int]:
    if _GRIDS not in inputs:
        return (0, 0, 0)
    time, height, width = inputs[_GRIDS][0].tolist()
    return (time, height, width)


def _load(checkpoint: Path) -> Any:
    known = _processor_class(checkpoint)
    from transformers import AutoImageProcessor, AutoTokenizer

    class WithoutVideo(known):  # type: ignore[misc, valid-type]
        """The processor without the parts for videos and sounds, whose libraries need not be there."""

        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return type(argument)

    image_processors: Any = AutoImageProcessor  # its methods have no types
    options: dict[str, Any] = {"backend": "pil"}
    if (own := OWN_PROCESSORS.get(known.__name__)) is not None:
        image_processors, options = resolve_name(f"{__package__}.{own}"), {}
    parts = {
        "image_processor": image_processors.from_pretrained(checkpoint, local_files_only=True, **options),
        "tokenizer": AutoTokenizer.from_pretrained(checkpoint, local_files_only=True),
    }
    settings, others = known.get_processor_dict(checkpoint, local_files_only=True)
    return WithoutVideo.from_args_and_dict([parts.get(name) for name in known.get_attributes()], settings, **others)


def _processor_class(checkpoint: Path) -> Any:
    if not any((checkpoint / file).is_file() for file in _NAMING_FILES[:2]):
        raise InvalidArgument(f"{checkpoint} has no processor of images: no {' or '.join(_NAMING_FILES[:2])}")
    from transformers.models.auto.configuration_auto import model_type_to_module_name
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES  # type: ignore[attr-defined]

    family = str(read_json(checkpoint / "config.json").get("model_type", ""))
    named = (str(read_json(checkpoint / file).get("processor_class") or "") for file in _NAMING_FILES)
    name = next(filter(None, named), "") or PROCESSOR_MAPPING_NAMES.get(family)
    if not name:
        raise InvalidArgument(f"{checkpoint}: the family {family or 'of the model'} has no processor of images")
    families = [family, *(other for other, known in PROCESSOR_MAPPING_NAMES.items() if known == name)]
    for module in dict.fromkeys(model_type_to_module_name(family) for family in families):
        package = f"transformers.models.{module}"
        if importlib.util.find_spec(package) is None:
            continue
        _prefer_pillow(package, module)
        try:
            return getattr(importlib.import_module(f"{package}.processing_{module}"), name)
        except (ImportError, AttributeError):
            continue
    raise InvalidArgument(f"{checkpoint}: transformers has no {name}, which is to prepare its images")


def _prefer_pillow(package: str, module: str) -> None:
    """Let a processor that names its family's functions for torchvision have those for pillow, which are the same."""
    name = f"{package}.image_processing_{module}"
    pillow = f"{package}.image_processing_pil_{module}"
    if name not in sys.modules and importlib.util.find_spec(pillow) is not None:
        sys.modules[name] = importlib.import_module(pillow)


def read_json(path: Path) -> dict[str, Any]:
    """An object in a small file of a checkpoint; empty if there is none."""
    try:
        return msgspec.json.decode(read_regular(path, _MAX_CONFIG_BYTES), type=dict[str, Any])
    except (OSError, msgspec.DecodeError):
        return {}
