"""Names of GGUF files: a model is one file, or shards called NAME-00001-of-00003.gguf."""

import re
from pathlib import Path

GGUF_SUFFIX = ".gguf"

_SHARD = re.compile(rf"(.*)-(\d{{5}})-of-(\d{{5}}){re.escape(GGUF_SUFFIX)}")


def gguf_model_name(path: Path) -> str:
    part = _SHARD.fullmatch(path.name)
    return path.stem if part is None else part[1]


def shard_paths(path: Path) -> tuple[Path, ...]:
    """The paths of all files of the model that `path` belongs to."""
    if (part := _SHARD.fullmatch(path.name)) is None or not 1 <= int(part[2]) <= int(part[3]):
        return (path,)
    return tuple(path.with_name(f"{part[1]}-{number:05}-of-{part[3]}.gguf") for number in range(1, int(part[3]) + 1))
