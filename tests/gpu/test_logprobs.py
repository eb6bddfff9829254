"""Scores of prompts on a device, against the same on the CPU.

Also run on the CPU, so that the machines that have no GPU keep this file honest.
"""

import pytest
import torch

from charonia.core.logprobs import RankedLogprobs
from charonia.engine.worker import logprobs
from charonia.engine.worker.logprobs import PromptSpan, ScoredTokens

VOCAB = 500
SPANS = (PromptSpan(3, 1, 5, 2), PromptSpan(1, 9, 4, 20), PromptSpan(0, 2, 1, 0))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device(request.param)


def scores(device: torch.device, monkeypatch: pytest.MonkeyPatch, piece: int) -> dict[int, list[RankedLogprobs]]:
    monkeypatch.setattr(logprobs, "LOGITS_PIECE", piece)
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(13, VOCAB, generator=generator).to(device)
    tokens = torch.randint(0, VOCAB, (10,), generator=generator).to(device)
    places = torch.tensor([0, 1, 2, 3, 4, 7, 8, 9, 10, 12], device=device)
    scored = ScoredTokens(SPANS, tokens, places, None)
    found = scored.read(logits[each] for each in scored.pieces)
    assert [(row, each.start, each.end) for row, each in found] == [(3, 1, 6), (1, 9, 13), (0, 2, 3)]
    return {row: each.to_list() for row, each in found}


def test_scores_are_those_of_the_cpu(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = scores(torch.device("cpu"), monkeypatch, 64)
    for row, told in scores(device, monkeypatch, 4).items():
        for ours, theirs in zip(told, expected[row], strict=True):
            assert (ours.rank, ours.logprobs.ids) == (theirs.rank, theirs.logprobs.ids)
            said = [ours.logprobs.chosen, *ours.logprobs.values]
            assert said == pytest.approx([theirs.logprobs.chosen, *theirs.logprobs.values], abs=1e-5)
    assert [len(told[0].logprobs.ids) for told in expected.values()] == [2, 20, 0]
