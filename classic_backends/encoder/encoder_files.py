"""The description of an encoder, read from the files of a published sentence-transformers or cross-encoder directory.

Reads small JSON files, loads no weights, imports no torch. An unknown step is an error that names it: an embedding made
without one of its steps looks like any other. Source:
https://sbert.net/docs/sentence_transformer/usage/custom_models.html.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import orjson

from ...core.errors import InvalidArgument, NotFound, Unsupported
from ...core.regular_files import MAX_TEXT_BYTES, file_within, read_regular, refuse_special_files
from ...tokenization.chat_template import DEFAULT, find_templates
from ...tokenization.checkpoint_files import read_json
from ...tokenization.tokenizer_json import read_special_tokens
from ...tokenization.weight_files import check_weight_files
from .pair_template import QWEN3_RERANKER, PairTemplate

_POOLING_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}

_TRANSFORMER_KINDS = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
"""Names of kinds in the file that a sentence-transformers release writes beside a transformer; any has any name."""

_ANSWERS = "classifier_from_token"
_REGRESSION, _MULTI_LABEL = "regression", "multi_label_classification"
"""Values of `problem_type` in config.json whose scores are not those of classes that exclude each other."""


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
class TokenHeadFiles:
    """The linear layers behind each token of bge-m3: a weight as a word, and a vector of `size`. Tokens that begin and
    end a text have no weight, and the first no vector. Source: https://arxiv.org/abs/2402.03216."""

    sparse: Path
    colbert: Path
    size: int
    first_token: int
    last_token: int


@dataclass(frozen=True, slots=True)
class EmbedderFiles:
    """An encoder of texts into vectors of `size`. `directory`: of the transformer."""

    directory: Path
    tokenization: TokenizationRules
    pooling: Pooling
    dense: tuple[DenseFiles, ...]
    normalize: bool
    size: int
    token_heads: TokenHeadFiles | None = None


@dataclass(frozen=True, slots=True)
class AnswerTokens:
    """The tokens whose logits behind a prompt are a causal model's score, by id or by text: that of `relevant`, less
    that of `irrelevant` if there is one. Source: sentence-transformers' LogitScore, vLLM's `classifier_from_token`."""

    relevant: int | str
    irrelevant: int | str | None


@dataclass(frozen=True, slots=True)
class CrossEncoderFiles:
    """An encoder of pairs of texts into `labels` scores; a causal model with `answer` tokens, else a classifier. Pairs
    without a `template` are tokenized as such."""

    directory: Path
    tokenization: TokenizationRules
    labels: int
    activation: Activation
    answer: AnswerTokens | None = None
    template: PairTemplate | None = None
    final: bool = False
    """Whether each of several scores means something by itself."""


def read_encoder(directory: Path) -> EmbedderFiles | CrossEncoderFiles:
    """The encoder in a directory. Raises `NotFound` if there is none, `InvalidArgument` if a file cannot be read, and
    `Unsupported` if it has an unknown step."""
    refuse_special_files(directory)
    check_weight_files(directory)
    if (directory / "modules.json").is_file():
        return _read_modules(directory)
    config = read_json(directory / "config.json")
    if not config:
        raise NotFound(f"{directory} has neither modules.json nor config.json: no encoder")
    if _ANSWERS in config or _names_class(config, "ForSequenceClassification"):
        return _read_cross_encoder(directory, directory, None)
    # sentence-transformers gives a bare transformer mean pooling.
    tokenization = read_tokenization(directory, directory)
    return EmbedderFiles(directory, tokenization, Pooling.MEAN, (), False, _read_hidden_size(config, directory))


def _names_class(config: Mapping[str, Any], ending: str) -> bool:
    return any(name.endswith(ending) for name in config.get("architectures") or ())


def read_steps(directory: Path) -> list[tuple[str, Path]]:
    """The classes of the modules in modules.json, and their directories, in order. Raises `InvalidArgument`."""
    try:
        modules = sorted(
            orjson.loads(read_regular(directory / "modules.json", MAX_TEXT_BYTES)),
            key=lambda module: int(module["idx"]),
        )
        return [(str(module["type"]).rpartition(".")[2], file_within(directory, module["path"])) for module in modules]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise InvalidArgument(f"{directory / 'modules.json'} is no list of modules: {error}") from error


