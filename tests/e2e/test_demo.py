"""The demo model and the small hybrid: what the README promises of them, on the real server."""

import json
import math
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPT = "def fibonacci(n):"
FEW = 24
MODELS = pytest.mark.parametrize("name", ["demo", "hybrid"])


@pytest.fixture(scope="module")
def examples(root: Path) -> Path:
    return root / "examples"


def parameters(checkpoint: Path) -> int:
    with safe_open(checkpoint / "model.safetensors", "pt") as file:
        tensors = [file.get_slice(name) for name in file.keys()]  # noqa: SIM118
        assert {tensor.get_dtype() for tensor in tensors} == {"BF16"}
        return sum(math.prod(tensor.get_shape()) for tensor in tensors)


def test_sizes(examples: Path) -> None:
    demo, draft = examples / "model_repository" / "demo" / "1", examples / "draft"
    assert 8e6 <= parameters(demo) <= 10.5e6
    assert 0.08 <= parameters(draft) / parameters(demo) <= 0.12
    assert sum(file.stat().st_size for each in (demo, draft) for file in each.iterdir()) <= 24e6
    hybrid = examples / "model_repository" / "hybrid" / "1"
    assert sum(file.stat().st_size for file in hybrid.iterdir()) <= 10e6
    tokenizer = (demo / "tokenizer.json").read_bytes()
    assert [(folder / "tokenizer.json").read_bytes() == tokenizer for folder in (draft, hybrid)] == [True, True]


def test_ranks_can_share_it(examples: Path) -> None:
    config = json.loads((examples / "model_repository" / "demo" / "1" / "config.json").read_text())
    counts = ("num_attention_heads", "num_key_value_heads", "num_hidden_layers", "vocab_size")
    assert [name for name in counts if config[name] % 2] == []
    assert 4000 <= config["vocab_size"] <= 8192


@MODELS
def test_it_streams_the_text_that_it_generates(name: str, demo: Any) -> None:
    body = {"text_input": PROMPT, "max_tokens": FEW, "temperature": 0}
    whole = httpx.post(f"{demo.url}/v2/models/{name}/generate", json=body).json()["text_output"]
    with httpx.stream("POST", f"{demo.url}/v2/models/{name}/generate_stream", json=body) as response:
        events = [json.loads(line.removeprefix("data: ")) for line in response.iter_lines() if line]
    assert "".join(event["text_output"] for event in events) == whole
    assert len(events) > 2  # tokens that came while the last event was written are in one


@MODELS
def test_it_says_what_transformers_says(name: str, demo: Any, examples: Path) -> None:
    checkpoint = examples / "model_repository" / name / "1"
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    theirs = model.generate(ids, max_new_tokens=FEW, do_sample=False, pad_token_id=0)[0, ids.shape[1] :].tolist()
    body = {"model": name, "prompt": ids[0].tolist(), "max_tokens": FEW, "temperature": 0}
    ours = httpx.post(f"{demo.url}/v1/completions", json=body).json()["choices"][0]["text"]
    # In bf16 a near tie may fall either way: the first tokens are what must agree.
    assert ours.startswith(tokenizer.decode(theirs[:4], skip_special_tokens=True))


@MODELS
def test_it_answers_in_a_chat(name: str, demo: Any) -> None:
    messages = [{"role": "user", "content": "Write a function that returns the larger of two numbers."}]
    body = {"model": name, "messages": messages, "max_tokens": 64, "temperature": 0}
    answer = httpx.post(f"{demo.url}/v1/chat/completions", json=body).json()["choices"][0]
    assert answer["message"]["content"].lstrip().startswith(("def ", "class ", "@", "async "))


def test_a_hybrids_next_turn_goes_on_from_a_kept_state(demo: Any) -> None:
    messages = [{"role": "user", "content": "Write a function that counts words. " * 12}]
    body: dict[str, Any] = {"model": "hybrid", "messages": messages, "max_tokens": FEW, "temperature": 0}
    first = httpx.post(f"{demo.url}/v1/chat/completions", json=body).json()
    messages += [first["choices"][0]["message"], {"role": "user", "content": "And now a class."}]
    second = httpx.post(f"{demo.url}/v1/chat/completions", json=body).json()
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= first["usage"]["prompt_tokens"] - 32  # but for a block and what may follow it otherwise
