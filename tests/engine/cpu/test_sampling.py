"""Tokens drawn in C at every level: torch's tokens, or those of the definition where torch leaves them open."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from charonia.core.errors import Internal
from charonia.engine.cpu import library
from charonia.engine.cpu.sampling import rank_tokens
from charonia.engine.step_batch import SAMPLING_DTYPE, SamplingArray
from charonia.engine.worker.sampler import counter_uniform, sample

pytestmark = pytest.mark.skipif(library.level() is None, reason="no C extension here")


def choices(rows: int, **values: Any) -> SamplingArray:
    made = np.zeros(rows, dtype=SAMPLING_DTYPE)
    made["temperature"], made["top_p"], made["position"] = 1, 1, np.arange(rows)
    for name, value in values.items():
        made[name] = value
    return made


def any_choices(rows: int, seed: int) -> SamplingArray:
    """Every filter alone and with others, at its edges too."""
    pick = np.random.default_rng(seed)
    return choices(
        rows,
        temperature=pick.choice([0, 0.01, 0.5, 1, 3], rows),
        top_k=pick.choice([0, 0, 1, 3, 50, 400, 2**40], rows),
        top_p=pick.choice([0, 0.1, 0.5, 0.95, 1, 1], rows),
        min_p=pick.choice([0, 0, 0.05, 0.5, 1], rows),
        seed=pick.integers(-(2**63), 2**63 - 1, rows),
        choice=pick.integers(0, 9, rows),
        position=pick.integers(0, 2**40, rows),
    )


def some_logits(rows: int, n: int) -> Tensor:
    generator = torch.Generator().manual_seed(n)
    spread = torch.tensor([0.001, 0.3, 1, 3, 30]).repeat(rows)[:rows, None]
    return torch.randn(rows, n, generator=generator) * spread + 5


def by_torch(logits: Tensor, chosen: SamplingArray) -> Tensor:
    with patch.object(library, "level", lambda: None):
        return sample(logits, chosen)


def uniform(chosen: SamplingArray) -> Tensor:
    return counter_uniform(*(torch.from_numpy(chosen[name].copy()) for name in ("seed", "choice", "position")))


def distance(logits: Tensor, chosen: SamplingArray) -> float:
    """How far a row's number is from the nearest one at which the token changes, by doubles."""
    kept = ((logits.double() - logits.max()) / float(chosen["temperature"])).exp()
    if chosen["top_k"] > 0 or chosen["top_p"] < 1 or chosen["min_p"] > 0:
        kept = kept.sort(descending=True).values[: int(chosen["top_k"]) or None]
        before = (kept.cumsum(-1) - kept) / kept.sum()
        kept = kept[(before < float(chosen["top_p"])) & (kept >= float(chosen["min_p"]))]
    return float((kept.cumsum(-1) / kept.sum() - uniform(chosen[None])).abs().min())


def test_a_library_with_another_layout_of_choices_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = library._open_library()
    assert opened is not None
    library._check_sampling_layout(opened)
    monkeypatch.setattr(library, "SAMPLING_DTYPE", np.dtype([("temperature", np.float32)]))
    with pytest.raises(Internal, match="build it again"):
        library._check_sampling_layout(opened)


def test_the_numbers_are_those_of_random_py() -> None:
    chosen = any_choices(20_000, 1)
    drawn = torch.empty(len(chosen), dtype=torch.float64)
    library.bind_function("charonia_uniform")(chosen.ctypes.data, drawn.data_ptr(), len(chosen))
    assert torch.equal(drawn, uniform(chosen))


@pytest.mark.parametrize(("rows", "n"), [(20, 1), (300, 7), (400, 16), (400, 50), (400, 333), (400, 2100), (100, 9001)])
def test_the_tokens_are_torchs(level: str, rows: int, n: int) -> None:
    logits, chosen = some_logits(rows, n), any_choices(rows, n)
    ours, torchs = sample(logits, chosen), by_torch(logits, chosen)
    differ = (ours != torchs).nonzero().flatten().tolist()
    assert len(differ) <= rows / 100
    for row in differ:  # torch sorts equals in no order
        assert logits[row, ours[row]] == logits[row, torchs[row]] or distance(logits[row], chosen[row]) < 1e-5


def test_more_tokens_than_chunks_of_the_usual_size_hold(level: str) -> None:
    logits, chosen = some_logits(1, 600_001).expand(40, -1), choices(40, seed=3)
    near = (sample(logits, chosen) - by_torch(logits, chosen)).abs() < 100  # single precision is that far off here
    assert near.all()


def test_bfloat16_is_what_it_widens_to(level: str) -> None:
    logits, chosen = some_logits(300, 1237).bfloat16(), any_choices(300, 5)
    assert torch.equal(sample(logits, chosen), sample(logits.float(), chosen))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_chooses_alone_as_in_company(level: str, dtype: torch.dtype) -> None:
    logits, chosen = some_logits(64, 3001).to(dtype), any_choices(64, 2)
    together = sample(logits, chosen)
    alone = [sample(logits[row : row + 1], chosen[row : row + 1]).item() for row in range(64)]
    assert together.tolist() == alone
    wide = torch.full((64, 3500), torch.inf, dtype=dtype)
    wide[:, 200:3201] = logits
    assert torch.equal(sample(wide[::2, 200:3201], chosen[::2]), together[::2])
    assert torch.equal(sample(logits.T.contiguous().T, chosen), together)


