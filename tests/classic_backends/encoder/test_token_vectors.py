"""Encoders with a vector for each token, ColBERT's and bge-m3's, beside transformers, text by text."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize
from transformers import PreTrainedTokenizerFast

from charonia.classic_backends.encoder import encoder_backend
from charonia.classic_backends.encoder.encoder_backend import ENCODER
from charonia.core.errors import InvalidArgument, Unsupported
from charonia.core.model import ModelConfig
from charonia.core.runtime import InstancePlacement, Runtime

Describe = Callable[[Mapping[str, Any]], ModelConfig]

TEXTS = ["the ferry , a boat .", "charon waits for two coins by night and day , and a boat", "fast"]
PUNCTUATION = {",", "."}


@pytest.fixture(scope="session")
def making_encoders(sibling: Callable[[str], ModuleType]) -> ModuleType:
    return sibling("encoder_models.py")


def load(directory: Path, described: Describe) -> Runtime:
    config = described(ENCODER.complete(directory, {"name": "encoder"}, {}))
    return ENCODER.load(directory, config, InstancePlacement(), {})


def column(texts: list[str]) -> Any:
    return np.array([[text.encode()] for text in texts], object)


def embed(runtime: Runtime, texts: list[str], role: str | None) -> list[Any]:
    """The vectors of each text's tokens; those behind them are zeros."""
    inputs = {"text_input": column(texts)}
    if role is not None:
        inputs["prompt_name"] = column([role] * len(texts))
    (arrays,) = runtime.execute(inputs, ["token_embedding", "num_token_embeddings"])
    counts = arrays["num_token_embeddings"][:, 0]
    assert all(not row[count:].any() for row, count in zip(arrays["token_embedding"], counts, strict=True))
    return [row[:count] for row, count in zip(arrays["token_embedding"], counts, strict=True)]


def expected(written: Any, words: list[str], attended: int, skipped: set[str], directory: Path) -> Any:
    """The vectors of a text's tokens, of which all see the first `attended`; not those of the `skipped`."""
    module, weight = written
    ids = PreTrainedTokenizerFast.from_pretrained(directory).convert_tokens_to_ids(words)
    mask = (torch.arange(len(ids)) < attended).long()[None]
    with torch.inference_mode():
        states = module(input_ids=torch.tensor([ids]), attention_mask=mask).last_hidden_state[0]
        vectors = normalize(states @ weight.T, dim=-1)
    return vectors[[index for index, word in enumerate(words) if word not in skipped]].numpy()


@pytest.mark.parametrize(
    ("form", "own", "query_mark", "document_mark", "cut", "filled", "attended", "skipped"),
    [
        ("stanford", {}, ["[unused0]"], ["[unused1]"], 12, 12, False, PUNCTUATION),
        (
            "stanford",
            {"attend_to_mask_tokens": True, "mask_punctuation": False},
            ["[unused0]"],
            ["[unused1]"],
            12,
            12,
            True,
            set(),
        ),
        ("pylate", {"do_query_expansion": False}, ["[unused0]"], ["[unused1]"], 12, 0, False, PUNCTUATION),
        ("pylate", {"skiplist_words": ["."]}, ["[unused0]"], ["[unused1]"], 12, 12, False, {"."}),
        ("multi_vector", {}, ["where", "is"], [], 64, 0, False, {","}),
        (
            "multi_vector",
            {"query_expansion": {"strategy": "min", "length": 10}},
            ["where", "is"],
            [],
            64,
            10,
            False,
            {","},
        ),
    ],
)
def test_vectors_are_those_of_each_text_alone(
    version: Path,
    making_encoders: ModuleType,
    described: Describe,
    form: str,
    own: dict[str, Any],
    query_mark: list[str],
    document_mark: list[str],
    cut: int,
    filled: int,
    attended: bool,
    skipped: set[str],
) -> None:
    written = making_encoders.write_late_interaction(version, form, **own)
    runtime = load(version, described)
    for text, query, document in zip(TEXTS, embed(runtime, TEXTS, "query"), embed(runtime, TEXTS, None), strict=True):
        words = [*["[CLS]", *document_mark, *text.split()][:13], "[SEP]"]
        np.testing.assert_allclose(document, expected(written, words, 14, skipped, version), atol=2e-6)
        words = [*["[CLS]", *query_mark, *text.split()][: cut - 1], "[SEP]"]
        masks = max(filled - len(words), 0)
        seen = len(words) + masks * attended
        full = words + ["[MASK]"] * masks
        np.testing.assert_allclose(query, expected(written, full, seen, set(), version), atol=2e-6)


