"""A model repository whose one model counts: a vocabulary of plain text, a fake executor, no weights.

Every token is whole characters, so that every token makes a frame.
"""

import json
import string
from collections.abc import Mapping
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

NAME = "fake"
VOCAB = 1024
_PRINTABLE = string.digits + string.ascii_letters + string.punctuation + "ĠĊ"
"""What the byte-level pre-tokenizer makes of printable text; space and newline are the last two."""

_TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


def write_repository(directory: Path, parameters: Mapping[str, object]) -> Path:
    """Make `directory` a repository with the model `fake`; `parameters` join those that make it fake."""
    checkpoint = directory / NAME / "1"
    checkpoint.mkdir(parents=True)
    _tokenizer().save(str(checkpoint / "tokenizer.json"))
    (checkpoint / "tokenizer_config.json").write_text("{}")
    (checkpoint / "config.json").write_text("{}")
    (checkpoint / "chat_template.jinja").write_text(_TEMPLATE)
    (directory / NAME / "config.pbtxt").write_text(_config(parameters))
    return directory


def _config(parameters: Mapping[str, object]) -> str:
    lines = [f'name: "{NAME}"', 'backend: "charonia"']
    for key, value in {"executor": "fake", "fake_vocab_size": VOCAB, **parameters}.items():
        lines.append(f"parameters {{ key: {json.dumps(key)} value {{ string_value: {json.dumps(str(value))} }} }}")
    return "\n".join(lines)


def _tokenizer() -> Tokenizer:
    """Single characters to read prompts with, and invented words to fill the vocabulary up."""
    pieces = [*_PRINTABLE, *(f"Ġw{number}" for number in range(VOCAB - len(_PRINTABLE)))]
    tokenizer = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
