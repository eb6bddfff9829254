"""Plans survive the way to the ranks, and are small."""

from itertools import zip_longest
from random import Random

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from charonia.core.logprobs import Logprobs, PromptLogprobs
from charonia.engine.parallel.plan_codec import (
    ColumnReader,
    PlanDecoder,
    PlanEncoder,
    SampledBatch,
    StepBroadcast,
    pack_bytes,
    pack_column,
    pack_pairs,
)
from charonia.engine.parallel.rank_messages import PLAN_PREFIX, AllocateCache, EncodedResult, JoinRanks, LeaveRanks
from charonia.scheduler.plan import LogitsParams, NewSequence, SamplerParams, StepPlan, StepResult

NO_PAIRS = np.zeros((0, 2), np.int32)
INT32 = st.integers(-(2**31), 2**31 - 1)
ROWS = 256


def ints(*values: int) -> NDArray[np.int32]:
    return np.array(values, np.int32)


def decoding(step: int, starts: NDArray[np.int32], appended: NDArray[np.int32] = NO_PAIRS) -> StepPlan:
    """All rows compute one token."""
    ones = np.ones_like(starts)
    return StepPlan(step, np.arange(len(starts), dtype=np.int32), starts, ones, ones == 1, ones, appended, (), ints())


def assert_same(read: StepBroadcast, written: StepBroadcast) -> None:
    for ours, theirs in zip_longest(read.plan, written.plan):
        if isinstance(theirs, np.ndarray):
            assert ours.dtype == theirs.dtype
            assert np.array_equal(ours, theirs)
        elif isinstance(theirs, tuple):
            assert_same_sequences(ours, theirs)
        else:
            assert ours == theirs
    assert (read.sampled is None) == (written.sampled is None)
    assert all(map(np.array_equal, read.sampled or (), written.sampled or ()))


def assert_same_sequences(ours: tuple[NewSequence, ...], theirs: tuple[NewSequence, ...]) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert np.array_equal(one.tokens, other.tokens)
        assert one._replace(tokens=other.tokens) == other


columns = st.lists(INT32, max_size=40).map(lambda values: np.array(values, np.int32))


@given(st.lists(columns, max_size=5))
def test_columns_survive(written: list[NDArray[np.int32]]) -> None:
    """Wherever they lie in a message, and with other things among them."""
    message = b"?".join([b"", *map(pack_column, written), pack_bytes(b"other")])
    read = ColumnReader(message)
    for column in written:
        read.place += 1
        again = read.next()
        assert again.dtype == np.int32
        assert np.array_equal(again, column)
    read.place += 1
    assert read.bytes() == b"other"
    assert read.place == len(message)


@pytest.mark.parametrize(
    ("most", "width"), [(0, 0), (255, 1), (256, 2), (65_536, 3), (1 << 24, 4), (2**31 - 1, 4), (-1, 4)]
)
def test_a_column_takes_the_bytes_of_its_largest_value(most: int, width: int) -> None:
    empty = len(pack_column(ints()))
    assert len(pack_column(ints(0, most, *[0] * 98))) == empty + 100 * width


@given(columns)
def test_pairs_survive(column: NDArray[np.int32]) -> None:
    pairs = np.stack([column, column >> 20], 1)
    read = ColumnReader(pack_pairs(pairs))
    again = read.pairs()
    assert (again.dtype, again.shape, again.tolist()) == (np.int32, pairs.shape, pairs.tolist())


SAMPLINGS = (
    SamplerParams(),
    SamplerParams(0.8, 40, 0.9, 2**64 - 1, 3, 0.05, None, 20, 5),
    SamplerParams(
        1.0,
        logits=LogitsParams(1.3, logit_bias=((5, -2.5),), bad_words=((1, 2), (3,)), min_tokens=4, stop_token_ids=(0,)),
    ),
)


def drawn(random: Random) -> StepBroadcast:
    """Any step that a scheduler could think of, and some it could not."""

    def column(length: int, most: int = 200_000) -> NDArray[np.int32]:
        return np.array([random.randrange(most) for _ in range(length)], np.int32)

    def newcomer() -> NewSequence:
        tokens = column(random.randint(1, 40))
        return NewSequence(
            random.randrange(700), tokens, random.randrange(len(tokens)), random.choice(SAMPLINGS), random.randrange(99)
        )

    rows = np.array(random.choice([range(20), sorted(random.sample(range(700), random.randint(1, 30)))]), np.int32)
    starts, counts, samples = (column(len(rows)) for _ in range(3))
    appended = column(2 * random.randrange(5), 2**31).reshape(-1, 2)
    closed, new = column(random.randrange(4)), tuple(newcomer() for _ in range(random.randrange(3)))
    landed = random.choice([None, SampledBatch(rows, starts, counts), SampledBatch(rows[::-1].copy(), counts, starts)])
    step = random.randrange(2**31)
    samples = samples % 2
    logits = random.choice([samples, samples * counts])
    return StepBroadcast(StepPlan(step, rows, starts, counts, samples > 0, logits, appended, new, closed), landed)


