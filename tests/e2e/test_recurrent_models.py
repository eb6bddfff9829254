"""Models whose layers keep states, or share caches, over HTTP with the prefix cache on: what they say is what
transformers says, also where a request goes on from what another left."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

from charonia.telemetry.scrape import Interval, parse_scrape

from .models import write_model
from .serving import Server, serving

NAMES = ["qwen3.5", "mamba2"]
OTHERS = ["lfm2", "granite-hybrid", "gemma4-small", "gpt-oss", "smollm3", "glm4-moe", "olmo3"]
"""Whose engines the suite compares with transformers itself; over HTTP they are served by `make proof`."""
DRAFTING = "qwen3.5"
"""The one whose steps verify drafts."""
NEW = 12
generator = torch.Generator().manual_seed(5)
SHARED = torch.randint(1, 384, (100,), generator=generator).tolist()
PROMPTS = [[*SHARED, *torch.randint(1, 384, (length,), generator=generator).tolist()] for length in (40, 3, 21)]
PROMPTS.append(torch.randint(1, 384, (80,), generator=generator).tolist())


@pytest.fixture(scope="module")
def checkpoints(
    making: ModuleType, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[str, Path]:
    """Of the models that are asked in this run."""
    folder = tmp_path_factory.mktemp("recurrent")
    items = [item for item in request.session.items if item.path == request.path]
    names = {item.callspec.params["name"] for item in items if isinstance(item, pytest.Function)}
    return {name: making.write_checkpoint(folder / name, making.CONFIGS[name]) for name in sorted(names)}


@pytest.fixture(scope="module")
def hybrids(tmp_path_factory: pytest.TempPathFactory, checkpoints: dict[str, Path]) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("repository")
    drafts = r"{\"method\": \"ngram\", \"prompt_lookup_min\": 1}"
    for name, checkpoint in checkpoints.items():
        drafting = {"speculative_config": drafts} if name == DRAFTING else {}
        write_model(repository, name, checkpoint, max_num_seqs=4, **drafting)
    with serving(tmp_path_factory.mktemp("s") / "t", "--model-repository", str(repository)) as running:
        yield running
        assert running.stop() == 0, running.said


@pytest.fixture(scope="module")
def right(checkpoints: dict[str, Path]) -> Callable[[str], list[list[int]]]:
    """What transformers generates greedily for each prompt."""

    def generate(name: str) -> list[list[int]]:
        model: Any = AutoModelForCausalLM.from_pretrained(checkpoints[name], dtype=torch.float32)
        tokens = []
        for prompt in PROMPTS:
            ids = torch.tensor([prompt])
            out = model.generate(ids, max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)
            tokens.append(out[0, len(prompt) :].tolist())
        return tokens

    return generate


@pytest.mark.parametrize("name", [*NAMES, *(pytest.param(name, marks=pytest.mark.proof) for name in OTHERS)])
def test_they_say_what_transformers_says(hybrids: Server, right: Callable[[str], list[list[int]]], name: str) -> None:
    """Twice: the second time each prompt goes on from a snapshot, or from blocks, of what it was the first time."""
    with openai.OpenAI(base_url=f"{hybrids.url}/v1", api_key="none", timeout=60, max_retries=0) as client:
        cached = []
        expected = right(name)
        for _ in range(2):
            for prompt, tokens in zip(PROMPTS, expected, strict=True):
                extra = {"return_token_ids": True, "ignore_eos": True}
                answer: Any = client.completions.create(
                    model=name, prompt=prompt, max_tokens=NEW, temperature=0, extra_body=extra
                )
                assert answer.choices[0].token_ids == tokens
                cached.append(answer.usage.prompt_tokens_details.cached_tokens)
    assert cached[0] == 0
    assert min(cached[len(PROMPTS) :]) >= 64
    drafted = Interval(None, parse_scrape(httpx.get(hybrids.metrics_url).text, "the server"))
    assert (drafted.grown("charonia_draft_tokens_total", name) > 0) == (name == DRAFTING)
