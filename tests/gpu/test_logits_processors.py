"""Penalties, biases, bans and logprobs on a device, against the same on the CPU.

Also run on the CPU, so that the machines that have no GPU keep this file honest.
"""

import numpy as np
import pytest
import torch

from charonia.core.resolved_sampling import LogitsParams
from charonia.engine.worker.logits_processors import prepare_logits_params, process_logits
from charonia.engine.worker.logprobs import WantedLogprobs, sampled_logprobs

ROWS, VOCAB, LENGTH, PROMPT = 6, 500, 40, 10
WISHES = (
    LogitsParams(repetition_penalty=1.3),
    LogitsParams(presence_penalty=0.7, frequency_penalty=0.3),
    LogitsParams(logit_bias=((3, 2.0), (4, -100.0)), min_tokens=50, stop_token_ids=(9, 11)),
    LogitsParams(repetition_penalty=0.8, frequency_penalty=-0.5, bad_words=((1,), (2, 3))),
)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device(request.param)


def logits() -> torch.Tensor:
    return torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(1))


def shaped(device: torch.device) -> torch.Tensor:
    tokens = torch.randint(0, 12, (ROWS, LENGTH), generator=torch.Generator().manual_seed(2), dtype=torch.int32)
    params = [prepare_logits_params(PROMPT, WISHES[row % len(WISHES)]) for row in range(ROWS)]
    changed = logits().to(device)
    process_logits(changed, params, np.arange(ROWS), np.array([10, 15, 20, 30, 39, 10]), tokens.to(device))
    return changed.cpu()


def test_logits_are_changed_as_on_the_cpu(device: torch.device) -> None:
    expected = shaped(torch.device("cpu"))
    assert torch.allclose(shaped(device), expected, atol=1e-5)
    assert torch.isinf(expected).any(-1).tolist() == [False, False, True, True, False, False]


def test_logprobs_are_those_of_the_cpu(device: torch.device) -> None:
    tokens = torch.arange(ROWS)
    wanted = {0: WantedLogprobs(0), 2: WantedLogprobs(20), 5: WantedLogprobs(3, (1, 2))}
    places = list(wanted)
    expected = sampled_logprobs(logits()[places], tokens[places], wanted, ROWS)
    told = sampled_logprobs(logits()[places].to(device), tokens[places].to(device), wanted, ROWS)
    assert [each is not None for each in told] == [True, False, True, False, False, True]
    for ours, theirs in zip(told, expected, strict=True):
        if ours is not None and theirs is not None:
            assert ours.ids == theirs.ids
            assert [ours.chosen, *ours.values] == pytest.approx([theirs.chosen, *theirs.values], abs=1e-5)
