"""The contracts of what stands between the media of a request and a language model: one prepares, one encodes."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from .media import Encodable, MediaKind, MediaSource, PreparedMedium
from .metrics import Reading
from .model import MemoryNeed, ReservedMemory
from .request_context import RequestContext

PLACED_FAMILIES = frozenset(
    {
        "glm46v",
        "glm4v",
        "glm4v_moe",
        "glm_ocr",
        "qwen2_5_vl",
        "qwen2_vl",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_vl",
        "qwen3_vl_moe",
    }
)
"""The `model_type` of checkpoints that see, of those whose images' places have positions in three dimensions."""

SEEING_FAMILIES = (
    frozenset(
        {
            "gemma3",
            "gemma4",
            "idefics3",
            "internvl",
            "lfm2_vl",
            "llava",
            "llava_next",
            "mistral3",
            "smolvlm",
        }
    )
    | PLACED_FAMILIES
)
"""The `model_type` of checkpoints whose images are served: towers and language parts read it."""

PLAIN_LANGUAGE_PARTS = frozenset(
    {"exaone4", "exaone4_5_text", "lfm2", "lfm2_moe", "llama", "ministral3", "mistral", "qwen2", "qwen3", "smollm3"}
)
"""The `model_type` of language parts that may have rows of images at their tokens' places and be told nothing else,
whatever family they are a part of."""

_FLAT_FAMILIES = frozenset({"dots3_note"})
"""The `model_type` of checkpoints that are published with the language part's fields among the others."""

HEARING_FAMILIES = frozenset({"gemma3n", "gemma4", "qwen3_asr", "voxtral"})
"""In the same way, of those whose sounds are."""

WRITING_FAMILIES = frozenset({"whisper"})
"""In the same way, of those that write down a sound that no prompt has: their decoder attends to it."""


class MediaConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What an operator says of the media of one model's requests."""

    per_prompt: Mapping[MediaKind, int] = msgspec.field(default_factory=lambda: {"image": 16, "audio": 16})
    """How many of a kind a prompt may have; a kind that is not named may not come at all."""
    path: str = ""
    """The directory below which `file:` URLs may lead; "": none may."""
    domains: tuple[str, ...] = ()
    """Hosts that files are fetched from, and all below them; `*` is any."""
    max_bytes: int = 25 << 20
    """Bytes of a file."""
    max_pixels: int = 32 << 20
    """Pixels of an image."""
    max_seconds: float = 3600.0
    """Seconds of a sound."""
    processes: int = 2
    """Media that are prepared at a time."""
    cache_bytes: int = 256 << 20
    """Bytes of media that are kept as they were prepared, and again of what an encoder made of them."""
    share_cache: bool = False
    """Whether a tenant finds what was made for another."""
    processor_settings: str = ""
    """A JSON object of settings that the checkpoint's processor of images has in place of its own; "" for none."""


class TowerSpec(NamedTuple):
    """What the tower of a language model is built from."""

    checkpoint: str
    """The directory that both are read from."""
    dtype: str = "auto"
    """torch's name of what it computes in; "auto" is the checkpoint's."""
    gpu: int | None = None
    """The GPU that computes; None is the host."""
    cache_bytes: int = 0
    """Bytes of what it has made that are kept."""
    share_cache: bool = False
    """Whether a tenant finds what was made for another."""
    own_encoder: str = ""
    """The function that loads an encoder of sounds or texts, as `package.module:name`. Called with the checkpoint's
    directory, torch's dtype and device, and `quantization`, it gives what makes of features [windows, bins, frames], or
    of tokens [texts, length], rows [windows or texts, length, hidden]. Empty where transformers loads the tower."""
    quantization: str = "none"
    """The precision of such an encoder, as the engine names it."""
    own_aligner: str = ""
    """The function that loads what aligns tokens of transcripts with an encoder's rows, named in the same way. Called
    with the checkpoint's directory, the dtype of rows and torch's device, it takes the inputs that `core.media` names
    for it, and gives for each window the rows at which its tokens begin. Empty where nothing does."""
    kinds: tuple[MediaKind, ...] = ("image",)
    """What it is asked for, none for an encoder of texts; the weights of other parts are not read."""


class MediaPart(NamedTuple):
    """The part of a language model for media."""

    config: MediaConfig
    tower: TowerSpec


class EncodedMedium(NamedTuple):
    """What an encoder makes of a medium: the inputs of a language model at the places that stand for it."""

    length: int
    """How many places there are."""
    rows: bytes
    """[length, hidden] in `dtype`, one row after the other."""
    dtype: str
    """torch's name of it."""
    deepstack: bytes = b""
    """[layers, length, hidden] in `dtype`: what is added to the states after each of the first layers."""


