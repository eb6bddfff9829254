"""Encoders beside transformers, text by text and without padding; what their files say, and which batches are made."""

from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast

from charonia.classic_backends.encoder.encoder_backend import ENCODER, batch_by_length
from charonia.classic_backends.encoder.encoder_files import Activation, CrossEncoderFiles, read_encoder
from charonia.core.errors import InvalidArgument, NotFound, Unsupported
from charonia.core.model import ModelConfig
from charonia.core.runtime import InstancePlacement, Runtime
from charonia.repository.builder import ModelBuilder
from charonia.repository.model_source import read_model
from charonia.telemetry.shared_state import ModelServices

Describe = Callable[[Mapping[str, Any]], ModelConfig]

TEXTS = [
    "the ferry",
    "a boat crosses the river by night and day and by night and by day and night and day",
    "Charon waits",
    "where is it",
    "two",
    "the slow boat waits for two coins by the river",
]


@pytest.fixture(scope="session")
def making_encoders(sibling: Callable[[str], ModuleType]) -> ModuleType:
    return sibling("encoder_models.py")


def load(directory: Path, described: Describe, **parameters: str) -> Runtime:
    config = described(ENCODER.complete(directory, {"name": "encoder"}, {}))
    return ENCODER.load(directory, config, InstancePlacement(), parameters)


def embedded(runtime: Runtime, texts: list[str]) -> NDArray[Any]:
    (made,) = runtime.execute({"text_input": column(texts)}, ["embedding", "num_input_tokens"])
    return np.asarray(made["embedding"])


def column(texts: list[str]) -> NDArray[Any]:
    return np.array([[text.encode()] for text in texts], object)


def alone(module: Any, directory: Path, text: str, length: int) -> tuple[Any, Any]:
    """What transformers makes of one text: its tokens' vectors, and its ids."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    ids = tokenizer(text.lower(), truncation=True, max_length=length, return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        return module(input_ids=ids).last_hidden_state[0], ids[0]


POOLED: dict[str, Callable[[Any], Any]] = {
    "mean_tokens": lambda tokens: tokens.mean(0),
    "cls_token": lambda tokens: tokens[0],
    "max_tokens": lambda tokens: tokens.amax(0),
    "lasttoken": lambda tokens: tokens[-1],
}


DECODERS = [("qwen3", "lasttoken"), ("qwen3", "mean_tokens")]
"""The first token of a decoder's text knows nothing of the others."""


NEWER = [
    pytest.param(kind, pooling, marks=pytest.mark.proof)
    for kind, pooling in [
        ("gemma3_text", "mean_tokens"),
        ("modernbert", "cls_token"),
        ("gte", "cls_token"),
        ("nomic_bert", "mean_tokens"),
        ("jina_embeddings_v3", "mean_tokens"),
        ("xlm-roberta", "cls_token"),
    ]
]
"""EmbeddingGemma, ModernBERT, gte, nomic, jina v3, bge-m3."""


@pytest.mark.parametrize(("kind", "pooling"), [*product(("bert", "roberta", "distilbert"), POOLED), *DECODERS, *NEWER])
def test_embeddings_are_those_of_each_text_alone(
    version: Path, making_encoders: ModuleType, described: Describe, kind: str, pooling: str
) -> None:
    module = making_encoders.write_embedder(version, kind, pooling)
    made = embedded(load(version, described), TEXTS)
    for text, vector in zip(TEXTS, made, strict=True):
        pooled = POOLED[pooling](alone(module, version, text, making_encoders.LENGTH)[0])
        expected = torch.nn.functional.normalize(pooled, dim=0).numpy()
        np.testing.assert_allclose(vector, expected, atol=2e-6)
    assert np.abs(made[0] - made[1]).max() > 0.01


def test_a_dense_layer_and_no_normalization(version: Path, making_encoders: ModuleType, described: Describe) -> None:
    module = making_encoders.write_embedder(version, tail=["Dense"])
    weights = load_file(version / "2_Dense" / "model.safetensors")
    made = embedded(load(version, described), TEXTS)
    for text, vector in zip(TEXTS, made, strict=True):
        pooled = alone(module, version, text, making_encoders.LENGTH)[0].mean(0)
        expected = torch.tanh(weights["linear.weight"] @ pooled + weights["linear.bias"]).numpy()
        np.testing.assert_allclose(vector, expected, atol=2e-6)


