"""The numbers of a model that are needed before TensorRT-LLM loads it: of a Hugging Face checkpoint or a prebuilt
engine.

Reads config.json alone.
"""

from pathlib import Path
from typing import Any, NamedTuple

from ...core.errors import InvalidArgument
from ...tokenization.checkpoint_files import locate_checkpoint, read_json


class TrtllmModelInfo(NamedTuple):
    """`path`: a directory, or the hub id that its weights are to be fetched from. `max_model_len`: the longest sequence
    it is made for. `max_num_seqs`: sequences that a prebuilt engine has room for; None where that is free to choose."""

    path: str
    vocab_size: int
    max_model_len: int
    engine: bool = False
    max_num_seqs: int | None = None


def read_model_info(model: str, max_model_len: int | None) -> TrtllmModelInfo:
    """Read a directory or a hub id; `max_model_len` replaces the model's own.

    Raises:
        InvalidArgument: config.json lacks a number, or less fits an engine than is asked for; `field` names it.
        NotFound: there is no such model.
    """
    if "@" in model and not Path(model).expanduser().is_dir():
        message = (
            f"TensorRT-LLM fetches no revision of a model: fetch {model} first (hf download) and name its directory"
        )
        raise InvalidArgument(message, field="model")
    directory = locate_checkpoint(model)
    config = read_json(directory / "config.json")
    if "pretrained_config" in config and "build_config" in config:
        return _engine(directory, config, max_model_len)
    text = config.get("text_config", config)  # of models that see, too
    vocab_size = _number(text, "vocab_size", directory)
    length = max_model_len or _number(text, "max_position_embeddings", directory)
    # Of a hub id, only the small files are here.
    path = str(directory) if Path(model).expanduser().is_dir() else model
    return TrtllmModelInfo(path, vocab_size, length)


def _engine(directory: Path, config: dict[str, Any], asked: int | None) -> TrtllmModelInfo:
    built = config["build_config"]
    longest = _number(built, "max_seq_len", directory)
    if asked is not None and asked > longest:
        message = f"max_model_len {asked} is more than the engine was built for: {longest}"
        raise InvalidArgument(message, field="max_model_len")
    vocab_size = _number(config["pretrained_config"], "vocab_size", directory)
    most = _number(built, "max_batch_size", directory)
    return TrtllmModelInfo(str(directory), vocab_size, asked or longest, engine=True, max_num_seqs=most)


def _number(config: Any, name: str, directory: Path) -> int:
    value = config.get(name) if isinstance(config, dict) else None
    if not isinstance(value, int) or value < 1:
        hint = "; set max_model_len" if name == "max_position_embeddings" else ""
        raise InvalidArgument(f"{directory}/config.json has no {name}{hint}", field="model")
    return value
