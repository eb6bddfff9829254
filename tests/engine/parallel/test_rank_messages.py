"""Commands and reports survive the way to the ranks and back."""

from itertools import zip_longest
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from charonia.core.logprobs import Logprobs, PromptLogprobs
from charonia.core.resolved_sampling import LogitsParams, ResolvedSampling
from charonia.engine.parallel.rank_messages import (
    AllocateCache,
    ComputeStep,
    JoinRanks,
    LeaveRanks,
    PutPlaces,
    RankCommand,
    SampledBatch,
    StepComputed,
    decode_command,
    decode_report,
    encode_message,
)
from charonia.engine.worker.executor import CacheCopies, CachePlaces
from charonia.scheduler.encoders.encoder_rows import EmbeddedSpan, EncoderRows
from charonia.scheduler.plan import NewSequence, StepPlan, StepResult


def ints(*values: int) -> NDArray[np.int32]:
    return np.array(values, np.int32)


def assert_same(ours: Any, theirs: Any) -> None:
    """Arrays by type, shape and values, and all else by its parts."""
    if isinstance(theirs, np.ndarray):
        assert (ours.dtype, ours.shape, ours.tolist()) == (theirs.dtype, theirs.shape, theirs.tolist())
        assert ours.flags.writeable
    elif isinstance(theirs, tuple):
        assert type(ours) is type(theirs)
        for one, other in zip_longest(ours, theirs):
            assert_same(one, other)
    else:
        assert ours == theirs


SAMPLINGS = (
    ResolvedSampling(),
    ResolvedSampling(0.8, 40, 0.9, 2**64 - 1, 3, 0.05, None, 20, 5),
    ResolvedSampling(
        1.0,
        logits=LogitsParams(1.3, logit_bias=((5, -2.5),), bad_words=((1, 2), (3,)), min_tokens=4, stop_token_ids=(0,)),
    ),
)
SPANS = (
    EmbeddedSpan(3, 2, b"one", bytes(range(16)), "float32", (1, 1, 2), True),
    EmbeddedSpan(9, 1, b"other", b"\0\xff", "bfloat16", deepstack=b"\1\2\3\4"),
)
ENCODED = None, EncoderRows(2, b"sound", bytes(range(16)), "bfloat16")


@given(st.integers(0, 2**32))
def test_plans_survive(seed: int) -> None:
    """Any step that a scheduler could think of, and some it could not."""
    random = Random(seed)

    def column(length: int, most: int = 2**31) -> NDArray[np.int32]:
        return np.array([random.randrange(-most, most) for _ in range(length)], np.int32)

    def new_sequence() -> NewSequence:
        tokens = column(random.randint(1, 40))
        numbers = random.randrange(700), tokens, random.randrange(40), random.choice(SAMPLINGS), 7
        return NewSequence(
            *numbers, embedded=SPANS[: random.randrange(3)], shift=-random.randrange(9), encoded=random.choice(ENCODED)
        )

    size = random.randint(0, 30)
    rows, starts, counts, samples, logits = (column(size) for _ in range(5))
    appended = column(2 * random.randrange(5)).reshape(-1, 2)
    closed, new = column(random.randrange(4)), tuple(new_sequence() for _ in range(random.randrange(3)))
    plan = StepPlan(random.randrange(2**31), rows, starts, counts, samples > 0, logits, appended, new, closed)
    sampled = random.choice([None, SampledBatch(rows, starts, counts)])
    decoded = decode_command(encode_message(ComputeStep(plan, sampled)))
    assert isinstance(decoded, ComputeStep)
    assert_same((decoded.plan, decoded.sampled), (plan, sampled))


def test_sampled_tokens_are_found_by_row_and_position() -> None:
    first = StepResult(4, ints(2, 5), ints(10, 20), ints(2, 1), ints(7, 8, 9))
    second = StepResult(5, ints(3), ints(30), ints(1), ints(6))
    sampled = SampledBatch.from_results([first, StepResult(6, *[ints()] * 4), second])
    assert [column.tolist() for column in sampled] == [[2, 2, 5, 3], [10, 11, 20, 30], [7, 8, 9, 6]]


def test_results_survive() -> None:
    logprobs = [Logprobs(-0.5, [3, 4], [-0.5, -2.0]), None]
    values = np.array([[-1.0], [-0.5]], np.float32)
    scores = [(4, PromptLogprobs.from_arrays(3, values[:, 0], ints(2, 1), ints(7, 8).reshape(2, 1), values))]
    result = StepResult(9, ints(1, 4), ints(11, 12), ints(1, 1), ints(383, 0), logprobs, scores)
    decoded = decode_report(encode_message(StepComputed(result)))
    assert isinstance(decoded, StepComputed)
    assert_same(decoded.result, result)


@pytest.mark.parametrize("command", [JoinRanks("127.0.0.1", 1), AllocateCache(7), LeaveRanks()])
def test_commands_survive(command: RankCommand) -> None:
    assert decode_command(encode_message(command)) == command


def test_what_comes_for_places_survives_with_copies() -> None:
    copies = CacheCopies(ints(1, 2, 0).reshape(1, 3))
    decoded = decode_command(encode_message(PutPlaces(CachePlaces([1], [2]), memoryview(b"x"), copies)))
    assert isinstance(decoded, PutPlaces)
    assert (decoded.places, decoded.content) == (CachePlaces([1], [2]), b"x")
    assert_same(decoded.copies, copies)
