"""/v1/embeddings and /v1/rerank over a model that answers with lengths: their forms, parts, errors and usage."""

import base64
import threading
from collections.abc import AsyncGenerator, Callable
from typing import Any

import httpx
import numpy as np
import pytest

from charonia.api.app import build_app
from charonia.api.http import connection
from charonia.api.metadata import ServerInfo
from charonia.api.openai import encoder_calls, scoring
from charonia.api.openai.encoder_calls import several_inputs
from charonia.core.errors import InvalidArgument, NotFound, Unavailable
from charonia.core.model import ModelConfig
from charonia.core.request import InferRequest, InferResponse
from charonia.core.request_context import RequestContext
from charonia.core.tensor import Tensor, TensorSpec

from ..conftest import FakeHandle

TEXT = TensorSpec("text_input", "BYTES", (1,), optional=True)
COUNT = TensorSpec("num_input_tokens", "INT32", (1,))
PAIR = TensorSpec("text_pair", "BYTES", (1,))
PROMPT = TensorSpec("prompt_name", "BYTES", (1,), optional=True)
EMBEDDING, SCORE = TensorSpec("embedding", "FP32", (3,)), TensorSpec("score", "FP32", (1,))


def encoder(name: str, also: TensorSpec, *outputs: TensorSpec, more: tuple[TensorSpec, ...] = ()) -> ModelConfig:
    """One that takes texts and `also` something else."""
    return ModelConfig(name, "1", "encoder", max_batch_size=2, inputs=(TEXT, also, *more), outputs=(*outputs, COUNT))


CONFIGS = {
    config.name: config
    for config in (
        encoder("embedder", TensorSpec("input_ids", "INT64", (-1,), optional=True), EMBEDDING),
        encoder("prompted", PROMPT, EMBEDDING),
        encoder("ranker", PAIR, SCORE),
        encoder("instructed", PAIR, SCORE, more=(TensorSpec("instruction", "BYTES", (1,), optional=True),)),
        encoder(
            "tokens",
            PROMPT,
            TensorSpec("token_embedding", "FP32", (-1, 2)),
            TensorSpec("num_token_embeddings", "INT32", (1,)),
            TensorSpec("token_weight", "FP32", (-1,)),
            TensorSpec("token_ids", "INT64", (-1,)),
        ),
        ModelConfig(
            "tagger",
            "1",
            "ensemble",
            inputs=(TEXT, PAIR),
            outputs=(TensorSpec("score", "FP32", (2,)),),
            parameters={"final_scores": "true"},
        ),
        ModelConfig("classifier", "1", "ensemble", inputs=(TEXT, PAIR), outputs=(TensorSpec("score", "FP32", (2,)),)),
    )
}


def direction(character: str) -> list[float]:
    return [np.cos(ord(character)), np.sin(ord(character))]


def answer_by_tokens(texts: list[str]) -> tuple[Tensor, ...]:
    """A token for each character, none for a blank: its direction, and its code as id and, a hundredth, as weight."""
    texts = [text.strip() for text in texts]
    longest = max(map(len, texts))
    vectors = np.zeros((len(texts), longest, 2), np.float32)
    ids = np.full((len(texts), longest), -1, np.int64)
    for row, text in enumerate(texts):
        for column, character in enumerate(text):
            vectors[row, column], ids[row, column] = direction(character), ord(character)
    weights = (np.maximum(ids, 0) / 100).astype(np.float32)
    counts = np.array([[len(text)] for text in texts], np.int32)
    arrays = {"token_embedding": vectors, "token_weight": weights, "token_ids": ids}
    arrays |= {"num_token_embeddings": counts, "num_input_tokens": counts}
    types = {"token_ids": "INT64", "num_token_embeddings": "INT32", "num_input_tokens": "INT32"}
    return tuple(Tensor(name, types.get(name, "FP32"), array.shape, array) for name, array in arrays.items())


def answer(request: InferRequest, config: ModelConfig) -> tuple[Tensor, ...]:
    """A text of length n: the vector [n, 3, 4], the score n / 100 for a document, n tokens."""
    if config.name == "tokens":
        return answer_by_tokens([row[0].decode() for row in request.inputs["text_input"].data])
    data = request.inputs.get("text_pair", next(iter(request.inputs.values()))).data
    lengths = (data >= 0).sum(1) if "input_ids" in request.inputs else np.array([len(row[0]) for row in data])
    if config.outputs[0].name == "embedding":
        made = np.stack([lengths, np.full(len(lengths), 3), np.full(len(lengths), 4)], 1).astype(np.float32)
    else:
        made = np.repeat(lengths[:, None] / np.float32(100), config.outputs[0].dims[0], 1).astype(np.float32)
    counts = Tensor.from_values("num_input_tokens", "INT32", lengths[:, None])
    first = Tensor(config.outputs[0].name, "FP32", made.shape, made)
    return (first, counts) if COUNT in config.outputs else (first,)


