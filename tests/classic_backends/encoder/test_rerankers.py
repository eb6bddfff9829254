"""Rerankers whose score is a causal model's logits behind a prompt, beside transformers, pair by pair."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from charonia.classic_backends.encoder import pair_template
from charonia.classic_backends.encoder.encoder_backend import ENCODER
from charonia.classic_backends.encoder.pair_template import QWEN3_RERANKER, PairEncoder, PairTemplate
from charonia.core.errors import InvalidArgument, Unsupported
from charonia.core.model import ModelConfig
from charonia.core.runtime import InstancePlacement, Runtime

Describe = Callable[[Mapping[str, Any]], ModelConfig]

QUERY = "where is the boat"
DOCUMENTS = ["the ferry", "charon waits for two coins by night and by day", "fast"]
YES, NO = 5, 9


@pytest.fixture(scope="session")
def making_encoders(sibling: Callable[[str], ModuleType]) -> ModuleType:
    return sibling("encoder_models.py")


def load(directory: Path, described: Describe) -> Runtime:
    config = described(ENCODER.complete(directory, {"name": "ranker"}, {}))
    return ENCODER.load(directory, config, InstancePlacement(), {})


def score(runtime: Runtime, documents: list[str], instruction: str | None = None) -> Any:
    columns = {"text_input": [QUERY] * len(documents), "text_pair": documents}
    if instruction is not None:
        columns["instruction"] = [instruction] * len(documents)
    inputs = {name: np.array([[text.encode()] for text in column], object) for name, column in columns.items()}
    (arrays,) = runtime.execute(inputs, ["score"])
    return arrays["score"][:, 0]


def logits_behind(module: Any, directory: Path, prompt: str, length: int = 64) -> Any:
    ids = PreTrainedTokenizerFast.from_pretrained(directory)(prompt, add_special_tokens=False)["input_ids"]
    if len(ids) > length:
        ids = [*ids[: length - 2], *ids[-2:]]  # the template ends in "is it"
    with torch.inference_mode():
        return module(input_ids=torch.tensor([ids])).logits[0, -1]


def test_the_score_is_that_of_the_answers_logits(
    version: Path, making_encoders: ModuleType, described: Describe
) -> None:
    module = making_encoders.write_causal_reranker(version, {"true_token_id": YES, "false_token_id": NO})
    runtime = load(version, described)
    for instruction, start in ((None, ""), ("night", "where night ")):
        scores = score(runtime, DOCUMENTS, instruction)
        for document, relevance in zip(DOCUMENTS, scores, strict=True):
            logits = logits_behind(module, version, f"{start}[CLS] {QUERY} [CLS] {document} is it")
            assert relevance == pytest.approx(torch.sigmoid(logits[YES] - logits[NO]).item(), abs=2e-6)
    assert np.ptp(scores) > 0.01


def test_a_prompt_that_is_too_long_keeps_its_end(
    version: Path, making_encoders: ModuleType, described: Describe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair_template, "_FILLERS", ("boat", "two coins"))  # this tokenizer knows no numbers
    module = making_encoders.write_causal_reranker(version, {"true_token_id": YES})
    own = {"activation_fn": "torch.nn.modules.linear.Identity"}
    making_encoders.write_json(version / "config_sentence_transformers.json", own)
    long = "coins by night " * 40
    expected = logits_behind(module, version, f"[CLS] {QUERY} [CLS] {long} is it")[YES].item()
    runtime = load(version, described)
    assert score(runtime, ["day", long])[1] == pytest.approx(expected, abs=1e-5)
    ends: list[object] = []
    monkeypatch.setattr(PairEncoder, "_template_end", lambda *_: [ends.append(_), YES][1:])
    score(runtime, [long] * 3)
    assert len(ends) == 1, "pairs with one instruction end alike"


def test_tokens_may_be_named_as_for_vllm(version: Path, making_encoders: ModuleType, described: Describe) -> None:
    own = {"classifier_from_token": ["night", "day"], "is_original_qwen3_reranker": True}
    module = making_encoders.write_causal_reranker(version, None, template="{{ messages[0].role }}", **own)
    ids = [PreTrainedTokenizerFast.from_pretrained(version).convert_tokens_to_ids(word) for word in ("night", "day")]
    prompt = PairTemplate(QWEN3_RERANKER, {}).render(QUERY, DOCUMENTS[0], "coins")
    assert prompt.endswith(
        "<|im_end|>\n<|im_start|>user\n<Instruct>: coins\n<Query>: where is the boat\n<Document>: the ferry<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    making_encoders.write_json(version / "sentence_bert_config.json", {"max_seq_length": 256})
    logits = logits_behind(module, version, prompt, 256)
    expected = torch.sigmoid(logits[ids[1]] - logits[ids[0]]).item()
    assert score(load(version, described), DOCUMENTS[:1], "coins")[0] == pytest.approx(expected, abs=2e-6)
    making_encoders.write_json(
        version / "config.json",
        {**making_encoders.read_json(version / "config.json"), "classifier_from_token": ["no", "yes"]},
    )
    with pytest.raises(InvalidArgument, match="its tokenizer has no token 'yes'"):
        load(version, described)


def test_a_template_gets_the_variables_of_its_files(
    version: Path, making_encoders: ModuleType, described: Describe
) -> None:
    more = making_encoders.PAIRS + "{% if add_generation_prompt %} {{ word }}{% endif %}"
    module = making_encoders.write_causal_reranker(version, {"true_token_id": YES, "false_token_id": NO}, more)
    settings = version / "sentence_bert_config.json"
    options = {"add_generation_prompt": True, "word": "boat", "restore_suffix": True}
    own = making_encoders.read_json(settings) | {"processing_kwargs": {"chat_template": options}}
    making_encoders.write_json(settings, own)
    logits = logits_behind(module, version, f"[CLS] {QUERY} [CLS] {DOCUMENTS[0]} is it boat")
    expected = torch.sigmoid(logits[YES] - logits[NO]).item()
    assert score(load(version, described), DOCUMENTS[:1])[0] == pytest.approx(expected, abs=2e-6)


def test_texts_that_a_template_refuses_are_named(
    version: Path, making_encoders: ModuleType, described: Describe
) -> None:
    refusing = "{% if messages[-1].content == 'fast' %}{{ raise_exception('too fast') }}{% endif %}"
    making_encoders.write_causal_reranker(version, {"true_token_id": YES}, refusing + making_encoders.PAIRS)
    runtime = load(version, described)
    with pytest.raises(InvalidArgument, match=r"a query and a document: .* too fast") as refused:
        score(runtime, DOCUMENTS)
    assert refused.value.field == "text_pair"
    assert len(score(runtime, DOCUMENTS[:2])) == 2


@pytest.mark.parametrize(
    ("template", "changed", "message"),
    [
        ("{{ messages[0].content }}", {}, "must write messages of the roles query and document"),
        (None, {"1_LogitScore/config.json": {"true_token_id": "yes"}}, "must have true_token_id, an integer"),
        (
            None,
            {"1_LogitScore/config.json": {"true_token_id": 10**6}},
            "true_token_id 1000000 is outside the vocabulary",
        ),
        (
            None,
            {"1_LogitScore/config.json": {"true_token_id": 1, "false_token_id": -1}},
            "false_token_id -1 is outside",
        ),
        (None, {"modules.json": [{"idx": 0, "path": "", "type": "Transformer"}]}, "must be one ForSequenceClass"),
    ],
)
def test_rerankers_that_would_score_something_else_are_refused(
    version: Path, making_encoders: ModuleType, template: str | None, changed: dict[str, Any], message: str
) -> None:
    making_encoders.write_causal_reranker(version, {"true_token_id": YES}, template or making_encoders.PAIRS)
    for file, content in changed.items():
        making_encoders.write_json(version / file, content)
    with pytest.raises((Unsupported, InvalidArgument), match=message):
        ENCODER.complete(version, {"name": "ranker"}, {})
