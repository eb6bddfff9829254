"""What the server's process reads of a checkpoint: tokenizer, chat templates, generation defaults."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ...core.errors import InvalidArgument, NotFound
from ...core.regular_files import MAX_TEXT_BYTES, read_regular
from ...tokenization.checkpoint_files import checkpoint_fingerprint, locate_checkpoint
from ...tokenization.generation_defaults import GenerationDefaults, read_generation_defaults
from ...tokenization.tokenizer import AsyncTokenizer, Tokenizer


@dataclass(frozen=True, slots=True)
class TokenizerBundle:
    """Everything that the server's process reads of a checkpoint."""

    tokenizer: Tokenizer
    defaults: GenerationDefaults
    async_tokenizer: AsyncTokenizer
    """The tokenizer for texts that may take long."""
    fingerprint: str = ""
    """A digest of the checkpoint's files."""
    checkpoint: str = ""
    """The directory that they were found in."""
    tokenizer_of: str = ""
    """The tokenizer's directory; empty if it is the checkpoint's own."""

    @classmethod
    def load(cls, model: str, chat_template: str = "", tokenizer_of: str = "") -> "TokenizerBundle":
        """Read a checkpoint directory or hub id. `chat_template`, and the tokenizer of another directory or hub id,
        replace its own. Raises as `Tokenizer.load` does."""
        directory = locate_checkpoint(model)
        try:
            tokenizer_of = str(locate_checkpoint(tokenizer_of)) if tokenizer_of else ""
        except NotFound as error:
            raise NotFound(f"tokenizer: {error.message}", field="tokenizer") from None
        tokenizer = Tokenizer.load(Path(tokenizer_of) if tokenizer_of else directory, chat_template)
        defaults = read_generation_defaults(directory, tokenizer)
        fingerprint = checkpoint_fingerprint(directory)
        return cls(tokenizer, defaults, AsyncTokenizer(tokenizer), fingerprint, str(directory), tokenizer_of)

    def tokenizer_info(self) -> dict[str, Any]:
        """The tokenizer_config.json, read anew; a file of another kind, GGUF, has none."""
        known = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": self.tokenizer.own_template or None}
        try:
            data = read_regular(Path(self.tokenizer_of or self.checkpoint) / "tokenizer_config.json", MAX_TEXT_BYTES)
            config = msgspec.json.decode(data, type=dict[str, Any])
        except (OSError, msgspec.DecodeError, InvalidArgument):
            return known
        return known | {name: value for name, value in config.items() if value is not None}
