"""What the hub knows of one model, loaded or not."""

from collections.abc import Iterator
from dataclasses import dataclass

from ..core.gateway import IndexEntry, State
from ..core.metrics import Reading
from ..core.model import MeasuredModel, Model, TextModel


@dataclass(slots=True)
class Entry:
    """A known model. `model` is there once it was loaded, which took `load_seconds`; `reason` says why it is not.

    `text` and `measured` are the same model, if it can do that.
    """

    name: str
    version: str = ""
    model: Model | None = None
    text: TextModel | None = None
    measured: MeasuredModel | None = None
    reason: str = ""
    load_seconds: float = 0.0
    load_failures: int = 0

    @property
    def ready(self) -> bool:
        return self.model is not None and self.model.stats().ready

    def shown(self) -> IndexEntry:
        state = State.READY if self.ready else State.UNAVAILABLE
        return IndexEntry(self.name, self.version, state, self.reason)

    def readings(self) -> Iterator[Reading]:
        """Of a model that is not loaded, only that it is not."""
        yield Reading("charonia_model_ready", int(self.ready))
        yield Reading("charonia_model_load_failures_total", self.load_failures)
        if self.model is not None:
            yield Reading("nv_model_load_duration_secs", self.load_seconds)
        if self.measured is not None:
            yield from self.measured.readings()

    def publish(self, model: Model | None) -> None:
        """Serve this one from now on, or none."""
        self.model = model
        self.text = model if isinstance(model, TextModel) else None
        self.measured = model if isinstance(model, MeasuredModel) else None

    def fail(self, reason: str) -> None:
        self.load_failures += 1
        if self.model is None:
            self.reason = reason
