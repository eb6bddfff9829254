"""Resources that instances of models take turns at, after Triton's rate limiter. The waiting instance with the fewest
executions for its priority comes first, and none that needs the same resources passes it.

Source: https://github.com/triton-inference-server/server/blob/main/docs/user_guide/rate_limiter.md.
"""

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ..core.errors import InvalidArgument
from ..core.metrics import Measurement, Reading
from ..core.runtime import InstanceRate, Resource


def parse_resource_limits(flags: Iterable[str]) -> dict[Resource, int]:
    """Limits from `<name>:<count>[:<device>]`; without a device, of each device and of the whole server. The host is
    device 0, as in tritonserver. Raises `InvalidArgument` for another form."""
    limits = {}
    for flag in flags:
        name, *numbers = flag.split(":")
        if not name or len(numbers) not in (1, 2) or not all(number.isdecimal() for number in numbers):
            raise InvalidArgument(f"--rate-limit-resource must be <name>:<count>[:<device>], got '{flag}'")
        count, *device = map(int, numbers)
        limits[Resource(name.lower(), device[0] if device else None)] = count
    return limits


class RateLimiter:
    """The resources of one server, for any thread. A resource without a limit has as much as one instance asks at
    most."""

    def __init__(self, limits: Mapping[Resource, int]) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._claims: list[InstanceClaim] = []
        self._waiting: list[InstanceClaim] = []
        self._used: dict[Resource, int] = {}
        self._now = 0.0

    def claim(self, rate: InstanceRate) -> "InstanceClaim":
        """Register one instance.

        Raises:
            InvalidArgument: it asks for more than there may be, or globally for a resource that others use by device.
        """
        with self._lock:
            for resource, count in rate.resources:
                self._check(resource, count)
            claim = InstanceClaim(self, rate)
            self._claims.append(claim)
            return claim

    def _check(self, resource: Resource, count: int) -> None:
        resources = {
            resource_in_use
            for claim in self._claims
            for resource_in_use, _ in claim.rate.resources
            if resource_in_use.name == resource.name
        }
        if any((resource_in_use.device is None) != (resource.device is None) for resource_in_use in resources):
            raise InvalidArgument(
                f'Resource "{resource.name}" is present as both global and device-specific resource in the model '
                "configuration.",
                field="instance_group.rate_limiter",
            )
        limit = self._given_limit(resource)
        if limit is not None and count > limit:
            raise InvalidArgument(
                f'Resource count for "{resource.name}" is limited to {limit} which will prevent scheduling of one or '
                f"more model instances, the minimum required count is {count}",
                field="instance_group.rate_limiter",
            )

    def _given_limit(self, resource: Resource) -> int | None:
        """The configured limit, as in tritonserver: the device is ignored for a global resource; a resource that is
        limited on other devices only is absent on this one."""
        limits = {limited.device: count for limited, count in self._limits.items() if limited.name == resource.name}
        if not limits:
            return None
        if resource.device is None:
            return next(iter(limits.values()))
        return limits.get(resource.device, limits.get(None, 0))

    def _limit(self, resource: Resource) -> int:
        configured = self._given_limit(resource)
        counts = (count for claim in self._claims for requested, count in claim.rate.resources if requested == resource)
        # Who asked for most may be gone while others hold as much together.
        return max(*counts, self._used.get(resource, 0), 0) if configured is None else configured

    def _grant(self) -> None:
        """Give turns to waiting claims that fit. Needs the lock."""
        reserved = set[Resource]()  # for those that come first and still lack something
        for claim in sorted(self._waiting, key=lambda claim: claim.turn):
            resources = claim.rate.resources
            fits = all(self._used.get(resource, 0) + count <= self._limit(resource) for resource, count in resources)
            if fits and reserved.isdisjoint(resource for resource, _ in resources):
                self._waiting.remove(claim)
                for resource, count in resources:
                    self._used[resource] = self._used.get(resource, 0) + count
                self._now = max(self._now, claim.turn)
                claim.hold()
            else:
                reserved |= {resource for resource, _ in resources}

    def ask(self, claim: "InstanceClaim") -> None:
        """Return what a claim holds, and queue it for its next turn, which may be now: `granted` is set then."""
        with self._lock:
            self._give_back(claim)
            if not claim.closed:
                claim.granted.clear()
                claim.turn = max(claim.turn, self._now)  # who had no work saves nothing up
                self._waiting.append(claim)
            self._grant()

    def release(self, claim: "InstanceClaim") -> None:
        with self._lock:
            self._give_back(claim)
            self._grant()

    def close(self, claim: "InstanceClaim") -> None:
        with self._lock:
            if claim.closed:
                return
            claim.closed = True
            if claim in self._waiting:
                self._waiting.remove(claim)
            if not claim.held:
                self._claims.remove(claim)
            claim.granted.set()
            self._grant()

    def _give_back(self, claim: "InstanceClaim") -> None:
        if claim.held:
            claim.held = False
            for resource, count in claim.rate.resources:
                self._used[resource] -= count
            if claim.closed:
                self._claims.remove(claim)

    def measure(self) -> Iterator[Measurement]:
        with self._lock:
            resources = sorted({resource for claim in self._claims for resource, _ in claim.rate.resources}, key=str)
            waiting = Counter(resource for claim in self._waiting for resource, _ in claim.rate.resources)
            states = [
                (resource, self._limit(resource), self._used.get(resource, 0), waiting[resource])
                for resource in resources
            ]
        for resource, limit, used, asking in states:
            readings = (
                Reading("charonia_resource_limit", limit),
                Reading("charonia_resource_used", used),
                Reading("charonia_resource_waiting", asking),
            )
            yield Measurement({"resource": resource.name, "device": resource.place}, readings)

    def check_integrity(self) -> None:
        """For tests. Raises `AssertionError` if more is used than there is, or counts are wrong."""
        with self._lock:
            used = dict.fromkeys(self._used, 0)
            for claim in self._claims:
                for resource, count in claim.rate.resources if claim.held else ():
                    used[resource] += count
            assert used == self._used
            assert all(count <= self._limit(resource) for resource, count in used.items() if count)
            assert all(not claim.held and not claim.closed for claim in self._waiting)


