"""Native pre- and postprocessing: texts to token ids and back, in the tensors of Triton's TensorRT-LLM repositories."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from charonia.classic_backends.tokenizer_models import POSTPROCESSING, PREPROCESSING
from charonia.core.errors import InvalidArgument
from charonia.core.model import ModelConfig
from charonia.core.request import InferRequest
from charonia.core.runtime import InstancePlacement, Runtime, only_response
from charonia.core.tensor import Tensor
from charonia.tokenization.tokenizer import Tokenizer
from tests.published_models import write_tekken

from .asking import answers, serving

QUERY = "The quick fox"


@pytest.fixture(scope="module")
def tokenizer_dir(making: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("tokenizer")
    making.write_tokenizer(directory)
    return directory


@pytest.fixture
def load(tokenizer_dir: Path, described: Callable[..., ModelConfig], tmp_path: Path) -> Callable[..., Runtime]:
    def load(loader: Any, size: int = 8, **parameters: str) -> Runtime:
        completed = loader.complete(tmp_path, {"name": "m", "max_batch_size": 8}, {})
        config = described({**completed, "max_batch_size": size})
        given = {"tokenizer_dir": str(tokenizer_dir), "add_special_tokens": "${add_special_tokens}"} | parameters
        runtime: Runtime = loader.load(tmp_path, config, InstancePlacement(), given)
        return runtime

    return load


def texts(*rows: Sequence[str]) -> np.ndarray[Any, Any]:
    return np.array([[each.encode() for each in row] for row in rows], object)


def prompts(*queries: str, **others: Any) -> dict[str, Any]:
    lengths = np.full((len(queries), 1), 5, "i4")
    return {"QUERY": texts(*[[query] for query in queries]), "REQUEST_OUTPUT_LEN": lengths, **others}


def test_a_batch_of_prompts(load: Callable[..., Runtime], tokenizer_dir: Path) -> None:
    tokenizer = Tokenizer.load(tokenizer_dir)
    words = {"STOP_WORDS_DICT": texts(["lazy", ""], ["dog", "."]), "BAD_WORDS_DICT": texts([""], [""])}
    made = only_response(load(PREPROCESSING).execute(prompts(QUERY, "jumps", **words), ()))
    long, short = tokenizer.encode(QUERY), tokenizer.encode("jumps")
    assert made["REQUEST_INPUT_LEN"].tolist() == [[len(long)], [len(short)]]
    assert_array_equal(made["INPUT_ID"], [long, short + [0] * (len(long) - len(short))])
    assert_array_equal(made["REQUEST_OUTPUT_LEN"], [[5], [5]])
    assert_array_equal(made["OUT_END_ID"], [[tokenizer.token_id("eos_token")]] * 2)
    assert made["BAD_WORDS_IDS"].shape == (2, 2, 0)
    for row, given in zip(made["STOP_WORDS_IDS"], (["lazy"], ["dog", "."]), strict=True):
        ends = [end for end in row[1].tolist() if end >= 0]
        found = [tuple(row[0, begin:end].tolist()) for begin, end in zip([0, *ends], ends, strict=False)]
        assert found == tokenizer.word_ids(given)
    assert made["EMBEDDING_BIAS"].shape == (2, 0)
    assert made["REQUEST_DECODER_INPUT_LEN"].tolist() == [[0], [0]]


def test_what_a_request_brings_itself_wins(load: Callable[..., Runtime], tokenizer_dir: Path) -> None:
    given = {
        "END_ID": np.array([[7]], "i4"),
        "PAD_ID": np.array([[9]], "i4"),
        "EMBEDDING_BIAS_WORDS": texts(["fox"]),
        "EMBEDDING_BIAS_WEIGHTS": np.array([[2.5]], "f4"),
    }
    made = only_response(load(PREPROCESSING).execute(prompts(QUERY, **given), ()))
    assert (made["OUT_END_ID"].item(), made["OUT_PAD_ID"].item()) == (7, 9)
    tokenizer = Tokenizer.load(tokenizer_dir)
    tokens = tokenizer.encode("fox")
    assert made["EMBEDDING_BIAS"].shape == (1, tokenizer.size)
    assert made["EMBEDDING_BIAS"][0, tokens].tolist() == [2.5] * len(tokens)
    assert made["EMBEDDING_BIAS"].sum() == 2.5 * len(set(tokens))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"DECODER_QUERY": texts(["x"])}, "input 'DECODER_QUERY' is not supported"),
        ({"IMAGE_URL": texts(["http://here"])}, "input 'IMAGE_URL' is not supported"),
        ({"EMBEDDING_BIAS_WORDS": texts(["x"])}, "must be there together"),
        ({"STOP_WORDS_DICT": np.array([[b"\xff"]], object)}, "STOP_WORDS_DICT is not UTF-8"),
    ],
)
def test_what_is_refused(load: Callable[..., Runtime], given: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        only_response(load(PREPROCESSING).execute(prompts(QUERY, **given), ()))
    nothing = {"DECODER_QUERY": texts([""]), "IMAGE_URL": texts([""])}
    assert only_response(load(PREPROCESSING).execute(prompts(QUERY, **nothing), ()))["INPUT_ID"].size


def test_a_tokenizer_of_mistrals_beside_the_model(load: Callable[..., Runtime], tmp_path: Path) -> None:
    write_tekken(tmp_path)
    made = only_response(load(PREPROCESSING, tokenizer_dir="").execute(prompts(QUERY), ()))
    assert made["INPUT_ID"].tolist() == [Tokenizer.load(tmp_path).encode(QUERY)]


def test_texts_of_answers(load: Callable[..., Runtime], tokenizer_dir: Path) -> None:
    tokens = Tokenizer.load(tokenizer_dir).encode(QUERY)
    batch = {
        "TOKENS_BATCH": np.array([[[*tokens, 0], [0] * (len(tokens) + 1)]], "i4"),
        "SEQUENCE_LENGTH": np.array([[len(tokens) + 1, 1]], "i4"),
    }
    made = only_response(load(POSTPROCESSING).execute(batch, ()))
    assert made["OUTPUT"].tolist() == [QUERY.encode(), b""]
    shown = only_response(load(POSTPROCESSING, skip_special_tokens="false").execute(batch, ()))
    assert shown["OUTPUT"].tolist() == [QUERY.encode() + b"<|end|>", b"<|end|>"]
    empty = {"TOKENS_BATCH": np.zeros((1, 1, 0), "i4"), "SEQUENCE_LENGTH": np.zeros((1, 1), "i4")}
    assert only_response(load(POSTPROCESSING).execute(empty, ()))["OUTPUT"].tolist() == [b""]
    with pytest.raises(InvalidArgument, match="one element for each of 2 answers, got 1"):
        only_response(load(POSTPROCESSING).execute(batch | {"SEQUENCE_LENGTH": np.array([[1]], "i4")}, ()))


def test_without_a_batch_dimension(load: Callable[..., Runtime], tokenizer_dir: Path) -> None:
    given = {name: array[0] for name, array in prompts(QUERY).items()}
    made = only_response(load(PREPROCESSING, size=0).execute(given, ()))
    assert_array_equal(made["INPUT_ID"], Tokenizer.load(tokenizer_dir).encode(QUERY))
    assert made["REQUEST_INPUT_LEN"].shape == (1,)


def test_configs_that_cannot_be_served(load: Callable[..., Runtime], described: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="model 'm' needs the parameter 'tokenizer_dir'"):
        load(POSTPROCESSING, tokenizer_dir="${tokenizer_dir}")
    wrong = described({"name": "m", "input": [{"name": "QUERY", "data_type": "TYPE_INT32", "dims": [1]}]})
    with pytest.raises(InvalidArgument, match="input 'QUERY' of model 'm' must be TYPE_STRING, not TYPE_INT32"):
        PREPROCESSING.load(tmp_path, wrong, InstancePlacement(), {})


async def test_requests_that_wait_together_are_not_padded_to_each_other(
    described: Callable[..., ModelConfig], tokenizer_dir: Path
) -> None:
    raw = PREPROCESSING.complete(tokenizer_dir, {"name": "m", "max_batch_size": 8, "dynamic_batching": {}}, {})
    async with serving(PREPROCESSING, described(raw), tokenizer_dir) as model:
        for query in (QUERY, "jumps"):
            inputs = {
                name: Tensor(name, "BYTES" if array.dtype == object else "INT32", array.shape, array)
                for name, array in prompts(query).items()
            }
            [response] = await answers(model, InferRequest(inputs=inputs, outputs=("INPUT_ID",)))
            [ids] = response.outputs
            assert ids.data.tolist() == [Tokenizer.load(tokenizer_dir).encode(query)]
