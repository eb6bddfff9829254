"""Windows that wait for the times of their tokens: several together, and nothing computed that nobody waits for."""

import asyncio
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from charonia.classic_backends.tower.window_aligner import WindowAligner
from charonia.core.errors import InvalidArgument, Unavailable
from charonia.core.media import ALIGNED_ROWS, ALIGNED_SPANS, ALIGNED_TOKENS
from charonia.core.media_models import AlignedWindow, EncodedMedium
from charonia.core.request_context import RequestContext
from tests.waiting import until

PROMPT = (7, 8)


def window(number: int, length: int = 3) -> AlignedWindow:
    rows = bytes([number] * 16)
    return AlignedWindow(EncodedMedium(2, rows, "float32"), (*PROMPT, *range(length)), len(PROMPT), 2)


class Tower:
    """Says that each token begins at the row of its own number, behind that of its window."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.asked: list[Mapping[str, Any]] = []
        self.ended = 0
        self.error: Exception | None = None

    async def compute(self, inputs: Mapping[str, Any], _: RequestContext) -> bytes:
        self.asked.append(inputs)
        try:
            await self.go.wait()
        finally:
            self.ended += 1
        if self.error is not None:
            raise self.error
        tokens = inputs[ALIGNED_TOKENS]
        begins = np.zeros(tokens.shape, np.int32)
        for line, rows, (prompt, end, _) in zip(begins, inputs[ALIGNED_ROWS], inputs[ALIGNED_SPANS], strict=True):
            line[: end - prompt] = 100 * int(rows[0]) + np.arange(end - prompt)
        return begins.tobytes()


def counts(aligner: WindowAligner) -> tuple[float, ...]:
    return tuple(reading.value for reading in aligner.readings())[:2]


def ask(aligner: WindowAligner, *windows: AlignedWindow) -> list[asyncio.Task[Any]]:
    return [asyncio.create_task(aligner.align(window, RequestContext("test"))) for window in windows]


async def test_those_that_come_meanwhile_go_together() -> None:
    tower = Tower()
    aligner = WindowAligner(tower.compute)
    [first] = ask(aligner, window(0))
    await until(lambda: len(tower.asked) == 1)
    others = ask(aligner, *(window(number, number) for number in range(1, 11)))
    await asyncio.sleep(0)
    tower.go.set()
    assert await first == [0, 1, 2]
    assert await asyncio.gather(*others) == [
        [100 * number + token for token in range(number)] for number in range(1, 11)
    ]
    assert [inputs[ALIGNED_TOKENS].shape for inputs in tower.asked] == [(1, 5), (8, 10), (2, 12)]
    assert tower.asked[1][ALIGNED_TOKENS][0].tolist() == [7, 8, 0, *([0] * 7)]
    assert tower.asked[1][ALIGNED_SPANS][1].tolist() == [2, 4, 2]
    assert counts(aligner) == (11, 3)


async def test_who_leaves_ends_what_nobody_else_waits_for() -> None:
    tower = Tower()
    aligner = WindowAligner(tower.compute)
    [alone] = ask(aligner, window(0))
    await until(lambda: len(tower.asked) == 1)
    some = ask(aligner, *map(window, range(1, 4)))
    await asyncio.sleep(0)
    some[0].cancel()
    alone.cancel()
    await until(lambda: len(tower.asked) == 2)
    assert tower.ended == 1
    assert len(tower.asked[1][ALIGNED_TOKENS]) == 2, "who left before it began is not computed"
    some[1].cancel()
    await asyncio.sleep(0)
    assert tower.ended == 1, "another waits"
    tower.go.set()
    assert await some[2] == [300, 301, 302]
    assert aligner._runner is None or await aligner._runner is None


async def test_errors_reach_all_and_the_next_is_computed() -> None:
    tower = Tower()
    tower.go.set()
    tower.error = InvalidArgument("no")
    aligner = WindowAligner(tower.compute)
    for task in ask(aligner, window(0), window(1)):
        with pytest.raises(InvalidArgument):
            await task
    tower.error = None
    other = window(2)._replace(encoded=EncodedMedium(2, bytes(8), "float32"))  # what one execution can't have together
    for task in ask(aligner, window(0), other):
        with pytest.raises(ValueError, match="shape"):
            await task
    assert await aligner.align(window(1), RequestContext("test")) == [100, 101, 102]
    assert counts(aligner) == (1, 1)


async def test_an_end_ends_those_that_wait() -> None:
    tower = Tower()
    aligner = WindowAligner(tower.compute)
    tasks = ask(aligner, *map(window, range(10)))
    await until(lambda: len(tower.asked) == 1)
    await aligner.close()
    for task in tasks:
        with pytest.raises(Unavailable):
            await task
    assert tower.ended == 1
    await aligner.close()
