"""A tokenizer for checkpoints with random weights: printable characters, and invented words for all other ids.

Every token is whole characters, so that every token makes a frame.
"""

import string
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

_PRINTABLE = string.digits + string.ascii_letters + string.punctuation + "ĠĊ"
"""The characters that the byte-level pre-tokenizer makes of printable text; space and newline are the last two."""


def build_tokenizer(vocab: int) -> Tokenizer:
    """Single characters to read prompts with, and invented words to fill a vocabulary of `vocab` tokens up."""
    pieces = [*_PRINTABLE, *(f"Ġw{number}" for number in range(vocab - len(_PRINTABLE)))]
    made = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(pieces[:vocab])}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def write_tokenizer(directory: Path, vocab: int) -> None:
    """Write the tokenizer files of a checkpoint."""
    build_tokenizer(vocab).save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
