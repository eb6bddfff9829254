"""Absurd checkpoints, with few of what the proof has many of: each is refused by name, or could be served."""

from pathlib import Path
from typing import Any

import pytest

from charonia.core.errors import CharoniaError
from charonia.engine import build
from charonia.tokenization import bounded_encoder, checkpoint_files, tokenizer_json, weight_files

from .hostile_files import CHECKPOINTS, HostileCheckpoint, LoadResult, spoilt

LIMITS: dict[str, Any] = {
    "a long header": (weight_files, "_LARGEST_HEADER", 1 << 10),
    "many shards": (weight_files, "_MOST_SHARDS", 10),
    "many merges": (tokenizer_json, "_MOST_ENTRIES", 100),
    "many added tokens": (tokenizer_json, "_MOST_ADDED", 10),
    "many declared tokens": (checkpoint_files, "_MOST_MEMBERS", 100),
}


@pytest.mark.parametrize("hostile", CHECKPOINTS, ids=lambda hostile: hostile.name)
def test_an_absurd_checkpoint_is_refused_by_name(
    hostile: HostileCheckpoint, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded_encoder, "_SECONDS", 5.0)
    if hostile.name in LIMITS:
        monkeypatch.setattr(*LIMITS[hostile.name])
    directory = spoilt(root / "examples" / "model_repository" / "demo" / "1", tmp_path / "model", hostile, 200)
    status, message = 200, ""
    try:
        build.memory_needed(str(directory), {}, ())
        build.examine(str(directory), {})
    except CharoniaError as error:
        status, message = 400, error.message
    assert LoadResult(hostile, status, message, 0.0).faults == []
