"""One object, changed in place: what is read of it, piece by piece."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from charonia.core.errors import CharoniaError, Internal, Unavailable
from charonia.core.logprobs import Logprobs
from charonia.core.request import FinishReason
from charonia.core.resolved_sampling import LogitsParams, ResolvedSampling
from charonia.extras.trtllm.request import ResultDelta, ResultReader
from charonia.scheduler.sequence import SequenceSpec


def result() -> Any:
    output = SimpleNamespace(token_ids=[], logprobs=[], finish_reason=None, stop_reason=None)
    return SimpleNamespace(outputs=[output], finished=False)


def reader(stops: Sequence[int] = (), **sampling: Any) -> ResultReader:
    asked = ResolvedSampling(**sampling)
    return ResultReader(
        SequenceSpec(key=1, prompt=np.ones(1, np.int32), max_tokens=9, stop_token_ids=frozenset(stops), sampling=asked)
    )


def end(of: Any, reason: str | None, *tokens: int, stop_reason: int | None = None) -> None:
    of.outputs[0].token_ids += tokens
    of.outputs[0].finish_reason, of.outputs[0].stop_reason, of.finished = reason, stop_reason, True


def test_only_what_is_new_is_read_and_it_is_a_copy() -> None:
    reads, said = reader(), result()
    said.outputs[0].token_ids += [5, 6]
    news = reads.read_delta(said)
    assert news == ResultDelta([5, 6], [], None)
    said.outputs[0].token_ids += [7]
    assert reads.read_delta(said) == ResultDelta([7], [], None)
    assert reads.read_delta(said) == ResultDelta([], [], None)
    end(said, "length", 8)
    assert reads.read_delta(said) == ResultDelta([8], [], FinishReason.LENGTH)
    assert news.tokens == [5, 6]


def test_a_stop_token_is_the_last_one_wherever_it_was_left() -> None:
    for tokens, stop_reason in [((5, 9), 9), ((5, 9), None), ((5,), 9), ((5,), None)]:
        said = result()
        end(said, "stop", *tokens, stop_reason=stop_reason)
        assert reader([9]).read_delta(said) == ResultDelta([5, 9], [], FinishReason.STOP)
    said = result()
    end(said, "stop", 5, stop_reason=8)
    assert reader([7, 8]).read_delta(said).tokens == [5, 8]


def test_a_stop_token_that_only_we_look_for_cuts_the_rest() -> None:
    reads, said = reader([7, 9], logits=LogitsParams(min_tokens=2, stop_token_ids=(7, 9))), result()
    said.outputs[0].token_ids += [9, 9, 5]
    assert reads.read_delta(said) == ResultDelta([9, 9, 5], [], None), "the first two came too early"
    said.outputs[0].token_ids += [4, 9, 3]
    assert reads.read_delta(said) == ResultDelta([4, 9], [], FinishReason.STOP)
    assert not said.finished


def test_logprobs_of_each_token() -> None:
    reads, said = reader([9], logprobs=2), result()
    likely = {token: SimpleNamespace(logprob=-float(token)) for token in (3, 1, 2)}
    said.outputs[0].token_ids += [3, 8]
    said.outputs[0].logprobs += [likely, -0.5]
    assert reads.read_delta(said).logprobs == [Logprobs(-3.0, [1, 2], [-1.0, -2.0]), Logprobs(-0.5, [], [])]
    end(said, "stop")
    assert reads.read_delta(said) == ResultDelta([9], [Logprobs(0.0, [], [])], FinishReason.STOP)
    assert reader([9]).read_delta(said).logprobs == []
    said.outputs[0].token_ids[0] = 4
    with pytest.raises(Internal, match="no log-probability"):
        reader([9], logprobs=0).read_delta(said)


@pytest.mark.parametrize(
    ("reason", "error", "says"),
    [
        ("cancelled", Unavailable, "gave the request up"),
        ("not_finished", Internal, "'not_finished'"),
        (None, Internal, "'None'"),
        ("stop", Internal, "nothing was to stop"),
    ],
)
def test_ends_that_are_errors(reason: str | None, error: type[CharoniaError], says: str) -> None:
    said = result()
    end(said, reason, 5)
    with pytest.raises(error, match=says):
        reader().read_delta(said)


def test_an_error_that_is_not_raised_is_told() -> None:
    said = result()
    said.error, said.finished = "out of blocks", True
    with pytest.raises(Internal, match="TensorRT-LLM: out of blocks"):
        reader().read_delta(said)
