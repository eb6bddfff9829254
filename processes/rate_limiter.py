"""Resources that instances of models take turns at, after Triton's rate limiter.

See https://github.com/triton-inference-server/server/blob/main/docs/user_guide/rate_limiter.md. An instance that
executes holds what its group's `rate_limiter` names. Of those that wait, the one that ran least often for its priority
comes first, and nobody that needs what it lacks passes it: so nobody waits forever.
"""

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ..core.errors import InvalidArgument
from ..core.metrics import Measurement, Reading
from ..core.runtime import InstanceRate, Resource


def parse_resource_limits(flags: Iterable[str]) -> dict[Resource, int]:
    """Limits from `<name>:<count>[:<device>]`; without a device it is that of each device, and of the whole server. The
    host is device 0, as in tritonserver.

    Raises `InvalidArgument` for another form."""
    limits = {}
    for flag in flags:
        name, *numbers = flag.split(":")
        if not name or len(numbers) not in (1, 2) or not all(number.isdecimal() for number in numbers):
            raise InvalidArgument(f"--rate-limit-resource must be <name>:<count>[:<device>], got '{flag}'")
        count, *device = map(int, numbers)
        limits[Resource(name.lower(), device[0] if device else None)] = count
    return limits


class RateLimiter:
    """The resources of one server. `limits`: as `parse_resource_limits` reads them; of others there is as much as one
    instance asks at most. Any thread may call it."""

    def __init__(self, limits: Mapping[Resource, int]) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._claims: list[InstanceClaim] = []
        self._waiting: list[InstanceClaim] = []
        self._used: dict[Resource, int] = {}
        self._now = 0.0

    def claim(self, rate: InstanceRate) -> "InstanceClaim":
        """The turns of one instance.

        Raises:
            InvalidArgument: it asks for more than there may ever be, or for a resource of the server that others have
                on devices.
        """
        with self._lock:
            for resource, count in rate.resources:
                self._check(resource, count)
            claim = InstanceClaim(self, rate)
            self._claims.append(claim)
            return claim

    def _check(self, resource: Resource, count: int) -> None:
        known = {other for claim in self._claims for other, _ in claim.rate.resources if other.name == resource.name}
        if any((other.device is None) != (resource.device is None) for other in known):
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
        """As in tritonserver: of a resource of the server the device that a flag names is ignored; of one that flags
        limit on other devices alone there is nothing on this one."""
        limits = {limited.device: count for limited, count in self._limits.items() if limited.name == resource.name}
        if not limits:
            return None
        if resource.device is None:
            return next(iter(limits.values()))
        return limits.get(resource.device, limits.get(None, 0))

    def _limit(self, resource: Resource) -> int:
        given = self._given_limit(resource)
        asked = (count for claim in self._claims for each, count in claim.rate.resources if each == resource)
        # Who asked for most may be gone while others hold as much together.
        return max(*asked, self._used.get(resource, 0), 0) if given is None else given

    def _grant(self) -> None:
        """Give turns to those that wait and have room. Needs the lock."""
        kept = set[Resource]()  # for those that come first and still lack something
        for claim in sorted(self._waiting, key=lambda claim: claim.turn):
            resources = claim.rate.resources
            fits = all(self._used.get(each, 0) + count <= self._limit(each) for each, count in resources)
            if fits and kept.isdisjoint(each for each, _ in resources):
                self._waiting.remove(claim)
                for each, count in resources:
                    self._used[each] = self._used.get(each, 0) + count
                self._now = max(self._now, claim.turn)
                claim.hold()
            else:
                kept |= {each for each, _ in resources}

    def ask(self, claim: "InstanceClaim") -> None:
        """Let a claim give back what it holds, and wait for its next turn, which may be now: `granted` is set then."""
        with self._lock:
            self._give_back(claim)
            if not claim.closed:
                claim.granted.clear()
                claim.turn = max(claim.turn, self._now)  # who had no work saves nothing up
                self._waiting.append(claim)
            self._grant()

    def release(self, claim: "InstanceClaim") -> None:
        """See `InstanceClaim.release`."""
        with self._lock:
            self._give_back(claim)
            self._grant()

    def close(self, claim: "InstanceClaim") -> None:
        """See `InstanceClaim.close`."""
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
            for each, count in claim.rate.resources:
                self._used[each] -= count
            if claim.closed:
                self._claims.remove(claim)

    def measure(self) -> Iterator[Measurement]:
        """The resources, at a scrape."""
        with self._lock:
            known = sorted({each for claim in self._claims for each, _ in claim.rate.resources}, key=str)
            waiting = Counter(each for claim in self._waiting for each, _ in claim.rate.resources)
            states = [(each, self._limit(each), self._used.get(each, 0), waiting[each]) for each in known]
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
                for each, count in claim.rate.resources if claim.held else ():
                    used[each] += count
            assert used == self._used
            assert all(count <= self._limit(each) for each, count in used.items() if count)
            assert all(not claim.held and not claim.closed for claim in self._waiting)


class InstanceClaim:
    """The turns of one instance, whose thread takes one for each execution. `turn`: its place among those that wait;
    `granted`: it holds its resources, or was closed."""

    def __init__(self, limiter: RateLimiter, rate: InstanceRate) -> None:
        self.rate = rate
        self.turn = 0.0
        self.held = self.closed = False
        self.granted = threading.Event()
        self._limiter = limiter

    def acquire(self) -> bool:
        """Give back what it holds, and wait for its turn. False: it was closed meanwhile."""
        self._limiter.ask(self)
        self.granted.wait()
        return not self.closed

    def release(self) -> None:
        """Give back what it holds, if anything."""
        self._limiter.release(self)

    def close(self) -> None:
        """Wait no more, and ask for nothing any more; what it holds stays until it is given back, for an execution
        goes on with it. From any thread."""
        self._limiter.close(self)

    def hold(self) -> None:
        """Called by the limiter when it is its turn."""
        self.held = True
        self.turn += self.rate.priority
        self.granted.set()


def read_rate(group: Mapping[str, object], device: int) -> InstanceRate | None:
    """What an instance on that device asks, as its `instance_group` says; None if that is nothing."""
    given = group.get("rate_limiter")
    if not isinstance(given, Mapping):
        return None
    resources: dict[Resource, int] = {}
    entries: Sequence[Mapping[str, object]] = given.get("resources") or ()
    for each in entries:
        resource = Resource(str(each.get("name", "")).lower(), None if each.get("global") else device)
        resources[resource] = resources.get(resource, 0) + int(str(each.get("count") or 1))
    return InstanceRate(tuple(resources.items()), int(given.get("priority") or 1))