def test_what_a_text_shares_a_batch_with_changes_nothing(
    version: Path, making_encoders: ModuleType, described: Describe
) -> None:
    making_encoders.write_embedder(version)
    together = embedded(load(version, described), TEXTS * 3)
    few = load(version, described, max_batch_tokens="20")
    apart = np.concatenate([embedded(few, [text]) for text in TEXTS * 3])
    np.testing.assert_allclose(together, apart, atol=2e-6)
    np.testing.assert_allclose(together, embedded(few, TEXTS * 3), atol=2e-6)


def test_ids_stand_for_texts(version: Path, making_encoders: ModuleType, described: Describe) -> None:
    module = making_encoders.write_embedder(version)
    runtime = load(version, described)
    rows = [alone(module, version, text, making_encoders.LENGTH)[1].tolist() for text in TEXTS]
    filled = np.full((len(rows), making_encoders.LENGTH), -1)
    for row, ids in zip(filled, rows, strict=True):
        row[: len(ids)] = ids
    (made,) = runtime.execute({"input_ids": filled}, ["embedding"])
    np.testing.assert_allclose(made["embedding"], embedded(runtime, TEXTS), atol=2e-6)
    assert made["num_input_tokens"].tolist() == [[len(ids)] for ids in rows]


@pytest.mark.parametrize("ids", [[-1, -1], [2, -1, 3], [2, 999], [2, -2], [2] * 17])
def test_wrong_ids_are_refused(version: Path, making_encoders: ModuleType, described: Describe, ids: list[int]) -> None:
    making_encoders.write_embedder(version)
    with pytest.raises(InvalidArgument, match="input_ids must be") as caught:
        next(load(version, described).execute({"input_ids": np.array([ids])}, ["embedding"]))
    assert caught.value.field == "input_ids"


def test_texts_or_ids_but_not_both(version: Path, making_encoders: ModuleType, described: Describe) -> None:
    making_encoders.write_embedder(version)
    runtime = load(version, described)
    for inputs in ({}, {"text_input": column(["a"]), "input_ids": np.array([[2]])}):
        with pytest.raises(InvalidArgument, match="give either text_input or input_ids"):
            next(runtime.execute(inputs, ["embedding"]))


def test_a_default_prompt_is_put_first(version: Path, making_encoders: ModuleType, described: Describe) -> None:
    making_encoders.write_embedder(version)
    plain = embedded(load(version, described), ["where is it the ferry"])
    prompts = {"prompts": {"query": "where is it "}, "default_prompt_name": "query"}
    making_encoders.write_json(version / "config_sentence_transformers.json", prompts)
    np.testing.assert_allclose(embedded(load(version, described), ["the ferry"]), plain, atol=1e-6)


def test_a_prompt_is_put_first_by_its_name(version: Path, making_encoders: ModuleType, described: Describe) -> None:
    making_encoders.write_embedder(version)
    assert "prompt_name" not in {each["name"] for each in ENCODER.complete(version, {"name": "encoder"}, {})["input"]}
    plain = embedded(load(version, described), ["where is it the ferry", "the ferry"])
    prompts = {"prompts": {"query": "where is it ", "document": ""}}
    making_encoders.write_json(version / "config_sentence_transformers.json", prompts)
    runtime = load(version, described)
    inputs = {"text_input": column(["the ferry"] * 2), "prompt_name": column(["query", "document"])}
    (made,) = runtime.execute(inputs, ["embedding"])
    np.testing.assert_allclose(made["embedding"], plain, atol=1e-6)
    with pytest.raises(InvalidArgument, match="must be one of query, document for this model, got 'passage'"):
        next(runtime.execute({**inputs, "prompt_name": column(["query", "passage"])}, ["embedding"]))
    with pytest.raises(InvalidArgument, match="goes with texts"):
        next(runtime.execute({"input_ids": np.array([[2]]), "prompt_name": column(["query"])}, ["embedding"]))


def test_a_bare_transformer_is_pooled_by_the_mean(
    version: Path, making_encoders: ModuleType, described: Describe
) -> None:
    module = making_encoders.write_embedder(version)
    (version / "modules.json").unlink()
    expected = alone(module, version, TEXTS[0], making_encoders.LENGTH)[0].mean(0).numpy()
    np.testing.assert_allclose(embedded(load(version, described), TEXTS[:1])[0], expected, atol=2e-6)


