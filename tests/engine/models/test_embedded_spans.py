"""Prompts whose places are partly no tokens: whatever the scheduler does to them, their greedy tokens are those that
transformers generates from the same embeddings."""

from collections.abc import Callable
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from charonia.core.resolved_sampling import ResolvedSampling
from charonia.kvcache.manager import KVCacheManager
from charonia.scheduler.encoders.encoder_rows import EmbeddedSpan
from charonia.scheduler.sequence import SequenceSpec

from .test_equality import BLOCK, NEW, Bench, Setting

PLACEHOLDER = 7
TEXTS = ((3, 30, 1), (1, 0, 40), (50, 17, 2), (5, 5, 5))
"""Tokens before, between and behind two spans, which the last prompt shares with the one before it but for its rows."""
SPANS = (37, 16)
SETTINGS = {
    "found again": Setting(prefix=True, rows=2),
    "cut inside a span": Setting(chunk=29),
    "everything, ahead 1": Setting(chunk=29, prefix=True, tight=True, ahead=1),
}


def picture(hidden: int, length: int, number: int) -> Tensor:
    return torch.randn(length, hidden, generator=torch.Generator().manual_seed(number)) * 0.05


def span(start: int, rows: Tensor) -> EmbeddedSpan:
    content = rows.numpy().tobytes()
    return EmbeddedSpan(start, len(rows), sha256(content).digest(), content, "float32")


def spec(key: int, text: list[int], spans: tuple[EmbeddedSpan, ...], cache: KVCacheManager) -> SequenceSpec:
    bare = SequenceSpec(key=key, prompt=np.array(text, np.int32), max_tokens=NEW, embedded=spans)
    hashes = cache.digest(bare.identities, bare.extras)
    return SequenceSpec(key=key, prompt=bare.prompt, max_tokens=NEW, embedded=spans, hashes=hashes)


def asked(hidden: int) -> list[tuple[list[int], tuple[EmbeddedSpan, ...], Tensor]]:
    """Token ids, spans, and the rows of both spans one behind the other."""
    generator = torch.Generator().manual_seed(5)
    prompts = []
    for number, (before, between, behind) in enumerate(TEXTS):
        parts = [torch.randint(8, 384, (length,), generator=generator).tolist() for length in (before, between, behind)]
        first, second = (picture(hidden, length, 10 * number + length) for length in SPANS)
        text = [*parts[0], *[PLACEHOLDER] * SPANS[0], *parts[1], *[PLACEHOLDER] * SPANS[1], *parts[2]]
        spans = span(before, first), span(before + SPANS[0] + between, second)
        prompts.append((text, spans, torch.cat((first, second))))
    return prompts


class SpanBench(Bench):
    """A `Bench` whose requests have the spans of the prompts with their numbers."""

    spans: list[tuple[EmbeddedSpan, ...]]

    def request(self, cache: KVCacheManager, key: int, prompt: list[int], sampling: ResolvedSampling) -> SequenceSpec:
        return spec(key, prompt, self.spans[key], cache)


@torch.inference_mode()
def continued(model: Any, text: list[int], rows: Tensor) -> list[int]:
    ids = torch.tensor([text])
    embeddings = model.get_input_embeddings()(ids)
    embeddings[ids == PLACEHOLDER] = rows
    mask = torch.ones_like(ids)
    out = model.generate(inputs_embeds=embeddings, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
    return list(out[0].tolist())


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("llama", "native"),
        ("llama", "torch"),
        ("qwen3.5", "native"),
        ("gemma3", "native"),
        ("starcoder2", "native"),
        pytest.param("diffllama", "native", marks=pytest.mark.proof),
    ],
)
def test_they_continue_as_in_transformers(
    checkpoint: Callable[..., Path], making: Any, tmp_path: Path, name: str, backend: str
) -> None:
    """One of our own files with and without kernels, with states, with scaled embeddings; transformers' code over our
    attention, and by sequence."""
    if name == "diffllama":
        making.write_random(tmp_path, making.LLAMA | {"model_type": name})
    directory = tmp_path if name == "diffllama" else checkpoint(name)
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    prompts = asked(model.config.hidden_size)
    expected = [continued(model, text, rows) for text, _, rows in prompts]
    bench = SpanBench(directory, backend)
    # Each twice: the second finds the first's blocks, where there are any to be found.
    bench.spans = [spans for _, spans, _ in prompts] * 2
    for setting in SETTINGS.values() if backend == "native" else [Setting(chunk=29, prefix=True, rows=2)]:
        result, _ = bench.run(setting, asked=[text for text, _, _ in prompts] * 2)
        assert [result.tokens[key] for key in range(2 * len(prompts))] == expected * 2, setting
        found = sum(result.cached[key] for key in range(len(prompts), 2 * len(prompts)))
        assert setting.tight or not setting.prefix or found > 4 * BLOCK, setting


def test_blocks_are_shared_by_what_stands_in_them() -> None:
    cache = KVCacheManager(64, BLOCK, True)
    (text, spans, rows), *_ = asked(32)
    same = spec(1, text, spans, cache)
    other = spec(2, text, (span(spans[0].start, rows[: SPANS[0]] + 1), spans[1]), cache)
    plain = spec(3, text, (), cache)
    assert spec(0, text, spans, cache).hashes == same.hashes
    for one, another in pairwise((same, other, plain)):
        assert not set(one.hashes) & set(another.hashes)  # the first block has places of the first span
    # What follows the prompt in its last block is hashed with what stands for its places.
    ending = spec(4, text[: spans[1].end], spans, cache)
    assert (ending.identities[spans[1].start :] < 0).all()
    assert np.array_equal(ending.prompt[spans[1].start :], [PLACEHOLDER] * SPANS[1])
