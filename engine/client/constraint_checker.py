"""Checks the constraints of requests before an engine gets them: each content once, in a process that may be killed, so
that a hostile constraint harms that process alone.

Knows nothing of grammars.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from typing import NamedTuple, TypeAlias

import msgspec

from ...core.errors import CharoniaError, Internal, InvalidArgument, QueueFull, Unavailable
from ...core.request import GuidedDecoding
from ...processes.limited_process import Answer, CallLimits, CallLost, LimitedProcess, TimeLimitExceeded
from ..grammars.backend import LIMITS
from ..grammars.constraint_check import CheckedConstraint, check_constraint, checking_backend


class CheckLimits(NamedTuple):
    seconds: float = 5.0
    memory: int = 512 << 20
    """In bytes, beside the process's own."""
    total: float = 10.0
    """Seconds from its arrival to the answer, its tenant's pause and the start of a process included."""


CHECK_LIMITS = CheckLimits()


def check_in_process(
    process: LimitedProcess, constraint: GuidedDecoding, limits: CheckLimits, deadline: float
) -> CheckedConstraint:
    """The verdict of a process on a constraint. Unless it is `alive` afterwards, the constraint cost it its life.

    Raises:
        QueueFull: there was too little time until the `deadline` by `time.monotonic`.
        Unavailable: the process did not start.
    """
    try:
        if not process.wait_until_ready(deadline - time.monotonic()):
            raise too_late(limits)
    except CallLost as error:
        raise Unavailable(f"the process that checks constraints did not start: {error}") from error
    seconds = min(limits.seconds, deadline - time.monotonic())
    try:
        answer = process.call(msgspec.msgpack.encode(constraint), CallLimits(seconds, limits.memory))
    except TimeLimitExceeded as error:
        if seconds < limits.seconds:
            raise too_late(limits) from None
        return CheckedConstraint(error=f"compiling it takes {error}")
    except CallLost as error:
        return CheckedConstraint(error=f"compiling it takes too much memory, or breaks the library ({error})")
    return msgspec.msgpack.decode(answer, type=CheckedConstraint)


def too_late(limits: CheckLimits) -> QueueFull:
    """The error for a constraint that others left no time for."""
    message = f"there was no time to compile a constraint within {limits.total:g} s: others take it"
    return QueueFull(message, retry_after=limits.seconds)


def _make_answer(special: Mapping[str, int]) -> Answer:
    backend = checking_backend(special)

    def answer(message: bytes) -> bytes:
        constraint = msgspec.msgpack.decode(message, type=GuidedDecoding)
        return msgspec.msgpack.encode(check_constraint(constraint, backend))

    return answer


_PROCESSES = 2
"""Constraints that are checked at a time; the second process starts when the first one is busy."""
_MAX_WAITING = 32
_IDLE_SECONDS = 300.0
_RETRY_SECONDS = 60.0
"""How long a constraint that cost a process is refused without another try: the machine may have been busy."""
_CACHE_BYTES = 8 << 20
_ENTRY_BYTES = 512
_PAUSE_TIMES, _SHORTEST_PAUSE, _LONGEST_PAUSE = 20, 0.3, 2.0
"""A tenant whose constraint was refused pauses so many times as long as checking it took, between so many seconds: bad
constraints alone get a twentieth of a core and three answers a second."""
_MAX_PAUSES, _MAX_PAUSING = 1024, 8
_ANY_OBJECT = '{"type":"object"}'

Verdict: TypeAlias = CheckedConstraint | CharoniaError


class EnforcedConstraint(NamedTuple):
    """A constraint as an engine gets it, and descriptions of what is not enforced."""

    constraint: GuidedDecoding
    left_out: tuple[str, ...] = ()


