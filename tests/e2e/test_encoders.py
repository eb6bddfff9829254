"""Encoders as they are published, imported and served: OpenAI's client, /v1/rerank, and plain infer."""

import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import tritonclient.http as triton

from charonia.cli.model_import import import_model

from .serving import serving
from .tensors import given

TEXTS = ["the ferry crosses the river", "a boat", "two coins for charon"]


@pytest.fixture(scope="module")
def lines() -> dict[str, str]:
    """The line to try that `charonia import` printed for each model."""
    return {}


@pytest.fixture(scope="module")
def served(
    sibling: Callable[[str], ModuleType], tmp_path_factory: pytest.TempPathFactory, lines: dict[str, str]
) -> Iterator[Any]:
    models = sibling("encoder_models.py")
    repository: Path = tmp_path_factory.mktemp("encoders") / "models"
    models.write_embedder(repository.parent / "sources" / "embedder")
    models.write_cross_encoder(repository.parent / "sources" / "ranker")
    for source in (repository.parent / "sources").iterdir():
        with redirect_stdout(StringIO()) as said:
            import_model(str(source), repository, "", copied=source.name == "ranker")
        lines[source.name] = said.getvalue().splitlines()[-1].strip()
    with serving(repository.parent / "t", "--model-repository", str(repository)) as server:
        yield server
        assert server.stop() == 0


def infer(server: Any, model: str, output: str, **texts: list[str]) -> Any:
    with triton.InferenceServerClient(server.http_address) as client:
        columns = {name: np.array([[text.encode()] for text in column], object) for name, column in texts.items()}
        inputs = [given(triton, name, column) for name, column in columns.items()]
        return client.infer(model, inputs).as_numpy(output)


def test_openais_client_gets_what_infer_gives(served: Any) -> None:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        made = client.embeddings.create(model="embedder", input=TEXTS)
    vectors = np.array([each.embedding for each in made.data])
    np.testing.assert_allclose(vectors, infer(served, "embedder", "embedding", text_input=TEXTS), atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert made.usage.prompt_tokens == sum(len(text.split()) + 2 for text in TEXTS)


def test_the_lines_that_import_printed_are_answered(served: Any, lines: dict[str, str]) -> None:
    for name, member in (("embedder", "data"), ("ranker", "results")):
        code = lines[name].replace("localhost:8000", served.http_address)
        run = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True, timeout=60)
        assert len(json.loads(run.stdout)[member]) == 2


def test_documents_are_ranked_by_what_infer_gives(served: Any) -> None:
    query = "where is the ferry"
    body = {"model": "ranker", "query": query, "documents": TEXTS, "top_n": 2}
    results = httpx.post(f"{served.url}/v1/rerank", json=body, timeout=60).json()["results"]
    scores = infer(served, "ranker", "score", text_input=[query] * len(TEXTS), text_pair=TEXTS)[:, 0]
    assert [result["index"] for result in results] == np.argsort(-scores)[:2].tolist()
    assert [result["relevance_score"] for result in results] == pytest.approx(np.sort(scores)[::-1][:2], abs=1e-5)


@pytest.mark.proof
def test_a_single_encoder_is_served_by_its_directory(
    serve: Any, sibling: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    sibling("encoder_models.py").write_embedder(tmp_path / "mini")
    with serve(str(tmp_path / "mini")) as server:
        body = {"model": "mini", "input": TEXTS[0], "dimensions": 8}
        answered = httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=60)
        assert len(answered.json()["data"][0]["embedding"]) == 8