def _read_modules(directory: Path) -> EmbedderFiles | CrossEncoderFiles:
    steps = read_steps(directory)
    kinds = [kind for kind, _ in steps]
    if kinds in (["Transformer"], ["Transformer", "LogitScore"]):
        return _read_cross_encoder(directory, steps[0][1], steps[1][1] if steps[1:] else None)
    if read_json(directory / "config_sentence_transformers.json").get("model_type") == "CrossEncoder":
        message = "those of a cross-encoder must be Transformer, maybe LogitScore"
        raise Unsupported(f"{directory / 'modules.json'} has the modules {', '.join(kinds)}; {message}")
    return _read_embedder(directory, steps)


def _read_cross_encoder(directory: Path, transformer: Path, score: Path | None) -> CrossEncoderFiles:
    """The cross-encoder of a `transformer`, with the directory of a LogitScore if it has one."""
    config = read_json(transformer / "config.json")
    answer = _read_answer(config, transformer) if score is None else _read_logit_score(score, config.get("vocab_size"))
    if answer is None and not _names_class(config, "ForSequenceClassification"):
        raise Unsupported(f"{directory / 'modules.json'}: a Transformer alone must be one ForSequenceClassification")
    # transformers leaves its default of two labels out of config.json.
    labels = 1 if answer else len(config.get("id2label") or {}) or int(config.get("num_labels") or 2)
    own: Mapping[str, Any] = config.get("sentence_transformers") or {}
    named = read_json(directory / "config_sentence_transformers.json").get("activation_fn")
    named = named or own.get("activation_fn") or config.get("sbert_ce_default_activation_function")
    problem = config.get("problem_type")
    activates = problem == _MULTI_LABEL or (labels == 1 and problem != _REGRESSION)
    default = Activation.SIGMOID if activates else Activation.IDENTITY
    activation = default if named is None else _activation(str(named), directory)
    final = problem in (_REGRESSION, _MULTI_LABEL)
    template = _read_pair_template(config, transformer)
    if answer and not template:
        message = "its chat template must write messages of the roles query and document (chat_template.jinja)"
        raise Unsupported(f"{transformer}: {message}")
    return CrossEncoderFiles(
        transformer, read_tokenization(directory, transformer), labels, activation, answer, template, final
    )


def _read_answer(config: Mapping[str, Any], transformer: Path) -> AnswerTokens | None:
    """The tokens that config.json names as vLLM's overrides do: that of irrelevant pairs, then of relevant ones; or the
    latter alone."""
    tokens = config.get(_ANSWERS)
    if tokens is None:
        return None
    if not isinstance(tokens, list) or len(tokens) not in (1, 2) or not all(isinstance(token, str) for token in tokens):
        raise InvalidArgument(f"{transformer / 'config.json'}: {_ANSWERS} must be one or two tokens, got {tokens!r}")
    return AnswerTokens(tokens[-1], tokens[0] if tokens[1:] else None)


def _read_logit_score(directory: Path, vocabulary: object) -> AnswerTokens:
    config = read_json(directory / "config.json")
    relevant, irrelevant = config.get("true_token_id"), config.get("false_token_id")
    if not isinstance(relevant, int) or not isinstance(irrelevant, int | None):
        raise InvalidArgument(f"{directory / 'config.json'} is no LogitScore: it must have true_token_id, an integer")
    for name, token in (("true_token_id", relevant), ("false_token_id", irrelevant)):
        if token is not None and not (token >= 0 and (not isinstance(vocabulary, int) or token < vocabulary)):
            message = f"{name} {token} is outside the vocabulary of {vocabulary} tokens"
            raise InvalidArgument(f"{directory / 'config.json'}: {message}")
    return AnswerTokens(relevant, irrelevant)