@pytest.mark.parametrize(
    ("labels", "own", "activate"),
    [
        (1, {}, torch.sigmoid),
        (1, {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, torch.nn.Identity()),
        (1, {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, torch.nn.Identity()),
        (1, {"problem_type": "regression"}, torch.nn.Identity()),
        (3, {}, torch.nn.Identity()),
        (3, {"problem_type": "multi_label_classification"}, torch.sigmoid),
    ],
)
def test_scores_are_those_of_each_pair_alone(
    version: Path,
    making_encoders: ModuleType,
    described: Describe,
    labels: int,
    own: dict[str, Any],
    activate: Callable[[Any], Any],
) -> None:
    module = making_encoders.write_cross_encoder(version, labels, **own)
    query = "where is the boat"
    inputs = {"text_input": column([query] * len(TEXTS)), "text_pair": column(TEXTS)}
    (made,) = load(version, described).execute(inputs, ["score"])
    tokenizer = PreTrainedTokenizerFast.from_pretrained(version)
    for text, scores in zip(TEXTS, made["score"], strict=True):
        pair = tokenizer(query, text, return_token_type_ids=True, return_tensors="pt")
        assert pair["token_type_ids"].max() == 1
        with torch.inference_mode():
            expected = activate(module(**pair).logits[0]).numpy()
        np.testing.assert_allclose(scores, expected, atol=2e-6)


@pytest.mark.parametrize("labels", [1, 2, 3])
def test_a_classifier_takes_a_text_alone(
    version: Path, making_encoders: ModuleType, described: Describe, labels: int
) -> None:
    module = making_encoders.write_cross_encoder(version, labels, problem_type="regression")
    found = ENCODER.complete(version, {"name": "encoder"}, {})
    assert [each.get("optional", False) for each in found["input"]] == [False, True]
    assert [each["dims"] for each in found["output"]] == [[labels], [1]]
    (made,) = load(version, described).execute({"text_input": column(TEXTS[:1])}, ["score"])
    text = PreTrainedTokenizerFast.from_pretrained(version)(TEXTS[0], return_tensors="pt")
    with torch.inference_mode():
        np.testing.assert_allclose(made["score"], module(**text).logits.numpy(), atol=2e-6)


def test_labels_that_config_json_leaves_out_are_two(version: Path, making_encoders: ModuleType) -> None:
    module = making_encoders.write_cross_encoder(version, labels=2)
    config = making_encoders.read_json(version / "config.json")
    assert not {"id2label", "num_labels"} & config.keys()
    files = read_encoder(version)
    assert isinstance(files, CrossEncoderFiles)
    assert (files.labels, files.activation) == (module.config.num_labels, Activation.IDENTITY)


@pytest.mark.parametrize(
    ("problem", "final"),
    [(None, False), ("single_label_classification", False), ("regression", True), ("multi_label_classification", True)],
)
def test_scores_that_are_no_probabilities_are_marked(
    version: Path, making_encoders: ModuleType, problem: str | None, final: bool
) -> None:
    making_encoders.write_cross_encoder(version, labels=3, problem_type=problem)
    assert ENCODER.file_parameters(version, {}) == ({"final_scores": "true"} if final else {})


@pytest.mark.parametrize(
    ("completes", "declared", "written", "final"),
    [(True, False, "", "true"), (True, True, "", "true"), (False, True, "", "true"), (True, True, "false", "false")],
)
def test_scores_are_marked_whatever_the_config_declares(
    version: Path, making_encoders: ModuleType, completes: bool, declared: bool, written: str, final: str
) -> None:
    making_encoders.write_cross_encoder(version, labels=3, problem_type="multi_label_classification")
    config = 'backend: "encoder" max_batch_size: 4 '
    if declared:
        config += 'input { name: "text_input" data_type: TYPE_STRING dims: 1 } '
        config += 'output { name: "score" data_type: TYPE_FP32 dims: 3 } '
    if written:
        config += f'parameters {{ key: "final_scores" value {{ string_value: "{written}" }} }}'
    (version.parent / "config.pbtxt").write_text(config)
    source, nothing = read_model(version.parent), cast(Any, None)
    described = ModelBuilder(auto_complete=completes).describe(
        source, source.versions[0], ModelServices(nothing, nothing)
    )
    assert described.parameters["final_scores"] == final


@pytest.mark.parametrize("kind", ["roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet"])
def test_settings_may_have_the_name_of_another_kind(version: Path, making_encoders: ModuleType, kind: str) -> None:
    making_encoders.write_embedder(version)
    making_encoders.write_json(version / f"sentence_{kind}_config.json", {"max_seq_length": 11})
    assert read_encoder(version).tokenization.max_tokens == making_encoders.LENGTH
    (version / "sentence_bert_config.json").unlink()
    assert read_encoder(version).tokenization.max_tokens == 11


def test_what_it_takes_and_gives_is_found(version: Path, making_encoders: ModuleType) -> None:
    making_encoders.write_embedder(version, tail=["Dense", "Normalize"])
    found = ENCODER.complete(version, {"name": "encoder", "max_batch_size": 0}, {"default-max-batch-size": "4"})
    assert found["max_batch_size"] == 256
    assert [(each["name"], each["dims"], each.get("optional", False)) for each in found["input"]] == [
        ("text_input", [1], True),
        ("input_ids", [-1], True),
    ]
    assert [(each["name"], each["dims"]) for each in found["output"]] == [("embedding", [8]), ("num_input_tokens", [1])]


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("1_Pooling/config.json", {"pooling_mode_weightedmean_tokens": True}, "got weightedmean"),
        ("1_Pooling/config.json", {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, "got cls, mean"),
        ("1_Pooling/config.json", {}, "got none"),
        (
            "modules.json",
            [{"idx": 0, "path": "", "type": "sentence_transformers.models.CNN"}],
            "has the modules CNN; it must be Transformer, Pooling",
        ),
    ],
)
def test_steps_that_are_not_known_are_refused(
    version: Path, making_encoders: ModuleType, file: str, content: Any, said: str
) -> None:
    making_encoders.write_embedder(version)
    making_encoders.write_json(version / file, content)
    with pytest.raises(Unsupported, match=said):
        read_encoder(version)


def test_newer_names_are_read(version: Path, making_encoders: ModuleType) -> None:
    making_encoders.write_embedder(version)
    making_encoders.write_json(version / "1_Pooling" / "config.json", {"pooling_mode": "cls"})
    assert read_encoder(version).pooling == "cls"
    making_encoders.write_cross_encoder(version / "cross", sentence_transformers={"activation_fn": "torch.nn.Sigmoid"})
    cross = read_encoder(version / "cross")
    assert isinstance(cross, CrossEncoderFiles)
    assert cross.activation is Activation.SIGMOID


def test_directories_that_hold_no_encoder(version: Path, making_encoders: ModuleType) -> None:
    with pytest.raises(NotFound, match=r"neither modules\.json nor config\.json"):
        read_encoder(version)
    (version / "modules.json").write_text('{"idx": 0}')
    with pytest.raises(InvalidArgument, match="is no list of modules"):
        read_encoder(version)


@given(lengths=st.lists(st.integers(1, 40), max_size=60), budget=st.integers(1, 1000))
def test_batches_hold_everything_once_within_the_budget(lengths: list[int], budget: int) -> None:
    batches = list(batch_by_length(lengths, budget))
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[index] for index in batch) <= budget


