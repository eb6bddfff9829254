"""The whole way with real weights: text in, text out of a core process, as transformers would write it."""

from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

import torch
import transformers

from charonia.core.request import GenerateRequest
from charonia.core.request_context import RequestContext
from charonia.core.sampling import SamplingParams
from charonia.engine.client.llm import LlmModel
from charonia.engine.config import EngineConfig

PROMPT = "The quick brown fox"
NEW = 24


def reference(directory: Path) -> str:
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    prompt = tokenizer(PROMPT, return_tensors="pt")
    ids = model.generate(**prompt, max_new_tokens=NEW, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    return tokenizer.decode(ids, skip_special_tokens=True)


async def test_text_is_what_transformers_writes(checkpoint: Callable[..., Path]) -> None:
    directory = checkpoint()
    model = LlmModel("tiny", "1", EngineConfig(model=str(directory), dtype="float32"))
    await model.load()
    try:
        sampling = SamplingParams(max_tokens=NEW, temperature=0)
        async with aclosing(
            model.generate(GenerateRequest(id="", prompt=PROMPT, sampling=sampling), RequestContext("test"))
        ) as chunks:
            text = "".join([chunk.text async for chunk in chunks])
    finally:
        await model.unload()
    assert text == reference(directory)
