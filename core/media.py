"""What a prompt has besides text: images and sounds, as a client sends them and as an encoder takes them."""

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

MediaKind: TypeAlias = Literal["image", "audio"]

KIND_NOUNS: Mapping[MediaKind, str] = {"image": "image", "audio": "sound"}
"""What messages call one of a kind."""

FEATURES, FEATURE_MASK, WINDOW_BOUNDS = "input_features", "input_features_mask", "window_bounds"
"""Inputs of a prepared sound: the features of its windows [windows, bins, frames], which frames are sound and no
padding, and the seconds where each window begins and ends [windows, 2]."""


ALIGNED_TOKENS, ALIGNED_SPANS, ALIGNED_ROWS = "aligned_tokens", "aligned_spans", "aligned_rows"
"""Inputs of windows whose tokens are aligned with their sound: tokens [windows, longest], padded with zeros; of each
window how many tokens are its prompt, how many it has, and how many rows are sound [windows, 3]; and the encoder's rows
as bytes [windows, bytes]."""

EMBEDS = "image_embeds"
"""The one input of an image that was encoded elsewhere: its rows [rows, width]; of bfloat16 the bits, as uint16."""


def plural_nouns(kinds: Iterable[MediaKind]) -> str:
    """What messages call several of these kinds."""
    return " and ".join(f"{KIND_NOUNS[kind]}s" for kind in kinds)


SOURCE = "source_tokens"
"""The one input of a text: its tokens [1, length]."""


class SourceText(NamedTuple):
    """A text that an encoder reads, whatever becomes of it."""

    digest: bytes
    """SHA-256 of its tokens."""
    inputs: Mapping[str, NDArray[np.generic]]
    """SOURCE alone."""


class MediaSource(msgspec.Struct, frozen=True):
    """A medium within a message, as its request names it: the bytes of its file, or where that is to be had."""

    kind: MediaKind
    data: bytes = b""
    """The file, if the request has it."""
    url: str = ""
    """Where the file is fetched otherwise."""
    uuid: str = ""
    """The client's own name for the content, which it need not send again."""
    field: str = ""
    """Its place in the request, for errors, such as `messages[0].content[1].image_url`."""
    offset: int = 0
    """Characters of the message's text that come before it."""
    encoded: bool = False
    """Whether the file has the rows that an encoder elsewhere made of it, and not the medium."""
    grid: tuple[int, int, int] = (0, 0, 0)
    """The patches of such rows by time, height and width, if the request says so; zeros otherwise."""
    width: int = 0
    """The numbers that each of them must have; 0: any."""
    options: str = ""
    """What the request says of the processor of an image, as a JSON object; empty: nothing."""


class PreparedMedium(msgspec.Struct, frozen=True, array_like=True):
    """A medium after its file was decoded, scaled and cut as the checkpoint's processor does it."""

    kind: MediaKind
    digest: bytes
    """SHA-256 of all that the encoder's output depends on: the file's content and the processor's settings."""
    placeholder: str
    """The text that stands for it in the prompt, in place of the template's one token."""
    inputs: Mapping[str, NDArray[np.generic]]
    """The encoder's inputs by the names that the checkpoint's processor gives them."""
    grid: tuple[int, int, int] = (0, 0, 0)
    """Its places in the prompt by time, height and width, where positions have three dimensions; zeros otherwise."""
    seconds: float = 0.0
    """How long it takes, if it is a sound."""


Encodable: TypeAlias = PreparedMedium | SourceText
"""What an encoder takes: the digest of it, and its inputs."""
