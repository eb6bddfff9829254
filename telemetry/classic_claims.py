"""The time of a classic model's or an ensemble's requests, charged to causes. A batch that could have been larger costs
its requests the wait for others, and those in the queue another execution."""

from collections.abc import Iterator
from typing import NamedTuple

from .model_metrics import CloseReason
from .scrape import ModelInterval
from .time_claims import Cause, TimeClaim, percent

_ALONE = 1.5
"""The mean of requests in flight up to which clients count as asking one at a time."""


class BatchFigures(NamedTuple):
    size: float
    """The mean number of items."""
    most: float
    """The largest possible number of items."""
    in_flight: float
    """The mean of requests in flight."""
    items: float
    """The mean items of a request."""
    instances: float
    busy: float
    """The part of the time that instances executed."""
    reason: CloseReason
    """Why most batches took no more requests."""

    @property
    def missing(self) -> float:
        """The part of a batch that stays empty though requests are in flight for it, 0 to 1."""
        possible = min(self.most, self.there)
        return max(1 - self.size / possible, 0.0) if possible > 0 else 0.0

    @property
    def there(self) -> float:
        """Items in flight for each instance."""
        return self.in_flight * self.items / max(self.instances, 1.0)

    @property
    def empty(self) -> float:
        """The part of a batch that stays empty, 0 to 1."""
        return max(1 - self.size / self.most, 0.0) if self.most > 1 else 0.0

    @property
    def asked_one_by_one(self) -> bool:
        return self.in_flight <= _ALONE

    def __str__(self) -> str:
        plural = "" if self.instances == 1 else "s"
        return f"{self.instances:.0f} instance{plural} executed for {percent(self.busy)} of the time"


def classic_claims(interval: ModelInterval) -> Iterator[TimeClaim]:
    latency, queued = (interval.grown(f"nv_inference_{part}_duration_us") / 1e6 for part in ("request", "queue"))
    parts = "compute_input", "compute_infer", "compute_output"
    computed = sum(interval.grown(f"nv_inference_{part}_duration_us") for part in parts) / 1e6
    delayed = min(interval.grown("charonia_batch_delay_seconds_total"), queued)
    readers = interval.grown("charonia_reader_wait_seconds_total")
    computed = max(computed - readers, 0.0)  # a response is computed until the next is asked for
    figures = _figures(interval, latency)
    if figures is None:
        yield TimeClaim(Cause.COMPUTATION, latency, "the models that it asks take their time", "", "explain those")
        return
    behind = queued - delayed
    unformed = behind * figures.missing
    unshared = computed * figures.empty * figures.busy if figures.asked_one_by_one else 0.0
    yield _batching_claim(figures, delayed, unformed + unshared)
    yield _queue_claim(interval, figures, behind - unformed)
    yield _computation_claim(figures, computed - unshared)
    if readers:
        why = f"instances waited {readers:.1f} s until responses were read"
        turn = "the clients, or the network to them; more instances serve others meanwhile"
        yield TimeClaim(Cause.SLOW_CLIENT, readers, "a decoupled model waits for its readers", why, turn)
    rest = max(latency - queued - computed - readers, 0.0)
    why = f"{rest:.2f} s between the instances' threads and the event loop"
    yield TimeClaim(Cause.FRONTEND, rest, "answers wait for the frontend", why, "see the frontend's loop")


def _figures(interval: ModelInterval, latency: float) -> BatchFigures | None:
    """The figures; None for a model that executes nothing itself."""
    instances = interval.gauge("charonia_instances")
    if not instances:
        return None
    batches = interval.grown_by("charonia_batches_total", "reason")
    executions = interval.grown("nv_inference_exec_count")
    inferred = interval.grown("nv_inference_count")
    answered = interval.grown("nv_inference_request_success")
    return BatchFigures(
        size=inferred / executions if executions else 0.0,
        most=interval.gauge("charonia_max_batch_size"),
        in_flight=latency / interval.whole.seconds,
        items=inferred / answered if answered else 1.0,
        instances=instances,
        busy=min(interval.grown("charonia_execution_seconds_total") / interval.whole.seconds / instances, 1.0),
        reason=max(CloseReason, key=lambda reason: batches.get(reason.value, 0.0)),
    )


_SYMPTOMS = {
    CloseReason.ALONE: ("the model does not batch", "dynamic_batching {} in its config"),
    CloseReason.FULL: ("requests are too large to share a batch", "max_batch_size up"),
    CloseReason.PREFERRED: ("batches leave at a preferred size", "a larger preferred_batch_size, or none"),
    CloseReason.DIFFERS: (
        "requests of different shapes, or optional inputs, do not share a batch",
        "padding by the clients, or allow_ragged_batch",
    ),
    CloseReason.DELAY: (
        "batches wait for requests that do not come",
        "max_queue_delay_microseconds down, or a preferred_batch_size of what comes together",
    ),
    CloseReason.IDLE: ("free instances take what is there", "max_queue_delay_microseconds up"),
}


def _batching_claim(figures: BatchFigures, delayed: float, unformed: float) -> TimeClaim:
    symptom, turn = _SYMPTOMS[figures.reason]
    if figures.asked_one_by_one:
        symptom = "clients ask one at a time"
        turn = "clients that ask side by side, or larger requests"
        if delayed:
            symptom, turn = f"{symptom}, and batches wait for others", f"max_queue_delay_microseconds 0, or {turn}"
    elif figures.reason is CloseReason.DELAY and figures.size < figures.there / 2:
        symptom, turn = "batches leave before others come", "max_queue_delay_microseconds up"
    why = (
        f"{figures.size:.1f} of {figures.most:.0f} items in a batch ({figures.reason.value}), "
        f"{figures.in_flight:.1f} requests in flight, {delayed:.2f} s waited for others to join"
    )
    return TimeClaim(Cause.BATCHING, delayed + unformed, symptom, why, turn, _evidence(figures, delayed))


def _queue_claim(interval: ModelInterval, figures: BatchFigures, seconds: float) -> TimeClaim:
    pending = interval.gauge("nv_inference_pending_request_count")
    why = f"{pending:.0f} wait, {figures}"
    symptom = "requests wait for a free instance"
    turn = "instance_group.count up" + (", or max_batch_size" if figures.reason is CloseReason.FULL else "")
    if sequences := interval.gauge("charonia_sequences_waiting"):
        symptom, why = "sequences wait for a slot", f"{sequences:.0f} of them, {why}"
        turn = "max_candidate_sequences or max_batch_size up, or instance_group.count"
    if limited := interval.whole.gauge("charonia_resource_waiting"):
        turn += f"; --rate-limit-resource, for which {limited:.0f} instances wait"
    return TimeClaim(Cause.QUEUE, seconds, symptom, why, turn, _evidence(figures) | {"waiting": pending})


def _computation_claim(figures: BatchFigures, seconds: float) -> TimeClaim:
    why = f"{figures}, {figures.size:.1f} items in a batch"
    turn = "a faster runtime: its threads, a GPU, or a smaller model"
    return TimeClaim(Cause.COMPUTATION, seconds, "requests are executed", why, turn, _evidence(figures))


def _evidence(figures: BatchFigures, delayed: float = 0.0) -> dict[str, float]:
    return {
        "batch_size": figures.size,
        "max_batch_size": figures.most,
        "in_flight": figures.in_flight,
        "busy": figures.busy,
        "delayed_seconds": delayed,
    }
