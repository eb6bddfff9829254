"""Drafters that know what comes, err as often as they are told, or know nothing."""

from pathlib import Path

import numpy as np
import pytest

from charonia.core.errors import InvalidArgument
from charonia.engine.config import SpeculationConfig
from charonia.engine.core.drafters import build_drafter
from charonia.engine.drafters.laboratory import OracleDrafter, Record, SyntheticDrafter, read_records
from charonia.engine.options import read_speculation_config
from charonia.scheduler.drafts.speculation import DraftRequest

RECORD = Record([1, 2], list(range(100, 130)))


def request(outputs: list[int], k: int = 4, prompt: tuple[int, ...] = (1, 2)) -> DraftRequest:
    return DraftRequest(np.array(prompt, np.int32), outputs, k, {})


def test_the_oracle_says_what_the_record_does() -> None:
    oracle = OracleDrafter([RECORD])
    assert oracle.propose([request([100, 101]), request([], 2), request([], prompt=(7,))]) == [
        [102, 103, 104, 105],
        [100, 101],
        [],
    ]
    assert oracle.propose([request(RECORD.output_tokens[:-1])]) == [[129]]


def test_a_synthetic_drafter_is_right_as_often_as_it_is_told() -> None:
    rates, tries = (0.8, 0.5, 0.5, 0.1), 4000
    drafter, right = SyntheticDrafter([RECORD], rates, seed=1), np.zeros(4)
    for _ in range(tries):
        [tokens] = drafter.propose([request([], 9)])
        right += np.cumprod(np.array(tokens) == RECORD.output_tokens[:4])
    assert np.abs(right / tries - rates).max() < 0.03


@pytest.mark.parametrize("rates", [(), (0.5, 0.6), (1.2,), (0.5, -0.1)])
def test_rates_that_cannot_be_are_refused(rates: tuple[float, ...]) -> None:
    with pytest.raises(InvalidArgument, match="synthetic_acceptance_rates"):
        SyntheticDrafter([RECORD], rates, seed=1)


def test_a_file_of_records_may_tell_more(tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    record.write_text('{"kind": "edit", "prompt": "a", "prompt_tokens": [1, 2], "output_tokens": [7, 8, 9, 10]}\n')
    config = read_speculation_config(f'{{"method": "oracle", "record": "{record}"}}')
    [tokens] = build_drafter(config, 4096).propose([request([], 3)])
    assert list(tokens) == [7, 8, 9]


def test_random_drafts_are_of_the_vocabulary() -> None:
    [tokens] = build_drafter(SpeculationConfig(method="random"), 50).propose([request([], 32)])
    assert len(tokens) == 32
    assert all(0 <= token < 50 for token in tokens)


def test_a_record_that_is_none_is_refused(tmp_path: Path) -> None:
    broken = tmp_path / "record.jsonl"
    broken.write_text('{"prompt_tokens": [1], "output_tokens": [2]}\n{"prompt_tokens": "text"}\n')
    with pytest.raises(InvalidArgument, match=r"record.jsonl, line 2"):
        read_records(broken)
    with pytest.raises(InvalidArgument, match=r"nothing.jsonl: No such file"):
        read_records(tmp_path / "nothing.jsonl")
    with pytest.raises(InvalidArgument, match="synthetic needs a record"):
        read_speculation_config('{"method": "synthetic"}')