class VerdictCache:
    """The latest verdicts by content, of `limit` bytes together; an entry may expire."""

    def __init__(self, limit: int = _CACHE_BYTES) -> None:
        self._limit = limit
        self._entries: OrderedDict[bytes, tuple[CheckedConstraint, float]] = OrderedDict()
        self.bytes = 0

    def get(self, key: bytes) -> CheckedConstraint | None:
        if key not in self._entries:
            return None
        verdict, ends = self._entries[key]
        if ends <= time.monotonic():
            self._remove(key)
            return None
        self._entries.move_to_end(key)
        return verdict

    def put(self, key: bytes, verdict: CheckedConstraint, seconds: float = float("inf")) -> None:
        if key in self._entries:
            self._remove(key)
        self._entries[key] = verdict, time.monotonic() + seconds
        self.bytes += _size(verdict)
        while self.bytes > self._limit:
            self._remove(next(iter(self._entries)))

    def check_integrity(self) -> None:
        assert self.bytes == sum(_size(verdict) for verdict, _ in self._entries.values()) <= self._limit

    def _remove(self, key: bytes) -> None:
        verdict, _ = self._entries.pop(key)
        self.bytes -= _size(verdict)


def _size(verdict: CheckedConstraint) -> int:
    return _ENTRY_BYTES + sum(map(len, (verdict.text, verdict.error, *verdict.left_out)))


@dataclass(slots=True)
class _Pause:
    """A tenant's pause: its end by `time.monotonic`, and how many constraints wait for it."""

    until: float = 0.0
    waiting: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class RefusalPauses:
    """The pauses of tenants whose latest constraint was refused; the oldest are forgotten."""

    def __init__(self) -> None:
        self._of: OrderedDict[str, _Pause] = OrderedDict()

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """The block in which a tenant's constraint is checked: after a refusal one at a time, when the pause has ended.
        Raises `QueueFull` where many wait for that."""
        pause = self._of.get(tenant)
        if pause is None:
            yield
            return
        if pause.waiting >= _MAX_PAUSING:
            message = f"{pause.waiting} constraints wait already, after one that was refused"
            raise QueueFull(message, retry_after=_LONGEST_PAUSE)
        pause.waiting += 1
        try:
            async with pause.lock:
                await asyncio.sleep(pause.until - time.monotonic())
                yield
        finally:
            pause.waiting -= 1

    def observe(self, tenant: str, refused: bool, seconds: float) -> None:
        """Record how long checking a constraint of the tenant took, and whether it was refused."""
        pause = self._of.pop(tenant, None)
        if refused:
            pause = self._of[tenant] = pause or _Pause()
            pause.until = time.monotonic() + min(max(_PAUSE_TIMES * seconds, _SHORTEST_PAUSE), _LONGEST_PAUSE)
        elif pause is not None:
            pause.until = 0.0
        if len(self._of) > _MAX_PAUSES:
            self._of.popitem(last=False)


