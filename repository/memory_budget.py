"""The memory that models share, the host's and each GPU's: what each has reserved, and whether one more fits.

A model states its bytes before it loads. Host memory that it was promised counts as taken, touched or not: the kernel
would call it free. On a GPU what a load made unavailable is what the model holds.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType

from ..core.errors import Unavailable
from ..core.metrics import Measurement, Reading
from ..core.model import MemoryHolder, MemoryNeed
from ..processes.host import available_memory
from ..telemetry.host_metrics import Gpus, usable_gpus

_HOLDERS_SHOWN = 3


class InsufficientMemory(Unavailable):
    """`memory` has less left than a model needs; `missing`: by so many bytes."""

    def __init__(self, message: str, memory: "DeviceMemory", missing: int) -> None:
        super().__init__(message)
        self.memory, self.missing = memory, missing


class DeviceMemory:
    """The memory of the host, or of one GPU (`gpu` is its number, None for the host).

    `free`: bytes that are free now by the actual use of processes. `limit`: bytes that models may hold of it together,
    None for no limit.
    """

    def __init__(self, free: Callable[[], int], limit: int | None = None, gpu: int | None = None) -> None:
        self.free = free
        self.gpu = gpu
        self._limit = limit
        self.reservations: list[DeviceReservation] = []

    @property
    def reserved(self) -> int:
        return sum(claim.reserved for claim in self.reservations)

    @property
    def available(self) -> int:
        """Bytes that further models may reserve; at least 0."""
        free = self.free() - sum(claim.outstanding for claim in self.reservations)
        return max(0, free if self._limit is None else min(free, self._limit - self.reserved))

    def reserve(self, name: str, version: str, size: int, granted: int) -> "DeviceReservation":
        """Reserve `size` bytes for a model that may take `granted` while it loads. Raises `InsufficientMemory` if they
        are not free; the message names the largest holders."""
        left = self.available
        if size > left:
            limit = "" if self._limit is None else f" of {format_bytes(self._limit)}"
            memory = "memory" if self.gpu is None else f"memory of GPU {self.gpu}"
            needs = f"model '{name}' version {version} needs at least {format_bytes(size)} of {memory}"
            largest = sorted(self.reservations, key=lambda claim: -claim.size)[:_HOLDERS_SHOWN]
            holders = ", ".join(str(claim) for claim in largest if claim.size)
            most = f"; most is held by {holders}" if holders else ""
            raise InsufficientMemory(f"{needs} and {format_bytes(left)}{limit} is free{most}", self, size - left)
        claim = DeviceReservation(self, name, version, size, max(size, granted))
        self.reservations.append(claim)
        return claim


class DeviceReservation:
    """One version's part of one memory: the bytes that it stated or, if more, those known once it has loaded. While it
    loads it may take as much as it was granted."""

    def __init__(self, memory: DeviceMemory, name: str, version: str, stated: int, granted: int) -> None:
        self.memory = memory
        self.name = name
        self.version = version
        self._stated_size = stated
        self._granted_size = granted
        self._loading = True
        self._free_before = memory.free()
        self._taken = 0
        self._holder: MemoryHolder | None = None

    @property
    def size(self) -> int:
        known = self._taken if self._holder is None else self._holder.reserved_memory().promised
        return max(self._stated_size, known)

    @property
    def reserved(self) -> int:
        """Bytes that no other model may reserve."""
        return self._granted_size if self._loading else self.size

    @property
    def outstanding(self) -> int:
        """Bytes that were promised and are not taken yet: during the load the whole grant, as it is unknown how much
        of it is taken. A model without a `MemoryHolder` has taken all its bytes once it has loaded."""
        if self._loading and self.memory.gpu is None:
            return self._granted_size
        return 0 if self._holder is None else self._holder.reserved_memory().outstanding

    def finish_loading(self, holder: MemoryHolder | None) -> None:
        """Hold what `holder` tells of the model, or what the model has taken, in place of the grant."""
        self._loading = False
        if self.memory.gpu is not None:
            self._taken = self._free_before - self.memory.free()
        else:
            self._holder = holder

    def __str__(self) -> str:
        return f"'{self.name}' version {self.version} ({format_bytes(self.size)})"


class MemoryReservation:
    """The reservations of one version of a model in every memory."""

    def __init__(self) -> None:
        self.claims: list[DeviceReservation] = []

    def finish_loading(self, holder: MemoryHolder | None) -> None:
        for claim in self.claims:
            claim.finish_loading(holder)

    def release(self) -> None:
        """Give the bytes back. May be called again."""
        while self.claims:
            claim = self.claims.pop()
            claim.memory.reservations.remove(claim)


class MemoryBudget:
    """The host's memory and that of GPUs, by number. A need on a GPU that is not there limits nothing: the backend that
    places the model reports it."""

    def __init__(
        self, host: DeviceMemory | None = None, gpus: Mapping[int, DeviceMemory] = MappingProxyType({})
    ) -> None:
        self.host = host or DeviceMemory(available_memory)
        self._gpus = gpus
        self._memories = (self.host, *gpus.values())

    @classmethod
    def of_machine(
        cls, limit: int | None, gpu_limit: int | None, promised: Callable[[], int] = lambda: 0
    ) -> "MemoryBudget":
        """The budget of this machine. `limit`, `gpu_limit`: bytes that models may hold together of the host's memory,
        and of each GPU's. `promised`: bytes of the host's that are not free though nothing has taken them yet."""
        driver, numbers = Gpus(), usable_gpus()
        gpus = {gpu: DeviceMemory(partial(driver.free, gpu), gpu_limit, gpu) for gpu in numbers}
        return cls(DeviceMemory(lambda: max(0, available_memory() - promised()), limit), gpus)

    def grant(self, needs: Sequence[MemoryNeed], sharers: int) -> dict[str, int]:
        """Bytes for a model that takes what it is granted. `memory`: what it needs of the host's and its share of the
        rest among `sharers`; `gpu_memory`: the least that is left on one of its GPUs, if it needs any."""
        stated = sum(need.size for need in needs if need.gpu is None)
        left = self.host.available
        granted = {"memory": stated + max(0, left - stated) // sharers}
        on_gpus = [memory.available for gpu, memory in self._gpus.items() if any(need.gpu == gpu for need in needs)]
        return {**granted, "gpu_memory": min(on_gpus)} if on_gpus else granted

    def reserve(self, name: str, version: str, needs: Sequence[MemoryNeed], granted: int = 0) -> MemoryReservation:
        """Reserve all needs of a model, or nothing; `granted`: bytes of the host's that it may take while it loads. It
        has a reservation on every GPU, for it may go where it states no need. Raises as `DeviceMemory.reserve` does."""
        reservation = MemoryReservation()
        try:
            for memory in self._memories:
                size = sum(need.size for need in needs if need.gpu == memory.gpu)
                claim = memory.reserve(name, version, size, granted if memory is self.host else 0)
                reservation.claims.append(claim)
        except InsufficientMemory:
            reservation.release()
            raise
        return reservation

    def measurements(self) -> Iterator[Measurement]:
        """The bytes that each version of a model holds, two instances of it added up; of a GPU only if it has some."""
        for memory in self._memories:
            sizes: Counter[tuple[str, str]] = Counter()
            for claim in memory.reservations:
                sizes[claim.name, claim.version] += claim.size
            label = {"memory": "host" if memory.gpu is None else f"gpu{memory.gpu}"}
            for (name, version), size in sizes.items():
                if size or memory is self.host:
                    reading = Reading("charonia_memory_held_bytes", size, label)
                    yield Measurement({"model": name, "version": version}, (reading,))


def format_bytes(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
