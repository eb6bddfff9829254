"""Rows that ask for penalties, bans and biases get them; their neighbours get what they would have got alone."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from charonia.bench.inline_loop import LoopResult, run_to_end
from charonia.core.resolved_sampling import LogitsParams, ResolvedSampling
from charonia.engine.config import CacheConfig, EngineConfig
from charonia.engine.worker.inline_executor import InlineExecutor
from charonia.engine.worker.logits_processors import prepare_logits_params, process_logits
from charonia.kvcache.manager import KVCacheManager
from charonia.scheduler.config import SchedulerConfig
from charonia.scheduler.scheduler import Scheduler
from charonia.scheduler.sequence import SequenceSpec

NEW = 24
BLOCK = 8
VOCAB = 384
LENGTHS = (3, 8, 17, 30)


def prompts() -> list[list[int]]:
    """Few different tokens, so that penalties have something to count."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(1, 40, (length,), generator=generator).tolist() for length in LENGTHS]


class Engine:
    """A loaded executor; every run has a scheduler and a cache of its own."""

    def __init__(self, checkpoint: Path) -> None:
        cache = CacheConfig(block_size=BLOCK)
        self.executor = InlineExecutor(EngineConfig(model=str(checkpoint), device="cpu", cache=cache))
        self.executor.load(lambda phase, fraction: None)

    def run(self, asked: list[ResolvedSampling], *, ahead: int = 0, tight: bool = False) -> LoopResult:
        """The prompts in one batch, each with its own wishes; `tight`: blocks for half of it."""
        needed = sum(-(-(length + NEW) // BLOCK) for length in LENGTHS)
        blocks = needed // 2 if tight else needed
        cache = KVCacheManager(blocks, BLOCK, prefix_caching=False)
        config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=32, max_model_len=256, ahead=ahead)
        self.executor.allocate(blocks)
        requests = [
            SequenceSpec(key=key, prompt=np.array(prompt, np.int32), max_tokens=NEW, sampling=sampling)
            for key, (prompt, sampling) in enumerate(zip(prompts(), asked, strict=True))
        ]
        return run_to_end(Scheduler(config, cache), self.executor, requests)


@pytest.fixture(scope="module")
def engine(checkpoint: Callable[..., Path]) -> Iterator[Engine]:
    made = Engine(checkpoint("llama"))
    yield made
    made.executor.close()


@pytest.fixture(scope="module")
def reference(checkpoint: Callable[..., Path]) -> Callable[..., list[list[int]]]:
    """What transformers generates greedily for each prompt with these options."""
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint("llama"), dtype=torch.float32)
    model.generation_config.eos_token_id = None

    known: dict[str, list[list[int]]] = {}

    @torch.inference_mode()
    def generate(**options: Any) -> list[list[int]]:
        if (key := repr(options)) in known:
            return known[key]
        made = []
        for prompt in prompts():
            ids = torch.tensor([prompt])
            fixed = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
            out = model.generate(ids, attention_mask=torch.ones_like(ids), **fixed, **options)
            made.append(out[0, len(prompt) :].tolist())
        return known.setdefault(key, made)

    return generate


def greedy(**wishes: Any) -> ResolvedSampling:
    return ResolvedSampling(logits=LogitsParams(**wishes))


def tokens(outcome: LoopResult) -> list[list[int]]:
    return [outcome.tokens[key] for key in range(len(LENGTHS))]


def words_of(texts: list[list[int]]) -> tuple[tuple[int, ...], ...]:
    """Bad words that each text begins with: one token, two, three; and one that begins in the prompt."""
    crossing = (prompts()[3][-1], texts[3][0])
    return ((texts[0][1],), tuple(texts[1][2:4]), tuple(texts[2][:3]), crossing)


