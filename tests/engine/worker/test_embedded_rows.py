"""Where places of images are rotated and up to where they see, against the same told place by place."""

import numpy as np
import torch

from charonia.core.resolved_sampling import ResolvedSampling
from charonia.engine.checkpoint.model_spec import RopeSpec
from charonia.engine.layers.rotary import FusedRotary, TorchRotary, pair_axes
from charonia.engine.step_batch import StepBatch
from charonia.engine.worker.embedded_rows import EmbeddedRows
from charonia.scheduler.encoders.encoder_rows import EmbeddedSpan
from charonia.scheduler.plan import NewSequence

CPU = torch.device("cpu")
SPANS = (
    EmbeddedSpan(3, 6, b"a", bytes(24), "float32", (1, 2, 3)),
    EmbeddedSpan(11, 8, b"b", bytes(32), "float32", (2, 4, 1), True),
    EmbeddedSpan(20, 2, b"c", bytes(8), "float32", bidirectional=True),
)
LENGTH = 30


def places() -> list[tuple[int, int, int]]:
    """By time, height and width: text goes on behind the largest of an image's."""
    found: list[tuple[int, int, int]] = []
    following = 0
    for place in range(LENGTH):
        span = next((span for span in SPANS if span.start <= place < span.end and any(span.grid)), None)
        if span is None:
            found.append((following,) * 3)
            following += 1
            continue
        _, height, width = span.grid
        number = place - span.start
        at = number // (height * width), number // width % height, number % width
        found.append((following + at[0], following + at[1], following + at[2]))
        following += max(span.grid) if place == span.end - 1 else 0
    return found


def rows_with(computed: int) -> EmbeddedRows:
    """Of row 4, as it enters with so many tokens computed."""
    rows = EmbeddedRows(CPU)
    left = tuple(span for span in SPANS if span.end > computed)
    shift = sum(span.shift for span in SPANS if span.end <= computed)
    tokens = np.zeros(LENGTH, np.int32)
    rows.enter(NewSequence(4, tokens, computed, ResolvedSampling(), embedded=left, shift=shift))
    return rows


def batch(start: int, count: int) -> StepBatch:
    """Behind one row of text, and before another."""
    table = torch.zeros(5, 64, dtype=torch.int32)
    return StepBatch([1, 4, 2], [7, start, 0], [1, count, 3], table, torch.zeros(5, 8, dtype=torch.int64), 8)


def test_chunks_of_any_size_are_where_the_whole_is() -> None:
    right = torch.tensor(places()).T
    for computed in (0, 5, 9, 15, 19):
        rows = rows_with(computed)
        for start in range(computed, LENGTH):
            for count in (1, 2, 5, LENGTH - start):
                step = rows.placed(batch(start, min(count, LENGTH - start)))
                end = start + min(count, LENGTH - start)
                moved = step.moved
                assert moved is not None
                found = step.rotary_positions
                expected = torch.cat((torch.full((3, 1), 7), right[:, start:end], torch.arange(3).expand(3, -1)), 1)
                assert torch.equal(found if moved.grid is not None else found.expand(3, -1), expected)
                ends = [
                    max(
                        [place + 1]
                        + [min(span.end, end) for span in SPANS if span.bidirectional and place in span_of(span)]
                    )
                    for place in range(start, end)
                ]
                seen = [*range(start + 1, end + 1)] if moved.ends is None else moved.ends[1 : 1 + end - start].tolist()
                assert seen == ends
                assert moved.ends is None or moved.ends[[0, -3, -2, -1]].tolist() == [8, 1, 2, 3]


def span_of(span: EmbeddedSpan) -> range:
    return range(span.start, span.end)


def test_text_alone_is_where_its_tokens_are() -> None:
    rows = EmbeddedRows(CPU)
    assert rows.placed(batch(3, 4)).moved is None
    rows = rows_with(LENGTH - 1)
    assert rows.placed(StepBatch([1], [2], [3], torch.zeros(5, 64), torch.zeros(5, 8), 8)).moved is None
    rows.forget(4)
    assert rows.placed(batch(3, 4)).moved is None


def test_pairs_of_a_head_go_by_sections() -> None:
    chunked = RopeSpec(sections=(2, 3, 3))
    assert pair_axes(chunked, 8) == [0, 0, 1, 1, 1, 2, 2, 2]
    interleaved = RopeSpec(sections=(3, 3, 2), interleaved=True)
    assert pair_axes(interleaved, 8) == [0, 1, 2, 0, 1, 2, 0, 1]
    assert pair_axes(RopeSpec(sections=(5, 2, 1), interleaved=True), 8) == [0, 1, 2, 0, 1, 0, 0, 0]
    positions = torch.tensor([[3, 9], [5, 40], [0, 11]])
    for rope in (chunked, interleaved):
        plain = FusedRotary(rope, 16, 64)
        angles = plain(positions)
        for place in range(2):
            lines = positions[pair_axes(rope, 8), place]
            assert torch.equal(angles.cos_sin[place], plain.cos_sin[lines, :, torch.arange(8)].T)
        by_torch = TorchRotary(rope, 16, 64, torch.float32, CPU)(positions)
        x = torch.randn(2, 3, 16)
        assert torch.allclose(by_torch.rotate(x), angles.rotate(x), atol=1e-6)
