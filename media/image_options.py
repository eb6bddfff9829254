"""What a request may say to a checkpoint's processor of images, vLLM's `mm_processor_kwargs`: how large images become.

It may ask for less than the model makes of an image without it, never for more: a client would lift the bound on what
an image costs. An operator may, who says the same by a flag.
"""

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from ..core.errors import InvalidArgument

SETTINGS_FIELD = "mm_processor_kwargs"
_FLAG, _COUNT, _LENGTHS = "a boolean", "a positive whole number", "an object of positive whole numbers"
_OPTIONS = {
    "min_pixels": _COUNT,
    "max_pixels": _COUNT,
    "size": _LENGTHS,
    "do_image_splitting": _FLAG,
    "crop_to_patches": _FLAG,
    "min_patches": _COUNT,
    "max_patches": _COUNT,
    "do_pan_and_scan": _FLAG,
    "pan_and_scan_max_num_crops": _COUNT,
    "pan_and_scan_min_crop_size": _COUNT,
    "max_soft_tokens": _COUNT,
    "min_image_tokens": _COUNT,
    "max_image_tokens": _COUNT,
}
"""What is taken of processors that have it, and of which kind it is."""
_SIDES = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
"""Older names of what is within a size."""
_COSTLY_FLAGS = ("do_pan_and_scan",)
"""What makes several images of one, and is off in published checkpoints."""
_OPERATORS_ALONE = ("pan_and_scan_min_crop_size",)
"""What makes more of an image where it is less."""
_BOUNDED_BY = {"shortest_edge": "longest_edge", "min_patches": "max_patches", "min_image_tokens": "max_image_tokens"}
"""The least of something -> the most of it, which bounds both."""
_UNTOLD_MOST = 12
"""The most of what neither a checkpoint nor its processor's class has a setting for."""
_LARGEST = 1 << 40
_SOFT_TOKENS = "_SUPPORTED_SOFT_TOKENS"
"""Where a module of transformers names the numbers of tokens that its family was trained with."""
_OF_VIDEOS = frozenset(
    (
        *("fps", "max_fps", "num_frames", "min_frames", "max_frames", "max_num_frames", "do_sample_frames"),
        *("max_duration", "total_pixels", "cap_pixels_per_frame", "max_video_tokens", "max_video_frame_tokens"),
    )
)
"""What concerns videos alone: clients send it with images, too, where it changes nothing."""


class ImageOptions:
    """The options that one of transformers' processors of images has, and what each may be at most. `defaults`: what
    the whole processor's class says in place of the configuration; `operators`: what an operator does, in place of
    both."""

    def __init__(self, images: Any, defaults: Mapping[str, Any] = {}, operators: Mapping[str, Any] = {}) -> None:
        self._images = images
        self._told = {**defaults, **operators}
        self._operators = operators
        self._size = {side: length for side, length in dict(images.size or {}).items() if length}
        known = images.valid_kwargs.__annotations__
        has_fixed_size = not self._size.keys().isdisjoint(("height", "width"))  # its tower takes no other
        self._names = [name for name in _OPTIONS if name in known and not (has_fixed_size and name == "size")]

    def settings(self, options: Mapping[str, Any], bounded: bool = True) -> dict[str, Any]:
        """Options as the processor takes them. Raises `InvalidArgument` for one that it has not, for a strange value
        and, where they are `bounded`, for more than the model makes without them; the message names it."""
        settings = {name: value for name, value in _plain(options).items() if name not in _OF_VIDEOS}
        for name, value in settings.items():
            if name not in self._names:
                raise _refusal(name, f"is none of this model's: {', '.join(self._names) or 'it has none'}")
            if not _is_of_kind(value, _OPTIONS[name]):
                raise _refusal(name, f"must be {_OPTIONS[name]}, got {msgspec.json.encode(value).decode()}")
            if bounded and (name in _OPERATORS_ALONE or (value is True and self._is_kept_off(name))):
                raise _refusal(name, "is the operator's to set, by --mm-processor-kwargs")
        sides = {side: settings[name] for name, side in _SIDES.items() if name in settings}
        size = settings.get("size", {}) | sides
        if strange := size.keys() - self._size.keys():
            raise _refusal("size", f"has {min(strange)}, and may have {', '.join(self._size)}")
        for name, value in _counts(settings):
            if bounded and value > (most := self._most(name)):
                raise _refusal(name, f"may be at most {most}, as this model is served, got {value}")
        others = {name: value for name, value in settings.items() if name not in _SIDES}
        return others | {"size": self._size | size} if size else others

    def _in_force(self, option: str) -> Any:
        return self._told.get(option, getattr(self._images, option, None))

    def _is_kept_off(self, flag: str) -> bool:
        return (flag in self._operators or flag in _COSTLY_FLAGS) and not self._in_force(flag)

    def _most(self, option: str) -> int:
        """The largest value of a number, or of a side of `size`."""
        supported = getattr(sys.modules[type(self._images).__module__], _SOFT_TOKENS, ())
        if option == "max_soft_tokens" and supported:
            return int(self._operators.get(option) or max(supported))
        name = _SIDES.get(option, option.removeprefix("size."))
        most = _BOUNDED_BY.get(name, name)
        return int(self._size.get(most) or self._size.get(name) or self._in_force(most) or _UNTOLD_MOST)


def _refusal(option: str, problem: str) -> InvalidArgument:
    return InvalidArgument(f"{SETTINGS_FIELD}.{option} {problem}", field=SETTINGS_FIELD)


def _counts(settings: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """The numbers among settings, by name, those within a size, too."""
    for name, value in settings.items():
        if _OPTIONS[name] == _COUNT:
            yield name, value
        elif _OPTIONS[name] == _LENGTHS:
            yield from ((f"{name}.{side}", length) for side, length in value.items())


def _plain(value: Any) -> Any:
    """The value without members that are null, and with whole numbers for floats that are such."""
    if isinstance(value, Mapping):
        return {name: _plain(member) for name, member in value.items() if member is not None}
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < _LARGEST else value


def _is_of_kind(value: Any, kind: str) -> bool:
    if kind == _FLAG:
        return isinstance(value, bool)
    if kind == _LENGTHS:
        return isinstance(value, dict) and bool(value) and all(_is_of_kind(side, _COUNT) for side in value.values())
    return type(value) is int and 0 < value < _LARGEST
