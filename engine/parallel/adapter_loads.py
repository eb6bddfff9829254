"""Adapters that ranks are loading, each its share. A rank reports on them in the order they were asked for."""

import threading
from collections import deque
from concurrent.futures import Future
from typing import TypeAlias

import msgspec

from ...core.adapter import Adapter
from ...core.errors import CharoniaError, InvalidArgument, error_from_code
from .rank_messages import RankAdapterLoaded, RankAdapterRefused

AdapterReport: TypeAlias = RankAdapterLoaded | RankAdapterRefused


class AdapterLoads:
    """The loads that not all of `world` ranks have reported on, in order; for any thread. `held`: adapters that all
    ranks have. `strays`: those that some may have, because others could not load them."""

    def __init__(self, world: int) -> None:
        self._world = world
        self._loads: deque[tuple[Future[Adapter], dict[int, AdapterReport]]] = deque()
        self._lock = threading.Lock()
        self._loss: CharoniaError | None = None
        self.held, self.strays = set[str](), set[str]()

    def add_load(self) -> Future[Adapter]:
        """One more adapter; it has failed already if there will be no reports."""
        loading: Future[Adapter] = Future()
        with self._lock:
            if self._loss is None:
                self._loads.append((loading, {}))
                return loading
        loading.set_exception(self._loss)
        return loading

    def add_report(self, rank: int, report: AdapterReport) -> None:
        with self._lock:
            loading, reports = next(each for each in self._loads if rank not in each[1])
            reports[rank] = report
            if len(reports) < self._world:
                return
            self._loads.popleft()  # a rank reports in order, so the oldest is complete first
            digests = {each.adapter.digest for each in reports.values() if isinstance(each, RankAdapterLoaded)}
            agreed = len(digests) == 1 and all(isinstance(each, RankAdapterLoaded) for each in reports.values())
            (self.held if agreed else self.strays).update(digests)
        _settle(loading, list(reports.values()))

    def take_strays(self) -> set[str]:
        """Adapters that ranks are to be told to forget."""
        with self._lock:
            strays, self.strays = self.strays - self.held, set()
        return strays

    def fail_all(self, error: CharoniaError) -> None:
        """Fail these loads, and all to be added."""
        with self._lock:
            self._loss = error
            loads, self._loads = self._loads, deque()
        for loading, _ in loads:
            loading.set_exception(error)

    def cancel_all(self) -> None:
        with self._lock:
            loads, self._loads = self._loads, deque()
        for loading, _ in loads:
            loading.cancel()


def _settle(loading: Future[Adapter], reports: list[AdapterReport]) -> None:
    loaded = [each.adapter for each in reports if isinstance(each, RankAdapterLoaded)]
    refused = next((each for each in reports if isinstance(each, RankAdapterRefused)), None)
    if refused is not None:
        loading.set_exception(error_from_code(refused.code, refused.message, refused.field or None))
    elif len({adapter.digest for adapter in loaded}) > 1:
        error = InvalidArgument(f"{loaded[0].path}: ranks read different files", field="lora_path")
        loading.set_exception(error)
    else:
        loading.set_result(msgspec.structs.replace(loaded[0], bytes=sum(adapter.bytes for adapter in loaded)))
