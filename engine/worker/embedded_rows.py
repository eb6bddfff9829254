"""The parts of prompts that are no tokens, such as images: a worker remembers them until they are computed."""

import numpy as np
import torch

from ...scheduler.plan import EmbeddedSpan, NewSequence
from ..step_batch import EmbeddedPlaces, StepBatch, to_device


class EmbeddedRows:
    """The embeddings that plans brought for the places of rows, in the host's memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spans: dict[int, list[tuple[EmbeddedSpan, torch.Tensor]]] = {}

    def enter(self, sequence: NewSequence) -> None:
        if sequence.embedded:
            self._spans[sequence.row] = [(span, _tensor(span)) for span in sequence.embedded]

    def forget(self, row: int) -> None:
        self._spans.pop(row, None)

    def attach(self, batch: StepBatch) -> None:
        """Give a step the embeddings of its places, and forget those that lie behind it."""
        if not self._spans:
            return
        places, parts = [], []
        columns = batch.rows, batch.starts, batch.counts, batch.first_places
        for row, start, count, packed in zip(*(column.tolist() for column in columns), strict=True):
            for span, rows in self._spans.get(row, ()):
                first = max(span.start, start)
                end = min(span.end, start + count)
                if first < end:
                    places.append(np.arange(packed + first - start, packed + end - start))
                    parts.append(rows[first - span.start : end - span.start])
            if row in self._spans and self._spans[row][-1][0].end <= start + count:
                self.forget(row)
        if places:
            batch.embedded = EmbeddedPlaces(
                to_device(np.concatenate(places), self._device), torch.cat(parts).to(self._device)
            )


def _tensor(span: EmbeddedSpan) -> torch.Tensor:
    """Its rows [length, hidden]."""
    return torch.frombuffer(bytearray(span.rows), dtype=getattr(torch, span.dtype)).view(span.length, -1)
