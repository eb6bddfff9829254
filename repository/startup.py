"""Loads what was asked for into the hub, one model after the other, and tells a watcher how it goes.

One at a time, so that each sizes its cache by what the earlier ones left.
"""

import time
from collections.abc import Iterable
from typing import Protocol

from ..core.errors import CharoniaError, InvalidArgument
from .gateway import Hub
from .kinds import OnProgress, build
from .source import BrokenSource, ModelSource


class Watcher(Protocol):
    """Sees the start-up."""

    def loading(self, name: str) -> OnProgress: ...

    def loaded(self, name: str, seconds: float) -> None: ...

    def failed(self, name: str, reason: str) -> None: ...


async def load_all(hub: Hub, sources: Iterable[ModelSource | BrokenSource], watcher: Watcher) -> bool:
    """Load every model; whether all of them did. One that fails leaves the others alone."""
    results = [await _load(hub, source, watcher) for source in sources]
    return all(results)


async def _load(hub: Hub, source: ModelSource | BrokenSource, watcher: Watcher) -> bool:
    started = time.monotonic()
    error = await _attempt(hub, source, watcher)
    if error is None:
        watcher.loaded(source.name, time.monotonic() - started)
    else:
        watcher.failed(source.name, _reason(error, source))
    return error is None


async def _attempt(hub: Hub, source: ModelSource | BrokenSource, watcher: Watcher) -> Exception | None:
    if isinstance(source, BrokenSource):
        return hub.refuse(source.error, source.name)
    on_progress = watcher.loading(source.name)
    return await hub.load(source.name, source.version, lambda: build(source, on_progress))


def _reason(error: Exception, source: ModelSource | BrokenSource) -> str:
    if not isinstance(error, CharoniaError):
        return f"{type(error).__name__}: {error}"
    if isinstance(error, InvalidArgument) and isinstance(source, ModelSource) and error.field:
        return f"{source.where(error.field)}{error.message}"
    return error.message