@pytest.mark.skipif(library.level() not in library.LEVELS[2:], reason="one level with fused products here")
def test_levels_with_fused_products_agree(at_level: Callable[[str], AbstractContextManager[None]]) -> None:
    logits, chosen = some_logits(400, 3001), any_choices(400, 4)
    best = sample(logits, chosen)
    with at_level(library.LEVELS[1]):
        assert torch.equal(sample(logits, chosen), best)


def test_equals_stand_in_the_order_of_tokens(level: str) -> None:
    logits, share = torch.full((500, 3000), 2.5), uniform(choices(500))
    assert torch.equal(sample(logits, choices(500)), (share * 3000).long())
    assert torch.equal(sample(logits, choices(500, top_k=7)), (share * 7).long())
    assert torch.equal(sample(logits, choices(500, top_p=0.5)), (share * 1500).long())
    assert torch.equal(sample(logits, choices(500, top_p=0.5, top_k=10)), (share * 5).long())
    assert torch.equal(sample(logits, choices(500, min_p=1)), (share * 3000).long())


@pytest.mark.parametrize("asked", [{}, {"top_k": 5}, {"top_k": 40}, {"top_p": 0.99}, {"min_p": 0.1}], ids=str)
def test_what_is_banned_is_never_chosen(level: str, asked: dict[str, Any]) -> None:
    logits = torch.full((300, 50), -torch.inf)
    logits[:, [3, 48]] = 0.0
    for temperature in (1e-4, 1, np.inf):
        assert set(sample(logits, choices(300, temperature=temperature, **asked)).tolist()) == {3, 48}
    logits[:, 3] = -torch.inf
    assert set(sample(logits, choices(300, **asked)).tolist()) == {48}


@pytest.mark.parametrize("asked", [{}, {"top_k": 400}, {"top_p": 0.9}, {"min_p": 0.01}], ids=str)
def test_huge_logits_and_tiny_temperatures(level: str, asked: dict[str, Any]) -> None:
    logits = some_logits(5, 700).expand(5, -1)
    wanted = logits.argmax(-1)
    assert torch.equal(sample(logits * 1e36, choices(5, **asked)), wanted)
    assert torch.equal(sample(logits[3:] - 1e3, choices(2, temperature=2e-5, **asked)), wanted[3:])


@pytest.mark.parametrize("asked", [{}, {"top_k": 4}, {"top_p": 0.5}, {"temperature": 0}, {"min_p": 0.5}], ids=str)
@pytest.mark.parametrize("number", [torch.nan, -torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_gives_a_token_that_exists(level: str, number: float, asked: dict[str, Any]) -> None:
    one = torch.zeros(4, 50)
    one[:, 20] = number
    for logits in (one, torch.full((4, 50), number), one.bfloat16()):
        tokens = sample(logits, choices(4, **asked))
        assert ((tokens >= 0) & (tokens < 50)).all()
    if number == torch.inf:
        assert set(sample(one, choices(4, **asked)).tolist()) == {20}


@pytest.mark.parametrize("asked", [{}, {"top_p": 0.999999}], ids=str)
def test_shares_are_probabilities(level: str, asked: dict[str, Any]) -> None:
    logits, draws = some_logits(5, 40)[2], 20_000
    counts = torch.bincount(sample(logits.expand(draws, -1), choices(draws, seed=11, **asked)), minlength=40)
    wanted = logits.double().softmax(-1) * draws
    assert ((counts - wanted).abs() < 5 * wanted.sqrt() + 1).all()


def test_no_rows_have_no_tokens(level: str) -> None:
    assert sample(torch.empty(0, 5), choices(0)).tolist() == []


@pytest.mark.parametrize("n", [1, 7, 2048, 51_865])
def test_normalisers_and_ranks(level: str, n: int) -> None:
    logits = some_logits(5, n)
    tokens = torch.tensor([0, n // 2, n - 1, n // 3, int(logits[4].argmax())])
    normalisers, ranks = rank_tokens(logits, tokens)
    own = logits.gather(-1, tokens[:, None])
    torch.testing.assert_close(normalisers, logits.double().logsumexp(-1), atol=1e-5, rtol=0)
    assert ranks.tolist() == ((logits > own).sum(-1) + 1).tolist()
    for row in range(5):
        alone = rank_tokens(logits[row : row + 1], tokens[row : row + 1])
        assert [column.item() for column in alone] == [column[row].item() for column in (normalisers, ranks)]


def test_normalisers_of_what_is_no_number_are_none(level: str) -> None:
    logits = torch.tensor([[0.0, torch.nan, 1.0], [torch.inf, 0.0, 1.0], [0.0, -torch.inf, 1.0]])
    normalisers, _ = rank_tokens(logits, torch.tensor([0, 0, 1]))
    assert normalisers[:2].isnan().all()
    assert normalisers[2].isfinite()
