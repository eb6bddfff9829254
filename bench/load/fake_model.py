"""A model repository whose one model counts: a vocabulary of plain text, a fake executor, no weights."""

import json
from collections.abc import Mapping
from pathlib import Path

from ..checkpoint import write_tokenizer

NAME = "fake"
VOCAB = 1024
BLOCK = 16
"""Tokens of a block of its cache."""

_TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


def stream_parameters(streams: int, step_ms: float, longest: int) -> dict[str, object]:
    """Those of a model that decodes so many streams of up to `longest` tokens at a time, a step in `step_ms`."""
    return {
        "max_num_seqs": streams,
        "max_num_batched_tokens": 4 * streams,
        "max_queued_requests": 2 * streams,
        "fake_step_seconds": step_ms / 1e3,
        "fake_max_model_len": longest,
        # Room for all: preemption is no business of the frontend's.
        "kv_cache_blocks": streams * (longest // BLOCK + 1),
    }


def write_repository(directory: Path, parameters: Mapping[str, object]) -> Path:
    """Make `directory` a repository with the model `fake`; `parameters` join those that make it fake."""
    checkpoint = directory / NAME / "1"
    write_words(checkpoint)
    write_config(directory / NAME, {"executor": "fake", "fake_vocab_size": VOCAB, **parameters})
    return directory


def write_words(checkpoint: Path) -> None:
    """Write the tokenizer and chat template of a checkpoint, whose config.json says nothing."""
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / "config.json").write_text("{}")
    write_tokenizer(checkpoint, VOCAB)
    (checkpoint / "chat_template.jinja").write_text(_TEMPLATE)


def write_config(model: Path, parameters: Mapping[str, object]) -> None:
    """The config.pbtxt of the model in this directory."""
    lines = [f'name: "{model.name}"', 'backend: "charonia"']
    for key, value in parameters.items():
        lines.append(f"parameters {{ key: {json.dumps(key)} value {{ string_value: {json.dumps(str(value))} }} }}")
    (model / "config.pbtxt").write_text("\n".join(lines))
