"""Tiny checkpoints on disk, made once per run, and what transformers generates with them."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers


@pytest.fixture(scope="session")
def checkpoint(making: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A directory with the named configuration of tests/checkpoints.py, changed by keywords."""
    made: dict[str, Path] = {}

    def make(name: str = "llama", **changes: Any) -> Path:
        key = f"{name}-{sorted(changes.items())}"
        if key not in made:
            made[key] = making.write_checkpoint(tmp_path_factory.mktemp(name), making.CONFIGS[name] | changes)
        return made[key]

    return make


@pytest.fixture(scope="session")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint without weights, whose token 7 is the word w7; 90 ends a text."""
    directory = tmp_path_factory.mktemp("words")
    tokenizer = Tokenizer(models.WordLevel({f"w{token}": token for token in range(100)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"eos_token_id": 90, "vocab_size": 100, "max_position_embeddings": 64}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "chat_template.jinja").write_text("{{ messages[-1].content }} w0")
    return directory
