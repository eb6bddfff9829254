"""Tokens are drawn from exactly the distribution that was asked for, and repeatably."""

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from charonia.engine.cpu import library
from charonia.engine.step_batch import SAMPLING_DTYPE, as_signed64
from charonia.engine.worker.model_runner import verify_samples
from charonia.engine.worker.sampler import counter_uniform, sample
from charonia.scheduler.plan import StepPlan

DRAWS = 6_000


@pytest.fixture(autouse=True, params=["kernels", "torch"])
def way(request: pytest.FixtureRequest) -> Iterator[None]:
    """What chooses here, and what chooses on other devices."""
    if request.param == "kernels":
        yield
        return
    with patch.object(library, "level", lambda: None):
        yield


def choices(rows: int, **values: Any) -> np.ndarray:
    """`rows` rows with equal numbers, at positions 0, 1, ..."""
    made = np.zeros(rows, dtype=SAMPLING_DTYPE)
    made["temperature"], made["top_p"] = 1.0, 1.0
    made["position"] = np.arange(rows)
    for name, value in values.items():
        made[name] = value
    return made


def expected(
    logits: torch.Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> torch.Tensor:
    """The distribution by the book: temperature, the top_k likeliest, the fewest of those that reach top_p, min-p."""
    probabilities, ids = (logits.double() / temperature).softmax(-1).sort(descending=True)
    if top_k:
        probabilities[top_k:] = 0
    probabilities /= probabilities.sum()
    probabilities[probabilities.cumsum(-1) - probabilities >= top_p] = 0
    probabilities[probabilities < min_p * probabilities[0]] = 0
    return torch.zeros_like(probabilities).scatter(-1, ids, probabilities / probabilities.sum())


def assert_distributed(tokens: torch.Tensor, probabilities: torch.Tensor) -> None:
    """Chi-squared over the tokens expected at least five times; five standard deviations are allowed."""
    counts = torch.bincount(tokens, minlength=len(probabilities)).double()
    assert counts[probabilities == 0].sum() == 0
    wanted = probabilities * len(tokens)
    large = wanted >= 5
    statistic = ((counts - wanted)[large] ** 2 / wanted[large]).sum().item()
    freedom = int(large.sum()) - 1
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5 + 5


def logits(vocab: int, spread: float, seed: int = 0) -> torch.Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * spread


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 5},
        {"top_p": 0.5},
        {"top_p": 0.95},
        {"top_k": 20, "top_p": 0.8, "temperature": 1.5},
        {"top_k": 300},
        {"top_k": 300, "top_p": 0.9},
        {"min_p": 0.1},
        {"min_p": 0.02, "temperature": 2.0},
        {"min_p": 0.3, "top_k": 300, "top_p": 0.9},
    ],
    ids=str,
)
@pytest.mark.parametrize(("vocab", "spread"), [(50, 1.0), (700, 0.5)], ids=["peaked", "flat"])
def test_distribution(asked: dict[str, Any], vocab: int, spread: float) -> None:
    row = logits(vocab, spread)
    tokens = sample(row.expand(DRAWS, -1), choices(DRAWS, seed=7, **asked))
    assert_distributed(tokens, expected(row, **asked))


def test_rows_choose_by_their_own_numbers() -> None:
    many = torch.stack([logits(400, 2.0, seed) for seed in range(6)])
    mixed = choices(6, seed=np.arange(6))
    mixed["temperature"] = [0, 1, 0.7, 1, 1, 2]
    mixed["top_k"] = [0, 0, 10, 1, 0, 300]
    mixed["top_p"] = [1, 1, 1, 1, 0.6, 0.9]
    together = sample(many, mixed)
    alone = [sample(many[i : i + 1], mixed[i : i + 1]).item() for i in range(6)]
    assert together.tolist() == alone
    assert together[[0, 3]].tolist() == many[[0, 3]].argmax(-1).tolist()