@pytest.fixture(autouse=True)
def encoders(gateway: Any) -> None:
    class Encoder(FakeHandle):
        async def infer(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
            gateway.asked.append(request)
            if gateway.error is not None:
                raise gateway.error
            yield InferResponse(answer(request, self.config), final=True)

    async def acquire(context: RequestContext, name: str, version: str = "") -> Encoder:
        if name not in CONFIGS:
            raise NotFound(f"Request for unknown model: '{name}' is not found")
        return Encoder(gateway, CONFIGS[name])

    gateway.acquire = acquire


async def embed(client: httpx.AsyncClient, given: Any, **fields: Any) -> httpx.Response:
    return await client.post("/v1/embeddings", json={"model": "embedder", "input": given, **fields})


async def test_one_text(client: httpx.AsyncClient) -> None:
    body = (await embed(client, "twelve")).json()
    assert body.pop("id").startswith("embd-")
    assert isinstance(body.pop("created"), int)
    assert body == {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": [6.0, 3.0, 4.0]}],
        "model": "embedder",
        "usage": {"prompt_tokens": 6, "total_tokens": 6},
    }


async def test_many_texts_go_in_parts_and_keep_their_order(client: httpx.AsyncClient, gateway: Any) -> None:
    texts = ["a" * length for length in (5, 1, 4, 2, 3)]
    body = (await embed(client, texts)).json()
    assert [each["embedding"][0] for each in body["data"]] == [5, 1, 4, 2, 3]
    assert [each["index"] for each in body["data"]] == [0, 1, 2, 3, 4]
    assert body["usage"]["prompt_tokens"] == 15
    assert sorted(request.inputs["text_input"].shape for request in gateway.asked) == [(1, 1), (2, 1), (2, 1)]


async def test_token_ids(client: httpx.AsyncClient, gateway: Any) -> None:
    assert (await embed(client, [7, 8, 9])).json()["data"][0]["embedding"][0] == 3
    body = (await embed(client, [[7, 8, 9], [7]])).json()
    assert [each["embedding"][0] for each in body["data"]] == [3, 1]
    assert gateway.asked[-1].inputs["input_ids"].data.tolist() == [[7, 8, 9], [7, -1, -1]]


async def test_a_prompt_by_its_name(client: httpx.AsyncClient, gateway: Any) -> None:
    texts = ["a", "bc", "def"]
    answered = await embed(client, texts, model="prompted", prompt_name="query")
    assert [each["embedding"][0] for each in answered.json()["data"]] == [1, 2, 3]
    names = [request.inputs["prompt_name"].data.tolist() for request in gateway.asked]
    assert sorted(names) == [[[b"query"]], [[b"query"], [b"query"]]]
    refused = await embed(client, texts, prompt_name="query")
    assert refused.status_code == 400
    assert "'embedder' has no prompts" in refused.json()["error"]["message"]
    assert refused.json()["error"]["param"] == "prompt_name"


async def test_an_instruction_goes_with_every_pair(client: httpx.AsyncClient, gateway: Any) -> None:
    rank = {"query": "q", "documents": ["a", "bc", "def"], "instruction": "short ones"}
    pairs = {"text_1": "q", "text_2": "a", "instruction": "short ones"}
    for path, body in (("/rerank", rank), ("/score", pairs)):
        gateway.asked.clear()
        assert (await client.post(path, json={"model": "instructed", **body})).status_code == 200
        for request in gateway.asked:
            instructions = request.inputs["instruction"].data.ravel().tolist()
            assert instructions == [b"short ones"] * len(request.inputs["text_pair"].data)
        for model, said in (("ranker", "'ranker' has no template for one"), ("embedder", "")):
            refused = await client.post(path, json={"model": model, **body})
            assert refused.status_code == 400
            assert said in refused.json()["error"]["message"]


async def test_late_interaction_sums_the_best_products(client: httpx.AsyncClient, gateway: Any) -> None:
    query, documents = "ab", ["b", "xyz", "ba"]
    expected = [sum(max(np.dot(direction(a), direction(b)) for b in document) for a in query) for document in documents]
    ranked = await client.post("/rerank", json={"model": "tokens", "query": query, "documents": documents})
    results = {result["index"]: result["relevance_score"] for result in ranked.json()["results"]}
    assert [results[index] for index in range(3)] == pytest.approx(expected, abs=1e-6)
    assert ranked.json()["usage"]["prompt_tokens"] == 2 + 6
    roles = [request.inputs["prompt_name"].data.ravel().tolist() for request in gateway.asked]
    assert sorted(map(len, roles)) == [1, 1, 2]
    assert {name for names in roles for name in names} == {b"query", b"document"}
    scored = await client.post("/score", json={"model": "tokens", "text_1": query, "text_2": documents})
    assert [each["score"] for each in scored.json()["data"]] == pytest.approx(expected, abs=1e-6)


async def test_pooling_by_tokens(client: httpx.AsyncClient) -> None:
    body = {"model": "tokens", "input": ["ab", "c"]}
    data = [each["data"] for each in (await client.post("/pooling", json=body)).json()["data"]]
    assert data[0] == pytest.approx(np.array([direction("a"), direction("b")]), abs=1e-6)
    assert [len(rows) for rows in data] == [2, 1]
    weights = (await client.post("/pooling", json={**body, "task": "token_classify"})).json()["data"]
    assert weights[0]["data"] == pytest.approx(np.array([[0.97], [0.98]]), abs=1e-6)
    coded = await client.post("/pooling", json={**body, "encoding_format": "base64"})
    vectors = np.frombuffer(base64.b64decode(coded.json()["data"][0]["data"]), "<f4").reshape(-1, 2)
    assert vectors == pytest.approx(np.array(data[0]))
    refused = await client.post("/pooling", json={**body, "task": "embed"})
    assert "does token_embed, token_classify, not embed" in refused.json()["error"]["message"]
    refused = await client.post("/v1/embeddings", json=body)
    assert "makes no embeddings: it lacks text_input or the output embedding" in refused.json()["error"]["message"]


async def test_vectors_of_tokens_are_limited_as_other_tensors_are(gateway: Any) -> None:
    app = build_app(gateway, ServerInfo("triton", "9.9", max_response_size=100))
    body = {"model": "tokens", "input": ["abcdefgh"]}  # 64 bytes
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://charonia") as connected:
        refused = await connected.post("/pooling", json=body)
        assert (await connected.post("/pooling", json=body | {"encoding_format": "base64"})).status_code == 200
        assert (await connected.post("/pooling", json=body | {"input": ["abc"]})).status_code == 200
    assert refused.status_code == 400
    assert "(64 bytes) that exceeds the maximum allowed value of 25 bytes as JSON" in refused.json()["error"]["message"]


async def test_large_answers_are_made_beside_the_event_loop(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_OFFLOADED_BYTES", 10)
    threads = set[threading.Thread]()

    def noting(work: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: (threads.add(threading.current_thread()), work(*args))[1]

    monkeypatch.setattr(scoring, "_pooled", noting(scoring._pooled))
    monkeypatch.setattr(encoder_calls, "_max_sims", noting(encoder_calls._max_sims))
    pooled = await client.post("/pooling", json={"model": "tokens", "input": ["ab", "c"]})
    scored = await client.post("/score", json={"model": "tokens", "text_1": "ab", "text_2": ["b", "xyz"]})
    assert (pooled.status_code, scored.status_code) == (200, 200)
    assert threads
    assert threading.current_thread() not in threads


async def test_texts_without_tokens_have_no_rows(client: httpx.AsyncClient) -> None:
    for inputs in ([" "], [" ", "a"]):
        for task in ("token_embed", "token_classify"):
            body = {"model": "tokens", "input": inputs, "task": task}
            data = [each["data"] for each in (await client.post("/pooling", json=body)).json()["data"]]
            assert [len(rows) for rows in data] == [0, 1][: len(inputs)]
            coded = (await client.post("/pooling", json=body | {"encoding_format": "base64"})).json()["data"]
            assert coded[0]["data"] == ""
    scored = await client.post("/score", json={"model": "tokens", "text_1": " ", "text_2": ["a", " "]})
    assert [each["score"] for each in scored.json()["data"]] == [0, 0]


async def test_base64_is_little_endian_floats(client: httpx.AsyncClient) -> None:
    shown = (await embed(client, "ab", encoding_format="base64")).json()["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(shown), "<f4").tolist() == [2, 3, 4]


async def test_fewer_dimensions_have_length_one(client: httpx.AsyncClient) -> None:
    assert (await embed(client, "abcd", dimensions=2)).json()["data"][0]["embedding"] == pytest.approx([0.8, 0.6])
    assert (await embed(client, "abcd", dimensions=3)).json()["data"][0]["embedding"] == [4, 3, 4]


@pytest.mark.parametrize(
    ("fields", "field", "said"),
    [
        ({"input": ""}, "input", "none of them empty"),
        ({"input": []}, "input", "none of them empty"),
        ({"input": ["a", 1]}, "input", "input must be a string"),
        ({"input": [[1], []]}, "input", "none of them empty"),
        ({"input": [-1]}, "input", "input must be"),
        ({"input": ["a"] * 2049, "model": "m"}, "input", "input must be 1 to 2048, got 2049"),
        ({"dimensions": 0}, "dimensions", "dimensions must be at least 1"),
        ({"dimensions": 4}, "dimensions", "dimensions must be at most 3 for this model, got 4"),
        ({"encoding_format": "int8"}, "encoding_format", "must be float or base64"),
        ({"input_type": "query"}, "input_type", "is not supported yet"),
        ({"add_special_tokens": False}, "add_special_tokens", "is not supported yet"),
        ({"model": "ranker"}, "model", "makes no embeddings"),
    ],
)
async def test_what_is_wrong_is_named(client: httpx.AsyncClient, fields: dict[str, Any], field: str, said: str) -> None:
    body = {"model": "embedder", "input": "a", **fields}
    if len(body["input"]) > 100:  # longer than the server of these tests lets in
        with pytest.raises(InvalidArgument, match=said):
            several_inputs(body["input"])
        return
    answered = await client.post("/v1/embeddings", json=body)
    error = answered.json()["error"]
    assert (answered.status_code, error["param"]) == (400, field)
    assert said in error["message"]


async def test_an_unknown_model(client: httpx.AsyncClient) -> None:
    for path, body in (("embeddings", {"input": "a"}), ("rerank", {"query": "a", "documents": ["b"]})):
        answered = await client.post(f"/v1/{path}", json={"model": "nobody", **body})
        assert (answered.status_code, answered.json()["error"]["code"]) == (404, "model_not_found")


async def test_an_error_of_one_part_is_the_answer(client: httpx.AsyncClient, gateway: Any) -> None:
    gateway.error = Unavailable("Exceeds maximum queue size")
    answered = await embed(client, ["a", "b", "c"])
    assert (answered.status_code, answered.json()["error"]["message"]) == (503, "Exceeds maximum queue size")


async def rank(client: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    documents = ["a" * length for length in (2, 5, 3)]
    return await client.post("/v1/rerank", json={"model": "ranker", "query": "q", "documents": documents, **fields})


async def test_documents_come_back_best_first(client: httpx.AsyncClient, gateway: Any) -> None:
    body = (await rank(client)).json()
    assert [result["index"] for result in body["results"]] == [1, 2, 0]
    assert [result["relevance_score"] for result in body["results"]] == pytest.approx([0.05, 0.03, 0.02])
    assert (body["model"], body["usage"]) == ("ranker", {"prompt_tokens": 10, "total_tokens": 10})
    assert {request.inputs["text_input"].data[0, 0] for request in gateway.asked} == {b"q"}


@pytest.mark.parametrize("path", ["/v2/rerank", "/rerank"])
async def test_a_ranking_is_where_other_servers_have_it(client: httpx.AsyncClient, path: str) -> None:
    asked = {"model": "ranker", "query": "q", "documents": ["a", "abc"], "top_n": 1, "truncate_prompt_tokens": -1}
    answered = await client.post(path, json=asked)
    assert [result["index"] for result in answered.json()["results"]] == [1]
    refused = await client.post(path, json=asked | {"top_n": 0})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "top_n")


async def test_the_best_documents_with_their_texts(client: httpx.AsyncClient) -> None:
    documents = ["a", {"text": "abc"}]
    body = (await rank(client, documents=documents, top_n=1, return_documents=True)).json()
    assert [(result["index"], result["document"]) for result in body["results"]] == [(1, {"text": "abc"})]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"top_n": 0}, "top_n"),
        ({"documents": []}, "documents"),
        ({"documents": [{"title": "a"}]}, "documents[0]"),
        ({"model": "embedder"}, "model"),
        ({"model": "classifier"}, "model"),
        ({"query": 1}, "query"),
    ],
)
async def test_wrong_rankings_are_named(client: httpx.AsyncClient, fields: dict[str, Any], field: str) -> None:
    answered = await rank(client, **fields)
    assert (answered.status_code, answered.json()["error"]["param"]) == (400, field)


