"""A server with a language model that computes: random weights, so small that most of the work is the server's.

An identity model is beside it.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from charonia.bench.checkpoint import write_random
from charonia.bench.load.fake_model import VOCAB, write_config, write_words
from charonia.bench.server_process import ServerAddress, own_server

NAME = "tiny"
ECHO = "echo"
LENGTH = 256
"""Tokens a sequence may have."""

_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 64,
    "vocab_size": VOCAB,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
    "dtype": "float32",
}
_IDENTITY = f"""
name: "{ECHO}"
backend: "identity"
max_batch_size: 8
dynamic_batching {{ max_queue_delay_microseconds: 500 }}
input {{ name: "IN" data_type: TYPE_FP32 dims: [ 16 ] }}
output {{ name: "OUT" data_type: TYPE_FP32 dims: [ 16 ] }}
"""
_ENGINE = {"threads": 1, "kv_cache_bytes": 16 << 20}


def write_llm(directory: Path, parameters: Mapping[str, object]) -> None:
    """Write the language model into the repository `directory`."""
    checkpoint = directory / NAME / "1"
    write_words(checkpoint)
    write_random(checkpoint, _LLAMA)
    write_config(directory / NAME, parameters)


def write_repository(directory: Path, parameters: Mapping[str, object]) -> Path:
    """Make `directory` a repository with the models `tiny` and `echo`."""
    write_llm(directory, parameters)
    (directory / ECHO / "1").mkdir(parents=True)
    (directory / ECHO / "config.pbtxt").write_text(_IDENTITY)
    return directory


@contextmanager
def tiny_server(*flags: str) -> Iterator[ServerAddress]:
    """A server over it, gone in the end."""
    with TemporaryDirectory(prefix="charonia-proof-") as directory:
        repository = write_repository(Path(directory) / "models", _ENGINE)
        with own_server("--model-repository", str(repository), *flags) as place:
            yield place