@pytest.mark.parametrize("asked", [{"temperature": 0}, {"temperature": 1e-9}, {"top_k": 1}, {"top_p": 1e-6}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_in_every_disguise(asked: dict[str, Any], dtype: torch.dtype) -> None:
    many = torch.stack([logits(300, 5.0, seed) for seed in range(20)]).to(dtype)
    assert torch.equal(sample(many, choices(20, **asked)), many.float().argmax(-1))


def test_a_small_temperature_does_not_overflow() -> None:
    many = logits(100, 100.0).expand(8, -1)
    assert set(sample(many, choices(8, temperature=2e-5)).tolist()) == {int(many[0].argmax())}


def test_impossible_tokens_are_never_chosen() -> None:
    row = torch.full((10,), -torch.inf)
    row[[3, 8]] = 0.0
    for asked in ({}, {"top_k": 5}, {"top_p": 0.9999}):
        assert set(sample(row.expand(1000, -1), choices(1000, **asked)).tolist()) == {3, 8}


@pytest.mark.parametrize("asked", [{}, {"top_k": 4}, {"top_p": 0.5}, {"temperature": 0}], ids=str)
def test_a_model_that_overflows_still_gives_tokens(asked: dict[str, Any]) -> None:
    tokens = sample(torch.full((3, 50), torch.nan), choices(3, **asked))
    assert ((tokens >= 0) & (tokens < 50)).all()


@pytest.mark.parametrize("asked", [{"temperature": np.inf}, {"top_p": 0}, {"top_p": 1e-45}], ids=str)
def test_numbers_at_the_edge_of_single_precision(asked: dict[str, Any]) -> None:
    tokens = sample(logits(50, 1.0).expand(100, -1), choices(100, **asked))
    assert ((tokens >= 0) & (tokens < 50)).all()


def test_numbers_are_uniform_and_repeat() -> None:
    positions = torch.arange(100_000)
    seeds, zeros = torch.full_like(positions, 42), torch.zeros_like(positions)
    drawn = counter_uniform(seeds, zeros, positions)
    assert torch.equal(drawn, counter_uniform(seeds, zeros, positions))
    assert drawn.min() > 0
    assert drawn.max() < 1
    assert_distributed((drawn * 100).long(), torch.full((100,), 0.01, dtype=torch.float64))


@pytest.mark.parametrize("field", ["seed", "choice", "position"])
def test_neighbouring_counters_are_independent(field: str) -> None:
    near = {name: torch.zeros(50_000, dtype=torch.int64) for name in ("seed", "choice", "position")}
    near[field] = torch.arange(50_000)
    drawn = counter_uniform(near["seed"], near["choice"], near["position"])
    correlation = torch.corrcoef(torch.stack([drawn[1:], drawn[:-1]]))[0, 1]
    assert abs(correlation) < 0.02
    assert drawn.mean() == pytest.approx(0.5, abs=0.01)


def test_the_numbers_are_splitmix64s() -> None:
    """Against the same function in Python's unbounded integers: the int64 arithmetic must wrap, not saturate."""

    def mix(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    golden = 0x9E3779B97F4A7C15
    cases = [(0, 0, 0), (1, 2, 3), (2**64 - 1, 7, 2047), (2**63, 0, 1)]
    for seed, choice, position in cases:
        state = mix((seed + golden) % 2**64)
        state = mix((state + choice * golden) % 2**64)
        state = mix((state + position * golden) % 2**64)
        drawn = counter_uniform(*(torch.tensor([as_signed64(number)]) for number in (seed, choice, position)))
        assert drawn.item() == ((state >> 12) + 0.5) * 2.0**-52


@pytest.mark.parametrize("draws", [DRAWS, pytest.param(100_000, marks=pytest.mark.proof)], ids=["few", "many"])
@pytest.mark.parametrize(
    "asked",
    [{"temperature": 0.6}, {"temperature": 1.5}, {"top_p": 0.8}, {"temperature": 1.5, "top_p": 0.5, "top_k": 9}],
    ids=str,
)
def test_tokens_that_drafts_were_verified_against_have_the_same_distribution(asked: dict[str, Any], draws: int) -> None:
    """At each place, among the sequences whose drafts before it are what was drawn: for those alone it counts."""
    logits = torch.randn(3, 24, generator=torch.Generator().manual_seed(6)) * 1.5
    right = [expected(each, **asked) for each in logits]
    drafts = torch.stack(right[:2]).topk(2).indices[:, 1]  # the second likeliest: some are accepted, and some are not
    sampling = choices(3 * draws, **asked, seed=np.arange(draws).repeat(3), position=np.tile([7, 8, 9], draws))
    tokens = torch.cat(
        [sample(logits.repeat(len(part) // 3, 1), part) for part in np.array_split(sampling, draws // 2000 or 1)]
    )
    rows, ones = np.arange(draws, dtype=np.int32), np.ones(draws, np.int32)
    plan = StepPlan(0, rows, 6 * ones, 3 * ones, ones.astype(bool), 3 * ones, np.zeros((0, 2), np.int32), (), rows[:0])
    plan = plan._replace(drafts=2 * ones, drafted=np.tile(drafts.numpy(), draws).astype(np.int32))
    verified = verify_samples(plan, tokens.numpy().astype(np.int32))
    assert set(verified.offsets.tolist()) == {7}
    kept = torch.from_numpy(verified.kept).view(draws, 3)
    for place, wanted in enumerate(right):
        assert torch.equal(kept[:, place], (tokens.view(draws, 3)[:, :place] == drafts[:place]).all(1))
        came = tokens.view(draws, 3)[:, place][kept[:, place]]
        assert len(came) > draws / 100
        assert_distributed(came, wanted)
    assert kept.sum(1).tolist() == verified.counts.tolist()
