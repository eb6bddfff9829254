"""What the model gave a token does not depend on who else asks."""

from collections.abc import Iterator

import pytest
import torch

from charonia.engine.worker.logprobs import WantedLogprobs, measure_logprobs, sampled_logprobs

VOCAB = 151_936
"""So long that torch shares a sum among its threads."""


@pytest.fixture
def threads() -> Iterator[None]:
    """As many as make a difference, whatever the machine has."""
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
def test_a_row_that_is_alone_is_measured_as_in_company() -> None:
    logits = 3 * torch.randn(60, VOCAB, generator=torch.Generator().manual_seed(0))
    tokens = torch.arange(60)
    together = measure_logprobs(logits, tokens, 2)
    for row in range(60):
        alone = measure_logprobs(logits[row : row + 1], tokens[row : row + 1], 2)
        assert [column.tolist() for column in alone] == [column[row : row + 1].tolist() for column in together]


def test_a_sampled_token_has_its_rank_whatever_is_named_beside_it() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0], [1.0, 1.0, 0.0, 5.0]])
    first, none, second = sampled_logprobs(
        logits, torch.tensor([2, 3]), {0: WantedLogprobs(1), 2: WantedLogprobs(2, (2, 3))}, 3
    )
    assert none is None
    assert first is not None
    assert second is not None
    assert (first.ids, first.rank, second.ids[0], second.rank) == ([1], 3, 3, 1)
    assert second.ids[2:] == [2, 3]
    assert second.values == pytest.approx(logits[1].log_softmax(-1)[second.ids].tolist(), rel=1e-5)