def test_short_texts_are_not_padded_to_the_longest() -> None:
    lengths = [512] + [16] * 100
    padded = sum(len(batch) * max(lengths[index] for index in batch) for batch in batch_by_length(lengths, 8192))
    assert padded == sum(lengths)


def without(file: Path, part: str) -> None:
    """Take the weights out of a file whose names have this part."""
    save_file({name: each for name, each in load_file(file).items() if part not in name}, file, {"format": "pt"})


def test_a_pooler_may_be_absent_and_nothing_else(
    tmp_path: Path, making_encoders: ModuleType, described: Describe, capfd: pytest.CaptureFixture[str]
) -> None:
    making_encoders.write_embedder(tmp_path, "bert")
    without(tmp_path / "model.safetensors", "pooler.")
    load(tmp_path, described)
    assert "MISSING" not in "".join(capfd.readouterr())
    without(tmp_path / "model.safetensors", "layer.1.attention.self.query")
    with pytest.raises(InvalidArgument, match=r"lacks weights of its model: encoder\.layer\.1\.attention\.self\.query"):
        load(tmp_path, described)


def test_a_reranker_needs_its_classifier(tmp_path: Path, making_encoders: ModuleType, described: Describe) -> None:
    making_encoders.write_cross_encoder(tmp_path)
    without(tmp_path / "model.safetensors", "classifier.")
    with pytest.raises(InvalidArgument, match=r"lacks weights of its model: classifier\.bias, classifier\.weight"):
        load(tmp_path, described)
