"""Tokens drawn on the interpreter beside those of the CPU's kernels: the same ones, also among equals."""

from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from charonia.engine.cpu import library
from charonia.engine.step_batch import SAMPLING_DTYPE
from charonia.engine.worker.sampler import GREEDY_BELOW, choose_sampler, sample

DTYPES = (torch.float32, torch.float16)


def choices(*rows: dict[str, Any]) -> np.ndarray:
    made = np.zeros(len(rows), SAMPLING_DTYPE)
    made["temperature"], made["top_p"], made["position"] = 1.0, 1.0, np.arange(len(rows))
    for place, values in enumerate(rows):
        for name, value in values.items():
            made[name][place] = value
    return made


ROWS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from((0.0, 0.3, 1.7)),
        "top_k": st.sampled_from((1, 2, 17, 900, 5000)),
        "top_p": st.floats(0.05, 0.999),
        "min_p": st.sampled_from((0.5, 0.01, 1.0)),
        "seed": st.integers(-(2**63), 2**63 - 1),
        "choice": st.integers(0, 3),
        "position": st.integers(0, 2**40),
    },
)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(ROWS, min_size=1, max_size=3),
    st.sampled_from((1, 3, 1000, 1024, 1030)),
    st.sampled_from(DTYPES),
    st.sampled_from((0.2, 3.0, 40.0)),
    st.booleans(),
)
def test_the_same_tokens(
    kernels: dict[str, ModuleType],
    rows: list[dict[str, Any]],
    size: int,
    dtype: torch.dtype,
    spread: float,
    equals: bool,
) -> None:
    if library.level() is None:
        pytest.skip("which of equal tokens comes first, only the kernels say")
    logits = torch.randn(len(rows), size, generator=torch.Generator().manual_seed(size)) * spread
    logits = (logits.round() if equals else logits).to(dtype)
    if size > 1:
        logits[:, size // 2] = -torch.inf
    asked = choices(*rows)
    found = kernels["sampling"].sample_rows(logits, asked)
    wanted = sample(logits.float(), asked)
    # A number that falls between two tokens may fall either way, for sums round differently.
    off = (found != wanted).nonzero().squeeze(-1).tolist()
    assert not off or spread > 1 or not equals
    assert all(abs(_rank(logits[at], found[at]) - _rank(logits[at], wanted[at])) <= 1 for at in off)


def _rank(logits: torch.Tensor, token: torch.Tensor) -> int:
    return int((logits > logits[token]).sum())


def test_rows_that_are_no_numbers_get_a_token(kernels: dict[str, ModuleType]) -> None:
    logits = torch.stack([torch.full((40,), torch.nan), torch.full((40,), -torch.inf), torch.full((40,), torch.inf)])
    asked = ({}, {"top_k": 3, "top_p": 0.5}, {"min_p": 0.1}, {"temperature": 0.0})
    for values in asked:
        with np.errstate(invalid="ignore"):  # of which numpy warns, and a GPU does not
            tokens = kernels["sampling"].sample_rows(logits, choices(values, values, values))
        assert ((tokens >= 0) & (tokens < 40)).all()


def test_the_threshold_of_greedy_rows_is_the_samplers(kernels: dict[str, ModuleType]) -> None:
    assert kernels["sampling"].GREEDY_BELOW == GREEDY_BELOW


def test_a_sampler_is_chosen_once(
    interpreted: None, kernels: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the environment as it is when a runner is built."""
    drawn = torch.tensor([5])
    monkeypatch.setattr(kernels["sampling"], "sample_rows", lambda logits, sampling: drawn)
    on_gpu, asked = choose_sampler(torch.device("cpu")), np.zeros(1, SAMPLING_DTYPE)
    monkeypatch.delenv(library.LEVEL_VARIABLE)
    assert choose_sampler(torch.device("cpu")) is sample
    assert on_gpu(torch.eye(9)[:1], asked) is drawn
    assert on_gpu(torch.eye(9)[3:4], None).tolist() == [3]
