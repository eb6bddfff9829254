"""One real server with a little traffic behind it, and a scrape of it."""

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import httpx
import pytest


@pytest.fixture(scope="session")
def served(
    making: ModuleType, sibling: Callable[[str], ModuleType], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    checkpoint = tmp_path_factory.mktemp("d") / "fake"
    checkpoint.mkdir()
    making.write_tokenizer(checkpoint)
    (checkpoint / "config.json").write_text("{}")
    classic = checkpoint.parent / "models" / "square"
    (classic / "1").mkdir(parents=True)
    (classic / "config.pbtxt").write_text('backend: "square"')
    (classic.parent / "routes.yaml").write_text("routes: {chat: {arms: [{model: fake, weight: 1}]}}")
    adapter = sibling("adapters.py").write_adapter(checkpoint.parent / "lora", {"model.layers.0.mlp.up_proj": (8, 8)})
    serving = sibling("e2e/serving.py").serving
    flags = ("--executor", "fake", "--fake-vocab-size", "384", "--model-repository", str(classic.parent))
    flags += ("--enable-lora", "--lora-modules", f"sql={adapter}")
    with serving(tmp_path_factory.mktemp("s") / "t", str(checkpoint), *flags) as server:
        asked = {"input_ids": [1], "max_tokens": 2, "lora_name": "sql"}
        httpx.post(f"{server.url}/v2/models/fake/generate", json=asked, timeout=60).raise_for_status()
        httpx.post(f"{server.url}/v2/models/chat/generate", json=asked, timeout=60).raise_for_status()
        yield server


@pytest.fixture(scope="session")
def scraped(served: Any) -> str:
    text: str = httpx.get(served.metrics_url).text
    return text
