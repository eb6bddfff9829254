"""How ranks of a group compute alone what may fail on one of them, agree on it, and then meet."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ...core.errors import Unavailable
from ..checkpoint.build_context import TensorGroup


class PeerLost(Unavailable):
    """Another rank has failed, whose own report says more."""


class RankGroup:
    """A `TensorGroup`, and the `CapturingRanks` of its steps."""

    def __init__(self, group: TensorGroup) -> None:
        self._group = group
        self._is_alone = False
        self._connected = set[tuple[object, ...]]()
        """Kinds of exchanges that the ranks have made outside a graph."""
        self._skipped: dict[tuple[object, ...], Callable[[], Tensor]] = {}
        """Exchanges of other kinds, over buffers of their own, which cannot lack memory later."""
        self.rank = group.rank
        self.size = group.size

    def all_reduce(self, partial: Tensor) -> Tensor:
        if self._is_alone:
            self._skip("sum", partial, self._group.all_reduce)
            return partial
        return self._group.all_reduce(partial)

    def all_gather(self, part: Tensor, total: int) -> Tensor:
        if self._is_alone:
            self._skip(f"gather {total}", part, lambda mine: self._group.all_gather(mine, total))
            pieces = [torch.empty_like(part) for _ in range(self.size)]  # as much memory as to gather them takes
            gathered = part.new_zeros(*part.shape[:-1], total)
            del pieces
            return gathered
        return self._group.all_gather(part, total)

    @contextmanager
    def alone(self) -> Iterator[None]:
        self._is_alone = True
        try:
            yield
        except BaseException:
            self._skipped.clear()
            raise
        finally:
            self._is_alone = False

    def agree(self, own: bool, device: torch.device) -> bool:
        votes = self._group.all_reduce(torch.tensor([float(own)], device=device))
        everyone = int(votes.item()) == self.size
        if not everyone:
            self._skipped.clear()
        return everyone

    def connect(self) -> None:
        for exchange in self._skipped.values():
            exchange()
        self._connected.update(self._skipped)
        self._skipped.clear()

    def _skip(self, kind: str, mine: Tensor, exchange: Callable[[Tensor], Tensor]) -> None:
        signature = kind, mine.shape, mine.dtype
        if signature not in self._connected and signature not in self._skipped:
            buffer = torch.zeros_like(mine, memory_format=torch.contiguous_format)
            self._skipped[signature] = lambda: exchange(buffer)