def test_late_interaction_that_is_not_known_is_refused(
    version: Path, making_encoders: ModuleType, described: Describe
) -> None:
    making_encoders.write_late_interaction(version, "pylate")
    with pytest.raises(InvalidArgument, match="must be one of query, document for this model, got 'passage'"):
        embed(load(version, described), TEXTS, "passage")
    for own, message in (
        ({"similarity_fn_name": "meanmaxsim"}, "must be MaxSim, got 'meanmaxsim'"),
        ({"query_expansion": {"strategy": "all"}}, "query_expansion is not known"),
        ({"document_length": "long"}, "document_length must be a number of at least 1, got 'long'"),
    ):
        making_encoders.write_late_interaction(version, "pylate", **own)
        with pytest.raises((Unsupported, InvalidArgument), match=message):
            ENCODER.complete(version, {"name": "encoder"}, {})
    making_encoders.write_late_interaction(version, "stanford", dim=9)
    with pytest.raises(InvalidArgument, match=r"linear\.weight is \[8, 32\], and artifact\.metadata tells a dim of 9"):
        load(version, described)
    making_encoders.write_late_interaction(version, "stanford", query_maxlen=65)
    with pytest.raises(InvalidArgument, match="filled up to 65 tokens, and the model takes 1 to 64"):
        load(version, described)


def test_vectors_that_would_take_too_much_memory_are_refused(
    version: Path, making_encoders: ModuleType, described: Describe, monkeypatch: pytest.MonkeyPatch
) -> None:
    making_encoders.write_late_interaction(version, "stanford")
    runtime = load(version, described)
    monkeypatch.setattr(encoder_backend, "_MAX_OUTPUT_BYTES", 1000)  # a query's take 12 * 8 * 4 bytes, and its count 4
    assert len(embed(runtime, TEXTS[:2], "query")) == 2
    with pytest.raises(InvalidArgument, match="send fewer at once"):
        embed(runtime, TEXTS, "query")


def test_bge_m3_weighs_words_and_gives_vectors_of_tokens(
    version: Path, making_encoders: ModuleType, described: Describe
) -> None:
    module = making_encoders.write_embedder(version, "xlm-roberta", "cls_token")
    sparse, colbert = making_encoders.write_token_heads(version)
    runtime = load(version, described)
    outputs = ["embedding", "token_embedding", "num_token_embeddings", "token_weight", "token_ids"]
    (arrays,) = runtime.execute({"text_input": column(TEXTS)}, outputs)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(version)
    for row, text in enumerate(TEXTS):
        ids = tokenizer(text, truncation=True, max_length=making_encoders.LENGTH)["input_ids"]
        with torch.inference_mode():
            states = module(input_ids=torch.tensor([ids])).last_hidden_state[0]
            weights = torch.relu(sparse(states[1:-1]))[:, 0].numpy()
            vectors = normalize(colbert(states[1:]), dim=-1).numpy()
        assert arrays["token_ids"][row].tolist() == ids[1:-1] + [-1] * (arrays["token_ids"].shape[1] - len(ids) + 2)
        np.testing.assert_allclose(arrays["token_weight"][row, : len(weights)], weights, atol=2e-6)
        assert arrays["num_token_embeddings"][row, 0] == len(vectors)
        np.testing.assert_allclose(arrays["token_embedding"][row, : len(vectors)], vectors, atol=2e-6)
        np.testing.assert_allclose(arrays["embedding"][row], normalize(states[0], dim=0).numpy(), atol=2e-6)
    (arrays,) = runtime.execute({"text_input": column(TEXTS)}, ["embedding"])
    assert set(arrays) == {"embedding", "num_input_tokens"}
    torch.save({"weight": torch.zeros(2, 3)}, version / "sparse_linear.pt")
    with pytest.raises(InvalidArgument, match=r"sparse_linear\.pt does not hold a layer of 32 by 1"):
        load(version, described)