class AlignedWindow(NamedTuple):
    """A window of a sound, and what a decoder heard in it."""

    encoded: EncodedMedium
    tokens: tuple[int, ...]
    """The prompt, and the tokens that the decoder made of it."""
    prompt: int
    """How many of them are the prompt."""
    sounding: int
    """How many of the rows are sound, and no padding."""


class MediaFacts(msgspec.Struct, array_like=True, frozen=True):
    """What is known of the processor of a checkpoint before a medium comes."""

    token: str
    """The text that the chat template has for a medium, in whose place the placeholder goes."""
    token_ids: tuple[int, ...]
    """The tokens of a placeholder that belong to the medium; the first one stands where its embeddings go."""
    settings: bytes
    """SHA-256 of what decides, beside a medium's file, on the result."""
    row_text: tuple[str, str, str] | None = None
    """What a placeholder of any number of rows is made of: a beginning, a text for each row, and an end; None: there
    are other texts between."""
    gridded: bool = False
    """Whether its places have positions in three dimensions."""
    patch: int = 0
    """Pixels along a side of what a grid counts; 0 where no grid tells what is between the rows of a placeholder."""


class MediaPreparer(Protocol):
    """Decodes, scales and cuts media as the processor of one checkpoint does it."""

    async def load(self) -> None:
        """Return when it can prepare. Raises as `core.model.Model.load`, for a checkpoint without a processor, too."""

    async def unload(self) -> None:
        """Free everything. May be called again."""

    @property
    def facts(self) -> Mapping[MediaKind, MediaFacts]:
        """By the kinds that it prepares; known once it is loaded."""

    def check(self, media: Sequence[MediaSource]) -> None:
        """Raises for the media of a prompt together: `InvalidArgument` if there are more than it may have, `QueueFull`
        if too many wait already."""

    async def prepare(self, medium: MediaSource, context: RequestContext) -> PreparedMedium:
        """Raises a `CharoniaError` with the medium's `field`. Cancelling it leaves nothing running."""

    def readings(self) -> Iterator[Reading]:
        """Its series, for a scrape."""


class MediaEncoder(Protocol):
    """The tower of one language model, which loads, serves and unloads with it."""

    @property
    def needs(self) -> Sequence[MemoryNeed]:
        """The memory of its weights, its libraries, and what it keeps."""

    def reserved_memory(self) -> ReservedMemory:
        """Its part of the host's memory."""

    async def load(self) -> None:
        """Return when it can encode. Raises as `core.model.Model.load`."""

    async def unload(self) -> None:
        """Free everything. May be called again."""

    async def encode(self, medium: Encodable, context: RequestContext, salt: str = "") -> EncodedMedium:
        """What is made of a medium is kept, for the same tenant and `salt`. Cancelling ends the computation unless
        another request waits for it, too. Raises a `CharoniaError`."""

    async def align(self, window: AlignedWindow, context: RequestContext) -> Sequence[int]:
        """For each token behind the prompt, the first of the rows that a decoder attends to with that token as its
        input; they never decrease. Windows that wait go together. Cancelling ends the computation unless another window
        is a part of it. Raises a `CharoniaError`."""

    def readings(self) -> Iterator[Reading]:
        """Its series, for a scrape."""


class MediaServices(NamedTuple):
    """What a language model that sees, or hears, has beside its engine."""

    preparer: MediaPreparer | None
    """None where an encoder reads texts alone."""
    encoder: MediaEncoder
    kinds: tuple[MediaKind, ...] = ("image",)
    attended: bool = False
    """Whether its decoder attends to what is encoded, which no prompt has."""


class MediaRefusal(NamedTuple):
    """Why a language model's media are not served, though its files have something for them."""

    reason: str


def has_wrapper(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is of a family that is not described here, and may be a language part with images at places
    of its prompts: the engine tries transformers' class of it."""
    names = config.get("architectures")
    outer = isinstance(names, list) and len(names) == 1 and str(names[0]).endswith("ForConditionalGeneration")
    family = config.get("model_type", "")
    if not (outer and isinstance(family, str) and isinstance(config.get("vision_config"), dict)):
        return False
    if not isinstance(config.get("text_config"), dict) and family not in _FLAT_FAMILIES:
        return False
    return family not in SEEING_FAMILIES | HEARING_FAMILIES | WRITING_FAMILIES


def has_plain_wrapper(config: Mapping[str, Any]) -> bool:
    """Whether it is one whose language part is described here."""
    text = config.get("text_config")
    return has_wrapper(config) and isinstance(text, dict) and str(text.get("model_type")) in PLAIN_LANGUAGE_PARTS