def _read_pair_template(config: Mapping[str, Any], transformer: Path) -> PairTemplate | None:
    """The template, if it carries pairs and sentence_bert_config.json does not leave messages out; with the variables
    that this has for it."""
    own = read_transformer_settings(transformer)
    modalities = own.get("modality_config")
    options = (own.get("processing_kwargs") or {}).get("chat_template") or {}
    variables = {name: value for name, value in options.items() if name != "restore_suffix"}
    sources = find_templates(transformer) if modalities is None or "message" in modalities else {}
    tokens = read_special_tokens(transformer)
    if DEFAULT in sources and (template := PairTemplate(sources[DEFAULT], tokens, variables)).carries_pairs:
        return template
    return PairTemplate(QWEN3_RERANKER, tokens) if config.get("is_original_qwen3_reranker") else None


def _read_embedder(directory: Path, steps: Sequence[tuple[str, Path]]) -> EmbedderFiles:
    kinds = [kind for kind, _ in steps]
    dense = tuple(read_dense(path) for kind, path in steps if kind == "Dense")
    if kinds not in (["Transformer", "Pooling", *["Dense"] * len(dense), *tail] for tail in ([], ["Normalize"])):
        message = "it must be Transformer, Pooling, maybe Dense, maybe Normalize"
        raise Unsupported(f"{directory / 'modules.json'} has the modules {', '.join(kinds)}; {message}")
    transformer = steps[0][1]
    pooling = read_json(steps[1][1] / "config.json")
    hidden = _read_hidden_size(read_json(transformer / "config.json"), transformer)
    tokenization = read_tokenization(directory, transformer)
    if not pooling.get("include_prompt", True):
        if tokenization.prompt:
            raise Unsupported(f"{steps[1][1] / 'config.json'}: include_prompt false, with a default prompt")
        tokenization = replace(tokenization, prompts={})
    size = dense[-1].outputs if dense else hidden
    mode = _read_pooling(pooling, steps[1][1])
    heads = _read_token_heads(directory, transformer, hidden)
    return EmbedderFiles(transformer, tokenization, mode, dense, "Normalize" in kinds, size, heads)


def _read_token_heads(directory: Path, transformer: Path, hidden: int) -> TokenHeadFiles | None:
    sparse, colbert = directory / "sparse_linear.pt", directory / "colbert_linear.pt"
    if not sparse.is_file() or not colbert.is_file():
        return None
    config = read_json(transformer / "config.json")
    first, last = config.get("bos_token_id"), config.get("eos_token_id")
    if not isinstance(first, int) or not isinstance(last, int):
        raise InvalidArgument(f"{transformer / 'config.json'} does not tell bos_token_id and eos_token_id")
    return TokenHeadFiles(sparse, colbert, hidden, first, last)


def _read_pooling(config: Mapping[str, Any], directory: Path) -> Pooling:
    modes = [name for key, name in _POOLING_MODES.items() if config.get(key)]
    named = config.get("pooling_mode")
    modes = modes or ([named] if isinstance(named, str) else list(named or ()))
    if len(modes) != 1 or modes[0] not in set(Pooling):
        known = ", ".join(Pooling)
        names = ", ".join(map(str, modes)) or "none"
        raise Unsupported(f"{directory / 'config.json'}: pooling must be one of {known}, got {names}")
    return Pooling(modes[0])


def read_dense(directory: Path) -> DenseFiles:
    config = read_json(directory / "config.json")
    if config.get("use_residual"):
        raise Unsupported(f"{directory / 'config.json'}: use_residual is not supported")
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


def read_transformer_settings(transformer: Path) -> dict[str, Any]:
    """The settings of sentence-transformers beside a transformer: sentence_bert_config.json, or the first that there is
    by the name of another kind."""
    paths = (transformer / f"sentence_{kind}_config.json" for kind in _TRANSFORMER_KINDS)
    return read_json(next(filter(Path.is_file, paths), transformer / "sentence_bert_config.json"))


def read_tokenization(directory: Path, transformer: Path) -> TokenizationRules:
    own = read_transformer_settings(transformer)
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