def going_on(random: Random, before: StepBroadcast) -> StepBroadcast:
    """The rows of a step go on with what it sampled; some of what else could happen, happens."""
    plan, other = before.plan, drawn(random)
    starts, ones = plan.starts + plan.counts, np.ones_like(plan.rows)
    usual = plan._replace(
        starts=starts, counts=ones, samples=ones == 1, num_logits=ones, new=(), closed=ints(), appended=NO_PAIRS
    )
    changes = {name: getattr(other.plan, name) for name in ("new", "closed", "appended") if random.random() < 0.3}
    tokens = np.array([random.randrange(200_000) for _ in starts], np.int32)
    landed = random.choice([None, SampledBatch(plan.rows, starts, tokens), other.sampled])
    return StepBroadcast(usual._replace(step=other.plan.step, **changes), landed)


@given(st.integers(0, 2**32), st.integers(1, 8))
def test_bulletins_survive(seed: int, steps: int) -> None:
    """Each builds on those before it."""
    random, writer, reader = Random(seed), PlanEncoder(), PlanDecoder()
    bulletin = drawn(random)
    for _ in range(steps):
        assert_same(reader.decode(memoryview(writer.encode(bulletin))), bulletin)
        bulletin = going_on(random, bulletin) if random.random() < 0.5 else drawn(random)


def test_a_step_in_which_everybody_decodes_is_a_few_bytes() -> None:
    writer, starts = PlanEncoder(), np.random.default_rng(1).integers(1, 200_000, ROWS).astype(np.int32)
    writer.encode(StepBroadcast(decoding(0, starts)))
    assert len(writer.encode(StepBroadcast(decoding(1, starts + 1)))) < 16


def test_what_rows_go_on_with_is_told_as_tokens_alone() -> None:
    writer, starts = PlanEncoder(), np.random.default_rng(1).integers(1, 200_000, ROWS).astype(np.int32)
    writer.encode(StepBroadcast(decoding(0, starts)))
    tokens = np.full(ROWS, 200, np.int32)
    told = writer.encode(
        StepBroadcast(decoding(1, starts + 1), SampledBatch(np.arange(ROWS, dtype=np.int32), starts + 1, tokens))
    )
    assert ROWS < len(told) < ROWS + 16


def test_the_largest_step_of_known_rows_fits_two_kilobytes() -> None:
    """All take a block of a million, and the first stages learn all their tokens of a large vocabulary."""
    random = np.random.default_rng(1)
    writer, starts = PlanEncoder(), random.integers(1, 200_000, ROWS).astype(np.int32)
    writer.encode(StepBroadcast(decoding(0, starts)))
    blocks = np.stack([np.arange(ROWS), random.integers(0, 1_000_000, ROWS)], 1).astype(np.int32)
    landed = SampledBatch(
        np.arange(ROWS, dtype=np.int32), starts + 1, random.integers(0, 256_000, ROWS).astype(np.int32)
    )
    assert len(writer.encode(StepBroadcast(decoding(1, starts + 1, blocks), landed))) <= 2048


def test_landed_tokens_are_found_by_row_and_position() -> None:
    first = StepResult(4, ints(2, 5), ints(10, 20), ints(2, 1), ints(7, 8, 9))
    second = StepResult(5, ints(3), ints(30), ints(1), ints(6))
    landed = SampledBatch.from_results([first, StepResult(6, *[ints()] * 4), second])
    assert [column.tolist() for column in landed] == [[2, 2, 5, 3], [10, 11, 20, 30], [7, 8, 9, 6]]


def test_results_survive() -> None:
    logprobs = [Logprobs(-0.5, [3, 4], [-0.5, -2.0]), None]
    values = np.array([[-1.0], [-0.5]], np.float32)
    scores = [(4, PromptLogprobs.from_arrays(3, values[:, 0], ints(2, 1), ints(7, 8).reshape(2, 1), values))]
    result = StepResult(9, ints(1, 4), ints(11, 12), ints(1, 1), ints(383, 0), logprobs, scores)
    encoded = msgspec.msgpack.encode(EncodedResult.from_result(result))
    again = msgspec.msgpack.decode(encoded, type=EncodedResult).to_result()
    assert again.step == 9
    assert all(map(np.array_equal, again[1:5], result[1:5]))
    assert list(again.logprobs) == logprobs
    assert again.prompt_logprobs == scores


@pytest.mark.parametrize("command", [JoinRanks("127.0.0.1", 1), AllocateCache(7), LeaveRanks()])
def test_no_command_begins_like_a_plan(command: JoinRanks | AllocateCache | LeaveRanks) -> None:
    assert msgspec.msgpack.encode(command)[:1] != PLAN_PREFIX
