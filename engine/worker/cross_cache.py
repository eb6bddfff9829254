"""The keys and values that decoders make of an encoder's output: written when a sequence gets its row, read by all its
steps, and overwritten by the row's next sequence. A row has a slot for the longest output."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from ...scheduler.encoders.encoder_rows import EncoderRows
from ...scheduler.plan import IntArray, NewSequence
from ..attention.backend import AttentionBackend
from ..checkpoint.encoder_shape import EncoderShape
from ..layers.cross_attention import CrossAttention
from ..layers.step_context import StepAttention
from ..step_batch import StepBatch, StepPositions

BLOCK_SIZE = 256
"""Rows of a block: the kernels' split of a context."""


class CrossCache:
    """A rank's slots, one for each row of the scheduler."""

    def __init__(
        self,
        attention: AttentionBackend,
        layers: Sequence[CrossAttention],
        encoder: EncoderShape,
        rows: int,
        most: int,
    ) -> None:
        """`attention`: with a cache for each of the `layers`, in blocks of BLOCK_SIZE. `most`: tokens of a step that
        one row may have."""
        self._attention = attention
        self._layers = layers
        self._encoder = encoder
        self._rows = rows
        self._blocks = -(-max(encoder.rows, most) // BLOCK_SIZE)
        self._forget()

    @property
    def bytes(self) -> int:
        """Bytes of all slots, over all layers."""
        return self._rows * self._blocks * self._attention.block_bytes

    def allocate(self) -> None:
        self._attention.allocate(self._rows * self._blocks)
        self._forget()

    def free(self) -> None:
        self._attention.allocate(0)
        self._forget()

    def _forget(self) -> None:
        device = self._attention.device
        self._tables = torch.arange(self._rows * self._blocks, device=device).view(self._rows, self._blocks)
        self._lengths: IntArray = np.zeros(self._rows, np.int32)
        self._digests: dict[int, bytes] = {}  # of what is in the slot of a row

    def begin_step(self, batch: StepBatch, new: Iterable[NewSequence] = ()) -> StepAttention:
        """Write what `new` sequences bring, and begin the step of `batch`, in which each token sees all rows of its
        sequence.

        Raises:
            InvalidArgument: a new sequence brings nothing, or what the model's encoder can't have made.
        """
        for sequence in new:
            self._enter(sequence.row, sequence.encoded)
        return self._attention.begin_step(self._places(batch, self._lengths[batch.rows]))

    def _places(self, batch: StepBatch, lengths: IntArray) -> StepBatch:
        """The batch over the slots of its rows."""
        starts = np.maximum(lengths - batch.counts, 0)
        places = StepBatch(batch.rows, starts, batch.counts, batch.token_ids, self._tables, BLOCK_SIZE)
        places.moved = StepPositions(np.zeros_like(starts), None, np.repeat(lengths, batch.counts))
        return places

    def _enter(self, row: int, encoded: EncoderRows | None) -> None:
        self._encoder.check(encoded)
        assert encoded is not None
        if self._digests.get(row) != encoded.digest:
            same = next((other for other, digest in self._digests.items() if digest == encoded.digest), None)
            self._digests.pop(row, None)  # until all is written
            if same is None:
                self._write(row, encoded)
            else:
                self._copy(same, row)
            self._digests[row] = encoded.digest
        self._lengths[row] = encoded.length

    def _write(self, row: int, encoded: EncoderRows) -> None:
        """Make keys and values of what a sequence brings."""
        device = self._attention.device
        stored = torch.frombuffer(bytearray(encoded.rows), dtype=getattr(torch, encoded.dtype))
        rows = stored.view(encoded.length, -1).to(device, self._attention.dtype)
        tokens = torch.zeros(self._rows, 1, dtype=torch.int32, device=device)
        batch = StepBatch([row], [0], [encoded.length], tokens, self._tables, BLOCK_SIZE)
        for layer in self._layers:
            self._attention.store(batch, layer.layer, *layer.keys_and_values(rows))

    def _copy(self, source: int, row: int) -> None:
        """Let a row have what another has: the same sound is often asked for twice."""
        for blocks in self._attention.device_blocks:
            blocks[self._span(row)] = blocks[self._span(source)]

    def _span(self, row: int) -> slice:
        return slice(row * self._blocks, (row + 1) * self._blocks)