class ConstraintChecker:
    """Checks the constraints of one model's requests, in one event loop, until `close`. `special`: the model's special
    tokens, which a grammar may name.

    Processes start with the first constraint and end after idle time. Refusals have a cache of their own, so that they
    evict no good constraint.
    """

    def __init__(self, special: Mapping[str, int], limits: CheckLimits = CHECK_LIMITS) -> None:
        self._special, self._limits = special, limits
        self._threads = ThreadPoolExecutor(_PROCESSES, "constraints")
        self._processes: set[LimitedProcess] = set()
        self._idle: list[LimitedProcess] = []
        self._checks: dict[bytes, asyncio.Task[Verdict]] = {}
        self._good, self._refused = VerdictCache(), VerdictCache()
        self._pauses = RefusalPauses()
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def processes(self) -> int:
        """How many processes run."""
        return len(self._processes)

    async def check(self, constraint: GuidedDecoding, tenant: str = "") -> EnforcedConstraint:
        """The constraint as an engine gets it. A known one does not wait for the `tenant`'s pause.

        Raises:
            InvalidArgument: it is wrong, or costs too much; in the words of the library.
            QueueFull: too many are checked already.
            Unavailable: no process can check it.
        """
        if constraint.kind == "json":
            return EnforcedConstraint(constraint._replace(kind="json_schema", text=_ANY_OBJECT))
        key = _content_key(constraint)
        verdict: Verdict | None = self._good.get(key) or self._refused.get(key)
        if verdict is None:
            verdict = await asyncio.shield(self._checks.get(key) or self._begin(key, constraint, tenant))
        if isinstance(verdict, CharoniaError):
            raise verdict
        if verdict.error:
            raise InvalidArgument(f"{constraint.parameter}: {verdict.error}", field=constraint.parameter)
        return EnforcedConstraint(constraint._replace(text=verdict.text), verdict.left_out)

    def _begin(self, key: bytes, constraint: GuidedDecoding, tenant: str) -> "asyncio.Task[Verdict]":
        if self._closed:
            raise Unavailable("the model is being unloaded")
        if len(self._checks) >= _MAX_WAITING:
            message = f"{len(self._checks)} constraints wait to be compiled already"
            raise QueueFull(message, retry_after=self._limits.seconds)
        # A task of its own: others may wait for it too, and the answer is kept when nobody does any more.
        task = self._checks[key] = asyncio.create_task(self._run(key, constraint, tenant))
        return task

    async def _run(self, key: bytes, constraint: GuidedDecoding, tenant: str) -> Verdict:
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        deadline = time.monotonic() + self._limits.total
        try:
            async with asyncio.timeout(self._limits.total) as waiting, self._pauses.turn(tenant):
                waiting.reschedule(None)
                began = time.monotonic()
                # Threads take them in the order of their deadlines: none waits there for longer than its own.
                verdict, lasting = await loop.run_in_executor(
                    self._threads, self._check_in_process, constraint, deadline
                )
                self._pauses.observe(tenant, bool(verdict.error), time.monotonic() - began)
        except TimeoutError:
            return too_late(self._limits)
        except CharoniaError as error:
            return error
        except Exception as error:
            return Internal(f"checking a constraint failed: {error}")
        finally:
            del self._checks[key]
            if not self._closed and not self._checks:
                self._timer = loop.call_later(_IDLE_SECONDS, self.end_idle)
        if self._closed:
            return Unavailable("the model is being unloaded")
        (self._refused if verdict.error else self._good).put(key, verdict, float("inf") if lasting else _RETRY_SECONDS)
        return verdict

    def _check_in_process(self, constraint: GuidedDecoding, deadline: float) -> tuple[CheckedConstraint, bool]:
        """The verdict, and whether it is final. Runs in a thread of the pool, which has as many as there may be
        processes. Raises as `check_in_process`."""
        if self._closed:
            raise Unavailable("the model is being unloaded")
        if time.monotonic() >= deadline:
            raise too_late(self._limits)
        process = self._take_idle() or self._start()
        try:
            verdict = check_in_process(process, constraint, self._limits, deadline)
        finally:
            if process.alive:
                self._idle.append(process)
            else:
                self._processes.discard(process)
        return verdict, process.alive

    def _take_idle(self) -> LimitedProcess | None:
        try:
            return self._idle.pop()  # not asked first: another thread may take the last one in between
        except IndexError:
            return None

    def _start(self) -> LimitedProcess:
        try:
            process = LimitedProcess("charonia-guides", _make_answer, dict(self._special))
        except CallLost as error:
            raise Unavailable(f"constraints cannot be checked: {error}") from error
        self._processes.add(process)
        if self._closed:  # meanwhile
            process.kill()
        return process

    def end_idle(self) -> None:
        while (process := self._take_idle()) is not None:
            self._processes.discard(process)
            self._threads.submit(process.close, 1.0)

    async def close(self) -> None:
        """End all processes; waiting callers get `Unavailable`."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for process in list(self._processes):
            process.kill()
        await asyncio.gather(*self._checks.values())
        self.end_idle()
        await asyncio.to_thread(self._threads.shutdown)


def _content_key(constraint: GuidedDecoding) -> bytes:
    """The key under which a verdict is kept. Raises `InvalidArgument` for a text that is too long or not Unicode."""
    if len(constraint.text) > LIMITS.text_bytes:
        message = f"{constraint.parameter} has {len(constraint.text)} characters, and may have {LIMITS.text_bytes}"
        raise InvalidArgument(message, field=constraint.parameter)
    try:
        return sha256(repr(constraint._replace(text="", parameter="")).encode() + constraint.text.encode()).digest()
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"{constraint.parameter} is not valid Unicode", field=constraint.parameter) from error