@pytest.fixture(scope="module")
def wishes(reference: Callable[..., list[list[int]]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(ours, transformers') pairs that mean the same."""
    plain = reference()
    words = words_of(plain)
    stop = plain[0][2]
    return [
        ({"repetition_penalty": 1.7}, {"repetition_penalty": 1.7}),
        ({"repetition_penalty": 0.6}, {"repetition_penalty": 0.6}),
        ({"bad_words": words}, {"bad_words_ids": [list(word) for word in words]}),
        ({"logit_bias": ((plain[0][0], -3.0), (7, 2.5))}, {"sequence_bias": [[[plain[0][0]], -3.0], [[7], 2.5]]}),
        ({"min_tokens": 9, "stop_token_ids": (stop,)}, {"min_new_tokens": 9, "eos_token_id": stop}),
        (
            {"repetition_penalty": 1.3, "bad_words": words, "logit_bias": ((9, 1.5),)},
            {"repetition_penalty": 1.3, "bad_words_ids": [list(w) for w in words], "sequence_bias": [[[9], 1.5]]},
        ),
        (
            {"repetition_penalty": 1.3, "allowed_token_ids": (3, 5, 77)},
            {"repetition_penalty": 1.3, "prefix_allowed_tokens_fn": lambda batch, ids: [3, 5, 77]},
        ),
    ]


@pytest.mark.parametrize("number", range(7))
def test_each_wish_is_transformers(
    number: int,
    engine: Engine,
    reference: Callable[..., list[list[int]]],
    wishes: list[tuple[dict[str, Any], dict[str, Any]]],
) -> None:
    ours, theirs = wishes[number]
    expected = reference(**theirs)
    got = tokens(engine.run([greedy(**ours)] * len(LENGTHS)))
    # transformers stops at its eos, we were told of none.
    assert [text[: len(wanted)] for text, wanted in zip(got, expected, strict=True)] == expected
    assert expected != reference(), "a wish that changed nothing proves nothing"


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("ahead", "tight"), [(0, False), (1, False), (2, True), (0, True), (1, True)])
def test_wishes_mix_in_one_batch_whatever_happens(
    ahead: int,
    tight: bool,
    engine: Engine,
    reference: Callable[..., list[list[int]]],
    wishes: list[tuple[dict[str, Any], dict[str, Any]]],
) -> None:
    mixed = [wishes[5], ({}, {}), wishes[0], wishes[2]]
    asked = [greedy(**ours) if ours else ResolvedSampling() for ours, _ in mixed]
    expected = [reference(**theirs)[place] for place, (_, theirs) in enumerate(mixed)]
    assert tokens(engine.run(asked, ahead=ahead, tight=tight)) == expected


@pytest.mark.parametrize(("ahead", "tight"), [(1, False), (2, True)])
def test_output_penalties_survive_what_happens_to_a_row(ahead: int, tight: bool, engine: Engine) -> None:
    asked = [
        greedy(presence_penalty=1.5),
        ResolvedSampling(1.0, seed=3, logits=LogitsParams(frequency_penalty=0.8)),
        ResolvedSampling(1.0, seed=3, logits=LogitsParams(presence_penalty=-1.0, frequency_penalty=0.4)),
        ResolvedSampling(0.9, 20, 0.9, 7, min_p=0.05, logits=LogitsParams(allowed_token_ids=(4, 9, 200, 301))),
    ]
    assert tokens(engine.run(asked, ahead=ahead, tight=tight)) == tokens(engine.run(asked))


@pytest.mark.parametrize(
    "choice", [(0.0,), (1.0,), (2.0, 2), (2.0, 0, 0.5), (2.0, 0, 1.0, 3, 0, 0.2), (5.0, 300, 0.99)]
)
def test_only_what_is_allowed_is_chosen(choice: Any, engine: Engine) -> None:
    several, one = LogitsParams(allowed_token_ids=(4, 9, 200)), LogitsParams(allowed_token_ids=(8,))
    asked = [
        ResolvedSampling(*choice),
        *(ResolvedSampling(*choice)._replace(logits=each) for each in (several, one, several)),
    ]
    alone = [ResolvedSampling(*choice), *[ResolvedSampling()] * 3]
    plain, *rest = tokens(engine.run(asked))
    assert plain == tokens(engine.run(alone))[0]
    assert {*rest[0], *rest[2]} <= {4, 9, 200}
    assert rest[1] == [8] * NEW


def test_penalties_by_the_book() -> None:
    """Prompt 5 6 6, output 7 7 8, and ids beyond that are another row's leftovers."""
    row = torch.tensor([[0] * 8, [5, 6, 6, 7, 7, 8, 9, 9]], dtype=torch.int32)
    logits = torch.linspace(-1, 1, 10)

    def shaped(**wishes: Any) -> torch.Tensor:
        changed, params = logits.clone().unsqueeze(0), prepare_logits_params(3, LogitsParams(**wishes))
        process_logits(changed, [params], np.array([1]), np.array([6]), row)
        return changed[0]

    allowed = shaped(allowed_token_ids=(2, 4), logit_bias=((4, 1.0),))
    assert torch.equal(allowed[[2, 4]], logits[[2, 4]] + torch.tensor([0.0, 1.0]))
    assert allowed.isinf().sum() == 8
    none_left = shaped(allowed_token_ids=(2, 4), bad_words=((2,), (7, 8, 4)))
    assert none_left.isfinite().nonzero().flatten().tolist() == [2, 4] if none_left[4].isinf() else [4]
    seen = torch.zeros(10)
    seen[[5, 6, 7, 8]] = 1
    assert torch.equal(shaped(repetition_penalty=2.0), torch.where(seen > 0, logits / 2, logits))
    often = torch.tensor([0, 0, 0, 0, 0, 0, 0, 2, 1, 0.0])
    assert torch.allclose(shaped(frequency_penalty=0.5), logits - 0.5 * often)
    assert torch.allclose(shaped(presence_penalty=-0.5), logits + 0.5 * (often > 0))
    assert torch.equal(shaped(logit_bias=((2, 4.0),)), logits + 4 * torch.nn.functional.one_hot(torch.tensor(2), 10))
    banned = shaped(bad_words=((1,), (7, 8, 3), (8, 4), (6, 8, 0), (6, 6, 7, 7, 8, 9), (5, 5, 6, 6, 7, 7, 8, 2)))
    assert torch.isinf(banned).nonzero().flatten().tolist() == [1, 3, 4, 9]
    assert torch.isinf(shaped(min_tokens=4, stop_token_ids=(2, 3))).nonzero().flatten().tolist() == [2, 3]
    assert torch.equal(shaped(min_tokens=3, stop_token_ids=(2, 3)), logits)


def test_logprobs_are_transformers(engine: Engine, checkpoint: Callable[..., Path]) -> None:
    asked = [
        ResolvedSampling(logprobs=0),
        ResolvedSampling(),
        ResolvedSampling(1.0, seed=4, logprobs=20, logits=LogitsParams(repetition_penalty=1.5)),
        ResolvedSampling(0.7, 30, 0.9, logprobs=3),
    ]
    outcome = engine.run(asked, ahead=1)
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint("llama"), dtype=torch.float32)
    for key, (prompt, sampling) in enumerate(zip(prompts(), asked, strict=True)):
        reported = outcome.logprobs.get(key, [])
        assert len(reported) == (0 if sampling.logprobs is None else NEW)
        with torch.inference_mode():
            wanted = model(torch.tensor([prompt + outcome.tokens[key]])).logits[0].log_softmax(-1)
        for place, each in enumerate(reported):
            own = wanted[len(prompt) - 1 + place]
            values, ids = own.topk(sampling.logprobs or 0)
            assert each.chosen == pytest.approx(own[outcome.tokens[key][place]].item(), abs=1e-4)
            assert each.ids == ids.tolist()
            assert each.values == pytest.approx(values.tolist(), abs=1e-4)


def test_tokens_do_not_change_when_somebody_watches(engine: Engine) -> None:
    plain = [ResolvedSampling(1.0, seed=number) for number in range(4)]
    watched = [sampling._replace(logprobs=5) for sampling in plain]
    assert tokens(engine.run(plain)) == tokens(engine.run(watched))
