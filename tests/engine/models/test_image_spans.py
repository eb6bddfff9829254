"""Prompts with images for models that see: logits and greedy tokens are those of transformers' whole models, from
pixels, whatever the scheduler does to them."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from charonia.bench.inline_loop import LoopResult, run_to_end
from charonia.core.resolved_sampling import ResolvedSampling
from charonia.engine.config import CacheConfig, EngineConfig
from charonia.engine.layers.step_context import StepContext
from charonia.engine.models.native_decoder import NativeDecoder
from charonia.kvcache.manager import KVCacheManager
from charonia.scheduler.config import SchedulerConfig
from charonia.scheduler.drafts.speculation import Speculation
from charonia.scheduler.plan import NO_ROWS, NewSequence, StepPlan
from charonia.scheduler.scheduler import Scheduler
from charonia.scheduler.sequence import SequenceSpec
from tests.image_prompts import PLACEHOLDER, ImagePrompt, image_prompt, whole_logits

from .test_equality import BLOCK, NEW, Bench, Setting
from .test_speculation import HalfRight

SIZES = (((2, 3), (4, 2)), ((5, 5), (1, 4)), ((5, 5), (3, 6)))
TEXTS = ((5, 7, 9), (3, 20, 1), (3, 20, 30))
"""Of the last two prompts, which begin alike: with the same image, and one of another size behind it."""
SETTINGS = {
    "found again": Setting(prefix=True, rows=2),
    "cut": Setting(chunk=29, rows=3),
    "everything, ahead 1": Setting(chunk=29, prefix=True, tight=True, ahead=1, rows=3),
}
WITH_PLAIN = (Setting(), *SETTINGS.values())
BLOCKS = 16
LARGEST_ERROR = 3e-5
"""Of a logit, in standard deviations of all: torch's own sums differ by 2e-5 from one processor to another."""


@pytest.fixture(scope="module")
def threads(sibling: Callable[[str], ModuleType]) -> ModuleType:
    return sibling("engine/threads.py")


class Seeing(NamedTuple):
    """A model that sees, as a whole and as ours."""

    model: Any
    directory: Path
    prompts: list[ImagePrompt]


@pytest.fixture(scope="module")
def seeing(checkpoint: Callable[..., Path]) -> Callable[[str], Seeing]:
    made: dict[str, Seeing] = {}

    def make(name: str) -> Seeing:
        if name not in made:
            directory = checkpoint(name)
            model: Any = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32)
            generator = torch.Generator().manual_seed(5)
            texts = [[draw(length, generator) for length in lengths] for lengths in TEXTS]
            texts[2][:2] = texts[1][:2]
            drawn = [image_prompt(model, own, sizes, 7) for own, sizes in zip(texts, SIZES, strict=True)]
            made[name] = Seeing(model, directory, drawn)
        return made[name]

    return make


def draw(length: int, generator: torch.Generator) -> list[int]:
    return torch.randint(8, 370, (length,), generator=generator).tolist()


def image_spec(key: int, prompt: ImagePrompt, cache: KVCacheManager) -> SequenceSpec:
    spec = SequenceSpec(key=key, prompt=np.array(prompt.tokens, np.int32), max_tokens=NEW, embedded=prompt.spans)
    return msgspec.structs.replace(spec, hashes=cache.digest(spec.identities, spec.extras))


