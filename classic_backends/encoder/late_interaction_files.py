"""The description of a late-interaction encoder (ColBERT), read from its published files: a vector for each token.

Three forms, as sentence-transformers' MultiVectorEncoder reads them: its own modules.json, PyLate's (`model_type`
ColBERT), and Stanford's (`HF_ColBERT` with artifact.metadata and `linear.weight` beside the transformer's weights).
"""

import string
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...core.encoder_tensors import DOCUMENT, QUERY
from ...core.errors import InvalidArgument, Unsupported
from ...core.regular_files import refuse_special_files
from ...tokenization.checkpoint_files import read_json
from ...tokenization.weight_files import check_weight_files
from .encoder_files import (
    DenseFiles,
    TokenizationRules,
    read_dense,
    read_steps,
    read_tokenization,
    read_transformer_settings,
)

PROJECTION = "linear.weight"
"""The name of Stanford's projection among the transformer's weights."""

_QUERY_LENGTH = 32
"""Tokens of a query if its files do not say."""

_SIZE = 128
"""The size of Stanford's vectors if their files do not say."""


@dataclass(frozen=True, slots=True)
class QueryExpansion:
    """Queries are filled up to `length` tokens by mask tokens, or `token`, whose vectors count too. Other tokens see
    them if they are `attended`; longer queries are cut if `cuts`."""

    length: int
    attended: bool
    token: str | None = None
    cuts: bool = True


@dataclass(frozen=True, slots=True)
class LateInteractionFiles:
    """An encoder of texts into vectors of `size` for each token, of length 1."""

    directory: Path
    tokenization: TokenizationRules
    """Its `prompts` are put before queries and documents."""
    size: int
    dense: tuple[DenseFiles, ...]
    """The projections; without any, it is `linear.weight` among the transformer's weights."""
    marks: bool
    """The prompts begin with tokens of the vocabulary, which the tokenizer need not know as special ones."""
    expansion: QueryExpansion | None
    query_length: int
    """The most tokens of a query that is not filled up, and of a document; 0: as many as the model takes."""
    document_length: int
    skipped_words: tuple[str, ...]
    """Tokens whose vectors do not count in documents."""
    skips_in_queries: bool


def read_late_interaction(directory: Path) -> LateInteractionFiles | None:
    """The late-interaction encoder in a directory, or None for anything else. Raises `InvalidArgument` if a file
    can't be read, and `Unsupported` if it has an unknown step."""
    refuse_special_files(directory)
    check_weight_files(directory)
    config = read_json(directory / "config.json")
    own = read_json(directory / "config_sentence_transformers.json")
    if "HF_ColBERT" in (config.get("architectures") or ()):
        return _read_stanford(directory)
    if own.get("model_type") not in ("ColBERT", "MultiVectorEncoder"):
        return None
    if str(own.get("similarity_fn_name") or "maxsim").lower() != "maxsim":
        file = directory / "config_sentence_transformers.json"
        raise Unsupported(f"{file}: similarity_fn_name must be MaxSim, got {own['similarity_fn_name']!r}")
    return _read_modules(directory, own)


def _read_modules(directory: Path, own: Mapping[str, Any]) -> LateInteractionFiles:
    steps = read_steps(directory)
    kinds = [kind for kind, _ in steps]
    dense = tuple(read_dense(path) for kind, path in steps if kind == "Dense")
    front = ["Transformer", *["Dense"] * len(dense)]
    pylate = own["model_type"] == "ColBERT"
    if kinds not in (front, [*front, "Normalize"], [*front, "MultiVectorMask", "Normalize"]) or not dense:
        message = "it must be Transformer, Dense, and maybe MultiVectorMask and Normalize"
        raise Unsupported(f"{directory / 'modules.json'} has the modules {', '.join(kinds)}; {message}")
    transformer = steps[0][1]
    rules = {**read_transformer_settings(transformer), **own}
    mask = next((read_json(path / "config.json") for kind, path in steps if kind == "MultiVectorMask"), {})
    words = own.get("skiplist_words") if pylate else mask.get("skiplist_words") or ()
    prompts = {str(role): str(text) for role, text in (own.get("prompts") or {}).items()}
    for role in (QUERY, DOCUMENT):
        prefix = str(own.get(f"{role}_prefix") or "")
        prompts[role] = prefix + prompts.get(role, "").removeprefix(prefix)
    return LateInteractionFiles(
        transformer,
        _with_prompts(read_tokenization(directory, transformer), prompts),
        dense[-1].outputs,
        dense,
        marks=pylate,
        expansion=_read_expansion(rules, directory, pylate),
        query_length=_read_length(rules, "query_length", directory),
        document_length=_read_length(rules, "document_length", directory),
        skipped_words=tuple(string.punctuation if words is None else map(str, words)),
        skips_in_queries="query" in (mask.get("skiplist_tasks") or ()),
    )


def _read_stanford(directory: Path) -> LateInteractionFiles:
    own = read_json(directory / "artifact.metadata")
    names = {QUERY: own.get("query_token_id") or "[unused0]", DOCUMENT: own.get("doc_token_id") or "[unused1]"}
    length = _read_length(own, "query_maxlen", directory) or _QUERY_LENGTH
    return LateInteractionFiles(
        directory,
        _with_prompts(read_tokenization(directory, directory), {role: f"{name} " for role, name in names.items()}),
        _read_length(own, "dim", directory) or _SIZE,
        (),
        marks=True,
        expansion=QueryExpansion(length, bool(own.get("attend_to_mask_tokens"))),
        query_length=0,
        document_length=_read_length(own, "doc_maxlen", directory),
        skipped_words=tuple(string.punctuation) if own.get("mask_punctuation", True) else (),
        skips_in_queries=False,
    )


def _with_prompts(tokenization: TokenizationRules, prompts: Mapping[str, str]) -> TokenizationRules:
    """A text that is not said to be a query is a document."""
    return replace(tokenization, prompt=prompts[DOCUMENT], prompts=prompts)


def _read_length(rules: Mapping[str, Any], name: str, directory: Path) -> int:
    """0 if absent."""
    length = rules.get(name) or 0
    if not isinstance(length, int) or length < 0:
        raise InvalidArgument(f"{directory}: {name} must be a number of at least 1, got {length!r}")
    return length


def _read_expansion(rules: Mapping[str, Any], directory: Path, pylate: bool) -> QueryExpansion | None:
    """sentence-transformers' `query_expansion`, or PyLate's flags: on, unless they say otherwise."""
    if "query_expansion" in rules or not pylate:
        own = rules.get("query_expansion")
        if not own:
            return None
        try:
            cuts = {"fixed": True, "min": False}[own["strategy"]]
            return QueryExpansion(int(own["length"]), bool(own.get("attend")), own.get("token"), cuts)
        except (KeyError, TypeError, ValueError) as error:
            raise Unsupported(f"{directory}: query_expansion is not known: {own!r}") from error
    if rules.get("do_query_expansion") is False:
        return None
    length = _read_length(rules, "query_length", directory) or _QUERY_LENGTH
    return QueryExpansion(length, bool(rules.get("attend_to_expansion_tokens")))
