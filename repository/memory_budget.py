"""The memory that models share, the host's and each GPU's: what each model has reserved, and whether one more fits.

A model states its bytes before it loads. What it was promised of the host's and has not touched yet, as a language
model its cache, counts as taken: the kernel would call it free. On a GPU models take all while they load, one at a
time, so that what is free no longer when one has loaded is what it holds.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType

from ..core.errors import Unavailable
from ..core.metrics import Measurement, Reading
from ..core.model import MemoryHolder, MemoryNeed
from ..processes.host import available_memory
from ..telemetry.gpus import Gpus, usable_gpus

_HOLDERS_SHOWN = 3


class InsufficientMemory(Unavailable):
    """A memory has not as much left as a model needs."""


class DeviceMemory:
    """The memory of the host, or of one GPU (`gpu` is its number, None for the host).

    `free`: bytes that are free now by what processes really use. `limit`: bytes that models may hold of it together,
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
        there = self.free() - sum(claim.outstanding for claim in self.reservations)
        allowed = there if self._limit is None else min(there, self._limit - self.reserved)
        return max(0, allowed)

    def reserve(self, name: str, version: str, size: int) -> "DeviceReservation":
        """Reserve bytes for a model.

        Raises:
            InsufficientMemory: they are not free; the message names the largest holders.
        """
        left = self.available
        if size > left:
            limit = "" if self._limit is None else f" of {format_bytes(self._limit)}"
            needs = f"model '{name}' version {version} needs at least {format_bytes(size)} of {self}"
            raise InsufficientMemory(f"{needs} and {format_bytes(left)}{limit} is free{self._largest_holders()}")
        claim = DeviceReservation(self, name, version, size)
        self.reservations.append(claim)
        return claim

    def release(self, claim: "DeviceReservation") -> None:
        """May be called again."""
        if claim in self.reservations:
            self.reservations.remove(claim)

    def _largest_holders(self) -> str:
        largest = sorted(self.reservations, key=lambda claim: -claim.size)[:_HOLDERS_SHOWN]
        names = ", ".join(str(claim) for claim in largest if claim.size)
        return f"; most is held by {names}" if names else ""

    @property
    def label(self) -> str:
        return "host" if self.gpu is None else f"gpu{self.gpu}"

    def __str__(self) -> str:
        return "memory" if self.gpu is None else f"memory of GPU {self.gpu}"


class DeviceReservation:
    """What one version of a model has of one memory: what it stated, or what is known of it once it has loaded. While
    it loads it may take more, up to what it was granted."""

    def __init__(self, memory: DeviceMemory, name: str, version: str, stated: int) -> None:
        self.name = name
        self.version = version
        self._memory = memory
        self._stated_size = stated
        self._granted_size = stated
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
        """Promised, and not taken yet. While it loads that is all it was granted: nobody knows how much of it is taken.
        What states its bytes has them all once it has loaded."""
        if self._loading and self._memory.gpu is None:
            return self._granted_size
        return 0 if self._holder is None else self._holder.reserved_memory().outstanding

    def grant(self, size: int) -> None:
        """It may take so much while it loads, and then says what it needs of that."""
        self._granted_size = max(self._stated_size, size)

    def finish_loading(self, model: object) -> None:
        """From now on it speaks for itself, if it can."""
        self._loading = False
        if self._memory.gpu is not None:
            self._taken = self._free_before - self._memory.free()
        elif isinstance(model, MemoryHolder):
            self._holder = model

    def release(self) -> None:
        """Give the bytes back. May be called again."""
        self._memory.release(self)

    def __str__(self) -> str:
        return f"'{self.name}' version {self.version} ({format_bytes(self.size)})"


class MemoryReservation:
    """The reservations of one version of a model in every memory."""

    def __init__(self, claims: Sequence[DeviceReservation]) -> None:
        """The host's memory is the first."""
        self._claims = claims

    def grant(self, size: int) -> None:
        """Of the host's memory: see `DeviceReservation.grant`."""
        self._claims[0].grant(size)

    def finish_loading(self, model: object) -> None:
        for claim in self._claims:
            claim.finish_loading(model)

    def release(self) -> None:
        """May be called again."""
        for claim in self._claims:
            claim.release()


class MemoryBudget:
    """The host's memory and that of GPUs, by their numbers. What is needed of a GPU that is not there limits nothing:
    whoever places the model says so."""

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
        """`limit`, `gpu_limit`: bytes that models may hold together of the host's memory, and of each GPU's. What
        somebody else was `promised` of the host's and has not taken yet is not free."""
        driver, numbers = Gpus(), usable_gpus()
        gpus = {gpu: DeviceMemory(partial(driver.free, gpu), gpu_limit, gpu) for gpu in numbers}
        return cls(DeviceMemory(lambda: max(0, available_memory() - promised()), limit), gpus)

    def available_on(self, gpus: Sequence[int]) -> int | None:
        """Bytes of the memory of each of these `gpus`; None where nothing is known of them."""
        return min((self._gpus[gpu].available for gpu in gpus if gpu in self._gpus), default=None)

    def reserve(self, name: str, version: str, needs: Sequence[MemoryNeed]) -> MemoryReservation:
        """Hold all of it for a model, or nothing. Of every GPU, for it may go where it does not say.

        Raises:
            NoRoom: see `DeviceMemory.claim`.
        """
        claims: list[DeviceReservation] = []
        try:
            for memory in self._memories:
                size = sum(share.size for share in needs if share.gpu == memory.gpu)
                claims.append(memory.reserve(name, version, size))
        except InsufficientMemory:
            MemoryReservation(claims).release()
            raise
        return MemoryReservation(claims)

    def measurements(self) -> Iterator[Measurement]:
        """What each version of a model holds; while it replaces itself, both together. Of a GPU only who has some."""
        for memory in self._memories:
            sizes: Counter[tuple[str, str]] = Counter()
            for claim in memory.reservations:
                sizes[claim.name, claim.version] += claim.size
            for (name, version), size in sizes.items():
                if size or memory is self.host:
                    reading = Reading("charonia_memory_held_bytes", size, {"memory": memory.label})
                    yield Measurement({"model": name, "version": version}, (reading,))


def format_bytes(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