class ImageBench(Bench):
    """A `Bench` whose requests have the spans of the prompts with their numbers."""

    asked: list[ImagePrompt]

    def request(self, cache: KVCacheManager, key: int, prompt: list[int], sampling: ResolvedSampling) -> SequenceSpec:
        return image_spec(key, self.asked[key], cache)

    @torch.inference_mode()
    def logits(self, prompt: ImagePrompt, cuts: Sequence[int] = ()) -> Tensor:
        """Our logits at all places, in steps that end at `cuts`."""
        runner, rank = self.executor.rank.runner, self.executor.rank
        groups = rank.groups.total
        count = max(BLOCKS, -(-len(prompt.tokens) // BLOCK))
        self.executor.allocate(count * groups, 0, 0)
        parts = []
        for number, (start, end) in enumerate(zip((0, *cuts), (*cuts, len(prompt.tokens)), strict=True)):
            column = [np.array([value], np.int32) for value in (0, start, end - start)]
            new = [NewSequence(0, np.array(prompt.tokens, np.int32), 0, ResolvedSampling(), embedded=prompt.spans)]
            blocks = np.array([(0, block) for block in range(count * groups)], np.int32).reshape(-1, 2)
            appended = blocks if not number else blocks[:0]
            plan = StepPlan(
                number, *column, np.array([True]), np.ones(1, np.int32), appended, () if number else tuple(new), NO_ROWS
            )
            rank.rows.apply_plan(plan)
            inputs = rank.rows.gather_inputs(plan)
            states, _ = runner.computer.stores.begin_step(inputs.batch)
            attention = runner.computer.attention.begin_step(inputs.batch)
            context = StepContext(inputs.batch, attention, states=states)
            logits = runner.computer.decoder.compute_logits(context, (torch.arange(end - start),))
            assert logits is not None
            parts.append(next(logits).clone())
        return torch.cat(parts)


CAUSAL = ("qwen2-vl", "glm4v", "glm4v-moe", "qwen3-vl", "qwen3.5-image", "mistral3", "gemma4-small-image")
BOTH_WAYS = ("gemma3-image", "gemma4-image")


def more(*names: str, backend: str = "native") -> list[Any]:
    """Cases that are proofs: each has a like one in the suite."""
    return [pytest.param(name, backend, marks=pytest.mark.proof) for name in names]


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *((name, "native") for name in (*CAUSAL, *BOTH_WAYS)),
        ("qwen3-vl", "torch"),
        ("gemma4-image", "torch"),
        ("gemma3-image", "reference"),
        *more("qwen2.5-vl", "gemma3-image", backend="torch"),
        *more("qwen3-vl", backend="reference"),
        *more("qwen2.5-vl", "llava", "glm-ocr", "lfm2-vl", "ministral3-image", "qwen3-vl-moe"),
    ],
)
def test_logits_are_those_from_pixels(name: str, backend: str, seeing: Callable[[str], Seeing]) -> None:
    """In one step, and in steps that end within images and right behind them, where places see what is before alone;
    kernels then have the same bits."""
    model, directory, prompts = seeing(name)
    bench = ImageBench(directory, backend)
    for prompt in prompts[:2]:
        right = whole_logits(model, prompt)
        whole = bench.logits(prompt)
        assert (whole - right).abs().max() < LARGEST_ERROR * right.std()
        first, second = prompt.spans
        inside = [] if first.bidirectional else [first.start + 1, first.end - 2, second.start + 3]
        cut = bench.logits(prompt, sorted({*inside, first.start, first.end, second.end}))
        assert (cut - right).abs().max() < LARGEST_ERROR * right.std()
        assert backend != "native" or torch.equal(whole, cut)
    bench.executor.close()


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("qwen3-vl", "native"),
        ("gemma3-image", "native"),
        *more("qwen2-vl", "qwen3.5-image", "gemma4-image", "glm4v", "glm4v-moe", "lfm2-vl"),
        *more("qwen3-vl", backend="torch"),
    ],
)
def test_greedy_tokens_are_those_from_pixels(name: str, backend: str, seeing: Callable[[str], Seeing]) -> None:
    model, directory, prompts = seeing(name)
    bench = ImageBench(directory, backend)
    # Each thrice: the second finds the first's blocks, where there are any to be found.
    bench.asked = prompts * 3
    for setting in SETTINGS.values() if backend == "native" else [Setting(chunk=29, prefix=True, rows=2)]:
        result, events = bench.run(setting, asked=[prompt.tokens for prompt in bench.asked])
        for key, prompt in enumerate(prompts):
            tokens = result.tokens[key]
            said = tokens[: [*tokens, PLACEHOLDER].index(PLACEHOLDER) + 1]  # transformers takes it for an image's place
            logits = whole_logits(model, prompt, said[:-1])[len(prompt.tokens) - 1 :]
            assert said == logits.argmax(-1).tolist(), (setting, key)
            assert [tokens] * 2 == [result.tokens[key + times * len(prompts)] for times in (1, 2)], (setting, key)
        found = sum(result.cached[key] for key in range(len(prompts), len(bench.asked)))
        assert setting.tight or not setting.prefix or found > 4 * BLOCK, setting
        assert events.unfinished_chunks or setting.chunk > 256
    bench.executor.close()