@pytest.mark.parametrize(
    ("one", "other"), [("queries", "documents"), ("queries", "items"), ("text_1", "text_2"), ("data_1", "data_2")]
)
async def test_scores_of_pairs(client: httpx.AsyncClient, one: str, other: str) -> None:
    body = {"model": "ranker", one: "q", other: ["a", "abc", "ab"]}
    for path in ("/score", "/v1/score", "/invocations"):
        told = (await client.post(path, json=body)).json()
        assert [(each["index"], each["object"]) for each in told["data"]] == [(0, "score"), (1, "score"), (2, "score")]
        assert [each["score"] for each in told["data"]] == pytest.approx([0.01, 0.03, 0.02])
        assert (told["object"], told["model"], told["usage"]["prompt_tokens"]) == ("list", "ranker", 6)
    told = (await client.post("/score", json=body | {one: ["q", "r", "s"]})).json()
    assert len(told["data"]) == 3


async def test_vectors_are_scored_by_their_angle(client: httpx.AsyncClient) -> None:
    told = (await client.post("/score", json={"model": "embedder", "text_1": "ab", "text_2": ["ab", "abcde"]})).json()
    one, other = np.array([2, 3, 4]), np.array([5, 3, 4])
    cosine = one @ other / np.linalg.norm(one) / np.linalg.norm(other)
    assert [each["score"] for each in told["data"]] == pytest.approx([1, cosine])


