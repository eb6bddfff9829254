"""Tokens chosen under masks: only allowed ones, the same in C at every level as by torch."""

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from charonia.engine.cpu import library
from charonia.engine.cpu.sampling import forbid_tokens
from charonia.engine.step_batch import SAMPLING_DTYPE, SamplingArray
from charonia.engine.worker.sampler import sample
from charonia.scheduler.plan import MaskArray

pytestmark = pytest.mark.skipif(library.level() is None, reason="no C extension here")
SIZES = (1, 31, 32, 33, 384, 2100, 9001)


def some_masks(rows: int, n: int, share: float) -> tuple[MaskArray, Tensor]:
    """Masks as words and as booleans: whole words of either kind, and bits beyond the vocabulary set."""
    pick = np.random.default_rng(n)
    allowed = pick.random((rows, -(-n // 32) * 32)) < share
    allowed[:, : n // 64 * 32] = np.repeat(pick.random((rows, n // 64)) < share, 32, axis=1)
    allowed[:, pick.integers(n)] = True
    words = np.packbits(allowed, axis=1, bitorder="little").view("<i4").astype(np.int32)
    return words, torch.from_numpy(allowed[:, :n])


def some_logits(rows: int, n: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(rows, n, generator=torch.Generator().manual_seed(n)) * 4).to(dtype)


def choices(rows: int, **values: Any) -> SamplingArray:
    made = np.zeros(rows, SAMPLING_DTYPE)
    made["temperature"], made["top_p"], made["position"] = 1, 1, np.arange(rows)
    for name, value in values.items():
        made[name] = value
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n", SIZES)
def test_what_is_not_allowed_becomes_impossible_and_nothing_else_changes(n: int, dtype: torch.dtype) -> None:
    logits, (masks, allowed) = some_logits(40, n, dtype), some_masks(40, n, 0.5)
    ours, torchs = logits.clone(), logits.clone()
    forbid_tokens(ours, masks)
    with patch.object(library, "level", lambda: None):
        forbid_tokens(torchs, masks)
    assert torch.equal(ours, logits.masked_fill(~allowed, -torch.inf))
    assert torch.equal(ours, torchs)


@pytest.mark.parametrize("asked", [{"temperature": 0}, {}, {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.05}], ids=str)
@pytest.mark.parametrize("share", [0.01, 0.99])
def test_the_tokens_are_those_of_the_allowed_logits_alone(level: str, share: float, asked: dict[str, Any]) -> None:
    rows, n = 300, 3001
    logits, (masks, allowed) = some_logits(rows, n), some_masks(rows, n, share)
    chosen = choices(rows, **asked)
    masked = logits.clone()
    forbid_tokens(masked, masks)
    ours = sample(masked, chosen)
    assert allowed[torch.arange(rows), ours].all()
    with patch.object(library, "level", lambda: None):
        torchs = sample(logits.masked_fill(~allowed, -torch.inf), chosen)
    assert (ours != torchs).sum() <= rows / 100  # a number that falls on an edge, see test_sampling.py


def test_where_all_that_is_allowed_is_impossible_the_first_of_it_is_chosen(level: str) -> None:
    logits, (masks, allowed) = some_logits(50, 384), some_masks(50, 384, 0.3)
    logits[allowed] = -torch.inf
    forbid_tokens(logits, masks)
    for asked in ({"temperature": 0}, {}, {"top_k": 3}, {"top_p": 0.5}):
        assert torch.equal(sample(logits, choices(50, **asked)), allowed.int().argmax(-1))
