"""The description of an encoder, read from the files of a published sentence-transformers or cross-encoder directory.

Reads small JSON files, loads no weights, imports no torch. An unknown step is an error that names it: an embedding made
without one of its steps looks like any other. Source:
https://sbert.net/docs/sentence_transformer/usage/custom_models.html.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import orjson

from ...core.errors import InvalidArgument, NotFound, Unsupported
from ...core.regular_files import MAX_TEXT_BYTES, file_within, read_regular, refuse_special_files
from ...tokenization.checkpoint_files import read_json
from ...tokenization.weight_files import check_weight_files

_POOLING_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


class Pooling(StrEnum):
    """How the vectors of a text's tokens become one, by sentence-transformers' names."""

    MEAN = "mean"
    CLS = "cls"
    MAX = "max"
    LAST = "lasttoken"


class Activation(StrEnum):
    """The activation after a linear layer, by the name of its class in torch."""

    IDENTITY = "Identity"
    SIGMOID = "Sigmoid"
    TANH = "Tanh"


@dataclass(frozen=True, slots=True)
class DenseFiles:
    """A linear layer behind the pooling, in a directory of its own."""

    directory: Path
    inputs: int
    outputs: int
    bias: bool
    activation: Activation


@dataclass(frozen=True, slots=True)
class TokenizationRules:
    """`prompt` is put before each text whose request names none of the `prompts`."""

    max_tokens: int
    lowercase: bool = False
    prompt: str = ""
    prompts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EmbedderFiles:
    """An encoder of texts into vectors of `size`. `directory`: of the transformer."""

    directory: Path
    tokenization: TokenizationRules
    pooling: Pooling
    dense: tuple[DenseFiles, ...]
    normalize: bool
    size: int


@dataclass(frozen=True, slots=True)
class CrossEncoderFiles:
    """An encoder of pairs of texts into `labels` scores."""

    directory: Path
    tokenization: TokenizationRules
    labels: int
    activation: Activation


def read_encoder(directory: Path) -> EmbedderFiles | CrossEncoderFiles:
    """The encoder in a directory. Raises `NotFound` if there is none, `InvalidArgument` if a file cannot be read, and
    `Unsupported` if it has an unknown step."""
    refuse_special_files(directory)
    check_weight_files(directory)
    if (directory / "modules.json").is_file():
        return _read_embedder(directory)
    config = read_json(directory / "config.json")
    if not config:
        raise NotFound(f"{directory} has neither modules.json nor config.json: no encoder")
    tokenization = _read_tokenization(directory, directory)
    if not any(name.endswith("ForSequenceClassification") for name in config.get("architectures") or ()):
        # sentence-transformers gives a bare transformer mean pooling.
        return EmbedderFiles(directory, tokenization, Pooling.MEAN, (), False, _read_hidden_size(config, directory))
    labels = len(config.get("id2label") or {}) or int(config.get("num_labels", 1))
    own: Mapping[str, Any] = config.get("sentence_transformers") or {}
    named = own.get("activation_fn") or config.get("sbert_ce_default_activation_function")
    default = Activation.SIGMOID if labels == 1 else Activation.IDENTITY
    activation = default if named is None else _activation(str(named), directory)
    return CrossEncoderFiles(directory, tokenization, labels, activation)


def _read_embedder(directory: Path) -> EmbedderFiles:
    try:
        modules = sorted(
            orjson.loads(read_regular(directory / "modules.json", MAX_TEXT_BYTES)),
            key=lambda module: int(module["idx"]),
        )
    except (ValueError, LookupError, TypeError) as error:
        raise InvalidArgument(f"{directory / 'modules.json'} is no list of modules: {error}") from error
    steps = [(str(module["type"]).rpartition(".")[2], file_within(directory, module["path"])) for module in modules]
    kinds = [kind for kind, _ in steps]
    dense = tuple(_read_dense(path) for kind, path in steps if kind == "Dense")
    if kinds not in (["Transformer", "Pooling", *["Dense"] * len(dense), *tail] for tail in ([], ["Normalize"])):
        message = "it must be Transformer, Pooling, maybe Dense, maybe Normalize"
        raise Unsupported(f"{directory / 'modules.json'} has the modules {', '.join(kinds)}; {message}")
    transformer = steps[0][1]
    pooling = read_json(steps[1][1] / "config.json")
    hidden = _read_hidden_size(read_json(transformer / "config.json"), transformer)
    tokenization = _read_tokenization(directory, transformer)
    if not pooling.get("include_prompt", True):
        if tokenization.prompt:
            raise Unsupported(f"{steps[1][1] / 'config.json'}: include_prompt false, with a default prompt")
        tokenization = replace(tokenization, prompts={})
    size = dense[-1].outputs if dense else hidden
    return EmbedderFiles(
        transformer, tokenization, _read_pooling(pooling, steps[1][1]), dense, "Normalize" in kinds, size
    )


def _read_pooling(config: Mapping[str, Any], directory: Path) -> Pooling:
    modes = [name for key, name in _POOLING_MODES.items() if config.get(key)]
    named = config.get("pooling_mode")
    modes = modes or ([named] if isinstance(named, str) else list(named or ()))
    if len(modes) != 1 or modes[0] not in set(Pooling):
        known = ", ".join(Pooling)
        names = ", ".join(map(str, modes)) or "none"
        raise Unsupported(f"{directory / 'config.json'}: pooling must be one of {known}, got {names}")
    return Pooling(modes[0])


def _read_dense(directory: Path) -> DenseFiles:
    config = read_json(directory / "config.json")
    try:
        sizes = int(config["in_features"]), int(config["out_features"])
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidArgument(f"{directory / 'config.json'} is no Dense module: {error}") from error
    activation = _activation(config.get("activation_function", "torch.nn.modules.activation.Tanh"), directory)
    return DenseFiles(directory, *sizes, bool(config.get("bias", True)), activation)


def _activation(name: str, directory: Path) -> Activation:
    last = name.rpartition(".")[2]
    if last not in set(Activation):
        raise Unsupported(
            f"{directory / 'config.json'}: unknown activation '{name}'; known are {', '.join(Activation)}"
        )
    return Activation(last)


def _read_tokenization(directory: Path, transformer: Path) -> TokenizationRules:
    own = read_json(transformer / "sentence_bert_config.json")
    own_prompts = read_json(directory / "config_sentence_transformers.json")
    prompts = {str(name): str(text) for name, text in (own_prompts.get("prompts") or {}).items()}
    default = own_prompts.get("default_prompt_name")
    prompt = prompts.get(default, "") if default else ""
    max_tokens = own.get("max_seq_length")
    if not max_tokens:
        # As sentence-transformers: the lesser of the model's length and its tokenizer's.
        config, tokenizer = (read_json(transformer / name) for name in ("config.json", "tokenizer_config.json"))
        lengths = (config.get("max_position_embeddings"), tokenizer.get("model_max_length"))
        max_tokens = min((int(length) for length in lengths if length), default=512)
    return TokenizationRules(int(max_tokens), bool(own.get("do_lower_case", False)), prompt, prompts)


def _read_hidden_size(config: Mapping[str, Any], directory: Path) -> int:
    size = config.get("hidden_size") or config.get("dim")
    if not isinstance(size, int):
        raise InvalidArgument(f"{directory / 'config.json'} does not tell hidden_size")
    return size
