"""A step's numbers, derived on the host and on the device."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from charonia.engine.step_batch import DeviceBatch, HostCopy, StepBatch, upload_columns

LINES, WIDTH, BLOCK = 6, 40, 4
TOKENS = torch.arange(LINES * WIDTH, dtype=torch.int32).view(LINES, WIDTH)
BLOCKS = torch.arange(LINES * WIDTH // BLOCK).view(LINES, -1)


def padded(batch: StepBatch, rows: int, places: int) -> StepBatch:
    """The same batch in buffers of `rows` rows and `places` places."""
    numbers = torch.zeros(4, rows, dtype=torch.int32)
    numbers[3] = batch.size
    for column, values in zip(numbers, (batch.rows, batch.starts, batch.counts, batch.first_places), strict=True):
        column[: len(values)] = torch.from_numpy(values)
    counts = np.full(rows, places // rows)
    counts[0] += places % rows
    zeros = np.zeros(rows)
    return StepBatch(zeros, zeros, counts, TOKENS, BLOCKS, BLOCK, DeviceBatch(*numbers, BLOCKS, places))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, LINES - 1), st.integers(0, 20), st.integers(1, 9)), min_size=1, max_size=6),
    st.integers(0, 4),
    st.integers(0, 5),
)
def test_the_device_derives_what_the_host_does(rows: list[tuple[int, int, int]], more: int, room: int) -> None:
    """Also where rows and places are padded."""
    host = StepBatch(*zip(*rows, strict=True), TOKENS, BLOCKS, BLOCK)
    device = padded(host, len(rows) + more, host.size + (room if more else 0))
    for name in ("tokens", "positions", "owners", "slots"):
        found, expected = (getattr(each, name) for each in (device, host))
        if name == "slots":
            found, expected = found(), expected()
        assert found[: host.size].tolist() == expected.tolist()
    assert not device.positions[host.size :].any()
    assert int(device.owners.max()) < len(rows) + more


def test_columns_begin_at_16_bytes() -> None:
    """By which Triton distinguishes the forms of a kernel."""
    columns = upload_columns([np.arange(5), np.arange(5, 10, dtype=np.int32)], torch.device("cpu"))
    assert [column.tolist() for column in columns] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert (columns[1].data_ptr() - columns[0].data_ptr()) % 16 == 0


def test_rows_of_a_step_are_int32_on_the_device() -> None:
    there = StepBatch([3, 1], [0, 7], [5, 1], TOKENS, BLOCKS, BLOCK).on_device
    told = [each.tolist() for each in there[:4]]
    assert told == [[3, 1], [0, 7], [5, 1], [0, 5]]
    assert {each.dtype for each in there[:4]} == {torch.int32}
    assert (there.size, there.block_ids.data_ptr()) == (6, BLOCKS.data_ptr())


def test_a_copy_on_the_host_is_the_tensor() -> None:
    tensor = torch.arange(3)
    assert HostCopy(tensor).read().ctypes.data == tensor.data_ptr()