class InstanceClaim:
    """The turns of one instance, whose thread takes one for each execution."""

    def __init__(self, limiter: RateLimiter, rate: InstanceRate) -> None:
        self.rate = rate
        self.turn = 0.0
        self.held = self.closed = False
        self.granted = threading.Event()
        self._limiter = limiter

    def acquire(self) -> bool:
        """Return what it holds, and wait for its turn. False if it was closed meanwhile."""
        self._limiter.ask(self)
        self.granted.wait()
        return not self.closed

    def release(self) -> None:
        self._limiter.release(self)

    def close(self) -> None:
        """Stop waiting, and take no more turns; a running execution keeps what it holds until it is released. From any
        thread."""
        self._limiter.close(self)

    def hold(self) -> None:
        """Called by the limiter when it is its turn."""
        self.held = True
        self.turn += self.rate.priority
        self.granted.set()


def read_rate(group: Mapping[str, object], device: int) -> InstanceRate | None:
    """The rate of an instance on that device, by its `instance_group`; None if it has no limiter."""
    rate_limiter = group.get("rate_limiter")
    if not isinstance(rate_limiter, Mapping):
        return None
    resources: dict[Resource, int] = {}
    entries: Sequence[Mapping[str, object]] = rate_limiter.get("resources") or ()
    for entry in entries:
        resource = Resource(str(entry.get("name", "")).lower(), None if entry.get("global") else device)
        resources[resource] = resources.get(resource, 0) + int(str(entry.get("count") or 1))
    return InstanceRate(tuple(resources.items()), int(rate_limiter.get("priority") or 1))