@pytest.mark.parametrize(
    "name", ["qwen3-vl", *(pytest.param(name, marks=pytest.mark.proof) for name in ("gemma3-image", "qwen3.5-image"))]
)
def test_a_cache_of_int8_holds_images_as_it_holds_texts(name: str, seeing: Callable[[str], Seeing]) -> None:
    """Logits are near, and the tokens are the same whether images are found again, cut or computed anew."""
    model, directory, prompts = seeing(name)
    cache = CacheConfig(block_size=BLOCK, layer_groups=True, dtype="int8")
    bench = ImageBench(directory, "native", how={"cache": cache})
    for prompt in prompts[:2]:
        right = whole_logits(model, prompt)
        assert (bench.logits(prompt) - right).square().mean().sqrt() < 0.05 * right.std()
    bench.asked = prompts * 3
    plain, *others = (bench.run(setting, asked=[prompt.tokens for prompt in bench.asked])[0] for setting in WITH_PLAIN)
    for other in others:
        assert other.tokens == plain.tokens
    bench.executor.close()


@pytest.mark.parametrize("name", ["qwen3-vl", "gemma3-image"])
def test_layers_called_one_by_one_say_what_their_program_says(
    name: str, seeing: Callable[[str], Seeing], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, directory, prompts = seeing(name)
    bench = ImageBench(directory, "native")
    recorded = bench.logits(prompts[0])
    bench.executor.close()
    monkeypatch.setattr(NativeDecoder, "_trace", lambda self, attention: None)
    bench = ImageBench(directory, "native")
    assert torch.equal(bench.logits(prompts[0]), recorded)
    bench.executor.close()


def served(executor: Any, prompts: Sequence[ImagePrompt], stages: int = 1, speculation: Any = None) -> LoopResult:
    """What is said to the prompts, in chunks of few tokens."""
    executor.allocate(64)
    cache = KVCacheManager(64, BLOCK, prefix_caching=True)
    config = SchedulerConfig(
        max_num_seqs=4,
        max_num_batched_tokens=37,
        max_model_len=256,
        ahead=stages - 1,
        in_flight_per_sequence=1 if stages > 1 else None,
    )
    specs = [image_spec(key, prompt, cache) for key, prompt in enumerate(prompts)]
    return run_to_end(Scheduler(config, cache, speculation=speculation), executor, specs)


def test_ranks_stages_and_drafts_change_no_token(seeing: Callable[[str], Seeing], threads: ModuleType) -> None:
    """A stage may begin at a layer that takes something of the tower's."""
    _, directory, prompts = seeing("qwen3-vl")
    bench = ImageBench(directory, "native")
    right = served(bench.executor, prompts)
    answers = [(prompt.tokens, right.tokens[key]) for key, prompt in enumerate(prompts)]
    drafted = served(bench.executor, prompts, speculation=Speculation({"half right": HalfRight(answers)}, 5, 384))
    bench.executor.close()
    assert drafted.tokens == right.tokens
    assert drafted.steps < right.steps
    config = EngineConfig(model=str(directory), device="cpu", cache=CacheConfig(block_size=BLOCK))
    for layout in ((2,), (1, 2)):
        with threads.ranks(config, threads.Layout(*layout)) as executor:
            assert served(executor, prompts, stages=(*layout, 1)[1]).tokens == right.tokens, layout
