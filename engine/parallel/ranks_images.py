"""The images of several ranks: each moves its share, and one has landed, or is written, where that is so of all.
Imports no torch."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import count

from ...core.metrics import ImageTotals
from ...kvcache.exchange.directory_tier import DroppedImages
from ...kvcache.tiers.landed_images import ImagePlace
from . import rank_messages as messages


class _SharedMove:
    """A fetch or a store that some ranks have not answered."""

    def __init__(self, images: int, ranks: int) -> None:
        self.succeeded = [True] * images
        self.missing_reports = ranks
        self.future: Future[list[bool]] = Future()


class RanksImages:
    """An `ImageMover` over `ranks`, which get their commands by `command`. Reports come from any thread."""

    def __init__(self, ranks: int, command: Callable[[messages.RankCommand], None]) -> None:
        self._ranks = ranks
        self._command = command
        self._numbers = count()
        self._lock = threading.Lock()
        self._moves: dict[int, _SharedMove] = {}
        self._totals: dict[int, ImageTotals] = {}
        self._is_lost = False

    def fetch(self, images: Sequence[ImagePlace]) -> Future[list[bool]]:
        return self._move(messages.FetchImages, images)

    def store(self, images: Sequence[ImagePlace]) -> Future[list[bool]]:
        return self._move(messages.StoreImages, images)

    def _move(
        self, command: type[messages.FetchImages | messages.StoreImages], images: Sequence[ImagePlace]
    ) -> Future[list[bool]]:
        number, move = next(self._numbers), _SharedMove(len(images), self._ranks)
        with self._lock:
            if self._is_lost:
                move.future.cancel()
                return move.future
            self._moves[number] = move
        self._command(command(number, list(images)))
        return move.future

    def drop(self, dropped: DroppedImages) -> None:
        self._command(messages.DropImages(dropped))

    @property
    def totals(self) -> ImageTotals:
        """The totals of all ranks, as they last reported."""
        totals = ImageTotals()
        with self._lock:
            for of_rank in self._totals.values():
                totals.add(of_rank)
        return totals

    def add_report(self, rank: int, report: messages.ImageReport) -> None:
        if isinstance(report, messages.ImagesCounted):
            with self._lock:
                self._totals[rank] = report.totals
            return
        with self._lock:
            move = self._moves.get(report.number)
            if move is None:
                return  # forgotten; a rank that is still there had answered
            move.succeeded = [had and has for had, has in zip(move.succeeded, report.succeeded, strict=True)]
            move.missing_reports -= 1
            if move.missing_reports:
                return
            del self._moves[report.number]
        move.future.set_result(move.succeeded)

    def forget(self) -> None:
        """A rank is lost, or all are to leave: nothing will be answered."""
        with self._lock:
            self._is_lost = True
            moves = [*self._moves.values()]
            self._moves.clear()
        for move in moves:
            move.future.cancel()
