"""The images of several ranks: each moves its share, and one has landed where all have. Imports no torch."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import count

from ...core.metrics import ImageTotals
from ...kvcache.exchange.directory_tier import DroppedImages
from ...kvcache.tiers.landed_images import ImagePlace
from . import rank_messages as messages


class _SharedFetch:
    """A fetch that some ranks have not answered."""

    def __init__(self, images: int, ranks: int) -> None:
        self.arrived = [True] * images
        self.missing_reports = ranks
        self.future: Future[list[bool]] = Future()


class RanksImages:
    """An `ImageMover` over `ranks`, which get their commands by `command`. Reports come from any thread."""

    def __init__(self, ranks: int, command: Callable[[messages.RankCommand], None]) -> None:
        self._ranks = ranks
        self._command = command
        self._numbers = count()
        self._lock = threading.Lock()
        self._fetches: dict[int, _SharedFetch] = {}
        self._totals: dict[int, ImageTotals] = {}
        self._is_lost = False

    def fetch(self, images: Sequence[ImagePlace]) -> Future[list[bool]]:
        number, fetch = next(self._numbers), _SharedFetch(len(images), self._ranks)
        with self._lock:
            if self._is_lost:
                fetch.future.cancel()
                return fetch.future
            self._fetches[number] = fetch
        self._command(messages.FetchImages(number, list(images)))
        return fetch.future

    def store(self, images: Sequence[ImagePlace]) -> None:
        self._command(messages.StoreImages(list(images)))

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
            fetch = self._fetches[report.number]
            fetch.arrived = [had and has for had, has in zip(fetch.arrived, report.arrived, strict=True)]
            fetch.missing_reports -= 1
            if fetch.missing_reports:
                return
            del self._fetches[report.number]
        fetch.future.set_result(fetch.arrived)

    def forget(self) -> None:
        """A rank is lost, or all are to leave: no fetch will be answered."""
        with self._lock:
            self._is_lost = True
            fetches = [*self._fetches.values()]
            self._fetches.clear()
        for fetch in fetches:
            fetch.future.cancel()