async def test_classes_and_what_a_model_makes(client: httpx.AsyncClient) -> None:
    told = (await client.post("/classify", json={"model": "classifier", "input": ["a", "abc"]})).json()
    assert [each["probs"] for each in told["data"]] == [[0.5, 0.5]] * 2
    assert [(each["label"], each["num_classes"]) for each in told["data"]] == [("LABEL_0", 2)] * 2
    told = (await client.post("/classify", json={"model": "tagger", "input": ["a", "abc"]})).json()
    assert [each["probs"] for each in told["data"]] == [pytest.approx([0.01] * 2), pytest.approx([0.03] * 2)]
    pooled = (await client.post("/pooling", json={"model": "tagger", "input": "a"})).json()
    assert pooled["data"][0]["data"] == pytest.approx([0.01] * 2)
    pooled = (await client.post("/pooling", json={"model": "embedder", "input": "ab", "task": "embed"})).json()
    assert (pooled["data"][0]["data"], pooled["data"][0]["object"]) == ([2, 3, 4], "pooling")
    assert pooled["id"].startswith("pool-")
    coded = (
        await client.post("/pooling", json={"model": "embedder", "input": [7, 8], "encoding_format": "base64"})
    ).json()
    assert np.frombuffer(base64.b64decode(coded["data"][0]["data"]), "<f4").tolist() == [2, 3, 4]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("score", {"model": "ranker", "queries": "a"}, "queries"),
        ("score", {"model": "ranker", "queries": "a", "text_2": "b"}, "queries"),
        ("score", {"model": "ranker", "text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
        ("score", {"model": "ranker", "text_1": "a", "text_2": []}, "text_2"),
        ("score", {"model": "classifier", "text_1": "a", "text_2": "b"}, "model"),
        ("classify", {"model": "embedder", "input": "a"}, "model"),
        ("classify", {"model": "classifier", "input": ""}, "input"),
        ("pooling", {"model": "embedder", "input": "a", "task": "token_embed"}, "task"),
        ("pooling", {"model": "embedder", "input": "a", "encoding_format": "hex"}, "encoding_format"),
        ("pooling", {"model": "embedder", "input": "a", "use_activation": False}, "use_activation"),
    ],
)
async def test_wrong_scores_and_classes_are_named(client: httpx.AsyncClient, path: str, body: Any, field: str) -> None:
    answered = await client.post(f"/{path}", json=body)
    assert (answered.status_code, answered.json()["error"]["param"]) == (400, field)


async def test_encoders_name_what_they_ignore(client: httpx.AsyncClient) -> None:
    for path, body in (
        ("/v1/embeddings", {"model": "embedder", "input": "a"}),
        ("/rerank", {"model": "ranker", "query": "a", "documents": ["b"]}),
        ("/score", {"model": "ranker", "text_1": "a", "text_2": "b"}),
        ("/classify", {"model": "classifier", "input": "a"}),
        ("/pooling", {"model": "embedder", "input": "a"}),
    ):
        answered = await client.post(path, json=body | {"trace_id": 7})
        assert (answered.status_code, answered.headers["x-charonia-warning"]) == (200, "ignored: trace_id")
